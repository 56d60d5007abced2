"""The losses against their formulas written as sums, and shared batches against whole ones; processes are threads."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.training.losses.contrastive import KINDS, Contrastive, ContrastiveResult
from tests.processes import Process, on_processes

SIZES = [[9], [5, 4], [2, 0, 6, 1], [1] * 9]
CAPTIONS = [3, 7, 3, 1, 2**62 + 1, 2**62, 3, 0, 7]  # with twins; two that fp64 cannot tell apart


def unit_vectors(pairs: int, heads: int = 2, dim: int = 3, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(pairs)
    both = torch.randn(2, pairs, heads, dim, dtype=torch.float64, generator=generator)
    return list(F.normalize(both, dim=-1).to(dtype))


def make(pairs: int = 9, heads: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """audio, text, scale, bias, caption ids."""
    scale, bias = torch.tensor([5.0, 14.0, 2.0])[:heads], torch.tensor([-1.0, -10.0, 0.5])[:heads]
    return [*unit_vectors(pairs, heads, dtype=dtype), scale.to(dtype), bias.to(dtype), torch.tensor(CAPTIONS[:pairs])]


def by_the_formula(
    kind: str, audio: Tensor, text: Tensor, scale: Tensor, bias: Tensor, captions: Tensor, mask: bool = True
) -> Tensor:
    """One pair after the other, on one process."""
    n, heads, _ = audio.shape
    total = torch.zeros((), dtype=audio.dtype)
    for h in range(heads):
        s = [[scale[h] * audio[i, h] @ text[j, h] for j in range(n)] for i in range(n)]
        for i in range(n):
            negatives = [j for j in range(n) if j != i and not (mask and captions[i] == captions[j])]
            if kind == "sigmoid":
                total = total - torch.log(torch.sigmoid(s[i][i] + bias[h]))
                for j in negatives:
                    total = total - torch.log(torch.sigmoid(-s[i][j] - bias[h]))
                continue
            denominator = negatives if kind == "decoupled" else [*negatives, i]
            if not denominator:
                continue
            rows = sum(torch.exp(s[i][j]) for j in denominator)
            columns = sum(torch.exp(s[j][i]) for j in denominator)
            total = total - s[i][i] + (torch.log(rows) + torch.log(columns)) / 2
    return total / n


def expected(kind: str, inputs: list[Tensor], mask: bool = True) -> list[Tensor]:
    """The loss and its gradients."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs[:4]]
    loss = by_the_formula(kind, *leaves, inputs[4], mask)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True)]


def shared(kind: str, inputs: list[Tensor], sizes: list[int], **options: Any) -> list[ContrastiveResult]:
    """What each process finds."""
    audio, text, scale, bias, captions = inputs
    bounds = list(itertools.accumulate(sizes, initial=0))

    def work(processes: Process) -> ContrastiveResult:
        own = slice(bounds[processes.rank], bounds[processes.rank + 1])
        loss = Contrastive(kind, processes, **options)
        return loss.value_and_gradients(audio[own], text[own], scale, bias, captions[own])

    return on_processes(len(sizes), work)


def joined(results: list[ContrastiveResult]) -> list[Tensor]:
    """The same as one process would say it; what is said to be equal everywhere is."""
    for other in results[1:]:
        for name in ("loss", "scale_gradient", "bias_gradient", "audio_variance", "text_variance"):
            assert torch.equal(getattr(other, name), getattr(results[0], name)), name
    rows = [torch.cat([getattr(r, name) for r in results]) for name in ("audio_gradient", "text_gradient")]
    return [results[0].loss, *rows, results[0].scale_gradient, results[0].bias_gradient]


def assert_equal(got: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-12) -> None:
    for name, ours, theirs in zip(("loss", "audio", "text", "scale", "bias"), got, wanted, strict=True):
        assert ours.shape == theirs.shape, name
        scale = max(float(theirs.abs().max()), 1e-3) if theirs.numel() else 1.0
        assert float((ours - theirs).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize("whole", [False, True], ids=["shared", "whole"])
@pytest.mark.parametrize("mask", [True, False], ids=["masked", "unmasked"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradients_of_ragged_parts_are_those_of_the_formula(
    kind: str, sizes: list[int], mask: bool, whole: bool
) -> None:
    """Masks have the size of the global batch: with a local one (musiclm-pytorch) the wrong pairs are left out."""
    inputs = make()
    results = shared(kind, inputs, sizes, mask_duplicates=mask, is_replicated=whole)
    assert [len(result.audio_gradient) for result in results] == sizes
    assert_equal(joined(results), expected(kind, inputs, mask))
    assert abs(float(results[0].loss - by_the_formula(kind, *inputs, not mask))) > 1e-3, "what is masked is not nothing"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("captions", [[0, 1, 2, 3, 4, 5, 6], [0, 1, 0, 2, 1, 0, 3], [0, 0, 0, 0, 0, 0, 1]])
def test_the_collapsed_value_is_the_loss_of_equal_embeddings(kind: str, captions: list[int]) -> None:
    """Repeated captions are no negatives, and there is less to lose. Of the sigmoid loss: with the best bias, for which
    the probability of a pair is the share of the pairs."""
    same, ids = torch.ones(7, 2, 4, dtype=torch.float64) / 2, torch.tensor(captions)
    scales = torch.full((2,), 7.0, dtype=torch.float64)
    negatives = int((ids[:, None] != ids).sum())
    losses = []
    for off in (0.0, -0.1, 0.1):
        bias = torch.full((2,), math.log(7 / negatives) - 7.0 + off, dtype=torch.float64)
        result = shared(kind, [same, same, scales, bias, ids], [3, 0, 4])[1]
        losses.append(float(result.loss))
    assert float(result.collapsed_loss) == pytest.approx(losses[0], rel=1e-12)
    assert kind != "sigmoid" or losses[0] == min(losses)


@pytest.mark.parametrize("whole", [False, True], ids=["shared", "whole"])
@pytest.mark.parametrize("sizes", [[1], [4], [1, 3]], ids=str)
@pytest.mark.parametrize("kind", ["softmax", "decoupled"])
def test_where_nothing_is_a_negative_nothing_is_learned_and_nothing_is_nan(
    kind: str, sizes: list[int], whole: bool
) -> None:
    inputs = make(sum(sizes))
    inputs[4] = torch.full((sum(sizes),), 5)  # all captions are the same
    got = joined(shared(kind, inputs, sizes, is_replicated=whole))
    assert_equal(got, [torch.zeros_like(tensor) for tensor in got])


@pytest.mark.parametrize("kind", KINDS)
def test_largest_logits_neither_overflow_nor_vanish(kind: str) -> None:
    """At a temperature of 100, its clamp, exp(s) overflows in fp32."""
    inputs = make(dtype=torch.float32)
    inputs[2] = torch.full((2,), 100.0)
    doubles = [tensor.double() for tensor in inputs[:4]]
    got = [tensor.double() for tensor in joined(shared(kind, inputs, [4, 5]))]
    assert all(bool(tensor.isfinite().all()) for tensor in got)
    # A logit of 100 is known to 100 x 6e-8, its exponential to as much of itself.
    wanted = joined(shared(kind, [*doubles, inputs[4]], [4, 5]))
    assert_equal(got, wanted, tolerance=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_in_and_around_it_is_computed_in_fp32(kind: str) -> None:
    inputs = make()
    low = [inputs[0].bfloat16(), inputs[1].bfloat16(), *(tensor.float() for tensor in inputs[2:4]), inputs[4]]
    high = [tensor.double() for tensor in low[:4]]
    (plain,) = shared(kind, low, [9])
    with torch.autocast("cpu", dtype=torch.bfloat16):  # threads of their own would not see it
        around = Contrastive(kind, Process()).value_and_gradients(*low)
    assert plain.loss.dtype == plain.audio_gradient.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(plain, around, strict=True))
    assert_equal([t.double() for t in joined([plain])], expected(kind, [*high, inputs[4]]), tolerance=2e-6)


@pytest.mark.parametrize("sizes", [[9], [4, 5], [3, 0, 5, 1]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_whole_mode_has_the_same_bits_on_any_number_of_processes(kind: str, sizes: list[int]) -> None:
    inputs = make(dtype=torch.float32)
    one, several = (joined(shared(kind, inputs, sizes, is_replicated=True)) for sizes in ([9], sizes))
    assert all(torch.equal(a, b) for a, b in zip(one, several, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_on_one_process_reaches_every_process(kind: str) -> None:
    inputs = make()
    inputs[0][8] = torch.nan
    assert all(bool(result.loss.isnan()) for result in shared(kind, inputs, [5, 4]))
