"""The processes that train, their communication, and how a model is spread over them; see `Backend` and `Engine`.

distributed.add_arguments(parser)
args = parser.parse(argv)
with exit_codes(parser.error, UserMistake), distributed.from_args(args) as backend:  # as `launch` does
    ...
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from tandem.config.converters import non_negative_int, step_count_or_0, timeout
from tandem.io.exits import exit_codes
from tandem.lazy import lazy_names

from .backends import all_backends
from .base import Backend, Options
from .batch import plan_batches
from .errors import TrainingStopped, UserMistake
from .launchers import Launch, detect

if TYPE_CHECKING:
    from .engines.arithmetic import autocast
    from .process_group import ProcessGroup

__all__ = ["Backend", "Launch", "ProcessGroup", "TrainingStopped", "UserMistake", "autocast", "plan_batches"]

__getattr__ = lazy_names(__name__, {"ProcessGroup": "process_group", "autocast": "engines.arithmetic"})


def available() -> dict[str, bool]:
    """Whether each backend's packages are installed."""
    return {name: backend.is_available() for name, backend in all_backends().items()}


def _detect_launch() -> Launch:
    """The launch that the environment describes; a single process if the environment is wrong, because `from_args`
    reports that."""
    try:
        return detect()
    except UserMistake:
        return Launch("python")


def launched_as_root() -> bool:
    """Whether this process prints for all processes, according to its launcher; works before they are connected."""
    return _detect_launch().is_root


def add_arguments(parser: argparse.ArgumentParser, *, trains: bool = True) -> None:
    """Add the flags that all backends share, and the flags of each backend. With `trains=False`, for a script that
    trains nothing, --help hides the flags that have no effect, and `launch_inference` refuses them."""
    group = parser.add_argument_group("distributed")
    # fmt: off
    group.add_argument("--distributed_backend", "--distr_backend", type=str.lower, choices=["auto", *all_backends()],
        default="auto", help="what the processes communicate through; auto: chosen by the launcher that started them")
    group.add_argument("--timeout_minutes", type=timeout, default=30.0, metavar="MINUTES",
        help="end the job when a process makes no progress for this long")
    group.add_argument("--check_replicas_every_n_steps", type=step_count_or_0, default=1000, metavar="UPDATES",
        help="how often to check that all processes hold bit-identical weights; 0: only at the start, as always with "
        "FSDP and ZeRO 3, which shard them")
    group.add_argument("--deterministic", action="store_true",
        help="use deterministic kernels only: a repeated run gives the same bits, but is slower")
    group.add_argument("--batch_parts", type=non_negative_int, default=0, metavar="N",
        help="compute each update's gradient in N equal parts and add them in a fixed order: the same bits on every "
        "backend and every number of processes that divides N, but slower and with one CPU thread per process; 0: off")
    group.add_argument("--reduce_precision", type=str.lower, choices=["fp32", "bf16"], default="fp32",
        help="precision in which processes exchange gradients; bf16 halves the bytes, for slow networks, and rounds "
        "what each process sends to 8 significant bits; not with Horovod")
    # The deepspeed launcher passes this to every script, whatever the backend.
    group.add_argument("--local_rank", type=int, default=None, help=argparse.SUPPRESS)
    # fmt: on
    for backend in all_backends().values():
        backend.add_arguments(group)
    for action in group._group_actions:
        if not trains and action.dest in _training_flags():
            action.help = argparse.SUPPRESS


def _training_flags() -> set[str]:
    """Names of the flags that have no effect in a script that trains nothing."""
    backend_flags = (backend.training_flags for backend in all_backends().values())
    return {"check_replicas_every_n_steps", "batch_parts", "reduce_precision"}.union(*backend_flags)


def launch(
    train: Callable[[argparse.Namespace, dict[str, Any], Backend], None],
    parser: Any,
    args: argparse.Namespace,
    read_previous_plan: Callable[[str], Mapping[str, Any]],
) -> None:
    """Connect the processes and call ``train(args, settings, backend)``. An error becomes an exit code: 2 for a
    ``UserMistake``, which ends all processes with one line. Each error of `tandem.io.exits` has a code of its own.

    Args:
        train: The script's training; settings are all arguments by flag name. Those that the backend's configuration
            gives have the values from there.
        parser: The parser that returned ``args``; it has ``add_arguments``, ``settings(args)``, and ``error(text,
            is_agreed=...)``, which ends this process. ``is_agreed``: all processes end with the same error.
        args: The parsed arguments, which the script has checked.
        read_previous_plan: Output folder -> what ``Backend.describe`` returned when the run there was last started.
    """
    is_new = args.fresh and not _detect_launch().is_restart
    with exit_codes(parser.error, UserMistake):
        backend = from_args(args, {} if is_new else read_previous_plan(args.output_dir))
    with exit_codes(partial(parser.error, is_agreed=True), UserMistake), backend:
        train(args, parser.settings(args), backend)


def from_args(args: argparse.Namespace, previous_batch_plan: Mapping[str, Any] | None = None) -> Backend:
    """Return the chosen backend, not connected yet, after checks of the batch arithmetic and of the configuration. Sets
    the flags in ``args`` that the backend's own configuration gives.

    Args:
        args: The result of a parser to which ``add_arguments`` added the flags.
        previous_batch_plan: What ``Backend.describe`` returned when this run was last started, if it is resumed. If
            there are fewer processes now, each accumulates over more steps, so that none holds more samples at a time.

    Raises:
        UserMistake: the backend is not installed, the batch size does not fit, or flags contradict one another.
    """
    # Without this, PyTorch's store prints a long C++ stack trace when a process is lost, which hides the line that
    # names the lost process.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if args.batch_parts:
        # MKL's matrix products may round differently if an operand begins at another address modulo 16 bytes
        # (measured, most often with one row or one column), and ZeRO packs weights without alignment. MKL reads this
        # variable at its first product ("Conditional numerical reproducibility" in Intel's oneMKL guide).
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    launch = detect()
    backends = all_backends()
    backend = (
        next(choice for choice in backends.values() if choice.is_requested(launch, args))
        if args.distributed_backend == "auto"
        else backends[args.distributed_backend]
    )
    for other in backends.values():
        if other is not backend and (flag := other.flag_in_use(args)):
            raise UserMistake(
                f"{flag} is for {other.name}, but this run uses {backend.name} (--distributed_backend "
                f"{args.distributed_backend}, started by {launch.launcher}); leave the flag out, or use {other.name}"
            )
    if not backend.is_available():
        raise UserMistake(
            f"--distributed_backend {backend.name} is not installed; install it with `{backend.install_hint}`, "
            f"or use one of: {', '.join(name for name, is_installed in available().items() if is_installed)}"
        )
    backend.configure(args, launch)
    if args.batch_parts and args.reduce_precision != "fp32":
        raise UserMistake(
            f"--batch_parts gives the same bits on any number of processes, and --reduce_precision "
            f"{args.reduce_precision} rounds what they exchange; leave out one of the two"
        )
    plan = plan_batches(
        args.batch_size, args.grad_accum_steps, launch.world_size, previous_batch_plan, args.batch_parts
    )
    options = Options(plan, **{f.name: getattr(args, f.name) for f in fields(Options) if f.name != "plan"})
    return backend(launch, options, args)


def launch_inference(run: Callable[[ProcessGroup], None], parser: Any, args: argparse.Namespace) -> None:
    """Like `launch`, for a script that trains nothing: connect the processes and call ``run(processes)``. No batch is
    divided over the processes. ``args`` needs ``cpu_threads``, the number of PyTorch's threads, and no flag of a
    training. Sets ``args.fresh`` to False if the launcher has restarted the job, and ``args.precision`` to that of the
    backend's configuration, if it has one."""
    if unused_flags := sorted(_training_flags() & args.on_command_line):
        parser.error(f"--{unused_flags[0]} is for training, and this script trains nothing: leave it out")
    args.fresh = args.fresh and not _detect_launch().is_restart
    training_defaults = {"grad_accum_steps": 1, "max_grad_norm": 0.0, "max_skipped_updates": 0, "compile": False}
    # No batch size is given, so that another train_batch_size in a DeepSpeed JSON is no contradiction.
    explicit = args.explicit - {"batch_size"}
    with exit_codes(parser.error, UserMistake):
        backend = from_args(
            argparse.Namespace(**{**vars(args), **training_defaults, "batch_size": 0, "explicit": explicit})
        )
    with exit_codes(partial(parser.error, is_agreed=True), UserMistake), backend:
        import torch

        torch.set_num_threads(args.cpu_threads)
        args.fresh = args.fresh and not backend.processes.is_restart
        args.precision = backend.options.precision
        run(backend.processes)
