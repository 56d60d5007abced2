"""metrics.jsonl of any length as curves of bounded length: mean, lowest and highest value of neighbouring lines."""

from __future__ import annotations

import math
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tandem.io.reading import counted, open_regular, parse_json, words_of

POINTS = 500  # a longer curve has at least so many, and less than twice as many
MOST_METRICS = 400  # of a run; the memory grows with them
_LONGEST_NAME = 200  # characters of a metric
_LONGEST_LINE = 1 << 20  # bytes
_LARGEST_STEP = 1 << 53  # beyond it a browser's numbers are not exact
_NAMED = 8  # names that a note lists
_TAIL_BYTES = 256  # of what was read last, by which a file is known again
_MOST_RISES = 100  # places where a count rose, of which neighbours are put together beyond that

CLOCK = ("step", "samples", "epoch", "seconds", "time")
"""What a line of metrics says about when it was written; these have no curve."""


class Curve:
    """The values of one metric, and their updates; those that are not finite count as missing."""

    def __init__(self) -> None:
        self._steps, self._values = array("d"), array("d")

    def add(self, step: int, value: float) -> None:
        """Add the value of an update that is later than all before."""
        self._steps.append(step)
        self._values.append(value)

    def as_json(self, points: int = POINTS) -> dict[str, Any]:
        """The curve for the page: x (updates), y (means), lo and hi (only where a point stands for several values), nan
        (updates with missing values), and the facts about all values; numbers with six digits.

        Each point stands for `size` neighbouring values, a power of two so large that there are less than 2 x `points`
        of them. No spike is lost: a point keeps the lowest and the highest of its values beside their mean."""
        import numpy as np  # not at the top: --help is fast

        steps, values = np.array(self._steps), np.array(self._values)
        finite = np.isfinite(values)
        size = 1
        while len(values) // size >= 2 * points:
            size *= 2
        first = np.arange(0, len(values), size)  # value of each point
        counts = np.add.reduceat(finite, first, dtype=int)
        shown = np.where(finite, values, np.nan)
        # Not sum / n, which overflows for values near the largest number that there is.
        parts = np.where(finite, values, 0) / np.repeat(counts.clip(1), size)[: len(values)]
        means = np.where(counts, np.add.reduceat(parts, first), np.nan)
        sizes = np.diff([*first, len(values)])
        x = np.add.reduceat(steps, first) / sizes
        with np.errstate(over="ignore"):
            total = np.nan_to_num(np.nansum(shown))
        found: dict[str, Any] = {
            "x": _short(x), "y": _short(means), "nan": _short(x[counts < sizes]), "size": size,
            "count": int(finite.sum()), "missing": int((~finite).sum()), "sum": float(total),
            **dict.fromkeys(("last", "low", "high")),
        }  # fmt: skip
        if finite.any():
            places = {"last": np.flatnonzero(finite)[-1], "low": np.nanargmin(shown), "high": np.nanargmax(shown)}
            found |= {name: [short(values[at]), int(steps[at])] for name, at in places.items()}
        if size > 1:
            found |= {"lo": _short(np.fmin.reduceat(shown, first)), "hi": _short(np.fmax.reduceat(shown, first))}
        return found

    def rises(self) -> list[list[float]]:
        """Where a count rose: [first update, last update, by how much]; neighbours are put together if there are
        many."""
        found, before = [], 0.0
        for step, value in zip(self._steps, self._values, strict=True):
            if math.isfinite(value) and value > before:
                found.append([step, step, value - before])
                before = value
        while len(found) > _MOST_RISES:
            pairs = (found[n : n + 2] for n in range(0, len(found), 2))
            found = [[pair[0][0], pair[-1][1], sum(each[2] for each in pair)] for pair in pairs]
        return found


def short(value: float) -> float | int | None:
    """A number with six digits, whole ones exactly; None for what is not finite."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < _LARGEST_STEP else float(f"{value:.6g}")


def _short(values: Any) -> list[float | int | None]:
    return [short(value) for value in values.tolist()]


class MetricsFile:
    """metrics.jsonl of a run. `read` reads what was added since the last call, line by line, and all of it anew if the
    file was replaced, as a resumed run does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.clock = {name: Curve() for name in ("samples", "epoch", "seconds")}
        self.last_step, self.last_time = -1, ""
        self._offset, self._tail = 0, b""
        self._lines_out = Counter[str]()  # lines that are left out, by the reason
        self._texts: set[str] = set()  # names of what is no number
        self._names_out: set[str] = set()  # of metrics beyond the limits
        self._is_incomplete, self._failure = False, ""

    def read(self) -> None:
        """Read on. What cannot be read is a note."""
        self._failure, self._is_incomplete = "", False
        try:
            with open_regular(self.path) as file:
                # Not by its inode, which a file that replaces another may get from one that was there before.
                if self._tail != self._before(file):
                    self._forget()
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
                    self._take(line if length <= _LONGEST_LINE else b"")
                self._tail = self._before(file)
        except FileNotFoundError:
            self._forget()
            # A run that has just begun has none; one that is finished had one.
            is_finished = (self.path.parent / "model" / "training.json").exists()
            self._failure = "metrics.jsonl is missing: no curves" if is_finished else ""
        except (OSError, ValueError) as error:
            self._failure = f"metrics.jsonl cannot be read: {words_of(error)}"

    def _before(self, file: BinaryIO) -> bytes:
        """What the file has just before the place where reading goes on."""
        start = max(0, self._offset - _TAIL_BYTES)
        return os.pread(file.fileno(), self._offset - start, start)

    def _take(self, line: bytes) -> None:
        try:
            values = parse_json(line)
            step = values["step"]
            if type(step) is not int or not 0 <= step <= _LARGEST_STEP:
                raise ValueError(step)
        except (ValueError, LookupError, TypeError):
            self._lines_out["which cannot be read"] += 1
            return
        if step <= self.last_step:
            self._lines_out["of updates that had a line before"] += 1
            return
        self.last_step = step
        if isinstance(time := values.get("time"), str):
            self.last_time = time[:40]
        for name, value in values.items():
            if value is None or type(value) in (int, float):
                if curve := self._curve(name):
                    # null is how a run writes what is not finite; float(value) would fail for an endless whole number.
                    curve.add(step, math.nan if value is None else float(repr(value)))
            elif name not in CLOCK and len(self._texts) < MOST_METRICS:
                self._texts.add(name[:_LONGEST_NAME])

    def _curve(self, name: str) -> Curve | None:
        if name in CLOCK:
            return self.clock.get(name)
        if name not in self.curves and len(self.curves) < MOST_METRICS and len(name) <= _LONGEST_NAME:
            self.curves[name] = Curve()
        elif name not in self.curves and len(self._names_out) < MOST_METRICS:
            self._names_out.add(name[:_LONGEST_NAME])
        return self.curves.get(name)

    def notes(self) -> Iterator[str]:
        """What could not be read, in words."""
        if self._failure or self.last_step < 0:
            yield self._failure or "metrics.jsonl has no line yet"
        for reason, count in self._lines_out.items():
            yield f"metrics.jsonl: {counted(count, 'line')} left out, {reason}"
        if self._is_incomplete:
            yield "metrics.jsonl: the last line is incomplete"
        if self._texts:
            names = ", ".join(sorted(self._texts)[:_NAMED]) + (", ..." if len(self._texts) > _NAMED else "")
            yield f"metrics.jsonl: no curves of what is no number: {names}"
        if self._names_out:
            many = f"{'at least ' if len(self._names_out) >= MOST_METRICS else ''}{len(self._names_out)}"
            limits = f"a page has at most {MOST_METRICS} of a run, with names up to {_LONGEST_NAME} characters"
            yield f"metrics.jsonl: {many} metrics left out; {limits}"
