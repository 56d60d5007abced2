"""Which rank holds a job up or is lost: verdicts on simulated processes, and the connections that tell of them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.distributed import Launch, TrainingStopped, watchdog
from tandem.distributed.heartbeat_monitor import SILENT_TICKS, HeartbeatMonitor, HeartbeatServer, encode_message
from tandem.distributed.signals import Signals
from tandem.distributed.watchdog import Watchdog
from tests.processes import Process, Root, on_processes

TIMEOUT_TICKS = 60
PATIENCE_SECONDS = 60  # only ends a hang


class Job:
    """Ranks whose words the test invents, and the judge of the root."""

    def __init__(self, world_size: int) -> None:
        self.monitor = HeartbeatMonitor(world_size, TIMEOUT_TICKS)
        self.ranks: list[dict[str, Any]] = [
            {"count": 0, "phase": "forward", "update": 5, "collective": False} for _ in range(world_size)
        ]
        self.pass_time(5, set(range(world_size)))

    def pass_time(
        self, ticks: int, moving: Collection[int], silent: Collection[int] = (), is_asked_to_end: bool = False
    ) -> str | None:
        """In each tick all but ``silent`` answer; ``moving`` ranks make progress. The last verdict."""
        verdict = None
        for _ in range(ticks):
            for rank, mark in enumerate(self.ranks):
                mark["count"] += rank in moving
                if rank not in silent:
                    self.monitor.record(rank, dict(mark))
            verdict = self.monitor.tick(is_asked_to_end)
        return verdict


REDUCING = {"phase": "reducing gradients", "collective": True}
LONG = TIMEOUT_TICKS - 1
# What ranks of three do, how time passes (ticks, who gets on, who is silent, whether the job is asked to end), and the
# verdict after the last of these times: there is none before.
STORIES: dict[str, tuple[dict[int, Any], list[tuple[Any, ...]], str | None]] = {
    "one stands": (
        {1: {"phase": "backward", "update": 7}}, [(LONG, {0, 2}), (2, {0, 2})], "rank 1 stands at update 7 (backward)"
    ),
    "two stand": ({}, [(LONG, {0}), (2, {0})],
                  "rank 1 stands at update 5 (forward); rank 2 stands at update 5 (forward)"),
    "not those that wait in a collective for it": (
        {0: REDUCING, 2: REDUCING}, [(LONG, ()), (2, ())], "rank 1 stands at update 5 (forward)"
    ),
    "one left out a collective": (
        {0: {**REDUCING, "update": 9}, 1: {**REDUCING, "update": 8}, 2: {**REDUCING, "update": 9}},
        [(LONG, ()), (2, ())], "rank 1 stands at update 8 (reducing gradients)",
    ),
    # Ranks 0 and 1 wait for rank 2, and rank 1 happens to be outside the collective.
    "one is stopped": ({0: REDUCING, 2: {**REDUCING, "update": 4}}, [(LONG, (), {2}), (2, (), {2})],
                       "rank 2 stands at update 5 (forward)"),
    "all stand, and one does not answer": ({}, [(LONG - 9, ()), (12, (), {2})], "rank 2 stands at update 5 (forward)"),
    # Such as in a barrier, while rank 0 writes a long checkpoint and marks its progress.
    "one waits while the others move": ({1: REDUCING}, [(10 * TIMEOUT_TICKS, {0, 2})], None),
    **{f"progress after a pause in which {silent or 'all'} answered starts the clock again": (
        {}, [(LONG, {0, 2}, silent), (1, {0, 1, 2}), (LONG, {0, 2}), (10, {0, 2})],
        "rank 1 stands at update 5 (forward)",
    ) for silent in ((), (1,))},
    "one is silent and waited for, and the job is asked to end": (
        {0: REDUCING}, [(SILENT_TICKS + 30, {1}, {2}), (1, {1}, {2}, True)],
        "no sign of life from rank 2 at update 5 (forward)",
    ),
    "it has time": ({}, [(SILENT_TICKS, {0}, {2}, True)], None),
    "one waits for loader processes, and the job is asked to end": (
        {1: {"loads": True}}, [(30, {0, 2}), (0, {0, 2}, (), True), (1, {0, 2}, (), True)],
        "asked to end, but for 30 s no data has come to rank 1 at update 5 (forward)",
    ),
    "data may come": ({1: {"loads": True}}, [(29, {0, 2}, (), True)], None),
    "nobody asks it to end": ({1: {"loads": True}}, [(LONG, {0, 2})], None),
    # A save is not cut off.
    "it is silent, and nobody is in a collective": ({}, [(LONG, {1}, {2}, True)], None),
    "it is silent, and who is in a collective gets on": ({0: REDUCING}, [(LONG, {0, 1}, {2}, True)], None),
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES)
def test_the_verdict_names_who_holds_the_job_up_when_it_is_due_and_not_before(story: str) -> None:
    marks, times, verdict = STORIES[story]
    job = Job(3)
    for rank, mark in marks.items():
        job.ranks[rank].update(mark)
    *before, last = (job.pass_time(*time) for time in times)
    assert before == [None] * len(before)
    is_held_up = verdict is not None and " stands " in verdict
    assert last == (f"no progress for 1 minute: {verdict}" if is_held_up else verdict)


def test_who_waits_for_whom_is_told_after_ten_seconds_once_for_each_phase() -> None:
    job = Job(3)
    job.ranks[0].update(REDUCING)
    job.ranks[1].update(REDUCING)
    job.pass_time(SILENT_TICKS - 1, {2})
    assert job.monitor.waiting_text() is None
    job.pass_time(1, {2})
    assert job.monitor.waiting_text() == "2 processes have waited for 10 s for rank 2 at update 5 (forward)"
    job.pass_time(5, {2})
    assert job.monitor.waiting_text() is None
    job.ranks[2]["phase"] = "listing the samples"
    job.pass_time(1, {2})
    assert job.monitor.waiting_text() == "2 processes have waited for 10 s for rank 2 at update 5 (listing the samples)"


def test_a_long_wait_for_loader_processes_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    dog, now = dog_of(1), 1000.0
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now))
    for seconds in (9, 11, 11):
        with dog.loading():
            now += seconds
            dog.report_loading()
        now += 100
        dog.report_loading()
    assert capfd.readouterr().err.count("rank 0 has waited for data from its loader processes for 10 s") == 1


def test_those_whose_connections_end_are_lost_with_their_own_error_and_not_those_that_left() -> None:
    four = Job(4)
    four.monitor.mark_lost(1)
    four.monitor.mark_left(2)  # because its collective failed
    four.monitor.mark_lost(2)
    four.monitor.mark_lost(3, "KeyError: 'x'")
    four.monitor.mark_lost(3)
    lost = "lost contact with rank 1 at update 5 (forward); rank 3 at update 5 (forward): KeyError: 'x'"
    assert four.monitor.tick() == lost


def test_a_verdict_on_hundreds_of_ranks_names_a_few_and_counts_the_others() -> None:
    many = Job(500)
    for rank in range(400):
        many.monitor.mark_lost(rank, "E" * 200)
    verdict = many.monitor.tick()
    assert verdict is not None and verdict.endswith("; and 392 more ranks") and verdict.count("rank ") == 8
    verdict = Job(500).pass_time(TIMEOUT_TICKS + 1, moving=set(range(8)))
    assert verdict is not None and verdict.endswith("; and 484 more ranks") and len(verdict) < 1000


def dog_of(world_size: int) -> Watchdog:
    """Of the root of processes that are not there; it keeps a connection to itself."""
    return Watchdog(Root(world_size), Launch("python", world_size=world_size), TIMEOUT_TICKS / 60)


@pytest.mark.parametrize(("world_size", "communication"), [(1, 0.0), (2, 5.0)])
def test_what_a_process_waited_for_is_added_up_and_alone_it_waits_for_no_other(
    world_size: int, communication: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    dog, now = dog_of(world_size), 1000.0
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now))
    for seconds, marks in (
        (3, {}), (5, {"collective": True}), (7, {}), (11, {"waits_for_data": True}), (13, {"gathers": True}), (1, {}),
    ):  # fmt: skip
        dog.heartbeat("phase", **marks)
        now += seconds
    dog.heartbeat("phase")
    assert dog.waited == {"communication": communication, "data": 11.0}
    dog.stop()


def beat_of(dog: Watchdog) -> dict[str, Any]:
    kind, mark = json.loads(dog.heartbeat_message())
    assert kind == "beat"
    return mark


def test_marks_count_and_keep_the_update_they_do_not_name() -> None:
    dog = dog_of(1)
    dog.heartbeat("forward", update=3)
    dog.heartbeat("forward", gathers=True)  # for which no rank is blamed while another one stands
    assert beat_of(dog) == {"count": 2, "phase": "forward", "update": 3, "collective": True, "loads": False}
    with dog.loading():
        assert beat_of(dog)["loads"]
    dog.heartbeat("computing")
    assert beat_of(dog) == {"count": 3, "phase": "computing", "update": 3, "collective": False, "loads": False}


def test_a_process_ends_although_nobody_reads_what_it_writes_last() -> None:
    """As in a terminal that is stopped: the main thread hangs in a write to stderr, and holds its lock."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 2)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        dog = dog_of(1)
        # As its thread does when the root says so: alone, this process has no root.
        threading.Thread(target=dog._end_job, args=["the verdict"], daemon=True).start()
        with contextlib.suppress(BaseException):
            while True:
                sys.stderr.write("x" * 100_000)
        os._exit(99)
    try:
        end = time.monotonic() + PATIENCE_SECONDS
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
            time.sleep(0.05)
        assert ended[0] and os.waitstatus_to_exitcode(ended[1]) == 1
    finally:
        if not ended[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def watched(work: Callable[[Watchdog], Any]) -> Callable[[Process], Any]:
    """Work of a process with its own watchdog, whose thread has the name of its rank meanwhile."""

    def main(process: Process) -> Any:
        threading.current_thread().name = f"rank {process.rank}"
        launch = Launch("torchrun", process.rank, 0, 2, "localhost", 1)
        return work(Watchdog(process.comm, launch, TIMEOUT_TICKS / 60))

    return main


def on_rank_1(function: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **more: (instead if threading.current_thread().name == "rank 1" else function)(*args, **more)


def test_a_process_that_cannot_reach_the_root_ends_the_start_of_all_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", on_rank_1(socket.create_connection, refused))
    before = set(threading.enumerate())
    errors = on_processes(2, watched(lambda dog: None), catches=ConnectionError)
    assert [str(error).partition(" at ")[0] for error in errors] == ["rank 1 cannot reach rank 0"] * 2
    assert {thread.name for thread in set(threading.enumerate()) - before} == set()


@pytest.mark.parametrize(("differs", "place"), [(None, "127.0.0.1"), ("boot_id", "localhost"), ("net", "localhost")])
def test_machines_with_equal_names_are_not_taken_for_one(
    differs: str | None, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_text, readlink, connect, places = Path.read_text, os.readlink, socket.create_connection, list[str]()
    if differs == "boot_id":
        monkeypatch.setattr(Path, "read_text", on_rank_1(read_text, lambda *args: read_text(*args)[::-1]))
    if differs == "net":
        monkeypatch.setattr(os, "readlink", on_rank_1(readlink, lambda *args: readlink(*args)[::-1]))
    monkeypatch.setattr(socket, "create_connection", lambda at, **more: (places.append(at[0]), connect(at, **more))[1])
    on_processes(2, watched(Watchdog.stop))
    assert places == [place] * 2


@pytest.fixture
def server() -> Iterator[HeartbeatServer]:
    """For two processes, of which none has connected yet."""
    server = HeartbeatServer("127.0.0.1", 2, TIMEOUT_TICKS)
    yield server
    server.stop()


class Member:
    """A process as the root sees it."""

    def __init__(self, server: HeartbeatServer, *hello: Any) -> None:
        self.connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_SECONDS)
        self.connection.sendall(encode_message(*hello))
        self.lines = self.connection.makefile("rb")

    def say(self, *message: Any) -> None:
        self.connection.sendall(encode_message(*message))

    def hears(self) -> list[Any]:
        """The next message that is no question how it goes; [] at the end of the connection."""
        with contextlib.suppress(ConnectionError):
            while line := self.lines.readline():
                if (message := json.loads(line)) != ["beat"]:
                    return list(message)
                self.say("beat", {"count": 3, "phase": "forward", "update": 7, "collective": False})
        return []


def members(server: HeartbeatServer) -> list[Member]:
    return [Member(server, "here", server.token, rank) for rank in range(2)]


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ([], ["end", "lost contact with rank 1 at update 0 (starting)"]),
        (["failed", "KeyError: 'x'"], ["end", "lost contact with rank 1 at update 0 (starting): KeyError: 'x'"]),
        (["left"], ["left"]),  # from the root, which leaves too
    ],
)
def test_the_end_of_a_connection_ends_the_job_and_a_farewell_does_not(
    said: list[str], heard: list[str], server: HeartbeatServer
) -> None:
    first, second = members(server)
    assert second.lines.readline()  # it is known
    if said:
        second.say(*said)
    second.connection.shutdown(socket.SHUT_RDWR)
    if said == ["left"]:
        server.stop()
    assert first.hears() == heard


def test_a_lost_process_is_named_with_the_update_of_the_root_which_needed_it() -> None:
    """The process itself has told its update up to a tick before, and so what it was doing then is not said."""
    first, second = members(server := HeartbeatServer("127.0.0.1", 2, TIMEOUT_TICKS, lambda: 1590))
    second.connection.shutdown(socket.SHUT_RDWR)
    assert first.hears() == ["end", "lost contact with rank 1 at update 1590"]
    server.stop()


def test_an_error_of_the_root_is_told_though_the_thread_has_not_looked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    run = HeartbeatServer._run  # private: nothing but the thread itself can be late

    def run_late(server: HeartbeatServer) -> None:
        server._wake_receiver.setblocking(True)
        server._wake_receiver.recv(1, socket.MSG_PEEK)  # the thread gets no processor until the root leaves
        server._wake_receiver.setblocking(False)
        run(server)

    monkeypatch.setattr(HeartbeatServer, "_run", run_late)
    server = HeartbeatServer("127.0.0.1", 2, TIMEOUT_TICKS)
    root, other = members(server)
    root.say("failed", "KeyError: 'x'")
    root.connection.shutdown(socket.SHUT_RDWR)
    server.stop()
    assert other.hears() == ["end", "lost contact with rank 0 at update 0 (starting): KeyError: 'x'"]


def test_who_is_no_process_of_the_job_is_not_listened_to(server: HeartbeatServer) -> None:
    for hello in (["here", "0123", 1], ["here", server.token, "x"], ["here", server.token, 2], ["met"], [],
                  ["\0" * 100_000]):  # fmt: skip
        assert Member(server, *hello).hears() == []
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"[" * 60_000 + b"\n"):  # the second nests deeper than Python's stack
        stranger = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_SECONDS)
        stranger.sendall(text)
        assert stranger.recv(1) == b""
    first, second = members(server)
    for _ in range(2):  # all are told at once when all have come
        first.say("met")
        second.say("met")
        assert first.hears() == second.hears() == ["met"]
    with pytest.raises(ConnectionRefusedError):  # all are there
        Member(server)


def test_who_does_not_say_which_process_it_is_is_sent_away(
    server: HeartbeatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.distributed.heartbeat_monitor.TICK_SECONDS", 0.01)
    assert socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_SECONDS).recv(1) == b""


def test_where_files_run_out_a_connection_is_tried_again_once_in_a_tick(
    server: HeartbeatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.distributed.heartbeat_monitor.TICK_SECONDS", 0.01)
    accept, tick, tried = socket.socket.accept, HeartbeatMonitor.tick, [0]  # of each tick, how often

    def accept_later(listener: socket.socket) -> Any:
        tried[-1] += 1
        if sum(tried) <= 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    monkeypatch.setattr(HeartbeatMonitor, "tick", lambda *args: (tried.append(0), tick(*args))[1])
    assert Member(server, "here", server.token, 0).lines.readline() == encode_message("beat")
    assert sum(tried) == 4 and max(tried) == 1


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_other_machines_may_come_by_either_version_of_ip(address: str) -> None:
    if address == "::1" and not (socket.has_dualstack_ipv6() and os.path.exists("/proc/net/if_inet6")):
        pytest.skip("this machine has no IPv6")
    server = HeartbeatServer("", 1, TIMEOUT_TICKS)
    try:
        with socket.create_connection((address, server.port), timeout=PATIENCE_SECONDS) as connection:
            connection.sendall(encode_message("here", server.token, 0))
            assert connection.makefile("rb").readline() == encode_message("beat")
    finally:
        server.stop()


def test_a_worker_that_was_forked_does_not_keep_the_connections_open(server: HeartbeatServer) -> None:
    first, _ = members(server)
    assert first.lines.readline()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reading, 1)  # as long as the parent has not written
        os._exit(0)
    try:
        server.stop()
        assert first.hears() == ["left"] and first.hears() == []
    finally:
        os.write(writing, b"x")
        os.waitpid(child, 0)


@pytest.mark.parametrize(("number", "asks"), [(signal.SIGTERM, True), (signal.SIGCHLD, False)])
def test_the_judge_hears_that_the_job_is_asked_to_end(
    number: signal.Signals, asks: bool, server: HeartbeatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = queue.Queue[bool]()
    server.notify_signal(number)
    first, second = members(server)  # the bell was rung before
    first.say("met")
    second.say("met")
    assert first.hears() == ["met"]
    monkeypatch.setattr(HeartbeatMonitor, "tick", lambda _, is_asked: heard.put(is_asked))
    assert heard.get(timeout=PATIENCE_SECONDS) == asks


def test_a_signal_reaches_the_watchdog_whatever_the_main_thread_does() -> None:
    heard = queue.Queue[int]()
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    signals = Signals(lambda: False, is_root=False)
    try:
        signals.watchdog = SimpleNamespace(notify_signal=heard.put)  # type: ignore[assignment]
        signals.enable_saving()  # otherwise it would end this process
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.get(timeout=PATIENCE_SECONDS) == signal.SIGTERM
    finally:
        signals.close()
        signal.signal(signal.SIGTERM, before)


def test_nothing_piles_up_at_a_process_that_is_stopped(server: HeartbeatServer) -> None:
    first, second = members(server)
    for _ in range(3):  # ticks
        assert second.lines.readline() == encode_message("beat")
        second.say("beat", {"count": 1, "phase": "x", "update": 1})
    assert first.connection.recv(1000) == encode_message("beat")


def test_who_waits_to_hear_why_the_job_ends_waits_no_longer_when_this_process_leaves() -> None:
    dog, answers = dog_of(2), queue.Queue[bool]()
    waiting = threading.Thread(target=lambda: answers.put(dog.wait_for_verdict(PATIENCE_SECONDS)))
    waiting.start()
    dog.stop()
    assert answers.get(timeout=PATIENCE_SECONDS / 2)
    waiting.join()


def test_one_process_has_no_thread_and_explains_only_what_stops_training() -> None:
    before = threading.active_count()
    dog = dog_of(1)
    assert threading.active_count() == before
    stopped = TrainingStopped("enough")
    assert dog.explain(stopped) is stopped
    assert dog.explain(None) is None and dog.explain(RuntimeError("anything")) is None
    dog.stop()


GLOO = (  # PyTorch 2.15's, word for word
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:30598: Connection "
    "reset by peer. This is typically caused by a remote worker hanging or bugs in the application. Check the logs of "
    "the remote worker before reporting an error. GLHF! \N{BEACH WITH UMBRELLA}"
)


HOROVOD = (  # 0.28.1's, word for word
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, "
    "allgather or broadcast a tensor after one of the ranks finished execution. If the shutdown was caused by an "
    "exception, you should see the exception in the log before the first shutdown message."
)


@pytest.mark.parametrize(
    ("raised", "why"),
    [(GLOO, "Read error [127.0.0.1]:30598: Connection reset by peer."), (HOROVOD, "Horovod has been shut down.")],
    ids=["gloo", "horovod"],
)
@pytest.mark.parametrize(
    ("error", "told"),
    [(KeyError("x"), "KeyError: 'x'"), (TrainingStopped("rank 1: a loader is lost"), "a loader is lost")],
)
def test_the_end_of_a_lost_process_is_told_without_what_libraries_guess_at(
    error: Exception, told: str, raised: str, why: str
) -> None:
    def work(dog: Watchdog) -> tuple[str, str] | None:
        """Rank 1 fails, and a collective of rank 0 fails because of it."""
        if threading.current_thread().name == "rank 1":
            return dog.stop(error)
        with pytest.raises(TrainingStopped) as met:
            dog.barrier()
        explained = dog.explain(RuntimeError(raised))
        dog.stop()
        return str(met.value), str(explained)

    (met, explained), _ = on_processes(2, watched(work))
    assert met == f"rank 0: lost contact with rank 1 at update 0 (starting): {told}"
    assert explained == f"{met} ({why})"
