"""Signals that ask a run to stop, known to all processes after the same update.

A scheduler may signal one process, some, or all, at different moments. Each process adds its flag to a sum over the
processes, so that all stop after the same update: to the last sum of gradients of each update, or, where there is none,
to an asynchronous sum of its own that all processes read one call later. No update waits for it. Before something that
takes long, such as a validation, and at each of its batches the processes wait for a sum instead.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from .collectives import Communicator, Handle


class StopRequest:
    """Whether all processes stop after an update.

    Args:
        received: The signals that have asked this process to stop (`Signals.received`).
    """

    def __init__(self, comm: Communicator, received: Collection[int] = ()) -> None:
        self._comm, self._received = comm, received
        self._is_asked = False  # by the last caller of `agreed`
        self._pending: tuple[torch.Tensor, Handle] | None = None
        self._arrived = self._is_carried = False
        # Flags that are on their way from the device to the host, of this call and of the one before.
        self._reading: list[tuple[torch.Tensor, Any]] = []
        self._read_next: list[tuple[torch.Tensor, Any]] = []

    @property
    def is_asked_here(self) -> bool:
        """Whether a signal has reached this process; the others may not know it yet."""
        return bool(self._received)

    def agreed(self, here: bool = False, now: bool = False) -> bool:
        """Collective: whether all processes stop now. ``here``: this process asks them to stop. With several processes
        a request is reported one call late, on a GPU up to two, so that nothing waits for the sum; with ``now`` the
        call waits for a sum of its own.
        """
        self._is_asked = here
        wanted = here or self.is_asked_here
        if self._comm.world_size == 1:
            return wanted
        answer = self.drain() or self._of_gradients()
        if now or not self._is_carried:
            flags = torch.tensor([int(wanted)], dtype=torch.int32)
            self._pending = (flags, self._comm.all_reduce_(flags, "stop_request"))
        self._is_carried = False
        return (self.drain() or answer) if now else answer

    def depart(self) -> bool:
        """The flag of this process, for a sum of gradients; see ``GradientReducer``."""
        self._is_carried = True
        return self._is_asked or self.is_asked_here

    def arrive(self, total: torch.Tensor) -> None:
        """What the sum of gradients has made of the flags. On a GPU the host reads it later, without a wait."""
        if total.device.type == "cpu":
            self._arrived |= bool(total)
            return
        copy = torch.empty((), dtype=total.dtype, pin_memory=True)
        copy.copy_(total, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._read_next.append((copy, event))

    def _of_gradients(self) -> bool:
        """Whether a flag has come with gradients; the same on all processes after the same update."""
        for copy, event in self._reading:
            event.synchronize()  # it was recorded an update ago, so this hardly waits
            self._arrived |= bool(copy)
        self._reading, self._read_next = self._read_next, []
        return self._arrived

    def drain(self) -> bool:
        """Wait for the sum that is under way, if there is one; return whether any process asked to stop."""
        if self._pending is None:
            return False
        flags, handle = self._pending
        handle.wait()
        self._pending = None
        return bool(flags.item())
