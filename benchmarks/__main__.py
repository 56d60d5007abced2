"""Run the benchmarks, print their tables, write a JSON file. A missed goal is shown, but is not a failure."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import benchmarks

from .loading import loading
from .report import Row, add_names, results
from .saving import saving
from .training import exchange, memory, scaling, training

BENCHMARKS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "training": lambda args: training(args.rounds),
    "loading": lambda args: loading(args.rounds, args.image_folder),
    "scaling": lambda args: scaling(args.rounds),
    "exchange": lambda args: exchange(args.rounds),
    "memory": lambda args: memory(),
    "saving": lambda args: saving(args.rounds),
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=benchmarks.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_names(parser, "--only", BENCHMARKS)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of each comparison (default: 5)")
    parser.add_argument("--image_folder", metavar="DIR",
                        help="images for the loader (default: JPEGs of 500 x 375 pixels, generated)")  # fmt: skip
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "latest.json", metavar="FILE",
                        help="where to write the results (default: benchmarks/results/latest.json)")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    results({name: partial(BENCHMARKS[name], args) for name in args.only}, args.json)


if __name__ == "__main__":
    main()
