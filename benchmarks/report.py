"""Runs the parts of a benchmark one after the other, prints their results as tables, and writes them as JSON."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from . import machine
from .launching import JobFailed


class NoTime(JobFailed):
    """A job took longer than its limit, which is no mistake."""


@dataclass(frozen=True)
class Row:
    """One line of a part's table.

    Args:
        values: Column -> number or text; empty if there is no result: then ``note`` says why.
        is_bad: The row shows a mistake in this repository, or a job that failed.
        rounds: Of a comparison: side -> the values of every round.
        part: Filled in by `run_parts`.
    """

    name: str
    values: Mapping[str, float | str] = field(default_factory=dict)
    note: str = ""
    is_bad: bool = False
    rounds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    part: str = ""

    def __str__(self) -> str:
        values = ", ".join(f"{column} {cell(value)}" for column, value in self.values.items())
        return " ".join(filter(None, [self.part, self.name, values, f"({self.note})" if self.note else ""]))

    def as_json(self) -> dict[str, Any]:
        """JSON values; JSON has no infinity."""
        finite = {column: value if _is_json(value) else str(value) for column, value in self.values.items()}
        return asdict(replace(self, values=finite))


def _is_json(value: float | str) -> bool:
    return isinstance(value, str) or math.isfinite(value)


def comparison(
    name: str, unit: str, ours: Sequence[float], reference: Sequence[float], note: str = "", goal: float | None = None
) -> Row:
    """The row of a comparison.

    Args:
        ours, reference: The values of both sides in each round.
        goal: Least median of the ratios ours / reference.
    """
    ratios = [a / b for a, b in zip(ours, reference, strict=True)]
    median = statistics.median(ratios)
    values: dict[str, float | str] = {
        "unit": unit, "ours": statistics.median(ours), "reference": statistics.median(reference),
        "ratio": median, "least": min(ratios), "most": max(ratios),
    }  # fmt: skip
    if goal is not None:
        values |= {"goal": f">= {goal:g}", "met": "yes" if median >= goal else "NO"}
    return Row(name, values, note, rounds={"ours": ours, "reference": reference})


def failure_row(name: str, error: Exception) -> Row:
    """The row of a job or a part that failed."""
    text = " ".join(str(error).split())[:300]
    note = text if isinstance(error, JobFailed) else f"failed: {type(error).__name__}: {text}"
    return Row(name, note=note, is_bad=not isinstance(error, NoTime))


def cell(value: float | str) -> str:
    """A value in the table."""
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def table(rows: Sequence[Row]) -> str:
    """A part's Markdown table, as docs/figures.md has them."""
    columns = list(dict.fromkeys(column for row in rows for column in row.values))
    lines = [["", *columns, "note"]]
    lines += [[row.name, *(cell(row.values.get(column, "")) for column in columns), row.note] for row in rows]
    text = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([f"\n## {rows[0].part}\n", text[0], "|---" * len(lines[0]) + "|", *text[1:]])


def run_parts(parts: Mapping[str, Callable[[], Iterator[Row]]], path: Path, **more_facts: Any) -> list[Row]:
    """Run the parts, print their tables and write ``{"machine": {...}, "rows": [...]}`` to ``path``. An error becomes a
    row, so that the other parts still run."""
    facts, start, rows = machine.facts() | more_facts, time.monotonic(), list[Row]()
    try:
        for part, benchmark in parts.items():
            print(f"{part} ...", file=sys.stderr)
            for row in _caught(benchmark):
                rows.append(replace(row, part=part))
                print(f"{time.monotonic() - start:4.0f} s  {rows[-1]}", file=sys.stderr)
    finally:
        facts |= {"load_average_after": list(os.getloadavg()), "seconds": round(time.monotonic() - start, 1)}
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": facts, "rows": [row.as_json() for row in rows]}
        path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    tables = [table(group) for part in parts if (group := [row for row in rows if row.part == part])]
    print(machine.headline(facts), *tables, f"\nwritten to {path}", sep="\n")
    return rows


def _caught(benchmark: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    try:
        yield from benchmark()
    except Exception as error:
        yield failure_row("", error)


def add_names(parser: argparse.ArgumentParser, flag: str, choices: Collection[str]) -> None:
    """Add a flag for a comma list of some of the ``choices`` (default: all), which are returned in their order."""

    def names_of(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if unknown := [name for name in names if name not in choices]:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; there are {', '.join(choices)}")
        return [name for name in choices if name in names]

    parser.add_argument(flag, type=names_of, default=list(choices), metavar="NAMES",
                        help=f"comma list of {', '.join(choices)} (default: all)")  # fmt: skip


def benchmark_parser(name: str, description: str | None, json_name: str) -> argparse.ArgumentParser:
    """A parser with the flag --json, by default ``json_name`` in benchmarks/results/."""
    parser = argparse.ArgumentParser(
        name, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / json_name, metavar="FILE",
                        help=f"where to write the results (default: benchmarks/results/{json_name})")  # fmt: skip
    return parser
