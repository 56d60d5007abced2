"""Ends a job whose process died or stalls, within a bounded time, and names the rank, the update and what it did.

Every process writes a heartbeat into a small store on the root, from a thread of its own: what its main thread is
doing, and since how many marks. The root compares; its verdict goes back through the store. When the root itself is
gone, the store is, and the others notice.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .errors import TrainingStopped

if TYPE_CHECKING:
    from .base import Backend

HEARTBEAT_SECONDS = 1.0
DEAD_AFTER_SECONDS = 3.0  # without a heartbeat; launchers give survivors 5 s (horovodrun) or more
SILENT_SECONDS = 60.0  # without a heartbeat while nothing failed: NCCL does not report a process that is gone
EXIT_CODE = 1
_SOURCE_PLACE = re.compile(r"\[[^\[\]\s]+\.(?:cc|cpp|cu|h|hpp):\d+\][ \t]*")  # of Gloo's own C++
_LONGEST_TEXT = 200


@dataclass
class _Mark:
    count: int = 0
    phase: str = "starting"
    update: int = 0
    collective: bool = False


@dataclass
class _Seen:
    """When a rank last got further, and when it was last heard at all."""

    progress_at: float
    heard_at: float
    count: int = -1
    beats: int = -1


class Watchdog:
    """``mark`` costs an assignment; everything else happens in the thread."""

    def __init__(self, backend: Backend) -> None:
        self._rank, self._world_size = backend.rank, backend.world_size
        self._timeout_seconds = backend.options.timeout_minutes * 60
        self._mark = _Mark()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: Any = None
        self._server: Any = None
        if self._world_size > 1:
            self._connect(backend)
            self._answered_at = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()
            if self._rank != 0:
                threading.Thread(target=self._watch_the_root, name="watchdog of the root", daemon=True).start()

    def mark(self, phase: str, *, update: int | None = None, collective: bool = False) -> None:
        """The main thread begins ``phase``; ``collective`` says that it may wait for others there."""
        last = self._mark
        self._mark = _Mark(last.count + 1, phase, last.update if update is None else update, collective)

    def stop(self) -> None:
        """No more heartbeats: this process leaves on purpose."""
        if self._thread is not None and not self._stopping.is_set():
            self._stopping.set()
            self._thread.join(timeout=DEAD_AFTER_SECONDS)  # for ever, if the root stands still
            # Now, and not whenever the interpreter takes its objects down.
            self._store = self._server = None

    def explain(self, error: BaseException | None) -> TrainingStopped | None:
        """Why the run ends, where there is more to say than the error itself: if it is the echo of another process's
        end, whose."""
        if isinstance(error, TrainingStopped):
            return error
        if self._thread is None or not isinstance(error, RuntimeError | ConnectionError):
            return None
        lost = self._find_lost()
        return TrainingStopped(f"rank {self._rank}: {lost} ({_first_line(error)})", alone=True) if lost else None

    # The thread.

    def _connect(self, backend: Backend) -> None:
        from torch.distributed import TCPStore

        from .collectives import gather_objects

        hosts = gather_objects(socket.gethostname(), backend.comm, backend.device)
        timeout = timedelta(seconds=30)
        address: tuple[str, int] | None = None
        if self._rank == 0:
            host = "127.0.0.1" if len(set(hosts)) == 1 else _reachable_name(backend)
            self._server = TCPStore(host, 0, self._world_size, is_master=True, wait_for_workers=False, timeout=timeout)
            address = (host, self._server.port)
        host, port = gather_objects(address, backend.comm, backend.device)[0]
        self._store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        self._store.set(self._key(self._rank), self._beat(0))
        gather_objects(None, backend.comm, backend.device)  # from here on every key exists

    def _run(self) -> None:
        beats = 0
        seen: dict[int, _Seen] = {}
        while not self._stopping.wait(HEARTBEAT_SECONDS):
            beats += 1
            try:
                self._store.set(self._key(self._rank), self._beat(beats))
                if self._rank == 0 and (verdict := self._judge(seen)):
                    self._store.set("verdict", verdict)
                if self._store.check(["verdict"]):
                    verdict = self._store.get("verdict").decode()
                    if self._rank == 0:  # the store ends with this process: let the others read first
                        time.sleep(2 * HEARTBEAT_SECONDS)
                    self._end(verdict)
                self._answered_at = time.monotonic()
            except Exception:
                # The main thread usually learns the same from its next collective: it has the first word.
                if self._rank != 0 and not self._stopping.wait(3 * DEAD_AFTER_SECONDS):
                    self._end(f"rank 0 is gone, at update {self._mark.update}")
                return

    def _watch_the_root(self) -> None:
        """A root that is stopped, and its store with it, leaves questions unanswered for ever."""
        patience = max(self._timeout_seconds, 2 * DEAD_AFTER_SECONDS)
        thread = self._thread
        assert thread is not None
        while thread.is_alive() and not self._stopping.wait(HEARTBEAT_SECONDS):
            if time.monotonic() - self._answered_at > patience:
                minutes = self._timeout_seconds / 60
                self._end(f"no progress for {minutes:g} minutes: rank 0 does not answer, at update {self._mark.update}")

    def _judge(self, seen: dict[int, _Seen]) -> str | None:
        """The root's view: who has got nowhere for the whole timeout, and who is to blame for it?"""
        now = time.monotonic()
        beats = self._beats()
        for rank, beat in beats.items():
            last = seen.setdefault(rank, _Seen(now, now))
            if last.count != beat["count"]:
                last.count, last.progress_at = beat["count"], now
            if last.beats != beat["beats"]:
                last.beats, last.heard_at = beat["beats"], now
        dead = [rank for rank in beats if now - seen[rank].heard_at > SILENT_SECONDS]
        if dead:
            named = "; ".join(f"rank {r} at update {beats[r]['update']} ({beats[r]['phase']})" for r in dead)
            return f"lost contact with {named}"
        stalled = [rank for rank in beats if now - seen[rank].progress_at > self._timeout_seconds]
        silent = [rank for rank in stalled if now - seen[rank].heard_at > DEAD_AFTER_SECONDS]
        # Whoever waits for others in a collective is not to blame while anybody else stands still.
        busy = [rank for rank in stalled if not beats[rank]["collective"]]
        if len(stalled) == self._world_size:
            behind = min(beat["update"] for beat in beats.values())
            culprits = silent or busy or [rank for rank in stalled if beats[rank]["update"] == behind]
        else:
            culprits = silent or busy
        if not culprits:
            return None
        named = "; ".join(f"rank {r} stands at update {beats[r]['update']} ({beats[r]['phase']})" for r in culprits)
        return f"no progress for {self._timeout_seconds / 60:g} minutes: {named}"

    def _find_lost(self) -> str | None:
        """After a failed collective: whose heartbeat has stopped?"""
        if self._rank != 0 and time.monotonic() - self._answered_at > 2 * DEAD_AFTER_SECONDS:
            return f"rank 0 does not answer, at update {self._mark.update}"
        try:
            first = self._beats()
            time.sleep(DEAD_AFTER_SECONDS)
            now = self._beats()
        except Exception:
            return f"lost contact with rank 0 at update {self._mark.update}" if self._rank else None
        silent = [r for r in now if r != self._rank and now[r]["beats"] == first[r]["beats"]]
        lost = [f"rank {r} at update {now[r]['update']} ({now[r]['phase']})" for r in silent]
        return f"lost contact with {'; '.join(lost)}" if lost else None

    def _beats(self) -> dict[int, dict[str, Any]]:
        return {rank: json.loads(self._store.get(self._key(rank))) for rank in range(self._world_size)}

    def _beat(self, beats: int) -> str:
        mark = self._mark
        return json.dumps(
            {
                "beats": beats,
                "count": mark.count,
                "phase": mark.phase,
                "update": mark.update,
                "collective": mark.collective,
            }
        )

    def _key(self, rank: int) -> str:
        return f"rank/{rank}"

    def _end(self, verdict: str) -> None:
        """The main thread may hang inside a collective for ever: end the whole process."""
        print(f"{os.path.basename(sys.argv[0])}: rank {self._rank}: stopped: {verdict}", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)


def _reachable_name(backend: Backend) -> str:
    """The name under which other machines reach the root."""
    return socket.gethostname() if backend.launch.master_port is None else backend.launch.master_address


def _first_line(error: BaseException) -> str:
    """Without the places in Gloo's sources, cut between two words."""
    text = _SOURCE_PLACE.sub("", str(error)).strip() or type(error).__name__
    line = text.splitlines()[0].rstrip()
    return line if len(line) <= _LONGEST_TEXT else line[:_LONGEST_TEXT].rsplit(" ", 1)[0] + " ..."
