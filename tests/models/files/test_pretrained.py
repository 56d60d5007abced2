"""Weights on the disk: what is written comes back exactly, and everything else is one line of error."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import DiscreteVAE
from models.files.pretrained import save_dalle_file

SIZES: dict[str, Any] = {"image_size": 16, "num_tokens": 13, "codebook_dim": 6, "num_layers": 2, "hidden_dim": 5}


def small_vae(**overrides: Any) -> DiscreteVAE:
    return DiscreteVAE(**{**SIZES, **overrides})


def one_line_of(read: Callable[[Path], object], path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        read(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


def assert_same_weights(one: DiscreteVAE, other: DiscreteVAE) -> None:
    for (name, tensor), (other_name, other_tensor) in zip(
        one.state_dict().items(), other.state_dict().items(), strict=True
    ):
        assert name == other_name and torch.equal(tensor, other_tensor)


# The folder of save_pretrained.


def test_folder_gives_back_arguments_weights_and_outputs_exactly(tmp_path: Path) -> None:
    model = small_vae(
        num_resnet_blocks=1,
        smooth_l1_loss=True,
        temperature=0.7,
        straight_through=True,
        reinmax=True,
        kl_div_loss_weight=0.2,
        normalization=((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)),
    )
    model.save_pretrained(tmp_path / "runs" / "model")
    loaded = DiscreteVAE.from_pretrained(tmp_path / "runs" / "model")
    images = torch.rand(2, 3, 16, 16)
    assert loaded.config == model.config
    assert_same_weights(loaded, model)
    assert torch.equal(loaded(images).loss, model(images).loss)
    assert not loaded.training


def test_folder_holds_two_files_and_the_config_is_plain_json(tmp_path: Path) -> None:
    model = small_vae()
    model.save_pretrained(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {"model": "DiscreteVAE", **model.config}
    assert list(load_file(tmp_path / "model.safetensors")) == sorted(model.state_dict())


def test_weights_in_any_memory_format_are_saved(tmp_path: Path) -> None:
    model = small_vae().to(memory_format=torch.channels_last)
    model.save_pretrained(tmp_path)
    model.save_dalle(tmp_path / "vae.pt")
    assert_same_weights(DiscreteVAE.from_pretrained(tmp_path), model)
    assert_same_weights(DiscreteVAE.from_dalle(tmp_path / "vae.pt"), model)


def test_saving_again_replaces(tmp_path: Path) -> None:
    small_vae().save_pretrained(tmp_path)
    model = small_vae(num_tokens=7)
    model.save_pretrained(tmp_path)
    assert_same_weights(DiscreteVAE.from_pretrained(tmp_path), model)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert "No such file" in one_line_of(DiscreteVAE.from_pretrained, tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    small_vae().save_pretrained(tmp_path)
    (tmp_path / name).unlink()
    assert name in one_line_of(DiscreteVAE.from_pretrained, tmp_path)


@pytest.mark.parametrize("config", ["", "{", "[]", "3", "{}", "[" * 100_000, "\xff"])
def test_a_config_that_is_none_is_an_error(tmp_path: Path, config: str) -> None:
    small_vae().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes(config.encode("latin-1"))
    assert "is not a model folder" in one_line_of(DiscreteVAE.from_pretrained, tmp_path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model": "VQGAN"}, "holds a VQGAN, not a DiscreteVAE"),
        ({"num_tokens": 14}, r"codebook.weight should have shape (14, 6), not (13, 6)"),
        ({"num_resnet_blocks": 1}, "encoder.2.net.0.weight should have shape (5, 5, 3, 3), not none"),
        ({"num_tokens": 10**12}, "num_tokens 1000000000000 is larger than any dimension of the weights"),
        ({"hidden_dim": "5"}, "does not hold a DiscreteVAE"),
        ({"image_size": 16.5}, "does not hold a DiscreteVAE"),
        ({"image_size": 17}, "use 16 or 32"),
        ({"colour": 1}, "unexpected keyword argument 'colour'"),
    ],
)
def test_a_config_of_another_model_is_an_error(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    model = small_vae()
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model": "DiscreteVAE", **model.config, **change}))
    assert complaint in one_line_of(DiscreteVAE.from_pretrained, tmp_path)


def test_superfluous_weights_are_an_error(tmp_path: Path) -> None:
    model = small_vae()
    model.save_pretrained(tmp_path)
    save_file({**model.state_dict(), "extra": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert "extra should have shape none, not (2,)" in one_line_of(DiscreteVAE.from_pretrained, tmp_path)


def test_truncated_weights_are_an_error(tmp_path: Path) -> None:
    small_vae().save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    one_line_of(DiscreteVAE.from_pretrained, tmp_path)


# DALLE-pytorch's vae-final.pt.


def test_dalle_file_has_exactly_the_public_keys(tmp_path: Path) -> None:
    model = small_vae(num_resnet_blocks=1, channels=4)
    model.save_dalle(tmp_path / "vae-final.pt")
    content = torch.load(tmp_path / "vae-final.pt", weights_only=True)
    assert content.keys() == {"hparams", "weights"}
    assert content["hparams"] == {**SIZES, "num_resnet_blocks": 1, "channels": 4}
    assert content["weights"].keys() == model.state_dict().keys()
    assert {tensor.dtype for tensor in content["weights"].values()} == {torch.float32}


def test_dalle_file_gives_back_the_weights_exactly(tmp_path: Path) -> None:
    model, images = small_vae(num_resnet_blocks=2), torch.rand(2, 3, 16, 16)
    model.save_dalle(tmp_path / "vae-final.pt")
    loaded = DiscreteVAE.from_dalle(tmp_path / "vae-final.pt")
    assert_same_weights(loaded, model)
    assert torch.equal(loaded(images).loss, model(images).loss)


def test_a_hostile_file_is_refused_and_none_of_its_code_runs(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    content = {"hparams": Hostile(), "weights": small_vae().state_dict()}
    torch.save(content, tmp_path / "zip.pt")
    torch.save(content, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(content["hparams"], protocol=2))
    for name in ("zip.pt", "legacy.pt", "pickle.pt"):
        assert "without running code" in one_line_of(DiscreteVAE.from_dalle, tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_a_missing_file_or_a_folder_is_an_error(tmp_path: Path) -> None:
    assert "No such file" in one_line_of(DiscreteVAE.from_dalle, tmp_path / "none.pt")
    assert "directory" in one_line_of(DiscreteVAE.from_dalle, tmp_path)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x02", bytes(range(256)), b"PK\x03\x04"])
def test_a_file_of_another_kind_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "vae.pt").write_bytes(content)
    one_line_of(DiscreteVAE.from_dalle, tmp_path / "vae.pt")


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    small_vae().save_dalle(tmp_path / "vae.pt")
    whole = (tmp_path / "vae.pt").read_bytes()
    for length in range(1, len(whole), len(whole) // 20):
        (tmp_path / "vae.pt").write_bytes(whole[:length])
        one_line_of(DiscreteVAE.from_dalle, tmp_path / "vae.pt")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"state_dict": {}}, "hparams"),
        ([1, 2], "is not a vae-final.pt"),
        ({"hparams": {"image_size": 16}, "weights": {}}, "hparams lack channels, codebook_dim"),
        ({"hparams": {**SIZES, "num_resnet_blocks": 0, "channels": 3}, "weights": {}}, "codebook.weight should have"),
        ({"hparams": {**SIZES, "num_resnet_blocks": 0, "channels": 3}, "weights": {"a": 1}}, "not a tensor"),
    ],
)
def test_a_checkpoint_of_something_else_is_an_error(tmp_path: Path, content: object, complaint: str) -> None:
    torch.save(content, tmp_path / "vae.pt")
    assert complaint in one_line_of(DiscreteVAE.from_dalle, tmp_path / "vae.pt")


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    model = small_vae()
    model.save_dalle(tmp_path / "vae.pt")
    with pytest.raises((AttributeError, pickle.PicklingError)):
        save_dalle_file(tmp_path / "vae.pt", {"image_size": lambda: 16}, small_vae().state_dict())
    assert_same_weights(DiscreteVAE.from_dalle(tmp_path / "vae.pt"), model)


# Starting from either.


def test_weights_are_taken_from_a_folder_or_a_dalle_file(tmp_path: Path) -> None:
    trained = small_vae()
    trained.save_pretrained(tmp_path / "model")
    trained.save_dalle(tmp_path / "vae-final.pt")
    for source in ("model", "vae-final.pt"):
        # Another image size and another loss change no weight.
        model = small_vae(image_size=32, smooth_l1_loss=True)
        model.load_weights_from(tmp_path / source)
        assert_same_weights(model, trained)


def test_weights_of_another_model_are_refused_with_the_arguments_that_they_need(tmp_path: Path) -> None:
    small_vae(num_tokens=7, hidden_dim=8).save_dalle(tmp_path / "vae-final.pt")
    complaint = one_line_of(small_vae().load_weights_from, tmp_path / "vae-final.pt")
    assert complaint.endswith("they need num_tokens 7, hidden_dim 8")


def test_weights_trained_under_another_normalisation_are_refused(tmp_path: Path) -> None:
    small_vae(normalization=None).save_pretrained(tmp_path)
    assert one_line_of(small_vae().load_weights_from, tmp_path).endswith("they need normalization None")
