"""Attention over space or time, linear attention, and a gated recurrence over time, for videos (b, c, f, h, w)."""

from __future__ import annotations

import math

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from tandem.models.layers.attention import SDPA_KERNELS, at_least_fp32

from .causal import Context, RMSNorm

_MEMORIES = 4  # learned keys and values of each head, visible to every query

# In each layer here that sees earlier frames, a learned gain, `past_gain`, multiplies what comes from them. It starts
# as 1. Images train neither it nor the weights of those frames. With a gain of 0, each frame is treated like an image.


class PixelFeedForward(nn.Module):
    """Pre-norm GEGLU (Shazeer 2020) of inner width int(4 dim 2/3) for each position, without the residual."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        inner = 8 * dim // 3
        self.norm = RMSNorm(dim)
        self.expand = nn.Conv3d(dim, 2 * inner, 1)
        self.contract = nn.Conv3d(inner, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        values, gates = self.expand(self.norm(x)).chunk(2, dim=1)
        return self.contract(values * F.gelu(gates))


class MemoryAttention(nn.Module):
    """Multi-head softmax attention with learned memories, keys and values that every query sees (Sukhbaatar et al.
    2019, "Augmenting self-attention with persistent memory"), without biases and positions. With is_causal the result
    is own + past_gain (full - own): `full` sees the memories and all visible tokens, `own` sees the memories and the
    query's own token alone.

    Args:
        is_causal: A token sees no later one, and a stream keeps the keys and values of earlier chunks.
        window: With is_causal, the number of tokens that a token sees, itself included; None: all earlier ones, so that
            the state of a stream grows.
    """

    cache_key = ""

    def __init__(
        self, dim: int, heads: int, dim_head: int, *, is_causal: bool = False, window: int | None = None
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.is_causal, self.window = heads, is_causal, window
        self.to_qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.memory = nn.Parameter(torch.randn(2, heads, _MEMORIES, dim_head))
        self.to_out = nn.Linear(heads * dim_head, dim, bias=False)
        if is_causal:
            self.past_gain = nn.Parameter(torch.ones(heads))

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        """(n, t, dim) -> (n, t, dim)."""
        qkv = rearrange(self.to_qkv(tokens), "n t (part h d) -> part n h t d", part=3, h=self.heads)
        q, kv = qkv[0], qkv[1:]
        if self.is_causal:
            kv = self._prepend_past(kv, context)
        memory = self.memory.to(kv.dtype)[:, None].expand(-1, kv.shape[1], -1, -1, -1)
        k, v = torch.cat([memory, kv], dim=3)
        with sdpa_kernel(SDPA_KERNELS):
            if self.is_causal:
                mask = self._visibility_mask(q.shape[2], kv.shape[3], q.device)
                full = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
                own = self._attend_without_past(q, *qkv[1:], *memory[:, 0])
                out = torch.lerp(own, full, self.past_gain.to(full.dtype)[:, None, None])
            else:
                out = F.scaled_dot_product_attention(q, k, v)
        return self.to_out(rearrange(out, "n h t d -> n t (h d)"))

    def _prepend_past(self, kv: Tensor, context: Context) -> Tensor:
        past = context.past(self.cache_key)
        if past is not None:
            kv = torch.cat([past, kv], dim=3)
        num_keys = kv.shape[3]
        num_past = num_keys if self.window is None else min(self.window - 1, num_keys)
        context.store(self.cache_key, kv[:, :, :, num_keys - num_past :])
        return kv

    @staticmethod
    def _attend_without_past(q: Tensor, k: Tensor, v: Tensor, memory_k: Tensor, memory_v: Tensor) -> Tensor:
        """Attention of each query to the memories (heads, memories, d) and its own token; q, k, v (n, heads, t, d)."""
        q = q / math.sqrt(q.shape[-1])  # before the products, which could overflow in half precision
        scores = torch.cat([q @ memory_k.mT, (q * k).sum(dim=-1, keepdim=True)], dim=-1)
        memory_weights, own_weight = scores.softmax(dim=-1).to(v.dtype).split([_MEMORIES, 1], dim=-1)
        return torch.addcmul(memory_weights @ memory_v, own_weight, v)

    def _visibility_mask(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        """Which memories and keys a query sees: bool (num_queries, memories + num_keys). The last query belongs to the
        last key."""
        positions = torch.arange(num_keys, device=device)
        age = positions[num_keys - num_queries :, None] - positions
        is_visible = (age >= 0) & (age < (num_keys if self.window is None else self.window))
        return F.pad(is_visible, (_MEMORIES, 0), value=True)


class TaylorAttention(nn.Module):
    """Linear attention: exp(q.k) is replaced by its Taylor series up to the square (Arora et al. 2024, "Based").

    out = phi(q) (sum phi(k) v^T) / (phi(q) sum phi(k)) with phi(x) = [1, x, (x outer x) / sqrt 2] and q scaled by
    dim_head^-1/2. Computed in fp32 or fp64.
    """

    def __init__(self, dim: int, heads: int, dim_head: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.to_qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.to_out = nn.Linear(heads * dim_head, dim, bias=False)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        """(n, t, dim) -> (n, t, dim)."""
        qkv = self.to_qkv(tokens)
        with torch.autocast(tokens.device.type, enabled=False):
            parts = rearrange(at_least_fp32(qkv), "n t (part h d) -> part n h t d", part=3, h=self.heads)
            q, k, v = _taylor(parts[0] * self.scale), _taylor(parts[1]), parts[2]
            normalizer = (q @ k.sum(dim=-2).unsqueeze(-1)).clamp_min(1e-5)
            out = rearrange(q @ (k.transpose(-1, -2) @ v) / normalizer, "n h t d -> n t (h d)").to(qkv.dtype)
        return self.to_out(out)


class TokenShift(nn.Module):
    """The second half of the channels comes from the frame before, times past_gain; zeros at the first frame (the token
    shift of RWKV, Peng et al. 2023)."""

    cache_key = ""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.past_gain = nn.Parameter(torch.ones(dim // 2))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        channels = len(self.past_gain)
        unshifted, shifted = x.split([x.shape[1] - channels, channels], dim=1)
        past = context.past(self.cache_key)
        if past is None:
            past = torch.zeros_like(shifted[:, :, :1])
        context.store(self.cache_key, shifted[:, :, -1:])
        previous = torch.cat([past, shifted[:, :, :-1]], dim=2)
        return torch.cat([unshifted, previous * self.past_gain.to(x.dtype)[:, None, None, None]], dim=1)


class AttentionBlock(nn.Module):
    """Attention, then a feed-forward, each with a residual.

    Args:
        attention: Tokens (n, t, dim) and the context -> tokens.
        along: ``space``: the tokens are the positions of a frame. ``time``: they are the frames of a position, and both
            parts are token-shifted.
    """

    def __init__(self, dim: int, attention: nn.Module, along: str) -> None:
        super().__init__()
        self.token_pattern = "(b f) (h w) c" if along == "space" else "(b h w) f c"
        self.norm, self.attention = RMSNorm(dim), attention
        self.feed_forward = PixelFeedForward(dim)
        self.shifts = nn.ModuleList(TokenShift(dim) for _ in range(2 if along == "time" else 0))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        y = self.shifts[0](x, context) if self.shifts else x
        tokens = rearrange(self.norm(y), f"b c f h w -> {self.token_pattern}")
        axis_sizes = dict(zip("bfhw", (len(x), *x.shape[2:]), strict=True))
        x = x + rearrange(self.attention(tokens, context), f"{self.token_pattern} -> b c f h w", **axis_sizes)
        y = self.shifts[1](x, context) if self.shifts else x
        return x + self.feed_forward(y)


class GateLoop(nn.Module):
    """x + q (v + past_gain p) along time, for each pixel and channel, where p_t = sigmoid(a_t) (v_{t-1} + p_{t-1}) is
    the decayed sum of earlier frames; q, v and a are linear in the normalised x (after Katsch 2023, "GateLoop"). The
    recurrence is in fp32 or fp64."""

    cache_key = ""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = RMSNorm(dim)
        self.to_qva = nn.Conv3d(dim, 3 * dim, 1, bias=False)
        self.past_gain = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, v, a = self.to_qva(self.norm(x)).chunk(3, dim=1)
        values, decays = at_least_fp32(v), torch.sigmoid(at_least_fp32(a))
        past, decayed_states = context.past(self.cache_key), []
        state = torch.zeros_like(values[:, :, 0]) if past is None else past
        for frame in range(x.shape[2]):
            decayed_states.append(decays[:, :, frame] * state)
            state = decayed_states[-1] + values[:, :, frame]
        context.store(self.cache_key, state)
        gain = self.past_gain.to(values.dtype)[:, None, None, None]
        return x + q * (values + gain * torch.stack(decayed_states, dim=2)).to(q.dtype)


class AdaptiveNorm(nn.Module):
    """RMSNorm(x) (1 + gain) + shift, where gain and shift are 1 x 1 convolutions of the quantized latent that a
    position is made from: nearest in space, and latent ceil(f / frames) for frame f (after MAGVIT-v2's adaptive group
    norm). Gain and shift start as 0.

    Args:
        frames: Number of frames of x for one latent frame.
        pixels: Height and width in x of one latent.
    """

    def __init__(self, dim: int, dim_latent: int, frames: int, pixels: int) -> None:
        super().__init__()
        self.frames, self.pixels = frames, pixels
        self.norm = RMSNorm(dim)
        self.modulate = nn.Conv3d(dim_latent, 2 * dim, 1)
        nn.init.zeros_(self.modulate.weight)
        nn.init.zeros_(self.modulate.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor, context: Context) -> Tensor:
        assert context.latents is not None
        sizes = {"s": self.frames, "p": self.pixels, "q": self.pixels}
        parts = repeat(self.modulate(context.latents), "b c f h w -> b c (f s) (h p) (w q)", **sizes)
        gain, shift = parts[:, :, -x.shape[2] :].chunk(2, dim=1)  # the first latent stands for one frame
        return self.norm(x) * (1 + gain) + shift


def _taylor(x: Tensor) -> Tensor:
    """(..., d) -> (..., 1 + d + d^2)."""
    squares = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2) / math.sqrt(2)
    return torch.cat([torch.ones_like(x[..., :1]), x, squares], dim=-1)
