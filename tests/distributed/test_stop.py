"""Signals that ask a run to stop: real ones, in this process."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TextIO

import pytest
import torch
from torch import Tensor, nn

from tandem.distributed import Backend
from tandem.distributed.collectives import Communicator
from tandem.distributed.engines.reducer import GradientReducer
from tandem.distributed.signals import SIGNALS, Signals, StopRequest
from tests.processes import Process, on_backends, on_processes


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    """Those that are ignored, under nohup or in the background of a shell script, have an effect here."""
    of_pytest = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in of_pytest.items():
        signal.signal(number, signal.SIG_DFL if handler == signal.SIG_IGN else handler)
    yield
    for number, handler in of_pytest.items():
        signal.signal(number, handler)


@pytest.fixture
def request_() -> Iterator[StopRequest]:
    """Signals are caught while the test runs; the handlers from before come back."""
    before = [signal.getsignal(number) for number in SIGNALS]
    signals = Signals(lambda: False, is_root=True)
    signals.enable_saving()
    assert all(signal.getsignal(number) != handler for number, handler in zip(SIGNALS, before, strict=True))
    yield StopRequest(Communicator(), signals.received)
    signals.close()
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_is_an_answer_and_no_end(number: signal.Signals, request_: StopRequest) -> None:
    assert not request_.is_agreed()
    assert (
        request_.is_agreed(by_this_process=True) and not request_.is_agreed()
    )  # a process may ask for it itself, each time
    os.kill(os.getpid(), number)
    assert request_.is_agreed() and request_.is_agreed()


def forked(
    do: Callable[[Signals], object], rank: int = 0, ignored: tuple[signal.Signals, ...] = ()
) -> tuple[int, TextIO]:
    """A process that hears signals and does something; and what it says."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 2)
        sys.stderr = open(2, "w")  # noqa: SIM115  (not what pytest has put there)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
        signals = Signals(lambda: False, is_root=rank == 0)
        signals.enable_saving()
        do(signals)
    os.close(writer)
    return child, open(reader)


def ended_with(*numbers: signal.Signals, **how: Any) -> tuple[int, str]:
    """Exit status of a process that gets these signals in turn, 7 if it survives them and 8 if it is then asked to
    stop; and what it says."""

    def get_them(signals: Signals) -> None:
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.01)
        signals.close()  # hears what has come
        os._exit(7 + StopRequest(Communicator(), signals.received).is_agreed())

    child, said = forked(get_them, **how)
    with said:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said.read()


INTERRUPT, TERMINATE, USER, HANGUP = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP


@pytest.mark.parametrize(
    ("numbers", "status"),
    [
        ([INTERRUPT, INTERRUPT], 130),
        ([TERMINATE, INTERRUPT, INTERRUPT], 130),
        ([INTERRUPT, TERMINATE, INTERRUPT], 130),
        ([INTERRUPT, TERMINATE], 8),
        ([INTERRUPT, USER], 8),
        ([TERMINATE, TERMINATE, TERMINATE, USER, INTERRUPT], 8),
        ([USER, USER, TERMINATE, USER, INTERRUPT, HANGUP], 8),
    ],
)
def test_a_second_interrupt_alone_ends_the_process_at_once(numbers: list[signal.Signals], status: int) -> None:
    code, said = ended_with(*numbers)
    assert code == status
    assert len(said.splitlines()) == 1 and numbers[0].name in said, "the root says at once that it was asked to stop"
    assert ended_with(*numbers, rank=1) == (status, "")


@pytest.mark.parametrize("number", [HANGUP, INTERRUPT], ids=["terminal closed", "Ctrl-C"])
def test_a_signal_of_the_terminal_is_a_request_but_not_where_it_is_ignored(number: signal.Signals) -> None:
    """As under nohup, or in the background of a shell script."""
    assert ended_with(number)[0] == 8
    assert ended_with(number, ignored=(number,)) == (7, "")
    assert ended_with(number, TERMINATE, ignored=(number,))[0] == 8


def test_signals_are_heard_at_once_although_the_main_thread_is_in_c() -> None:
    def wait_for_ever(_: Signals) -> None:
        mutex, c = ctypes.create_string_buffer(128), ctypes.CDLL(None)
        c.pthread_mutex_lock(mutex)
        os.write(2, b"ready\n")
        c.pthread_mutex_lock(mutex)  # no signal interrupts it

    child, said = forked(wait_for_ever)
    with said:
        assert said.readline() == "ready\n"
        os.kill(child, signal.SIGINT)
        assert "SIGINT" in said.readline()
        os.kill(child, signal.SIGINT)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130


class Watched:
    """Signals with a watchdog that is asked first whether a process is lost, because launchers then send SIGTERM to the
    others; it answers when it is `free` to."""

    def __init__(self, is_lost: bool = False, is_orphan: bool = False) -> None:
        self.before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.asked, self.free, self.is_lost, self.heard = threading.Event(), threading.Event(), is_lost, list[int]()
        self.signals = Signals(lambda: is_orphan and self.signals._can_save, is_root=True)  # private: it ends a start
        dog = SimpleNamespace(notify_signal=self.heard.append, wait_for_verdict=self.wait_for_verdict)
        self.signals.watchdog = dog  # type: ignore[assignment]

    def wait_for_verdict(self, seconds: float) -> bool:
        self.asked.set()
        assert self.free.wait(60)
        return self.is_lost

    def close(self) -> None:
        self.free.set()
        self.signals.close()
        signal.signal(signal.SIGTERM, self.before)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_signal_just_before_the_first_update_is_a_request_to_stop_it_and_the_watchdog_hears_it(is_lost: bool) -> None:
    watched = Watched(is_lost)
    os.kill(os.getpid(), signal.SIGTERM)
    watched.signals.enable_saving()
    watched.close()
    assert watched.signals.received == {signal.SIGTERM} and watched.heard == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("numbers", "is_orphan", "told"),
    [
        ([signal.SIGTERM], False, "SIGTERM: saving before it stops\n"),
        ([signal.SIGINT], False, "SIGINT: saving before it stops; a second Ctrl-C ends it at once"),
        ([], False, "asked to stop: saving"),
        ([], True, "the launcher is gone: saving"),
    ],
)
def test_what_is_told_of_a_stop_is_told_once_and_before_the_save_that_all_agree_on(
    numbers: list[signal.Signals], is_orphan: bool, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    watched = Watched(is_orphan=is_orphan)
    watched.signals.enable_saving()
    for number in numbers:
        os.kill(os.getpid(), number)
        assert watched.asked.wait(60)
    watched.signals.announce_stop()
    os.write(2, b"saved\n")
    watched.close()
    first, last = capfd.readouterr().err.splitlines(keepends=True)
    assert told in first and last == "saved\n"


def test_in_forked_processes_signals_have_their_default_effect_and_no_descriptor_is_closed_twice() -> None:
    signals = Signals(lambda: False, is_root=True)
    signals.enable_saving()
    child = os.fork()
    if child == 0:
        is_default = all(signal.getsignal(number) == signal.SIG_DFL for number in SIGNALS)
        reused = os.pipe()  # these have the numbers of the pipe that is closed here
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(sum(os.fstat(descriptor).st_size for descriptor in reused))
        os._exit(os.waitpid(grandchild, 0)[1] or not is_default)
    assert os.waitpid(child, 0)[1] == 0
    signals.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_request_travels_with_the_gradients_and_needs_no_collective_of_its_own(world_size: int) -> None:
    """Rank r hears its signal before update 2 + 3 r. One that arrives after the last bucket has left is heard of one
    update later."""

    def work(process: Process) -> tuple[list[bool], list[str], list[Tensor]]:
        received: set[int] = set()
        stop, answers = StopRequest(process.comm, received), []
        weight = nn.Parameter(torch.zeros(3))
        reducer = GradientReducer([weight], process.comm, "toy", stop_request=stop)
        for update in range(6):
            if update == 2 + 3 * process.rank:
                received.add(signal.SIGTERM)
            reducer.backward(weight.sum(), 0, False)
            reducer.finish()
            answers.append(stop.is_agreed())
        return answers, process.comm.calls, reducer.gradients

    for answers, calls, gradients in on_processes(world_size, work):
        assert answers == [False, False, True, True, True, True]
        assert calls == ["toy.gradients.0"] * 6  # in one list with the sums
        assert [gradient.shape for gradient in gradients] == [(4,)]  # 3 in 16 bytes; the flag is none of them


def test_a_request_of_this_call_travels_with_the_next_gradients_or_with_a_sum_of_its_own_at_once() -> None:
    def work(process: Process) -> list[bool]:
        stop = StopRequest(process.comm)
        weight = nn.Parameter(torch.zeros(3))
        reducer = GradientReducer([weight], process.comm, "toy", stop_request=stop)
        answers = []
        for update in range(3):
            reducer.backward(weight.sum(), 0, False)
            reducer.finish()
            answers.append(stop.is_agreed(by_this_process=process.rank == 1 and update == 0))
        return answers

    assert on_processes(2, work) == [[False, True, True]] * 2
    assert (
        on_processes(2, lambda process: process.stop_requested(by_this_process=process.rank == 1, now=True))
        == [True] * 2
    )


def test_where_no_gradients_are_sent_a_request_travels_by_itself() -> None:
    """Such as in the update after one with gradients."""

    def work(backend: Backend) -> list[bool]:
        process, model = backend.processes, nn.Linear(1, 1)
        nn.init.ones_(model.weight), nn.init.ones_(model.bias)
        engine = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0))
        engine.step()
        answers = [process.stop_requested()]
        if process.rank == 1:
            process.received.add(signal.SIGTERM)
        return [*answers, process.stop_requested(), process.stop_requested()]

    assert on_backends(2, work) == [[False, False, True]] * 2
