"""The moving averages against their recurrence and closed form."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from training.ema import ExponentialMovingAverage, PowerAverages, make_ema


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


def trained(averages, values):
    """Updates after which all weights have these values."""
    for value in values:
        averages.update(partial(nullcontext, Model(value)))
    return averages


def test_power_averages_of_weights_that_grow_by_one_per_update_are_their_closed_form():
    """Shares k^(g+1) - (k-1)^(g+1) of the values k = 1 ... 1000; the initial value, 5000, is forgotten at once. In the
    limit of many updates the average is (g + 1) / (g + 2) of the last value."""
    averages = trained(PowerAverages(Model(5000.0), [0.05, 0.10]), map(float, range(1, 1001)))
    found = {name: module.layer.bias[0].item() for name, module in averages.averages().items()}
    # fp32: 1000 roundings of up to 3e-5.
    assert found == {"ema_0.05": pytest.approx(947.790, abs=5e-3), "ema_0.1": pytest.approx(888.608, abs=5e-3)}
    for value, exponent in zip(found.values(), (16.9722, 6.9372), strict=True):
        assert value == pytest.approx(1000 * (exponent + 1) / (exponent + 2), rel=1e-3)


def test_the_first_update_is_the_whole_of_a_power_average_and_buffers_are_copied():
    model = Model(3.0)
    model.norm.running_mean.fill_(7.0)
    averages = trained(PowerAverages(Model(0.0), [0.1]), [])
    averages.update(partial(nullcontext, model))
    for name, tensor in averages.kept(model).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_restored_power_averages_continue_as_the_uninterrupted_ones():
    whole, first, second = (PowerAverages(Model(0.0), [0.05, 0.10]) for _ in range(3))
    trained(whole, [1.0, 2.0, 3.0, 4.0])
    trained(first, [1.0, 2.0])
    second.load_state_dict(first.state_dict())
    trained(second, [3.0, 4.0])
    for name, one in whole.averages().items():
        assert all(map(torch.equal, one.state_dict().values(), second.averages()[name].state_dict().values()))


def test_the_run_keeps_the_power_average_of_the_first_length():
    averages = make_ema(Model(), 0.0, [0.10, 0.05])
    assert list(averages.averages()) == ["ema_0.1", "ema_0.05"]
    assert averages.kept(None) is averages.averages()["ema_0.1"] is not averages.averages()["ema_0.05"]
    with pytest.raises(ValueError, match=r"--ema_power 0\.1 0\.1: give each length once"):
        make_ema(Model(), 0.0, [0.1, 0.10])


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


def test_another_average_at_a_resume_is_an_error_that_names_the_flag():
    none, decay, power = ((0.0, None), (0.9, None), (0.0, [0.05, 0.1]))
    for before, now, complaint in (
        (none, decay, "--ema_decay 0"), (none, power, "continue without --ema_power"),
        (decay, none, "set --ema_decay"), (decay, power, "continue with --ema_decay"),
        (power, none, "set --ema_power 0.05 0.1"), (power, decay, "continue with --ema_power 0.05 0.1"),
        (power, (0.0, [0.05]), "continue with --ema_power 0.05 0.1"),
    ):  # fmt: skip
        state = make_ema(Model(), *before).state_dict()
        with pytest.raises(ValueError, match=complaint):
            make_ema(Model(), *now).load_state_dict(state)
