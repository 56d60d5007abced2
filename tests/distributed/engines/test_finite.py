"""Updates with non-finite values: skipped, counted, and explained once there are too many in a row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed import Backend, TrainingStopped
from distributed.engines.finite import SkipGuard

GOOD, BAD = torch.tensor(True), torch.tensor(False)


def guard(limit: int, others: Any = (), model: nn.Module | None = None) -> SkipGuard:
    """Of the last rank; ``others`` is what the ranks before it found."""
    return SkipGuard(
        (model or nn.Linear(2, 1)).named_parameters, limit, torch.device("cpu"), lambda value: [*others, value]
    )


def backward(skip_guard: SkipGuard, loss: Tensor) -> None:
    torch.autograd.backward(loss, skip_guard.poison(loss, 1.0))


@pytest.mark.parametrize("limit", [0, 1, 2, 5])
def test_the_run_stops_at_the_limit_in_a_row_and_not_before(limit: int) -> None:
    counting, last = guard(limit), max(limit, 1)  # 0 means the first
    for update in range(1, last):
        counting.after_update(BAD, update)
    with pytest.raises(TrainingStopped, match=rf"^{last} updates in a row were skipped .* the last at update {last}:"):
        counting.after_update(BAD, last)


def test_a_finite_update_in_between_starts_the_count_again() -> None:
    counting = guard(3)
    for update, finite in enumerate([BAD, BAD, GOOD, BAD, BAD, GOOD, BAD, BAD]):
        counting.after_update(finite, update)
    assert int(counting.total) == 6


@pytest.mark.parametrize(("loss", "expected"), [(1.0, 0.25), (math.nan, math.nan), (math.inf, math.nan)])
@pytest.mark.parametrize("factor", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
def test_a_non_finite_loss_poisons_its_gradient(loss: float, expected: float, factor: Any) -> None:
    start = guard(5).poison(torch.tensor(loss), factor)
    assert float(start) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda model: model(torch.ones(1, 2)).sum() * math.nan, "rank 0: the loss is nan"),
        (lambda model: model(torch.ones(1, 2)).sum() + math.inf, "rank 0: the loss is inf"),
        # sqrt has an infinite slope at 0
        (lambda model: (0 * model.weight).sum().sqrt() + model.bias.sum(), "rank 0: the gradient of weight holds nan"),
        (lambda model: (model.bias - model.bias.detach()).sum().sqrt(), "rank 0: the gradient of bias holds inf"),
        (lambda model: model(torch.ones(1, 2)).sum(), "only the sum over the processes is not finite"),
    ],
)
def test_the_message_names_rank_and_tensor(spoil: Callable[[nn.Linear], Tensor], found: str, limit: int) -> None:
    model = nn.Linear(2, 1)
    watching = guard(limit, model=model)
    with pytest.raises(TrainingStopped) as raised:
        for update in range(1, limit + 1):
            backward(watching, spoil(model))
            watching.after_update(BAD, update)
    text = str(raised.value)
    assert f"the last at update {limit}: {found}. The weights are those of the last good update" in text
    assert "\n" not in text


def test_the_message_names_only_the_ranks_that_found_something() -> None:
    with pytest.raises(TrainingStopped, match=r"update 7: rank 1: the gradient of 0.bias holds inf\. The weights"):
        guard(1, [[], ["the gradient of 0.bias holds inf"], []]).after_update(BAD, 7)


def test_findings_of_an_update_that_was_made_are_forgotten() -> None:
    model = nn.Linear(2, 1)
    watching = guard(1, model=model)
    backward(watching, model(torch.ones(1, 2)).sum() * math.nan)
    watching.after_update(GOOD, 1)
    with pytest.raises(TrainingStopped, match="only the sum"):
        watching.after_update(BAD, 2)


def test_gradients_are_looked_at_only_while_there_is_trouble() -> None:
    model = nn.Linear(2, 1)
    watching, hooks = guard(5, model=model), []
    for finite in (GOOD, BAD, GOOD):
        watching.after_update(finite, 1)
        hooks.append(sum(len(parameter._backward_hooks or {}) for parameter in model.parameters()))
    assert hooks == [0, 2, 0]


def test_an_engine_counts_skips_stops_and_keeps_the_last_good_weights(single: Callable[..., Backend]) -> None:
    backend = single(batch_size=2, max_skipped_updates=3)
    model = nn.Linear(2, 1)
    engine = backend.wrap(model, torch.optim.Adam(model.parameters(), lr=0.1))
    x = torch.ones(2, 2)
    engine.backward(engine(x).sum())
    assert not bool(engine.step().skipped)
    good = model.weight.detach().clone()
    with pytest.raises(TrainingStopped, match=r"3 updates in a row .* update 4: rank 0: the loss is nan"):
        for _ in range(3):
            engine.backward(engine(x).sum() * math.nan)
            assert bool(engine.step().skipped)
    assert engine.skipped_updates == 3 and torch.equal(model.weight, good)
