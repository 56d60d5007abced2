"""Reads metrics.jsonl of any length into curves of bounded length: mean, lowest and highest value of adjacent lines."""

from __future__ import annotations

import math
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tandem.io.reading import counted, error_text, open_regular, parse_json
from tandem.training.metrics.directions import EVALUATION_SECONDS

POINTS = 500  # a curve of more values has 500 to 1000 points
MOST_METRICS = 400  # of a run; the memory grows with them
_LONGEST_NAME = 200  # characters of a metric
_LONGEST_LINE = 1 << 20  # bytes
_LARGEST_STEP = 1 << 53  # beyond it a browser's numbers are not exact
_MOST_NAMES = 8  # names that a note lists
_TAIL_BYTES = 256  # compared before each read: other bytes before the offset mean that the file was replaced
_MOST_RISES = 100  # more rises of a count are merged with their neighbours

CLOCK = ("step", "samples", "epoch", "seconds", "time")
"""Keys of a line of metrics that say when it was written. The page draws no chart of them; `MetricsFile.clock` reads
some for the horizontal axis and the costs."""


class Curve:
    """The values of one metric, and their updates; those that are not finite count as missing."""

    def __init__(self) -> None:
        self._steps, self._values = array("d"), array("d")

    def add(self, step: int, value: float) -> None:
        """Add the value of an update that is later than all before."""
        self._steps.append(step)
        self._values.append(value)

    def as_json(self, points: int = POINTS) -> dict[str, Any]:
        """The curve for the page: x (updates), y (means), lo and hi (lowest and highest values, if a point stands for
        several), nan (updates with missing values), and statistics of all values; numbers with six digits.

        Each point stands for `size` neighbouring values, the smallest power of two that gives at most 2 x `points`
        points. `lo` and `hi` keep every spike."""
        import numpy as np  # not at the top: --help is fast

        steps, values = np.array(self._steps), np.array(self._values)
        finite = np.isfinite(values)
        size = 1
        while len(values) // size >= 2 * points:
            size *= 2
        starts = np.arange(0, len(values), size)  # index of the first value of each point
        counts = np.add.reduceat(finite, starts, dtype=int)
        valid = np.where(finite, values, np.nan)
        # Divide before summing: sum / n overflows for values near the largest float.
        shares = np.where(finite, values, 0) / np.repeat(counts.clip(1), size)[: len(values)]
        means = np.where(counts, np.add.reduceat(shares, starts), np.nan)
        sizes = np.diff([*starts, len(values)])
        x = np.add.reduceat(steps, starts) / sizes
        with np.errstate(over="ignore"):
            total = np.nan_to_num(np.nansum(valid))
        curve: dict[str, Any] = {
            "x": _round_all(x), "y": _round_all(means), "nan": _round_all(x[counts < sizes]), "size": size,
            "count": int(finite.sum()), "missing": int((~finite).sum()), "sum": float(total),
            **dict.fromkeys(("last", "low", "high")),
        }  # fmt: skip
        if finite.any():
            extremes = {"last": np.flatnonzero(finite)[-1], "low": np.nanargmin(valid), "high": np.nanargmax(valid)}
            curve |= {name: [_round(values[index]), int(steps[index])] for name, index in extremes.items()}
        if size > 1:
            lows, highs = np.fmin.reduceat(valid, starts), np.fmax.reduceat(valid, starts)
            curve |= {"lo": _round_all(lows), "hi": _round_all(highs)}
        return curve

    def rises(self) -> list[list[float]]:
        """The increases of a count: [first update, last update, increase]. More than `_MOST_RISES` are merged in
        pairs."""
        rises, previous = [], 0.0
        for step, value in zip(self._steps, self._values, strict=True):
            if math.isfinite(value) and value > previous:
                rises.append([step, step, value - previous])
                previous = value
        while len(rises) > _MOST_RISES:
            pairs = (rises[n : n + 2] for n in range(0, len(rises), 2))
            rises = [[pair[0][0], pair[-1][1], sum(rise[2] for rise in pair)] for pair in pairs]
        return rises


def _round(value: float) -> float | int | None:
    """A number rounded to six digits, a whole one exactly; None for one that is not finite."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < _LARGEST_STEP else float(f"{value:.6g}")


def _round_all(values: Any) -> list[float | int | None]:
    return [_round(value) for value in values.tolist()]


class MetricsFile:
    """metrics.jsonl of a run. `read` reads the lines that were added since the last call, or the whole file if it was
    replaced: a resumed run replaces it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reset()

    def _reset(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.clock = {name: Curve() for name in ("samples", "epoch", "seconds")}
        self.last_step, self.last_time, self._awaits_evaluation = -1, "", False
        self._offset, self._tail = 0, b""
        self._skipped_lines = Counter[str]()  # lines that are left out, by the reason
        self._text_names: set[str] = set()  # names of values that are no numbers
        self._skipped_names: set[str] = set()  # names of metrics beyond the limits
        self._is_incomplete, self._failure = False, ""

    def read(self) -> None:
        """Read the lines that were added. Errors become notes."""
        self._failure, self._is_incomplete = "", False
        try:
            with open_regular(self.path) as file:
                # Compare the content, because a file that replaces another may get the inode of an earlier one.
                if self._tail != self._read_tail(file):
                    self._reset()
                file.seek(self._offset)
                while line := file.readline(_LONGEST_LINE):
                    length = len(line)
                    while not line.endswith(b"\n") and len(line) == _LONGEST_LINE:  # too long: the rest is skipped
                        line = file.readline(_LONGEST_LINE)
                        length += len(line)
                    if not line.endswith(b"\n"):
                        self._is_incomplete = True
                        break
                    self._offset += length
                    self._add_line(line if length <= _LONGEST_LINE else b"")
                self._tail = self._read_tail(file)
        except FileNotFoundError:
            self._reset()
            # A new run has no file yet; a finished one had one.
            is_finished = (self.path.parent / "model" / "training.json").exists()
            self._failure = "metrics.jsonl is missing: no curves" if is_finished else ""
        except (OSError, ValueError) as error:
            self._failure = f"metrics.jsonl cannot be read: {error_text(error)}"

    def _read_tail(self, file: BinaryIO) -> bytes:
        """The bytes of the file just before the next one to read."""
        start = max(0, self._offset - _TAIL_BYTES)
        return os.pread(file.fileno(), self._offset - start, start)

    def _add_line(self, line: bytes) -> None:
        try:
            values = parse_json(line)
            step = values["step"]
            if type(step) is not int or not 0 <= step <= _LARGEST_STEP:
                raise ValueError(step)
        except (ValueError, LookupError, TypeError):
            self._skipped_lines["which cannot be read"] += 1
            return
        is_evaluation = EVALUATION_SECONDS in values
        # An update may have two lines: one of training, and after it one of its evaluation.
        if step < self.last_step or (step == self.last_step and not (is_evaluation and self._awaits_evaluation)):
            self._skipped_lines["of updates that had a line before"] += 1
            return
        has_line = step == self.last_step
        self.last_step, self._awaits_evaluation = step, not is_evaluation
        if isinstance(time := values.get("time"), str):
            self.last_time = time[:40]
        for name, value in values.items():
            if has_line and name in CLOCK:  # the update's first line had it
                continue
            if value is None or type(value) in (int, float):
                if curve := self._curve(name):
                    # A run writes null for what is not finite. float(value) would fail for a very large whole number.
                    curve.add(step, math.nan if value is None else float(repr(value)))
            elif name not in CLOCK and len(self._text_names) < MOST_METRICS:
                self._text_names.add(name[:_LONGEST_NAME])

    def _curve(self, name: str) -> Curve | None:
        if name in CLOCK:
            return self.clock.get(name)
        if name not in self.curves and len(self.curves) < MOST_METRICS and len(name) <= _LONGEST_NAME:
            self.curves[name] = Curve()
        elif name not in self.curves and len(self._skipped_names) < MOST_METRICS:
            self._skipped_names.add(name[:_LONGEST_NAME])
        return self.curves.get(name)

    def notes(self) -> Iterator[str]:
        """Texts about what could not be read."""
        if self._failure or self.last_step < 0:
            yield self._failure or "metrics.jsonl has no line yet"
        for reason, count in self._skipped_lines.items():
            yield f"metrics.jsonl: {counted(count, 'line')} left out, {reason}"
        if self._is_incomplete:
            yield "metrics.jsonl: the last line is incomplete"
        if self._text_names:
            dots = ", ..." if len(self._text_names) > _MOST_NAMES else ""
            names = ", ".join(sorted(self._text_names)[:_MOST_NAMES]) + dots
            yield f"metrics.jsonl: no curves of what is no number: {names}"
        if self._skipped_names:
            count_text = f"{'at least ' if len(self._skipped_names) >= MOST_METRICS else ''}{len(self._skipped_names)}"
            limits = f"a page has at most {MOST_METRICS} of a run, with names up to {_LONGEST_NAME} characters"
            yield f"metrics.jsonl: {count_text} metrics left out; {limits}"
