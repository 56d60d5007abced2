"""Loading by worker processes. The main process decides when a worker ends: signals from the keyboard or the cluster's
scheduler do not reach workers.

Workers send what they have loaded through a pipe. PyTorch would send tensors through shared memory, of which a
container has 64 MB by default, and by a socket and a file descriptor for each; and where one of these is missing, the
thread that sends prints a traceback and drops the batch, for which the main process then waits without end.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import io
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.process
import multiprocessing.queues
import os
import pickle
import queue
import signal
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tandem.files.exits import FAILED, CannotGoOn, leave
from tandem.files.writing import tell

# How long a worker may take to begin, for which milliseconds are usual, before it is ended and forked once more.
_BEGIN_SECONDS = (10.0, 20.0, 40.0, 80.0)

_LEFT_TO_THE_MAIN_PROCESS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}

# What is left of an iterator that could not be made has nothing to shut down, but prints a traceback without this.
_MultiProcessingDataLoaderIter._shutdown = True
# Nor has one of which only some workers could be started; these are told to end.
_MultiProcessingDataLoaderIter._workers_status = collections.defaultdict(lambda: True)  # type: ignore[assignment]

# Silence a warning about the number of workers: every rank would print it, and the user chose the number.
warnings.filterwarnings("ignore", message="This DataLoader will create")


class Loader:
    """The result of `load` for each request, in the order of the requests. Every pass over a loader starts again.

    `load` is pickled if workers are not forked; the main process raises its ValueErrors, and CannotGoOn if workers
    cannot be started, or if one has died, lacks memory or cannot send what it has loaded. `requests` may be endless.
    With num_workers = 0, the main process loads. `keep_workers`: use the same workers for every pass. Each wait for a
    worker is inside `waiting()`, which may raise to end it.
    """

    def __init__(
        self,
        load: Callable[[Any], Any],
        requests: Iterable[Any],
        num_workers: int = 0,
        *,
        pin_memory: bool = False,
        keep_workers: bool = False,
        waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._waiting = waiting
        self._loader = DataLoader(
            _Requests(load),
            batch_size=None,  # one request is one result
            sampler=requests,
            collate_fn=_Packed if num_workers else _unchanged,
            num_workers=num_workers,
            worker_init_fn=_become_worker,
            multiprocessing_context=_FORK if num_workers else None,
            persistent_workers=keep_workers and num_workers > 0,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # else each pass would draw its base seed from the global generator
        )

    def __iter__(self) -> Iterator[Any]:
        handler = signal.getsignal(signal.SIGCHLD) or signal.SIG_DFL
        kept = getattr(self._loader, "_iterator", None)
        with _signals_held_back():  # workers that are kept answer that they begin again
            try:
                with self._waiting():
                    results = _awaited(self._loader.__iter__, kept)
            except CannotGoOn as error:
                return map(_raised, [error])  # where a result is waited for, for which scripts are prepared
            except OSError as error:
                return map(_raised, [CannotGoOn(_why_not_started(error))])
        if threading.current_thread() is threading.main_thread():
            # PyTorch's own handler interrupts the main thread wherever that is when a worker dies; here an error is
            # expected only where a result is waited for, and PyTorch looks for dead workers there, too.
            signal.signal(signal.SIGCHLD, handler)
        return map(_raised, self._watched(results) if self._loader.num_workers else results)

    def _watched(self, results: Iterator[Any]) -> Iterator[Any]:
        """The results of workers."""
        with contextlib.suppress(StopIteration):
            while True:
                with self._waiting():
                    result = _awaited(results.__next__, results)
                yield result


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
                tell(f"a loader process has not begun within {seconds:g} s, and is started again")
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


_SET_PIPE_SIZE, _PIPE_BYTES = 1031, 1 << 20  # F_SETPIPE_SZ of Linux, and what a user may ask for by default


class _Queue(multiprocessing.queues.Queue):
    """A queue, read by one process, whose `get` waits no longer than it is told where a process died while it sent."""

    _reader: Any
    _sem: Any

    def __init__(self, *args: Any, **context: Any) -> None:
        super().__init__(*args, **context)
        self._message, self._received, self._is_header = bytearray(4), 0, True
        with contextlib.suppress(OSError):  # the pipe then stays as small as it was
            fcntl.fcntl(self._reader.fileno(), _SET_PIPE_SIZE, _PIPE_BYTES)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        while True:
            while self._received < len(self._message):
                if not self._reader.poll(timeout):
                    raise queue.Empty
                if not (count := os.readv(self._reader.fileno(), [memoryview(self._message)[self._received :]])):
                    raise EOFError
                self._received += count
            message, is_header = self._message, self._is_header
            # A message follows its length: 4 bytes, or -1 and 8 bytes (multiprocessing.connection).
            length = struct.unpack("!i" if len(message) == 4 else "!Q", message)[0] if is_header else 4
            self._is_header = not is_header or length == -1
            self._message, self._received = bytearray(8 if length == -1 else length), 0
            if not is_header:
                self._sem.release()
                return pickle.loads(message)

    def _on_queue_feeder_error(self, error: BaseException, result: Any) -> None:
        """What the thread that sends cannot send. The base class prints a traceback; the other end waits."""
        if torch.utils.data.get_worker_info() is not None:  # else a worker is gone that the main process sends to
            tell(f"a loader process cannot send what it has loaded: {type(error).__name__}: {error}")
            leave(FAILED, at_once=True)


class _Fork(multiprocessing.context.ForkContext):
    Process = _ForkedWorker

    def Queue(self, maxsize: int = 0) -> _Queue:
        return _Queue(maxsize, ctx=self)


class _Packed:
    """What a worker has loaded, on its way: a pickle of this object is read as what was loaded, or as a CannotGoOn if
    that cannot be sent."""

    def __init__(self, result: Any) -> None:
        content = io.BytesIO()
        try:
            _Pickler(content, protocol=5).dump(result)
            self._pickled = content.getvalue()
        except Exception as error:
            reason = f"a loader process cannot send what it has loaded: {type(error).__name__}: {error}"
            self._pickled = pickle.dumps(CannotGoOn(reason))

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._pickled,)


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays, because PyTorch's own way copies them several times."""

    def reducer_override(self, value: Any) -> Any:
        return (torch.from_numpy, (value.contiguous().numpy(),)) if type(value) is torch.Tensor else NotImplemented


# A forked worker starts with one thread, so its signal mask holds for all of them, and it shares the lists of files.
_FORK = _Fork() if sys.platform == "linux" else None


_OF_TORCH = "DataLoader worker (pid"  # begins PyTorch's messages about workers that have died


def _awaited(wait: Callable[[], Any], results: Any) -> Any:
    """What the workers of `results` answer. Raises CannotGoOn, in one line, if one has died."""
    try:
        return wait()
    except RuntimeError as error:
        if _OF_TORCH not in str(error):
            raise
        workers = getattr(results, "_workers", [])
        raise CannotGoOn(_why([worker.exitcode for worker in workers if worker.exitcode is not None])) from None


_MISSING = {
    errno.ENOSPC: "/dev/shm, the shared memory, is full: make room there, make it larger (docker run --shm-size 1g)",
    errno.EMFILE: "too many files are open: raise `ulimit -n`, lower --num_workers",
    errno.EAGAIN: "no more processes may be started: raise `ulimit -u`, lower --num_workers",
    errno.ENOMEM: "there is too little memory: lower --num_workers or --batch_size",
}


def _why_not_started(error: OSError) -> str:
    """What an error, with which workers cannot be started, says to a user."""
    missing = _MISSING.get(error.errno or 0, f"{error}: look whether /dev/shm is there and writable")
    return f"loader processes cannot be started: {missing}, or load without them, by --num_workers 0"


def _why(codes: list[int]) -> str:
    """What the exit codes of workers that have died say to a user."""
    lower = "lower --num_workers or --batch_size"
    if -signal.SIGBUS in codes:
        return "a loader process has died, because a file that it read was cut off meanwhile, or its disk failed"
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
