"""The alarm rings for a collapsed run, once, and for no other."""

import math

import pytest

from training.measures.collapse import CollapseAlarm


def said(alarm: CollapseAlarm, losses: list[float], value: float, first_step: int = 1001, **variances: float) -> list:
    variances = {"audio_variance": 0.6, "text_variance": 0.5, **variances}
    checks = [alarm.check(first_step + 10 * i, loss, value, **variances) for i, loss in enumerate(losses)]
    return [text for text in checks if text]


def test_loss_stuck_at_6_236_is_told():
    # musiclm-pytorch, issue 68: 512 pairs, ln 511
    (warning,) = said(CollapseAlarm(after_steps=1000), [6.236] * 20, math.log(511))
    assert "6.236" in warning and "nothing is learned" in warning and "--lr" in warning
    assert "\n" not in warning


def test_a_healthy_run_whose_loss_falls_through_the_value_is_not_warned():
    value = math.log(63)
    losses = [1.3 * value * math.exp(-step / 80) + 0.3 + 0.02 * math.sin(7 * step) for step in range(400)]
    assert min(abs(loss - value) for loss in losses) < 0.01 * value
    assert not said(CollapseAlarm(after_steps=0), losses, value)


def test_the_value_may_be_another_at_every_check():
    """Captions that repeat are no negatives: how many are left depends on the batch."""
    alarm = CollapseAlarm(after_steps=0)
    warnings = [alarm.check(step, 4.0 + 0.1 * (step % 2), 4.0 + 0.1 * (step % 2), 0.5, 0.5) for step in range(1, 20)]
    assert sum(warning is not None for warning in warnings) == 1


def test_a_loss_that_swings_about_the_value_or_is_no_number_is_no_collapse():
    value = math.log(63)
    assert not said(CollapseAlarm(after_steps=0), [value * (1 + 0.03 * (-1) ** i) for i in range(50)], value)
    assert not said(CollapseAlarm(after_steps=0), [value, value, value, value, value * 0.97] * 10, value)
    nothing = {"audio_variance": math.nan, "text_variance": math.nan}
    assert not said(CollapseAlarm(after_steps=0), [math.nan] * 10, value, **nothing)


def test_nothing_is_said_during_the_warm_up():
    alarm = CollapseAlarm(after_steps=1000)
    assert not said(alarm, [math.log(64)] * 100, math.log(64), first_step=1, audio_variance=0.0)
    assert not said(alarm, [math.log(64)] * 3, math.log(64), first_step=1001), "earlier checks do not count"
    assert len(said(alarm, [math.log(64)] * 30, math.log(64), first_step=1031)) == 1


def test_it_is_said_once_and_again_only_after_it_recovered():
    alarm, value = CollapseAlarm(after_steps=0), math.log(64)
    assert len(said(alarm, [value] * 100, value)) == 1
    assert not said(alarm, [value * 0.985] + [value] * 100, value), "just outside is no recovery"
    assert not said(alarm, [math.nan] + [value] * 100, value)
    assert not said(alarm, [value / 2], value)
    assert len(said(alarm, [value] * 100, value)) == 1


@pytest.mark.parametrize("side", ["audio", "text"])
def test_embeddings_that_are_all_the_same_are_said_of_their_side(side):
    alarm = CollapseAlarm(after_steps=0)
    (warning,) = said(alarm, [1.0] * 10, 4.0, **{f"{side}_variance": 1e-5})
    other = {"audio": "text", "text": "audio"}[side]
    assert f"the {side} side has collapsed" in warning and f"the {other} side" not in warning and "1e-05" in warning
    assert not said(alarm, [1.0], 4.0, **{f"{side}_variance": 1.5e-3})
    assert not said(alarm, [1.0], 4.0, **{f"{side}_variance": 1e-5}), "it had not recovered"
    assert not said(alarm, [1.0], 4.0)
    assert len(said(alarm, [1.0], 4.0, **{f"{side}_variance": 1e-5})) == 1
    assert len(said(alarm, [1.0], 4.0, **{f"{other}_variance": 1e-5})) == 1
