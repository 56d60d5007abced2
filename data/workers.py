"""How a loader worker lives and ends: the main process decides, not the keyboard and not the cluster's scheduler."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator

# Forked, a worker has one thread, whose signal mask is then that of all its threads; and it shares the lists of files.
START_METHOD = "fork" if sys.platform == "linux" else None

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
    """DataLoader's worker_init_fn: end when the main process says so or is gone."""
    if START_METHOD == "fork":
        threading.Thread(target=_end_with_the_main_process, daemon=True).start()
    else:  # torch's own handler ends the worker, and its loop looks for the main process every few seconds
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _end_with_the_main_process() -> None:
    """A worker that outlived its rank would hold the rank's sockets open, and the other ranks would wait for it."""
    main = multiprocessing.parent_process()
    assert main is not None
    while os.getppid() == main.pid:
        received = signal.sigtimedwait({signal.SIGTERM}, 0.5)
        if received is not None and received.si_pid == main.pid:
            break
    os._exit(0)
