"""Who am I, how do we talk, how is a model spread: one layer, a backend per file.

distributed.add_arguments(parser)
args = parser.parse(argv)
with distributed.from_args(args) as backend:
    ...
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Mapping
from typing import Any

from .backends import all_backends
from .base import Backend, Engine
from .batch import BatchPlan, plan_batches
from .errors import TrainingStopped, UserMistake
from .launchers import Launch, detect
from .options import Options, Update

__all__ = [
    "Backend",
    "BatchPlan",
    "Engine",
    "Launch",
    "Options",
    "TrainingStopped",
    "Update",
    "UserMistake",
    "add_arguments",
    "available",
    "for_inference",
    "from_args",
    "launched_again",
    "launched_as_root",
    "plan_batches",
]


def available() -> dict[str, bool]:
    """Every backend, and whether what it needs is installed."""
    return {name: backend.is_available() for name, backend in all_backends().items()}


def launched_as_root() -> bool:
    """Whether this process is the one that speaks, as its launcher tells it; needs no connection."""
    try:
        return detect().is_root
    except ValueError:
        return True


def launched_again() -> bool:
    """Whether the launcher started this run before, and does so again with the same arguments."""
    try:
        return detect().is_restart
    except ValueError:
        return False


def _minutes(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")


def _steps(text: str) -> int:
    with contextlib.suppress(ValueError):
        if int(text) >= 0:
            return int(text)
    raise argparse.ArgumentTypeError(f"expected a whole number, 0 or more, got {text!r}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the layer itself and of every backend."""
    group = parser.add_argument_group("distributed")
    group.add_argument(
        "--distributed_backend",
        "--distr_backend",
        type=str.lower,
        choices=["auto", *all_backends()],
        default="auto",
        help="who the processes talk through; auto reads the launcher's environment",
    )
    group.add_argument(
        "--timeout_minutes",
        type=_minutes,
        default=30.0,
        metavar="MINUTES",
        help="end the job when a process has got nowhere for this long",
    )
    group.add_argument(
        "--check_replicas_every_n_steps",
        type=_steps,
        default=1000,
        metavar="UPDATES",
        help="compare the weights of all processes bit for bit, where they must be equal; 0: only at the start",
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="deterministic kernels alone: the same run gives the same bits on CPUs and GPUs, at some cost",
    )
    group.add_argument(
        "--batch_parts",
        type=_steps,
        default=0,
        metavar="N",
        help="compute each update in N equal parts, wherever they run, and add them in a fixed order: the same bits on "
        "every backend and every number of processes that divides N, at some cost; one CPU thread per process; "
        "0: as it is fastest",
    )
    # The deepspeed launcher passes this to every script, whatever backend is used.
    group.add_argument("--local_rank", type=int, default=None, help=argparse.SUPPRESS)
    for backend in all_backends().values():
        backend.add_arguments(group)


def from_args(args: argparse.Namespace, last_start: Mapping[str, Any] | None = None) -> Backend:
    """The backend that was asked for, not connected yet; batch arithmetic and configuration are checked before
    anything starts, and ``args`` is filled with what the backend's own configuration says.

    Args:
        args: Of a parser with ``add_arguments``.
        last_start: What ``Backend.describe`` said when the run that goes on here was last started. If there are fewer
            processes now, accumulation grows so that none has to hold more samples at a time.

    Raises:
        UserMistake: a missing installation, a batch size that does not fit, contradicting configuration.
    """
    # A process that is gone makes PyTorch's store print pages of C++ stack, in which the one line that matters drowns.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if args.batch_parts:
        # MKL's matrix products may round otherwise where an operand begins at another address modulo 16 bytes
        # (measured, most often where there is one row or one column), and ZeRO lays weights end to end. MKL reads this
        # at its first product ("Conditional numerical reproducibility" in Intel's oneMKL guide).
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    try:
        launch = detect()
    except ValueError as error:
        raise UserMistake(str(error)) from None
    backend = _choose(args, launch)
    for other in all_backends().values():
        if other is not backend and (flag := other.flag_said(args)):
            raise UserMistake(
                f"{flag} is for {other.name}, but this run uses {backend.name} (--distributed_backend "
                f"{args.distributed_backend}, started by {launch.launcher}); leave the flag out, or use {other.name}"
            )
    if not backend.is_available():
        raise UserMistake(
            f"--distributed_backend {backend.name} is not installed; install it with `{backend.install_hint}`, "
            f"or use one of: {', '.join(name for name, there in available().items() if there)}"
        )
    if backend.name == "single":
        _refuse_lonely_copies(launch)
        launch = Launch("python", is_restart=launch.is_restart)
    backend.configure(args, launch)
    plan = plan_batches(args.batch_size, args.grad_accum_steps, launch.world_size, last_start, args.batch_parts)
    options = Options(
        plan=plan,
        precision=args.precision,
        max_grad_norm=args.max_grad_norm,
        max_skipped_updates=args.max_skipped_updates,
        compile=args.compile,
        timeout_minutes=args.timeout_minutes,
        check_replicas_every_n_steps=args.check_replicas_every_n_steps,
        deterministic=args.deterministic,
    )
    return backend(launch, options, args)


def for_inference(args: argparse.Namespace) -> Backend:
    """As `from_args`, for a script that trains nothing: no batch is shared by the processes, and `args` needs no flags
    of training. Sets `args.fresh` to False where the launcher starts a job again."""
    args.fresh = args.fresh and not launched_again()
    without_training = {"grad_accum_steps": 1, "max_grad_norm": 0.0, "max_skipped_updates": 0, "compile": False}
    explicit = args.explicit - {"batch_size"}
    return from_args(argparse.Namespace(**{**vars(args), **without_training, "batch_size": 0, "explicit": explicit}))


def _choose(args: argparse.Namespace, launch: Launch) -> type[Backend]:
    backends = all_backends()
    if args.distributed_backend != "auto":
        return backends[args.distributed_backend]
    return next(backend for backend in backends.values() if backend.was_launched(launch, args))


def _refuse_lonely_copies(launch: Launch) -> None:
    """N processes that each train alone would overwrite one another."""
    if launch.world_size > 1:
        raise UserMistake(
            f"--distributed_backend single, but {launch.launcher} started {launch.world_size} processes; "
            f"start the script with python, or leave the choice to auto"
        )
