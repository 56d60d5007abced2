"""Signals that ask a run to stop, and the agreement of all processes to stop after the same update.

A thread receives the signals too: while the main thread waits in C++, as in a collective, Python runs no handlers.

A scheduler may signal one process, some, or all, at different moments. So the processes sum a flag, 1 for a process
that was asked to stop, and all stop after the same update. The flag is summed with the last bucket of gradients of each
update, or with their norm (FSDP). Where an engine does neither, the flag is summed alone, asynchronously, and all
processes read the sum one call later. No update waits for the sum. Before something that takes long, such as a
validation, and at each of its batches the processes wait for a sum instead.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch

from tandem.devices import has_pinned_memory, start_copy_to_host
from tandem.io.exits import ASKED_TO_STOP, INTERRUPTED, AskedToStop, exit_process
from tandem.io.writing import say

from .collectives import Communicator, Handle

if TYPE_CHECKING:
    from .watchdog import Watchdog

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# The processes of deepspeed have its terminal; torchrun and horovodrun start theirs in sessions of their own.
_TERMINAL_LAUNCHERS = ("python", "deepspeed")
_JOB_WIDE_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # that launchers mostly pass on to all processes
_LEFT_IGNORED = (signal.SIGINT, signal.SIGHUP)
_WAKE_UP = b"\0"  # no signal has this number
_ORPHAN_CHECK_SECONDS = 1.0
_VERDICT_SECONDS = 3.0  # to wait for the watchdog's verdict: launchers ask processes to stop if one is lost


# Weak references, because functions that are registered for forks are never released, and would keep a whole run.
_open_instances: weakref.WeakSet[Signals] = weakref.WeakSet()


def _close_all_in_child() -> None:
    for signals in list(_open_instances):
        signals.close_in_child()


os.register_at_fork(after_in_child=_close_all_in_child)


class Signals:
    """Handles `SIGNALS` from the constructor until ``close``, except a SIGHUP that is ignored, as under nohup, or a
    SIGINT that is ignored, as in `command &` of a shell script, where a Ctrl-C is meant for the script.

    Until ``enable_saving`` a signal ends this process, because there is nothing to save, unless the watchdog has
    another reason for the end. Later a signal is added to ``received``, the root prints at once that it was asked to
    stop, and a second SIGINT ends the process. Processes that are forked meanwhile, such as a pool of a user's dataset,
    get the default handlers.

    Args:
        is_orphan: Returns whether the launcher is gone, which before ``enable_saving`` counts as a signal.
        is_root: Whether this process prints for all.
        launcher: `Launch.launcher`. A Ctrl-C in the terminal reaches the processes of ``_TERMINAL_LAUNCHERS``.
    """

    def __init__(self, is_orphan: Callable[[], bool], *, is_root: bool, launcher: str = "python") -> None:
        self.is_orphan, self._is_root, self._launcher = is_orphan, is_root, launcher
        #: The signals that ask the run to stop.
        self.received: set[int] = set()
        #: Is notified of signals; None until it is created.
        self.watchdog: Watchdog | None = None
        self._can_save = self._is_closed = self._has_announced = self._is_interruptible = False
        self._announce_lock = threading.Lock()
        self._interrupts = 0
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._previous_handlers: dict[int, Any] = {
            number: signal.signal(number, self._handle)
            for number in SIGNALS
            if number not in _LEFT_IGNORED or signal.getsignal(number) != signal.SIG_IGN
        }
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        _open_instances.add(self)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()

    def enable_saving(self) -> None:
        """From here on a signal leads to a save, because there is something to save."""
        self._can_save = True

    def announce_stop(self) -> None:
        """Print that the run was asked to stop, unless that was printed; called when all processes have agreed."""
        self._announce_once(min(self.received, default=None))

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Context that a signal ends at once, with AskedToStop, even while its body waits. For the main thread."""
        self._is_interruptible = True
        try:
            if self.received:
                raise AskedToStop
            yield
        finally:
            self._is_interruptible = False

    def close(self) -> None:
        """Handle the signals that were received, and restore the earlier handlers."""
        if self._is_closed:
            return
        self._is_closed = True
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        for number, handler in self._previous_handlers.items():
            if handler is not None:  # None: a handler that was set in C, which Python cannot restore
                signal.signal(number, handler)
        os.write(self._write_fd, _WAKE_UP)  # closing would not wake the thread: forked processes may hold the pipe open
        self._thread.join()
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _handle(self, number: int, frame: Any) -> None:
        self._record(number)
        if self._is_interruptible and self.received:
            self._is_interruptible = False
            raise AskedToStop

    def _record(self, number: int) -> None:
        if self._can_save:
            self.received.add(number)

    # What the thread runs.

    def _listen(self) -> None:
        while True:
            if select.select([self._read_fd], [], [], _ORPHAN_CHECK_SECONDS)[0]:
                byte = os.read(self._read_fd, 1)
                if byte == _WAKE_UP:
                    return
                if byte[0] in self._previous_handlers:
                    self._on_signal(signal.Signals(byte[0]))
                continue
            if not self._can_save and self.is_orphan():
                self._end_before_saving("the launcher is gone")
            if self.watchdog and self._is_root:
                self.watchdog.report_loading()

    def _on_signal(self, number: signal.Signals) -> None:
        if self.watchdog:
            self.watchdog.notify_signal(number)
        if not self._can_save:
            self._end_before_saving(number.name)
        self._record(number)  # again: saving may have been enabled meanwhile
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            exit_process(INTERRUPTED, at_once=True)
        # torchrun and horovodrun send SIGTERM if a process is lost, too: then nothing can be saved.
        patience = _VERDICT_SECONDS if number == signal.SIGTERM else 0.0
        if self._can_save and self._is_root and not self._has_announced and not self._has_verdict(patience):
            self._announce_once(number)

    def _has_verdict(self, seconds: float = _VERDICT_SECONDS) -> bool:
        """Whether the watchdog has a verdict, now or within so many seconds."""
        return self.watchdog is not None and self.watchdog.wait_for_verdict(seconds)

    def _end_before_saving(self, reason: str) -> None:
        if self._has_verdict() or self._can_save:
            return
        if self._is_root:
            say(f"{reason}: stopped before there was anything to save; the same command starts again")
        exit_process(ASKED_TO_STOP, at_once=True)

    def _announce_once(self, number: int | None) -> None:
        """Print that the run was asked to stop, on the root. ``number`` is None if it has received no signal itself."""
        with self._announce_lock:
            if not self._is_root or self._has_announced:
                return
            self._has_announced = True
            consequence = ""
            if number in _JOB_WIDE_SIGNALS and self._launcher not in _TERMINAL_LAUNCHERS:
                consequence = f"; {self._launcher} kills it if that takes too long"
            elif number == signal.SIGINT:
                consequence = "; a second Ctrl-C ends it at once, without a save"
            reason = "the launcher is gone" if self.is_orphan() else "asked to stop"
            name = reason if number is None else signal.Signals(number).name
            say(f"{name}: saving before it stops{consequence}", unbuffered=True)

    # What a forked process runs.

    def close_in_child(self) -> None:
        """Close the copies of the parent's descriptors, and give signals their default effect."""
        if self._is_closed:
            return
        self._is_closed = True
        os.close(self._read_fd)
        os.close(self._write_fd)
        with contextlib.suppress(ValueError):  # raised in a child that another thread than the main one has forked
            signal.set_wakeup_fd(-1)
            for number in self._previous_handlers:
                signal.signal(number, signal.SIG_DFL)


class StopRequest:
    """Whether all processes stop after an update.

    Args:
        received: The signals that have asked this process to stop (`Signals.received`).
    """

    def __init__(self, comm: Communicator, received: Collection[int] = ()) -> None:
        self._comm, self._received = comm, received
        self._is_asked_by_caller = False  # the last `by_this_process` of `is_agreed`
        self._pending: tuple[torch.Tensor, Handle] | None = None
        self._has_request_arrived = self._is_summed_with_gradients = False
        # Flags on their way to the host, with events: those of the previous call, and those of the present one.
        self._readable_flags: list[tuple[torch.Tensor, Any]] = []
        self._copied_flags: list[tuple[torch.Tensor, Any]] = []

    @property
    def is_requested_here(self) -> bool:
        """Whether a signal has reached this process; the others may not know it yet."""
        return bool(self._received)

    def is_agreed(self, by_this_process: bool = False, now: bool = False) -> bool:
        """Whether all processes stop now; ``by_this_process`` asks them to. With several processes a request is
        reported one call late, on a GPU up to two, so that nothing waits for the sum; with ``now`` the call waits.
        Collective."""
        self._is_asked_by_caller = by_this_process
        is_requested = by_this_process or self.is_requested_here
        if self._comm.world_size == 1:
            return is_requested
        answer = self.drain() or self._read_gradient_flags()
        if now or not self._is_summed_with_gradients:
            flags = torch.tensor([int(is_requested)], dtype=torch.int32)
            self._pending = (flags, self._comm.all_reduce_(flags, "stop_request"))
        self._is_summed_with_gradients = False
        return (self.drain() or answer) if now else answer

    def contribute_flag(self) -> bool:
        """The flag of this process, which the engine sums with its gradients or their norm."""
        self._is_summed_with_gradients = True
        return self._is_asked_by_caller or self.is_requested_here

    def read_sum(self, total: torch.Tensor) -> None:
        """Receive the sum of the flags (0-d), summed with the gradients. On a GPU the host reads it later, without a
        wait."""
        if has_pinned_memory(total.device):
            self._copied_flags.append(start_copy_to_host(total))
        else:
            self._has_request_arrived |= bool(total)

    def _read_gradient_flags(self) -> bool:
        """Whether a request was summed with gradients; the same on all processes after the same update."""
        for copy, event in self._readable_flags:
            event.synchronize()  # recorded an update ago, so this hardly waits
            self._has_request_arrived |= bool(copy)
        self._readable_flags, self._copied_flags = self._copied_flags, []
        return self._has_request_arrived

    def drain(self) -> bool:
        """Wait for the sum that is under way, if there is one; return whether any process asked to stop."""
        if self._pending is None:
            return False
        flags, handle = self._pending
        handle.wait()
        self._pending = None
        return bool(flags.item())
