"""Run the benchmarks, print their tables, write a JSON file. A missed goal is shown, but is not a failure."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import benchmarks

from .loading import loading
from .report import Row, add_names, benchmark_parser, run_parts
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
    parser = benchmark_parser("python -m benchmarks", benchmarks.__doc__, "latest.json")
    add_names(parser, "--only", BENCHMARKS)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of each comparison (default: 5)")
    parser.add_argument("--image_folder", metavar="DIR",
                        help="images for the loader (default: JPEGs of 500 x 375 pixels, generated)")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    run_parts({name: partial(BENCHMARKS[name], args) for name in args.only}, args.json)


if __name__ == "__main__":
    main()
