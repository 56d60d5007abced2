"""Loading by worker processes. They block the signals of the keyboard and of the cluster's scheduler, so that only the
main process ends them.

Workers send batches through a pipe. PyTorch would send tensors by shared memory, of which a container has 64 MB by
default, with a socket and a file descriptor for each; if one of these runs out, its sending thread prints a traceback
and drops the batch, and the main process waits for it for ever.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import gc
import io
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.process
import os
import pickle
import queue
import signal
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tandem.io.exits import FAILED, CannotGoOn, exit_process
from tandem.io.writing import say

# Seconds that a worker may take to start, by attempt; usually it takes milliseconds. A late worker is killed.
_START_TIMEOUTS = (10.0, 20.0, 40.0, 80.0)

_BLOCKED_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}

# PyTorch sets these two attributes in the iterator's constructor, and reads them in its destructor: if the constructor
# fails, the destructor would print a traceback without this default, which says that there is nothing to shut down.
_MultiProcessingDataLoaderIter._shutdown = True
# If only some workers could be started, the destructor ends those.
_MultiProcessingDataLoaderIter._workers_status = collections.defaultdict(lambda: True)  # type: ignore[assignment]

# Silence a warning about the number of workers: every rank would print it, and the user chose the number.
warnings.filterwarnings("ignore", message="This DataLoader will create")


class Loader:
    """The result of `load` for each request, in the order of the requests. Every pass over a loader starts from the
    first.

    `load` is pickled if workers are not forked; the main process raises its ValueErrors, and CannotGoOn if workers
    cannot be started, or one has died, lacks memory or cannot send a result. `requests` may be endless. With
    num_workers = 0, the main process loads. `keep_workers`: use the same workers for every pass. Each wait for a worker
    is inside the context `waiting()`, which may raise an error to end it.
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
            _RequestDataset(load),
            batch_size=None,  # one request is one result
            sampler=requests,
            collate_fn=_identity,
            num_workers=num_workers,
            worker_init_fn=_become_worker,
            multiprocessing_context=_FORK_CONTEXT if num_workers else None,
            persistent_workers=keep_workers and num_workers > 0,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # else each pass would draw its base seed from the global generator
        )

    def __iter__(self) -> Iterator[Any]:
        handler = signal.getsignal(signal.SIGCHLD) or signal.SIG_DFL
        iterator = getattr(self._loader, "_iterator", None)
        with _signals_blocked():  # new workers are forked here; persistent ones confirm that they start again
            try:
                with self._waiting():
                    results = _wait_for_workers(self._loader.__iter__, iterator)
            except CannotGoOn as error:
                return map(_raise_errors, [error])  # raised at the first result, where scripts expect errors
            except OSError as error:
                return map(_raise_errors, [CannotGoOn(_explain_start_failure(error))])
        if threading.current_thread() is threading.main_thread():
            # When a worker dies, PyTorch's handler would interrupt the main thread anywhere. Scripts expect errors only
            # where they wait for a result, and PyTorch checks for dead workers there, too.
            signal.signal(signal.SIGCHLD, handler)
        return map(_raise_errors, self._results_of_workers(results) if self._loader.num_workers else results)

    def _results_of_workers(self, results: Iterator[Any]) -> Iterator[Any]:
        with contextlib.suppress(StopIteration):
            while True:
                with self._waiting():
                    result = _wait_for_workers(results.__next__, results)
                yield result


class _ForkedWorker(multiprocessing.context.ForkProcess):
    """A forked process that is killed and forked again if it does not start. Some versions of Python 3.10 and 3.11 hang
    in a child that was forked while a thread of a library entered Python
    (https://github.com/python/cpython/issues/112275), as Gloo's do after a collective. A worker waits for the main
    process's answer before it loads: a worker that was killed while it loads could hold the lock of its queue, and the
    next one would wait for ever."""

    pipe_ends: tuple[multiprocessing.connection.Connection, ...]  # the main process's, the worker's

    @staticmethod
    def _Popen(process_obj: multiprocessing.process.BaseProcess) -> Any:
        assert isinstance(process_obj, _ForkedWorker)
        for seconds in _START_TIMEOUTS:
            main_end, worker_end = process_obj.pipe_ends = multiprocessing.Pipe()
            with main_end:
                popen = multiprocessing.context.ForkProcess._Popen(process_obj)
                worker_end.close()
                if main_end.poll(seconds):
                    with contextlib.suppress(OSError, EOFError):  # the worker has died, which torch reports
                        main_end.recv_bytes()
                        main_end.send_bytes(b"go on")
                    return popen
                say(f"a loader process has not begun within {seconds:g} s, and is started again", unbuffered=True)
                popen.kill()
                popen.wait()
        raise CannotGoOn("loader processes do not begin: give --num_workers 0, or more CPUs or memory")

    def run(self) -> None:
        # Garbage of the main process may hold pipes of other workers; collecting it here would end them.
        gc.freeze()
        main_end, worker_end = self.pipe_ends
        main_end.close()
        with worker_end, contextlib.suppress(OSError, EOFError):
            worker_end.send_bytes(b"begun")
            worker_end.recv_bytes()
        super().run()


_SET_PIPE_SIZE, _PIPE_BYTES = 1031, 1 << 20  # F_SETPIPE_SZ of Linux, and the default limit of a user's request


class _PipeEnd(io.FileIO):
    """An end of a pipe. It is closed only once: the garbage collector can close multiprocessing's Connection a second
    time, when another file may have its descriptor. Its destructor closes it without a warning."""

    __del__ = io.FileIO.close


class _Queue:
    """A queue between processes with a single reader and the methods that DataLoader calls. A thread sends.

    A message is the number of its parts (8 bytes), the size of each part (8 bytes), and the parts: a pickle, and the
    elements of each tensor, which are copied only into the pipe and out of it. `get` returns within its timeout even if
    a process died while it sent.
    """

    def __init__(self) -> None:
        self._reader, self._writer = map(_PipeEnd, os.pipe(), ("rb", "wb"))
        self._write_lock = multiprocessing.get_context("fork").Lock()
        self._to_send: queue.SimpleQueue[list[memoryview] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._messages = _read_messages(self._reader)
        with contextlib.suppress(OSError):  # the pipe then keeps its default size
            fcntl.fcntl(self._reader.fileno(), _SET_PIPE_SIZE, _PIPE_BYTES)

    def put(self, message: tuple[Any, Any] | None) -> None:
        """Send (request number, request or result), or None. CannotGoOn replaces a result that cannot be pickled."""
        try:
            parts = _pickle_parts(message)
        except Exception as error:
            if message is None or torch.utils.data.get_worker_info() is None:
                raise
            parts = _pickle_parts((message[0], CannotGoOn(_explain_send_failure(error))))
        self._to_send.put(parts)
        if self._thread is None:
            self._thread = threading.Thread(target=self._send, daemon=True)
            self._thread.start()

    def _send(self) -> None:
        while (parts := self._to_send.get()) is not None:
            header = struct.pack(f"={1 + len(parts)}Q", len(parts), *map(len, parts))
            try:
                with self._write_lock:
                    for view in [memoryview(header), *parts]:
                        while view:
                            view = view[self._writer.write(view) :]
                del parts, view  # free the memory: the next batch may take long
            except (OSError, ValueError) as error:  # ValueError: the pipe is closed
                # End the worker, because the main process would wait for its batch for ever.
                if torch.utils.data.get_worker_info() is not None and not self._writer.closed:
                    say(_explain_send_failure(error), unbuffered=True)
                    exit_process(FAILED, at_once=True)
                break
        self._writer.close()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next message. Raises queue.Empty if nothing has come within `timeout` seconds."""
        while multiprocessing.connection.wait([self._reader.fileno()], timeout):
            if message := next(self._messages):
                return message[0]
        raise queue.Empty

    def close(self) -> None:
        """Send what is left, then close the pipe."""
        self._reader.close()
        self._to_send.put(None)
        if self._thread is None:
            self._writer.close()

    def cancel_join_thread(self) -> None:
        """Does nothing, because a process that ends never waits for the thread."""


def _read_messages(reader: _PipeEnd) -> Iterator[tuple[Any, ...]]:
    """The messages of a pipe, each in a tuple; an empty tuple before each read that may block."""
    while True:
        yield ((yield from _read_message(reader)),)  # keep no reference to it


def _read_message(reader: _PipeEnd) -> Generator[tuple[()], None, Any]:
    yield from _read_into(number := bytearray(8), reader)
    yield from _read_into(sizes := bytearray(8 * struct.unpack("=Q", number)[0]), reader)
    parts = list[memoryview]()
    for (size,) in struct.iter_unpack("=Q", sizes):
        # Aligned as torch aligns all tensors, so that kernels compute the same bits.
        elements: Any = torch.empty(size, dtype=torch.uint8).numpy()
        parts.append(memoryview(elements))
        yield from _read_into(parts[-1], reader)
    return pickle.loads(parts[0], buffers=parts[1:])


def _read_into(buffer: Any, reader: _PipeEnd) -> Iterator[tuple[()]]:
    view = memoryview(buffer)
    while view:
        yield ()
        if not (count := reader.readinto(view)):
            raise EOFError
        view = view[count:]


def _explain_send_failure(error: BaseException) -> str:
    return f"a loader process cannot send what it has loaded: {type(error).__name__}: {error}"


class _ForkContext(multiprocessing.context.ForkContext):
    Process = _ForkedWorker

    def Queue(self, maxsize: int = 0) -> _Queue:  # type: ignore[override]
        return _Queue()


def _pickle_parts(message: Any) -> list[memoryview]:
    """The bytes of a pickle, and those of each buffer that it leaves out."""
    content, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(content, protocol=5, buffer_callback=buffers.append).dump(message)
    return [content.getbuffer(), *(buffer.raw() for buffer in buffers)]


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays, without copies of their elements; PyTorch makes several."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented
        try:
            return torch.from_numpy, (value.contiguous().numpy(),)
        except TypeError:  # NumPy lacks this dtype, such as bfloat16
            return NotImplemented


# Workers are forked where that is safe. A forked worker starts with one thread, so that all its threads inherit its
# signal mask; and it shares the main process's memory, such as lists of files.
_FORK_CONTEXT = _ForkContext() if sys.platform == "linux" else None


_TORCH_MESSAGE = "DataLoader worker (pid"  # the start of PyTorch's messages about dead workers


def _wait_for_workers(wait: Callable[[], Any], results: Any) -> Any:
    """The result of `wait`. Raises CannotGoOn, in one line, if a worker of the iterator `results` has died."""
    try:
        return wait()
    except RuntimeError as error:
        if _TORCH_MESSAGE not in str(error):
            raise
        codes = [worker.exitcode for worker in getattr(results, "_workers", []) if worker.exitcode is not None]
        raise CannotGoOn(_explain_exit(codes)) from None


# A smaller --batch_size would help, too, but a resumed run must keep it.
_MEMORY_ADVICE = "lower --num_workers and start again, or ask for more memory"
_REMEDIES = {
    errno.ENOSPC: "/dev/shm, the shared memory, is full: make room there, make it larger (docker run --shm-size 1g)",
    errno.EMFILE: "too many files are open: raise `ulimit -n`, lower --num_workers",
    errno.EAGAIN: "no more processes may be started: raise `ulimit -u`, lower --num_workers",
    errno.ENOMEM: "there is too little memory: lower --num_workers",
}


def _explain_start_failure(error: OSError) -> str:
    remedy = _REMEDIES.get(error.errno or 0, f"{error}: look whether /dev/shm is there and writable")
    return f"loader processes cannot be started: {remedy}, or load without them, by --num_workers 0"


def _explain_exit(codes: list[int]) -> str:
    if -signal.SIGBUS in codes:
        return "a loader process has died, because a file that it read was cut off meanwhile, or its disk failed"
    if -signal.SIGKILL in codes or not codes:
        return f"a loader process was killed, as a system does that runs out of memory: {_MEMORY_ADVICE}"
    hint = "a library that reads the samples may be faulty; --num_workers 0 shows more"
    return f"a loader process ended with the exit code {codes[0]}: {hint}"


class _RequestDataset(Dataset):
    """Loads requests. Returns the errors that `_raise_errors` raises, because DataLoader would wrap them into a
    traceback."""

    def __init__(self, load: Callable[[Any], Any]) -> None:
        self._load = load

    def __getitem__(self, request: Any) -> Any:
        try:
            return self._load(request)
        except ValueError as error:
            return error
        except MemoryError as error:
            return CannotGoOn(f"a loader process lacks memory ({error}): {_MEMORY_ADVICE}")


def _identity(result: Any) -> Any:
    return result


def _raise_errors(result: Any) -> Any:
    if isinstance(result, ValueError | CannotGoOn):
        raise result
    return result


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals: the main process receives them after the context; workers that are forked inside it inherit the
    mask and never receive them."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _become_worker(worker_id: int) -> None:
    """DataLoader's worker_init_fn: make the worker end when the main process ends it or is gone."""
    gc.enable()  # the main process may have disabled it for its training loop
    if _FORK_CONTEXT is not None:
        threading.Thread(target=_end_with_the_main_process, daemon=True).start()
    else:  # torch's handler ends the worker, and its loop checks for the main process every few seconds
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _end_with_the_main_process() -> None:
    """End this worker on the main process's SIGTERM, or if the main process is gone. A worker that outlives its rank
    keeps the rank's sockets open, and the other ranks would wait for it."""
    main_process = multiprocessing.parent_process()
    assert main_process is not None
    if sys.platform == "linux":  # for type checkers: workers are forked only there
        while os.getppid() == main_process.pid:
            signal_info = signal.sigtimedwait({signal.SIGTERM}, 0.5)
            if signal_info is not None and signal_info.si_pid == main_process.pid:
                break
    exit_process(0, at_once=True)
