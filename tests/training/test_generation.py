"""Drawing pictures over all processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.processes import OneProcess, on_processes
from training.generation import CHUNK, CHUNK_SHOWN, Generation


class Recorded(OneProcess):
    """The first of two processes; remembers what is done in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.world_size, self.events = 2, list[str]()
        self.agreement, self.gather = self._agreement, self._gather  # type: ignore[assignment]

    @contextmanager
    def _agreement(self) -> Iterator[None]:
        yield
        self.events.append("meets the others")

    @contextmanager
    def autocast(self) -> Iterator[None]:
        yield

    def _gather(self, tensor: Tensor) -> Tensor:
        """As if the other process had drawn the same."""
        self.events.append("collective")
        return torch.cat([tensor, tensor])

    def gather_objects(self, value: Any) -> list[Any]:
        self.events.append("collective")
        return [value, value]


class Judge:
    def __init__(self, events: list[str]) -> None:
        self.events, self.numbers = events, list[int]()

    def add(self, batch: Any, pictures: Tensor, numbers: range) -> None:
        self.numbers += numbers

    def result(self, processes: Any) -> dict[str, float]:
        self.events.append("collective")
        return {"shape": 1.0}


def test_a_process_draws_its_share_in_one_pass_and_meets_the_others_before_a_collective() -> None:
    """Drawing lasts longer on one process than a collective waits."""
    processes, sizes = Recorded(), list[int]()

    class Decoder:
        image_sizes = (2, 4)

        def sample(self, *given: Any, batch: int, on_pictures: Any = None, **how: Any) -> Tensor:
            sizes.append(batch)
            processes.events.append("draws")
            for side in self.image_sizes:
                (on_pictures or (lambda pictures: None))(torch.zeros(batch, 3, side, side))
            return torch.zeros(batch, 3, 4, 4)

    class Feed:
        sees_whole_split = False
        ask = staticmethod(lambda now: None)

        def validation_samples(self, numbers: range) -> dict[str, Any]:
            return {"images": torch.zeros(len(numbers), 3, 4, 4)}

    generation = Generation(Feed(), lambda batch: {}, None, processes, 0)
    n = 2 * CHUNK_SHOWN
    generation.draw(Decoder(), {"images": torch.zeros(n, 3, 4, 4), "captions": [""] * n})
    assert sizes == [CHUNK_SHOWN]
    assert processes.events[:2] == ["draws", "meets the others"] and set(processes.events[2:]) == {"collective"}

    processes.events.clear()
    judge = Judge(processes.events)
    assert generation.judge(Decoder(), 3 * CHUNK - 1, lambda only_reads: judge) == {"shape": 1.0}
    assert judge.numbers == [*range(CHUNK), *range(2 * CHUNK, 3 * CHUNK - 1)], "every second chunk"
    assert processes.events == ["draws", "meets the others", "draws", "meets the others", "collective"]

    processes.events.clear()
    generation._feed.sees_whole_split = True
    assert generation.judge(Decoder(), CHUNK, lambda only_reads: judge) == {} and processes.events == [], "as before it"


class Stopped(Exception):
    """What a run raises to end an evaluation."""


def test_all_processes_end_after_the_chunk_in_which_one_is_asked_to_stop_and_that_one_at_its_next_step() -> None:
    """Rank 1 gets a signal while it makes step 3 of 10 of its second chunk; the third one is then nobody's."""
    conditions = {"images": torch.zeros(6 * CHUNK_SHOWN, 3, 4, 4), "captions": [""] * 6 * CHUNK_SHOWN}

    def work(threads: Any) -> list[int]:
        steps: list[int] = []

        class Decoder:
            image_sizes = (4,)

            def sample(self, *given: Any, batch: int, on_step: Any, on_pictures: Any, **how: Any) -> None:
                steps.append(0)
                for step in range(10):
                    steps[-1] += 1
                    threads.is_asked_here = (threads.rank, len(steps), step) == (1, 2, 2)
                    on_step(step, 10)
                on_pictures(torch.zeros(batch, 3, 4, 4))

        def ask(now: bool) -> None:
            if any(threads.gather_objects(threads.is_asked_here)):
                raise Stopped

        threads.agreement = threads.autocast = nullcontext
        threads.mark, threads.device = lambda phase: None, torch.device("cpu")
        with pytest.raises(Stopped):
            Generation(SimpleNamespace(ask=ask), lambda batch: {}, None, threads, 0).draw(Decoder(), conditions)
        return steps

    assert on_processes(2, work) == [[10, 10], [10, 3]]
