"""The dynamic loss scale against its recurrence, and what autocast leaves alone."""

from __future__ import annotations

import random

import pytest
import torch

from distributed.engines.precision import LossScaler, autocast

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
def test_the_scale_follows_the_recurrence_also_after_a_reload(initial: float, growth_interval: int) -> None:
    draw = random.Random(growth_interval)
    finite = [draw.random() < 0.7 for _ in range(200)] + [False] * 40 + [True] * 200
    scaler = LossScaler(True, CPU, initial=initial, growth_interval=growth_interval)
    scales = []
    for ok in finite:
        scaler.update(torch.tensor(ok))
        scales.append(float(scaler.scale))
        state, scaler = scaler.state_dict(), LossScaler(True, CPU, growth_interval=growth_interval)
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
