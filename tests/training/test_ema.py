"""The moving average against its recurrence."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from training.ema import ExponentialMovingAverage, make_ema


class Model(nn.Module):
    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        for parameter in self.parameters():
            nn.init.constant_(parameter, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


def test_average_follows_the_warmed_up_recurrence():
    model = Model(0.0)
    ema = ExponentialMovingAverage(model, decay=0.3)
    expected = 0.0
    for n, decay in enumerate([2 / 11, 3 / 12, 0.3, 0.3], start=1):
        for parameter in model.parameters():
            nn.init.constant_(parameter, float(n))
        ema.update(partial(nullcontext, model))
        expected = decay * expected + (1 - decay) * n
        for average in ema.module.parameters():
            torch.testing.assert_close(average, torch.full_like(average, expected))


def test_buffers_are_copied_and_the_online_model_is_left_alone():
    model = Model(1.0)
    ema = ExponentialMovingAverage(model, decay=0.9)
    model.train()(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)) + 5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert ema.module.norm.num_batches_tracked == 0
    ema.update(partial(nullcontext, model))
    assert ema.module.norm.num_batches_tracked == 1
    assert torch.equal(ema.module.norm.running_mean, model.norm.running_mean)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_average_is_a_frozen_fp32_model_in_eval_mode():
    model = Model().bfloat16().train()
    ema = ExponentialMovingAverage(model, decay=0.9)
    ema.update(partial(nullcontext, model))
    assert not ema.module.training and model.training
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in ema.module.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_restored_average_continues_as_the_uninterrupted_one():
    def run(ema, values):
        for value in values:
            ema.update(partial(nullcontext, Model(value)))

    whole, first, second = (ExponentialMovingAverage(Model(0.0), 0.9) for _ in range(3))
    run(whole, [1.0, 2.0, 3.0, 4.0])
    run(first, [1.0, 2.0])
    second.load_state_dict(first.state_dict())
    run(second, [3.0, 4.0])
    for one, other in zip(whole.module.state_dict().values(), second.module.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_state_that_does_not_fit_is_an_error_of_one_line():
    ema = ExponentialMovingAverage(Model(), 0.9)
    for weights in ({}, {**ema.module.state_dict(), "extra": torch.zeros(1)}, nn.Linear(3, 4).state_dict()):
        with pytest.raises(ValueError, match="do not fit the model") as error:
            ema.load_state_dict({"updates": 1, "weights": weights})
        assert "\n" not in str(error.value)


def test_the_average_is_evaluated_and_kept_and_without_decay_the_trained_model_itself():
    model = Model()
    ema = make_ema(model, 0.99)
    assert list(ema.averages()) == ["ema"] and ema.kept(model) is ema.averages()["ema"] is not model
    none = make_ema(model, 0.0)
    none.update(partial(nullcontext, model))
    assert none.averages() == {} and none.kept(model) is model and none.state_dict() == {}
    none.load_state_dict({})


def test_switching_the_average_on_or_off_at_a_resume_is_an_error():
    with pytest.raises(ValueError, match="--ema_decay 0"):
        make_ema(Model(), 0.9).load_state_dict({})
    with pytest.raises(ValueError, match="set --ema_decay"):
        make_ema(Model(), 0.0).load_state_dict(make_ema(Model(), 0.9).state_dict())
