"""Metrics as a table on the terminal."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem.training.metrics.directions import FAULTS

_ROWS_PER_HEADING = 20  # of the table between two headings
_CELL_WIDTH = 9  # characters of most numbers
_VALUE_WIDTH = 20  # of " 0.09475 (-0.00428)", a value of a validation and its change


class MetricsTable:
    """A row of a table for each update that is logged, and a line of its own for each validation.

    Args:
        total_steps: Updates of the whole run.
        columns: Names as in metrics.jsonl, the most important first: metrics of an update, beside its loss, and of a
            validation ("valid/psnr"; without any, all are shown). The last ones are left out if the line has no room.
        width: Characters of a line.
    """

    def __init__(self, total_steps: int, columns: Sequence[str], width: int) -> None:
        self._total, self._width = str(total_steps), width
        self._update_columns = ["loss", *(name for name in columns if not name.startswith("valid/"))]
        self._validation_columns = [name.removeprefix("valid/") for name in columns if name.startswith("valid/")]
        self._heading, self._rows = "", 0
        self._previous: dict[str, Any] = {}

    def remember(self, metrics: Mapping[str, Any]) -> None:
        """Set the values of a validation, with which the next one is compared."""
        validation = {name: value for name, value in metrics.items() if name.startswith("valid/")}
        # Values from a damaged file are not compared.
        self._previous |= {n: v for n, v in validation.items() if isinstance(v, int | float) and abs(v) < 1e300}

    def lines(self, step: int, metrics: Mapping[str, Any], seconds_left: float | None) -> Iterator[str]:
        """The lines for the metrics after `step` updates: of the update, of a validation, of both or of neither.
        `seconds_left` until the end of the run, None if unknown."""
        clock = f"{step:>{len(self._total)}}/{self._total}"
        if any(name in metrics for name in self._update_columns):
            yield from self._row(clock, metrics, "-" if seconds_left is None else format_time_left(seconds_left))
        for prefix, label in (("valid", "valid"), ("valid_whole", "whole")):
            if cells := list(self._validation_cells(metrics, prefix)):
                yield self._fit_line(f"{label:<6} {clock}  ", cells).rstrip()
        self.remember(metrics)

    def _row(self, clock: str, metrics: Mapping[str, Any], time_text: str) -> Iterator[str]:
        """A row for an update; before it the heading, if that has changed or 20 rows have passed."""
        fixed_cells = {"samples/s": format_number(metrics.get("samples_per_second")), "left": time_text}
        # Counts of faults are not shown as long as they are 0.
        fixed_cells |= {name: str(metrics[name]) for name in FAULTS if metrics.get(name)}
        cells = {name: format_number(metrics.get(name)) for name in self._update_columns}
        row_cells, start = {**cells, **fixed_cells}, f"update {clock}"
        widths = {name: max(len(name), 6 if name in fixed_cells else _CELL_WIDTH) for name in row_cells}
        # The loss, the rate and the time stay; of the faults, the first ones.
        for name in [*reversed(list(cells)[1:]), *reversed(list(fixed_cells)[2:])]:
            if len(start) + sum(widths.values()) + 2 * len(widths) > self._width:
                del row_cells[name], widths[name]
        heading = " " * len(start) + "".join(f"  {name:>{widths[name]}}" for name in row_cells)
        if heading != self._heading or self._rows % _ROWS_PER_HEADING == 0:
            self._heading, self._rows = heading, 0
            yield heading
        self._rows += 1
        yield start + "".join(f"  {text:>{widths[name]}}" for name, text in row_cells.items())

    def _validation_cells(self, metrics: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """The cells of a validation: for the most important metric the values of the trained weights and of their
        averages, for each other metric a single value."""
        values = {
            name.removeprefix(f"{prefix}/"): value for name, value in metrics.items() if name.startswith(f"{prefix}/")
        }
        for n, metric in enumerate(self._validation_columns or values):
            versions = [name for name in values if re.fullmatch(rf"(ema[^/]*/)?{re.escape(metric)}", name)]
            for name in versions if n == 0 and self._validation_columns else versions[:1]:
                cell, previous = f"{name} {format_number(values[name])}", self._previous.get(f"{prefix}/{name}")
                if previous is not None:
                    cell += f" ({format_difference(values[name], previous)})"
                yield f"{cell:<{len(name) + _VALUE_WIDTH}}"

    def _fit_line(self, line: str, cells: Sequence[str]) -> str:
        for n, cell in enumerate(cells):
            if len(line) + len(cell.rstrip()) > self._width:
                cell = "" if n else cell.partition(" (")[0]  # the first value stays without its change
            if not cell:
                break
            line += f"{cell}  "
        return line


def format_number(value: Any) -> str:
    """A metric with four significant digits, very large and very small ones with three: 18.20, 0.06431, 7.01e-05. Whole
    numbers are shown as they are."""
    if not isinstance(value, float) or not math.isfinite(value):
        return "-" if value is None else str(value)
    rounded = float(f"{value:.3e}")
    if rounded and not 1e-4 <= abs(rounded) < 1e6:
        return f"{value:.2e}"
    return f"{value:.{_decimals(rounded)}f}"


def format_difference(value: float, before: float) -> str:
    """The change of a metric, with the decimals of `value`, but at most four significant digits: +1.20, -0.00512,
    +3."""
    change = value - before
    if isinstance(change, int) or not math.isfinite(change):
        return f"{change:+}"
    rounded = float(f"{value:.3e}")
    if rounded and not 1e-4 <= abs(rounded) < 1e6:
        return f"{change:+.1e}"
    return f"{change:+.{min(_decimals(rounded), _decimals(float(f'{change:.3e}')))}f}"


def _decimals(value: float) -> int:
    """The decimals of a number that is written with four significant digits."""
    return max(0, 3 - math.floor(math.log10(abs(value)))) if value else 3


def format_time_left(seconds: float) -> str:
    """`0:08`, `3:20`, `5h02`, `2d05h`."""
    rounded = max(0, round(seconds))
    if rounded < 3600:
        return f"{rounded // 60}:{rounded % 60:02d}"
    minutes = rounded // 60
    return f"{minutes // 60}h{minutes % 60:02d}" if minutes < 6000 else f"{minutes // 1440}d{minutes // 60 % 24:02d}h"
