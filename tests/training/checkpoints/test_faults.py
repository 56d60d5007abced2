"""A save that is stopped at any of its file operations leaves a run that can be loaded: promise P14."""

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from training.checkpoints.store import Checkpoints

# What touches the disk, as C functions and methods are called.
OPERATIONS = {
    "open",
    "write",
    "flush",
    "fsync",
    "mkdir",
    "rename",
    "replace",
    "truncate",
    "unlink",
    "rmdir",
    "__exit__",
}


def parts(value: float) -> dict:
    return {"model": {"weight": torch.full((3,), value), "count": value}, "ema": {"weight": torch.full((2,), value)}}


def value_of(checkpoints: Checkpoints) -> float:
    """What the newest good checkpoint holds, all of it the same."""
    found = checkpoints.newest_good(lambda line: pytest.fail(line))
    assert found is not None
    loaded, meta = checkpoints.load(found, expected=["model", "ema"])
    values = {meta["value"], loaded["model"]["count"], *loaded["model"]["weight"].tolist(),
              *loaded["ema"]["weight"].tolist()}  # fmt: skip
    assert len(values) == 1
    return float(values.pop())


def in_a_child(action: Callable[[], None]) -> int:
    """The action in a process of its own; returns its exit status as `os.waitpid` gives it."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def save_until(stage: int, checkpoints: Checkpoints) -> Callable[[], None]:
    """Save value 2, and die by SIGKILL before (even stage) or after (odd) a file operation."""

    def action() -> None:
        seen = 0

        def profile(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal seen
            if event in ("c_call", "c_return") and getattr(argument, "__name__", "") in OPERATIONS:
                if seen == stage:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

        threading.setprofile(profile)  # of the thread that writes
        checkpoints.save(2, parts(2.0), {"value": 2.0})
        checkpoints.wait()

    return action


def test_killed_before_and_after_every_file_operation(tmp_path: Path) -> None:
    stage, killed, results = 0, True, []
    while killed:
        checkpoints = Checkpoints(tmp_path / str(stage), keep=1, is_root=True)
        checkpoints.save(1, parts(1.0), {"value": 1.0})
        checkpoints.wait()
        killed = in_a_child(save_until(stage, checkpoints)) == signal.SIGKILL
        results.append(value_of(checkpoints))
        checkpoints.save(3, parts(3.0), {"value": 3.0})
        checkpoints.wait()
        assert value_of(checkpoints) == 3.0
        assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["latest", "step_00000003"], stage
        stage += 1
    # The old one up to some operation, the new one from there on; many operations before and after that.
    switch = results.index(2.0)
    assert results == [1.0] * switch + [2.0] * (len(results) - switch)
    assert switch > 30 and len(results) - switch > 10


def fail_from(stage: int, reason: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls that change the disk fail, from number `stage` on, as those of a full disk do; returns what failed."""
    count = 0
    failed: list[str] = []

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count > stage:
                failed.append(str(args[0]))
                raise OSError(reason, os.strerror(reason), str(args[0]))
            return original(*args, **kwargs)

        return call

    for name in ("fsync", "mkdir", "rename", "replace"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    return failed


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EROFS, errno.EIO], ids=errno.errorcode.get)
def test_an_error_of_the_disk_at_every_operation_is_reported_and_the_next_save_succeeds(
    tmp_path: Path, reason: int
) -> None:
    stage, failed = 0, True
    while failed:
        checkpoints = Checkpoints(tmp_path / str(stage), keep=1, is_root=True)
        checkpoints.save(1, parts(1.0), {"value": 1.0})
        checkpoints.wait()
        with pytest.MonkeyPatch.context() as monkeypatch:
            failures = fail_from(stage, reason, monkeypatch)
            checkpoints.save(2, parts(2.0), {"value": 2.0})
            checkpoints.wait()
        failed = bool(failures)
        is_there = (checkpoints.folder / "step_00000002").is_dir()
        assert (checkpoints.failure is None) == is_there, "what is there whole was not in vain"
        if checkpoints.failure:
            assert os.strerror(reason) in checkpoints.failure and "step_00000002" in checkpoints.failure
            assert not list(checkpoints.folder.glob(".unfinished-*")), "a part of it would fill the disk"
        assert value_of(checkpoints) in (1.0, 2.0)
        checkpoints.save(3, parts(3.0), {"value": 3.0})
        checkpoints.wait()
        assert checkpoints.failure is None and value_of(checkpoints) == 3.0
        stage += 1
    assert stage > 8
