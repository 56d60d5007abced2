"""Drawing pictures over all processes."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.training.generation import CHUNK, DRAW_CHUNK, Generation
from tests.processes import Process, Root, on_processes


def test_a_process_draws_its_share_in_one_pass_and_meets_the_others_before_a_collective() -> None:
    """Drawing lasts longer on one process than a collective waits."""
    events = list[str]()
    process = Process(Root(2, events))
    process.watchdog.barrier = lambda: events.append("meets the others")  # type: ignore[method-assign]

    def sample(*given: Any, batch: int, on_pictures: Any, **how: Any) -> None:
        events.append(f"draws {batch}")
        on_pictures(torch.zeros(batch, 3, 4, 4))

    decoder = SimpleNamespace(image_sizes=(4,), sample=sample)
    n = 2 * DRAW_CHUNK
    conditions = {"images": torch.zeros(n, 3, 4, 4), "captions": [""] * n}
    Generation(None, lambda batch: {}, None, process, 0, lambda: None).draw(decoder, conditions)
    assert events[:2] == [f"draws {DRAW_CHUNK}", "meets the others"] and "all_gather" in events[2:]


class Stopped(Exception):
    """What a run raises to end an evaluation."""


def test_all_processes_end_after_the_chunk_in_which_one_is_asked_to_stop_and_that_one_at_its_next_step() -> None:
    """Rank 1 gets a signal while it makes step 3 of 10 of its second chunk; the third one is then nobody's."""
    conditions = {"images": torch.zeros(6 * DRAW_CHUNK, 3, 4, 4), "captions": [""] * 6 * DRAW_CHUNK}

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

        def check_stop_request() -> None:
            if process.sum({"asked": process.stop.is_requested_here})["asked"]:
                raise Stopped

        with pytest.raises(Stopped):
            Generation(None, lambda batch: {}, None, process, 0, check_stop_request).draw(Decoder(), conditions)
        return steps

    assert on_processes(2, work) == [[10, 10], [10, 3]]


@pytest.mark.parametrize("world", [1, 3])
def test_each_wanted_picture_is_measured_once_beside_its_own_real_one_on_any_number_of_processes(world: int) -> None:
    count, judged = 2 * CHUNK + 3, list[tuple[int, float, float]]()

    class Quality:
        def add(self, real: Tensor, generated: Tensor, positions: list[int]) -> None:
            judged.extend(
                zip(positions, real.mean((1, 2, 3)).tolist(), generated.mean((1, 2, 3)).tolist(), strict=True)
            )

        def result(self, all_reduce: Any, gather: Any) -> dict[str, float]:
            return {}

    def of(numbers: range) -> dict[str, Tensor]:
        shades = torch.tensor([number / 64 for number in numbers])
        return {"images": 255 * shades[:, None, None, None].expand(-1, 3, 8, 8), "shades": shades}

    def sample(conditions: dict[str, Tensor], *given: Any, **how: Any) -> Tensor:
        return conditions["shades"][:, None, None, None].expand(-1, 3, 4, 4)

    def work(process: Process) -> None:
        feed = SimpleNamespace(validation_samples=of)
        generation = Generation(feed, lambda batch: {"shades": batch["shades"]}, None, process, 0, lambda: None)
        generation.measure(SimpleNamespace(image_sizes=[4], sample=sample), count, Quality(), None)

    on_processes(world, work)
    assert sorted(number for number, *_ in judged) == list(range(count))
    assert all(real == generated == pytest.approx(number / 64, abs=1e-6) for number, real, generated in judged)
