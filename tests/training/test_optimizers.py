"""What decays and what does not."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from training.optimizers import make_optimizer


@pytest.mark.parametrize("lion", [False, True])
def test_only_matrices_decay(lion: bool) -> None:
    """Without gradients an update is the decay alone: w <- w - lr x decay x w."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    model.register_parameter("temperature", nn.Parameter(torch.tensor(2.0)))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = make_optimizer(model, lr=0.1, betas=(0.9, 0.99), weight_decay=0.5, lion=lion)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for name, weight in model.named_parameters():
        factor = 0.95 if name == "0.weight" else 1.0
        torch.testing.assert_close(weight.detach(), before[name] * factor)


def test_every_weight_is_trained_once() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    groups = make_optimizer(model, lr=0.1, betas=(0.9, 0.99), weight_decay=0.5).param_groups
    held = [id(weight) for group in groups for weight in group["params"]]
    assert sorted(held) == sorted(id(weight) for weight in model.parameters())


def test_a_missing_lion_is_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lion_pytorch", None)
    with pytest.raises(ValueError, match=r"pip install -e \"\.\[lion\]\""):
        make_optimizer(nn.Linear(1, 1), lr=0.1, betas=(0.9, 0.99), weight_decay=0.0, lion=True)
