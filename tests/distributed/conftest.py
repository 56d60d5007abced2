"""A backend of one process, and several ranks as threads of it."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

import distributed
from distributed import Backend

# What launchers set. Tests set the variables of the launcher that they need.
LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "CROSS_RANK", "LOCAL_SIZE", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
)  # fmt: skip
PATIENCE_SECONDS = 20


@pytest.fixture(autouse=True)
def started_with_python_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher's variables in the environment, whatever a test leaves there, and no GPU, because expected numbers
    are those of CPUs."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.setenv(name, "")  # a variable that is only deleted is not taken away again when a test has set it
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def parsed(*flags: str, **values: Any) -> argparse.Namespace:
    """Arguments as a script has them; ``values`` are those of its own flags."""
    parser = argparse.ArgumentParser()
    distributed.add_arguments(parser)
    parser.set_defaults(
        batch_size=12, grad_accum_steps=1, precision="fp32", max_grad_norm=0.0, max_skipped_updates=20, compile=False,
        learning_rate=1e-3, explicit=frozenset(),
    )  # fmt: skip
    return argparse.Namespace(**{**vars(parser.parse_args(flags)), **values})


@pytest.fixture(name="parsed")
def parsed_fixture() -> Callable[..., argparse.Namespace]:
    return parsed


@pytest.fixture
def single() -> Iterator[Callable[..., Backend]]:
    """Connects backends of one process, e.g. ``single(batch_size=4, precision="bf16")``."""
    with ExitStack() as stack:
        yield lambda **values: stack.enter_context(distributed.from_args(parsed(**values)))


class ThreadCommunicator:
    """The primitives between threads. A sum adds the tensors as they were at the call, in order of rank; its result
    appears when its handle is waited for, and the tensor holds NaN or -77 until then. The n-th calls of all ranks must
    have the same name."""

    def __init__(self, rank: int, world_size: int, meeting: Meeting) -> None:
        self.rank, self.world_size = rank, world_size
        self.calls: list[str] = []
        self.dtypes: list[torch.dtype] = []
        self._meeting = meeting

    def all_reduce_(self, tensor: Tensor, name: str) -> Handle:
        number = self._hand_in(tensor, name)
        tensor.detach().fill_(torch.nan if tensor.is_floating_point() else -77)
        return Handle(tensor, number, self._meeting)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self._meeting.wait_for(self._hand_in(tensor, "all_gather"))

    def shift(self, tensor: Tensor, rows: int) -> Tensor:
        arrived = self._meeting.wait_for(self._hand_in(tensor, "shift"))[self.rank - 1]
        assert len(arrived) == rows, f"{len(arrived)} rows came to rank {self.rank} instead of {rows}"
        return arrived

    def _hand_in(self, tensor: Tensor, name: str) -> int:
        number = len(self.calls)
        self.calls.append(name)
        self.dtypes.append(tensor.dtype)
        self._meeting.hand_in(number, self.rank, name, tensor.detach().clone())
        return number


class Handle:
    def __init__(self, tensor: Tensor, number: int, meeting: Meeting) -> None:
        self._tensor, self._number, self._meeting, self._done = tensor, number, meeting, False

    def wait(self) -> None:
        if not self._done:
            first, *others = self._meeting.wait_for(self._number)
            self._tensor.copy_(sum(others, start=first))
            self._done = True


class Meeting:
    """Holds the tensors that the ranks handed in at their n-th call."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._changed = threading.Condition()
        self._tensors: dict[int, dict[int, Tensor]] = {}
        self._names: dict[int, str] = {}

    def hand_in(self, number: int, rank: int, name: str, tensor: Tensor) -> None:
        with self._changed:
            expected = self._names.setdefault(number, name)
            assert name == expected, f"call {number} is {name} on rank {rank} and {expected} elsewhere"
            self._tensors.setdefault(number, {})[rank] = tensor
            self._changed.notify_all()

    def wait_for(self, number: int) -> list[Tensor]:
        with self._changed:
            complete = lambda: len(self._tensors[number]) == self._world_size  # noqa: E731
            assert self._changed.wait_for(complete, PATIENCE_SECONDS), f"not every rank made call {number}"
            return [self._tensors[number][rank] for rank in range(self._world_size)]


@pytest.fixture
def on_ranks() -> Callable[..., list[Any]]:
    """``on_ranks(2, work)`` -> [work(comm of rank 0), work(comm of rank 1)], run at the same time."""

    def run(world_size: int, work: Callable[[Any], Any]) -> list[Any]:
        meeting = Meeting(world_size)
        with ThreadPoolExecutor(world_size) as threads:
            ranks = [threads.submit(work, ThreadCommunicator(rank, world_size, meeting)) for rank in range(world_size)]
        # Not that a rank waited in vain, where another rank's error is the reason.
        if errors := [error for rank in ranks if (error := rank.exception())]:
            raise min(errors, key=lambda error: "not every rank made call" in str(error))
        return [rank.result() for rank in ranks]

    return run
