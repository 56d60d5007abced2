"""Sends the heartbeats of this process, and ends it when `heartbeat_monitor.py` decides that a rank is lost or stalled.

The main thread records each phase that it begins (`heartbeat`). A thread sends the phase to the root, whose monitor
sends its verdict to all processes: a line with the rank, its update and its phase. Nothing else ends a job that waits:
collectives have no time limit.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tandem.io.exits import FAILED, exit_process
from tandem.io.reading import counted
from tandem.io.writing import WRITER, processor_time, say

from .errors import TrainingStopped, first_line
from .heartbeat_monitor import TICK_SECONDS, HeartbeatServer, enable_keepalive, encode_message
from .launchers import Launch

if TYPE_CHECKING:
    from .collectives import Communicator

_CONNECT_SECONDS = 30.0
_REPORT_SECONDS = 10.0
_VERDICT_SECONDS = 5.0  # after a collective has failed; launchers give survivors 5 s (horovodrun) or more
_UNWINDING_SECONDS = 2.0  # after the verdict, in which the main thread may print it with the error of its collective
_LEAVING_TICKS = 30  # after the root has left on purpose: all processes leave at about the same time
_IDLE_TICKS = 30  # a writing thread that uses no processor time for so long, as in an fsync, hangs
_LONGEST_TEXT = 200


@dataclass
class _Heartbeat:
    count: int = 0  # phases begun
    phase: str = "starting"
    update: int = 0
    collective: bool = False  # the main thread may wait for other processes
    is_uninterrupted: bool = False  # nothing in this phase gives a heartbeat
    loads: bool = False  # the main thread waits for loader processes


class Watchdog:
    """The watchdog of one process. `heartbeat` takes a microsecond, because a thread does the rest; a job of a single
    process starts no thread."""

    def __init__(self, comm: Communicator, launch: Launch, timeout_minutes: float) -> None:
        self._rank, self._world_size = comm.rank, comm.world_size
        self._timeout_ticks = timeout_minutes * 60 / TICK_SECONDS
        self._heartbeat = _Heartbeat()
        #: Seconds that this process has waited so far, by cause; communication on a GPU: only the waits of the host.
        self.waited = {"data": 0.0, "communication": 0.0}
        self._wait_kind: str | None = None
        self._loads_since, self._has_reported_loading = math.inf, False
        self._phase_start = time.monotonic()
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None
        self._server: HeartbeatServer | None = None
        self._condition, self._send_lock, self._report_lock = threading.Condition(), threading.Lock(), threading.Lock()
        self._verdict, self._has_reported = "", False
        self._barriers_entered = self._barriers_passed = 0  # by this process, and by all
        self._processor_time: int | None = 0
        self._work_count = 0
        if self._world_size > 1:
            self._connection = self._connect(comm, launch)
            # A loader's worker that kept the connection open would hide the end of this process.
            os.register_at_fork(after_in_child=self._connection.close)
            self._thread = threading.Thread(target=self._listen, name="watchdog", daemon=True)
            self._thread.start()

    def heartbeat(
        self, phase: str, *, update: int | None = None, collective: bool = False, waits_for_data: bool = False,
        gathers: bool = False, is_uninterrupted: bool = False,
    ) -> None:  # fmt: skip
        """Record that the main thread begins ``phase``.

        Args:
            update: Number of the present update; None: as before.
            collective: The main thread may wait for other processes in this phase.
            waits_for_data: The main thread waits for data.
            gathers: The main thread may wait for other processes, but rarely, so the time counts as computing.
            is_uninterrupted: The phase, such as a user's function or a write, contains no call of this method. It may
                take any time while it uses the processor now and then; if it hangs, as on a broken disk, the job ends
                after the timeout.
        """
        now = time.monotonic()
        if self._wait_kind:
            self.waited[self._wait_kind] += now - self._phase_start
        self._wait_kind = "communication" if collective and self._world_size > 1 else "data" if waits_for_data else None
        self._phase_start = now
        previous = self._heartbeat
        update = previous.update if update is None else update
        self._heartbeat = _Heartbeat(previous.count + 1, phase, update, collective or gathers, is_uninterrupted)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Context in which the main thread waits for loader processes; the phase stays the same."""
        self._heartbeat, self._loads_since = replace(self._heartbeat, loads=True), time.monotonic()
        yield
        self._heartbeat, self._loads_since = replace(self._heartbeat, loads=False), math.inf

    def report_loading(self) -> None:
        """Print once that no data has come for 10 s. Called by another thread now and then."""
        if not self._has_reported_loading and time.monotonic() > self._loads_since + _REPORT_SECONDS:
            self._has_reported_loading = True
            wait_text = f"has waited for data from its loader processes for {_REPORT_SECONDS:g} s"
            say(f"rank {self._rank} {wait_text}", unbuffered=True)

    def barrier(self) -> None:
        """Return when every process has called this. There is no time limit as long as the others make progress.

        Raises:
            TrainingStopped: the job ends, because a process is lost or stands still.
        """
        if self._thread is None:
            return
        self._barriers_entered += 1
        self.heartbeat("waiting for the other processes", collective=True)
        self._send(encode_message("met"))
        with self._condition:
            self._condition.wait_for(lambda: self._barriers_passed >= self._barriers_entered or self._verdict)
        if self._barriers_passed < self._barriers_entered:
            raise TrainingStopped(f"rank {self._rank}: {self._verdict}", on_one_rank=True)

    def notify_signal(self, number: int) -> None:
        """Tell the root's monitor of a signal. Once one has asked the job to end, a silent rank counts as lost."""
        if self._server is not None:
            self._server.notify_signal(number)

    def wait_for_verdict(self, seconds: float) -> bool:
        """Whether, now or within so many seconds, there is a verdict, or this process leaves anyway."""
        with self._condition:
            return self._condition.wait_for(
                lambda: bool(self._verdict) or self._leaving.is_set(), seconds if self._thread else 0
            )

    def explain(self, error: BaseException | None) -> TrainingStopped | None:
        """Why the run ends: ``error`` itself if it is a TrainingStopped; an error that names the lost process if
        ``error`` comes from a collective that failed because of the loss; None otherwise."""
        stop_error = error if isinstance(error, TrainingStopped) else None
        if stop_error is None and self._thread is not None and isinstance(error, RuntimeError | ConnectionError):
            with self._condition:
                if self._condition.wait_for(lambda: self._verdict, _VERDICT_SECONDS):
                    text = f"rank {self._rank}: {self._verdict} ({_shorten_error(error)})"
                    stop_error = TrainingStopped(text, on_one_rank=True)
        if stop_error is not None and not self._has_reported:
            self._report_lock.acquire()  # never released, so that the other thread does not print the reason again
            self._has_reported = True
        return stop_error

    def stop(self, error: BaseException | None = None) -> None:
        """Leave the job: on purpose, or because of this process's ``error``, which is sent to the monitor."""
        if self._leaving.is_set():
            return
        with self._condition:
            self._leaving.set()
            self._condition.notify_all()
        if self._thread is None:
            return
        reason = None if error is None or self._verdict else _describe_error(error).removeprefix(f"rank {self._rank}: ")
        self._send(encode_message("left") if reason is None else encode_message("failed", reason))
        if self._server is not None:
            self._server.stop()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=2 * TICK_SECONDS)

    def wait_for_writes(self) -> None:
        """Wait for what this process writes, such as a checkpoint, while that makes progress; at most the timeout."""
        for thread in threading.enumerate():
            if thread.name != WRITER:
                continue
            say(f"waiting until the {thread.name} is on the disk", unbuffered=True)
            ticks = idle_ticks = 0
            previous = processor_time(thread)
            while thread.is_alive() and ticks < self._timeout_ticks and idle_ticks < _IDLE_TICKS:
                thread.join(TICK_SECONDS)
                current = processor_time(thread)
                ticks, idle_ticks = ticks + 1, 0 if _has_worked(previous, current) else idle_ticks + 1
                previous = current

    def exit_process(self) -> NoReturn:
        """End this process, which has printed why, after its own writes. The interpreter's exit would wait for other
        processes too, through Horovod or NCCL."""
        self.wait_for_writes()
        exit_process(FAILED, at_once=True)

    def _connect(self, comm: Communicator, launch: Launch) -> socket.socket:
        machines = comm.gather_objects(_machine_id())
        endpoint, connection, problem = None, None, None
        try:
            if self._rank == 0:
                host = socket.gethostname() if launch.master_port is None else launch.master_address
                is_one_machine = len(set(machines)) == 1
                self._server = HeartbeatServer(
                    "127.0.0.1" if is_one_machine else "", self._world_size, self._timeout_ticks,
                    lambda: self._heartbeat.update,
                )  # fmt: skip
                endpoint = ["127.0.0.1" if is_one_machine else host, self._server.port, self._server.token]
        except OSError as error:
            problem = f"rank 0 cannot listen: {first_line(error)}"
        if endpoint := comm.broadcast_object(endpoint):
            host, port, token = endpoint
            try:
                connection = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
                connection.settimeout(TICK_SECONDS)
                enable_keepalive(connection)
                connection.sendall(encode_message("here", token, self._rank) + self.heartbeat_message())
            except OSError as error:
                problem = f"rank {self._rank} cannot reach rank 0 at {host}, port {port}: {first_line(error)}"
        # If one process has failed, all must: a collective would wait for it forever.
        problems = [text for text in comm.gather_objects(problem) if text]
        if connection is None or problems:
            if connection is not None:
                connection.close()
            if self._server is not None:
                self._server.stop()
            raise ConnectionError(problems[0])
        return connection

    def _send(self, line: bytes) -> None:
        with self._send_lock, contextlib.suppress(OSError):  # `_listen` notices a lost connection
            self._connection.sendall(line)

    def heartbeat_message(self) -> bytes:
        """The answer of this process to the root's request for a heartbeat."""
        heartbeat = asdict(self._heartbeat)
        if heartbeat.pop("is_uninterrupted"):
            previous, self._processor_time = self._processor_time, processor_time(threading.main_thread())
            self._work_count += _has_worked(previous, self._processor_time)
        # The monitor takes a higher count for progress.
        heartbeat["count"] += self._work_count
        return encode_message("beat", heartbeat)

    # What the thread runs.

    def _listen(self) -> None:
        buffer, silent_ticks = b"", 0
        while not self._leaving.is_set():
            try:
                received = self._connection.recv(1 << 16)
            except TimeoutError:
                # Counted in ticks, not by the clock: time in which this process is stopped does not count.
                silent_ticks += 1
                if silent_ticks > self._timeout_ticks:
                    minutes = counted(self._timeout_ticks * TICK_SECONDS / 60, "minute")
                    return self._end_job(f"rank 0 has not answered for {minutes}, at update {self._heartbeat.update}")
                continue
            except OSError:
                received = b""
            if not received:
                return self._end_job(f"lost contact with rank 0 at update {self._heartbeat.update}")
            silent_ticks = 0
            *lines, buffer = (buffer + received).split(b"\n")
            for line in lines:
                kind, *values = json.loads(line)
                if kind == "beat":
                    self._send(self.heartbeat_message())
                elif kind == "met":
                    with self._condition:
                        self._barriers_passed += 1
                        self._condition.notify_all()
                elif kind == "end":
                    return self._end_job(values[0])
                elif kind == "left":
                    return self._end_job(f"rank 0 has ended, at update {self._heartbeat.update}", _LEAVING_TICKS)
        return None

    def _end_job(self, verdict: str, patience_ticks: int = 0) -> None:
        """Record the verdict. If the main thread waits in `barrier`, or its collective fails, it prints the verdict and
        ends; otherwise print it here and end this process, which may hang inside a collective."""
        if any(self._leaving.wait(TICK_SECONDS) for _ in range(patience_ticks)):
            return
        with self._condition:
            self._verdict = verdict
            self._condition.notify_all()
        if self._leaving.wait(_UNWINDING_SECONDS) or not self._report_lock.acquire(blocking=False):
            return
        say(f"stopped: rank {self._rank}: {verdict}", unbuffered=True)
        self.exit_process()


def _machine_id() -> str:
    """A text that is the same on all processes with one loopback device, and on no others: host names may repeat."""
    identifiers = [socket.gethostname()]
    with contextlib.suppress(OSError):
        identifiers += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    return " ".join(identifiers)


def _has_worked(previous: int | None, current: int | None) -> bool:
    """Whether a thread's processor time has changed; True where the system does not state it (None)."""
    return current is None or current != previous


def _describe_error(error: BaseException) -> str:
    """Type and first line of an error."""
    text, kind = _shorten_error(error), type(error).__name__
    return text if text == kind or isinstance(error, TrainingStopped) else f"{kind}: {text}"


def _shorten_error(error: BaseException) -> str:
    """The error's first line, cut between two words if it is long."""
    line = first_line(error)
    return line if len(line) <= _LONGEST_TEXT else line[:_LONGEST_TEXT].rsplit(" ", 1)[0] + " ..."
