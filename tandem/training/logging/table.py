"""Metrics as lines on the terminal."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem.training.metrics.directions import FAULTS

_ROWS_PER_HEADING = 20
_CELL_WIDTH = 9  # characters of most numbers
_RATE, _TIME_LEFT = "samples/s", "left"


class MetricsTable:
    """A row of a table of fixed columns for each update that is logged, and a line for each validation.

    Args:
        total_steps: Updates of the whole run.
        columns: Names as in metrics.jsonl, the most important first: metrics of an update, beside its loss, and of a
            validation ("valid/psnr"; without any, all are shown). The last ones are left out if the line has no room.
        width: Maximum characters of a line. Counts of faults (`FAULTS`), which follow a row, may exceed it.
        shows_total: Whether a line has `total_steps` beside its own number.
    """

    def __init__(self, total_steps: int, columns: Sequence[str], width: int, *, shows_total: bool = True) -> None:
        self._total, self._width, self._rows = str(total_steps), width, 0
        self._total_text = f"/{total_steps}" if shows_total else ""
        self._validation_columns = [name.removeprefix("valid/") for name in columns if name.startswith("valid/")]
        names = ["loss", *(name for name in columns if not name.startswith("valid/"))]
        start = f"update {self._total}{self._total_text}"
        while len(start + self._cells({name: name for name in [*names, _RATE, _TIME_LEFT]})) > width and len(names) > 1:
            names.pop()
        self._columns = [*names, _RATE, _TIME_LEFT]

    def lines(self, step: int, metrics: Mapping[str, Any], seconds_left: float | None) -> Iterator[str]:
        """The lines for the metrics after `step` updates, which are those of the update, of a validation, of both or of
        neither. `seconds_left`: until the end of the run; None if unknown."""
        counter = f"{step:>{len(self._total)}}{self._total_text}"
        if "loss" in metrics:
            start = f"update {counter}"
            if self._rows % _ROWS_PER_HEADING == 0:
                yield " " * len(start) + self._cells({name: name for name in self._columns})
            self._rows += 1
            texts = {name: format_number(metrics.get(name)) for name in self._columns}
            texts[_RATE] = format_number(metrics.get("samples_per_second"))
            texts[_TIME_LEFT] = "-" if seconds_left is None else format_time_left(seconds_left)
            yield start + self._cells(texts) + "".join(f"  {n} {metrics[n]}" for n in FAULTS if metrics.get(n))
        for prefix, label in (("valid", "valid"), ("valid_whole", "whole")):
            cells = list(self._validation_cells(metrics, f"{prefix}/"))
            while len(cells) > 1 and len(f"{label:<6} {counter}") + sum(map(len, cells)) > self._width:
                cells.pop()
            if cells:
                yield f"{label:<6} {counter}{''.join(cells)}"

    @staticmethod
    def _cells(texts: Mapping[str, str]) -> str:
        """The texts of a row by column, of the same widths in every row."""
        return "".join(f"  {text:>{max(len(name), _CELL_WIDTH)}}" for name, text in texts.items())

    def _validation_cells(self, metrics: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """The cells of a validation: for the most important metric the values of the trained weights and of their
        averages, for each other metric a single value."""
        values = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
        for number, metric in enumerate(self._validation_columns or values):
            versions = [name for name in values if re.fullmatch(rf"(ema[^/]*/)?{re.escape(metric)}", name)]
            for name in versions if number == 0 and self._validation_columns else versions[:1]:
                yield f"  {name} {format_number(values[name])}"


def format_number(value: Any) -> str:
    """A metric with four significant digits, very large and very small ones with three: 18.20, 0.06431, 7.01e-05. Whole
    numbers are shown as they are."""
    if not isinstance(value, float) or not math.isfinite(value):
        return "-" if value is None else str(value)
    rounded = float(f"{value:.3e}")
    if rounded and not 1e-4 <= abs(rounded) < 1e6:
        return f"{value:.2e}"
    decimals = max(0, 3 - math.floor(math.log10(abs(rounded)))) if rounded else 3
    return f"{value:.{decimals}f}"


def format_time_left(seconds: float) -> str:
    """`0:08`, `3:20`, `5h02`, `2d05h`."""
    rounded = max(0, round(seconds))
    if rounded < 3600:
        return f"{rounded // 60}:{rounded % 60:02d}"
    minutes = rounded // 60
    return f"{minutes // 60}h{minutes % 60:02d}" if minutes < 6000 else f"{minutes // 1440}d{minutes // 60 % 24:02d}h"
