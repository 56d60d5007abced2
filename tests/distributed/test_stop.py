"""Signals that ask a run to stop: real ones, in this process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed import Backend
from distributed.collectives import Alone
from distributed.engines.reducer import GradientReducer
from distributed.stop import SIGNALS, StopRequest

OnRanks = Callable[..., list[Any]]


@pytest.fixture
def request_() -> Iterator[StopRequest]:
    """Signals are caught while the test runs; the handlers from before come back."""
    before = [signal.getsignal(number) for number in SIGNALS]
    stop = StopRequest(Alone())
    stop.install()
    assert all(signal.getsignal(number) != handler for number, handler in zip(SIGNALS, before, strict=True))
    yield stop
    stop.restore()
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_is_an_answer_and_no_end(number: signal.Signals, request_: StopRequest) -> None:
    assert not request_.agreed()
    assert request_.agreed(here=True) and not request_.agreed()  # a process may ask for it itself, each time
    os.kill(os.getpid(), number)
    assert request_.agreed() and request_.agreed()


def test_a_backend_hears_them_while_it_is_entered(single: Callable[..., Backend]) -> None:
    backend = single()
    assert not backend.stop_requested()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert backend.stop_requested()


def ended_with(*numbers: signal.Signals) -> int:
    """Exit status of a process that gets these signals in turn; 7 if it survives them."""
    child = os.fork()
    if child == 0:
        stop = StopRequest(Alone())
        stop.install()
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.01)
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


INTERRUPT, TERMINATE, USER = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


@pytest.mark.parametrize(
    ("numbers", "status"),
    [
        ([INTERRUPT, INTERRUPT], 130),
        ([TERMINATE, INTERRUPT, INTERRUPT], 130),
        ([INTERRUPT, TERMINATE, INTERRUPT], 130),
        ([INTERRUPT, TERMINATE], 7),
        ([INTERRUPT, USER], 7),
        ([TERMINATE, TERMINATE, TERMINATE, USER, INTERRUPT], 7),
        ([USER, USER, TERMINATE, USER, INTERRUPT], 7),
    ],
)
def test_a_second_interrupt_alone_ends_the_process_at_once(numbers: list[signal.Signals], status: int) -> None:
    assert ended_with(*numbers) == status


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_stop_after_the_same_update_whoever_was_signalled_when(world_size: int, on_ranks: OnRanks) -> None:
    """Rank r hears its signal before update 2 + 3 r; the others hear it from rank 0, one update later."""

    def work(comm: Any) -> list[bool]:
        stop, answers = StopRequest(comm), []
        for update in range(6):
            if update == 2 + 3 * comm.rank:
                stop._receive(signal.SIGTERM, None)
            answers.append(stop.agreed())
        assert stop._pending is not None
        stop.drain()  # waits for the sum under way
        stop.drain()
        assert stop._pending is None
        return answers

    assert on_ranks(world_size, work) == [[False, False, False, True, True, True]] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_request_travels_with_the_gradients_and_needs_no_collective_of_its_own(
    world_size: int, on_ranks: OnRanks
) -> None:
    """As above; a signal that arrives after the last bucket has left is heard of one update later."""

    def work(comm: Any) -> tuple[list[bool], list[str], list[Tensor]]:
        stop, answers = StopRequest(comm), []
        weight = nn.Parameter(torch.zeros(3))
        reducer = GradientReducer([weight], comm, "toy", passenger=stop)
        for update in range(6):
            if update == 2 + 3 * comm.rank:
                stop._receive(signal.SIGTERM, None)
            reducer.backward(weight.sum(), torch.tensor(1.0), 0, False)
            reducer.finish()
            answers.append(stop.agreed())
        return answers, comm.calls, reducer.gradients

    for answers, calls, gradients in on_ranks(world_size, work):
        assert answers == [False, False, True, True, True, True]
        assert calls == ["toy.gradients.0"] * 6  # in one list with the sums
        assert [gradient.shape for gradient in gradients] == [(4,)]  # 3 in 16 bytes; the flag is none of them


def test_a_request_of_this_call_travels_with_the_next_gradients_or_with_a_sum_of_its_own_at_once(
    on_ranks: OnRanks,
) -> None:
    def work(comm: Any) -> list[bool]:
        stop = StopRequest(comm)
        weight = nn.Parameter(torch.zeros(3))
        reducer = GradientReducer([weight], comm, "toy", passenger=stop)
        answers = []
        for update in range(3):
            reducer.backward(weight.sum(), torch.tensor(1.0), 0, False)
            reducer.finish()
            answers.append(stop.agreed(here=comm.rank == 1 and update == 0))
        stop._arrived = False
        answers.append(stop.agreed(here=comm.rank == 1, now=True))
        return answers

    assert on_ranks(2, work) == [[False, True, True, True]] * 2


class Cuda:
    """What `arrive` needs of a GPU: a tensor that says it is on one, whose copy to the host is there when asked for."""

    def __init__(self, value: float) -> None:
        self.value, self.device, self.dtype = value, torch.device("cuda"), torch.float32


def test_a_gpu_is_asked_one_call_later_so_that_the_host_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    class Event:
        def record(self) -> None: ...
        def synchronize(self) -> None:
            waited.append(update)

    class Pinned:
        def copy_(self, source: Cuda, non_blocking: bool) -> None:
            assert non_blocking
            self.value = source.value

        def __bool__(self) -> bool:
            return bool(self.value)

    monkeypatch.setattr(torch, "empty", lambda *_, **__: Pinned())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    comm = Alone()
    comm.world_size = 2
    stop, answers = StopRequest(comm), []
    for update in range(4):
        stop.depart()
        stop.arrive(Cuda(float(update == 1)))  # type: ignore[arg-type]
        answers.append(stop.agreed())
    assert answers == [False, False, True, True] and waited == [1, 2, 3]
