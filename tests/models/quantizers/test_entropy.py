"""Entropy losses against sums over all codes, and shares of a batch against the whole of it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.models.quantizers import index_backprop
from tandem.models.quantizers.base import Quantizer
from tandem.models.quantizers.entropy import SignEntropy
from tests.models.helpers import in_rows, quantizer_of, some
from tests.processes import on_processes

# Soft enough for every code to have a part in every vector.
SOFT: dict[str, dict[str, Any]] = {
    "lfq": {"codebook_size": 64, "inv_temperature": 0.4, "diversity_gamma": 0.7},
    "bsq": {"codebook_size": 64, "inv_temperature": 1.5, "diversity_gamma": 0.7},
    "ibq": {"codebook_size": 11, "codebook_dim": 6, "diversity_gamma": 0.7},
}
TEMPERATURE = 1.3  # of IBQ
with_entropy = pytest.mark.parametrize("name", SOFT)


@pytest.fixture(autouse=True)
def _soft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_backprop, "_TEMPERATURE", TEMPERATURE)


def soft(name: str) -> Quantizer:
    return quantizer_of(name, **SOFT[name])


def some_z(batch: int = 12, dim: int = 6) -> Tensor:
    """Vectors whose mean is not 0, so that their codes are not used alike."""
    return some(batch, dim, 2, 2) + torch.linspace(-1, 1, dim).view(dim, 1, 1)


def corners(bits: int) -> Tensor:
    codes = torch.arange(2**bits)
    return torch.stack([codes >> shift & 1 for shift in range(bits - 1, -1, -1)], dim=1).double() * 2 - 1


def entropy(p: Tensor) -> Tensor:
    return -torch.special.xlogy(p, p).sum(-1)


def written_out(name: str, z: Tensor, codebook: Tensor | None) -> dict[str, Tensor]:
    """The losses of the vectors z (b, d, h, w), fp64, from probabilities of all codes."""
    rows = in_rows(z)
    options = SOFT[name]
    if name == "ibq":
        assert codebook is not None
        logits = rows @ codebook.T / TEMPERATURE
        choice = (rows @ codebook.T).softmax(1)
        hard = F.one_hot(choice.argmax(1), len(codebook)).double()
        entries = hard @ codebook
        chosen = (hard + choice - choice.detach()) @ codebook
        commitment = F.mse_loss(chosen, rows) + F.mse_loss(rows, entries.detach())
        commitment = commitment + 0.25 * F.mse_loss(entries, rows.detach())
    else:
        if name == "bsq":
            rows = rows / rows.norm(dim=1, keepdim=True)
        entries = corners(6) / (math.sqrt(6) if name == "bsq" else 1)
        logits = 2 * options["inv_temperature"] * rows @ entries.T
        commitment = F.mse_loss(rows, rows.detach().sign() * entries.max())
    p = logits.softmax(1)
    return {"commitment": commitment, "entropy": entropy(p).mean() - 0.7 * entropy(p.mean(0))}


def expected(name: str, quantizer: Quantizer, z: Tensor, loss: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Value, gradient of z, gradient of the codebook where it is trained."""
    z = z.double().requires_grad_()
    codebook = quantizer.codebook.weight.detach().double().requires_grad_() if name == "ibq" else None
    value = written_out(name, z, codebook)[loss]
    value.backward()
    assert z.grad is not None
    return value.detach(), z.grad, None if codebook is None else codebook.grad


def assert_equal(actual: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    assert (actual.double() - expected).norm() <= tolerance * expected.norm()


def test_the_losses_of_huge_vectors_are_finite_and_so_are_their_gradients() -> None:
    quantizer = quantizer_of("lfq", codebook_size=2**10)
    z = (1e4 * some_z(dim=10)).requires_grad_()
    losses = quantizer(z).losses
    sum(losses.values()).backward()
    assert all(loss.isfinite() for loss in losses.values()) and z.grad.isfinite().all()


@pytest.mark.parametrize("bits_per_group", [1, 2, 4])
def test_entropies_of_groups_of_bits_add_up_to_a_bound_of_the_entropy_of_all(bits_per_group: int) -> None:
    z = some_z()
    p = (0.8 * in_rows(z.double()) @ corners(6).T).softmax(1).view(-1, *[2] * 6).mean(0)
    sizes = {1: [1] * 6, 2: [2] * 3, 4: [3, 3]}[bits_per_group]  # as even as can be
    h_batch, first = torch.zeros(()), 0
    for size in sizes:
        others = [bit for bit in range(6) if not first <= bit < first + size]
        h_batch = h_batch + entropy(p.sum(others).flatten())
        first += size
    losses = [
        SignEntropy(6, 1.6, gamma, bits)(in_rows(z), None).item()
        for bits, gamma in ((bits_per_group, 0.0), (bits_per_group, 1.0), (6, 1.0))
    ]
    assert losses[0] - losses[1] == pytest.approx(h_batch.item(), rel=1e-6)
    assert losses[1] < losses[2]


def test_what_was_observed_counts_neither_in_eval_mode_nor_after_the_update() -> None:
    quantizer, z = soft("lfq"), some_z()
    with pytest.raises(RuntimeError, match="nothing to reduce"):
        quantizer.reduce_stats()
    quantizer.accumulate_stats(z + 3)
    quantizer.reduce_stats()
    value, _, _ = expected("lfq", quantizer, z, "entropy")
    assert_equal(quantizer.eval()(z).losses["entropy"], value)
    assert (quantizer.train()(z).losses["entropy"] - value).abs() > 0.01
    quantizer.after_step(1, 0)
    assert_equal(quantizer(z).losses["entropy"].detach(), value)


@with_entropy
@pytest.mark.parametrize(("world_size", "micro_batches"), [(1, 1), (1, 3), (3, 1), (3, 2), (2, 6)])
@pytest.mark.parametrize("loss", ["entropy", "commitment"])
def test_shares_of_a_batch_average_to_the_losses_and_gradients_of_the_formula_over_all_codes(
    name: str, world_size: int, micro_batches: int, loss: str
) -> None:
    whole, first = some_z(), soft(name)

    def share_of(process: Any) -> tuple[Tensor, Tensor, Tensor | None, list[str]]:
        quantizer = copy.deepcopy(first)
        quantizer.connect(process)
        parts = whole.chunk(world_size)[process.rank].chunk(micro_batches)
        if micro_batches > 1:
            for part in parts:
                quantizer.accumulate_stats(part)
            quantizer.reduce_stats()
        leaves = [part.clone().requires_grad_() for part in parts]
        values = [quantizer(leaf).losses[loss] for leaf in leaves]
        for value in values:
            (value / micro_batches).backward()
        quantizer.after_step(1, 0)
        gradient = torch.cat([leaf.grad for leaf in leaves])
        codebook_gradient = quantizer.codebook.weight.grad if name == "ibq" else None
        calls = process.comm.calls if world_size > 1 else ["sum"]
        return torch.stack(values).mean().detach(), gradient, codebook_gradient, calls

    values, gradients, codebook_gradients, collectives = zip(*on_processes(world_size, share_of), strict=True)
    value, gradient, codebook_gradient = expected(name, first, whole, loss)
    assert_equal(torch.stack(values).mean(), value)
    assert_equal(torch.cat(gradients) / world_size, gradient)
    if codebook_gradient is not None:
        assert_equal(torch.stack(codebook_gradients).mean(0), codebook_gradient)
    assert {len(calls) for calls in collectives} == {1}
