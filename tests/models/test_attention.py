"""Attention against a softmax written out, and what it does with zeros and in low precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.attention import Attention, FeedForward, l2_normalize, layers_read


def attention_written_out(module: Attention, x: Tensor, bias: Tensor) -> Tensor:
    """Query by query and head by head."""
    normed = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    q_weight, k_weight, v_weight = module.to_qkv.weight.chunk(3)
    width = len(module.q_scale)
    out = []
    for head in range(module.heads):
        rows = slice(head * width, (head + 1) * width)
        q, k, v = (normed @ weight[rows].T for weight in (q_weight, k_weight, v_weight))
        q = q / q.norm(dim=-1, keepdim=True) * module.q_scale
        k = k / k.norm(dim=-1, keepdim=True) * module.k_scale
        logits = 8 * torch.einsum("bid,bjd->bij", q, k) + bias.expand(len(x), module.heads, -1, -1)[:, head]
        weights = logits.exp() / logits.exp().sum(dim=-1, keepdim=True)
        out.append(torch.einsum("bij,bjd->bid", weights, v))
    return torch.cat(out, dim=-1) @ module.to_out.weight.T


def test_attention_is_the_softmax_written_out() -> None:
    torch.manual_seed(0)
    module = Attention(12, heads=3, dim_head=5).double()
    with torch.no_grad():
        module.q_scale.uniform_(0.5, 2.0)
        module.k_scale.uniform_(0.5, 2.0)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    hidden_key = torch.zeros(2, 1, 1, 7, dtype=torch.float64)
    hidden_key[0, ..., 4:] = -math.inf
    for bias in (hidden_key, torch.randn(2, 3, 7, 7, dtype=torch.float64)):
        # The length's epsilon, 1e-8, is what they differ by.
        torch.testing.assert_close(module(x, bias), attention_written_out(module, x, bias), atol=1e-6, rtol=0)
    assert torch.equal(module(x), module(x, torch.zeros(1, 1, 7, 7)))


@pytest.mark.parametrize(("dim", "inner"), [(128, 341), (512, 1365), (6, 16), (2, 5)])
def test_feed_forward_is_geglu_of_two_thirds_of_four_times_the_width(dim: int, inner: int) -> None:
    module = FeedForward(dim)
    assert module.contract.in_features == inner == int(4 * dim * 2 / 3)
    x = torch.randn(3, dim)
    values, gates = (F.layer_norm(x, (dim,)) @ module.expand.weight.T).split(inner, dim=-1)
    gelu = gates * (1 + torch.erf(gates / math.sqrt(2))) / 2
    torch.testing.assert_close(module(x), (values * gelu) @ module.contract.weight.T)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_normalised_vectors_have_length_one_and_zero_a_finite_gradient_in_attention_too(dtype: torch.dtype) -> None:
    x = (torch.randn(4, 64) * 300).to(dtype)  # squares are beyond fp16's range
    out = l2_normalize(x)
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(out.norm(dim=-1), torch.ones(4, dtype=out.dtype), atol=1e-6, rtol=0)
    zero = torch.zeros(1, 64, dtype=dtype, requires_grad=True)
    l2_normalize(zero).sum().backward()
    assert zero.grad is not None and zero.grad.isfinite().all()
    module = Attention(8, heads=2, dim_head=4).to(dtype)
    nn.init.zeros_(module.to_qkv.weight)
    module(torch.randn(2, 3, 8, dtype=dtype)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


def test_even_layers_are_those_of_the_published_formula() -> None:
    """floor(arange(h) depth / h) (musiclm-pytorch 0.2.8, interspersed_indices), and the last one first."""
    assert layers_read(6, 0, "last") == layers_read(6, 0, "even") == [5]
    assert layers_read(6, 2, "last") == [5, 4, 3] and layers_read(6, 2, "even") == [5, 3, 0]
    for depth in range(2, 13):
        for below in range(1, depth):
            published = [math.floor(i * (depth / below)) for i in range(below)]
            assert layers_read(depth, below, "even") == [depth - 1, *reversed(published)]
