"""A checkpoint is whole or not there."""

import errno
import json
import math
import os
import re
import shutil
import struct
import subprocess
import threading

import pytest
import torch

from tandem.io import writing
from tandem.training.checkpoint import store as checkpoint
from tandem.training.checkpoint.format import check_sums
from tandem.training.checkpoint.snapshot import Snapshot
from tandem.training.checkpoint.store import Checkpoints, read_checkpoint
from tests.data.helpers import one_line
from tests.processes import Process, single
from tests.training.disk import busy


def save(checkpoints: Checkpoints, step: int, parts: dict, meta: dict) -> None:
    checkpoints.save(step, parts, meta)
    checkpoints.wait()
    assert checkpoints.failure is None


def parts(value: float = 1.0) -> dict:
    generator = torch.Generator().manual_seed(0)
    moments = {"encoder.0.weight": {"exp_avg": torch.randn(2, 3, generator=generator), "count": 3}}
    half = torch.ones(2, dtype=torch.bfloat16)
    return {
        "model": {"encoder.0.weight": torch.full((2, 3), value), "half": half, "empty": {}},
        "optimizer": {"step": 12, "learning_rate": 1e-3, "moments": moments, "betas": [0.9, 0.999]},
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
    save(checkpoints, 12, parts(), {"samples": 96, "loss": math.inf})
    save(checkpoints, 12, parts(2.0), {})  # a step that is saved already is left as it is
    loaded, meta = checkpoints.load(checkpoints.latest(), expected=list(parts()))
    assert_same(loaded, parts())
    assert meta == {"samples": 96, "loss": math.inf}


def test_processes_share_one_read_of_a_file_and_one_copy_in_memory_because_it_is_mapped(checkpoints):
    save(checkpoints, 1, {"model": {"weight": torch.ones(1 << 16)}}, {})
    weight = checkpoints.load(checkpoints.latest())[0]["model"]["weight"]
    mapped = []
    with open("/proc/self/maps") as lines:
        for line in lines:
            if line.rstrip().endswith(str(checkpoints.latest() / "model.safetensors")):
                start, end = (int(address, 16) for address in line.split()[0].split("-"))
                mapped.append(start <= weight.data_ptr() < end)
    assert any(mapped)


def test_what_a_function_returns_may_change_at_once(checkpoints):
    """It may return the model's own tensor, or memory that the next function uses again; all processes call it."""
    buffer, order = torch.zeros(3), []
    fetch = {str(i): (lambda i=i: (order.append(i), buffer.fill_(i))[1]) for i in range(3)}
    checkpoints.save(1, {"model": {**fetch, "more": {"last": fetch["0"]}}}, {})
    buffer.fill_(-1)
    checkpoints.wait()
    loaded = checkpoints.load(checkpoints.latest())[0]["model"]
    assert [loaded[str(i)].tolist() for i in range(3)] == [[i] * 3 for i in range(3)] and order == [0, 1, 2, 0]


def test_an_update_waits_until_the_state_is_copied(tmp_path, monkeypatch):
    """The copy begins when the update waits for it, or after an update that did not."""
    weights, begins = torch.zeros(3), threading.Event()
    copy_all, wait_for_copy = Snapshot.finish, Snapshot.wait

    def held_up(snapshot: Snapshot) -> None:
        begins.wait()
        copy_all(snapshot)

    def waited_for(snapshot: Snapshot) -> None:
        begins.set()
        wait_for_copy(snapshot)

    monkeypatch.setattr(Snapshot, "finish", held_up)
    monkeypatch.setattr(Snapshot, "wait", waited_for)
    with single(batch_size=1) as backend:
        checkpoints = Checkpoints(tmp_path, 1, backend.processes)
        engine = backend.wrap(model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=1.0), name="model")
        checkpoints.save(1, {"model": {"weights": weights}}, {})
        for micro in engine.micro_batches({"x": torch.ones(1, 1)}):
            engine.backward(engine(micro["x"]).sum())
        engine.step()
        weights.fill_(1.0)  # what the update does to a state
        begins.set()
        checkpoints.wait()
        assert_same(checkpoints.load(checkpoints.latest())[0]["model"]["weights"], torch.zeros(3))


def test_files_are_plain_and_their_sums_can_be_checked_with_coreutils(checkpoints):
    save(checkpoints, 100, parts(), {})
    folder = checkpoints.latest()
    assert folder.name == "step_00000100"
    names = {"state.json", "SHA256SUMS", *(f"{part}.safetensors" for part in parts())}
    assert {file.name for file in folder.iterdir()} == names
    command = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert result.stdout.count(": OK") == 5


def test_what_cannot_be_deleted_is_told_once_and_prevents_no_save(tmp_path, monkeypatch):
    held = ".nfs0001"
    for start in range(2):  # the second one finds what the first one left
        checkpoints = Checkpoints(tmp_path / "checkpoints", 2, Process())
        for step in range(3 * start + 1, 3 * start + 4):
            save(checkpoints, step, {"model": parts()}, {})
            assert checkpoints.failure is None and checkpoints.latest().name == f"step_{step:08d}"
            if step == 1:
                (checkpoints.latest() / held).touch()
                (checkpoints.folder / ".unfinished-step_00000002").mkdir()  # of a save that was killed
                (checkpoints.folder / ".unfinished-step_00000002" / held).touch()
                busy(monkeypatch, held)
        told = [
            line.split(": ")[0].removeprefix(f"cannot delete {checkpoints.folder}/") for line in checkpoints.undeleted
        ]
        assert sorted(told) == [".unfinished-step_00000002", ".unwanted-step_00000001"]
        newest = [f"step_{step - 1:08d}", f"step_{step:08d}"]
        assert sorted(path.name for path in checkpoints.folder.iterdir()) == sorted([*told, "latest", *newest])
    monkeypatch.undo()
    save(checkpoints, 7, {"model": parts()}, {})
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["latest", "step_00000006", "step_00000007"]


@pytest.mark.parametrize("call", ["rename", "unlink"])
def test_a_checkpoint_that_is_protected_keeps_its_name_and_its_files(checkpoints, monkeypatch, call):
    """Against a rename (`chattr +i` of the folder), or against the deletion of each of its files (`chmod a-w`)."""
    save(checkpoints, 1, {"model": parts()}, {})
    names, of_os = os.listdir(checkpoints.latest()), getattr(os, call)

    def protected(path, *more, **kwargs):
        if os.path.basename(path) in ([*names] if call == "unlink" else ["step_00000001"]):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return of_os(path, *more, **kwargs)

    monkeypatch.setattr(os, call, protected)
    for step in (2, 3, 4, 5):
        save(checkpoints, step, {"model": parts()}, {})
    assert checkpoints.failure is None and len(checkpoints.undeleted) == (3 if call == "unlink" else 1)
    check_sums(checkpoints.folder / "step_00000001")


def test_everything_is_synced_before_the_rename_and_the_rename_after_it(checkpoints, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(descriptor):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(writing.os, "fsync", watched_fsync)
    monkeypatch.setattr(checkpoint.os, "rename", lambda *paths: (events.append("RENAME"), rename(*paths)))
    save(checkpoints, 1, {"model": {"w": torch.zeros(1)}}, {})
    commit = events.index("RENAME")
    assert set(events[:commit]) >= {"model.safetensors", "state.json", "SHA256SUMS", ".unfinished-step_00000001"}
    assert events[commit + 1] == "checkpoints"
    assert events[commit + 2 :] == [".latest.tmp"]


def damage(path, how: str) -> None:
    content = bytearray(path.read_bytes())
    path.unlink()
    if how == "flip":
        content[len(content) // 2] ^= 1
    if how != "delete":
        path.write_bytes({"flip": content, "truncate": content[:-20], "empty": b""}[how])


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "SHA256SUMS"])
@pytest.mark.parametrize("how", ["delete", "truncate", "flip", "empty"])
def test_a_damaged_checkpoint_is_named_kept_aside_and_the_one_before_it_is_used(checkpoints, name, how):
    save(checkpoints, 1, parts(1.0), {"step": 1})
    save(checkpoints, 2, parts(2.0), {"step": 2})
    damage(checkpoints.latest() / name, how)
    with pytest.raises(ValueError, match="cannot load the checkpoint") as error:
        read_checkpoint(checkpoints.latest())
    text = str(error.value)
    assert "\n" not in text and str(checkpoints.latest()) in text and name in text
    said: list[str] = []
    found = checkpoints.newest_valid(said.append)
    assert found is not None and found.name == "step_00000001"
    assert_same(checkpoints.load(found)[0], parts(1.0))
    assert len(said) == 1 and name in said[0] and "going on from the one before" in said[0]
    assert (checkpoints.folder / "damaged-step_00000002").is_dir()
    save(checkpoints, 2, parts(3.0), {"step": 2})  # the same step again
    assert_same(checkpoints.load(checkpoints.newest_valid(said.append))[0], parts(3.0))


def test_where_all_are_damaged_nothing_starts_afresh_and_nothing_is_renamed(checkpoints):
    for step in (1, 2):
        save(checkpoints, step, parts(), {})
        damage(checkpoints.latest() / "state.json", "flip")
    with pytest.raises(ValueError, match=r"step_00000002.*so is the one before it") as error:
        checkpoints.newest_valid(print)
    assert "\n" not in str(error.value) and len(list(checkpoints.folder.glob("step_*"))) == 2


@pytest.mark.parametrize("remaining", ["latest", "damaged-step_00000001"])
def test_where_all_checkpoints_are_gone_nothing_starts_afresh(checkpoints, remaining):
    save(checkpoints, 1, parts(), {})
    checkpoints.latest().rename(checkpoints.folder / "damaged-step_00000001")
    for path in checkpoints.folder.iterdir():
        if path.name != remaining:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert [path.name for path in checkpoints.folder.iterdir()] == [remaining]
    with pytest.raises(ValueError, match="held checkpoints that are gone; restore one, or start over with --fresh"):
        checkpoints.newest_valid(print)


def appended(line: str):
    return lambda folder: (folder / "SHA256SUMS").write_text((folder / "SHA256SUMS").read_text() + f"{line}\n")


def linked(name: str, target: str):
    def move(folder) -> None:
        (folder / name).rename(folder.parents[1] / "elsewhere")
        (folder / name).symlink_to(target)

    return move


def with_parts(parts):
    return lambda folder: (folder / "state.json").write_text(json.dumps({"step": 1, "meta": {}, "parts": parts}))


WEIGHTS, LISTS = "model.safetensors", b"[" + b"[]," * 5_000_000 + b"0]"
# What was done to a checkpoint, what is said of it, and whether that takes its sums.
DAMAGES = {
    **{f"a sum of {name}": (appended(f"{'0' * 64}  {name}"), "is no file of this folder", True)
       for name in ("../model.safetensors", "/etc/passwd", "..", "a/b")},
    "a file without a sum": (lambda folder: (folder / "more.safetensors").touch(), r"more\.safetensors", True),
    **{f"the parts {parts}": (with_parts(parts), r"is not the name of a part|AttributeError: 'list'", False)
       for parts in ({"../model": {}}, {"/model": {}}, {"": {}}, {"model": 1}, ["model"])},
    **{f"{name} is {target}, {sums}": (linked(name, target), f"{name} is (not a regular file|a link that leaves)", sums)
       for name in (WEIGHTS, "state.json", "SHA256SUMS") for target in ("/dev/zero", "../../elsewhere")
       for sums in (True, name == "SHA256SUMS")},
    # None is read to its end.
    "terabytes": (lambda folder: os.truncate(folder / WEIGHTS, 1 << 42), f"{WEIGHTS}: its content is not what", True),
    "a large header": (lambda folder: (folder / WEIGHTS).write_bytes(struct.pack("<Q", 10**10)), "Safetensor", False),
    "a large state": (lambda folder: (folder / "state.json").write_bytes(LISTS), "holds more than 4194304 ", False),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_was_changed_is_refused_in_one_line(checkpoints, damage):
    save(checkpoints, 1, parts(), {})
    change, said, verify = DAMAGES[damage]
    change(checkpoints.latest())
    assert re.search(said, one_line(read_checkpoint, checkpoints.latest(), verify=verify))
    if verify:
        with pytest.raises(ValueError, match="there is no other one"):
            checkpoints.newest_valid(print)


@pytest.mark.parametrize("expected", [["model", "optimizer", "ema"], ["model"], ["model", "optimizers"]])
def test_missing_or_unexpected_parts_are_an_error_not_a_fresh_start(checkpoints, expected):
    save(checkpoints, 1, {"model": {}, "optimizer": {}}, {})
    with pytest.raises(ValueError, match="it holds model, optimizer instead of"):
        checkpoints.load(checkpoints.latest(), expected)


def test_a_checkpoint_that_is_a_link_is_not_followed_and_said(checkpoints, tmp_path):
    save(checkpoints, 1, parts(), {})
    checkpoints.latest().rename(tmp_path / "elsewhere")
    (checkpoints.folder / "step_00000001").symlink_to(tmp_path / "elsewhere")
    assert checkpoints.latest() is None
    with pytest.raises(ValueError, match=r"step_00000001 is a link; put the checkpoint itself there"):
        checkpoints.newest_valid(print)


def test_names_with_other_digits_are_no_checkpoints_and_leftovers_that_are_links_are_removed_themselves(
    checkpoints, tmp_path
):
    save(checkpoints, 1, parts(), {})
    (checkpoints.folder / "step_\N{ARABIC-INDIC DIGIT NINE}0000009").mkdir()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (checkpoints.folder / ".unfinished-x").symlink_to(tmp_path / "precious")
    (checkpoints.folder / ".unwanted-y").touch()
    said: list[str] = []
    assert checkpoints.newest_valid(said.append).name == "step_00000001" and not said
    save(checkpoints, 2, parts(), {})
    assert checkpoints.failure is None and checkpoints.latest().name == "step_00000002"
    assert (tmp_path / "precious" / "file").exists() and not list(checkpoints.folder.glob(".*"))
