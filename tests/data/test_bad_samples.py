"""Bookkeeping of the samples that cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.data.bad_samples import BadSample, BadSampleLog
from tandem.training.checkpoint.format import read_checkpoint, write_checkpoint
from tandem.training.checkpoint.snapshot import Snapshot
from tests.data.helpers import one_line


def bad(n: int) -> list[BadSample]:
    return [BadSample(i, f"photos/{i}.jpg", "truncated") for i in range(n)]


def saved(log: BadSampleLog, folder: Path) -> dict[str, Any]:
    """Its state, out of a checkpoint."""
    snapshot = Snapshot({"bad_samples": log.state_dict()})
    snapshot.finish()
    write_checkpoint(folder, snapshot.tensors, {"parts": snapshot.values, "meta": {}})
    return read_checkpoint(folder)[0]["bad_samples"]


@pytest.mark.parametrize("n_samples, tolerated", [(5, 1), (11, 2), (120, 10), (1000, 10), (10_000, 100)])
def test_too_many_is_over_one_percent_and_over_ten_files_or_a_tenth_of_a_small_set(n_samples, tolerated):
    log = BadSampleLog(n_samples)
    log.add(bad(tolerated))
    log.check()
    log.add(bad(tolerated + 1))
    assert one_line(log.check).startswith(f"{tolerated + 1} of {n_samples} samples could not be read")


def test_incomplete_samples_are_counted_once_take_a_bit_each_and_are_never_too_many(tmp_path):
    log, restored = BadSampleLog(100), BadSampleLog(100)
    incomplete = [BadSample(i, f"{i}.jpg", "no embedding", is_incomplete=True) for i in range(60)]
    assert log.add([*bad(2), *incomplete[10:], *incomplete[10:20]]) == [*bad(2), *incomplete[10:]]
    log.check()
    assert log.state_dict()["incomplete"].nbytes == 13
    restored.load_state_dict(saved(log, tmp_path / "saved"))
    for known in (log, restored):
        assert (known.count, known.count_incomplete) == (2, 50)
        assert known.add([*bad(2), *incomplete]) == incomplete[2:10], "the first two are known to be bad"
