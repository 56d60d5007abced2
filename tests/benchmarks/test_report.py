"""Rows, goals and the JSON file, on made-up numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.launching import JobFailed
from benchmarks.report import NoTime, Row, comparison, run_parts


@pytest.mark.parametrize(("ours", "met"), [([98.0, 110.0, 120.0], "yes"), ([90.0, 96.0, 120.0], "NO"), ([97.0], "yes")])
def test_the_median_decides_whether_a_goal_is_met(ours: list[float], met: str) -> None:
    row = comparison("fast", "samples/s", ours, [100.0] * len(ours), "over a loop", goal=0.97)
    assert row.values["met"] == met and row.values["ratio"] == sorted(ours)[len(ours) // 2] / 100
    assert "met" not in comparison("free", "MiB", ours, ours).values


def test_an_error_is_a_row_and_what_was_measured_before_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(error: Exception) -> Iterator[Row]:
        yield comparison("before", "samples/s", [90.0, 96.0], [100.0, 100.0])
        raise error

    errors = {"a": KeyError("x"), "b": JobFailed("exit code 3: a|b"), "c": NoTime("too late")}
    path = tmp_path / "results" / "latest.json"
    rows = run_parts({name: lambda error=error: broken(error) for name, error in errors.items()}, path, scale="toy")
    content = json.loads(path.read_text())
    assert content["machine"]["scale"] == "toy" and content["machine"]["packages"]["torch"]
    assert [row["rounds"] for row in content["rows"][::2]] == [{"ours": [90.0, 96.0], "reference": [100.0, 100.0]}] * 3
    assert [(row["part"], row["note"], row["is_bad"]) for row in content["rows"][1::2]] == [
        ("a", "failed: KeyError: 'x'", True), ("b", "exit code 3: a|b", True), ("c", "too late", False)
    ]  # fmt: skip
    assert len(rows) == 6 and "## b" in capsys.readouterr().out
