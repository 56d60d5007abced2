"""Decides which rank is lost or stalled: a thread of the root, to which every process sends heartbeats.

Every process, the root included, connects to this thread (`watchdog.py`). The kernel closes the connections of a
process that ends, however it ends, and gives up connections to a machine that does not answer. So a loss is known at
once, and a process that is busy, slow or stopped does not count as lost. Time is counted in ticks of the thread: no
ticks pass while the whole job is frozen (SIGSTOP, `docker pause`, `scontrol suspend`).
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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tandem.io.reading import counted
from tandem.io.writing import say

TICK_SECONDS = 1.0
LOST_SECONDS = 25  # until a silent machine is lost: less than the 30 s after which torchrun kills the others
SILENT_TICKS = 10  # if the job is asked to end, a process that does not answer for so long is lost ...
_LOADING_TICKS = 30  # ... and a process that gets no batch from its loader processes for so long
_STALLED_SILENT_TICKS = 3  # in place of SILENT_TICKS for a rank that makes no progress either
_WAITING_TICKS = 10  # in a collective, after which the wait is reported
_UNIDENTIFIED_TICKS = 30  # after which a connection that has not named its rank is dropped
_LONGEST_LINE = 1 << 16  # bytes
_MAX_NAMED_RANKS = 8  # ranks in a verdict, which is one line: a lost machine may have run hundreds
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def enable_keepalive(connection: socket.socket) -> None:
    """Let the kernel close a connection to a machine that is gone. (For a stopped process, its kernel answers.)"""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    values = {"KEEPIDLE": 5, "KEEPINTVL": 5, "KEEPCNT": LOST_SECONDS // 5, "USER_TIMEOUT": 1000 * LOST_SECONDS}
    for name, value in values.items():
        if option := getattr(socket, f"TCP_{name}", None):  # not every system has all
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _listen(host: str, backlog: int) -> socket.socket:
    """A socket on a free port; with an empty ``host`` on every address of this machine, IPv4 and IPv6."""
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 is switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server((host, 0), backlog=backlog)


def encode_message(*message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


@dataclass
class _RankState:
    """The state of a rank; ``answered_at`` and ``progressed_at`` are the ticks of its last answer and progress."""

    answered_at: int
    progressed_at: int
    heartbeat: dict[str, Any] = field(default_factory=lambda: {"count": 0, "phase": "starting", "update": 0})
    end_error: str | None = None  # of a lost rank: the error with which it ended, "" if unknown
    has_left: bool = False

    @property
    def position(self) -> str:
        phase = self.heartbeat["phase"]
        return f"at update {self.heartbeat['update']}{f' ({phase})' if phase else ''}"


class HeartbeatMonitor:
    """Decides which rank is lost, or which one holds up the others.

    Args:
        timeout_ticks: How long a rank may make no progress.
    """

    def __init__(self, world_size: int, timeout_ticks: float) -> None:
        self.now, self._timeout_ticks = 0, timeout_ticks
        self._ranks = [_RankState(0, 0) for _ in range(world_size)]
        self._announced_phases: set[str] = set()

    def record(self, rank: int, heartbeat: dict[str, Any]) -> None:
        """Record a heartbeat: what a rank is doing. Its ``count`` grows with each phase that begins and, in a phase
        that gives no heartbeats itself (``is_uninterrupted``), while the rank uses the processor."""
        state = self._ranks[rank]
        if state.heartbeat["count"] != heartbeat["count"]:
            state.progressed_at = self.now
        state.heartbeat, state.answered_at = heartbeat, self.now

    def mark_left(self, rank: int) -> None:
        """Record that a rank ends on purpose: it is done, or all end together, or another rank has failed."""
        self._ranks[rank].has_left = True

    def mark_lost(self, rank: int, error: str = "", update: int = 0) -> None:
        """Record that a rank has ended, with its own ``error`` or without one, when the root was at ``update``. The
        rank was at this update too, because all ranks make an update together; its last heartbeat, up to a tick old,
        may be of an earlier one."""
        state = self._ranks[rank]
        if not state.has_left and state.end_error is None:
            state.end_error = error
            if update > state.heartbeat["update"]:
                state.heartbeat = {**state.heartbeat, "update": update, "phase": ""}

    def tick(self, is_asked_to_end: bool = False) -> str | None:
        """Count a tick. Returns the verdict, a line on why the job must end, or None. Ranks whose connections end
        within the same tick are in one verdict."""
        self.now += 1
        if any(state.end_error is not None for state in self._ranks):
            return self._name_ranks("lost contact with ", lambda state: state.end_error is not None)
        if is_asked_to_end and any(map(self._lacks_data, self._ranks)):
            return self._name_ranks(f"asked to end, but for {_LOADING_TICKS} s no data has come to ", self._lacks_data)
        # Without a request to end, a silent rank may just be slow and hold up nobody, such as the root while it saves.
        if is_asked_to_end and any(map(self._is_silent, self._ranks)) and any(map(self._is_waiting, self._ranks)):
            return self._name_ranks("no sign of life from ", self._is_silent)
        return self._find_stalled()

    def waiting_text(self) -> str | None:
        """A line that names the ranks for which others have waited 10 s in a collective; None if there are none, or
        their phases were named before."""
        waiting_count = sum(map(self._is_waiting, self._ranks))
        busy = [state for state in self._ranks if not state.has_left and not state.heartbeat.get("collective")]
        phases = {state.heartbeat["phase"] for state in busy}
        if not waiting_count or phases <= self._announced_phases:
            return None
        self._announced_phases |= phases
        verb = "process has" if waiting_count == 1 else "processes have"
        prefix = f"{waiting_count} {verb} waited for {_WAITING_TICKS * TICK_SECONDS:g} s for "
        return self._name_ranks(prefix, lambda state: state in busy)

    def _name_ranks(self, prefix: str, is_named: Callable[[_RankState], bool], verb: str = "") -> str:
        entries = [
            f"rank {rank} {verb}{state.position}{': ' if state.end_error else ''}{state.end_error or ''}"
            for rank, state in enumerate(self._ranks)
            if is_named(state)
        ]
        more = [f"and {len(entries) - _MAX_NAMED_RANKS} more ranks"] if len(entries) > _MAX_NAMED_RANKS else []
        return prefix + "; ".join([*entries[:_MAX_NAMED_RANKS], *more])

    def _is_silent(self, state: _RankState, ticks: int = SILENT_TICKS) -> bool:
        return not state.has_left and self.now - state.answered_at > ticks

    def _is_stalled(self, state: _RankState, ticks: float) -> bool:
        return not state.has_left and self.now - state.progressed_at > ticks

    def _lacks_data(self, state: _RankState) -> bool:
        """Whether a rank has waited long for its loader processes, which may hang; then it cannot save."""
        return bool(state.heartbeat.get("loads")) and self._is_stalled(state, _LOADING_TICKS)

    def _is_waiting(self, state: _RankState) -> bool:
        """Whether a rank answers, but has waited long in a collective."""
        is_in_collective = bool(state.heartbeat.get("collective"))
        return is_in_collective and self._is_stalled(state, _WAITING_TICKS) and not self._is_silent(state)

    def _find_stalled(self) -> str | None:
        """A verdict on the ranks that made no progress for the whole timeout and hold up the others, or None."""
        stalled = [state for state in self._ranks if self._is_stalled(state, self._timeout_ticks)]
        silent = [state for state in stalled if self._is_silent(state, _STALLED_SILENT_TICKS)]
        # A rank that waits in a collective is not the cause while another rank is stalled outside of collectives.
        busy = [state for state in stalled if not state.heartbeat.get("collective")]
        culprits = silent or busy
        if not culprits and len(stalled) == len(self._ranks):
            lowest_update = min(state.heartbeat["update"] for state in self._ranks)
            culprits = [state for state in stalled if state.heartbeat["update"] == lowest_update]
        if not culprits:
            return None
        prefix = f"no progress for {counted(self._timeout_ticks * TICK_SECONDS / 60, 'minute')}: "
        return self._name_ranks(prefix, lambda state: state in culprits, "stands ")


@dataclass
class _Peer:
    """A process that has connected; ``rank`` is -1 until the process has sent it."""

    connection: socket.socket
    rank: int = -1
    unread: bytes = b""  # the beginning of a line whose end has not come
    unidentified_ticks: int = 0
    is_beat_pending: bool = False  # requested and not answered: a stopped process gets no second request

    def send(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(line)


class HeartbeatServer:
    """A thread of the root that receives the heartbeats and sends the monitor's verdict. A process needs ``port`` and
    ``token`` to connect; ``update`` returns the number of the root's present update.

    Messages are lines of JSON. A process first sends ["here", token, rank]. It answers each ["beat"] with ["beat",
    heartbeat]. When it enters a barrier it sends ["met"], and when all have entered, all receive ["met"]. At its end it
    sends ["left"] or ["failed", error]. It receives ["end", verdict] if the job must end, and ["left"] when the root
    has left on purpose.
    """

    def __init__(self, host: str, world_size: int, timeout_ticks: float, update: Callable[[], int] = lambda: 0) -> None:
        self._root_update = update
        self._world_size, self._monitor = world_size, HeartbeatMonitor(world_size, timeout_ticks)
        self._listener = _listen(host, world_size)
        self.port, self.token = self._listener.getsockname()[1], secrets.token_hex(8)
        self._peers: list[_Peer] = []
        self._barrier_arrivals, self._verdict = 0, ""
        self._is_asked_to_end = self._is_stopping = False
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for sock in (self._listener, self._wake_receiver, self._wake_sender):
            sock.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, self._read_signals)
        self._resume_accepting()
        # Close the copies in a forked process, such as a loader's worker: the connections must end with the root.
        os.register_at_fork(after_in_child=self._close)
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    def notify_signal(self, number: int) -> None:
        """Record that a signal has reached the root. Called by a thread, because the main one may hang in a
        collective."""
        with contextlib.suppress(OSError):
            self._wake_sender.send(bytes([number]))

    def stop(self) -> None:
        """Tell the other processes that the root leaves, and end the thread."""
        if self._is_stopping:
            return
        self._is_stopping = True
        with contextlib.suppress(OSError):  # the thread may have closed the socket
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
        connections = (peer.connection for peer in self._peers)
        for sock in (self._listener, self._wake_sender, self._wake_receiver, *connections):
            sock.close()

    def _poll(self, seconds: float) -> bool:
        """Handle the events of the next seconds; False if there were none."""
        events = self._selector.select(seconds)
        for key, _ in events:
            key.data()
        return bool(events)

    def _tick(self) -> None:
        for peer in list(self._peers):
            if peer.rank < 0:
                peer.unidentified_ticks += 1
                if peer.unidentified_ticks > _UNIDENTIFIED_TICKS:
                    self._drop(peer)
            elif not peer.is_beat_pending:
                peer.is_beat_pending = True
                peer.send(encode_message("beat"))
        self._resume_accepting()
        if not self._verdict and (verdict := self._monitor.tick(self._is_asked_to_end)):
            self._verdict = verdict
            self._send_all("end", verdict)
        elif not self._verdict and (waiting_text := self._monitor.waiting_text()):
            say(waiting_text, unbuffered=True)

    def _send_all(self, *message: Any) -> None:
        for peer in self._peers:
            if peer.rank >= 0:
                peer.send(encode_message(*message))

    def _read_signals(self) -> None:
        self._is_asked_to_end |= any(number in _STOP_SIGNALS for number in self._wake_receiver.recv(4096))

    def _resume_accepting(self) -> None:
        with contextlib.suppress(KeyError, ValueError):  # registered already, or closed because all are connected
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _pause_accepting(self) -> None:
        with contextlib.suppress(KeyError):  # not registered
            self._selector.unregister(self._listener)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # such as too many open files: select would report it again at once, so wait for a tick
            return self._pause_accepting()
        with contextlib.suppress(OSError):
            connection.setblocking(False)
            enable_keepalive(connection)
            self._peers.append(peer := _Peer(connection))
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(peer))
        return None

    def _read(self, peer: _Peer) -> None:
        try:
            received = peer.connection.recv(_LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        *lines, peer.unread = (peer.unread + received).split(b"\n")
        try:
            for line in lines:
                self._handle_message(peer, *json.loads(line))
        except Exception:  # from a process of another job: its bytes must not end this thread
            received = b""
        if not received or len(peer.unread) > _LONGEST_LINE:
            self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self._peers.remove(peer)
        if peer.rank >= 0:
            self._monitor.mark_lost(peer.rank, "", self._root_update())

    def _handle_message(self, peer: _Peer, kind: str, *values: Any) -> None:
        if peer.rank < 0:
            token, rank = values
            if kind != "here" or token != self.token or rank not in range(self._world_size):
                raise ValueError(kind)
            peer.rank = int(rank)
            if {other.rank for other in self._peers} >= set(range(self._world_size)):
                self._pause_accepting()
                self._listener.close()
        elif kind == "beat":
            peer.is_beat_pending = False
            self._monitor.record(peer.rank, *values)
        elif kind == "met":
            self._barrier_arrivals += 1
            if self._barrier_arrivals % self._world_size == 0:
                self._send_all("met")
        elif kind == "left":
            self._monitor.mark_left(peer.rank)
        elif kind == "failed":
            self._monitor.mark_lost(peer.rank, values[0], self._root_update())
