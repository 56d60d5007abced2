"""Results: one row per comparison, with the values of every round; a table for people and JSON for programs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

_HEADINGS = ("benchmark", "unit", "ours", "reference", "ratio: min", "median", "max", "goal", "met")


class Spread(NamedTuple):
    """Minimum, median and maximum over several rounds."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of ``values``, of which there is at least one."""
        return cls(min(values), statistics.median(values), max(values))


@dataclass(frozen=True)
class Goal:
    """What the median over the rounds should be."""

    of: Literal["ratio", "ours"]
    relation: Literal[">=", "<"]
    limit: float

    def __str__(self) -> str:
        return f"{self.of} {self.relation} {self.limit:g}"

    def is_met(self, median: float) -> bool:
        """Whether ``median``, the median of what ``of`` names, meets the goal."""
        return median >= self.limit if self.relation == ">=" else median < self.limit


@dataclass(frozen=True)
class Row:
    """One comparison. Round i gave ``ours[i]`` and ``reference[i]``, taken in turn; both are empty if nothing could be
    measured, and ``note`` says why."""

    name: str
    unit: str
    ours: Sequence[float] = ()
    reference: Sequence[float] = ()
    goal: Goal | None = None
    note: str = ""

    @property
    def ratios(self) -> list[float]:
        """Ours over the reference, round by round."""
        return [ours / reference for ours, reference in zip(self.ours, self.reference, strict=True)]

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal or without a measurement."""
        if self.goal is None or not self.ours:
            return None
        return self.goal.is_met(statistics.median(self.ratios if self.goal.of == "ratio" else self.ours))

    def as_json(self) -> dict[str, Any]:
        """JSON values: the rounds themselves and their min, median and max."""
        measured = {"ours": self.ours, "reference": self.reference, "ratio": self.ratios}
        return {
            "name": self.name,
            "unit": self.unit,
            **{name: _spread_json(values) for name, values in measured.items()},
            "goal": None if self.goal is None else str(self.goal),
            "met": self.met,
            "note": self.note,
        }

    def cells(self) -> list[str]:
        """The row of the table, without the note."""
        goal = "" if self.goal is None else str(self.goal)
        if not self.ours:
            return [self.name, self.unit, *["-"] * 5, goal, "-" if self.goal else ""]
        middle = [_number(statistics.median(values)) for values in (self.ours, self.reference)]
        ratio = [f"{value:.3f}" for value in Spread.of(self.ratios)]
        return [self.name, self.unit, *middle, *ratio, goal, {True: "yes", False: "NO", None: ""}[self.met]]


def table(rows: Iterable[Row]) -> str:
    """The rows as aligned columns, notes at the end of their lines; ours and reference are medians."""
    rows = list(rows)
    lines = [list(_HEADINGS), *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADINGS))]
    numeric = range(2, 7)
    text = []
    for line, note in zip(lines, ["note", *(row.note for row in rows)], strict=True):
        aligned = [
            cell.rjust(width) if column in numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join([*aligned, note]).rstrip())
    text.insert(1, "-" * max(len(line) for line in text))
    return "\n".join(text)


class HasJson(Protocol):
    """A row of any kind."""

    def as_json(self) -> dict[str, Any]: ...


def write_json(path: Path, machine: Mapping[str, Any], rows: Iterable[HasJson]) -> None:
    """Write ``{"machine": {...}, "rows": [...]}`` to ``path``; make its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": dict(machine), "rows": [row.as_json() for row in rows]}
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _spread_json(values: Sequence[float]) -> dict[str, Any] | None:
    return {**Spread.of(values)._asdict(), "rounds": list(values)} if values else None


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
