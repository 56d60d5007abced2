"""How a loader worker lives and ends: the main process decides, not the keyboard and not the cluster's scheduler."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator

_LEFT_TO_THE_MAIN_PROCESS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


@contextlib.contextmanager
def signals_held_back() -> Iterator[None]:
    """Workers forked inside are deaf from birth to the signals meant for the main process, which hears them later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_MAIN_PROCESS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def become_worker(worker_id: int) -> None:
    """DataLoader's worker_init_fn: ignore those signals, but end when the main process says so or is gone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_MAIN_PROCESS)
    if hasattr(signal, "sigtimedwait"):
        threading.Thread(target=_end_with_the_main_process, daemon=True).start()
    else:  # macOS: torch looks for the parent every few seconds
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _end_with_the_main_process() -> None:
    """A worker that outlived its rank would hold the rank's sockets open, and the other ranks would wait for it."""
    main = multiprocessing.parent_process()
    assert main is not None
    parent = os.getppid()  # the main process or its fork server
    while main.is_alive() and os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, 0.5)
        if received is not None and received.si_pid == main.pid:
            break
    os._exit(0)
