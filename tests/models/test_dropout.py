"""Dropout that is a function of a key and a place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.models.layers.attention import Attention, FeedForward, Transformer
from tandem.models.layers.dropout import derive_keys, dropout
from tandem.training.noise import Noise
from tests.models.helpers import some


def some_keys(size: int = 3, step: int = 0) -> Tensor:
    return Noise(0, "dropout").keys(step, list(range(size)))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_a_share_of_the_numbers_is_dropped_and_the_mean_stays(rate: float) -> None:
    out = dropout(torch.ones(4, 8, 100, 100, dtype=torch.float64), rate, some_keys(4))
    dropped = (out == 0).double()
    assert ((out == 0) | ((out - 1 / (1 - rate)).abs() < 1e-12)).all()
    # Within 5 standard deviations: of the whole, of each sample, row and column, ...
    for dims in ((), (1, 2, 3), (0, 1, 3), (0, 1, 2)):
        means = dropped.mean(dim=dims) if dims else dropped.mean()
        count = out.numel() / means.numel()
        assert ((means - rate).abs() < 5 * (rate * (1 - rate) / count) ** 0.5).all(), dims
    # ... and no number has to do with its neighbour in any direction, or with that of another sample.
    centred = dropped - rate
    for dim in range(4):
        product = (centred.narrow(dim, 0, out.shape[dim] - 1) * centred.narrow(dim, 1, out.shape[dim] - 1)).mean()
        assert abs(product) < 5 * rate * (1 - rate) / out.numel() ** 0.5 * 1.2, dim


def test_draws_depend_on_key_and_place_alone_and_not_on_the_sizes_around_them() -> None:
    whole = dropout(torch.ones(3, 2, 9, 9), 0.5, some_keys())
    for row in range(3):
        assert torch.equal(dropout(torch.ones(1, 2, 9, 9), 0.5, some_keys()[row : row + 1])[0], whole[row])
    assert torch.equal(dropout(torch.ones(3, 2, 5, 7), 0.5, some_keys()), whole[:, :, :5, :7])
    others = [some_keys(step=1), derive_keys(some_keys(), 0), derive_keys(some_keys(), 1), some_keys().flip(1)]
    for keys in (*others, some_keys() ^ torch.tensor([1, 0]), some_keys() ^ torch.tensor([0, 1])):
        ours, theirs = (dropout(torch.ones(3, 2, 90, 90), 0.5, each) for each in (keys, some_keys()))
        assert abs((ours == theirs).double().mean() - 0.5) < 0.02


def test_draws_are_pinned_so_that_a_checkpoint_meets_the_same_later() -> None:
    assert some_keys(2).tolist() == [[2698067740, 3790443377], [108172185, 3759825051]]
    dropped = dropout(torch.ones(1, 2, 8), 0.5, torch.tensor([[1, 2]])) == 0
    assert ["".join(map(str, row)) for row in dropped[0].int().tolist()] == ["00001100", "10110011"]


def test_attention_drops_weights_and_outputs_and_the_feed_forward_its_inner_numbers() -> None:
    torch.manual_seed(0)
    keys, x, bias = some_keys(2), some(2, 5, 12), some(2, 3, 5, 5, seed=2)
    module = Attention(12, heads=3, dim_head=4, rate=0.4)
    q, k, v = module.to_qkv(module.norm(x)).view(2, 5, 3, 3, 4).permute(2, 0, 3, 1, 4)
    q, k = (part / part.norm(dim=-1, keepdim=True) for part in (q, k))
    weights = (8 * q @ k.mT + bias).softmax(dim=-1)
    kept = dropout(torch.ones(2, 3, 5, 5), 0.4, derive_keys(keys, 0))
    of_output = dropout(torch.ones(2, 5, 12), 0.4, derive_keys(keys, 1))
    out = module.to_out((weights * kept @ v).transpose(1, 2).flatten(2)) * of_output
    torch.testing.assert_close(module(x, bias, keys), out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(module(x, bias), Attention.forward(module, x, bias, None))
    feed = FeedForward(12, rate=0.4)
    values, gates = feed.expand(feed.norm(x)).chunk(2, dim=-1)
    inner = values * torch.nn.functional.gelu(gates) * dropout(torch.ones(2, 5, 32), 0.4, keys)
    torch.testing.assert_close(feed(x, keys), feed.contract(inner))


def test_layers_drop_differently() -> None:
    torch.manual_seed(0)
    module = Transformer(8, 2, heads=2, dim_head=4, attn_dropout=0.3, ff_dropout=0.3)
    keys, x = some_keys(2), some(2, 5, 8)
    for index, output in enumerate(module(x, None, keys)):
        of_layer = derive_keys(keys, index)
        x = x + module.attention[index](x, None, derive_keys(of_layer, 0))
        x = x + module.feed_forward[index](x, derive_keys(of_layer, 1))
        assert torch.equal(output, x)
