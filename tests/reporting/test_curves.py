"""Curves of bounded length lose no spike and no gap, whatever the length of metrics.jsonl."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path

import pytest

from tandem.reporting import curves
from tandem.reporting.curves import Curve, MetricsFile


def written(path: Path, lines: list[object]) -> MetricsFile:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return MetricsFile(path)


@pytest.mark.parametrize("count", [1, 3, 19, 20, 1000, 12345])
def test_a_curve_has_a_bounded_number_of_points_whose_means_weigh_up_to_the_mean_of_all(count: int) -> None:
    values = [random.Random(count).uniform(-1, 1) for _ in range(count)]
    curve = Curve()
    for step, value in enumerate(values, start=1):
        curve.add(step, value)
    found = curve.as_json(points=10)
    assert len(found["x"]) == len(found["y"]) <= 20
    whole = found["y"][: count // found["size"]]  # the last point may stand for fewer values
    rest = values[len(whole) * found["size"] :]
    assert math.fsum(whole) * found["size"] + math.fsum(rest) == pytest.approx(math.fsum(values), abs=1e-4 * count)
    assert found["sum"] == pytest.approx(math.fsum(values)) and found["count"] == count
    assert found["low"] == [pytest.approx(min(values), rel=1e-5), values.index(min(values)) + 1]
    assert found["high"] == [pytest.approx(max(values), rel=1e-5), values.index(max(values)) + 1]
    assert found["last"] == [pytest.approx(values[-1], rel=1e-5), count]
    assert ("lo" in found) is (found["size"] > 1)


@pytest.mark.parametrize("place", [0, 1, 499, 7776, 9999])
def test_no_spike_is_lost_and_none_moves_further_than_its_point_reaches(place: int) -> None:
    curve = Curve()
    for step in range(10_000):
        curve.add(step, 1e6 if step == place else 0.0)
    found = curve.as_json(points=10)
    (at,) = [index for index, high in enumerate(found["hi"]) if high == 1e6]
    assert abs(found["x"][at] - place) < found["size"] and found["high"] == [1_000_000, place]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_a_gap_and_spoils_no_mean(value: float) -> None:
    curve = Curve()
    for step, each in enumerate([1.0, value, 3.0, value, value, value, value, value]):
        curve.add(step, each)
    found = curve.as_json(points=3)
    assert found["size"] == 2 and found["y"] == [1, 3, None, None] and found["nan"] == found["x"]
    assert (found["missing"], found["count"], found["last"]) == (6, 2, [3, 2])
    assert (found["lo"], found["hi"]) == ([1, 3, None, None], [1, 3, None, None])


@pytest.mark.parametrize("long", ['{"step": 2, "x": "' + "y" * (3 << 20), " " * (1 << 20)])
def test_a_line_that_is_too_long_is_left_out_and_the_next_one_read(tmp_path: Path, long: str) -> None:
    found = written(tmp_path / "m", [{"step": 1, "x": 1}, long + '{"step": 2, "x": 2}', {"step": 3, "x": 3}])
    found.read()
    assert found.curves["x"].as_json()["x"] == [1, 3]
    (note,) = found.notes()
    assert note.startswith("metrics.jsonl: 1 line ")


def test_the_memory_is_bounded_whatever_names_the_metrics_have(tmp_path: Path) -> None:
    lines: list[object] = [{"step": n, f"metric {n}": 1.0} for n in range(1, 1001)]
    found = written(tmp_path / "m", [*lines, {"step": 2000, "n" * 300: 1.0}])
    found.read()
    assert len(found.curves) == curves.MOST_METRICS and "at least 400 metrics left out" in next(found.notes())


@pytest.mark.parametrize("how", ["replaced", "shortened"])
def test_a_file_that_a_resumed_run_cut_back_is_read_anew(tmp_path: Path, how: str) -> None:
    path = tmp_path / "metrics.jsonl"
    found = written(path, [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}])
    found.read()
    line = json.dumps({"step": 1, "loss": 9.0}) + "\n"
    if how == "replaced":
        (tmp_path / "new").write_text(line * 1 + json.dumps({"step": 5, "loss": 5.0}) + "\n" * 80)
        os.replace(tmp_path / "new", path)
    else:
        path.write_text(line)
    found.read()
    assert found.curves["loss"].as_json()["y"] == ([9, 5] if how == "replaced" else [9])


def test_counts_of_faults_are_told_where_they_rose_and_put_together_if_they_are_many() -> None:
    few, many = Curve(), Curve()
    for step, count in ((1, 0), (2, 3), (3, math.nan), (4, 3), (5, 4)):
        few.add(step, count)
    for step in range(5000):
        many.add(step, step)
    assert few.rises() == [[2, 2, 3], [5, 5, 1]]
    found = many.rises()
    assert len(found) <= 100 and sum(rise[2] for rise in found) == 4999


def test_a_bad_sample_of_an_evaluation_rises_at_the_step_of_its_update(tmp_path: Path) -> None:
    """The evaluation's line counts it; the update's line, of the same step, did not."""
    evaluation = {"step": 2, "valid/loss": 0.5, "bad_samples": 3, "evaluation_seconds": 1.0}
    file = written(tmp_path / "metrics.jsonl", [{"step": 2, "loss": 1.0, "bad_samples": 0}, evaluation])
    file.read()
    assert file.curves["bad_samples"].rises() == [[2, 2, 3]] and not list(file.notes())
