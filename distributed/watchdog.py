"""Ends a job within a bounded time when a process died or stalls, and names its rank, update and activity.

A thread of every process writes heartbeats into a small store on the root: what its main thread is doing, and how many
phases it has begun. The root alone reads and compares them, all in one request, and writes its verdict into the store,
where the others read it. So the store answers two requests a second for each process, however many there are. If the
root dies, the store dies with it, and the others notice.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tandem.files.writing import say

from .errors import TrainingStopped, first_line
from .launchers import Launch

if TYPE_CHECKING:
    import torch

    from .collectives import Communicator

HEARTBEAT_SECONDS = 1.0
DEAD_AFTER_SECONDS = 3.0  # without a heartbeat; launchers give survivors 5 s (horovodrun) or more
_SILENT_AFTER_SECONDS = 2.5  # without a heartbeat, for those whose collective has failed
_LOOKS_FOR_SILENT = 5  # the root looks once a second, so it may tell a little later than DEAD_AFTER_SECONDS
SILENT_SECONDS = 60.0  # without a heartbeat while nothing failed: NCCL does not report a process that is gone
_LONGEST_TEXT = 200
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 0.25  # between two looks at who has arrived
_LOOKS_PER_SECOND = 10_000  # at most, of all processes together: a store answers about 30,000 requests a second


@dataclass
class _Mark:
    count: int = 0
    phase: str = "starting"
    update: int = 0
    collective: bool = False


WAITS = ("data", "communication")  # what this process may wait for


@dataclass
class _Seen:
    """When a rank last got further, and when it was last heard at all."""

    progress_at: float
    heard_at: float
    count: int = -1
    beats: int = -1


class Watchdog:
    """``mark`` costs a microsecond, because threads do the rest. A single process starts no threads."""

    def __init__(self, comm: Communicator, device: torch.device, launch: Launch, timeout_minutes: float) -> None:
        self._rank, self._world_size = comm.rank, comm.world_size
        self._timeout_seconds = timeout_minutes * 60
        self._mark = _Mark()
        #: Seconds in which this process waited, by what it waited for.
        self.waited = dict.fromkeys(WAITS, 0.0)
        self._waiting: str | None = None
        self._marked_at = time.monotonic()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: Any = None
        self._server: Any = None
        self._meetings, self._said_silent = 0, ""
        if self._world_size > 1:
            self._connect(comm, device, launch)
            self._answered_at = time.monotonic()
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
            if self._rank != 0:
                threading.Thread(target=self._watch_the_root, args=(self._thread,), daemon=True).start()

    def mark(
        self, phase: str, *, update: int | None = None, collective: bool = False, waits_for_data: bool = False,
        gathers: bool = False,
    ) -> None:  # fmt: skip
        """The main thread begins ``phase``; ``collective``: whether it may wait for other processes in this phase.
        With ``gathers`` it may too, but hardly does, so the time counts as computing."""
        now = time.monotonic()
        if self._waiting:
            self.waited[self._waiting] += now - self._marked_at
        self._waiting = "communication" if collective and self._world_size > 1 else "data" if waits_for_data else None
        self._marked_at = now
        last = self._mark
        self._mark = _Mark(last.count + 1, phase, last.update if update is None else update, collective or gathers)

    def meet(self) -> None:
        """Return when every process has called this. Unlike a collective it has no time limit: the others may
        have hours of work, and as long as they make progress the watchdog ends nobody."""
        if self._store is None:
            return
        self._meetings += 1
        self.mark("waiting for the other processes", collective=True)
        everybody, shortest = self._meetings * self._world_size, self._world_size / _LOOKS_PER_SECOND
        pause = max(_SHORTEST_PAUSE_SECONDS, shortest)
        arrived = self._store.add("arrived", 1)
        while arrived < everybody:
            time.sleep(pause)
            pause = max(min(2 * pause, _LONGEST_PAUSE_SECONDS), shortest)
            arrived = self._store.add("arrived", 0)

    def stop(self) -> None:
        """End the heartbeats, because this process leaves on purpose."""
        if self._thread is not None and not self._stopping.is_set():
            self._stopping.set()
            self._thread.join(timeout=DEAD_AFTER_SECONDS)  # it may hang if the root hangs
            # Close the store now rather than while the interpreter shuts down.
            self._store = self._server = None

    def explain(self, error: BaseException | None) -> TrainingStopped | None:
        """Why the run ends: ``error`` itself if its type is TrainingStopped, an error that names the lost process
        if ``error`` comes from a collective that failed because of the loss, and None otherwise."""
        if isinstance(error, TrainingStopped):
            return error
        if self._thread is None or not isinstance(error, RuntimeError | ConnectionError):
            return None
        lost = self._find_lost()
        return TrainingStopped(f"rank {self._rank}: {lost} ({_short(error)})", alone=True) if lost else None

    def _connect(self, comm: Communicator, device: torch.device, launch: Launch) -> None:
        from torch.distributed import TCPStore

        from .collectives import broadcast_object, gather_objects, sum_scalars

        own_host = socket.gethostname()
        hosts = gather_objects(own_host, comm, device)
        timeout = timedelta(seconds=30)
        address: tuple[str, int] | None = None
        if self._rank == 0:
            host = own_host if launch.master_port is None else launch.master_address
            if len(set(hosts)) == 1:
                host = "127.0.0.1"
            self._server = TCPStore(host, 0, self._world_size, is_master=True, wait_for_workers=False, timeout=timeout)
            address = (host, self._server.port)
        host, port = broadcast_object(address, comm, device)
        self._store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        self._store.set(f"rank/{self._rank}", self._beat(0))
        if self._rank == 0:
            self._store.set("silent", "")
        sum_scalars({"here": 1.0}, comm, device)  # from here on every key exists

    # What the threads run.

    def _run(self) -> None:
        beats = 0
        seen: dict[int, _Seen] = {}
        while not self._stopping.wait(HEARTBEAT_SECONDS):
            beats += 1
            try:
                self._store.set(f"rank/{self._rank}", self._beat(beats))
                if self._rank == 0 and (verdict := self._judge(seen)):
                    self._store.set("verdict", verdict)
                if self._store.check(["verdict"]):
                    verdict = self._store.get("verdict").decode()
                    if self._rank == 0:  # the store ends with rank 0: let the others read the verdict first
                        time.sleep(2 * HEARTBEAT_SECONDS)
                    self._end(verdict)
                self._answered_at = time.monotonic()
            except Exception:
                # Wait first: usually the main thread's next collective fails too, and its message says more.
                if self._rank != 0 and not self._stopping.wait(3 * DEAD_AFTER_SECONDS):
                    self._end(f"rank 0 is gone, at update {self._mark.update}")
                return

    def _watch_the_root(self, thread: threading.Thread) -> None:
        """Ends this process if the root hangs or its machine is gone, because ``_run`` then waits for the root's store
        for ever."""
        patience = max(min(self._timeout_seconds, SILENT_SECONDS), 2 * DEAD_AFTER_SECONDS)
        # Not by the clock: if this process itself was held up, the root may have answered in the meantime.
        answered_at, unanswered = self._answered_at, 0.0
        while thread.is_alive() and not self._stopping.wait(HEARTBEAT_SECONDS):
            unanswered = unanswered + HEARTBEAT_SECONDS if answered_at == self._answered_at else 0.0
            answered_at = self._answered_at
            if unanswered >= patience:
                self._end(f"rank 0 has not answered for {patience:.0f} seconds, at update {self._mark.update}")

    def _judge(self, seen: dict[int, _Seen]) -> str | None:
        """Run by the root: which ranks are dead, or made no progress for the whole timeout and hold up the others."""
        now = time.monotonic()
        beats = self._beats()
        for rank, beat in beats.items():
            last = seen.setdefault(rank, _Seen(now, now))
            if last.count != beat["count"]:
                last.count, last.progress_at = beat["count"], now
            if last.beats != beat["beats"]:
                last.beats, last.heard_at = beat["beats"], now
        self._tell_who_is_silent([rank for rank in beats if now - seen[rank].heard_at > _SILENT_AFTER_SECONDS], beats)
        dead = [rank for rank in beats if now - seen[rank].heard_at > SILENT_SECONDS]
        if dead:
            return _lost(dead, beats)
        stalled = [rank for rank in beats if now - seen[rank].progress_at > self._timeout_seconds]
        silent = [rank for rank in stalled if now - seen[rank].heard_at > DEAD_AFTER_SECONDS]
        # A rank that waits for others in a collective is not to blame while a rank outside a collective stands still.
        busy = [rank for rank in stalled if not beats[rank]["collective"]]
        culprits = silent or busy
        if not culprits and len(stalled) == self._world_size:
            behind = min(beat["update"] for beat in beats.values())
            culprits = [rank for rank in stalled if beats[rank]["update"] == behind]
        named = "; ".join(f"rank {r} stands at update {beats[r]['update']} ({beats[r]['phase']})" for r in culprits)
        return f"no progress for {self._timeout_seconds / 60:g} minutes: {named}" if culprits else None

    def _tell_who_is_silent(self, ranks: list[int], beats: dict[int, dict[str, Any]]) -> None:
        """Run by the root: let the others read which ranks have no heartbeat, in case that a collective fails."""
        said = _lost(ranks, beats) if ranks else ""
        if said != self._said_silent:
            self._store.set("silent", said)
            self._said_silent = said

    def _find_lost(self) -> str | None:
        """After a failed collective: the rank whose heartbeat has stopped, if there is one."""
        if self._rank != 0 and time.monotonic() - self._answered_at > 2 * DEAD_AFTER_SECONDS:
            return f"rank 0 does not answer, at update {self._mark.update}"
        try:
            for pause in (DEAD_AFTER_SECONDS, *[_LONGEST_PAUSE_SECONDS] * _LOOKS_FOR_SILENT):
                time.sleep(pause)
                if said := self._store.get("silent").decode():
                    return str(said)
        except Exception:
            return f"lost contact with rank 0 at update {self._mark.update}" if self._rank else None
        return None

    def _beats(self) -> dict[int, dict[str, Any]]:
        found = self._store.multi_get([f"rank/{rank}" for rank in range(self._world_size)])
        return {rank: json.loads(beat) for rank, beat in enumerate(found)}

    def _beat(self, beats: int) -> str:
        return json.dumps({"beats": beats, **asdict(self._mark)})

    def _end(self, verdict: str) -> None:
        """End the whole process at once: its main thread may hang inside a collective."""
        say(f"rank {self._rank}: stopped: {verdict}")
        os._exit(1)


def _lost(ranks: list[int], beats: dict[int, dict[str, Any]]) -> str:
    named = (f"rank {rank} at update {beats[rank]['update']} ({beats[rank]['phase']})" for rank in ranks)
    return f"lost contact with {'; '.join(named)}"


def _short(error: BaseException) -> str:
    """The error's first line, cut between two words if it is long."""
    line = first_line(error)
    return line if len(line) <= _LONGEST_TEXT else line[:_LONGEST_TEXT].rsplit(" ", 1)[0] + " ..."
