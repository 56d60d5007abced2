"""Garbage is collected after the same updates on every process."""

import contextlib
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.training import loop
from tandem.training.run import Run
from tests.scripts import SCRIPTS, VAE, Script


class Node:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.identity = self


def test_garbage_is_collected_after_every_nth_update_and_at_no_other_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_COLLECTION_INTERVAL", 3)
    passes: list[int] = []
    step = 0

    def watch(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            passes.append(step)

    @loop.collect_synchronously
    def updates() -> Iterator[tuple[int, Any]]:
        yield from ((number, None) for number in range(4, 13))

    with contextlib.closing(updates()) as loop_updates:
        assert next(loop_updates) == (4, None) and next(loop_updates) == (5, None)
        gc.callbacks.append(watch)
        try:
            for step in range(6, 13):
                node = Node()
                alive = weakref.ref(node)
                del node
                many: list[Any] = [[] for _ in range(100_000)]  # more than the interpreter's own threshold
                assert alive() is not None and len(many) == 100_000
                next(loop_updates)  # update number `step`, counted from 1, is made
                assert (alive() is None) == (step % 3 == 0)
        finally:
            gc.callbacks.remove(watch)
        assert not gc.isenabled() and gc.get_freeze_count() > 0
    assert passes == [6, 9, 12]
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_a_run_that_ends_or_fails_leaves_the_collector_as_it_was(tmp_path: Path) -> None:
    seen: list[bool] = []

    def fail() -> None:
        seen.append(gc.isenabled())
        raise ZeroDivisionError

    with VAE.in_update(2, fail), pytest.raises(ZeroDivisionError):
        VAE.train(tmp_path, "--max_steps", "3")
    assert seen == [False] and gc.isenabled() and gc.get_freeze_count() == 0
    VAE.train(tmp_path, "--max_steps", "3")
    assert gc.isenabled() and gc.get_freeze_count() == 0


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=str)
def test_updates_saves_validations_and_pictures_leave_no_tensor_as_garbage(script: Script, tmp_path: Path) -> None:
    """It would hold memory until garbage is looked for, which is seldom."""
    left: list[Any] = []

    def watch(run: Run, event: str, _: Any) -> None:
        if event == "update" and run.progress.step == 1:
            gc.collect()  # what came before the loop
        elif event == "updated" and run.progress.step == 8:
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            gc.set_debug(0)
            left.extend(gc.garbage)
            gc.garbage.clear()

    with Run.watched(watch):
        script.train(tmp_path / "run", *script.eight)
    assert left  # at least of the saves: safetensors leaves two objects for each tensor
    assert not [type(each) for each in left if isinstance(each, torch.Tensor)]
