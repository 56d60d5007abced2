"""metrics.jsonl of any length as curves of bounded length: mean, lowest and highest value of neighbouring lines."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, BinaryIO

from tandem.files.reading import open_regular, parse_json

POINTS = 500  # a longer curve has at least so many, and less than twice as many
MOST_METRICS = 400  # of a run; the memory grows with them
_LONGEST_NAME = 200  # characters of a metric
_LONGEST_LINE = 1 << 20  # bytes
_LARGEST_STEP = 1 << 53  # beyond it a browser's numbers are not exact
_TAIL_BYTES = 256  # of what was read last, by which a file is known again
_MOST_RISES = 100  # places where a count rose, of which neighbours are put together beyond that

CLOCK = ("step", "samples", "epoch", "seconds", "time")
"""What a line of metrics says about when it was written; these have no curve."""
COUNTS = ("skipped_updates", "bad_samples")
"""Metrics that count faults since the beginning of the run."""


class Curve:
    """The values of one metric. Each point stands for `size` neighbouring values, 1 at first; whenever there are
    2 x `points` of them, each two become one. So the memory is bounded, and no spike is lost: a point keeps the
    lowest and the highest of its values beside their mean. Values that are not finite count as missing."""

    def __init__(self, points: int = POINTS) -> None:
        self._most, self.size = 2 * points, 1
        # Of each point: mean update, number of finite values, their mean, lowest and highest value, missing values.
        self._points: list[tuple[float, int, float, float, float, int]] = []
        self._steps: list[int] = []
        self._values: list[float] = []
        self.count = self.missing = 0
        self.total = 0.0
        #: The last value, and the lowest and highest ones, each with its update; None if no value is finite.
        self.last: tuple[float, int] | None = None
        self.low: tuple[float, int] | None = None
        self.high: tuple[float, int] | None = None

    def add(self, step: int, value: float) -> None:
        """Add the value of an update that is later than all before."""
        self._steps.append(step)
        self._values.append(value)
        if len(self._values) == self.size:
            self._close()

    def _close(self) -> None:
        """Make a point of the values that wait for one."""
        steps, values = self._steps, self._values
        if not values:
            return
        finite = [value for value in values if math.isfinite(value)]
        missing = len(values) - len(finite)
        self.count += len(finite)
        self.missing += missing
        low = high = mean = math.nan
        if finite:
            low, high = min(finite), max(finite)
            # Not sum / n, which overflows for values near the largest number that there is.
            mean = finite[0] if len(finite) == 1 else math.fsum(value / len(finite) for value in finite)
            self.total += mean * len(finite)
            if self.low is None or low < self.low[0]:
                self.low = (low, steps[values.index(low)])
            if self.high is None or high > self.high[0]:
                self.high = (high, steps[values.index(high)])
            self.last = next((v, s) for v, s in zip(reversed(values), reversed(steps), strict=True) if math.isfinite(v))
        self._points.append((sum(steps) / len(steps), len(finite), mean, low, high, missing))
        self._steps, self._values = [], []
        if len(self._points) == self._most:
            self._points = [_merged(*self._points[n : n + 2]) for n in range(0, len(self._points), 2)]
            self.size *= 2

    def as_json(self) -> dict[str, Any]:
        """The curve for the page: x (updates), y (means), lo and hi (only where a point stands for several values), nan
        (updates with missing values), and the facts about all values; numbers with six digits."""
        rest = Curve()
        rest.size, rest._steps, rest._values = self.size, list(self._steps), list(self._values)
        rest.last, rest.low, rest.high = self.last, self.low, self.high
        rest._close()  # of a copy, because more values may follow
        points = [*self._points, *rest._points]
        found: dict[str, Any] = {
            "x": [short(point[0]) for point in points],
            "y": [short(point[2]) for point in points],
            "nan": [short(point[0]) for point in points if point[5]],
            "size": self.size,
            "count": self.count + rest.count,
            "missing": self.missing + rest.missing,
            "sum": self.total + rest.total,
            "last": _pair(rest.last),
            "low": _pair(rest.low),
            "high": _pair(rest.high),
        }
        if self.size > 1:
            found |= {"lo": [short(point[3]) for point in points], "hi": [short(point[4]) for point in points]}
        return found


def _merged(*points: tuple[float, int, float, float, float, int]) -> tuple[float, int, float, float, float, int]:
    steps, counts, means, lows, highs, missing = zip(*points, strict=True)
    n = sum(counts)
    mean = math.fsum(m * (c / n) for m, c in zip(means, counts, strict=True) if c) if n else math.nan
    low = min(filter(math.isfinite, lows), default=math.nan)
    high = max(filter(math.isfinite, highs), default=math.nan)
    return sum(steps) / len(steps), n, mean, low, high, sum(missing)


def _pair(fact: tuple[float, int] | None) -> list[Any] | None:
    return None if fact is None else [short(fact[0]), fact[1]]


def short(value: float) -> float | int | None:
    """A number with six digits, whole ones exactly; None for what is not finite."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < _LARGEST_STEP else float(f"{value:.6g}")


class Rises:
    """Where a count rose: [first update, last update, by how much]; neighbours are put together if there are many."""

    def __init__(self) -> None:
        self.found: list[list[float]] = []
        self._value = 0.0

    def add(self, step: int, value: float) -> None:
        if value > self._value:
            self.found.append([step, step, value - self._value])
            if len(self.found) > _MOST_RISES:
                pairs = (self.found[n : n + 2] for n in range(0, len(self.found), 2))
                self.found = [[pair[0][0], pair[-1][1], sum(each[2] for each in pair)] for pair in pairs]
        self._value = max(value, self._value) if math.isfinite(value) else self._value


class MetricsFile:
    """metrics.jsonl of a run. `read` reads what was added since the last call, line by line, and all of it anew if the
    file was replaced, as a resumed run does."""

    def __init__(self, path: Path, points: int = POINTS) -> None:
        self.path, self._points = path, points
        self._forget()

    def _forget(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.clock = {name: Curve(self._points) for name in ("samples", "seconds")}
        self.rises = {name: Rises() for name in COUNTS}
        self.lines = 0
        self.last_step, self.last_time, self.first_time = -1, "", ""
        self._offset, self._tail = 0, b""
        self._unreadable = self._repeated = 0
        self._texts: set[str] = set()
        self._left_out: set[str] = set()
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
            self._failure = "metrics.jsonl is missing: no curves"
        except (OSError, ValueError) as error:
            self._failure = f"metrics.jsonl cannot be read: {getattr(error, 'strerror', None) or error}"

    def _before(self, file: BinaryIO) -> bytes:
        """What the file has just before the place where reading goes on."""
        start = max(0, self._offset - _TAIL_BYTES)
        return os.pread(file.fileno(), self._offset - start, start)

    def _take(self, line: bytes) -> None:
        try:
            values = parse_json(line)
            step = values["step"]
            is_line = type(step) is int and 0 <= step <= _LARGEST_STEP
        except (ValueError, LookupError, TypeError):
            is_line = False
        if not is_line:
            self._unreadable += 1
            return
        if step <= self.last_step:
            self._repeated += 1
            return
        self.last_step = step
        self.lines += 1
        if isinstance(time := values.get("time"), str):
            self.last_time = time[:40]
            self.first_time = self.first_time or self.last_time
        for name, value in values.items():
            if value is None:
                value = math.nan  # how a run writes what is not finite
            elif type(value) is int:
                value = _as_float(value)
            elif type(value) is not float:
                if name != "time":
                    self._texts.add(name[:_LONGEST_NAME]) if len(self._texts) < MOST_METRICS else None
                continue
            if name in CLOCK:
                if name in self.clock:
                    self.clock[name].add(step, value)
                continue
            curve = self.curves.get(name)
            if curve is None:
                if len(self.curves) >= MOST_METRICS or len(name) > _LONGEST_NAME:
                    if len(self._left_out) < MOST_METRICS:
                        self._left_out.add(name[:_LONGEST_NAME])
                    continue
                curve = self.curves[name] = Curve(self._points)
            curve.add(step, value)
            if name in COUNTS:
                self.rises[name].add(step, value)

    def notes(self) -> list[str]:
        """What could not be read, in words."""
        found = [self._failure] if self._failure else []
        if not (self._failure or self.lines):
            found.append("metrics.jsonl has no line yet")
        if self._unreadable:
            found.append(f"metrics.jsonl: {_lines(self._unreadable)} left out, which cannot be read")
        if self._repeated:
            found.append(f"metrics.jsonl: {_lines(self._repeated)} left out, of updates that had a line before")
        if self._is_incomplete:
            found.append("metrics.jsonl: the last line is incomplete")
        if self._texts:
            found.append(f"metrics.jsonl: no curves of what is no number: {_list(self._texts)}")
        if self._left_out:
            at_least = "at least " if len(self._left_out) >= MOST_METRICS else ""
            many = f"{at_least}{len(self._left_out)} metrics left out"
            limits = f"a page has at most {MOST_METRICS} of a run, with names up to {_LONGEST_NAME} characters"
            found.append(f"metrics.jsonl: {many}; {limits}")
        return found


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _lines(count: int) -> str:
    return "1 line is" if count == 1 else f"{count} lines are"


def _list(names: set[str]) -> str:
    shown = sorted(names)[:8]
    return ", ".join(shown) + (", ..." if len(names) > len(shown) else "")
