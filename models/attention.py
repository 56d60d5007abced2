"""Transformer blocks with normalised queries and keys: pre-norm attention and GEGLU feed-forwards without biases."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .recompute import recomputed

# Factor of the logits, which are products of normalised queries and keys times their learned scales.
LOGIT_SCALE = 8.0

# The kernels that take a bias both with and without a gradient. PyTorch's choice among all kernels depends on whether
# there is a graph, but gradient caching computes features without one and again with one, and needs equal bits.
SDPA_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# Added to a squared length, so that a zero vector has a finite gradient. The length of a normalised vector is then less
# than 1, by 5e-7 if it was 0.1 before, and by less if it was longer.
_EPSILON = 1e-8


def at_least_fp32(x: Tensor) -> Tensor:
    """``x`` in fp32, unless it is in fp64."""
    return x if x.dtype == torch.float64 else x.float()


def l2_normalize(x: Tensor) -> Tensor:
    """Vectors (..., d) over sqrt(|x|^2 + 1e-8), in fp32 or fp64: of length 1; 0 stays 0, with a finite gradient."""
    x = at_least_fp32(x)
    return x * (x.square().sum(dim=-1, keepdim=True) + _EPSILON).rsqrt()


class Attention(nn.Module):
    """Pre-norm self-attention: softmax(8 q.k + bias) v, where q and k are unit vectors times a learned scale.

    Normalising queries and keys bounds the logits (Henry et al. 2020, "Query-key normalization for transformers").
    """

    def __init__(self, dim: int, heads: int, dim_head: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim, bias=False)
        self.to_qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.q_scale = nn.Parameter(torch.ones(dim_head))
        self.k_scale = nn.Parameter(torch.ones(dim_head))
        self.to_out = nn.Linear(heads * dim_head, dim, bias=False)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Tokens (b, n, dim) -> (b, n, dim), without the residual. The bias is added to the logits and broadcastable to
        (b, heads, n, n); -inf hides a key. Each row must leave at least one key visible."""
        qkv = rearrange(self.to_qkv(self.norm(x)), "b n (part h d) -> part b h n d", part=3, h=self.heads)
        (q, k), v = l2_normalize(qkv[:2]), qkv[2]
        q, k = (q * self.q_scale).to(v.dtype), (k * self.k_scale).to(v.dtype)
        mask = None if bias is None else bias.to(v.dtype)
        with sdpa_kernel(SDPA_KERNELS):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=LOGIT_SCALE)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


class FeedForward(nn.Module):
    """Pre-norm GEGLU (Shazeer 2020, "GLU variants improve transformer") of inner width int(4 dim 2/3)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        inner = 8 * dim // 3
        self.norm = nn.LayerNorm(dim, bias=False)
        self.expand = nn.Linear(dim, 2 * inner, bias=False)
        self.contract = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (b, n, dim) -> (b, n, dim), without the residual."""
        values, gates = self.expand(self.norm(x)).chunk(2, dim=-1)
        return self.contract(values * F.gelu(gates))


class Transformer(nn.Module):
    """``depth`` layers of attention and feed-forward, each with a residual; no norm at the end.

    Args:
        recompute: In training, compute each layer again in the backward pass instead of keeping what is inside of it.

    Raises:
        ValueError: a number that is not positive.
    """

    def __init__(self, dim: int, depth: int, heads: int = 8, dim_head: int = 64, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        if min(dim, depth, heads, dim_head) < 1:
            sizes = f"dim {dim}, depth {depth}, heads {heads} and dim_head {dim_head}"
            raise ValueError(f"a transformer of {sizes}: give numbers of at least 1")
        self.attention = nn.ModuleList(Attention(dim, heads, dim_head) for _ in range(depth))
        self.feed_forward = nn.ModuleList(FeedForward(dim) for _ in range(depth))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> list[Tensor]:
        """Tokens (b, n, dim) and the attention's bias -> the output (b, n, dim) of each layer, in order."""
        outputs = []
        for attention, feed_forward in zip(self.attention, self.feed_forward, strict=True):
            x = recomputed(_layer, attention, feed_forward, x, bias, when=self.recompute and self.training)
            outputs.append(x)
        return outputs


def _layer(attention: nn.Module, feed_forward: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    x = x + attention(x, bias)
    return x + feed_forward(x)
