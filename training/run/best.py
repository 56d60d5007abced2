"""The best model of a run so far, whole on the disk at any moment."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..files import sync

FACTS = "best.json"


class BestModel:
    """`best/` in the folder of a run: the model of the validation with the highest value, and `best.json` with its
    {"step", "metric", "value"}. A part of the checkpoint.

    A new model is written beside the old one and put in its place by two renames. A run that was killed between them
    finds the old one aside, and puts it back when it starts again.

    Args:
        folder: Of the run.
        is_root: Whether this process writes.
        metric: Name of what is compared; more is better.
        broadcast: Gives every process the root's JSON value; the identity where there is one process.
    """

    def __init__(
        self,
        folder: Path,
        is_root: bool,
        *,
        metric: str,
        broadcast: Callable[[Any], Any] = lambda found: found,
    ) -> None:
        self.path = Path(folder) / "best"
        #: Highest value so far whose model is in `path`, and its step; None before the first.
        self.value: float | None = None
        self.step: int | None = None
        #: Why the model of the last offer is not on the disk, or the one of the checkpoint is gone, in one line; None
        #: while all is well. The same on every process.
        self.failure: str | None = None
        self._is_root, self.metric, self._broadcast = is_root, metric, broadcast
        self._new, self._old = self.path.with_name(".best.unfinished"), self.path.with_name(".best.unwanted")
        if is_root:
            try:
                self._tidy()
            except OSError as error:
                self.failure = _reason(self.path, error)
        self.failure = broadcast(self.failure)

    def is_better(self, value: float) -> bool:
        """Whether a value is higher than every one before. NaN never is."""
        return not math.isnan(value) and (self.value is None or value > self.value)

    def offer(self, value: float, step: int, write: Callable[[Path], None]) -> bool:
        """Keep a model if it is better than every one before; returns whether it is now in `path`. Collective.

        What the disk does not take is left out, `failure` says why, and the next better one than the last that was
        taken gets its place.

        Args:
            value: Of the metric, the same on every process.
            step: Completed updates.
            write: Writes the model's files into a folder; called on the root alone.
        """
        self.failure = None
        if not self.is_better(value):
            return False
        failure, written = None, False
        if self._is_root:
            facts = {"step": step, "metric": self.metric, "value": value}
            try:
                self._replace(facts, write)
            except OSError as error:
                failure = _reason(self.path, error)
                self._tidy_if_possible()
            written = self._facts() == facts  # it may be there, though the disk then failed
        self.failure, written = self._broadcast((failure, written))
        if written:
            self.value, self.step = value, step
        return bool(written)

    def state_dict(self) -> dict[str, Any]:
        """{"value", "step"}, both None before the first."""
        return {"value": self.value, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Where the model that belongs to it is gone, the next one is the best, and `failure` says
        so. Collective.

        A folder that is newer than the checkpoint stays until a better one than the checkpoint's comes along, which a
        repetition of the same updates brings in any case.
        """
        facts = self._facts() if self._is_root else None
        if self._broadcast(facts is not None) or state["value"] is None:
            self.value, self.step = state["value"], state["step"]
        else:
            self.failure = (
                f"{self.path}, the best model so far ({self.metric} {state['value']:.4g} of update {state['step']}), "
                "is gone: the next validation's takes its place"
            )

    def catch_up(self, step: int) -> None:
        """Count the model in `path` too where it is better and of an update up to `step`, that of the checkpoint: of a
        validation of which the checkpoint does not know, because a run that is asked to stop saves first. Collective.
        """
        facts = self._broadcast(self._facts() if self._is_root else None) or {}
        value, of_step = facts.get("value"), facts.get("step")
        if not (facts.get("metric") == self.metric and isinstance(value, float) and isinstance(of_step, int)):
            return
        if of_step <= step and self.is_better(value):
            self.value, self.step = value, of_step

    def _facts(self) -> dict[str, Any] | None:
        try:
            facts = json.loads((self.path / FACTS).read_text())
        except (OSError, ValueError):
            return None
        return facts if isinstance(facts, dict) else None

    def _replace(self, facts: Mapping[str, Any], write: Callable[[Path], None]) -> None:
        self._tidy()
        self._new.mkdir()
        write(self._new)
        (self._new / FACTS).write_text(json.dumps(facts) + "\n")
        for path in [*self._new.rglob("*"), self._new]:
            sync(path)
        if self.path.exists():
            os.rename(self.path, self._old)
        os.rename(self._new, self.path)
        sync(self.path.parent)
        shutil.rmtree(self._old, ignore_errors=True)

    def _tidy(self) -> None:
        """Undo what was begun and not finished."""
        if self._old.exists() and not self.path.exists():
            os.rename(self._old, self.path)
            sync(self.path.parent)
        for leftover in (self._new, self._old):
            if leftover.exists():
                shutil.rmtree(leftover)

    def _tidy_if_possible(self) -> None:
        try:
            self._tidy()
        except OSError:
            return  # the next offer, or the next start, tries again


def _reason(path: Path, error: OSError) -> str:
    reason = f"{error.strerror}: {error.filename}" if error.strerror and error.filename else str(error)
    return f"cannot write {path}: {' '.join(reason.split())}"
