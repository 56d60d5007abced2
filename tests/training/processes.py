"""Stand-ins for the processes that train: one, or several threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import distributed
from training.flags.parser import ArgumentParser
from training.flags.shared import add_run_arguments


class OneProcess:
    """A single process. A signal arrives during the update number `stop_after` of those that are counted in `made`."""

    rank, world_size, device, grad_accum_steps, is_restart = 0, 1, torch.device("cpu"), 1, False

    def __init__(self, is_root: bool = True, stop_after: int | None = None, **description: Any) -> None:
        self.is_root, self.barriers, self.waited = is_root, 0, {"data": 0.0, "communication": 0.0}
        self._description = {"backend": "single", "world_size": 1, "device": "cpu", **description}
        self.stop_after, self.made = stop_after, 0
        self.agreement, self.summary = nullcontext, lambda: "single: 1 process"
        self.mark = self.writing = lambda phase: None
        self.gather = lambda tensor: tensor
        self.torchruns = list

    def barrier(self) -> None:
        self.barriers += 1

    def after_leaving(self, work: Callable[[], None]) -> None:
        work()

    def before_update(self, wait: Callable[[], None]) -> None:
        wait()

    def mean(self, values: dict[str, Tensor]) -> dict[str, float]:
        return {name: float(value) for name, value in values.items()}

    def sum(self, value: Any) -> Any:
        return value

    @property
    def is_asked_here(self) -> bool:
        return self.made == self.stop_after

    def stop_requested(self, here: bool = False, now: bool = False) -> bool:
        return here or self.is_asked_here

    def broadcast_object(self, value: Any) -> Any:
        return json.loads(json.dumps(value))

    def gather_objects(self, value: Any) -> list[Any]:
        return [self.broadcast_object(value)]

    def describe(self) -> dict[str, Any]:
        return self._description


class Threads:
    """One of several threads that take part in collectives."""

    is_asked_here = False

    def __init__(self, rank: int, world_size: int, barrier: threading.Barrier, table: list[Any]) -> None:
        self.rank, self.world_size, self._barrier, self._table = rank, world_size, barrier, table

    def gather_objects(self, value: Any) -> list[Any]:
        self._table[self.rank] = value
        self._barrier.wait()
        values = list(self._table)
        self._barrier.wait()
        return values

    def gather(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        parts = self.gather_objects(tensor.detach())
        assert len({(part.shape[1:], part.dtype) for part in parts}) == 1, "as the real one would hang or raise"
        return torch.cat(parts)

    def sum(self, value: Any) -> Any:
        values = self.gather_objects(value)
        if isinstance(value, dict):
            return {name: sum(other[name] for other in values) for name in value}
        return sum(values)

    def shift(self, tensor: Tensor, rows: int) -> Tensor:
        arrived = self.gather_objects(tensor)[self.rank - 1]
        assert len(arrived) == rows
        return arrived.clone()


def alone() -> Threads:
    return Threads(0, 1, threading.Barrier(1), [None])


def on_processes(world_size: int, work: Callable[[Any], Any]) -> list[Any]:
    """What the work returns, or which error it raises, on each of so many processes."""
    barrier, table, results = threading.Barrier(world_size, timeout=20), [None] * world_size, [None] * world_size

    def main(rank: int) -> None:
        try:
            results[rank] = work(Threads(rank, world_size, barrier, table))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def open_backend(batch_size: int, *flags: str) -> Any:
    """The backend of a single process, as a context."""
    parser = ArgumentParser("test")
    add_run_arguments(parser, output_dir="unused", batch_size=batch_size)
    distributed.add_arguments(parser)
    return distributed.from_args(parser.parse(flags))
