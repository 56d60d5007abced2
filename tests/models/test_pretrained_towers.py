"""Towers with the weights of published encoders, against the libraries that publish these."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models import MuLaN
from models.attention import layers_read
from models.fbank import Fbank
from models.files.towers import Tower, read_audio_tower, read_text_tower
from models.pretrained_towers import PretrainedAudioTower, PretrainedTextTower
from tests.models.helpers import assert_same_bits, one_line_of
from tests.models.towers import FEATURES, VOCABULARY, audio_folder, open_clip_file, text_folder

KINDS = ["clip", "clip_text_model", "bert", "roberta"]
LENGTHS = torch.tensor([9, 4, 1, 12])


def some_tokens() -> Tensor:
    """(4, 12), of which LENGTHS count; a text ends with the last token of the vocabulary, as CLIP's do. What does not
    count is no token at all."""
    tokens = torch.randint(2, VOCABULARY - 1, (4, 12), generator=torch.Generator().manual_seed(0))
    for row, length in enumerate(LENGTHS):
        tokens[row, length - 1], tokens[row, length:] = VOCABULARY - 1, -1
    return tokens


def text_tower(tower: Tower, below: int = 0, frozen: bool = False, recompute: bool = False) -> PretrainedTextTower:
    torch.manual_seed(1)
    module = PretrainedTextTower(tower.config, below, recompute, "last", frozen)
    module.take_weights(tower.weights)
    return module


def mulan(**arguments: Any) -> MuLaN:
    torch.manual_seed(0)
    sizes = {"audio_dim": 16, "audio_depth": 2, "text_dim": 12, "text_depth": 2, "heads": 2, "dim_head": 4}
    return MuLaN(**{**sizes, "clip_seconds": 0.5, "vocab_size": 40, "max_text_tokens": 10, "dim_latent": 6,
                    **arguments})  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_tower_of_transformers_gives_the_features_of_its_library(kind: str, tmp_path: Path) -> None:
    theirs = text_folder(tmp_path, kind)
    tower = text_tower(read_text_tower(tmp_path), below=1)
    tokens = some_tokens()
    shown = torch.arange(12) < LENGTHS[:, None]
    with torch.no_grad():
        out = theirs(input_ids=tokens.where(shown, 1), attention_mask=shown.long(), output_hidden_states=True)
        ours = tower(tokens, LENGTHS)
    place = LENGTHS - 1 if "clip" in kind else torch.zeros(4, dtype=torch.int64)
    expected = out.last_hidden_state[torch.arange(4), place]
    below = tower.norms[0](out.hidden_states[-2][torch.arange(4), place])
    torch.testing.assert_close(ours, torch.stack([expected, below], dim=1), atol=1e-5, rtol=1e-5)
    assert expected.std(dim=0).min() > 1e-3, "the texts are all the same"


@pytest.mark.parametrize("quick_gelu", [False, True])
@pytest.mark.parametrize("form", ["file", "custom", "training", "folder"])
def test_a_text_tower_of_open_clip_gives_what_its_library_projects(form: str, quick_gelu: bool, tmp_path: Path) -> None:
    path = tmp_path / "open_clip_pytorch_model.bin"
    theirs = open_clip_file(path, custom=form == "custom", quick_gelu=quick_gelu, config=form == "folder")
    if form == "training":
        torch.save({"epoch": 3, "state_dict": {f"module.{n}": w for n, w in theirs.state_dict().items()}}, path)
    tower = text_tower(read_text_tower(tmp_path if form == "folder" else path, quick_gelu and form != "folder"))
    assert tower.layers[0].heads == (4 if form == "folder" else 2)
    tokens = some_tokens()
    with torch.no_grad():
        expected = theirs.encode_text(tokens.where(torch.arange(12) < LENGTHS[:, None], 0))
        projection = (theirs.text if form == "custom" else theirs).text_projection
        torch.testing.assert_close(tower(tokens, LENGTHS)[:, 0] @ projection, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("kind", ["ASTModel", "ASTForAudioClassification"])
def test_an_audio_tower_gives_the_features_of_transformers_from_the_waveform_on(kind: str, tmp_path: Path) -> None:
    theirs, extractor = audio_folder(tmp_path, kind, mean=-3.0, std=2.5)
    config, weights = read_audio_tower(tmp_path)
    tower = PretrainedAudioTower(config, 1, False, "last", False)
    tower.take_weights(weights)
    for samples in (9000, 4000, 12000):  # 54 frames; 23, which are padded; 73, which are cut off
        waveforms = np.random.default_rng(samples).normal(size=(2, samples)).astype(np.float32) * 0.1
        inputs = extractor(list(waveforms), sampling_rate=16000, return_tensors="pt")
        with torch.no_grad():
            out = theirs(**inputs, output_hidden_states=True)
            ours = tower(Fbank(config)(torch.from_numpy(waveforms)))
        below = tower.norms[0](out.hidden_states[-2][:, :2].mean(dim=1))
        torch.testing.assert_close(ours, torch.stack([out.pooler_output, below], dim=1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("features", [{}, {"do_normalize": False}, {"num_mel_bins": 128, "max_length": 1024}])
def test_the_filter_bank_is_that_of_transformers_feature_extractor(features: dict[str, Any]) -> None:
    """Which computes in fp64 without torchaudio. In fp32, the softest of the bands differ by less than 1e-3."""
    transformers = pytest.importorskip("transformers")
    extractor = transformers.ASTFeatureExtractor(**{**FEATURES, **features})
    config = {"bands": extractor.num_mel_bins, "mean": extractor.mean, "std": extractor.std}
    if not extractor.do_normalize:
        config["mean"] = None
    fbank = Fbank(config)
    time = np.arange(9000) / 16000
    sounds = [np.sin(2 * np.pi * 440 * time) * 0.5 + 0.1, np.random.default_rng(0).normal(size=9000) * 0.01, 0 * time]
    waveforms = np.stack(sounds)
    expected = extractor(list(waveforms.astype(np.float32)), sampling_rate=16000, return_tensors="pt").input_values
    frames = fbank.frames(9000)
    for dtype, tolerance in ((torch.float64, 1e-4), (torch.float32, 1e-3)):
        ours = fbank(torch.from_numpy(waveforms).to(torch.float32).to(dtype))
        assert ours.shape == (3, extractor.num_mel_bins, frames) and ours.dtype == dtype
        torch.testing.assert_close(ours.mT.float(), expected[:, :frames], atol=tolerance, rtol=0)
    assert expected[:2, :frames].std() > 0.1
    assert fbank(torch.zeros(1, 10)).shape[2] == fbank.frames(10) == 1


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_with_towers_is_saved_whole_and_frozen_weights_get_no_gradient(frozen: bool, tmp_path: Path) -> None:
    text_folder(tmp_path / "text", "bert")
    audio_folder(tmp_path / "audio")
    text, audio = read_text_tower(tmp_path / "text"), read_audio_tower(tmp_path / "audio")
    model = mulan(text_tower=text.config, audio_tower=audio.config, freeze_text_tower=frozen,
                  freeze_audio_tower=frozen, hierarchical_layers=1)  # fmt: skip
    model.text.take_weights(text.weights)
    model.audio.take_weights(audio.weights)
    for path in sorted(tmp_path.glob("*/*")):
        path.unlink()
    waveforms = torch.randn(4, model.clip_samples) * 0.1
    noise = torch.rand(4, model.noise_size)
    assert model.noise_size == 4, "no patch is dropped"
    tokens = some_tokens()[:, :10]
    model.train()
    out = model(waveforms, tokens, LENGTHS.clamp(max=10), noise)
    (out.audio.sum() + out.text.sum() + out.scale.sum() + out.bias.sum()).backward()
    for name, weight in model.named_parameters():
        of_file = name.startswith(("text.", "audio.")) and ".norms." not in name
        if frozen and of_file:
            assert weight.grad is None and not weight.requires_grad, name
        else:
            assert weight.grad is not None and (weight.grad.abs().max() > 0 or "positions" in name), name
    model.save_pretrained(tmp_path / "model")
    loaded = MuLaN.from_pretrained(tmp_path / "model")
    assert_same_bits(loaded, model)
    assert loaded.config == model.config and loaded.text.frozen == frozen
    assert torch.equal(loaded.encode_audio(waveforms), model.eval().encode_audio(waveforms))
    assert torch.equal(loaded.encode_text(tokens, LENGTHS.clamp(max=10)),
                       model.encode_text(tokens, LENGTHS.clamp(max=10)))  # fmt: skip


def test_towers_recomputed_have_the_same_gradients(tmp_path: Path) -> None:
    text_folder(tmp_path, "clip")
    found = []
    for recompute in (False, True):
        tower = text_tower(read_text_tower(tmp_path), below=1, recompute=recompute).train()
        tower(some_tokens(), LENGTHS).square().sum().backward()
        found.append({name: weight.grad for name, weight in tower.named_parameters()})
    assert_same_bits(*found)


def test_even_layers_are_those_of_the_published_formula() -> None:
    """floor(arange(h) depth / h) (musiclm-pytorch 0.2.8, interspersed_indices), and the last one first."""
    assert layers_read(6, 0, "last") == layers_read(6, 0, "even") == [5]
    assert layers_read(6, 2, "last") == [5, 4, 3]
    for depth in range(2, 13):
        for below in range(1, depth):
            published = [math.floor(i * (depth / below)) for i in range(below)]
            assert layers_read(depth, below, "even") == [depth - 1, *reversed(published)]
    assert layers_read(6, 2, "even") == [5, 3, 0]


def leave_out(folder: Path, part: str) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight for name, weight in weights.items() if part not in name}, folder / "model.safetensors")


@pytest.mark.parametrize(("change", "complaint"), [
    (lambda config: {**config, "model_type": "gpt2"}, "its model_type is 'gpt2'; use clip, clip_text_model, bert"),
    (lambda config: {**config, "hidden_act": "silu"}, "its activation 'silu' is unknown"),
    (lambda config: {**config, "position_embedding_type": "relative_key"}, "relative positions"),
    (lambda config: [config], "no encoder that can be used"),
])  # fmt: skip
def test_a_text_tower_of_another_kind_is_refused_in_one_line(change: Any, complaint: str, tmp_path: Path) -> None:
    text_folder(tmp_path, "bert")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(change(config)))
    assert complaint in one_line_of(read_text_tower, tmp_path)


def test_what_is_missing_of_a_tower_is_named_in_one_line(tmp_path: Path) -> None:
    assert "No such file" in one_line_of(read_text_tower, tmp_path / "none")
    text_folder(tmp_path, "bert")
    leave_out(tmp_path, "layer.1.intermediate.dense.bias")
    assert "no tensor bert.encoder.layer.1.intermediate.dense.bias" in one_line_of(read_text_tower, tmp_path)
    leave_out(tmp_path, "word_embeddings")
    assert "0 tensors embeddings.word_embeddings.weight" in one_line_of(read_text_tower, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    assert "no encoder that can be used" in one_line_of(read_text_tower, tmp_path)
    audio_folder(tmp_path / "audio", sampling_rate=8000)
    assert "its sampling_rate is 8000; only 16000" in one_line_of(read_audio_tower, tmp_path / "audio")
    audio_folder(tmp_path / "audio", max_length=80)
    assert "of another size than its config.json" in one_line_of(read_audio_tower, tmp_path / "audio")
    assert "preprocessor_config.json No such file" in one_line_of(read_audio_tower, tmp_path)


def test_a_model_is_refused_that_its_towers_cannot_be_part_of(tmp_path: Path) -> None:
    text_folder(tmp_path / "text", "bert")
    audio_folder(tmp_path / "audio")
    text, audio = read_text_tower(tmp_path / "text").config, read_audio_tower(tmp_path / "audio").config
    for arguments, complaint in (
        ({"text_tower": text, "max_text_tokens": 13}, "the text tower takes up to 12 tokens"),
        ({"audio_tower": audio, "sample_rate": 8000}, "the audio tower hears sounds of 16000 Hz"),
        ({"audio_tower": audio, "clip_seconds": 1}, "the audio tower takes up to 60 frames, 0.6 seconds"),
        ({"text_tower": text, "audio_depth": 5, "hierarchical_layers": 3}, "a tower of 3 layers has 2 below"),
        ({"text_tower": audio}, "no configuration of a tower of the kind clip or bert"),
        ({"text_tower": "path"}, "no configuration of a tower"),
        ({"text_tower": {**text, "heads": 3}}, "a tower of dim 16 cannot have 3 heads"),
        ({"text_tower": {**text, "inner": 0}}, "inner 0 of a tower is not a whole number"),
        ({"text_tower": {**text, "activation": "silu"}}, "activation 'silu' is unknown"),
        ({"audio_tower": {**audio, "std": 0}}, "std 0 of an audio tower cannot normalise"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=complaint):
            mulan(**arguments)
