"""Run the benchmarks, print a table, write a JSON file. A missed goal is shown, but is not a failure."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import benchmarks

from . import machine, report
from .flags import names_of
from .loading import loading
from .parts import parts
from .report import Row
from .saving import saving
from .starting import starting
from .training import exchange, memory, scaling, training
from .video_loading import video_loading

BENCHMARKS = (
    "training",
    "parts",
    "loading",
    "video_loading",
    "scaling",
    "exchange",
    "memory",
    "saving",
    "help",
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=benchmarks.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=names_of(BENCHMARKS), default=BENCHMARKS, metavar="NAMES",
                        help=f"comma list of {', '.join(BENCHMARKS)} (default: all)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of each comparison (default: 5)")
    parser.add_argument("--image_folder", metavar="DIR",
                        help="images for the loader (default: JPEGs of 500 x 375 pixels, generated)")  # fmt: skip
    parser.add_argument("--video_folder", metavar="DIR", help="videos for the loader (default: H.264, generated)")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "latest.json", metavar="FILE",
                        help="where to write the results (default: benchmarks/results/latest.json)")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    run: dict[str, Callable[[], Iterator[Row]]] = {
        "training": lambda: training(args.rounds),
        "parts": lambda: parts(args.rounds),
        "loading": lambda: loading(args.rounds, args.image_folder),
        "video_loading": lambda: video_loading(args.rounds, args.video_folder),
        "scaling": lambda: scaling(args.rounds),
        "exchange": lambda: exchange(args.rounds),
        "memory": memory,
        "saving": lambda: saving(args.rounds),
        "help": lambda: starting(args.rounds),
    }
    facts = machine.facts()
    began = time.monotonic()
    rows: list[Row] = []
    try:
        for name in args.only:
            for row in _measured(name, run[name]):
                rows.append(row)
                print(f"{time.monotonic() - began:4.0f} s  {' '.join(row.cells())} {row.note}", file=sys.stderr)
    finally:
        facts |= {"load_average_after": list(os.getloadavg()), "seconds": round(time.monotonic() - began, 1)}
        report.write_json(args.json, facts, rows)
    print(f"\n{machine.headline(facts)}\n\n{report.table(rows)}\n\nwritten to {args.json}")


def _measured(name: str, benchmark: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """The rows of a benchmark. An error becomes a row of its own, so that the other benchmarks still run."""
    print(f"{name} ...", file=sys.stderr)
    try:
        yield from benchmark()
    except (ValueError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
        yield Row(name, "", note=f"failed: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
