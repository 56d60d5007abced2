"""The codebook of moving averages: updates, first entries, dead entries, and all of it on several processes."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import vector_quantize_pytorch as library
from torch import Tensor
from torch.nn import functional as F
from vector_quantize_pytorch.vector_quantize_pytorch import rotate_to

from tandem.models.quantizers.vector import VectorQuantizer, kmeans, random_indices, rotation_trick
from tests.models.helpers import assert_same_bits, in_rows, quantizer_of, some, state_of
from tests.processes import on_processes


def some_vectors(batch: int = 12, seed: int = 1) -> Tensor:
    return some(batch, 5, 2, 2, seed=seed)


def started(
    codebook_size: int = 7, decay: float = 0.8, cosine: bool = False, kmeans_init: bool = False,
    revive_below: float = 0.0, gradient: str = "straight_through",
) -> VectorQuantizer:  # fmt: skip
    """With random entries and no revival, unless asked for."""
    quantizer = quantizer_of(
        "vq", codebook_size=codebook_size, codebook_dim=5, vq_decay=decay, vq_cosine=cosine, vq_gradient=gradient
    )
    assert isinstance(quantizer, VectorQuantizer)
    quantizer.revive_below = revive_below
    quantizer.initialized.fill_(not kmeans_init)
    return quantizer


def update(quantizer: VectorQuantizer, z: Tensor, step: int = 1, **more: Any) -> None:
    quantizer(z)
    quantizer.after_step(step, 0, **more)


def test_the_loss_pulls_vectors_to_their_entries() -> None:
    quantizer, z = started(), some_vectors().requires_grad_()
    out = quantizer(z)
    out.losses["commitment"].backward()
    torch.testing.assert_close(z.grad, 2 * (z - out.quantized).detach() / z.numel())


@pytest.mark.parametrize("cosine", [False, True])
def test_with_the_rotation_trick_the_gradient_is_the_librarys_and_the_value_stays_the_entry(cosine: bool) -> None:
    quantizer = started(cosine=cosine, gradient="rotation")
    z = some_vectors().requires_grad_()
    out = quantizer(z)
    assert torch.equal(out.quantized, quantizer.decode_codes(out.codes))
    weights = some(*z.shape, seed=3)
    (out.quantized * weights).sum().backward()
    other = z.detach().clone().requires_grad_()
    rows = in_rows(F.normalize(other, dim=1) if cosine else other)
    (rotate_to(rows, in_rows(out.quantized.detach())) * in_rows(weights)).sum().backward()
    torch.testing.assert_close(z.grad, other.grad, rtol=1e-3, atol=1e-4)


def test_a_vector_without_direction_or_opposite_to_its_entry_has_a_finite_gradient() -> None:
    entries = some(4, 5)
    vectors = torch.cat([-entries[:2], torch.zeros(1, 5), 1e-12 * entries[3:]]).requires_grad_()
    rotation_trick(vectors, entries).sum().backward()
    assert vectors.grad.isfinite().all() and vectors.grad.abs().max() < 1e8
    torch.testing.assert_close(rotation_trick(vectors, entries)[:2], entries[:2])


@pytest.mark.parametrize("cosine", [False, True])
def test_updates_agree_with_the_library(cosine: bool) -> None:
    quantizer = started(decay=0.8, cosine=cosine)
    theirs = library.VectorQuantize(
        dim=5, codebook_size=7, decay=0.8, use_cosine_sim=cosine, threshold_ema_dead_code=0, rotation_trick=False
    )
    book = theirs._codebook
    for buffer in (book.embed, book.embed_avg):
        buffer.data.copy_(quantizer.codebook[None])
    for step in range(1, 5):
        z = some_vectors(seed=step)
        out = quantizer(z)
        _, codes, commitment = theirs(z.movedim(1, -1).flatten(1, 2))
        assert torch.equal(out.codes.flatten(), codes.flatten())
        torch.testing.assert_close(out.losses["commitment"], commitment.squeeze())
        quantizer.after_step(step, 0)
        torch.testing.assert_close(quantizer.codebook, book.embed[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(quantizer.code_counts, book.cluster_size[0])


@pytest.mark.parametrize("kmeans_init", [False, True])
def test_with_cosine_vectors_and_entries_have_length_one(kmeans_init: bool) -> None:
    quantizer = started(cosine=True, revive_below=0.5, kmeans_init=kmeans_init)
    for step in range(1, 4):
        update(quantizer, 10 * some_vectors(seed=step), step)
        torch.testing.assert_close(quantizer.codebook.norm(dim=1), torch.ones(7))
    assert quantizer(10 * some_vectors()).losses["commitment"] < 4 / 5


def test_a_skipped_update_leaves_the_codebook_as_it_was() -> None:
    quantizer = started(revive_below=0.5)
    update(quantizer, some_vectors())
    before = state_of(quantizer)
    update(quantizer, torch.full((12, 5, 2, 2), math.nan), 2, skipped=torch.tensor(True))
    assert_same_bits(quantizer, before)
    other = started(revive_below=0.5)
    update(other, some_vectors(), skipped=torch.tensor(False))
    assert_same_bits(other, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_averages_stay_fp32_when_the_model_is_cast(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 1), started())
    before = state_of(model[1])
    model.to(dtype)
    assert model[0].weight.dtype == dtype
    assert_same_bits(model[1], before)
    assert model[1].codebook.dtype == torch.float32


def test_k_means_ends_where_every_centre_is_the_mean_of_what_is_nearest_to_it() -> None:
    vectors = in_rows(some_vectors())
    centres, counts = kmeans(vectors, 4, normalize=lambda means: means, iterations=50)
    codes = torch.cdist(vectors, centres).argmin(1)
    assert counts.tolist() == torch.bincount(codes, minlength=4).tolist()
    for code in range(4):
        torch.testing.assert_close(centres[code], vectors[codes == code].mean(0))


def test_the_first_batch_in_train_mode_makes_the_first_entries() -> None:
    quantizer = started(kmeans_init=True)
    assert quantizer.needs_stats and not quantizer.is_initialized
    quantizer.eval()(some_vectors())
    assert not quantizer.is_initialized
    before = quantizer.train()(some_vectors()).losses["commitment"]
    assert quantizer.is_initialized and not quantizer.needs_stats
    expected, counts = kmeans(in_rows(some_vectors()), 7, normalize=lambda means: means)
    assert torch.equal(quantizer.codebook, expected) and torch.equal(quantizer.code_counts, counts)
    assert before < started()(some_vectors()).losses["commitment"]


def test_with_fewer_vectors_than_codes_each_vector_is_an_entry() -> None:
    quantizer = started(codebook_size=30, kmeans_init=True)
    assert quantizer(some_vectors(batch=2)).losses["commitment"] == 0
    is_same = (quantizer.codebook[:, None] == in_rows(some_vectors(batch=2))).all(2)
    assert is_same.any(0).all() and is_same.any(1).all() and quantizer.code_counts.sum() == 8


def test_a_first_batch_that_is_not_finite_makes_no_entries_and_loading_none_starts_again() -> None:
    quantizer = started(kmeans_init=True)
    before = state_of(quantizer)
    update(quantizer, torch.full((3, 5, 2, 2), math.nan), skipped=torch.tensor(True))
    assert_same_bits(quantizer, before)
    quantizer(some_vectors())
    assert quantizer.is_initialized and quantizer.codebook.isfinite().all()
    quantizer.load_state_dict(before)
    assert not quantizer.is_initialized


def with_a_dead_entry() -> VectorQuantizer:
    """Entry 0 lies so far away that nobody chooses it, and its count is almost gone."""
    quantizer = started(revive_below=0.01)
    quantizer.codebook[0] = quantizer.code_sums[0] = 1e3
    quantizer.code_counts[0] = 1e-4
    return quantizer


@pytest.mark.parametrize(("seed", "step"), [(0, 1), (0, 2), (5, 2)])
def test_a_dead_entry_becomes_the_vector_drawn_by_seed_and_step_and_no_other_changes(seed: int, step: int) -> None:
    quantizer, other, z = with_a_dead_entry(), with_a_dead_entry(), some_vectors()
    other.revive_below = 0.0
    for one in (quantizer, other):
        one(z)
        one.after_step(step, seed)
    assert (other.codebook[0] > 500).all() and torch.equal(quantizer.codebook[1:], other.codebook[1:])
    drawn = random_indices(7, 48, seed, step, device=torch.device("cpu"))[0]
    assert torch.equal(quantizer.codebook[0], in_rows(z)[drawn])
    assert quantizer.code_counts[0] == pytest.approx(quantizer.code_counts[1:].mean().item(), rel=0.2)
    torch.testing.assert_close(quantizer.code_sums[0], quantizer.codebook[0] * quantizer.code_counts[0])


def test_vectors_are_drawn_evenly_as_a_function_of_seed_step_and_code() -> None:
    def drawn(count: int, bound: int, seed: int, step: int) -> Tensor:
        return random_indices(count, bound, seed, step, device=torch.device("cpu"))

    assert torch.equal(drawn(40, 1000, 3, 7), drawn(40, 1000, 3, 7))
    assert len({tuple(drawn(40, 1000, seed, step).tolist()) for seed in range(5) for step in range(5)}) == 25
    assert len(drawn(40, 1000, 3, 7).unique()) > 35
    counts = torch.cat([drawn(1000, 10, 0, step) for step in range(100)]).bincount(minlength=10).double()
    assert ((counts - 10_000).square() / 10_000).sum() < 27.9  # chi-squared, 9 degrees of freedom: p = 0.001


@pytest.mark.parametrize(("world_size", "micro_batches"), [(1, 4), (3, 1), (3, 2), (2, 3)])
@pytest.mark.parametrize("cosine", [False, True])
def test_any_number_of_processes_and_micro_batches_makes_the_same_codebook(
    world_size: int, micro_batches: int, cosine: bool
) -> None:
    """With first entries, averages and revived entries."""
    first = started(codebook_size=20, kmeans_init=True, revive_below=0.3, cosine=cosine)

    def train(process: Any, micro_batches: int) -> tuple[VectorQuantizer, int]:
        quantizer, revived = copy.deepcopy(first), 0
        quantizer.connect(process)
        for step in range(1, 6):
            z = some_vectors(seed=step)
            parts = z.chunk(process.world_size)[process.rank].chunk(micro_batches)
            if len(parts) > 1 and quantizer.needs_stats:
                for part in parts:
                    quantizer.accumulate_stats(part)
                quantizer.reduce_stats()
            for part in parts:
                quantizer(part)
            quantizer.after_step(step, 0)
            rows = F.normalize(in_rows(z), dim=1) if cosine else in_rows(z)
            revived += int((torch.cdist(quantizer.codebook, rows) < 1e-5).any(1).sum())
        return quantizer, revived

    ((alone, revived),) = on_processes(1, lambda process: train(process, 1))
    assert revived > 0
    for quantizer, _ in on_processes(world_size, lambda process: train(process, micro_batches)):
        assert_same_bits(quantizer, alone)
