"""best/ of a run folder: the model of the best validation so far, complete on the disk at any moment."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tandem.io.reading import error_text, read_json_or_empty
from tandem.io.writing import delete, free_name, sync
from tandem.training.logging.trackers import logged_value

_RECORD_FILE = "best.json"
_UNFINISHED = ".best.unfinished"


class BestModel:
    """`best/` in the run folder: the model with the highest (or lowest) value in a validation, among equal ones that
    with the lowest loss, and `best.json` with {"step", "metric", "value", "loss"} of that validation. The state of this
    object is a part of the checkpoint.

    A new model is written beside the old one and replaces it by two renames. If the run is killed between the two, the
    next start renames the old model back. Models are written even if older files cannot be deleted.

    Args:
        metric: Name of the value.
        lowest: Whether a lower value is better, not a higher one.
        loss: Name of the loss that decides between equal values, such as those of a recall that is 1; None: the older
            model stays.
        broadcast: Gives every process the root's JSON value.
    """

    def __init__(
        self, folder: Path, is_root: bool, *, metric: str, lowest: bool = False, loss: str | None = None,
        broadcast: Callable[[Any], Any] = lambda value: value,
    ) -> None:  # fmt: skip
        self.path = Path(folder) / "best"
        #: Value, loss and step of the model in `path`; None before the first model, and for an unknown loss.
        self.value: float | None = None
        self.loss: float | None = None
        self.step: int | None = None
        #: One line on why the last model could not be written, on a best model that is gone, or on what cannot be
        #: deleted; or None. The same on every process.
        self.failure: str | None = None
        self._undeleted: dict[str, str] = {}  # a line on each path that cannot be deleted, by name
        self._is_root, self.metric, self._lowest, self._broadcast = is_root, metric, lowest, broadcast
        self._loss_metric = loss
        #: The former model during the replacement.
        self._old_path = self.path.with_name(".best.unwanted")
        if is_root:
            try:
                self._clean_up()
                self.failure = "; ".join(self._undeleted.values()) or None
            except OSError as error:
                self.failure = _reason(self.path, error)
        self.failure = broadcast(self.failure)

    def is_better(self, value: float, loss: float | None = None) -> bool:
        """Whether a value is better than that of the best model, or as good and of a lower loss."""
        if self.value is None:
            return True
        if value == self.value:
            return loss is not None and self.loss is not None and loss < self.loss
        return value < self.value if self._lowest else value > self.value

    def select_values(self, values: Mapping[str, float]) -> tuple[float | None, float | None]:
        """Value and loss among the values of a validation, by name, with the digits of metrics.jsonl, from which
        `catch_up` may read them again; None for one that is missing or not finite."""
        return logged_value(values.get(self.metric)), logged_value(values.get(self._loss_metric or ""))

    def save_if_better(
        self, values: Mapping[str, float], step: int, write: Callable[[Path], None],
        check: Callable[[], None] = lambda: None,
    ) -> bool:  # fmt: skip
        """Write a model if it is better than the best so far; returns whether it is now in `path`. Collective.

        If it cannot be written, `failure` is the reason, and the best model stays as it was.

        Args:
            values: The values of a validation by name, the same on every process.
            step: Completed updates.
            write: Writes the model's files into a folder; called on the root alone.
            check: Raises OSError if nothing may be written now; called on the root alone.
        """
        self.failure = None
        assert self.metric in values, self.metric
        value, loss = self.select_values(values)
        if value is None or not self.is_better(value, loss):
            return False
        failure, is_written = None, False
        if self._is_root:
            reported_names = set(self._undeleted)
            record = {"step": step, "metric": self.metric, "value": value, "loss": loss}
            try:
                check()
                self._replace(record, write)
            except OSError as error:
                failure = _reason(self.path, error)
                with contextlib.suppress(OSError):  # the next call, or the next start, tries again
                    check()
                    self._clean_up()
            lines = [line for name, line in self._undeleted.items() if name not in reported_names]
            failure = failure or "; ".join(lines) or None
            is_written = self._read_record() == record  # perhaps also after an error
        self.failure, is_written = self._broadcast((failure, is_written))
        if is_written:
            self.value, self.loss, self.step = value, loss, step
        return bool(is_written)

    def state_dict(self) -> dict[str, Any]:
        """{"value", "loss", "step"} of the best model; None before the first."""
        return {"value": self.value, "loss": self.loss, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore value, loss and step. If the best model is gone, they stay None, so that the next model becomes the
        best, and `failure` reports it. Collective.

        A model of a later step than the checkpoint's stays in `path`: the repeated updates will give the same model.
        """
        if self._broadcast(self._is_root and bool(self._read_record())) or state["value"] is None:
            self.value, self.loss, self.step = state["value"], state.get("loss"), state["step"]
        else:
            self.failure = (
                f"{self.path}, the best model so far ({self.metric} {state['value']:.4g} of update {state['step']}), "
                "is gone: the model of the next validation takes its place"
            )

    def catch_up(self, step: int, validation: Mapping[str, float] = MappingProxyType({})) -> None:
        """Adopt the record in `path` if it is better than the checkpoint's and not of a later step than `step`.
        Collective.

        A run saves before it validates, so `best/` may be of a later validation than the checkpoint.

        Args:
            validation: Values of the validation at `step`, if an earlier start has made it; they count like a record.
        """
        value, loss = self.select_values(validation)
        if value is not None and self.is_better(value, loss):
            self.value, self.loss, self.step = value, loss, step
        record = self._broadcast(self._read_record() if self._is_root else {})
        value, loss, best_step = (record.get(name) for name in ("value", "loss", "step"))
        loss = loss if isinstance(loss, float) else None
        is_valid = record.get("metric") == self.metric and isinstance(value, float) and isinstance(best_step, int)
        if is_valid and best_step <= step and self.is_better(value, loss):
            self.value, self.loss, self.step = value, loss, best_step

    def _read_record(self) -> dict[str, Any]:
        return read_json_or_empty(self.path / _RECORD_FILE)

    def _replace(self, record: Mapping[str, Any], write: Callable[[Path], None]) -> None:
        self._clean_up()
        new_path = self._free_path()
        new_path.mkdir()
        write(new_path)
        (new_path / _RECORD_FILE).write_text(json.dumps(record) + "\n")
        for path in [*new_path.rglob("*"), new_path]:
            sync(path)
        if self.path.exists():
            os.rename(self.path, self._old_path)
        os.rename(new_path, self.path)
        sync(self.path.parent)
        with contextlib.suppress(OSError):  # the model is in place
            self._clean_up()

    def _clean_up(self) -> None:
        """Undo an unfinished replacement, and delete what killed replacements left."""
        if self._old_path.exists():
            is_needed = not self.path.exists()
            os.rename(self._old_path, self.path if is_needed else self._free_path())
            if is_needed:
                sync(self.path.parent)
        for leftover in self.path.parent.glob(f"{_UNFINISHED}*"):
            if (reason := delete(leftover)) and leftover.name not in self._undeleted:
                self._undeleted[leftover.name] = f"cannot delete {leftover}: {reason}; it stays"

    def _free_path(self) -> Path:
        return free_name(self.path.with_name(_UNFINISHED))


def _reason(path: Path, error: OSError) -> str:
    return f"cannot write {path}: {error_text(error)}" + (f": {error.filename}" if error.filename else "")
