"""A save that is stopped at any of its file operations leaves a run that can be loaded: promise P14."""

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tandem.training.checkpoint.store import Checkpoints
from tests.processes import Process
from tests.training.disk import failing, left_by_kills


def parts(value: float) -> dict:
    return {"model": {"weight": torch.full((3,), value), "count": value}, "ema": {"weight": torch.full((2,), value)}}


def value_of(checkpoints: Checkpoints) -> float:
    """The value in the newest good checkpoint, all of whose parts belong together."""
    found = checkpoints.newest_valid(lambda line: pytest.fail(line))
    assert found is not None
    loaded, meta = checkpoints.load(found, expected=["model", "ema"])
    values = {meta["value"], loaded["model"]["count"], *loaded["model"]["weight"].tolist(),
              *loaded["ema"]["weight"].tolist()}  # fmt: skip
    assert len(values) == 1
    return float(values.pop())


def save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(step, parts(float(step)), {"value": float(step)})
    checkpoints.wait()


def assert_next_save_succeeds(checkpoints: Checkpoints) -> None:
    save(checkpoints, 3)
    assert checkpoints.failure is None and value_of(checkpoints) == 3.0
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["latest", "step_00000003"]


@pytest.fixture
def with_one_saved(tmp_path: Path) -> Callable[[int], Checkpoints]:
    """Checkpoints in a new folder that hold step 1."""

    def make(stage: int) -> Checkpoints:
        checkpoints = Checkpoints(tmp_path / str(stage), 1, Process())
        save(checkpoints, 1)
        return checkpoints

    return make


def test_killed_before_and_after_every_file_operation(with_one_saved) -> None:
    checkpoints, results = with_one_saved(0), []
    for folder in left_by_kills(checkpoints.folder, lambda: save(checkpoints, 2)):
        left = Checkpoints(folder, 1, Process())
        results.append(value_of(left))
        assert_next_save_succeeds(left)
    # The old checkpoint up to some operation, the new one from there on; several states before and after it.
    switch = results.index(2.0)
    assert results == [1.0] * switch + [2.0] * (len(results) - switch)
    assert switch > 5 and len(results) - switch > 5


def test_a_disk_that_takes_only_a_part_of_a_file_is_reported_and_the_next_save_succeeds(with_one_saved) -> None:
    limit, failed, limits = 0, True, resource.getrlimit(resource.RLIMIT_FSIZE)
    while failed:
        checkpoints = with_one_saved(limit)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))  # of each file of this process, in bytes
        try:
            save(checkpoints, 2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        failed = checkpoints.failure is not None
        if failed:
            assert os.strerror(errno.EFBIG) in checkpoints.failure and "step_00000002" in checkpoints.failure
            assert "\n" not in checkpoints.failure and value_of(checkpoints) == 1.0
            assert not list(checkpoints.folder.glob(".unfinished-*")), "a part of it would fill the disk"
        assert_next_save_succeeds(checkpoints)
        limit += 30
    assert limit > 200


def test_an_error_of_the_disk_at_every_operation_is_reported_and_the_next_save_succeeds(with_one_saved) -> None:
    stage, failed = 0, True
    while failed:
        checkpoints = with_one_saved(stage)
        with pytest.MonkeyPatch.context() as monkeypatch:
            calls = ("fsync", "mkdir", "rename", "replace")
            failures = failing(monkeypatch, stage + 1, calls, reason=errno.EROFS, any_thread=True)
            save(checkpoints, 2)
        failed = bool(failures)
        is_there = (checkpoints.folder / "step_00000002").is_dir()
        assert (checkpoints.failure is None) == is_there, "a checkpoint that is complete is no failure"
        if checkpoints.failure:
            assert os.strerror(errno.EROFS) in checkpoints.failure and "step_00000002" in checkpoints.failure
            assert not list(checkpoints.folder.glob(".unfinished-*")), "a part of it would fill the disk"
        assert value_of(checkpoints) in (1.0, 2.0)
        assert_next_save_succeeds(checkpoints)
        stage += 1
    assert stage > 8
