"""Residual quantization: the codes of a reference implementation, an error that falls, and processes that agree."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import vector_quantize_pytorch as library
from torch import Tensor
from torch.nn import functional as F

from models import ResidualQuantizer
from models.quantizers import clustering
from tests.models.helpers import assert_same_bits, refused, some, state_of

DIM, LEVELS, SIZE = 6, 4, 5


def some_embeddings(seed: int = 1) -> Tensor:
    """Unit vectors, as the towers give them."""
    return F.normalize(some(48, DIM, seed=seed), dim=1)


def untrained(**options: Any) -> ResidualQuantizer:
    torch.manual_seed(0)
    return ResidualQuantizer(DIM, **{"num_quantizers": LEVELS, "codebook_size": SIZE, **options})


def trained(updates: int = 3, **options: Any) -> ResidualQuantizer:
    quantizer = untrained(**options)
    for step in range(1, updates + 1):
        quantizer(some_embeddings(step))
        quantizer.after_update(step, 0)
    return quantizer.eval()


def test_codes_and_updates_are_those_of_the_library() -> None:
    quantizer = trained(updates=1, revive_below=0.0).train()
    theirs = library.ResidualVQ(
        dim=DIM, num_quantizers=LEVELS, codebook_size=SIZE, decay=0.9, threshold_ema_dead_code=0, rotation_trick=False
    )
    books = [layer._codebook for layer in theirs.layers]
    for level, book in zip(quantizer.levels, books, strict=True):
        book.embed.data.copy_(level.codebook[None])
        book.embed_avg.data.copy_(level.code_sums[None])
        book.cluster_size.data.copy_(level.code_counts[None])
    for step in range(2, 5):
        out = quantizer(some_embeddings(step))
        quantized, codes, losses = theirs(some_embeddings(step)[None])
        assert torch.equal(out.codes, codes[0]) and len(out.codes.unique(dim=0)) > 10
        torch.testing.assert_close(out.quantized, quantized[0])
        torch.testing.assert_close(out.losses["commitment"], losses.flatten())
        quantizer.after_update(step, 0)
        for level, book in zip(quantizer.levels, books, strict=True):
            torch.testing.assert_close(level.codebook, book.embed[0], rtol=1e-5, atol=1e-6)


def test_encode_and_decode_give_the_codes_and_the_sum_of_forward_to_the_bit_under_autocast_too() -> None:
    quantizer, embeddings = trained(), some_embeddings(9)
    out, codes = quantizer(embeddings), quantizer.encode(embeddings)
    assert torch.equal(codes, out.codes) and torch.equal(quantizer.decode(codes), out.quantized)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(quantizer(embeddings).quantized, out.quantized) and out.quantized.dtype == torch.float32


def test_every_level_leaves_less() -> None:
    quantizer, embeddings = trained(updates=20), some_embeddings(1)
    codes, left = quantizer.encode(embeddings), quantizer(embeddings).losses["commitment"]
    errors = [F.mse_loss(quantizer.decode(codes[:, :k]), embeddings) for k in range(1, LEVELS + 1)]
    torch.testing.assert_close(left, torch.stack(errors))
    assert all(later < 0.95 * earlier for earlier, later in itertools.pairwise(errors))
    assert errors[0] < embeddings.var(0, unbiased=False).mean()


def test_gradients_go_straight_through_and_commitment_pulls_to_the_entries() -> None:
    quantizer, embeddings = trained(), some_embeddings(9).requires_grad_()
    weights = some(48, DIM, seed=2)
    out = quantizer(embeddings)
    (gradient,) = torch.autograd.grad((out.quantized * weights).sum(), embeddings, retain_graph=True)
    assert torch.equal(gradient, weights)
    (gradient,) = torch.autograd.grad(out.losses["commitment"][-1], embeddings)
    torch.testing.assert_close(gradient, 2 * (embeddings - out.quantized).detach() / embeddings.numel())


def test_the_first_batch_makes_the_first_entries_level_by_level() -> None:
    quantizer = untrained()
    quantizer(some_embeddings())
    residual = some_embeddings()
    for level in quantizer.levels:
        centres, _ = clustering.kmeans(residual, SIZE, normalize=lambda means: means)
        assert torch.equal(level.codebook, centres)
        residual = residual - centres[clustering.nearest(residual, centres)]


def test_neither_eval_mode_nor_encode_learns() -> None:
    quantizer = untrained()
    before = state_of(quantizer)
    quantizer.encode(some_embeddings())  # in train mode
    quantizer.eval()(some_embeddings())
    assert_same_bits(quantizer, before)
    with pytest.raises(RuntimeError, match="without a forward"):
        quantizer.train().after_update(1, 0)


def test_dead_entries_are_replaced_by_other_embeddings_on_every_level_and_by_seed() -> None:
    def revived(seed: int) -> list[int]:
        quantizer = trained(revive_below=0.01).train()
        for level in quantizer.levels:
            level.codebook[0] = level.code_sums[0] = 1e3
            level.code_counts[0] = 1e-4
        embeddings, codes = some_embeddings(7), quantizer(some_embeddings(7)).codes
        seen = [embeddings, *(embeddings - quantizer.decode(codes[:, :level]) for level in range(1, LEVELS))]
        quantizer.after_update(4, seed)
        pairs = zip(quantizer.levels, seen, strict=True)
        # Fails unless it is one.
        return [int(((level.codebook[0] - rows).abs().amax(1) < 1e-6).nonzero()) for level, rows in pairs]

    assert revived(0) == revived(0) != revived(1)
    assert len(set(revived(0))) > 1


def test_what_cannot_be_is_refused() -> None:
    quantizer = trained()
    assert "(2, 7)" in refused(quantizer, torch.zeros(2, DIM + 1))
    assert "(6,)" in refused(quantizer.encode, torch.zeros(DIM))
    for shape in ((2, LEVELS + 1), (2, 0), (2,)):
        assert str(shape) in refused(quantizer.decode, torch.zeros(shape, dtype=torch.int64))
