"""What the tests of data/ share: streams of all ranks put together, errors of one line."""

from __future__ import annotations

import itertools
import tarfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset
from torch import Tensor

from data.order import TrainingOrder, split_samples
from data.samples import Samples
from data.stream import TrainingStream

ROOT = Path(__file__).resolve().parents[2]


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


class OfOne:
    """A set of whose samples one entry is looked at."""

    def __init__(self, samples: Samples, entry: str) -> None:
        self.samples, self.entry = samples, entry
        self.describe, self.name = samples.describe, samples.name

    def __len__(self) -> int:
        return len(self.samples)

    def load(self, *which: Any) -> Tensor:
        loaded: Tensor = self.samples.load(*which)[self.entry]
        return loaded


def stream(samples: Any, batch_size: int = 8, rank: int = 0, world_size: int = 1, **options: Any) -> TrainingStream:
    """A training stream over all samples, with the seed 0."""
    everything = split_samples(len(samples), 0.0, 0.0, 0, 1).train
    order = TrainingOrder(everything, seed=0)
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


def one_line(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The text of the ValueError of a call, which is one line."""
    with pytest.raises(ValueError) as error:
        call(*arguments, **options)
    assert str(error.value) and "\n" not in str(error.value)
    return str(error.value)
