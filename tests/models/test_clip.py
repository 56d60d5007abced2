"""CLIP on the fly: a tiny network of open_clip with random weights in a file."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import open_clip
import pytest
import torch
from open_clip.transform import image_transform
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.functional import to_pil_image

from tandem.models.features import clip as module
from tandem.models.features.clip import Clip
from tests.models import helpers

SIDE, DIM, TOKENS, TEXT_DIM = 32, 12, 16, 8
TINY: dict[str, Any] = {
    "embed_dim": DIM,
    "vision_cfg": {"image_size": SIDE, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": TOKENS, "vocab_size": 49408, "width": TEXT_DIM, "heads": 2, "layers": 2},
}
TEXTS = ["a red ring", "", "A large blue star, at the top left! " * 9]


def network(config: dict[str, Any] = TINY) -> open_clip.CLIP:
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    kind = open_clip.CustomTextCLIP if config.pop("custom_text", False) else open_clip.CLIP
    made: open_clip.CLIP = kind(**config).eval()
    return made


def write_clip(folder: Path) -> list[str]:
    """Write the tiny CLIP; returns the flags that name it."""
    (folder / "tiny.json").write_text(json.dumps(TINY))
    save_file(network().state_dict(), folder / "tiny.safetensors")
    return ["--clip", str(folder / "tiny.json"), "--clip_weights", str(folder / "tiny.safetensors")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("clip")
    write_clip(path)
    torch.save(network().state_dict(), path / "tiny.pt")
    return path


@pytest.fixture(scope="module")
def clip(folder) -> Clip:
    return Clip.from_file(str(folder / "tiny.json"), folder / "tiny.safetensors")


def pictures(side: int, n: int = 3) -> Tensor:
    """Smooth noise without extremes, which Pillow would cut off between its two passes."""
    noise = torch.rand(n, 3, 6, 6, generator=torch.Generator().manual_seed(side))
    smooth = F.interpolate(noise, size=(side, side), mode="bicubic")
    return (64 + smooth.clamp(0, 1) * 128).round().byte()


def refused(name: str | Path, weights: str | Path | None) -> str:
    return helpers.refused(Clip.from_file, str(name), weights)


def test_image_embeddings_are_those_of_open_clip_for_images_of_any_size(clip):
    transform = image_transform(SIDE, is_train=False)
    for side in (SIDE, 12, 48, 200):
        images = pictures(side)
        theirs = torch.stack([transform(to_pil_image(image)) for image in images])
        # Pillow rounds to 8 bits after each of its two passes; divided by the smallest standard deviation.
        assert (clip.preprocess(images) - theirs).abs().max() <= (1.5 / 255 / 0.26 if side != SIDE else 1e-6)
        expected = network().encode_image(clip.preprocess(images), normalize=True)
        found = clip.embed_images(images)
        assert found.shape == (3, DIM) and found.dtype == torch.float32
        torch.testing.assert_close(found, expected.detach())
        torch.testing.assert_close(found.norm(dim=1), torch.ones(3))
        torch.testing.assert_close(clip.embed_images(images.float() / 255), found)


def test_text_encodings_are_all_tokens_after_the_last_norm_with_zeros_behind_the_end(clip):
    tokens = clip.tokenize(TEXTS)
    assert tokens.shape == (3, TOKENS) and torch.equal(tokens, open_clip.SimpleTokenizer(context_length=TOKENS)(TEXTS))
    embeddings, encodings = clip.embed_text(tokens)
    assert clip.embed_dim == DIM and clip.text_shape == (TOKENS, TEXT_DIM) == encodings.shape[1:]
    reference = network()
    torch.testing.assert_close(embeddings, reference.encode_text(tokens, normalize=True).detach())
    x = reference.token_embedding(tokens) + reference.positional_embedding
    x = reference.ln_final(reference.transformer(x, attn_mask=reference.attn_mask)).detach()
    for row, length in enumerate((5, 2, TOKENS)):
        assert tokens[row, length - 1] == 49407, "the end, also of a text that was cut off"
        torch.testing.assert_close(encodings[row, :length], x[row, :length])
        assert not encodings[row, length:].any() and encodings[row, :length].any(1).all()


def test_it_is_frozen_stays_in_eval_mode_and_leaves_the_random_numbers_alone(folder):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    clip = Clip.from_file(str(folder / "tiny.json"), folder / "tiny.pt")
    assert torch.equal(torch.rand(3), expected)
    clip.train()
    assert not any(module.training for module in clip.modules())
    assert not any(parameter.requires_grad for parameter in clip.parameters())
    weight = torch.ones(DIM, requires_grad=True)
    (clip.embed_images(pictures(20)) * weight).sum().backward()  # no inference tensors: they could not be saved
    assert weight.grad is not None


def test_the_configuration_says_how_images_are_normalised_and_texts_are_cleaned(folder, tmp_path):
    text = {**TINY["text_cfg"], "tokenizer_kwargs": {"clean": "canonicalize"}}
    config = {
        "model_cfg": {**TINY, "text_cfg": text},
        "preprocess_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.5, 0.5]},
    }
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    clip = Clip.from_file(str(tmp_path / "open_clip_config.json"), folder / "tiny.pt")
    white = torch.full((1, 3, SIDE, SIDE), 255, dtype=torch.uint8)
    assert clip.preprocess(white)[0, :, 0, 0].tolist() == [2, 1, 1]
    assert torch.equal(clip.tokenize(["A red, ring!"]), clip.tokenize(["a red ring"]))


@pytest.mark.parametrize("name, tokens", [("ViT-B-32", 77), ("PE-Core-B-16", 32)])
def test_the_tokenizer_is_that_of_the_model(name, tokens, tmp_path):
    """With the tower of another size, so that no large network is built."""
    text = {**open_clip.get_model_config(name)["text_cfg"], "width": TEXT_DIM, "heads": 2, "layers": 1}
    config = {**TINY, "text_cfg": text}
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    torch.save(network(config).state_dict(), tmp_path / "tiny.pt")
    ours = Clip.from_file(str(tmp_path / "tiny.json"), tmp_path / "tiny.pt").tokenize(TEXTS)
    assert ours.shape[1] == tokens and torch.equal(ours, open_clip.get_tokenizer(name)(TEXTS))


def test_weights_and_configurations_that_do_not_fit_are_named(folder, tmp_path):
    assert "give --clip_weights" in refused(folder / "tiny.json", None)
    assert "cannot read" in refused(folder / "tiny.json", tmp_path / "none.pt")
    narrow = {**TINY, "embed_dim": DIM + 1}
    (tmp_path / "narrow.json").write_text(json.dumps(narrow))
    text = refused(tmp_path / "narrow.json", folder / "tiny.pt")
    assert f"{folder}/tiny.pt holds no weights of --clip" in text and "should have shape" in text
    (tmp_path / "few.json").write_text(json.dumps({**TINY, "text_cfg": {**TINY["text_cfg"], "vocab_size": 100}}))
    torch.save(network(json.loads((tmp_path / "few.json").read_text())).state_dict(), tmp_path / "few.pt")
    assert "100 tokens, but its tokenizer 49408" in refused(tmp_path / "few.json", tmp_path / "few.pt")
    for content in ("no json", "[1, 2]", '{"embed_dim": 3}'):
        (tmp_path / "bad.json").write_text(content)
        assert "is no configuration of open_clip" in refused(tmp_path / "bad.json", folder / "tiny.pt")


def test_a_missing_package_says_how_to_install_it(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", None)
    assert 'pip install -e ".[clip]"' in refused(folder / "tiny.json", folder / "tiny.pt")


def test_weights_that_open_clip_knows_are_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_read_configuration", lambda name: (copy.deepcopy(TINY), {}))
    monkeypatch.setattr(module, "_find_published", lambda *given: open_clip.get_pretrained_cfg(*given[:2]))
    monkeypatch.setattr(module, "fetch_from_hub", fetch := Mock(return_value=folder / "tiny.safetensors"))
    model = Clip.from_file("ViT-B-32-quickgelu", None)
    assert fetch.call_args.args[1:3] == ("timm/vit_base_patch32_clip_224.openai", "open_clip_model.safetensors")
    assert model.file == str(folder / "tiny.safetensors")


@pytest.mark.parametrize(("name", "weights", "said"), [
    ("ViT-L-14", None, "the weights openai need the model of another name: give --clip ViT-L-14-quickgelu"),
    ("ViT-H-14", None, "no published weights 'openai' of --clip ViT-H-14: give --clip_weights, a file or one of"),
    ("ViT-L-14-quickgelu", "nowhere.pt", "nowhere.pt: No such file"),
    ("ViT-L-41", "tiny.pt", "'ViT-L-41': did you mean ViT-L-16 or ViT-L-14"),
    ("hf-hub:laion/CLIP", "tiny.pt", "has no model 'hf-hub:laion/CLIP'"),
    ("roberta-ViT-B-32", "tiny.pt", "tokenizer of --clip roberta-ViT-B-32"),
    ("ViT-B-16-SigLIP", "tiny.pt", "tokenizer of --clip ViT-B-16-SigLIP"),
    ("coca_ViT-B-32", "tiny.pt", "--clip coca_ViT-B-32 is no plain CLIP"),
    ("nothing.json", "tiny.pt", "nothing.json: No such file"),
])  # fmt: skip
def test_what_cannot_be_meant_is_named_before_anything_is_fetched(
    name: str, weights: str | None, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(module, "fetch_from_hub", None)
    assert said in refused(name, weights)
