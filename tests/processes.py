"""Several processes as threads of a test, and one process as scripts have it: the only stand-ins for processes.

    assert on_processes(3, lambda process: process.sum({"one": 1})) == [{"one": 3.0}] * 3

A `Process` is the product's own; only the two primitives through which it meets the others are a test's.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from tandem import distributed
from tandem.distributed import Backend, Launch, plan_batches
from tandem.distributed.base import Connection, Options
from tandem.distributed.collectives import Communicator, Handle
from tandem.distributed.process_group import ProcessGroup
from tandem.distributed.signals import StopRequest

OF_A_SCRIPT: dict[str, Any] = {
    "batch_size": 12, "grad_accum_steps": 1, "precision": "fp32", "max_grad_norm": 0.0, "max_skipped_updates": 20,
    "compile": False, "learning_rate": 1e-3, "explicit": frozenset(),
}  # fmt: skip


def parsed(*flags: str, **values: Any) -> argparse.Namespace:
    """Arguments as a script has them; ``values`` are those of its own flags."""
    parser = argparse.ArgumentParser()
    distributed.add_arguments(parser)
    return argparse.Namespace(**{**OF_A_SCRIPT, **vars(parser.parse_args(flags)), **values})


def single(**values: Any) -> Backend:
    """The real backend of one process, to be entered."""
    return distributed.from_args(parsed(distributed_backend="single", **values))


def python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, in the folder of the repository."""
    command, variables = [sys.executable, "-c", program], {**os.environ, **environment}
    root = Path(__file__).resolve().parents[1]
    return subprocess.run(command, env=variables, cwd=root, capture_output=True, text=True)


class ThreadBackend(Backend):
    """The backend of one of several processes, or of the only one; it is connected.

    Args:
        comm: What it meets the others through, e.g. ``Root(512)``.
        values: Of the flags of ``Options`` and of the batch.
    """

    name, auto_order = "threads", 0

    def __init__(self, comm: Communicator | None = None, **values: Any) -> None:
        comm = comm or Communicator()
        plan = plan_batches(
            values.get("batch_size", comm.world_size), values.get("grad_accum_steps", 1), comm.world_size,
            batch_parts=values.get("batch_parts", 0),
        )  # fmt: skip
        known = {field.name for field in fields(Options)}
        options = Options(plan, **{name: value for name, value in values.items() if name in known})
        super().__init__(Launch("python", comm.rank, 0, comm.world_size), options, argparse.Namespace())
        self.processes = Process(comm)

    @classmethod
    def is_requested(cls, launch: Launch, args: argparse.Namespace) -> bool:
        return False

    def connect(self) -> Connection:
        raise AssertionError("it is connected")

    def disconnect(self, gracefully: bool) -> None:
        """Nothing is left."""


class Process(ProcessGroup):
    """One of several processes, or the only one; it hears the signals in ``received``. A watchdog of its own alone."""

    def __init__(self, comm: Communicator | None = None) -> None:
        comm = comm or Communicator()
        # But for handlers of signals, which the main thread alone may set.
        signals = MagicMock(received=set(), is_orphan=lambda: False)
        super().__init__(Launch("python", 0, 0, 1), torch.device("cpu"), Communicator(), signals, timeout_minutes=1.0)
        self.rank, self.world_size, self.comm = comm.rank, comm.world_size, comm
        self.received: set[int] = signals.received
        self.stop = StopRequest(comm, self.received)


def on_processes(world_size: int, work: Callable[[Any], Any], **options: Any) -> list[Any]:
    """What the work returns on each process, given its `ProcessGroup`; see `on_backends`."""
    return on_backends(world_size, lambda backend: work(backend.processes), **options)


def on_backends(
    world_size: int,
    work: Callable[[Any], Any],
    *,
    catches: type[Exception] | tuple[type[Exception], ...] = (),
    **values: Any,
) -> list[Any]:
    """What the work returns on each process, given its backend, by rank, or an error that it ``catches``; any other
    error is raised. A single process is the calling thread."""
    meeting = _Meeting(world_size)

    def main(rank: int) -> Any:
        try:
            return work(ThreadBackend(Threads(rank, meeting), **values))
        except catches as error:
            return error
        finally:
            meeting.leave(rank)

    def run(rank: int) -> None:
        try:
            found[rank].set_result(main(rank))
        except BaseException as error:
            found[rank].set_exception(error)

    if world_size == 1:
        return [main(0)]
    # An optimizer imports it at its first step, and threads that import it together may wait for one another for ever.
    importlib.import_module("torch._dynamo")
    found = [Future[Any]() for _ in range(world_size)]
    # Not of a pool: a loader process that is forked out of a thread of one would wait for itself at its end.
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors := [error for rank in found if (error := rank.exception())]:
        raise min(errors, key=lambda error: isinstance(error, InVainError))
    return [rank.result() for rank in found]


class InVainError(AssertionError):
    """A process waits for one that has ended, or that calls another collective: real ones would hang."""


class Threads(Communicator):
    """The primitives between threads. A sum adds the tensors as they were at the call, in the order of ranks; it
    appears when its handle is waited for, and until then the tensor holds NaN or -77. The n-th calls of all ranks must
    have the same name.

    Attributes:
        calls, sent: The names of this rank's collectives, and what it handed in.
    """

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.world_size, self._meeting = rank, meeting.world_size, meeting
        self.calls: list[str] = []
        self.sent: list[Tensor] = []

    def all_reduce_(self, tensor: Tensor, name: str) -> _Sum:
        number = self._hand_in(tensor, name)
        tensor.detach().fill_(torch.nan if tensor.is_floating_point() else -77)
        return _Sum(tensor, lambda: self._meeting.wait_for(number))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [part.clone() for part in self._meeting.wait_for(self._hand_in(tensor, "all_gather"))]

    def _hand_in(self, tensor: Tensor, name: str) -> int:
        self.calls.append(name)
        self.sent.append(tensor.detach().clone())
        return self._meeting.hand_in(self.rank, name, self.sent[-1])


class _Sum:
    def __init__(self, tensor: Tensor, parts: Callable[[], list[Tensor]]) -> None:
        self._tensor, self._parts, self._done = tensor, parts, False

    def wait(self) -> None:
        if not self._done:
            first, *others = self._parts()
            self._tensor.copy_(sum(others, start=first))
            self._done = True


class _Meeting:
    """What each rank has handed in so far, and which ranks have ended."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self._changed = world_size, threading.Condition()
        self._calls: list[list[tuple[str, Tensor]]] = [[] for _ in range(world_size)]
        self._has_left = [False] * world_size

    def hand_in(self, rank: int, name: str, tensor: Tensor) -> int:
        with self._changed:
            number = len(self._calls[rank])
            for other, calls in enumerate(self._calls):
                if number < len(calls) and calls[number][0] != name:
                    raise InVainError(f"call {number} is {name} on rank {rank} and {calls[number][0]} on rank {other}")
            self._calls[rank].append((name, tensor))
            self._changed.notify_all()
            return number

    def leave(self, rank: int) -> None:
        with self._changed:
            self._has_left[rank] = True
            self._changed.notify_all()

    def wait_for(self, number: int) -> list[Tensor]:
        """The tensors of the n-th call of all ranks."""
        with self._changed:
            for rank, calls in enumerate(self._calls):
                while len(calls) <= number:
                    if self._has_left[rank]:
                        raise InVainError(f"rank {rank} has ended without call {number}")
                    self._changed.wait()
            return [calls[number][1] for calls in self._calls]


class Root(Communicator):
    """The communicator of the root of so many processes, of which the others are not there: they have nothing to add to
    a sum, and hold what the root holds. `calls` gets the names of its collectives."""

    def __init__(self, world_size: int, calls: list[str] | None = None) -> None:
        self.world_size, self.calls = world_size, [] if calls is None else calls

    def all_reduce_(self, tensor: Tensor, name: str) -> Handle:
        self.calls.append(name)
        return super().all_reduce_(tensor, name)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self.calls.append("all_gather")
        return [tensor] * self.world_size
