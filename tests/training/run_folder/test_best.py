"""The best model is the best one, and is whole after a kill or a failure at any file operation."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.training.run_folder.best import BestModel
from tests.scripts import names
from tests.training.disk import busy, failing, left_by_kills

METRIC, LOSS = "valid/r10", "valid/loss"


def best_of(folder: Path, **more: Any) -> BestModel:
    return BestModel(folder, is_root=True, metric=METRIC, **more)


def model(value: float) -> Callable[[Path], None]:
    """Two files that must agree."""

    def write(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("model.safetensors", "config.json"):
            (folder / name).write_text(str(value))

    return write


def content(folder: Path) -> tuple[float, int]:
    """Value and step of a folder all of whose files belong together."""
    best = folder / "best"
    facts = json.loads((best / "best.json").read_text())
    assert sorted(path.name for path in best.iterdir()) == ["best.json", "config.json", "model.safetensors"]
    values = {float((best / name).read_text()) for name in ("model.safetensors", "config.json")} | {facts["value"]}
    assert len(values) == 1 and facts["metric"] == METRIC
    return values.pop(), facts["step"]


def save_all(best: BestModel, values: dict[int, float]) -> list[int]:
    """Steps whose models were taken."""
    return [step for step, value in values.items() if best.save_if_better({METRIC: value}, step, model(value))]


def test_only_what_is_strictly_better_is_taken_and_nan_never(tmp_path):
    best = best_of(tmp_path)
    assert not best.save_if_better({METRIC: math.nan}, 50, model(0)) and names(tmp_path) == []
    values = {50: -3.0, 70: -2.0, 80: -2.5, 100: 0.2, 200: 0.2, 300: math.nan, 400: 0.1}
    assert save_all(best, values) == [50, 70, 100]
    model(0.1)(tmp_path / ".best.unfinished")  # what an earlier attempt left is no part of the next
    (tmp_path / ".best.unfinished" / "model-00002.safetensors").write_text("0.1")
    assert save_all(best, {500: 0.3, 600: 0.3}) == [500]
    assert content(tmp_path) == (0.3, 500) and names(tmp_path) == ["best"]
    assert best.state_dict() == {"value": 0.3, "loss": None, "step": 500} and best.failure is None


def test_of_equal_values_the_one_of_the_lower_loss_is_taken_and_a_next_start_knows_it(tmp_path):
    best, write = best_of(tmp_path, loss=LOSS), model(1.0)
    losses = {1: 0.5, 2: 0.5, 3: 0.4, 4: math.nan, 5: 0.45, 6: 0.3}
    assert [n for n, loss in losses.items() if best.save_if_better({METRIC: 1.0, LOSS: loss}, n, write)] == [1, 3, 6]
    assert not best.save_if_better({METRIC: 0.9, LOSS: 0.1}, 7, write)
    state = best.state_dict()
    assert state == {"value": 1.0, "loss": 0.3, "step": 6}
    for before, evaluated, taken in (
        (state, {}, False),
        ({"value": 1.0, "loss": 0.4, "step": 3}, {}, False),  # the file is of a later validation than the checkpoint
        ({"value": 1.0, "loss": 0.4, "step": 3}, {METRIC: 1.0, LOSS: 0.3}, False),
        ({"value": 1.0, "step": 3}, {}, False),  # of an earlier version: an older model whose loss is not known stays
    ):
        again = best_of(tmp_path, loss=LOSS)
        again.load_state_dict(before)
        again.catch_up(6, evaluated)
        assert again.save_if_better({METRIC: 1.0, LOSS: 0.35}, 8, write) is taken
    again = best_of(tmp_path, loss=LOSS)
    again.load_state_dict(state)
    assert again.save_if_better({METRIC: 1.0, LOSS: 0.25}, 9, write) and content(tmp_path) == (1.0, 9)
    plain = best_of(tmp_path)
    assert [plain.save_if_better({METRIC: 2.0, LOSS: loss}, 9, model(2.0)) for loss in (0.5, 0.4)] == [True, False]


def test_a_best_model_whose_loss_is_not_finite_is_kept_and_known(tmp_path):
    best = best_of(tmp_path, loss=LOSS)
    assert best.save_if_better({METRIC: 0.5, LOSS: math.nan}, 1, model(0.5)) and content(tmp_path) == (0.5, 1)
    assert best.state_dict() == {"value": 0.5, "loss": None, "step": 1}
    assert not best.save_if_better({METRIC: 0.4, LOSS: 0.1}, 2, model(0.4))


def test_a_best_model_that_is_gone_is_said_and_replaced_by_the_next(tmp_path):
    best = best_of(tmp_path)
    best.save_if_better({METRIC: 0.5}, 100, model(0.5))
    state = best.state_dict()
    shutil.rmtree(tmp_path / "best")
    again = best_of(tmp_path)
    again.load_state_dict(state)
    assert "0.5 of update 100" in again.failure and "is gone" in again.failure and "\n" not in again.failure
    assert (
        again.save_if_better({METRIC: 0.3}, 200, model(0.3))
        and content(tmp_path) == (0.3, 200)
        and again.failure is None
    )


@pytest.mark.parametrize("is_first", [False, True])
def test_killed_before_and_after_every_file_operation(tmp_path, is_first):
    (tmp_path / "run").mkdir()
    best, results = best_of(tmp_path / "run"), []
    if not is_first:
        best.save_if_better({METRIC: 1.0}, 1, model(1.0))
    for folder in left_by_kills(tmp_path / "run", lambda: best.save_if_better({METRIC: 2.0}, 2, model(2.0))):
        again = best_of(folder)
        if not is_first:
            again.load_state_dict({"value": 1.0, "step": 1})
        assert names(folder) == ["best"] or (is_first and not names(folder)), folder
        assert again.failure is None
        results.append(content(folder) if names(folder) else (1.0, 1))
        assert again.save_if_better({METRIC: 2.0}, 2, model(2.0)) and content(folder) == (2.0, 2)
    switch = results.index((2.0, 2))
    assert results == [(1.0, 1)] * switch + [(2.0, 2)] * (len(results) - switch)
    assert switch > 5 and (is_first or len(results) - switch > 3), "files and folders are there one after the other"


@pytest.mark.parametrize("forever", [True, False])
def test_a_disk_that_fails_at_any_operation_is_said_and_the_state_is_that_of_the_disk(tmp_path, forever):
    stage, seen = 1, set()
    while True:
        folder = tmp_path / str(stage)
        folder.mkdir()
        best = best_of(folder)
        best.save_if_better({METRIC: 1.0}, 1, model(1.0))
        with pytest.MonkeyPatch.context() as patch:
            names_of_calls = ("fsync", "mkdir", "rename", "open", "unlink", "rmdir", "write_text")
            failed = failing(patch, stage, names_of_calls, forever=forever)
            taken = best.save_if_better({METRIC: 2.0}, 2, model(2.0))
        if not failed:
            break
        seen.add(failed[0])
        if not taken:
            assert best.failure is not None and "No space left" in best.failure and "\n" not in best.failure
        if not forever:
            assert content(folder)[1] in (1, 2), "there at once, before the next start"
        again = best_of(folder)
        assert again.failure is None and names(folder) == ["best"]
        assert content(folder) == ((2.0, 2) if taken else (1.0, 1)) == (best.value, best.step)
        # A worse one than the one that is there is not taken, one in between is.
        assert best.save_if_better({METRIC: 1.5}, 3, model(1.5)) is not taken
        assert best.failure is None and content(folder) == ((2.0, 2) if taken else (1.5, 3))
        stage += 1
    assert {"mkdir", "write_text", "fsync", "rename"} <= seen and stage > 10


def test_a_model_of_the_checkpoints_own_update_counts_where_it_is_better_and_no_later_one(tmp_path):
    """A run that was asked to stop saves before it validates; one that was killed repeats what it had validated."""
    best_of(tmp_path).save_if_better({METRIC: 0.5}, 4, model(0.5))
    for step, state, expected in [
        (4, {"value": 0.2, "step": 2}, (0.5, 4)),
        (4, {"value": None, "step": None}, (0.5, 4)),
        (3, {"value": 0.2, "step": 2}, (0.2, 2)),
        (4, {"value": 0.6, "step": 2}, (0.6, 2)),
    ]:
        best = best_of(tmp_path)
        best.load_state_dict(state)
        best.catch_up(step)
        assert (best.value, best.step) == expected
    other = BestModel(tmp_path, is_root=True, metric="valid/ema/r10")  # which is not compared with it
    other.catch_up(4)
    assert other.value is None and names(tmp_path) == ["best"]


def test_the_value_of_the_checkpoints_own_update_counts_although_a_later_model_took_its_place(tmp_path):
    best = best_of(tmp_path)
    assert save_all(best, {5: 8.0, 10: 32 / 3}) == [5, 10]
    uninterrupted_state = best.state_dict()
    assert save_all(best, {15: 12.0}) == [15]
    again = best_of(tmp_path)
    again.load_state_dict({"value": 8.0, "step": 5})  # the checkpoint of update 10 was saved before its validation
    again.catch_up(10, validation={METRIC: 10.6666666667})  # with the digits of metrics.jsonl
    assert again.state_dict() == uninterrupted_state
    assert save_all(again, {12: 9.0}) == [] and content(tmp_path) == (12.0, 15)
    assert save_all(again, {15: 12.0}) == [15]


def test_an_old_model_that_cannot_be_deleted_is_told_once_and_prevents_no_new_one(tmp_path, monkeypatch):
    best, held = best_of(tmp_path), ".nfs0001"
    assert save_all(best, {1: 1.0}) == [1]
    (tmp_path / "best" / held).touch()
    busy(monkeypatch, held)
    assert best.save_if_better({METRIC: 2.0}, 2, model(2.0)) and ".best.unfinished" in best.failure
    assert save_all(best, {3: 3.0, 4: 4.0}) == [3, 4] and best.failure is None
    again = best_of(tmp_path)
    assert ".best.unfinished" in again.failure, "once in each start"
    again.load_state_dict(best.state_dict())
    assert save_all(again, {5: 5.0}) == [5] and again.failure is None
    assert content(tmp_path) == (5.0, 5) and names(tmp_path) == [".best.unfinished", "best"]
