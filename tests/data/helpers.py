"""What the tests of data/ share: streams of all ranks put together, errors of one line."""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import webdataset
from torch import Tensor

from tandem.data.fields import SampleDataset
from tandem.data.sampling.order import TrainingOrder
from tandem.data.sampling.stream import TrainingStream

ROOT = Path(__file__).resolve().parents[2]


def write_tar(path: Path, samples: Mapping[str, Mapping[str, bytes]]) -> Path:
    """A webdataset tar: {"000": {"jpg": content, "txt": content}}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path), encoder=False) as writer:
        for key, members in samples.items():
            writer.write({"__key__": key, **members})
    return path


class Items:
    """A user's own dataset of what a function gives for an index."""

    def __init__(self, item: Callable[[int], Any], n: int = 12, fingerprint: str | None = None) -> None:
        self.item, self.n, self.fingerprint = item, n, fingerprint

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


_OWN = sys.modules.setdefault("items_of_the_tests", ModuleType("items_of_the_tests"))


def named(items: Items) -> str:
    """The name of a dataset for --dataset: that of a function of a module which is imported already."""
    name = f"made_{len(vars(_OWN))}"
    setattr(_OWN, name, lambda args: items)
    return f"{_OWN.__name__}:{name}"


class OfOne:
    """A set of whose samples one entry is looked at."""

    def __init__(self, samples: SampleDataset, entry: str) -> None:
        self.samples, self.entry = samples, entry
        self.describe, self.name = samples.describe, samples.name

    def __len__(self) -> int:
        return len(self.samples)

    def load(self, *which: Any) -> Tensor:
        loaded: Tensor = self.samples.load(*which)[self.entry]
        return loaded


def stream(samples: Any, batch_size: int = 8, rank: int = 0, world_size: int = 1, **options: Any) -> TrainingStream:
    """A training stream over all samples, with the seed 0."""
    order = TrainingOrder(range(len(samples)), seed=0)
    return TrainingStream(samples, order, batch_size=batch_size, rank=rank, world_size=world_size, **options)


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
        assert set(one.get("bad", ())) == set(other.get("bad", ()))
        assert one.keys() - {"bad"} == other.keys() - {"bad"}
        for key in one.keys() - {"bad"}:
            assert torch.equal(one[key], other[key]) if isinstance(one[key], Tensor) else one[key] == other[key], key


def ids(batches: Iterable[dict]) -> list[int]:
    return [index for batch in batches for index in batch["ids"]]


def one_line(call: Callable[..., Any], *arguments: Any, kind: type[Exception] = ValueError, **options: Any) -> str:
    """The text of the error of a call, which is one line."""
    with pytest.raises(kind) as error:
        call(*arguments, **options)
    assert str(error.value) and "\n" not in str(error.value)
    return str(error.value)


def in_processes(n: int, call: Callable[[int], Any]) -> list[Any]:
    """What a function of their numbers gives in n forked processes, which begin together."""
    context = multiprocessing.get_context("fork")
    together, found = context.Barrier(n), context.SimpleQueue()

    def run(number: int) -> None:
        together.wait()
        try:
            found.put(call(number))
        except BaseException as error:
            found.put(repr(error))
            raise

    processes = [context.Process(target=run, args=(number,)) for number in range(n)]
    for process in processes:
        process.start()
    results = [found.get() for _ in processes]
    for process in processes:
        process.join()
    return results
