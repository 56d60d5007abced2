"""Marks say what starts.jsonl and the counts of faults say."""

from __future__ import annotations

from typing import Any

import pytest

from training.report.faults import marks

ONE = {"backend": "single", "world_size": 1, "device": "cpu"}
TWO = {"backend": "ddp", "world_size": 2, "device": "cuda:0"}


def resumed(step: Any, save_every: Any = 50, **facts: Any) -> dict[str, Any]:
    (found,) = marks([{**ONE, "step": 0}, {**ONE, "step": step, **facts}], {"save_every_n_steps": save_every}, {})
    return found


def test_a_run_that_was_started_once_has_no_mark() -> None:
    assert marks([{**ONE, "step": 0}], {"save_every_n_steps": 50}, {}) == []
    assert marks([], {}, {"skipped_updates": []}) == []


def test_other_processes_are_named() -> None:
    assert resumed(104, **TWO)["text"].endswith("; from single x 1 cpu to ddp x 2 cuda")
    assert resumed(104)["text"].endswith(", on single x 1 cpu")


@pytest.mark.parametrize("step", [None, "7", -1, True, 1.5])
def test_a_start_without_an_update_has_no_mark(step: Any) -> None:
    assert marks([ONE, {**ONE, "step": step}], {}, {}) == []


def test_skipped_updates_and_bad_samples_stand_between_resumes_in_the_order_of_updates() -> None:
    rises = {"skipped_updates": [[30, 30, 1.0], [60, 90, 5.0]], "bad_samples": [[40, 40, 2.0]]}
    found = marks([ONE, {**ONE, "step": 50}], {"save_every_n_steps": 50}, rises)
    assert [(mark["step"], mark["kind"]) for mark in found] == [
        (30, "skipped"), (40, "bad"), (50, "killed"), (90, "skipped")]  # fmt: skip
    assert [found[0]["text"], found[1]["text"], found[3]["text"]] == [
        "1 update skipped by update 30", "2 bad samples replaced by update 40",
        "5 updates skipped by updates 60 to 90"]  # fmt: skip


@pytest.mark.parametrize(("ended", "step", "changed", "kind", "text"), [
    (None, 100, {}, "killed", ": the start before was killed or failed, and lost"),
    (None, 104, {}, "killed", ": the start before was killed"),  # not at a regular save
    (None, 0, {}, "killed", ": the start before was killed or failed, and had saved nothing"),
    (None, 100, {"max_steps": [200, 150]}, "killed", " with another length: the start before was killed"),
    ("asked to stop at update 100", 100, {}, "resumed", ": the start before was asked to stop"),
    ("finished at update 100", 100, {"epochs": [1, 2]}, "extended", " with another length: the start before had"),
])  # fmt: skip
def test_how_the_start_before_ended_is_what_it_said(
    ended: str | None, step: int, changed: dict[str, Any], kind: str, text: str
) -> None:
    begun = [{**ONE, "ended": ended}, {**ONE, "step": step, "changed": changed}]
    (found,) = marks(begun, {"save_every_n_steps": 50}, {})
    assert found["kind"] == kind and found["text"].startswith(f"started again from update {step}{text}")


def test_starts_from_the_same_update_stand_in_their_order() -> None:
    begun = [{**ONE, "step": step, "world_size": number} for number, step in enumerate((0, 50, 50, 50), 1)]
    assert [mark["text"].rpartition(" to ")[2] for mark in marks(begun, {"save_every_n_steps": 50}, {})] == [
        f"single x {number} cpu" for number in (2, 3, 4)
    ]
