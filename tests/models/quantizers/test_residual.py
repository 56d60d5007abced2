"""Residual quantization: the codes of a reference implementation, an error that falls, and processes that agree."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import vector_quantize_pytorch as library
from torch import Tensor
from torch.nn import functional as F

from models import ResidualQuantizer
from models.quantizers import clustering

Run = Callable[[int, Callable[[Any], Any]], list[Any]]
DIM, LEVELS, SIZE = 6, 4, 5


def some_embeddings(n: int = 48, seed: int = 1) -> Tensor:
    """Unit vectors, as the towers give them."""
    return F.normalize(torch.randn(n, DIM, generator=torch.Generator().manual_seed(seed)), dim=1)


def untrained(**options: Any) -> ResidualQuantizer:
    torch.manual_seed(0)
    return ResidualQuantizer(DIM, **{"num_quantizers": LEVELS, "codebook_size": SIZE, **options})


def trained(updates: int = 3, **options: Any) -> ResidualQuantizer:
    quantizer = untrained(**options)
    for step in range(1, updates + 1):
        quantizer(some_embeddings(seed=step))
        quantizer.after_update(step, 0)
    return quantizer.eval()


def state_of(quantizer: ResidualQuantizer) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in quantizer.state_dict().items()}


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def of_the_library(quantizer: ResidualQuantizer, **options: Any) -> Any:
    """A `ResidualVQ` with the same codebooks."""
    theirs = library.ResidualVQ(
        dim=DIM, num_quantizers=LEVELS, codebook_size=SIZE, threshold_ema_dead_code=0, rotation_trick=False, **options
    )
    for level, layer in zip(quantizer.levels, theirs.layers, strict=True):
        book = layer._codebook
        book.embed.data.copy_(level.codebook[None])
        book.embed_avg.data.copy_(level.code_sums[None])
        book.cluster_size.data.copy_(level.code_counts[None])
    return theirs


# Codes.


def test_codes_and_sums_are_those_of_the_library() -> None:
    quantizer, embeddings = trained(), some_embeddings(seed=9)
    out = quantizer(embeddings)
    quantized, codes, _ = of_the_library(quantizer).eval()(embeddings[None])
    assert len(out.codes.unique(dim=0)) > 10
    assert torch.equal(out.codes, codes[0])
    torch.testing.assert_close(out.quantized, quantized[0])


def test_updates_are_those_of_the_library() -> None:
    quantizer = trained(updates=1, revive_below=0.0).train()
    theirs = of_the_library(quantizer, decay=0.9)
    for step in range(2, 5):
        embeddings = some_embeddings(seed=step)
        out = quantizer(embeddings)
        _, codes, losses = theirs(embeddings[None])
        assert torch.equal(out.codes, codes[0])
        torch.testing.assert_close(out.losses["commitment"], losses.flatten())
        quantizer.after_update(step, 0)
        for level, layer in zip(quantizer.levels, theirs.layers, strict=True):
            torch.testing.assert_close(level.codebook, layer._codebook.embed[0], rtol=1e-5, atol=1e-6)


def test_codes_are_nearest_to_what_is_left() -> None:
    quantizer, embeddings = trained(), some_embeddings(seed=9)
    residual = embeddings.double()
    for column, level in zip(quantizer.encode(embeddings).unbind(1), quantizer.levels, strict=True):
        assert torch.equal(column, torch.cdist(residual, level.codebook.double()).argmin(1))
        residual = residual - level.codebook.double()[column]


def test_decoding_is_the_sum_of_the_entries() -> None:
    quantizer = trained()
    codes = torch.tensor([[0, 1, 2, 3], [4, 0, 4, 0]])
    books = [level.codebook for level in quantizer.levels]
    expected = torch.stack(
        [books[0][0] + books[1][1] + books[2][2] + books[3][3], sum(books[i][4 * (1 - i % 2)] for i in range(4))]
    )
    torch.testing.assert_close(quantizer.decode(codes), expected)


def test_decoding_the_codes_is_the_quantized_of_forward_to_the_bit() -> None:
    quantizer, embeddings = trained(), some_embeddings(seed=9)
    assert torch.equal(quantizer.decode(quantizer.encode(embeddings)), quantizer(embeddings).quantized)


def test_a_sum_of_well_separated_entries_is_encoded_without_error() -> None:
    """With the entries of level k of the order 10^-k, every sum of entries finds its own codes again."""
    quantizer = untrained().eval()
    for k, level in enumerate(quantizer.levels):
        level.codebook.copy_(torch.eye(DIM)[:SIZE] * 10.0**-k)
    codes = torch.randint(0, SIZE, (50, LEVELS), generator=torch.Generator().manual_seed(0))
    assert torch.equal(quantizer.encode(quantizer.decode(codes)), codes)


def test_every_level_leaves_less() -> None:
    quantizer, embeddings = trained(updates=20), some_embeddings(seed=1)
    codes, left = quantizer.encode(embeddings), quantizer(embeddings).losses["commitment"]
    errors = [F.mse_loss(quantizer.decode(codes[:, :k]), embeddings) for k in range(1, LEVELS + 1)]
    torch.testing.assert_close(left, torch.stack(errors))
    assert all(later < 0.95 * earlier for earlier, later in itertools.pairwise(errors))
    assert errors[0] < embeddings.var(0, unbiased=False).mean()


def test_gradients_go_straight_through_and_commitment_pulls_to_the_entries() -> None:
    quantizer, embeddings = trained(), some_embeddings(seed=9).requires_grad_()
    weights = torch.randn(48, DIM, generator=torch.Generator().manual_seed(2))
    out = quantizer(embeddings)
    (gradient,) = torch.autograd.grad((out.quantized * weights).sum(), embeddings, retain_graph=True)
    assert torch.equal(gradient, weights)
    (gradient,) = torch.autograd.grad(out.losses["commitment"][-1], embeddings)
    torch.testing.assert_close(gradient, 2 * (embeddings - out.quantized).detach() / embeddings.numel())


# Learning.


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
    assert_same_bits(state_of(quantizer), before)
    with pytest.raises(RuntimeError, match="without a forward"):
        quantizer.after_update(1, 0)


def test_dead_entries_are_replaced_by_other_embeddings_on_every_level_and_by_seed() -> None:
    def revived(seed: int) -> list[Tensor]:
        quantizer, embeddings = trained(revive_below=0.01).train(), some_embeddings(seed=7)
        for level in quantizer.levels:
            level.codebook[0] = level.code_sums[0] = 1e3
            level.code_counts[0] = 1e-4
        quantizer(embeddings)
        seen = [torch.cat(level._vectors) for level in quantizer.levels]
        quantizer.after_update(4, seed)
        found = [
            (level.codebook[0] == rows).all(1).nonzero() for level, rows in zip(quantizer.levels, seen, strict=True)
        ]
        assert all(len(rows) == 1 for rows in found)
        return [int(rows) for rows in found]

    assert revived(0) == revived(0) != revived(1)
    assert len(set(revived(0))) > 1


def test_a_skipped_update_leaves_the_codebooks_as_they_were() -> None:
    quantizer = trained().train()
    before = state_of(quantizer)
    quantizer(torch.full((3, DIM), math.nan))
    quantizer.after_update(4, 0, skipped=torch.tensor(True))
    assert_same_bits(state_of(quantizer), before)


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_number_of_processes_learns_the_same_codebooks(world_size: int, processes: Run) -> None:
    first = untrained(revive_below=0.3)

    def train(process: Any, world_size: int) -> dict[str, Tensor]:
        quantizer = copy.deepcopy(first)
        quantizer.connect(process.all_reduce, process.gather, process.rank, world_size)
        for step in range(1, 5):
            quantizer(some_embeddings(seed=step).chunk(world_size)[process.rank])
            quantizer.after_update(step, 0)
        return state_of(quantizer)

    (alone,) = processes(1, lambda process: train(process, 1))
    assert_same_bits(alone, state_of(_trained_alone(first)))
    for state in processes(world_size, lambda process: train(process, world_size)):
        assert_same_bits(state, alone)


def _trained_alone(first: ResidualQuantizer) -> ResidualQuantizer:
    quantizer = copy.deepcopy(first)
    for step in range(1, 5):
        quantizer(some_embeddings(seed=step))
        quantizer.after_update(step, 0)
    return quantizer


def test_autocast_changes_nothing() -> None:
    quantizer, embeddings = trained(), some_embeddings(seed=9)
    with torch.autocast("cpu", torch.bfloat16):
        out = quantizer(embeddings)
    assert out.quantized.dtype == torch.float32
    assert torch.equal(out.quantized, quantizer(embeddings).quantized)


# Files.


def test_the_defaults_are_those_of_musiclm() -> None:
    config = ResidualQuantizer(2).config
    assert (config["num_quantizers"], config["codebook_size"], config["decay"]) == (12, 1024, 0.9)


def test_a_saved_quantizer_learns_on(tmp_path: Path) -> None:
    quantizer = trained()
    quantizer.save_pretrained(tmp_path)
    loaded = ResidualQuantizer.from_pretrained(tmp_path)
    for one in (quantizer.train(), loaded.train()):
        one(some_embeddings(seed=8))
        one.after_update(4, 0)
    assert_same_bits(state_of(loaded), state_of(quantizer))


# Mistakes.


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda q: q(torch.zeros(2, DIM + 1)), r"\(2, 7\), not \(b, 6\)"),
        (lambda q: q.encode(torch.zeros(DIM)), r"\(6,\), not \(b, 6\)"),
        (lambda q: q.decode(torch.zeros(2, LEVELS + 1, dtype=torch.int64)), r"\(2, 5\), not \(b, 1 to 4\)"),
        (lambda q: q.decode(torch.zeros(2, 0, dtype=torch.int64)), r"\(2, 0\), not \(b, 1 to 4\)"),
        (lambda q: q.decode(torch.zeros(2, dtype=torch.int64)), "codes have the shape"),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[ResidualQuantizer], Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        call(trained())
