"""Residual quantization: the codes of a reference implementation, an error that falls, and processes that agree."""

from __future__ import annotations

from typing import Any

import torch
import vector_quantize_pytorch as library
from torch import Tensor
from torch.nn import functional as F

from models import ResidualQuantizer
from tests.models.helpers import refused, some

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


def test_gradients_go_straight_through_and_commitment_pulls_to_the_entries() -> None:
    quantizer, embeddings = trained(), some_embeddings(9).requires_grad_()
    weights = some(48, DIM, seed=2)
    out = quantizer(embeddings)
    (gradient,) = torch.autograd.grad((out.quantized * weights).sum(), embeddings, retain_graph=True)
    assert torch.equal(gradient, weights)
    (gradient,) = torch.autograd.grad(out.losses["commitment"][-1], embeddings)
    torch.testing.assert_close(gradient, 2 * (embeddings - out.quantized).detach() / embeddings.numel())


def test_what_cannot_be_is_refused() -> None:
    quantizer = trained()
    assert "(2, 7)" in refused(quantizer, torch.zeros(2, DIM + 1))
    assert "(6,)" in refused(quantizer.encode, torch.zeros(DIM))
    for shape in ((2, LEVELS + 1), (2, 0), (2,)):
        assert str(shape) in refused(quantizer.decode, torch.zeros(shape, dtype=torch.int64))
