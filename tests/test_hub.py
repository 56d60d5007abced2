"""Models of the Hugging Face Hub, of which a server on this machine stands in. The real huggingface_hub talks to it,
and the commands run as users run them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from forks import completed
from safetensors.torch import load_file

from tandem.config.models.autoencoders import DiscreteVAEConfig
from tandem.models import DiscreteVAE
from tests.hub_server import TOKEN, Hub, serving
from tests.models.helpers import assert_same_bits
from tests.models.reference.autoencoders import written
from tests.scripts import MULAN, ROOT, VAE, words, write_images

NAME = "alice/faces"
TINY = [*words(VAE.tiny), "--image_folder", "demo:shapes:32", "--num_workers", "0"]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three updates on a folder of the user's, with an average and pictures. Tests only look at it."""
    home = tmp_path_factory.mktemp("home-of-alice")
    photos = write_images(home / "private-photos", 12)
    said = ["--image_folder", str(photos), "--batch_size", "4", "--valid_fraction", "0.34", "--ema_decay", "0.5"]
    return VAE.train(home / "vae", *said, "--validate_every_n_steps", "1", "--max_steps", "3")


@pytest.fixture
def model(tmp_path: Path) -> dict[str, bytes]:
    """The files of a model folder, by name."""
    torch.manual_seed(1)
    vae = DiscreteVAE(
        DiscreteVAEConfig(16, num_tokens=16, num_layers=2, num_resnet_blocks=1, codebook_dim=6, hidden_dim=8)
    )
    vae.save_pretrained(tmp_path / "published")
    return {path.name: path.read_bytes() for path in (tmp_path / "published").iterdir()}


class User:
    """Runs commands in a folder, with a cache of its own."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.folder = folder
        (folder / "temporary").mkdir(parents=True)
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        self.environment = {
            **kept, "HF_HOME": str(folder / "cache"), "HF_ENDPOINT": endpoint, "HF_TOKEN": TOKEN,
            "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "HF_HUB_DISABLE_XET": "1",
            "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT),
            "TMPDIR": str(folder / "temporary"),
        }  # fmt: skip

    def runs(
        self, *words: object, launcher: tuple[str, ...] = (), **environment: str
    ) -> subprocess.CompletedProcess[str]:
        script, *others = map(str, words)
        environment = {**self.environment, **environment}
        if not launcher:
            return completed(script, others, self.folder, environment)
        command = [*launcher, str(ROOT / script), *others]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, env=environment, timeout=600)

    def does(self, *words: object, **how: Any) -> str:
        done = self.runs(*words, **how)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def fails(self, *words: object, **how: Any) -> str:
        """The one line with which a command ends."""
        done = self.runs(*words, **how)
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.splitlines()
        return line

    def trains_from(self, name: str, do: str = "does", steps: int = 1, **how: Any) -> str:
        words = ("train_vae.py", *TINY, "--batch_size", 8, "--max_steps", steps, "--init_from", name)
        words += ("--output_dir", "new")
        found: str = getattr(self, do)(*words, **how)
        return found

    @property
    def init_from(self) -> str:
        found: str = yaml.safe_load((self.folder / "new" / "config.yaml").read_text())["init_from"]
        return found


@pytest.fixture
def alice(tmp_path: Path, hub: Hub) -> User:
    return User(tmp_path / "alice", hub.endpoint)


@pytest.fixture
def bob(tmp_path: Path, hub: Hub) -> User:
    return User(tmp_path / "bob", hub.endpoint)


def test_a_pushed_run_starts_the_run_of_another_user_with_the_same_weights(
    hub: Hub, alice: User, bob: User, run: Path
) -> None:
    said = alice.does("convert.py", "push", run, NAME, "--message", "the first")
    sha = hub.repositories[NAME].branches["main"]
    assert f"{hub.endpoint}/{NAME}/commit/{sha}" in said and hub.repositories[NAME].messages[-1] == "the first"
    files = hub.files(NAME)
    assert files.keys() == {".gitattributes", "README.md", "config.json", "model.safetensors", "sample.png"}
    assert files["sample.png"] == (run / "samples" / "step_00000003.png").read_bytes()
    assert b"the moving average after update 3" in files["README.md"]
    bob.trains_from(NAME)
    assert bob.init_from == f"{NAME}@{sha}"
    bob.does("convert.py", "export", NAME, "weights", "--to", "model")
    checkpoint = load_file(run / "checkpoints" / "step_00000003" / "ema.safetensors")
    average = {name.removeprefix("weights/"): w for name, w in checkpoint.items() if name.startswith("weights/")}
    assert_same_bits(load_file(bob.folder / "weights" / "model.safetensors"), average)
    assert len(hub.downloads("model.safetensors")) == 1  # the second command found it in the cache


def test_a_local_path_of_the_same_spelling_wins(hub: Hub, bob: User, model: dict[str, bytes]) -> None:
    hub.publish(NAME, {"config.json": b"{}"})
    (bob.folder / NAME).mkdir(parents=True)
    for file, content in model.items():
        (bob.folder / NAME / file).write_bytes(content)
    bob.trains_from(NAME)
    assert bob.init_from == NAME and hub.requests == []


@pytest.mark.parametrize("name", ["faces", "a/b/c", "../faces", "alice/faces@../x", "runs/vae.pt", "./alice/faces"])
def test_what_can_only_be_a_path_is_not_asked_for(name: str, hub: Hub, bob: User, run: Path) -> None:
    bob.trains_from(name, "fails")
    assert "USER/NAME" in bob.fails("convert.py", "push", run, name)
    assert hub.requests == []


def test_only_the_files_of_a_model_are_downloaded_and_what_says_which_first(
    hub: Hub, bob: User, model: dict[str, bytes]
) -> None:
    others = {"model.pt": b"code", "train.py": b"code", "sub/model.safetensors": b"", "README.md": b"", "vae.bin": b""}
    first = hub.publish(NAME, {**others, **model, "tokenizer.json": b"{}"})
    hub.repositories[NAME].branches["v1.0"] = first
    hub.publish(NAME, {"config.json": b"{}"})
    bob.trains_from(f"{NAME}@v1.0")
    assert bob.init_from == f"{NAME}@{first}"
    paths = [line.split("/")[-1] for line in hub.requests if line.startswith("GET /alice")]
    assert paths[0] == "config.json" and sorted(paths[1:]) == ["model.safetensors", "tokenizer.json"]
    (bob.folder / "new").rename(bob.folder / "old")  # a run that goes on asks for nothing
    assert "Revision Not Found" in bob.trains_from(f"{NAME}@v2", "fails")


def test_an_autoencoder_of_diffusers_is_taken_from_the_hub_as_from_the_disk(
    hub: Hub, bob: User, tmp_path: Path
) -> None:
    files = {path.name: path.read_bytes() for path in written("sd3", tmp_path).iterdir()}
    hub.publish(NAME, {**files, "diffusion_pytorch_model.bin": b"code", "README.md": b""})
    said = json.loads(bob.does("convert.py", "inspect", NAME, "--json"))
    assert said["kind"] == "diffusers folder" and said["arguments"]["shift_factor"] == 0.0609
    assert hub.downloads(".bin") == []
    hub.publish("alice/unet", {**files, "config.json": b'{"_class_name": "UNet2DConditionModel"}'})
    before = len(hub.downloads(".safetensors"))
    assert "UNet2DConditionModel" in bob.fails("convert.py", "inspect", "alice/unet")
    assert len(hub.downloads(".safetensors")) == before


@pytest.mark.parametrize("content, reason", [
    ({}, "config.json"),
    ({"config.json": b'{"model_type": "gpt2"}'}, "config.json"),
    ({"config.json": b'{"model": "DiscreteVAE", "num_tokens": 1000000000000}'}, "1000000000000"),
    ({"model.safetensors": b"\x80\x04cposix\nsystem\n"}, "model"),
])  # fmt: skip
def test_what_is_no_model_or_means_harm_is_refused_in_one_line(
    hub: Hub, bob: User, model: dict[str, bytes], content: dict[str, bytes], reason: str
) -> None:
    hub.publish(NAME, {**model, **content} if content else {"README.md": b""})
    line = bob.trains_from(NAME, "fails")
    assert reason in line and NAME in line
    assert not (bob.folder / "new" / "config.yaml").exists()
    if b"gpt2" in content.get("config.json", b""):
        assert hub.downloads(".safetensors") == []  # gigabytes, perhaps


@pytest.mark.parametrize("failure, reason", [
    (500, "HTTP 500"), ("cut", "no answer"), ("cut body", "no answer"),
])  # fmt: skip
def test_a_hub_that_fails_ends_the_command_in_one_line_before_the_run_begins(
    hub: Hub, bob: User, model: dict[str, bytes], failure: int | str, reason: str
) -> None:
    hub.publish(NAME, model)
    hub.failure = failure
    line = bob.trains_from(NAME, "fails")
    assert line.startswith(f"train_vae.py: error: {NAME} ") and reason in line
    assert hub.endpoint in line and not (bob.folder / "new").exists()
    assert len(hub.requests) < 20


def test_a_model_without_weights_is_refused_as_such(hub: Hub, bob: User, model: dict[str, bytes]) -> None:
    hub.publish(NAME, {name: content for name, content in model.items() if not name.endswith(".safetensors")})
    assert "it has no weights" in bob.trains_from(NAME, "fails")


def test_a_hub_that_fails_in_the_middle_leaves_a_cache_that_is_completed_later(
    hub: Hub, bob: User, model: dict[str, bytes]
) -> None:
    hub.publish(NAME, model)
    hub.failure, hub.fails_at = "cut", "model.safetensors"
    assert "no answer" in bob.trains_from(NAME, "fails")
    hub.failure = 500
    hub.fails_at = ""
    assert "HTTP 500" in bob.trains_from(NAME, "fails")  # the config.json in the cache is no model
    hub.failure = None
    bob.trains_from(NAME)


def test_the_cache_stands_in_for_a_hub_without_an_answer_and_a_line_says_so(
    hub: Hub, bob: User, model: dict[str, bytes]
) -> None:
    sha = hub.publish(NAME, model)
    source = ("--image_folder", "demo:shapes:8", "--num_workers", 0, "--output", "codes")
    bob.does("encode.py", "--model", NAME, *source)
    for failure, reason in ((500, "HTTP 500"), ("cut", "no answer")):
        hub.failure = failure
        said = bob.trains_from(NAME)
        (line,) = [line for line in said.splitlines() if "is read from the cache" in line]
        assert reason in line and f"{NAME} is read from the cache, commit {sha}" in line
        assert bob.init_from == f"{NAME}@{sha}"
        shutil.rmtree(bob.folder / "new")
    hub.failure = 401  # an answer
    assert "HTTP 401" in bob.trains_from(NAME, "fails")
    requests = len(hub.requests)
    assert "HF_HUB_OFFLINE" in bob.trains_from("alice/never_seen", "fails", HF_HUB_OFFLINE="1")
    assert "from the cache" not in bob.trains_from(NAME, HF_HUB_OFFLINE="1")  # it was asked for
    assert bob.init_from == f"{NAME}@{sha}" and len(hub.requests) == requests


def test_a_model_is_pushed_and_started_from_with_its_tokenizer(
    hub: Hub, alice: User, bob: User, tmp_path: Path
) -> None:
    alice.does("convert.py", "push", MULAN.train(tmp_path / "run", "--max_steps", "1"), NAME)
    assert "tokenizer.json" in hub.files(NAME)
    bob.does("train_mulan.py", *MULAN.flags(bob.folder / "new", "--max_steps", "1", "--init_from", NAME))
    assert bob.init_from == f"{NAME}@{hub.repositories[NAME].branches['main']}"


PROCESSES = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def test_two_processes_download_once_and_agree(hub: Hub, bob: User, model: dict[str, bytes]) -> None:
    sha = hub.publish(NAME, model)
    bob.trains_from(NAME, launcher=PROCESSES)
    assert bob.init_from == f"{NAME}@{sha}"
    assert len(hub.downloads("model.safetensors")) == 1
    assert len([line for line in hub.requests if line == f"GET /api/models/{NAME}"]) == 1


# Pushing.


def test_a_dry_run_writes_the_folder_and_asks_nobody(hub: Hub, alice: User, run: Path) -> None:
    alice.does("convert.py", "push", run, NAME, "--dry_run", "card")
    assert hub.requests == []
    written = {path.name for path in (alice.folder / "card").iterdir()}
    assert written == {"README.md", "config.json", "model.safetensors", "sample.png"}
    assert "exists already" in alice.fails("convert.py", "push", run, NAME, "--dry_run", "card")


def test_a_second_push_replaces_the_model_in_one_commit_and_keeps_what_others_wrote_and_main_where_a_branch_is_named(
    hub: Hub, alice: User, run: Path, model: dict[str, bytes]
) -> None:
    hub.publish(NAME, {**model, "tokenizer.json": b"{}", "model.safetensors.index.json": b"{}", "notes.txt": b"x"})
    alice.does("convert.py", "push", run, NAME, "--weights", "online")
    files = hub.files(NAME)
    assert b"as trained after update 3" in files["README.md"]
    assert files["notes.txt"] == b"x" and len(hub.repositories[NAME].commits) == 2
    assert not {"tokenizer.json", "model.safetensors.index.json"} & files.keys()
    assert files["model.safetensors"] != model["model.safetensors"]
    alice.does("convert.py", "push", run, NAME, "--branch", "v2")
    assert hub.files(NAME) == files and hub.files(NAME, "v2")["model.safetensors"] != files["model.safetensors"]


def test_private_makes_a_private_model_and_refuses_a_public_one(hub: Hub, alice: User, run: Path) -> None:
    alice.does("convert.py", "push", run, NAME, "--private")
    assert hub.repositories[NAME].private
    alice.does("convert.py", "push", run, "alice/open")
    assert not hub.repositories["alice/open"].private
    before = dict(hub.repositories["alice/open"].commits)
    assert "is public" in alice.fails("convert.py", "push", run, "alice/open", "--private")
    assert hub.repositories["alice/open"].commits == before


@pytest.mark.parametrize("failure, at, reason", [
    (401, "", "hf auth login"), (403, "/commit/", "HTTP 403"), ("cut", "/commit/", "no answer"),
])  # fmt: skip
def test_a_push_that_fails_is_one_line_and_loses_nothing(
    hub: Hub, alice: User, run: Path, model: dict[str, bytes], failure: int | str, at: str, reason: str
) -> None:
    hub.publish(NAME, model)
    files = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    hub.failure, hub.fails_at = failure, at
    line = alice.fails("convert.py", "push", run, NAME)
    assert line.startswith(f"convert.py: error: cannot push {NAME} to the Hub") and reason in line
    assert hub.files(NAME) == model
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == files
    assert list((alice.folder / "temporary").iterdir()) == []


def test_a_run_that_is_resumed_asks_the_hub_for_nothing_and_keeps_the_commit_that_it_began_from(
    hub: Hub, bob: User, model: dict[str, bytes]
) -> None:
    sha = hub.publish(NAME, model)
    bob.trains_from(NAME)
    hub.publish(NAME, {"config.json": b'{"model": "DiscreteVAE", "num_tokens": 999}'})
    shutil.rmtree(bob.folder / "cache")
    hub.requests.clear()
    bob.trains_from(NAME, steps=2, launcher=PROCESSES)
    assert bob.init_from == f"{NAME}@{sha}" and hub.requests == []
