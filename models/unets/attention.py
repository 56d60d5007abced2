"""Attention of the Unet: over the positions of a feature map, to the tokens of conditions, and linear attention."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..attention import at_least_fp32

_COSINE_SCALE = 16.0  # of the logits, where queries and keys have length 1
_FEW_KEYS = 64
_SHORTEST = 1e-6  # shorter vectors are not brought to length 1: their gradient would have no bound


class LayerNorm(nn.Module):
    """Layer norm of tokens (..., dim) with a gain and no bias."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.g = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.dim,), self.g)


class ChannelNorm(nn.Module):
    """Layer norm over the channels of each position of maps (b, dim, h, w), with a gain and no bias."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.g = nn.Parameter(torch.ones(1, dim, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.movedim(1, -1), (self.dim,), self.g.flatten()).movedim(-1, 1)


class Residual(nn.Module):
    """x + fn(x)."""

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        x = x.view_as(x)  # adds up its gradients here: see `ResnetBlock`
        return x + self.fn(x)


class OnTokens(nn.Module):
    """``fn`` of the positions of a map (b, c, h, w) as tokens (b, h w, c)."""

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return as_map(self.fn(as_tokens(x)), x)


class Attention(nn.Module):
    """Multi-query self-attention (Shazeer 2019): all heads share one key and one value per token, and a learned pair
    that every query sees. Logits are q.k / sqrt(dim_head), or 16 times the cosine.

    As all heads have the same keys, they are computed as one head with so many times as many queries.
    """

    def __init__(self, dim: int, heads: int, dim_head: int, cosine: bool = False) -> None:
        super().__init__()
        self.dim_head, self.cosine = dim_head, cosine
        self.norm = LayerNorm(dim)
        self.null_kv = nn.Parameter(torch.randn(2, dim_head))
        self.to_q = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_kv = nn.Linear(dim, 2 * dim_head, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim, bias=False), LayerNorm(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (b, n, dim) -> (b, n, dim), without the residual."""
        x = self.norm(x)
        q = rearrange(self.to_q(x), "b n (h d) -> b 1 (n h) d", d=self.dim_head)
        kv = self.to_kv(x)
        kv = torch.cat([self.null_kv.to(kv.dtype).flatten().expand(len(kv), 1, -1), kv], dim=1)
        k, v = kv.unsqueeze(1).chunk(2, dim=-1)
        out = _attend(q, k, v, self.cosine)
        return self.to_out(rearrange(out, "b 1 (n h) d -> b n (h d)", n=x.shape[1]))


class CrossAttention(nn.Module):
    """Multi-head attention of positions to the tokens of conditions and to a learned token."""

    index = 0
    """Its place in `Conditions.keys_values`; set by the Unet."""

    def __init__(self, dim: int, dim_context: int, heads: int, dim_head: int, cosine: bool = False) -> None:
        super().__init__()
        self.heads, self.cosine = heads, cosine
        self.norm = LayerNorm(dim)
        self.null_kv = nn.Parameter(torch.randn(2, dim_head))
        self.to_q = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_kv = nn.Linear(dim_context, 2 * heads * dim_head, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim, bias=False), LayerNorm(dim))

    def forward(self, x: Tensor, tokens: Tensor, keys_values: Tensor | None = None) -> Tensor:
        """Positions (b, n, dim) -> (b, n, dim), without the residual.

        Args:
            tokens: (b, m, dim_context).
            keys_values: What ``to_kv`` has made of more tokens, (b, m', 2 heads dim_head).
        """
        q = rearrange(self.to_q(self.norm(x)), "b n (h d) -> b h n d", h=self.heads)
        kv = self.to_kv(tokens)
        if keys_values is not None:
            kv = torch.cat([kv, keys_values.to(kv.dtype)], dim=1)
        kv = rearrange(kv, "b m (part h d) -> part b h m d", part=2, h=self.heads)
        null = self.null_kv.to(kv.dtype)[:, None, None, None].expand(-1, *kv.shape[1:3], -1, -1)
        k, v = torch.cat([null, kv], dim=3)
        out = _attend(q, k, v, self.cosine)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


class LinearAttention(nn.Module):
    """Linear attention (Shen et al. 2021, "Efficient attention") with values of length 1, over maps (b, dim, h, w).

    With a softmax of each query over its features and of the keys over the n positions, both in fp32 or fp64,
    out = q (k^T v) / (n sqrt(dim_head)).
    """

    def __init__(self, dim: int, heads: int, dim_head: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.norm = ChannelNorm(dim)
        self.to_qkv = nn.Conv2d(dim, 3 * heads * dim_head, 1, bias=False)
        self.to_out = nn.Sequential(nn.Conv2d(heads * dim_head, dim, 1, bias=False), ChannelNorm(dim))

    def forward(self, x: Tensor) -> Tensor:
        """(b, dim, h, w) -> the same shape, without the residual."""
        tokens = rearrange(self.to_qkv(self.norm(x)), "b (part h d) y x -> part b h (y x) d", part=3, h=self.heads)
        q, k, v = at_least_fp32(tokens[0]).softmax(-1), at_least_fp32(tokens[1]).softmax(-2), _normalized(tokens[2])
        out = q @ (k.transpose(-1, -2) @ v) * (self.scale / q.shape[-2])
        out = rearrange(out, "b h (y x) d -> b (h d) y x", y=x.shape[-2])
        return self.to_out(F.gelu(out).to(x.dtype))


def as_tokens(x: Tensor) -> Tensor:
    """Maps (b, c, h, w) -> tokens (b, h w, c), row by row."""
    return x.movedim(1, -1).flatten(1, 2)


def as_map(tokens: Tensor, like: Tensor) -> Tensor:
    """Tokens (b, h w, c) -> maps (b, c, h, w) of the height and width of ``like``."""
    return tokens.unflatten(1, like.shape[-2:]).movedim(-1, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, cosine: bool) -> Tensor:
    if cosine:
        q, k = _normalized(q).to(v.dtype), _normalized(k).to(v.dtype)
    # On CPUs the fused kernel takes 2 to 4 times as long as the formula for few keys in bf16, most of it backwards.
    is_slow = q.device.type == "cpu" and v.dtype == torch.bfloat16 and k.shape[-2] < _FEW_KEYS
    with sdpa_kernel(SDPBackend.MATH) if is_slow else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, scale=_COSINE_SCALE if cosine else None)


def _normalized(x: Tensor) -> Tensor:
    """Vectors (..., d) of length 1, in fp32 or fp64."""
    return F.normalize(at_least_fp32(x), dim=-1, eps=_SHORTEST)
