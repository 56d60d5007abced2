"""Adversarial losses against formulas written out a second time, closed forms, and autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tandem.models.autoencoders.discriminator import Discriminator
from tandem.training.losses.adversarial import (
    ADVERSARIAL_LOSSES,
    LeCam,
    adaptive_weight,
    bce_discriminator_loss,
    bce_generator_loss,
    gradient_penalty,
    hinge_discriminator_loss,
    hinge_generator_loss,
    image_gradient,
    softplus_generator_loss,
    zero_centred_penalty,
)

REAL, FAKE = torch.tensor([2.0, 0.5, -1.0]), torch.tensor([-3.0, 0.25])


def some(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def test_hinge_losses_of_a_worked_example() -> None:
    assert hinge_discriminator_loss(REAL, FAKE).item() == pytest.approx((0 + 0.5 + 2) / 3 + (0 + 1.25) / 2)
    assert hinge_generator_loss(FAKE).item() == pytest.approx(2.75 / 2)


def test_bce_losses_of_a_worked_example() -> None:
    def s(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    real = [-math.log(s(x)) for x in REAL.tolist()]
    fake = [-math.log(1 - s(x)) for x in FAKE.tolist()]
    assert bce_discriminator_loss(REAL, FAKE).item() == pytest.approx(sum(real) / 3 + sum(fake) / 2)
    assert bce_generator_loss(FAKE).item() == pytest.approx(sum(-math.log(s(x)) for x in FAKE.tolist()) / 2)


def test_bce_stays_finite_and_has_a_gradient_where_the_discriminator_is_certain() -> None:
    certain = torch.tensor([-200.0], requires_grad=True)
    loss = bce_generator_loss(certain)
    loss.backward()
    assert loss.item() == 200.0 and certain.grad is not None and certain.grad.item() == -1.0


def test_the_softplus_of_an_image_is_that_of_the_mean_of_its_logits() -> None:
    logits = torch.tensor([[[[1.0, -3.0], [0.5, 0.5]]], [[[4.0, 4.0], [2.0, 2.0]]]])
    expected = (math.log1p(math.exp(0.25)) + math.log1p(math.exp(-3.0))) / 2
    assert softplus_generator_loss(logits).item() == pytest.approx(expected)
    assert ADVERSARIAL_LOSSES["hinge_softplus"].discriminator is hinge_discriminator_loss


def test_lecam_equals_its_formula_with_the_averages_of_earlier_updates() -> None:
    lecam, decay = LeCam(0.9), 0.9
    means = [(1.0, -1.0), (2.0, 0.0), (0.5, 0.25)]
    for real, fake in means:
        lecam.update(torch.tensor(real, requires_grad=True), torch.tensor(fake, requires_grad=True))
    assert not any(tensor.requires_grad for tensor in lecam.state_dict(keep_vars=True).values())
    weights = [decay**age * (1 - decay) for age in (2, 1, 0)]
    a_real, a_fake = (sum(w * m[side] for w, m in zip(weights, means, strict=True)) / sum(weights) for side in (0, 1))
    expected = sum(max(x - a_fake, 0) ** 2 for x in REAL.tolist()) / 3
    expected += sum(max(a_real - x, 0) ** 2 for x in FAKE.tolist()) / 2
    assert lecam(REAL, FAKE).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_lecam_leaves_out_means_that_are_not_finite(bad: float) -> None:
    lecam, untouched = LeCam(0.9), LeCam(0.9)
    for one in (lecam, untouched):
        one.update(torch.tensor(1.0), torch.tensor(-1.0))
    lecam.update(torch.tensor(bad), torch.tensor(0.0))
    lecam.update(torch.tensor(0.0), torch.tensor(bad))
    for name, tensor in untouched.state_dict().items():
        assert torch.equal(lecam.state_dict()[name], tensor)


def test_penalty_takes_a_norm_per_image_of_the_sum_of_its_logits() -> None:
    w, images = some(3 * 4 * 4), some(5, 3, 4, 4)
    expected = (w.norm().item() - 1) ** 2
    assert gradient_penalty(lambda x: x.flatten(1) @ w, images).item() == pytest.approx(expected, rel=1e-5)
    # D(x) = (x^2 / 2, x^2 / 2): the gradient of the sum is 2x.
    expected = sum((2 * image.norm().item() - 1) ** 2 for image in images) / 5
    found = gradient_penalty(lambda x: torch.stack([x.square() / 2] * 2), images)
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_penalty_leaves_the_images_alone_and_is_finite_where_the_gradient_vanishes() -> None:
    for value, requires_grad in ((1.0, True), (1.0, False), (0.0, False)):
        images = torch.rand(2, 3, 4, 4, requires_grad=requires_grad)
        scale = torch.full((), value, requires_grad=True)
        loss = gradient_penalty(lambda x, scale=scale: (x * scale).sum((1, 2, 3)), images)
        loss.backward()
        assert images.grad is None and images.requires_grad is requires_grad
        assert scale.grad is not None and scale.grad.isfinite() and (value or loss.item() == 1)


def test_losses_and_regulariser_of_several_heads_are_sums_over_the_heads() -> None:
    real, fake = [REAL, REAL[:2] / 2], [FAKE, FAKE * 3]
    for loss in ADVERSARIAL_LOSSES.values():
        expected = loss.discriminator(real[0], fake[0]) + loss.discriminator(real[1], fake[1])
        assert loss.discriminator(real, fake) == expected
        assert loss.generator(fake) == loss.generator(fake[0]) + loss.generator(fake[1])
        low = loss.discriminator(REAL.bfloat16(), FAKE.half()), loss.generator(FAKE.half())
        assert {each.dtype for each in low} == {torch.float32}
    both, first, second = LeCam(0.9, heads=2), LeCam(0.9), LeCam(0.9)
    for update in range(3):
        means = some(2, 2, seed=update)
        both.update(*means)
        for head, single in enumerate((first, second)):
            single.update(*means[:, head])
    assert both(real, fake) == first(real[0], fake[0]) + second(real[1], fake[1]) != 0


def test_a_head_without_logits_keeps_its_averages() -> None:
    lecam, untouched = LeCam(0.9, heads=2), LeCam(0.9, heads=2)
    for each in (lecam, untouched):
        each.update(torch.tensor([1.0, 2.0]), torch.tensor([-1.0, -2.0]))
    lecam.update(torch.tensor([3.0, math.nan]), torch.tensor([0.0, math.nan]))
    for name, averages in lecam.state_dict().items():
        before = untouched.state_dict()[name]
        assert averages.shape == (2,) and averages[0] != before[0] and averages[1] == before[1]
    assert lecam([REAL], [FAKE]) != untouched([REAL], [FAKE])
    assert {average.shape for average in LeCam().state_dict().values()} == {()}, "as in checkpoints of a single head"


def test_zero_centred_penalty_has_its_closed_forms() -> None:
    w, real, fake = some(3 * 4 * 4), some(5, 3, 4, 4), some(2, 3, 4, 4, seed=1)
    linear = zero_centred_penalty(lambda x: x.flatten(1) @ w, real, fake)
    torch.testing.assert_close(linear, 2 * w.square().sum())
    matrix = some(48, 48, seed=2)
    matrix = matrix + matrix.T

    def quadratic(x: Tensor) -> Tensor:
        return (x.flatten(1) @ matrix * x.flatten(1)).sum(1) / 2  # its gradient is the matrix times x

    expected = sum((x.flatten(1) @ matrix).square().sum(1).mean() for x in (real, fake))
    torch.testing.assert_close(zero_centred_penalty(quadratic, real, fake), expected)
    # Two heads, the second of which gives each image two logits, of which D(x) is the mean.
    of_both = zero_centred_penalty(lambda x: [x.flatten(1) @ w, torch.stack([quadratic(x)] * 2, 1)], real, fake)
    torch.testing.assert_close(of_both, linear + expected)


@pytest.mark.parametrize("penalty", ["one_centred", "zero_centred"])
def test_penalties_are_means_in_fp32_that_do_not_depend_on_how_the_batch_is_cut(penalty: str) -> None:
    torch.manual_seed(0)
    model, real, fake = Discriminator.from_dict({"dim": 4, "layers": 1}), torch.rand(6, 3, 8, 8), torch.rand(6, 3, 8, 8)

    def heads(x: Tensor) -> list[Tensor]:
        return [model(x), model(x.flip(1)) * 2]

    def of(start: int, end: int) -> Tensor:
        if penalty == "one_centred":
            return gradient_penalty(heads, real[start:end])
        return zero_centred_penalty(heads, real[start:end], fake[start:end])

    whole = of(0, 6)
    torch.testing.assert_close(torch.stack([of(0, 2), of(2, 4), of(4, 6)]).mean(), whole, rtol=1e-5, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(of(0, 6), whole, rtol=1e-6, atol=0)
    whole.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters() if p.dim() > 1)


@pytest.mark.parametrize(
    ("nll", "gan", "expected"),
    [([3, 4], [0, 0.5], 10), ([0.5], [0], 0.5 / 1e-4), ([5], [0], 1e4), ([0], [0], 0),
     ([math.nan], [1], math.nan), ([1], [math.nan], math.nan)],
)  # fmt: skip
def test_adaptive_weight_is_the_ratio_of_the_norms_capped_and_finite(nll: list, gan: list, expected: float) -> None:
    weight = adaptive_weight(*(torch.tensor(values, dtype=torch.float32, requires_grad=True) for values in (nll, gan)))
    assert weight.item() == pytest.approx(expected, nan_ok=True) and weight.shape == () and not weight.requires_grad
    assert adaptive_weight(torch.ones(1), torch.zeros(1), cap=7).item() == 7


@pytest.mark.parametrize("precision", [torch.float32, torch.float16])
def test_the_gradient_at_the_images_is_autograds_and_does_not_vanish_in_half_precision(precision: torch.dtype) -> None:
    weight = torch.tensor(3e-4, dtype=precision)
    images = torch.rand(2, 3, 32, 32, requires_grad=True)

    def loss() -> Tensor:
        return (images.to(precision) * weight).to(precision).float().mean()

    expected = torch.full_like(images, float(weight) / images.numel())  # 5e-8: below the smallest half, 6e-8
    ours = image_gradient(loss(), images)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=0)
    assert not ours.requires_grad
