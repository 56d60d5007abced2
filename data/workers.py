"""Loading by worker processes. The main process decides when a worker ends: signals from the keyboard or the cluster's
scheduler do not reach workers."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.process
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from tandem.files.exits import CannotGoOn, leave

# How long a worker may take to begin, for which milliseconds are usual, before it is ended and forked once more.
_BEGIN_SECONDS = (10.0, 20.0, 40.0, 80.0)

_LEFT_TO_THE_MAIN_PROCESS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}

# Silence a warning about the number of workers: every rank would print it, and the user chose the number.
warnings.filterwarnings("ignore", message="This DataLoader will create")


class Loader:
    """The result of `load` for each request, in the order of the requests. Every pass over a loader starts again.

    `load` is pickled if workers are not forked; the main process raises its ValueErrors, and CannotGoOn if a worker has
    died or lacks memory. `requests` may be endless. With num_workers = 0, the main process loads. `keep_workers`: use
    the same workers for every pass.
    """

    def __init__(
        self,
        load: Callable[[Any], Any],
        requests: Iterable[Any],
        num_workers: int = 0,
        *,
        pin_memory: bool = False,
        keep_workers: bool = False,
    ) -> None:
        self._loader = DataLoader(
            _Requests(load),
            batch_size=None,  # one request is one result
            sampler=requests,
            collate_fn=_unchanged,
            num_workers=num_workers,
            worker_init_fn=_become_worker,
            multiprocessing_context=_FORK if num_workers else None,
            persistent_workers=keep_workers and num_workers > 0,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # else each pass would draw its base seed from the global generator
        )

    def __iter__(self) -> Iterator[Any]:
        handler = signal.getsignal(signal.SIGCHLD) or signal.SIG_DFL
        with _signals_held_back():  # workers that are kept answer that they begin again
            results = _awaited(self._loader.__iter__, getattr(self._loader, "_iterator", None))
        if threading.current_thread() is threading.main_thread():
            # PyTorch's own handler interrupts the main thread wherever that is when a worker dies; here an error is
            # expected only where a result is waited for, and PyTorch looks for dead workers there, too.
            signal.signal(signal.SIGCHLD, handler)
        return map(_raised, _watched(results) if self._loader.num_workers else results)


class _ForkedWorker(multiprocessing.context.ForkProcess):
    """A forked process that is started again if it does not begin. Some versions of Python 3.10 and 3.11 hang in a
    child that was forked while a library's own thread entered Python (https://github.com/python/cpython/issues/112275),
    as Gloo's do after a collective. A worker waits until the main process has heard that it began: one that is ended
    while it works may hold the lock of its queue, for which the next one would wait for ever."""

    ends: tuple[multiprocessing.connection.Connection, ...]  # of a pipe: that of the main process, that of the worker

    @staticmethod
    def _Popen(process_obj: multiprocessing.process.BaseProcess) -> Any:
        assert isinstance(process_obj, _ForkedWorker)
        for seconds in _BEGIN_SECONDS:
            main, own = process_obj.ends = multiprocessing.Pipe()
            with main:
                forked = multiprocessing.context.ForkProcess._Popen(process_obj)
                own.close()
                if main.poll(seconds):
                    with contextlib.suppress(OSError, EOFError):  # it has died: torch says so
                        main.recv_bytes()
                        main.send_bytes(b"go on")
                    return forked
                forked.kill()
                forked.wait()
        raise CannotGoOn("loader processes do not begin: give --num_workers 0, or more CPUs or memory")

    def run(self) -> None:
        main, own = self.ends
        main.close()
        with own, contextlib.suppress(OSError, EOFError):
            own.send_bytes(b"begun")
            own.recv_bytes()
        super().run()


class _Fork(multiprocessing.context.ForkContext):
    Process = _ForkedWorker


# A forked worker starts with one thread, so its signal mask holds for all of them, and it shares the lists of files.
_FORK = _Fork() if sys.platform == "linux" else None


_OF_TORCH = "DataLoader worker (pid"  # begins PyTorch's messages about workers that have died
_DYING_SECONDS = 10.0  # a process closes its connections before it has given back its memory


def _watched(results: Iterator[Any]) -> Iterator[Any]:
    """The results of workers."""
    with contextlib.suppress(StopIteration):
        while True:
            yield _awaited(results.__next__, results)


def _awaited(wait: Callable[[], Any], results: Any) -> Any:
    """What the workers of `results` answer. Raises CannotGoOn, in one line, if one has died."""
    try:
        return wait()
    except (RuntimeError, OSError, EOFError) as error:
        # What a worker that is gone has sent cannot be read either; after an error of a connection it may be dying yet.
        end = time.monotonic() + (_DYING_SECONDS if isinstance(error, OSError | EOFError) else 0.0)
        workers = getattr(results, "_workers", [])
        while not (codes := [worker.exitcode for worker in workers if worker.exitcode is not None]):
            if time.monotonic() >= end:
                break
            time.sleep(0.05)
        if not codes and _OF_TORCH not in str(error):
            raise
        raise CannotGoOn(_why(codes)) from None


def _why(codes: list[int]) -> str:
    """What the exit codes of workers that have died say to a user."""
    lower = "lower --num_workers or --batch_size"
    if -signal.SIGBUS in codes:
        return f"a loader process has died, because /dev/shm, its shared memory, is full: make it larger, or {lower}"
    if -signal.SIGKILL in codes or not codes:
        return f"a loader process was killed, as a system does that runs out of memory: {lower}, or ask for more memory"
    faulty = "a library that reads the samples may be faulty; --num_workers 0 shows more"
    return f"a loader process ended with the exit code {codes[0]}: {faulty}"


class _Requests(Dataset):
    """Loads requests. Returns a ValueError, or a lack of memory, as a value, because DataLoader would put its text
    inside a traceback."""

    def __init__(self, load: Callable[[Any], Any]) -> None:
        self._load = load

    def __getitem__(self, request: Any) -> Any:
        try:
            return self._load(request)
        except ValueError as error:
            return error
        except MemoryError as error:
            return CannotGoOn(f"a loader process lacks memory ({error}): lower --num_workers or --batch_size")


def _unchanged(result: Any) -> Any:
    return result


def _raised(result: Any) -> Any:
    if isinstance(result, ValueError | CannotGoOn):
        raise result
    return result


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Block the signals that are meant for the main process, which receives them afterwards. Workers that are forked
    inside inherit the mask and so never receive them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_MAIN_PROCESS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _become_worker(worker_id: int) -> None:
    """DataLoader's worker_init_fn: make the worker end when the main process ends it or is gone."""
    if _FORK is not None:
        threading.Thread(target=_end_with_the_main_process, daemon=True).start()
    else:  # torch's own handler ends the worker, and its loop looks for the main process every few seconds
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _end_with_the_main_process() -> None:
    """End this worker on the main process's SIGTERM, or if the main process is gone. A worker that outlived its rank
    would keep the rank's sockets open, and the other ranks would wait for it."""
    main = multiprocessing.parent_process()
    assert main is not None
    while os.getppid() == main.pid:
        received = signal.sigtimedwait({signal.SIGTERM}, 0.5)
        if received is not None and received.si_pid == main.pid:
            break
    leave(0, at_once=True)
