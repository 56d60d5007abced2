"""Signals that ask a run to stop, known to all processes after the same update.

A scheduler may signal one process, some, or all, at different moments. Each process adds its flag to an asynchronous
sum that all processes read one update later, so that no update waits for it and all stop after the same update. Before
something that takes long, such as a validation, the processes wait for the sum instead.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

import torch

from .collectives import Communicator, Handle

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Between ``install`` and ``restore`` the first signal asks the run to stop; a second SIGINT ends the process."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._received: set[int] = set()
        self._pending: tuple[torch.Tensor, Handle] | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def agreed(self, here: bool = False, now: bool = False) -> bool:
        """Collective: whether all processes stop now. ``here``: this process asks them to stop. With several processes
        a request is reported one call late, so that no update waits for the sum; with ``now`` the call waits for it.
        """
        wanted = here or bool(self._received)
        if self._comm.world_size == 1:
            return wanted
        answer = self.drain()
        flags = torch.tensor([int(wanted)], dtype=torch.int32)
        self._pending = (flags, self._comm.all_reduce_(flags, "stop_request"))
        return (self.drain() or answer) if now else answer

    def drain(self) -> bool:
        """Wait for the sum that is under way, if there is one; return whether any process asked to stop."""
        if self._pending is None:
            return False
        flags, handle = self._pending
        handle.wait()
        self._pending = None
        return bool(flags.item())

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and signal.SIGINT in self._received:
            os._exit(130)
        self._received.add(number)
