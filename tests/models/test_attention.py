"""Attention against a softmax written out, and what it does with zeros and in low precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from models.attention import Attention, l2_normalize, layers_read


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
