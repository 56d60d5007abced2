"""What all engines compute alike: the norm of gradients; the dynamic loss scale against its recurrence, and what
autocast leaves alone; updates with non-finite values, which are skipped, and explained once there are too many."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tandem.distributed import Backend, TrainingStopped
from tandem.distributed.engines import arithmetic
from tandem.distributed.engines.arithmetic import LossScaler, all_finite, autocast, gradient_norm
from tests.processes import ThreadBackend, on_backends

MANY = 3 * 2**17 + 1  # more than are added at a time


@pytest.mark.parametrize("size", [1, 1000, MANY])
def test_the_norm_of_gradients_is_that_of_all_numbers_in_fp64_and_not_finite_if_one_is_not(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    gradients = [torch.randn(size, 3, generator=generator).T, torch.randn(2, 2, generator=generator), torch.tensor(5.0)]
    norm = gradient_norm(gradients)
    expected = sum(gradient.double().square().sum() for gradient in gradients) ** 0.5
    assert norm.dtype == torch.float64 and norm.dim() == 0
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    gradients[0][-1, -1] = torch.finfo(torch.float32).max
    assert gradient_norm(gradients).isfinite() and all_finite(gradients)
    for wrong in (torch.nan, torch.inf, -torch.inf):
        gradients[0][-1, -1] = wrong
        assert not gradient_norm(gradients).isfinite() and not all_finite(gradients)


CPU = torch.device("cpu")


def recurrence(finite: list[bool], scale: float, growth_interval: int) -> list[float]:
    """Micikevicius et al. 2018, section 3.2, one update after the other."""
    scales, good = [], 0
    for ok in finite:
        good = good + 1 if ok else 0
        if not ok:
            scale = max(scale / 2, 1.0)
        elif good == growth_interval:
            scale, good = min(scale * 2, 2.0**24), 0
        scales.append(scale)
    return scales


@pytest.mark.parametrize("initial", [2.0**16, 2.0**24, 4.0])
@pytest.mark.parametrize("growth_interval", [1, 2, 5])
def test_the_scale_follows_the_recurrence_also_after_a_reload(
    initial: float, growth_interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "GROWTH_INTERVAL", growth_interval)
    draw = random.Random(growth_interval)
    finite = [draw.random() < 0.7 for _ in range(200)] + [False] * 40 + [True] * 200
    scaler, scales = LossScaler(True, CPU), list[float]()
    scaler.scale.fill_(initial)
    for ok in finite:
        scaler.update(torch.tensor(ok))
        scales.append(float(scaler.scale))
        state, scaler = scaler.state_dict(), LossScaler(True, CPU)
        scaler.load_state_dict(state)
    assert scales == recurrence(finite, initial, growth_interval)


def test_a_disabled_scaler_is_always_one_and_has_no_state() -> None:
    scaler = LossScaler(False, CPU)
    scaler.update(torch.tensor(False))
    scaler.load_state_dict({"scale": 8.0, "finite_in_a_row": 3})
    assert float(scaler.scale) == 1.0 and scaler.state_dict() == {}


# Saved in fp32: the default; saved by another backend, which counts nothing.
@pytest.mark.parametrize(("saved", "scale"), [({}, 2.0**16), ({"scale": 1024.0}, 1024.0)], ids=str)
def test_a_state_that_lacks_something_is_accepted(saved: dict[str, float], scale: float) -> None:
    scaler = LossScaler(True, CPU)
    scaler.load_state_dict(saved)
    assert scaler.state_dict() == {"scale": scale, "finite_in_a_row": 0}


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_products_run_in_the_chosen_precision_and_sums_in_fp32(precision: str, dtype: torch.dtype) -> None:
    weight = torch.ones(3, 3)
    with autocast(precision, CPU):
        product = weight @ weight
        assert product.dtype == dtype
        assert torch.nn.functional.mse_loss(product, weight).dtype == torch.float32
    assert weight.dtype == torch.float32


ONES = torch.ones(1, 2)


def trained(backend: Backend, spoil: Callable[[nn.Module], Tensor | None], updates: int) -> list[float]:
    """The weight after each update of a layer, whose losses are what `spoil` makes of it."""
    model, seen = nn.Linear(2, 1), []
    nn.init.ones_(model.weight), nn.init.ones_(model.bias)
    engine = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
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
    backend = ThreadBackend(max_skipped_updates=limit)
    if most > 1:  # a good update in between starts the count again
        turns = [True, *[False] * (most - 1), True, *[False] * (most - 1)]
        seen = trained(backend, in_turn(*turns), len(turns))
        assert len(set(seen)) == 2
    with pytest.raises(
        TrainingStopped, match=rf"^{most} updates? in a row .* update {most + 1}: rank 0: the loss is nan"
    ):
        trained(backend, in_turn(True, *[False] * most), most + 1)


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
    def work(backend: Backend) -> None:
        trained(backend, SPOILED[found] if backend.processes.rank == 1 else lambda model: None, limit)

    errors = on_backends(3, work, catches=TrainingStopped, max_skipped_updates=limit)
    for said in map(str, errors):
        assert f"update {limit}: rank 1: {found}. " in said and "\n" not in said
        assert "rank 0" not in said and "rank 2" not in said


def test_where_the_sum_alone_is_not_finite_no_rank_is_blamed_nor_for_what_was_found_before() -> None:
    def work(backend: Backend) -> None:
        updates = iter(range(1, 4))

        def spoil(model: nn.Linear) -> Tensor:
            if next(updates) < 3:
                return model(ONES).sum() * math.nan
            zero = (model.bias - model.bias.detach()).sum()
            return sum(zero * torch.finfo(torch.float32).max for _ in range(2))

        trained(backend, spoil, 3)

    # A third of twice the largest number there is comes from each of three processes.
    errors = on_backends(3, work, catches=TrainingStopped, max_skipped_updates=3)
    assert all("update 3: only the sum over the processes" in str(error) for error in errors), errors


@pytest.mark.parametrize(("device", "tensors"), [("cpu", 4), ("meta", 1)])
def test_the_norm_of_a_gradient_is_cut_into_pieces_on_a_cpu_alone(
    device: str, tensors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm, named = torch._foreach_norm, list[int]()
    monkeypatch.setattr(torch, "_foreach_norm", lambda some, **how: (named.append(len(some)), norm(some, **how))[1])
    gradient_norm([torch.zeros(MANY, device=device)])
    assert named == [tensors]


def test_a_backward_pass_reads_no_number_where_the_first_skipped_update_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, model = ThreadBackend(max_skipped_updates=1), nn.Linear(2, 1)
    engine = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    reads = list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "__bool__", lambda tensor: reads.append(1) or tensor.item() != 0)
        engine.backward(model(ONES).sum())
    assert not reads
