"""A checkpoint is whole or not there."""

import json
import math
import os
import subprocess

import pytest
import torch

from training import checkpoint, files
from training.checkpoint import Checkpoints


def no_barrier() -> None:
    pass


@pytest.fixture
def checkpoints(tmp_path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep=2, is_root=True, barrier=no_barrier)


def parts(value: float = 1.0) -> dict:
    generator = torch.Generator().manual_seed(0)
    return {
        "model": {
            "encoder.0.weight": torch.full((2, 3), value),
            "half": torch.ones(2, dtype=torch.bfloat16),
            "empty": {},
        },
        "optimizer": {
            "step": 12,
            "learning_rate": 1e-3,
            "moments": {"encoder.0.weight": {"exp_avg": torch.randn(2, 3, generator=generator), "count": 3}},
            "betas": [0.9, 0.999],
        },
        "random": {"rank_0": generator.get_state(), "seed": 2**63, "name": "gumbel", "none": None, "on": True},
        "ema": {},
    }


def assert_same(one, other) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    else:
        assert one == other


def test_what_is_loaded_is_what_was_saved(checkpoints):
    checkpoints.save(12, parts(), {"samples": 96, "loss": math.inf})
    loaded, meta = checkpoints.load(checkpoints.latest(), expected=list(parts()))
    assert_same(loaded, parts())
    assert meta == {"samples": 96, "loss": math.inf}


def test_views_strides_and_shared_tensors_are_saved_by_value(checkpoints):
    base = torch.arange(12.0).reshape(3, 4)
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    saved = {"model": {"row": base[1], "transposed": base.T, "again": base, "image": image, "scalar": torch.tensor(3)}}
    checkpoints.save(1, saved, {})
    assert_same(checkpoints.load(checkpoints.latest())[0], saved)


def test_a_snapshot_does_not_follow_later_updates():
    weight = torch.zeros(3)
    settings = {"learning_rate": [1.0]}
    snapshot = checkpoint.take_snapshot(1, {"model": {"weight": weight, "settings": settings}}, {})
    weight.add_(1)
    settings["learning_rate"][0] = 2.0
    assert snapshot.tensors["model"]["weight"].tolist() == [0, 0, 0]
    assert snapshot.state["parts"]["model"] == {"settings": {"learning_rate": [1.0]}}


def test_files_are_plain_and_their_sums_can_be_checked_with_coreutils(checkpoints):
    checkpoints.save(100, parts(), {})
    folder = checkpoints.latest()
    assert folder.name == "step_00000100"
    assert {file.name for file in folder.iterdir()} == {
        "model.safetensors", "optimizer.safetensors", "random.safetensors", "ema.safetensors",
        "state.json", "SHA256SUMS",
    }  # fmt: skip
    command = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert result.stdout.count(": OK") == 5


def test_keys_must_be_strings_that_can_be_joined(checkpoints):
    for key in (3, "a/b"):
        with pytest.raises(AssertionError, match="must be a string without '/'"):
            checkpoints.save(1, {"model": {key: torch.zeros(1)}}, {})


def test_only_the_newest_are_kept(checkpoints):
    for step in (9, 10, 100, 101):
        checkpoints.save(step, parts(step), {"step": step})
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step_00000100", "step_00000101"]
    assert checkpoints.load(checkpoints.latest())[1] == {"step": 101}


def test_a_step_that_is_saved_already_is_left_as_it_is(checkpoints):
    checkpoints.save(1, parts(1.0), {"n": 1})
    checkpoints.save(1, parts(2.0), {"n": 2})
    assert checkpoints.load(checkpoints.latest())[1] == {"n": 1}


def test_no_checkpoint_is_none(checkpoints):
    assert checkpoints.latest() is None
    checkpoints.folder.mkdir()
    (checkpoints.folder / "step_1 copy").mkdir()
    (checkpoints.folder / ".unfinished-step_00000007").mkdir()
    assert checkpoints.latest() is None


def test_off_the_root_nothing_is_written_and_every_process_waits(tmp_path):
    waited = []
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, is_root=False, barrier=lambda: waited.append(1))
    checkpoints.save(1, {}, {})
    checkpoints.wait()
    assert not checkpoints.folder.exists() and waited == [1]


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs, not even `except Exception`."""


def kill_at(monkeypatch, stage: int) -> list[str]:
    """Make the `stage`-th call that touches the disk the last one; returns the names of the calls seen."""
    calls: list[str] = []

    def watch(module, name):
        original = getattr(module, name)

        def wrapper(*args, **kwargs):
            calls.append(name)
            if len(calls) - 1 == stage:
                if name == "rmtree":
                    os.unlink(os.path.join(args[0], "state.json"))
                raise Killed
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, wrapper)

    for module, name in [
        (checkpoint, "save_file"),
        (checkpoint, "_sha256"),
        (files.os, "fsync"),
        (checkpoint.os, "rename"),
        (checkpoint.shutil, "rmtree"),
        (checkpoint.os, "mkdir"),
    ]:
        watch(module, name)
    return calls


def test_killed_at_any_stage_the_newest_checkpoint_loads_and_the_next_save_succeeds(tmp_path):
    stage, finished = 0, False
    while not finished:
        checkpoints = Checkpoints(tmp_path / f"stage_{stage}", keep=1, is_root=True, barrier=no_barrier)
        checkpoints.save(1, parts(1.0), {"step": 1})
        with pytest.MonkeyPatch.context() as monkeypatch:
            calls = kill_at(monkeypatch, stage)
            try:
                checkpoints.save(2, parts(2.0), {"step": 2})
                finished = True
            except Killed:
                pass
        committed = "rename" in calls[:-1] or finished
        loaded, meta = checkpoints.load(checkpoints.latest())
        assert meta == {"step": 2 if committed else 1}, calls
        assert_same(loaded, parts(2.0 if committed else 1.0))
        for path in checkpoints.folder.glob("step_*"):
            checkpoints.load(path)
        checkpoints.save(3, parts(3.0), {"step": 3})
        assert [path.name for path in checkpoints.folder.iterdir()] == ["step_00000003"]
        stage += 1
    assert set(calls) == {"save_file", "_sha256", "fsync", "rename", "rmtree", "mkdir"}


def test_everything_is_synced_before_the_rename_and_the_rename_after_it(checkpoints, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(descriptor):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", watched_fsync)
    monkeypatch.setattr(checkpoint.os, "rename", lambda *paths: (events.append("RENAME"), rename(*paths)))
    checkpoints.save(1, {"model": {"w": torch.zeros(1)}}, {})
    commit = events.index("RENAME")
    assert set(events[:commit]) >= {"model.safetensors", "state.json", "SHA256SUMS", ".unfinished-step_00000001"}
    assert events[commit + 1 :] == ["checkpoints"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "SHA256SUMS"])
@pytest.mark.parametrize("damage", ["delete", "truncate", "flip", "empty"])
def test_damage_is_an_error_of_one_line_that_names_the_file(checkpoints, name, damage):
    checkpoints.save(1, parts(), {})
    path = checkpoints.latest() / name
    content = bytearray(path.read_bytes())
    if damage == "delete":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(content[:-20])
    elif damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="cannot load the checkpoint") as error:
        checkpoints.load(checkpoints.latest())
    text = str(error.value)
    assert "\n" not in text and str(checkpoints.latest()) in text and name in text


@pytest.mark.parametrize("expected", [["model", "optimizer", "ema"], ["model"], ["model", "optimizers"]])
def test_missing_or_unexpected_parts_are_an_error_not_a_fresh_start(checkpoints, expected):
    checkpoints.save(1, {"model": {}, "optimizer": {}}, {})
    with pytest.raises(ValueError, match="it holds model, optimizer instead of"):
        checkpoints.load(checkpoints.latest(), expected)


def test_nothing_is_pickled(checkpoints):
    checkpoints.save(1, parts(), {})
    for file in checkpoints.latest().glob("*.safetensors"):
        header_bytes = int.from_bytes(file.read_bytes()[:8], "little")
        json.loads(file.read_bytes()[8 : 8 + header_bytes])
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoints.save(2, {"model": {"object": object()}}, {})
