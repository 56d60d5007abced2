"""Models of the Hugging Face Hub in Python: `from_pretrained` by a name, and `push_to_hub`. The real huggingface_hub
talks to a server on this machine. What commands do with names is in tests/test_hub.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from tandem.models import VQGAN, DiscreteVAE
from tandem.weights import hub as our_hub
from tandem.weights.load import load_model
from tests.hub_server import TOKEN, Hub, reached
from tests.models import helpers
from tests.models.helpers import VAE, assert_same_bits, one_line_of, refused
from tests.models.reference.autoencoders import WEIGHTS, written

NAME = "alice/faces"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Knows the token of the environment; this machine's cache is empty."""
    with reached(tmp_path / "cache") as hub:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(our_hub, "_folders", {})
        monkeypatch.chdir(tmp_path)
        yield hub


def files_of(folder: Path, below: str = "") -> dict[str, bytes]:
    return {f"{below}{path.name}": path.read_bytes() for path in folder.iterdir()}


def model_of(seed: int = 0) -> DiscreteVAE:
    torch.manual_seed(seed)
    return DiscreteVAE.from_dict(VAE).eval()


def published(hub: Hub, model: Any, folder: Path) -> str:
    """A commit of a model folder."""
    model.save_pretrained(folder)
    return hub.publish(NAME, files_of(folder))


def test_a_model_is_loaded_by_its_name_its_revision_and_from_the_cache(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (published(hub, model_of(seed), tmp_path / f"{seed}") for seed in (1, 2))
    for name, revision, seed in ((NAME, None, 2), (f"{NAME}@{first}", None, 1), (NAME, first, 1), (NAME, second, 2)):
        assert_same_bits(DiscreteVAE.from_pretrained(name, revision=revision), model_of(seed))
    hub.requests.clear()
    assert_same_bits(DiscreteVAE.from_pretrained(NAME, local_files_only=True), model_of(2))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert_same_bits(DiscreteVAE.from_pretrained(NAME), model_of(2))
    assert hub.requests == []
    assert "HF_HUB_OFFLINE" in one_line_of(DiscreteVAE.from_pretrained, "alice/never_seen")
    assert_same_bits(DiscreteVAE.from_pretrained(Path("1")), model_of(1))  # a folder here


def test_the_token_and_the_cache_are_those_that_are_given(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(hub, model_of(), tmp_path / "published")
    hub.repositories[NAME].private = True
    assert DiscreteVAE.from_pretrained(NAME, cache_dir=tmp_path / "other")
    assert not (tmp_path / "cache").exists() and next((tmp_path / "other").glob("**/model.safetensors"))
    monkeypatch.delenv("HF_TOKEN")
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(ValueError, match=r"HTTP 404.*HF_TOKEN"):
        DiscreteVAE.from_pretrained(NAME)
    assert DiscreteVAE.from_pretrained(NAME, token=TOKEN)


def test_an_autoencoder_of_diffusers_is_one_of_a_repository_or_of_its_pipeline(hub: Hub, tmp_path: Path) -> None:
    folder = written("sd3", tmp_path)
    hub.publish("alice/vae", files_of(folder))
    others = {"model_index.json": b"{}", "unet/config.json": b"{}", "unet/" + WEIGHTS: b"large", "sd3.ckpt": b"large"}
    hub.publish("alice/pipeline", {**files_of(folder, "vae/"), **others})
    hub.publish("alice/plain", files_of(folder, "vae/"))
    for name in ("alice/vae", "alice/pipeline", "alice/plain"):
        assert_same_bits(VQGAN.from_pretrained(name), load_model(folder))
        assert_same_bits(load_model(Path(name)), load_model(folder))  # as commands do
    assert not [line for line in hub.requests if "unet" in line or ".ckpt" in line]
    assert "holds a VQGAN of train_vqgan.py, not a DiscreteVAE" in one_line_of(DiscreteVAE.from_pretrained, "alice/vae")


def test_shards_of_diffusers_are_found_below_the_root_too(hub: Hub, tmp_path: Path) -> None:
    folder = written("sd3", tmp_path)
    whole, state = load_model(folder), load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    weight_map = {}
    for number, names in enumerate((sorted(state)[:9], sorted(state)[9:])):
        file = f"diffusion_pytorch_model-0000{number + 1}-of-00002.safetensors"
        save_file({f"module.{name}": state[name] for name in names}, folder / file)  # of DDP
        weight_map |= {f"module.{name}": file for name in names}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    hub.publish(NAME, files_of(folder, "vae/"))
    assert_same_bits(VQGAN.from_pretrained(NAME), whole)


def test_a_file_of_taming_is_the_only_one_or_named(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written("taming", tmp_path)
    hub.publish(NAME, {"weights/last.ckpt": file.read_bytes(), "README.md": b"", "config.yaml": b""})
    assert_same_bits(VQGAN.from_pretrained(NAME), load_model(file))
    assert_same_bits(load_model(Path(NAME)), load_model(file))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert_same_bits(VQGAN.from_pretrained(NAME), load_model(file))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.publish(NAME, {"a.ckpt": b"", "b.ckpt": file.read_bytes()})
    assert "a.ckpt, b.ckpt" in one_line_of(VQGAN.from_pretrained, NAME)
    assert_same_bits(VQGAN.from_pretrained(NAME, "b.ckpt"), load_model(file))
    assert "a.ckpt" in refused(VQGAN.from_pretrained, NAME, "a.ckpt") and not hub.downloads("c.ckpt")
    assert "c.ckpt" in refused(VQGAN.from_pretrained, NAME, "c.ckpt")
    for path, options in ((file, ()), (tmp_path, (file.name,))):  # on the disk
        assert_same_bits(VQGAN.from_pretrained(path, *options), load_model(file))


def test_a_model_is_pushed_with_a_card_that_keeps_one_that_is_there(hub: Hub, tmp_path: Path) -> None:
    model = model_of(3)
    address = model.push_to_hub(NAME, commit_message="the first", private=True)
    repository = hub.repositories[NAME]
    assert address == f"{hub.endpoint}/{NAME}/commit/{repository.branches['main']}"
    assert repository.private and repository.messages[-1] == "the first"
    assert {"README.md", "config.json", "model.safetensors"} <= hub.files(NAME).keys()
    assert f'DiscreteVAE.from_pretrained("{NAME}")'.encode() in hub.files(NAME)["README.md"]
    assert_same_bits(DiscreteVAE.from_pretrained(NAME), model)
    hub.publish(NAME, {**hub.files(NAME), "README.md": b"of alice", "old.bin": b"", "notes.txt": b""})
    model_of(4).push_to_hub(NAME, ignore_patterns="*.json", delete_patterns="*.bin", token=TOKEN)
    assert hub.files(NAME)["README.md"] == b"of alice" and "notes.txt" in hub.files(NAME)
    assert "old.bin" not in hub.files(NAME)
    assert_same_bits(DiscreteVAE.from_pretrained(NAME), model_of(4))
    # What a model in memory does not have stays; shards of the model that is replaced go, if all of the new one comes.
    beside = {"discriminator/model.safetensors": b"d", "tokenizer.json": b"t"}
    shards = {"model.safetensors.index.json": b"{}", "model-00001-of-00001.safetensors": b"s"}
    hub.publish(NAME, {**hub.files(NAME), **beside, **shards})
    model_of(4).push_to_hub(NAME, allow_patterns="config.json")
    assert (beside | shards).items() <= hub.files(NAME).items()
    model_of(4).push_to_hub(NAME)
    assert beside.items() <= hub.files(NAME).items() and not shards.keys() & hub.files(NAME).keys()
    before = hub.files(NAME)
    for options, branch in (({"branch": "v2"}, "v2"), ({"create_pr": True}, "refs/pr/1")):
        address = model_of(5).push_to_hub(NAME, **options)
        assert_same_bits(DiscreteVAE.from_pretrained(NAME, revision=branch), model_of(5))
        assert hub.files(NAME) == before
    assert address == f"{hub.endpoint}/{NAME}/discussions/1"


def test_what_cannot_be_pushed_is_one_line(hub: Hub) -> None:
    hub.publish(NAME, {"README.md": b""})
    assert "is public" in refused(VQGAN.from_dict(helpers.VQGAN).push_to_hub, NAME, private=True)
    assert "HTTP 401" in refused(VQGAN.from_dict(helpers.VQGAN).push_to_hub, NAME, token="hf_wrong")
    assert hub.files(NAME) == {"README.md": b""}


def test_a_name_that_no_model_can_have_is_refused_as_such_and_not_for_want_of_an_answer(hub: Hub) -> None:
    line = one_line_of(load_model, Path("alice/fa--ces"))
    assert "Cannot have -- or .." in line and "no answer" not in line and not hub.requests
