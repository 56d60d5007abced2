"""Drawing pictures over all processes."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.processes import Process, Root, on_processes
from training.generation import CHUNK, CHUNK_SHOWN, Generation


class Recorded(Root):
    """Of the first of two processes; notes its collectives."""

    def __init__(self) -> None:
        super().__init__(2)
        self.events: list[str] = []

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self.events.append("collective")
        return super().all_gather(tensor)


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
    comm, sizes = Recorded(), list[int]()
    processes, events = Process(comm), comm.events
    processes.watchdog.meet = lambda: events.append("meets the others")  # type: ignore[method-assign]

    class Decoder:
        image_sizes = (2, 4)

        def sample(self, *given: Any, batch: int, on_pictures: Any = None, **how: Any) -> Tensor:
            sizes.append(batch)
            events.append("draws")
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
    assert events[:2] == ["draws", "meets the others"] and set(events[2:]) == {"collective"}

    events.clear()
    judge = Judge(events)
    assert generation.judge(Decoder(), 3 * CHUNK - 1, lambda only_reads: judge) == {"shape": 1.0}
    assert judge.numbers == [*range(CHUNK), *range(2 * CHUNK, 3 * CHUNK - 1)], "every second chunk"
    assert events == ["draws", "meets the others", "draws", "meets the others", "collective"]

    events.clear()
    generation._feed.sees_whole_split = True
    assert generation.judge(Decoder(), CHUNK, lambda only_reads: judge) == {} and events == [], "as before it"


class Stopped(Exception):
    """What a run raises to end an evaluation."""


def test_all_processes_end_after_the_chunk_in_which_one_is_asked_to_stop_and_that_one_at_its_next_step() -> None:
    """Rank 1 gets a signal while it makes step 3 of 10 of its second chunk; the third one is then nobody's."""
    conditions = {"images": torch.zeros(6 * CHUNK_SHOWN, 3, 4, 4), "captions": [""] * 6 * CHUNK_SHOWN}

    def work(process: Process) -> list[int]:
        steps: list[int] = []

        class Decoder:
            image_sizes = (4,)

            def sample(self, *given: Any, batch: int, on_step: Any, on_pictures: Any, **how: Any) -> None:
                steps.append(0)
                for step in range(10):
                    steps[-1] += 1
                    if (process.rank, len(steps), step) == (1, 2, 2):
                        process.received.add(signal.SIGTERM)
                    on_step(step, 10)
                on_pictures(torch.zeros(batch, 3, 4, 4))

        def ask(now: bool) -> None:
            if process.any(process.is_asked_here):
                raise Stopped

        with pytest.raises(Stopped):
            Generation(SimpleNamespace(ask=ask), lambda batch: {}, None, process, 0).draw(Decoder(), conditions)
        return steps

    assert on_processes(2, work) == [[10, 10], [10, 3]]
