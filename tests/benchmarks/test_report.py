"""Goals and the JSON file, on made-up numbers."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.report import Goal, Row, write_json

FAST = Row("fast", "samples/s", [98.0, 110.0, 120.0], [100.0, 100.0, 100.0], Goal("ratio", ">=", 0.97), "over a loop")
SLOW = Row("slow", "samples/s", [90.0, 96.0, 120.0], [100.0, 100.0, 100.0], Goal("ratio", ">=", 0.97))
QUICK = Row("--help", "seconds", [0.5, 0.9, 3.0], [0.1, 0.1, 0.1], Goal("ours", "<", 1.0))
FREE = Row("plain", "MiB", [1500.0], [1000.0])
ABSENT = Row("horovodrun x 2", "samples/s", goal=Goal("ratio", ">=", 0.97), note="horovod is not installed")


def test_the_median_decides_whether_a_goal_is_met() -> None:
    assert FAST.met is True  # its slowest round alone would not do
    assert SLOW.met is False  # its fastest round alone would
    assert QUICK.met is True
    assert FREE.met is None
    assert ABSENT.met is None
    assert Goal("ratio", ">=", 0.97).is_met(0.97)
    assert not Goal("ours", "<", 1.0).is_met(1.0)


def test_json_holds_the_rounds_and_what_the_goal_came_to(tmp_path: Path) -> None:
    write_json(tmp_path / "results" / "latest.json", {"cores": 2}, [SLOW, ABSENT])
    content = json.loads((tmp_path / "results" / "latest.json").read_text())
    slow, absent = content["rows"]
    assert content["machine"] == {"cores": 2} and slow["ours"]["rounds"] == [90.0, 96.0, 120.0]
    assert (slow["ratio"]["median"], slow["met"]) == (0.96, False) and absent["met"] is absent["ratio"] is None
