"""What the tests of data/ share: processes that are threads, streams of all ranks put together, errors of one line."""

from __future__ import annotations

import contextlib
import itertools
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset
from torch import Tensor

from data import TrainingStream, split

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 30  # for a process that does not enter what the others do
WORLDS_AND_WORKERS = [(1, 0), (2, 0), (4, 0), (1, 2), (2, 2), (4, 1)]


class Process:
    """One of several processes, as the scripts' backends present it; without arguments the only one."""

    device = torch.device("cpu")

    def __init__(self, rank: int = 0, barrier: threading.Barrier | None = None, values: list | None = None) -> None:
        self.rank, self._barrier, self._values = rank, barrier or threading.Barrier(1), values or [None]
        self.world_size, self.rows_sent = self._barrier.parties, 0

    @contextlib.contextmanager
    def agreement(self) -> Iterator[None]:
        failure = None
        try:
            yield
        except ValueError as error:
            failure = error
        if failures := [error for error in self.gather_objects(failure) if error]:
            raise failures[0]

    def each(self, what: str, items: Iterable[Any]) -> Iterator[Any]:
        return iter(items)

    def gather(self, tensor: Tensor) -> Tensor:
        self.rows_sent += len(tensor)
        return torch.cat(self.gather_objects(tensor))

    def gather_objects(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(PATIENCE_SECONDS)
        values = list(self._values)
        self._barrier.wait(PATIENCE_SECONDS)
        return values

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        of_all = self.gather_objects(values)
        return {name: sum(of_one[name] for of_one in of_all) for name in values}

    def waiting_for(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def working(self, phase: str) -> None:
        return


def on_all(world_size: int, work: Callable[[Process], Any]) -> list[Any]:
    """What each process comes to, or its ValueError."""
    barrier, values = threading.Barrier(world_size), [None] * world_size

    def caught(rank: int) -> Any:
        try:
            return work(Process(rank, barrier, values))
        except ValueError as error:
            return error

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(caught, range(world_size)))


def unpack(path: Path, folder: Path) -> None:
    """The members of a tar as files of a folder. Pythons before 3.11.4 do not know extractall's filter, and Python 3.14
    changes what it does without one."""
    folder.mkdir(exist_ok=True)
    with tarfile.open(path) as tar:
        for member in tar:
            content = tar.extractfile(member)
            assert content is not None
            (folder / member.name).write_bytes(content.read())


def write_tar(path: Path, samples: Mapping[str, Mapping[str, bytes]]) -> Path:
    """A webdataset tar: {"000": {"jpg": content, "txt": content}}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path), encoder=False) as writer:
        for key, members in samples.items():
            writer.write({"__key__": key, **members})
    return path


def stream(samples: Any, batch_size: int = 8, rank: int = 0, world_size: int = 1, **options: Any) -> TrainingStream:
    """A training stream over all samples, with the seed 0."""
    everything, _ = split(len(samples), 0.0, 0, 1)
    options = {"seed": 0, **options}
    return TrainingStream(samples, everything, batch_size=batch_size, rank=rank, world_size=world_size, **options)


def global_batches(samples: Any, n: int, *, world_size: int = 1, **options: Any) -> list[dict]:
    """The first n batches of the streams of all ranks, put together again."""
    streams = [stream(samples, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    return [joined(parts) for parts in itertools.islice(zip(*streams, strict=True), n)]


def joined(parts: Iterable[dict]) -> dict:
    """Batches, one after the other, as one."""
    columns = {key: [part[key] for part in parts] for key in next(iter(parts))}
    return {
        key: torch.cat(values) if isinstance(values[0], Tensor) else [*itertools.chain(*values)]
        for key, values in columns.items()
    }


def assert_same(batches: list[dict], others: list[dict]) -> None:
    """Bad samples, which several ranks may meet, are compared as sets."""
    assert len(batches) == len(others)
    for one, other in zip(batches, others, strict=True):
        assert one.keys() == other.keys() and set(one["bad"]) == set(other["bad"])
        for key in one.keys() - {"bad"}:
            assert torch.equal(one[key], other[key]) if isinstance(one[key], Tensor) else one[key] == other[key], key


def ids(batches: Iterable[dict]) -> list[int]:
    return [index for batch in batches for index in batch["ids"]]


def one_line(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The text of the ValueError of a call, which is one line."""
    with pytest.raises(ValueError) as error:
        call(*arguments, **options)
    assert str(error.value) and "\n" not in str(error.value)
    return str(error.value)
