"""Signals that ask a run to stop: real ones, in this process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from distributed import Backend
from distributed.collectives import Alone
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
