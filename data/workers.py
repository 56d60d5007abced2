"""Loading by worker processes. The main process decides when a worker ends: signals from the keyboard or the cluster's
scheduler do not reach workers."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

# A forked worker starts with one thread, so its signal mask holds for all of them, and it shares the lists of files.
START_METHOD = "fork" if sys.platform == "linux" else None

_LEFT_TO_THE_MAIN_PROCESS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}

# Silence a warning about the number of workers: every rank would print it, and the user chose the number.
warnings.filterwarnings("ignore", message="This DataLoader will create")


class Loader:
    """The result of `load` for each request, in the order of the requests. Every pass over a loader starts again.

    `load` is pickled if workers are not forked; the main process raises its ValueErrors. `requests` may be endless.
    With num_workers = 0, the main process loads. `keep_workers`: use the same workers for every pass.
    """

    def __init__(
        self,
        load: Callable[[Any], Any],
        requests: Iterable[Any],
        num_workers: int,
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
            multiprocessing_context=START_METHOD if num_workers else None,
            persistent_workers=keep_workers and num_workers > 0,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # else each pass would draw its base seed from the global generator
        )

    def __iter__(self) -> Iterator[Any]:
        with _signals_held_back():
            results = iter(self._loader)
        return map(_raised, results)


def load_groups(
    load: Callable[[Any], Any], groups: Sequence[Sequence[Any]], num_workers: int, *, pin_memory: bool = False
) -> Iterator[Iterator[Any]]:
    """Groups of requests -> for each group an iterator over its results, to be exhausted before the next group.

    The other arguments are those of `Loader`.
    """
    results = iter(Loader(load, list(itertools.chain(*groups)), num_workers, pin_memory=pin_memory))
    return (itertools.islice(results, len(group)) for group in groups)


class _Requests(Dataset):
    """Loads requests. Returns a ValueError as a value, because DataLoader would put its text inside a traceback."""

    def __init__(self, load: Callable[[Any], Any]) -> None:
        self._load = load

    def __getitem__(self, request: Any) -> Any:
        try:
            return self._load(request)
        except ValueError as error:
            return error


def _unchanged(result: Any) -> Any:
    return result


def _raised(result: Any) -> Any:
    if isinstance(result, ValueError):
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
    if START_METHOD == "fork":
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
    os._exit(0)
