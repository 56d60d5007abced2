"""Finds out which processes are lost or stalled: a thread of the root, to which every process keeps a connection.

The kernel closes the connections of a process that ends, however it ends, and gives up those to a machine that does not
answer. So a loss is known at once, and no process is taken for lost that is busy, slow or stopped. Time is counted in
ticks of the thread: it stands still while the whole job is frozen (SIGSTOP, `docker pause`, `scontrol suspend`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tandem.io.reading import counted
from tandem.io.writing import say

TICK_SECONDS = 1.0
LINK_SECONDS = 25  # a machine that does not answer for so long is lost: torchrun kills 30 s after it has noticed
SILENT_TICKS = 10  # a process that does not answer for so long is lost, if the job is asked to end
_LOADING_TICKS = 30  # so is one that gets no batch from its loader processes for so long
_NO_ANSWER_TICKS = 3
_UNIDENTIFIED_TICKS = 30  # after which a connection that has not named its rank is dropped
_LONGEST_LINE = 1 << 16  # bytes
_MAX_NAMED_RANKS = 8  # ranks in a verdict, which is one line: a lost machine may have run hundreds
_ASK_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def watch_link(connection: socket.socket) -> None:
    """Have the kernel give up a connection to a machine that is gone. Its kernel answers for stopped processes."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    values = {"KEEPIDLE": 5, "KEEPINTVL": 5, "KEEPCNT": LINK_SECONDS // 5, "USER_TIMEOUT": 1000 * LINK_SECONDS}
    for name, value in values.items():
        if option := getattr(socket, f"TCP_{name}", None):  # not every system has all
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _listen(host: str, backlog: int) -> socket.socket:
    """Listen on a free port: of every address of this machine, IPv4 and IPv6, if ``host`` is empty."""
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server((host, 0), backlog=backlog)


def to_line(*message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


@dataclass
class _Rank:
    """The state of a rank; ``heard_at`` and ``moved_at`` are the ticks of its last answer and of its last progress."""

    heard_at: int
    moved_at: int
    heartbeat: dict[str, Any] = field(default_factory=lambda: {"count": 0, "phase": "starting", "update": 0})
    lost: str | None = None  # "", or the error with which it ended
    has_left: bool = False

    @property
    def place(self) -> str:
        return f"at update {self.heartbeat['update']}" + (
            f" ({self.heartbeat['phase']})" if self.heartbeat["phase"] else ""
        )


class HeartbeatMonitor:
    """Decides which rank a job has lost, or which one holds it up.

    Args:
        timeout_ticks: How long a rank may make no progress.
    """

    def __init__(self, world_size: int, timeout_ticks: float) -> None:
        self.now, self._timeout_ticks = 0, timeout_ticks
        self._ranks = [_Rank(0, 0) for _ in range(world_size)]
        self._announced_phases: set[str] = set()

    def record(self, rank: int, heartbeat: dict[str, Any]) -> None:
        """Record a heartbeat: what a rank is doing, and how many phases it has begun (``count``)."""
        state = self._ranks[rank]
        if state.heartbeat["count"] != heartbeat["count"]:
            state.moved_at = self.now
        state.heartbeat, state.heard_at = heartbeat, self.now

    def leave(self, rank: int) -> None:
        """Record that a rank ends on purpose: it is done, or all end together, or another rank has failed."""
        self._ranks[rank].has_left = True

    def lose(self, rank: int, error: str = "", update: int = 0) -> None:
        """Record that a rank has ended, with its own ``error`` or without one, when the root was at ``update``. The
        rank was as far, because no update is made without it; its last message, up to a tick old, may be of an earlier
        update."""
        state = self._ranks[rank]
        if not state.has_left and state.lost is None:
            state.lost = error
            if update > state.heartbeat["update"]:
                state.heartbeat = {**state.heartbeat, "update": update, "phase": ""}

    def tick(self, is_asked_to_end: bool = False) -> str | None:
        """The verdict, or None. Ranks whose connections end within the same tick are reported together."""
        self.now += 1
        if any(state.lost is not None for state in self._ranks):
            return self._name_ranks("lost contact with ", lambda state: state.lost is not None)
        if is_asked_to_end and any(map(self._lacks_data, self._ranks)):
            return self._name_ranks(f"asked to end, but for {_LOADING_TICKS} s no data has come to ", self._lacks_data)
        # Without a request to end, a silent rank may not be needed now, as while the root saves.
        if is_asked_to_end and any(map(self._is_silent, self._ranks)) and any(map(self._is_waiting, self._ranks)):
            return self._name_ranks("no sign of life from ", self._is_silent)
        return self._find_stalled()

    def waiting_text(self) -> str | None:
        """A line that names ranks for which others have waited 10 s in a collective; once for each phase of these
        ranks."""
        waiting_count = sum(map(self._is_waiting, self._ranks))
        busy = [state for state in self._ranks if not state.has_left and not state.heartbeat.get("collective")]
        phases = {state.heartbeat["phase"] for state in busy}
        if not waiting_count or phases <= self._announced_phases:
            return None
        self._announced_phases |= phases
        verb = "process has" if waiting_count == 1 else "processes have"
        prefix = f"{waiting_count} {verb} waited for {SILENT_TICKS * TICK_SECONDS:g} s for "
        return self._name_ranks(prefix, lambda state: state in busy)

    def _name_ranks(self, prefix: str, is_named: Any) -> str:
        return prefix + _join_first(
            f"rank {rank} {state.place}{': ' if state.lost else ''}{state.lost or ''}"
            for rank, state in enumerate(self._ranks)
            if is_named(state)
        )

    def _is_silent(self, state: _Rank, ticks: int = SILENT_TICKS) -> bool:
        return not state.has_left and self.now - state.heard_at > ticks

    def _lacks_data(self, state: _Rank) -> bool:
        """Whether a rank has waited long for its loader processes, which may hang and keep it from saving."""
        return not state.has_left and bool(state.heartbeat.get("loads")) and self.now - state.moved_at > _LOADING_TICKS

    def _is_waiting(self, state: _Rank) -> bool:
        """Whether a rank that answers has made no progress in a collective."""
        is_there = not state.has_left and not self._is_silent(state)
        return is_there and bool(state.heartbeat.get("collective")) and self.now - state.moved_at > SILENT_TICKS

    def _find_stalled(self) -> str | None:
        """Which ranks made no progress for the whole timeout and hold up the others."""
        stalled = [
            rank
            for rank, state in enumerate(self._ranks)
            if not state.has_left and self.now - state.moved_at > self._timeout_ticks
        ]
        silent = [rank for rank in stalled if self._is_silent(self._ranks[rank], _NO_ANSWER_TICKS)]
        # A rank that waits for others in a collective is not to blame while a rank outside a collective stands still.
        busy = [rank for rank in stalled if not self._ranks[rank].heartbeat.get("collective")]
        culprits = silent or busy
        if not culprits and len(stalled) == len(self._ranks):
            lowest_update = min(state.heartbeat["update"] for state in self._ranks)
            culprits = [rank for rank in stalled if self._ranks[rank].heartbeat["update"] == lowest_update]
        if not culprits:
            return None
        culprit_text = _join_first(
            "rank {} stands at update {update} ({phase})".format(rank, **self._ranks[rank].heartbeat)
            for rank in culprits
        )
        return f"no progress for {counted(self._timeout_ticks * TICK_SECONDS / 60, 'minute')}: {culprit_text}"


def _join_first(descriptions: Iterable[str]) -> str:
    entries = list(descriptions)
    rest = [f"and {len(entries) - _MAX_NAMED_RANKS} more ranks"] if len(entries) > _MAX_NAMED_RANKS else []
    return "; ".join([*entries[:_MAX_NAMED_RANKS], *rest])


@dataclass
class _Member:
    """A connection to a process; its rank is -1 until it has sent it."""

    connection: socket.socket
    rank: int = -1
    text: bytes = b""
    ticks: int = 0  # in which its rank was not known
    is_beat_pending: bool = False  # asked and not answered yet: a stopped process gets no second question

    def send(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(line)


class Liveness:
    """Runs in a thread of the root. ``port`` and ``token`` are what a process needs to connect; ``update`` returns the
    number of the root's present update.

    A process sends ["here", token, rank] first; then ["beat", heartbeat] as the answer to ["beat"]; ["met"] when it has
    entered a barrier, which all get when all have entered it; and at its end ["left"] or ["failed", error]. ["end",
    verdict] tells it why the job ends, ["left"] that the root has left on purpose.
    """

    def __init__(self, host: str, world_size: int, timeout_ticks: float, update: Callable[[], int] = lambda: 0) -> None:
        self._update = update
        self._world_size, self._monitor = world_size, HeartbeatMonitor(world_size, timeout_ticks)
        self._listener = _listen(host, world_size)
        self.port, self.token = self._listener.getsockname()[1], secrets.token_hex(8)
        self._members: list[_Member] = []
        self._barrier_arrivals, self._verdict = 0, ""
        self._is_asked_to_end = self._is_stopping = False
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for sock in (self._listener, self._wake_receiver, self._wake_sender):
            sock.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, self._read_signals)
        self._resume_accepting()
        os.register_at_fork(after_in_child=self._close_in_child)
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        self._thread.start()

    def hear_signal(self, number: int) -> None:
        """A signal has reached the root: called by a thread, because the main one may hang in a collective."""
        with contextlib.suppress(OSError):
            self._wake_sender.send(bytes([number]))

    def stop(self) -> None:
        """Let the others know that the root leaves, and end the thread."""
        if self._is_stopping:
            return
        self._is_stopping = True
        with contextlib.suppress(OSError):  # the thread may notice by itself, and close the socket
            self._wake_sender.send(b"\0")
        self._thread.join(timeout=2 * TICK_SECONDS)

    def _run(self) -> None:
        next_tick = time.monotonic() + TICK_SECONDS
        while not self._is_stopping:
            self._poll(max(next_tick - time.monotonic(), 0.0))
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_SECONDS
                self._tick()
        next_tick = time.monotonic() + TICK_SECONDS
        while self._poll(0.0) and time.monotonic() < next_tick:  # the root's own last messages
            pass
        self._tick()
        self._send_all("left")
        self._close()

    def _close(self) -> None:
        for sock in (self._listener, self._wake_sender, self._wake_receiver, *(m.connection for m in self._members)):
            sock.close()

    def _close_in_child(self) -> None:
        """Close the copies of a forked process, such as a loader's worker: the connections must end with the root."""
        self._close()

    def _poll(self, seconds: float) -> bool:
        """Handle the events of the next seconds; False if there were none."""
        events = self._selector.select(seconds)
        for key, _ in events:
            key.data()
        return bool(events)

    def _tick(self) -> None:
        for member in list(self._members):
            if member.rank < 0:
                member.ticks += 1
                if member.ticks > _UNIDENTIFIED_TICKS:
                    self._drop(member)
            elif not member.is_beat_pending:
                member.is_beat_pending = True
                member.send(to_line("beat"))
        self._resume_accepting()
        if not self._verdict and (verdict := self._monitor.tick(self._is_asked_to_end)):
            self._verdict = verdict
            self._send_all("end", verdict)
        elif not self._verdict and (wait := self._monitor.waiting_text()):
            say(wait, unbuffered=True)

    def _send_all(self, *message: Any) -> None:
        for member in self._members:
            if member.rank >= 0:
                member.send(to_line(*message))

    def _read_signals(self) -> None:
        self._is_asked_to_end |= any(number in _ASK_TO_END for number in self._wake_receiver.recv(4096))

    def _resume_accepting(self) -> None:
        with contextlib.suppress(KeyError, ValueError):  # registered already; closed, because all are connected
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _pause_accepting(self) -> None:
        with contextlib.suppress(KeyError):  # not registered
            self._selector.unregister(self._listener)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # such as too many open files, which select would report again at once: wait for a tick
            return self._pause_accepting()
        with contextlib.suppress(OSError):
            connection.setblocking(False)
            watch_link(connection)
            self._members.append(member := _Member(connection))
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(member))
        return None

    def _read(self, member: _Member) -> None:
        try:
            received = member.connection.recv(_LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        *lines, member.text = (member.text + received).split(b"\n")
        try:
            for line in lines:
                self._handle_message(member, *json.loads(line))
        except Exception:  # not a process of this job: its bytes must not end this thread
            received = b""
        if not received or len(member.text) > _LONGEST_LINE:
            self._drop(member)

    def _drop(self, member: _Member) -> None:
        self._selector.unregister(member.connection)
        member.connection.close()
        self._members.remove(member)
        if member.rank >= 0:
            self._monitor.lose(member.rank, "", self._update())

    def _handle_message(self, member: _Member, kind: str, *values: Any) -> None:
        if member.rank < 0:
            token, rank = values
            if kind != "here" or token != self.token or rank not in range(self._world_size):
                raise ValueError(kind)
            member.rank = int(rank)
            if {other.rank for other in self._members} >= set(range(self._world_size)):
                self._pause_accepting()
                self._listener.close()
        elif kind == "beat":
            member.is_beat_pending = False
            self._monitor.record(member.rank, *values)
        elif kind == "met":
            self._barrier_arrivals += 1
            if self._barrier_arrivals % self._world_size == 0:
                self._send_all("met")
        elif kind == "left":
            self._monitor.leave(member.rank)
        elif kind == "failed":
            self._monitor.lose(member.rank, values[0], self._update())
