"""Weights on the disk: what a model writes comes back exactly, and another model refuses it in one line."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models import VQGAN, DiscreteVAE, MuLaN, ResidualQuantizer, Unet, VideoTokenizer
from models.files.dalle import save_dalle_file
from models.files.pretrained import Pretrained
from tests.models import helpers
from tests.models.helpers import VAE, assert_same_bits, one_line_of, some_images
from tests.models.reference import tokenizers

IMAGES = some_images()


class Case(NamedTuple):
    kind: type[Pretrained]
    sizes: dict[str, Any]
    outputs: Callable[[Any], list[Tensor]]
    training: dict[str, Any]
    """Other values for arguments that change no weight."""
    change: dict[str, Any]
    """Another value of an argument that changes the weights ..."""
    complaint: str
    """... and the error of loading the weights of ``sizes`` with it."""


def vqgan(quantizer: str, **sizes: Any) -> Case:
    sizes = {**helpers.VQGAN, "num_resnet_blocks": [0, 1], "quantizer": quantizer, **sizes}
    return Case(
        VQGAN, sizes, lambda model: [model(IMAGES).reconstruction, model.encode(IMAGES)], {"image_size": 32},
        {"dim": 16}, "encoder.0.weight should have shape (16, 3, 5, 5), not (8, 3, 5, 5)",
    )  # fmt: skip


def tokenizer(quantizer: str, **sizes: Any) -> Case:
    sizes = {**helpers.TOKENIZER, "quantizer": quantizer, **sizes}
    cond = torch.zeros(2, sizes["dim_cond"]) if "dim_cond" in sizes else None
    return Case(
        VideoTokenizer, sizes, lambda model: [model(helpers.some_videos(), cond).reconstruction],
        {"image_size": 16, "gradient_checkpointing": True, "time_window": 3}, {"init_dim": 5},
        "encoder.conv_in.conv.weight should have shape (5, 3, 3, 3, 3), not (4, 3, 3, 3, 3)",
    )  # fmt: skip


CASES = {
    "vae": Case(
        DiscreteVAE,
        {**VAE, "num_resnet_blocks": 1, "smooth_l1_loss": True, "temperature": 0.7, "straight_through": True,
         "reinmax": True, "kl_div_loss_weight": 0.2, "normalization": [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]},
        lambda model: [value for value in model(IMAGES) if value is not None],
        {"image_size": 32, "smooth_l1_loss": False},
        {"num_tokens": 14}, "codebook.weight should have shape (14, 6), not (13, 6)",
    ),
    "lfq": vqgan("lfq"), "vq": vqgan("vq"), "fsq": vqgan("fsq", fsq_levels=[8, 5, 4]), "bsq": vqgan("bsq"),
    "ibq": vqgan("ibq"),
    "tokenizer-lfq": tokenizer("lfq"), "tokenizer-vq": tokenizer("vq", separate_first_frame=True),
    "tokenizer-fsq": tokenizer(
        "fsq", fsq_levels=[8, 5, 4], norm="none", dim_cond=2, heads=1, dim_head=2, linear_heads=1, linear_dim_head=2,
        layers="attend_time,gateloop_time,cond_residual,linear_attend_space,compress_time,cond_attend_space,adaptive"),
    "mulan": Case(
        MuLaN,
        {**helpers.MULAN, "sample_rate": 22050, "n_fft": 512, "hop_length": 200, "n_mels": 32, "fmin": 20.0,
         "fmax": 9000.0, "patch_size": 8, "hierarchical_layers": 1, "init_temperature": 14.0, "init_bias": -5.0},
        lambda model: list(model(torch.rand(2, 11025, generator=torch.Generator().manual_seed(1)),
                                 torch.arange(16).view(2, 8), torch.tensor([3, 8]))),
        {"patch_dropout": 0.5, "clip_seconds": 3.0},
        {"vocab_size": 41}, "text.tokens.weight should have shape (41, 12), not (40, 12)",
    ),
    "residual": Case(
        ResidualQuantizer, {"dim": 6, "num_quantizers": 4, "codebook_size": 5},
        lambda model: [model(IMAGES.view(-1, 6)).quantized, model.encode(IMAGES.view(-1, 6))], {"decay": 0.5},
        {"codebook_size": 7}, "levels.0.codebook should have shape (7, 6), not (5, 6)",
    ),
    "unet": Case(
        Unet, {**helpers.UNET, "self_attn": [True, False], "image_embed_scale": 2.0, "channels_out": 6},
        lambda model: [model(**helpers.some_unet_inputs())], {"gradient_checkpointing": True},
        {"channels_out": 5}, "to_out.weight should have shape (5, 8, 1, 1), not (6, 8, 1, 1)",
    ),
}  # fmt: skip
all_models = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def made(case: Case, **overrides: Any) -> Any:
    """A model that has seen a batch: the codebooks of some start from it."""
    torch.manual_seed(0)
    model: Any = case.kind(**{**case.sizes, **overrides})
    case.outputs(model)
    return model


def small_vae(**overrides: Any) -> DiscreteVAE:
    return DiscreteVAE(**{**VAE, **overrides})


@all_models
def test_a_folder_gives_back_arguments_weights_and_outputs_exactly(case: Case, tmp_path: Path) -> None:
    folder, model = tmp_path / "runs" / "model", made(case)
    made(case, **case.change).save_pretrained(folder)
    model.eval().save_pretrained(folder)  # replaces
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    config = json.loads((folder / "config.json").read_text())
    facts = {"num_codes": model.num_codes} if hasattr(model, "num_codes") else {}
    assert config == {"model": case.kind.__name__, **facts, **model.config} and config.items() >= case.sizes.items()
    assert load_file(folder / "model.safetensors").keys() == model.state_dict().keys()
    loaded = case.kind.from_pretrained(folder)
    assert loaded.config == model.config and not loaded.training
    assert_same_bits(loaded, model)
    assert all(torch.equal(a, b) for a, b in zip(case.outputs(loaded), case.outputs(model), strict=True))


@all_models
def test_weights_are_taken_by_a_model_that_differs_in_its_training_only(case: Case, tmp_path: Path) -> None:
    trained, model, other = made(case), case.kind(**{**case.sizes, **case.training}), made(case, **case.change)
    trained.save_pretrained(tmp_path)
    model.load_weights_from(tmp_path)
    assert_same_bits(model, trained)
    (name,) = case.change
    assert one_line_of(other.load_weights_from, tmp_path).endswith(f"they need {name} {case.sizes[name]}")


def complaint_about(case: Case, folder: Path, change: dict[str, Any]) -> str:
    """The error of a folder whose config.json differs from what the model wrote."""
    if not folder.is_dir():
        made(case).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    complaint = one_line_of(case.kind.from_pretrained, folder)
    (folder / "config.json").write_text(json.dumps(config))
    return complaint


@all_models
def test_a_config_of_another_model_is_an_error(case: Case, tmp_path: Path) -> None:
    name = case.kind.__name__
    for change, complaint in (
        ({"model": "Perceiver"}, f"holds a Perceiver, not a {name}"),
        ({"colour": 1}, f"does not hold a {name}: "),
        ({"colour": 1}, "unexpected keyword argument 'colour'"),
        (case.change, case.complaint),
        (dict.fromkeys(case.change, 10**12), f"{next(iter(case.change))} 1000000000000 is larger than any dimension"),
        (dict.fromkeys(case.change, "5"), f"does not hold a {name}"),
    ):
        assert complaint in complaint_about(case, tmp_path / "model", change)


@pytest.mark.parametrize(("name", "change", "complaint"), [
    ("vae", {"num_resnet_blocks": 2}, "encoder.3.net.0.weight should have shape (5, 5, 3, 3), not none"),
    ("vae", {"image_size": 16.5}, "does not hold a DiscreteVAE"),
    ("vae", {"image_size": 17}, "use 16 or 32"),
    ("mulan", {"audio_depth": 10**6}, "many more weights than the file"),
    ("mulan", {"n_fft": 2**21, "n_mels": 2**20}, "n_fft 2097152 is not between"),
    ("mulan", {"clip_seconds": "10"}, "does not hold a MuLaN"),
    ("residual", {"num_quantizers": 4_000_000}, "many more weights than the file"),
    ("residual", {"num_quantizers": 5}, "levels.4.codebook should have shape (5, 6), not none"),
])  # fmt: skip
def test_an_argument_that_does_not_fit_the_weights_is_an_error_at_once(
    name: str, change: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    made(CASES[name]).save_pretrained(tmp_path / "model")
    started = time.process_time()
    assert complaint in complaint_about(CASES[name], tmp_path / "model", change)
    assert time.process_time() - started < 5


def test_a_model_of_before_a_layer_had_a_weight_is_said_to_be_of_an_earlier_version(tmp_path: Path) -> None:
    """As video tokenizers with attend_time were before past_gain."""
    VideoTokenizer(**{**helpers.TOKENIZER, "layers": "attend_time,compress_space:6"}).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if not name.endswith("past_gain")}
    assert len(kept) < len(weights)
    save_file(kept, tmp_path / "model.safetensors")
    assert "not none: it may be of an earlier version" in one_line_of(VideoTokenizer.from_pretrained, tmp_path)


def test_files_can_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    DiscreteVAE(image_size=8, num_tokens=4, hidden_dim=4).save_pretrained(tmp_path / "model")
    assert len({path.stat().st_mode for path in [tmp_path / "plain", *(tmp_path / "model").iterdir()]}) == 1


def test_weights_in_any_memory_format_are_saved(tmp_path: Path) -> None:
    model = small_vae().to(memory_format=torch.channels_last)
    model.save_pretrained(tmp_path)
    model.save_dalle(tmp_path / "vae.pt")
    assert_same_bits(DiscreteVAE.from_pretrained(tmp_path), model)
    assert_same_bits(DiscreteVAE.from_dalle(tmp_path / "vae.pt"), model)


FORMATS: dict[str, dict[str, list[int]]] = json.loads(Path(__file__).with_name("formats.json").read_text())


@pytest.mark.parametrize(("name", "sizes"), [*((name, {}) for name in CASES), ("vae", {"num_resnet_blocks": 0})])
def test_names_and_shapes_of_the_weights_stay_what_they_are(name: str, sizes: dict[str, Any]) -> None:
    """A change here is a change of format: files that were written before could not be read. Those of the vae are
    DALLE-pytorch's."""
    weights = made(CASES[name], **sizes).state_dict()
    expected = FORMATS[f"{name} without blocks" if sizes else name]
    assert {weight: list(tensor.shape) for weight, tensor in weights.items()} == expected


def test_a_dalle_file_has_exactly_the_public_keys_and_gives_back_the_weights(tmp_path: Path) -> None:
    model, path = small_vae(num_resnet_blocks=1), tmp_path / "vae-final.pt"
    model.save_dalle(path)
    content = torch.load(path, weights_only=True)
    assert content.keys() == {"hparams", "weights"}
    assert content["hparams"] == {**VAE, "num_resnet_blocks": 1, "channels": 3}
    assert content["weights"].keys() == model.state_dict().keys()
    assert {tensor.dtype for tensor in content["weights"].values()} == {torch.float32}
    loaded = DiscreteVAE.from_dalle(path)
    assert_same_bits(loaded, model)
    assert torch.equal(loaded(IMAGES).loss, model(IMAGES).loss)
    other = small_vae(num_resnet_blocks=1, image_size=32, smooth_l1_loss=True)
    other.load_weights_from(path)
    assert_same_bits(other, model)
    complaint = one_line_of(small_vae(num_tokens=7, hidden_dim=8, normalization=None).load_weights_from, path)
    assert "they need num_tokens 13, num_resnet_blocks 1, hidden_dim 5, normalization [[0.5, 0.5, 0.5], " in complaint


def test_a_dalle_file_of_before_1_6_0_is_read_as_three_channels_and_gives_the_public_codes(tmp_path: Path) -> None:
    """96 of the 104 releases of DALLE-pytorch wrote no `channels`. What is written back has all seven hparams."""
    path, state = tmp_path / "vae.pt", tokenizers.state_of("vae")
    torch.save({"hparams": tokenizers.VAE, "weights": state}, path)
    model = DiscreteVAE.from_dalle(path)
    assert_same_bits(model.state_dict(), state)
    codes = model.get_codebook_indices(tokenizers.images("vae"))
    assert torch.equal(codes, tokenizers.stored_output("vae", "codes"))
    public = tokenizers.stored_output("vae", "reconstruction") / 2 + 0.5  # its decoder leaves them normalised
    torch.testing.assert_close(model.decode(codes), public, rtol=0, atol=1e-5)
    model.save_dalle(tmp_path / "back.pt")
    content = torch.load(tmp_path / "back.pt", weights_only=True)
    assert content["hparams"] == {**tokenizers.VAE, "channels": 3}
    assert_same_bits(content["weights"], state)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    model = small_vae()
    model.save_dalle(tmp_path / "vae.pt")
    with pytest.raises((AttributeError, pickle.PicklingError)):
        save_dalle_file(tmp_path / "vae.pt", {**model.config, "image_size": lambda: 16}, small_vae().state_dict())
    assert_same_bits(DiscreteVAE.from_dalle(tmp_path / "vae.pt"), model)


class Stack(Pretrained):
    """Layers that are described one by one."""

    def __init__(self, layers: list[dict[str, Any]]) -> None:
        super().__init__()
        self.config = {"layers": layers}
        self.layers = torch.nn.ModuleList(torch.nn.Linear(*layer["sizes"], bias=layer["bias"]) for layer in layers)


def test_arguments_may_hold_mappings(tmp_path: Path) -> None:
    model = Stack([{"sizes": [2, 3], "bias": True}, {"sizes": [3, 4], "bias": False}])
    model.save_pretrained(tmp_path)
    loaded = Stack.from_pretrained(tmp_path)
    assert loaded.config == model.config
    assert_same_bits(loaded, model)
    model.config["layers"][1]["sizes"] = [3, 5]
    model.save_pretrained(tmp_path)
    assert "layers.1.weight should have shape (5, 3), not (4, 3)" in one_line_of(Stack.from_pretrained, tmp_path)


def test_config_json_says_how_many_codes_there_are_and_one_without_it_loads(tmp_path: Path) -> None:
    """The levels of FSQ that are published for 1024 codes make 1000."""
    VQGAN(image_size=8, dim=4, num_layers=1, quantizer="fsq", codebook_size=1024).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["codebook_size"], config.pop("num_codes")) == (1024, 1000)
    assert VQGAN.from_pretrained(tmp_path).codebook_summary == "fsq: 1000 codes, levels 8,5,5,5"
    (tmp_path / "config.json").write_text(json.dumps(config))  # of an older version
    assert VQGAN.from_pretrained(tmp_path).num_codes == 1000
