"""Transformer blocks with normalised queries and keys: pre-norm attention and GEGLU feed-forwards without biases."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .dropout import derive_keys, dropout
from .recompute import recompute_in_backward

# Factor of the logits q.k, where q and k are unit vectors times their learned scales.
LOGIT_SCALE = 8.0

# The kernels that take a bias both with and without a gradient. PyTorch's choice among all kernels depends on whether
# there is a graph, but gradient caching computes features without one and again with one, and needs equal bits.
SDPA_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# Added to a squared length, so that a zero vector has a finite gradient. It makes a normalised vector shorter than 1,
# by 5e-7 for a vector of length 0.1, and by less for longer ones.
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

    Args:
        rate: Share of the attention weights, and of the output, that is dropped in training.
    """

    def __init__(self, dim: int, heads: int, dim_head: int, rate: float = 0.0) -> None:
        super().__init__()
        self.heads, self.rate = heads, rate
        self.norm = nn.LayerNorm(dim, bias=False)
        self.to_qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.q_scale = nn.Parameter(torch.ones(dim_head))
        self.k_scale = nn.Parameter(torch.ones(dim_head))
        self.to_out = nn.Linear(heads * dim_head, dim, bias=False)

    def forward(self, x: Tensor, bias: Tensor | None = None, dropout_keys: Tensor | None = None) -> Tensor:
        """Tokens (b, n, dim) -> (b, n, dim), without the residual. The bias is added to the logits and broadcastable to
        (b, heads, n, n); -inf hides a key. Each row must leave at least one key visible. The dropout_keys
        (b, 2) are the keys of `dropout`."""
        qkv = rearrange(self.to_qkv(self.norm(x)), "b n (part h d) -> part b h n d", part=3, h=self.heads)
        (q, k), v = l2_normalize(qkv[:2]), qkv[2]
        q, k = (q * self.q_scale).to(v.dtype), (k * self.k_scale).to(v.dtype)
        mask = None if bias is None else bias.to(v.dtype)
        if dropout_keys is None or not self.rate:
            with sdpa_kernel(SDPA_KERNELS):
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=LOGIT_SCALE)
            return self.to_out(rearrange(out, "b h n d -> b n (h d)"))
        logits = at_least_fp32(q @ k.mT) * LOGIT_SCALE  # PyTorch's kernels take no dropout mask
        weights = (logits if mask is None else logits + mask).softmax(dim=-1)
        out = dropout(weights, self.rate, derive_keys(dropout_keys, 0)).to(v.dtype) @ v
        return dropout(self.to_out(rearrange(out, "b h n d -> b n (h d)")), self.rate, derive_keys(dropout_keys, 1))


class FeedForward(nn.Module):
    """Pre-norm GEGLU (Shazeer 2020, "GLU variants improve transformer") of inner width int(mult dim 2/3).

    Args:
        rate: Share of the inner activations that is dropped in training.
    """

    def __init__(self, dim: int, mult: int = 4, rate: float = 0.0) -> None:
        super().__init__()
        inner, self.rate = max(1, 2 * mult * dim // 3), rate
        self.norm = nn.LayerNorm(dim, bias=False)
        self.expand = nn.Linear(dim, 2 * inner, bias=False)
        self.contract = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor, dropout_keys: Tensor | None = None) -> Tensor:
        """Tokens (b, n, dim) -> (b, n, dim), without the residual. The dropout_keys (b, 2) are those of `dropout`."""
        values, gates = self.expand(self.norm(x)).chunk(2, dim=-1)
        return self.contract(dropout(values * F.gelu(gates), self.rate, dropout_keys))


class Transformer(nn.Module):
    """``depth`` layers of attention and feed-forward, each with a residual; no norm at the end.

    Args:
        recompute: In training, compute each layer again in the backward pass instead of keeping its activations.
        ff_mult: Inner width of a feed-forward, as a multiple of dim, before the 2/3 of GEGLU.
        attn_dropout, ff_dropout: Dropout rates of attention and feed-forward in training, in [0, 1).
    """

    def __init__(
        self, dim: int, depth: int, heads: int = 8, dim_head: int = 64, recompute: bool = False, ff_mult: int = 4,
        attn_dropout: float = 0.0, ff_dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.recompute = recompute
        self.attention = nn.ModuleList(Attention(dim, heads, dim_head, attn_dropout) for _ in range(depth))
        self.feed_forward = nn.ModuleList(FeedForward(dim, ff_mult, ff_dropout) for _ in range(depth))

    def forward(self, x: Tensor, bias: Tensor | None = None, dropout_keys: Tensor | None = None) -> list[Tensor]:
        """Tokens (b, n, dim) and the attention's bias -> the output (b, n, dim) of each layer, in order.

        Args:
            dropout_keys: int64 (b, 2) in [0, 2^32), one key for the dropout of each sample; None drops nothing.
        """
        outputs = []
        for index, (attention, feed_forward) in enumerate(zip(self.attention, self.feed_forward, strict=True)):
            keys = None if dropout_keys is None else derive_keys(dropout_keys, index)
            inputs = attention, feed_forward, x, bias, keys
            x = recompute_in_backward(_apply_layer, *inputs, when=self.recompute and self.training)
            outputs.append(x)
        return outputs


def _apply_layer(
    attention: nn.Module, feed_forward: nn.Module, x: Tensor, bias: Tensor | None, keys: Tensor | None
) -> Tensor:
    attention_keys, feed_forward_keys = (None, None) if keys is None else (derive_keys(keys, 0), derive_keys(keys, 1))
    x = x + attention(x, bias, attention_keys)
    return x + feed_forward(x, feed_forward_keys)


def output_layers(depth: int, num_lower: int, spacing: str) -> list[int]:
    """Indices, from 0, of the layers whose outputs a tower returns: the last, then ``num_lower`` lower ones, falling.

    Args:
        num_lower: Number of layers below the last, less than depth.
        spacing: "last": those next to the last. "even": floor(i depth / num_lower) for i from num_lower - 1 to 0, which
            includes the first layer. It is computed in fp32, as by `interspersed_indices` of musiclm-pytorch 0.2.8:
            beyond 25 layers fp64 would give other layers.
    """
    if spacing == "last":
        return [depth - 1 - i for i in range(num_lower + 1)]
    even: list[int] = (torch.arange(num_lower, device="cpu") * (depth / max(num_lower, 1))).floor().long().tolist()
    return [depth - 1, *reversed(even)]
