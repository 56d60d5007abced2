"""The moving averages against their recurrence and closed form."""

import pytest
import torch
from torch import nn

from tandem.training.ema import make_ema
from tests.training.whole import Whole


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
    ema = make_ema(Whole(model), 0.3)
    expected = 0.0
    for n, decay in enumerate([2 / 11, 3 / 12, 0.3, 0.3], start=1):
        for parameter in model.parameters():
            nn.init.constant_(parameter, float(n))
        ema.update()
        expected = decay * expected + (1 - decay) * n
        with ema.averages()["ema"]() as averaged:
            for average in averaged.parameters():
                torch.testing.assert_close(average, torch.full_like(average, expected))


def test_buffers_are_copied_and_the_online_model_is_left_alone():
    model = Model(1.0)
    ema = make_ema(Whole(model), 0.9)
    model.train()(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)) + 5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert ema.state_dict()["weights"]["norm.num_batches_tracked"] == 0
    ema.update()
    with ema.averages()["ema"]() as averaged:
        assert averaged.norm.num_batches_tracked == 1
        assert torch.equal(averaged.norm.running_mean, model.norm.running_mean)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_average_is_a_frozen_fp32_model_in_eval_mode():
    model = Model().bfloat16().train()
    ema = make_ema(Whole(model), 0.9)
    ema.update()
    with ema.averages()["ema"]() as averaged:
        assert not averaged.training and model.training
        assert all(p.dtype == torch.float32 and not p.requires_grad for p in averaged.parameters())
    assert all(p.requires_grad for p in model.parameters())


def trained(averages, weights, values):
    """Updates after which all weights have these values."""
    for value in values:
        weights.module = Model(value)
        averages.update()
    return averages


def test_power_averages_of_weights_that_grow_by_one_per_update_are_their_closed_form():
    """Shares k^(g+1) - (k-1)^(g+1) of the values k = 1 ... 1000; the initial value, 5000, is forgotten at once. In the
    limit of many updates the average is (g + 1) / (g + 2) of the last value."""
    weights = Whole(Model(5000.0))
    averages = trained(make_ema(weights, 0.0, [0.05, 0.10]), weights, map(float, range(1, 1001)))
    powers = averages.state_dict()["powers"]
    found = {f"ema_{length}": state["weights"]["layer.bias"][0].item() for length, state in powers.items()}
    # fp32: 1000 roundings of up to 3e-5.
    assert found == {"ema_0.05": pytest.approx(947.790, abs=5e-3), "ema_0.1": pytest.approx(888.608, abs=5e-3)}
    for value, exponent in zip(found.values(), (16.9722, 6.9372), strict=True):
        assert value == pytest.approx(1000 * (exponent + 1) / (exponent + 2), rel=1e-3)


@pytest.mark.parametrize("kind", [{"decay": 0.999}, {"decay": 0.0, "lengths": [0.1]}])
def test_skipped_updates_leave_the_average_and_its_count_as_they_are(kind):
    weights = Whole(Model(0.0))
    averages, expected = (make_ema(weights, **kind) for _ in range(2))
    yes, no = torch.tensor(True), torch.tensor(False)
    for value in (1.0, 2.0, 3.0):
        weights.module = Model(value)
        averages.update(yes)  # before anything was made, too
        averages.update(no)
        expected.update()
    ours, theirs = averages.state_dict(), expected.state_dict()
    assert ours["updates"] == theirs["updates"] == 3
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [{"decay": 0.9}, {"decay": 0.0, "lengths": [0.1]}])
def test_an_update_that_one_of_two_parts_skipped_is_one_of_the_other_alone(kind):
    """As the averages of two models: what both were given alone is in both."""
    weights, parts = Whole(Model(0.0)), ("layer.", "norm.")
    both = make_ema(weights, **kind, prefixes=parts)
    alone = {part: make_ema(weights, **kind) for part in parts}
    for value, *skipped in ((1.0, True, False), (2.0, False, False), (3.0, False, True), (4.0, True, True)):
        weights.module = Model(value)
        both.update(*map(torch.tensor, skipped))
        for average, is_skipped in zip(alone.values(), skipped, strict=True):
            average.update(torch.tensor(is_skipped))
    again = make_ema(weights, **kind, prefixes=parts)
    again.load_state_dict(both.state_dict())
    state = again.state_dict()
    assert state["updates"] == {"layer.": 2, "norm.": 2}

    def of(part, found):
        (averaged,) = found.get("powers", {"": found}).values()
        return {name: tensor for name, tensor in averaged["weights"].items() if name.startswith(part)}

    for part, average in alone.items():
        torch.testing.assert_close(of(part, state), of(part, average.state_dict()), rtol=0, atol=0)
    again.load_state_dict({**both.state_dict(), "updates": 7})  # of an earlier version
    assert again.state_dict()["updates"] == {"layer.": 7, "norm.": 7}


def test_state_that_does_not_fit_is_an_error_of_one_line():
    ema = make_ema(Whole(Model()), 0.9)
    ours = ema.state_dict()["weights"]
    for weights, reason in (
        ({}, "layer.bias is missing"),
        ({**ours, "extra": torch.zeros(1)}, "extra is not a weight of the model"),
        ({**ours, "layer.bias": torch.zeros(3)}, r"layer.bias: the shape \(3,\) is not the model's \(2,\)"),
    ):
        with pytest.raises(ValueError, match=f"do not fit the model: {reason}") as error:
            ema.load_state_dict({"updates": 1, "weights": weights})
        assert "\n" not in str(error.value)


def test_another_average_at_a_resume_is_an_error_that_names_the_flag():
    none, decay, power = ((0.0, None), (0.9, None), (0.0, [0.05, 0.1]))
    for before, now, complaint in (
        (none, decay, "--ema_decay 0"), (none, power, "and without --ema_power"),
        (decay, none, "continue with --ema_decay"), (decay, power, "continue with --ema_decay"),
        (power, none, "continue with --ema_power 0.05 0.1"), (power, decay, "continue with --ema_power 0.05 0.1"),
        (power, (0.0, [0.05]), "continue with --ema_power 0.05 0.1"),
        (power, (0.0, [0.1, 0.05]), "continue with --ema_power 0.05 0.1"),  # the first one is the model of the run
    ):  # fmt: skip
        state = make_ema(Whole(Model()), *before).state_dict()
        with pytest.raises(ValueError, match=complaint):
            make_ema(Whole(Model()), *now).load_state_dict(state)
