"""Run the parts, print their tables, write a JSON file."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import benchmarks.gpu

from .. import machine
from ..references import REFERENCES
from ..report import Row, add_names, benchmark_parser, run_parts
from . import checks
from .plan import Plan
from .speed import speed

# Name -> (the part, its share of ten minutes in seconds).
PARTS: dict[str, tuple[Callable[[Plan], Iterator[Row]], int]] = {
    "tests": (checks.tests, 70),
    "resume": (checks.resume, 90),
    "processes": (checks.processes, 90),
    "waits": (checks.waits, 50),
    "zero": (checks.zero, 60),
    "speed": (speed, 220),  # last, because it can use all the time that is left
}
PRECISIONS = ("bf16", "tf32", "fp16", "fp32")  # the slowest one last


def build_parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("python -m benchmarks.gpu", benchmarks.gpu.__doc__, "gpu.json")
    add = parser.add_argument
    add("--scale", choices=("full", "toy"), default="full", help="toy: tiny models, also without a GPU (default: full)")
    for flag, choices in {"--only": PARTS, "--scripts": REFERENCES, "--precisions": PRECISIONS}.items():
        add_names(parser, flag, choices)
    add("--minutes", type=float, default=10, metavar="M", help="limit of the whole; the parts share it (default: 10)")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    if not 0 < args.minutes < float("inf"):
        parser.error(f"--minutes {args.minutes:g}: expected a number above 0")
    if not machine.gpus() and args.scale == "full":
        # Not 0: a CI job must not take the checks for passed.
        print("python -m benchmarks.gpu: error: PyTorch sees no GPU here; --scale toy tries everything that a CPU can",
              file=sys.stderr)  # fmt: skip
        raise SystemExit(2)
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-") as folder:
        plan = Plan(args.scale == "toy", machine.gpus() > 0, args.scripts, args.precisions, Path(folder))
        parts, deadline = {}, time.monotonic()
        for name in args.only:
            part, seconds = PARTS[name]
            # Cumulative: a part may use the time that the parts before it left.
            deadline += seconds * 60 * args.minutes / sum(PARTS[part_name][1] for part_name in args.only)
            parts[name] = partial(part, replace(plan, deadline=deadline))
        rows = run_parts(parts, args.json, scale=args.scale)
    if bad := [row for row in rows if row.is_bad]:
        print(f"{len(bad)} of {len(rows)} rows are not as they should be:", file=sys.stderr)
        print("\n".join(f"  {row}" for row in bad), file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
