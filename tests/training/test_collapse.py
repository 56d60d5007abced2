"""The alarm rings for a collapsed run, once, and for no other."""

import math

import pytest
import torch
from torch.nn.functional import logsigmoid

from training.collapse import CollapseAlarm, collapsed_loss, embedding_spread

SPREADS = {"spread_audio": 0.6, "spread_text": 0.5}


def said(alarm: CollapseAlarm, losses: list[float], first_step: int = 1001, **spreads: float) -> list[str]:
    looks = [alarm.look(first_step + 10 * i, loss, **{**SPREADS, **spreads}) for i, loss in enumerate(losses)]
    return [text for text in looks if text]


def equal_scores(size: int, score: float) -> torch.Tensor:
    return torch.full((size, size), score, dtype=torch.float64)


def test_loss_stuck_at_6_236_is_the_decoupled_loss_of_512_equal_embeddings():
    # musiclm-pytorch, issue 68
    assert collapsed_loss("decoupled", 512) == pytest.approx(6.236, abs=5e-4) == math.log(511)
    (warning,) = said(CollapseAlarm("decoupled", 512, after_steps=1000), [6.236] * 20)
    assert "6.236" in warning and "ln(512 - 1)" in warning and "nothing is learned" in warning and "--lr" in warning
    assert "\n" not in warning


@pytest.mark.parametrize("size", [2, 3, 16])
def test_collapsed_values_are_the_losses_of_equal_scores(size):
    s, own = equal_scores(size, 7.0), torch.eye(size, dtype=torch.bool)
    softmax = (s.logsumexp(1) - s.diagonal()).mean()
    decoupled = (s.masked_fill(own, -math.inf).logsumexp(1) - s.diagonal()).mean()
    assert collapsed_loss("softmax", size) == pytest.approx(softmax.item())
    assert collapsed_loss("decoupled", size) == pytest.approx(decoupled.item(), abs=1e-12)
    signs = torch.where(own, 1.0, -1.0)
    biases = torch.linspace(-8, 2, 20001, dtype=torch.float64) - 7
    sigmoid = min(-(logsigmoid(signs * (s + bias)).sum() / size).item() for bias in biases[::4])
    assert collapsed_loss("sigmoid", size) == pytest.approx(sigmoid, rel=1e-5)


def test_hierarchical_heads_add_up():
    assert collapsed_loss("decoupled", 512, heads=3) == pytest.approx(3 * math.log(511))
    (warning,) = said(CollapseAlarm("decoupled", 512, 0, heads=3), [18.709] * 9)
    assert "3 x ln(512 - 1)" in warning
    assert not said(CollapseAlarm("decoupled", 512, 0, heads=3), [6.236] * 9)


@pytest.mark.parametrize("kind", ["softmax", "decoupled", "sigmoid"])
def test_a_healthy_run_whose_loss_falls_through_the_value_is_not_warned(kind):
    value = collapsed_loss(kind, 64)
    losses = [1.3 * value * math.exp(-step / 80) + 0.3 + 0.02 * math.sin(7 * step) for step in range(400)]
    assert min(abs(loss - value) for loss in losses) < 0.01 * value
    assert not said(CollapseAlarm(kind, 64, after_steps=0), losses)


def test_a_loss_that_swings_about_the_value_is_no_collapse():
    value = math.log(63)
    assert not said(CollapseAlarm("decoupled", 64, 0), [value * (1 + 0.03 * (-1) ** i) for i in range(50)])
    assert not said(CollapseAlarm("decoupled", 64, 0), [value, value, value, value, value * 0.97] * 10)


def test_nothing_is_said_during_the_warm_up():
    alarm = CollapseAlarm("softmax", 64, after_steps=1000)
    assert not said(alarm, [math.log(64)] * 100, first_step=1, spread_audio=0.0)
    assert len(said(alarm, [math.log(64)] * 3, first_step=1001)) == 0, "looks before the end of the warm-up count not"
    assert len(said(alarm, [math.log(64)] * 30, first_step=1031)) == 1


def test_it_is_said_once_and_again_only_after_it_recovered():
    alarm, value = CollapseAlarm("softmax", 64, 0), math.log(64)
    assert len(said(alarm, [value] * 100)) == 1
    assert not said(alarm, [value * 0.985] + [value] * 100), "just outside is no recovery"
    assert not said(alarm, [math.nan] + [value] * 100)
    assert not said(alarm, [value / 2])
    assert len(said(alarm, [value] * 100)) == 1


@pytest.mark.parametrize("side", ["audio", "text"])
def test_embeddings_that_are_all_the_same_are_said_of_their_side(side):
    alarm = CollapseAlarm("sigmoid", 64, 0)
    (warning,) = said(alarm, [1.0] * 10, **{f"spread_{side}": 1e-5})
    other = {"audio": "text", "text": "audio"}[side]
    assert f"the {side} side has collapsed" in warning and f"the {other} side" not in warning and "1e-05" in warning
    assert not said(alarm, [1.0], **{f"spread_{side}": 1.5e-3})
    assert not said(alarm, [1.0], **{f"spread_{side}": 1e-5}), "it had not recovered"
    assert not said(alarm, [1.0])
    assert len(said(alarm, [1.0], **{f"spread_{side}": 1e-5})) == 1
    assert len(said(alarm, [1.0], **{f"spread_{other}": 1e-5})) == 1


def test_spread_is_the_variance_of_unit_vectors():
    vectors = torch.nn.functional.normalize(torch.randn(50, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    variance = (vectors.double() - vectors.double().mean(0)).square().sum(1).mean()
    assert embedding_spread(vectors).item() == pytest.approx(variance.item(), abs=1e-6)
    assert embedding_spread(vectors[:1].expand(9, 8)).item() == pytest.approx(0, abs=1e-6)
    assert embedding_spread(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])).item() == 1


def test_values_that_are_not_numbers_are_not_called_a_collapse():
    assert not said(CollapseAlarm("softmax", 64, 0), [math.nan] * 10, spread_audio=math.nan, spread_text=math.nan)


@pytest.mark.parametrize(("kind", "size", "word"), [("hinge", 8, "decoupled"), ("softmax", 1, "negatives")])
def test_a_loss_that_does_not_exist_is_refused_in_one_line(kind, size, word):
    with pytest.raises(ValueError, match=word):
        CollapseAlarm(kind, size, 0)
