"""The attention layers of the Unet."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tandem.config.models.decoder import UnetConfig
from tandem.models.layers.attention import at_least_fp32

_FEW_KEYS = 64  # below this, the CPU's fused attention is slow in bf16: see `_attend`
_MIN_NORM = 1e-6  # shorter vectors are not scaled to length 1: their gradient would be unbounded


class MultiQueryAttention(nn.Module):
    """x + multi-query self-attention (Shazeer 2019) over the positions of maps (b, dim, h, w): all heads share one key
    and one value per position, and a learned pair that every query sees.

    Since all heads share the keys, the computation is that of a single head with heads x n queries.
    """

    def __init__(self, dim: int, config: UnetConfig) -> None:
        super().__init__()
        self.dim_head, inner = config.attn_dim_head, config.attn_heads * config.attn_dim_head
        self.norm = LayerNorm(dim)
        self.null_kv = nn.Parameter(torch.randn(2, self.dim_head))
        self.to_q = nn.Linear(dim, inner, bias=False)
        self.to_kv = nn.Linear(dim, 2 * self.dim_head, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, dim, bias=False), LayerNorm(dim))

    def forward(self, maps: Tensor) -> Tensor:
        tokens = _as_tokens(maps)
        tokens = tokens.view_as(tokens)
        x = self.norm(tokens)
        q = rearrange(self.to_q(x), "b n (h d) -> b 1 (n h) d", d=self.dim_head)
        kv = self.to_kv(x)
        kv = torch.cat([self.null_kv.to(kv.dtype).flatten().expand(len(kv), 1, -1), kv], dim=1)
        k, v = kv.unsqueeze(1).chunk(2, dim=-1)
        out = rearrange(_attend(q, k, v), "b 1 (n h) d -> b n (h d)", n=x.shape[1])
        return _as_map(tokens + self.to_out(out), maps)


class CrossAttention(nn.Module):
    """Multi-head attention of the positions of maps (b, dim, h, w) to tokens and to a learned token."""

    def __init__(self, dim: int, config: UnetConfig) -> None:
        super().__init__()
        self.heads, inner = config.cross_attn_heads, config.cross_attn_heads * config.cross_attn_dim_head
        self.norm = LayerNorm(dim)
        self.null_kv = nn.Parameter(torch.randn(2, config.cross_attn_dim_head))
        self.to_q = nn.Linear(dim, inner, bias=False)
        self.to_kv = nn.Linear(config.cond_dim, 2 * inner, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, dim, bias=False), LayerNorm(dim))

    def forward(self, maps: Tensor, tokens: Tensor) -> Tensor:
        """Maps of the same shape, without the residual. ``tokens`` are (b, n, cond_dim)."""
        q = rearrange(self.to_q(self.norm(_as_tokens(maps))), "b n (h d) -> b h n d", h=self.heads)
        kv = rearrange(self.to_kv(tokens), "b m (part h d) -> part b h m d", part=2, h=self.heads)
        null = self.null_kv.to(kv.dtype)[:, None, None, None].expand(-1, *kv.shape[1:3], -1, -1)
        k, v = torch.cat([null, kv], dim=3)
        return _as_map(self.to_out(rearrange(_attend(q, k, v), "b h n d -> b n (h d)")), maps)


class LinearAttention(nn.Module):
    """x + linear attention (Shen et al. 2021, "Efficient attention") with values of length 1, over maps (b, dim, h, w).

    With a softmax of each query over its features and of the keys over the n positions, both in fp32 or fp64,
    out = q (k^T v) / (n sqrt(dim_head)).
    """

    def __init__(self, dim: int, config: UnetConfig) -> None:
        super().__init__()
        self.heads, inner = config.attn_heads, config.attn_heads * config.attn_dim_head
        self.scale = config.attn_dim_head**-0.5
        self.norm = ChannelNorm(dim)
        self.to_qkv = nn.Conv2d(dim, 3 * inner, 1, bias=False)
        self.to_out = nn.Sequential(nn.Conv2d(inner, dim, 1, bias=False), ChannelNorm(dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x.view_as(x)
        tokens = rearrange(self.to_qkv(self.norm(x)), "b (part h d) y x -> part b h (y x) d", part=3, h=self.heads)
        q, k, v = at_least_fp32(tokens).unbind()
        q, k, v = q.softmax(-1), k.softmax(-2), F.normalize(v, dim=-1, eps=_MIN_NORM)
        out = q @ (k.transpose(-1, -2) @ v) * (self.scale / q.shape[-2])
        out = rearrange(out, "b h (y x) d -> b (h d) y x", y=x.shape[-2])
        return x + self.to_out(F.gelu(out).to(x.dtype))


class LayerNorm(nn.Module):
    """Layer norm of tokens (..., dim) with a gain and no bias."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.g)


class ChannelNorm(nn.Module):
    """Layer norm over the channels of each position of maps (b, dim, h, w), with a gain and no bias."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(1, dim, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.movedim(1, -1), x.shape[1:2], self.g.flatten()).movedim(-1, 1)


def _as_tokens(x: Tensor) -> Tensor:
    """Maps (b, c, h, w) -> tokens (b, h w, c), row by row."""
    return x.movedim(1, -1).flatten(1, 2)


def _as_map(tokens: Tensor, like: Tensor) -> Tensor:
    """Tokens (b, h w, c) -> maps (b, c, h, w) of the height and width of ``like``."""
    return tokens.unflatten(1, like.shape[-2:]).movedim(-1, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # On CPUs the fused kernel takes 2 to 4 times as long as the formula for few keys in bf16, most of it in backward.
    is_slow = q.device.type == "cpu" and v.dtype == torch.bfloat16 and k.shape[-2] < _FEW_KEYS
    with sdpa_kernel(SDPBackend.MATH) if is_slow else nullcontext():
        return F.scaled_dot_product_attention(q, k, v)
