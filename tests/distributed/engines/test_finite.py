"""Updates with non-finite values: skipped, counted, and explained once there are too many in a row."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from distributed import Backend, TrainingStopped
from tests.processes import Process, on_processes

ONES = torch.ones(1, 2)


def trained(process: Backend, spoil: Callable[[nn.Module], Tensor | None], updates: int) -> list[float]:
    """The weight after each update of a layer, whose losses are what `spoil` makes of it."""
    model, seen = nn.Linear(2, 1), []
    nn.init.ones_(model.weight), nn.init.ones_(model.bias)
    engine = process.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(updates):
        loss = spoil(model)
        engine.backward(model(ONES).sum() if loss is None else loss)
        engine.step()
        seen.append(model.weight[0, 0].item())
    assert engine.skipped_updates == updates - len({1.0, *seen}) + 1
    return seen


def in_turn(*good: bool) -> Callable[[nn.Module], Tensor | None]:
    turns = iter(good)
    return lambda model: None if next(turns) else model(ONES).sum() * math.nan


@pytest.mark.parametrize("limit", [0, 1, 2, 5])
def test_the_run_stops_at_the_limit_in_a_row_and_not_before_with_the_last_good_weights(limit: int) -> None:
    most = max(limit, 1)  # 0 means the first
    process = Process(max_skipped_updates=limit)
    if most > 1:  # a good update in between starts the count again
        turns = [True, *[False] * (most - 1), True, *[False] * (most - 1)]
        seen = trained(process, in_turn(*turns), len(turns))
        assert len(set(seen)) == 2
    with pytest.raises(TrainingStopped, match=rf"^{most} updates .* update {most + 1}: rank 0: the loss is nan"):
        trained(process, in_turn(True, *[False] * most), most + 1)


SPOILED: dict[str, Callable[[nn.Linear], Tensor]] = {
    "the loss is nan": lambda model: model(ONES).sum() * math.nan,
    "the loss is inf": lambda model: model(ONES).sum() + math.inf,
    # sqrt has an infinite slope at 0
    "the gradient of weight holds nan": lambda model: (0 * model.weight).sum().sqrt() + model.bias.sum(),
    "the gradient of bias holds inf": lambda model: (model.bias - model.bias.detach()).sum().sqrt(),
}


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("found", SPOILED)
def test_the_message_names_the_rank_and_the_tensor_on_all(found: str, limit: int) -> None:
    def work(process: Process) -> None:
        trained(process, SPOILED[found] if process.rank == 1 else lambda model: None, limit)

    errors = on_processes(3, work, catches=TrainingStopped, max_skipped_updates=limit)
    for said in map(str, errors):
        assert f"update {limit}: rank 1: {found}. " in said and "\n" not in said
        assert "rank 0" not in said and "rank 2" not in said


def test_where_the_sum_alone_is_not_finite_no_rank_is_blamed_nor_for_what_was_found_before() -> None:
    def work(process: Process) -> None:
        updates = iter(range(1, 4))

        def spoil(model: nn.Linear) -> Tensor:
            if next(updates) < 3:
                return model(ONES).sum() * math.nan
            zero = (model.bias - model.bias.detach()).sum()
            return sum(zero * torch.finfo(torch.float32).max for _ in range(2))

        trained(process, spoil, 3)

    # A third of twice the largest number there is comes from each of three processes.
    errors = on_processes(3, work, catches=TrainingStopped, max_skipped_updates=3)
    assert all("update 3: only the sum over the processes" in str(error) for error in errors), errors
