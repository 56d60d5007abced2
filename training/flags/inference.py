"""Flags of the scripts that use trained weights. Standard library only, so that `--help` answers at once."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tandem.converters import PRECISIONS, size, thread_count, worker_count

if TYPE_CHECKING:
    from distributed import Backend


def add_output_arguments(group: argparse._ArgumentGroup, *, output_help: str, required: bool = False) -> None:
    """Add --output and --fresh to a group of flags."""
    group.add_argument("--output", "--output_dir", required=required, metavar="DIR", help=output_help)
    group.add_argument("--fresh", action="store_true", help="start over; the old content is moved to DIR.old-N")


def add_computation_arguments(
    parser: argparse.ArgumentParser, *, batch_size: int, unit: str, num_workers_help: str
) -> None:
    """Add the flags of the forward pass. `unit` is what a batch is counted in: "IMAGES"."""
    # fmt: off
    add = parser.add_argument_group("computation").add_argument
    add("--batch_size", type=size, default=batch_size, metavar=unit, help="per forward pass of a process")
    add("--precision", type=str.lower, choices=PRECISIONS, default="fp32",
        help="precision of the forward pass; tf32: fp32 whose products GPUs may round to 10 bits of the mantissa")
    add("--num_workers", type=worker_count, default=2, metavar="N", help=num_workers_help)
    add("--cpu_threads", type=thread_count, default=1, metavar="N",
        help="threads of each process, on a CPU; starting more processes is faster than more threads")
    # fmt: on


def kernel_settings(args: argparse.Namespace, processes: Backend) -> dict[str, Any]:
    """Settings that choose the kernels, so that the last bits of a result depend on them besides model and input."""
    device = processes.device.type
    threads = args.cpu_threads if device == "cpu" else None
    precision = processes.options.precision
    return {"precision": precision, "deterministic": args.deterministic, "device": device, "cpu_threads": threads}
