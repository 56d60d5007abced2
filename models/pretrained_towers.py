"""Towers of MuLan whose architecture is that of a published encoder, so that its weights can be taken: of texts, CLIP
(Radford et al. 2021), BERT (Devlin et al. 2019) and RoBERTa (Liu et al. 2019); of sounds, AST (Gong et al. 2021).

They have no dropout: they train, or stay frozen, as they compute in eval mode. `files.towers` reads the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from .attention import SDPA_KERNELS, layers_read
from .recompute import recomputed
from .text_transformer import checked_tokens

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
}
TEXT_KINDS, AUDIO_KINDS = ("clip", "bert"), ("ast",)

# What the configuration of a tower says, beside its kind; each number is at least 1.
_SIZES = ("dim", "depth", "heads", "inner")
_TEXT_SIZES = (*_SIZES, "vocab_size", "max_tokens")
_AUDIO_SIZES = (*_SIZES, "sample_rate", "bands", "frames", "patch_size", "frequency_stride", "time_stride")


class _Layer(nn.Module):
    """Self-attention and a feed-forward with biases, each with a residual, around a LayerNorm before or after it."""

    def __init__(self, config: Mapping[str, Any], norm_first: bool) -> None:
        super().__init__()
        dim, inner, eps = config["dim"], config["inner"], config["norm_eps"]
        self.heads, self.norm_first, self.activation = config["heads"], norm_first, config["activation"]
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps), nn.LayerNorm(dim, eps)
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.expand, self.contract = nn.Linear(dim, inner), nn.Linear(inner, dim)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """(b, n, dim) and what is added to the logits, broadcastable to (b, heads, n, n) -> (b, n, dim)."""
        # One use of x from outside: where FSDP or recomputation wraps a layer, the gradients of its own uses are added
        # before that of another use of x. With this they are so everywhere, which gives the same bits.
        x = x.view_as(x)
        if self.norm_first:
            x = x + self._attend(self.norm1(x), bias)
            return x + self._feed(self.norm2(x))
        x = self.norm1(x + self._attend(x, bias))
        return self.norm2(x + self._feed(x))

    def _attend(self, x: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = rearrange(self.to_qkv(x), "b n (part h d) -> part b h n d", part=3, h=self.heads)
        with sdpa_kernel(SDPA_KERNELS):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=None if bias is None else bias.to(v.dtype))
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))

    def _feed(self, x: Tensor) -> Tensor:
        return self.contract(ACTIVATIONS[self.activation](self.expand(x)))


class _Tower(nn.Module):
    """What both kinds of towers have in common. The weights of a file are all but those of `norms`, which are of the
    layers below the last and are trained even if the tower is frozen."""

    def __init__(
        self, config: Mapping[str, Any], norm_first: bool, below: int, recompute: bool, spacing: str, frozen: bool
    ) -> None:
        super().__init__()
        self.frozen, self.recompute = frozen, recompute
        self.layers = nn.ModuleList(_Layer(config, norm_first) for _ in range(config["depth"]))
        self.norm_after = nn.LayerNorm(config["dim"], config["norm_eps"]) if norm_first else nn.Identity()
        self.read = layers_read(config["depth"], below, spacing)
        self.norms = nn.ModuleList(nn.LayerNorm(config["dim"], bias=False) for _ in self.read[1:])

    def _freeze(self) -> None:
        """To be called at the end of the constructor."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not self.frozen or name.startswith("norms."))

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take the weights of a file, by the names that they have here.

        Raises:
            ValueError: one line that names the first weight that is missing or of another shape.
        """
        for name, ours in self.state_dict().items():
            if name.startswith("norms."):
                continue
            if name not in weights or weights[name].shape != ours.shape:
                found = tuple(weights[name].shape) if name in weights else "none"
                raise ValueError(f"{name} should have shape {tuple(ours.shape)}, not {found}")
            ours.copy_(weights[name])

    def _without_graph(self) -> AbstractContextManager[Any]:
        return torch.no_grad() if self.frozen else nullcontext()

    def _outputs(self, x: Tensor, bias: Tensor | None) -> list[Tensor]:
        """The outputs (b, n, dim) of the layers that are read, the last one first, after the encoder's own norm."""
        outputs = []
        for layer in self.layers:
            x = recomputed(layer, x, bias, when=self.recompute and self.training and not self.frozen)
            outputs.append(x)
        last, *below = (outputs[layer] for layer in self.read)
        return [self.norm_after(last), *below]

    def _normed(self, read: list[Tensor]) -> Tensor:
        """What is read of each output, (b, dim) -> (b, 1 + layers below, dim)."""
        last, *below = read
        return torch.stack([last, *(norm(part) for norm, part in zip(self.norms, below, strict=True))], dim=1)


class PretrainedTextTower(_Tower):
    """Tokens to the features of the token that stands for the text: the last one of CLIP, which marks the end, and the
    first of BERT and RoBERTa. Of the same interface as `TextTransformer`.

    Args:
        config: "kind" of TEXT_KINDS, "activation" of ACTIVATIONS, "norm_eps", and the numbers dim, depth, heads, inner,
            vocab_size and max_tokens.
        frozen: Give the weights no gradient.

    Raises:
        ValueError: one line that says what of the configuration is wrong.
    """

    def __init__(self, config: Mapping[str, Any], below: int, recompute: bool, spacing: str, frozen: bool) -> None:
        check_tower(config, TEXT_KINDS, _TEXT_SIZES)
        is_clip = config["kind"] == "clip"
        super().__init__(config, is_clip, below, recompute, spacing, frozen)
        self.is_clip, self.vocab_size, self.max_tokens = is_clip, config["vocab_size"], config["max_tokens"]
        self.tokens = nn.Embedding(self.vocab_size, config["dim"])
        self.positions = nn.Embedding(self.max_tokens, config["dim"])
        self.norm_before = nn.Identity() if self.is_clip else nn.LayerNorm(config["dim"], config["norm_eps"])
        self._freeze()

    def forward(self, tokens: Tensor, lengths: Tensor, keys: Tensor | None = None) -> Tensor:
        """As that of `TextTransformer`; the keys are not used."""
        tokens, counts = checked_tokens(tokens, lengths, self.vocab_size, self.max_tokens)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        with self._without_graph():
            x = self.norm_before(self.tokens(tokens) + self.positions(place))
            # The first token is never hidden, so that no row is empty.
            shown = (counts | (place == 0))[:, None, None, :]
            if self.is_clip:
                shown = shown & (place[:, None] >= place)
            bias = torch.zeros(shown.shape, dtype=x.dtype, device=x.device).masked_fill(~shown, float("-inf"))
            chosen = (lengths - 1).clamp(min=0) if self.is_clip else torch.zeros_like(lengths)
            rows = torch.arange(len(tokens), device=tokens.device)
            read = [output[rows, chosen] for output in self._outputs(x, bias)]
        return self._normed(read)


class PretrainedAudioTower(_Tower):
    """Log-mel spectrograms to the mean of the features of AST's two class tokens. Of the same interface as
    `AudioTransformer`, but without patch dropout.

    Args:
        config: "kind" of AUDIO_KINDS, "activation" of ACTIVATIONS, "norm_eps", "mean" and "std" (see `Fbank`; None for
            none), and the numbers dim, depth, heads, inner, sample_rate, bands, frames (of a clip; shorter ones are
            padded with silence), patch_size, frequency_stride and time_stride.
        frozen: Give the weights no gradient.

    Raises:
        ValueError: one line that says what of the configuration is wrong.
    """

    def __init__(self, config: Mapping[str, Any], below: int, recompute: bool, spacing: str, frozen: bool) -> None:
        check_audio_tower(config)
        super().__init__(config, True, below, recompute, spacing, frozen)
        dim, patch = config["dim"], config["patch_size"]
        self.bands, self.frames = config["bands"], config["frames"]
        self.silence = silence(config)
        self.strides = config["frequency_stride"], config["time_stride"]
        self.patch_size, self.patches = patch, nn.Linear(patch**2, dim)
        self.class_tokens = nn.Parameter(torch.zeros(2, dim))
        self.positions = nn.Parameter(torch.zeros(2 + patches_of(config), dim))
        self._freeze()

    def grid(self, bands: int, frames: int) -> tuple[int, int]:
        """(0, 0): no patch is dropped, so none needs noise."""
        return 0, 0

    def crop(self, spectrograms: Tensor) -> Tensor:
        """The part of spectrograms (b, bands, frames) that the tower takes: up to config["frames"] frames."""
        return spectrograms[..., : self.frames]

    def forward(self, spectrograms: Tensor, noise: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        """Spectrograms (b, bands, frames) of `Fbank` -> (b, 1 + layers below, dim), [:, 0] that of the final output.
        Noise and keys are not used."""
        x = self.crop(spectrograms)
        x = F.pad(x, (0, self.frames - x.shape[-1]), value=self.silence).to(self.patches.weight.dtype)
        with self._without_graph():
            squares = x.unfold(1, self.patch_size, self.strides[0]).unfold(2, self.patch_size, self.strides[1])
            x = self.patches(rearrange(squares, "b y x i j -> b (y x) (i j)"))
            x = torch.cat([self.class_tokens.to(x.dtype).expand(len(x), -1, -1), x], dim=1) + self.positions
            read = [output[:, :2].mean(dim=1) for output in self._outputs(x, None)]
        return self._normed(read)


def silence(config: Mapping[str, Any]) -> float:
    """What a spectrogram of AST is padded with: 0 before it is normalised."""
    return 0.0 if config["mean"] is None else -config["mean"] / (2 * config["std"])


def patches_of(config: Mapping[str, Any]) -> int:
    """Number of patches, which may overlap, of a clip of an audio tower."""
    patch = config["patch_size"]
    rows = (config["bands"] - patch) // config["frequency_stride"] + 1
    return rows * ((config["frames"] - patch) // config["time_stride"] + 1)


def check_audio_tower(config: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line, unless a `PretrainedAudioTower` can be made of this."""
    check_tower(config, AUDIO_KINDS, _AUDIO_SIZES)
    if config["patch_size"] > min(config["bands"], config["frames"]):
        raise ValueError(f"a patch of {config['patch_size']} is larger than a spectrogram of this tower")
    pair = config.get("mean", 0), config.get("std", 0)
    is_number = all(isinstance(value, int | float) and math.isfinite(value) for value in pair)
    if pair != (None, None) and not (is_number and pair[1]):
        raise ValueError(f"mean {pair[0]!r} and std {pair[1]!r} of an audio tower cannot normalise")


def check_tower(config: Any, kinds: tuple[str, ...], sizes: tuple[str, ...] = _TEXT_SIZES) -> None:
    """Raise ValueError, in one line, unless this is the configuration of a tower."""
    if not isinstance(config, Mapping) or config.get("kind") not in kinds:
        raise ValueError(f"this is no configuration of a tower of the kind {' or '.join(kinds)}: {str(config)[:80]}")
    for name in sizes:
        if type(config.get(name)) is not int or config[name] < 1:
            raise ValueError(f"{name} {config.get(name)!r} of a tower is not a whole number of at least 1")
    if config["dim"] % config["heads"]:
        raise ValueError(f"a tower of dim {config['dim']} cannot have {config['heads']} heads")
    if config.get("activation") not in ACTIVATIONS:
        raise ValueError(f"activation {config.get('activation')!r} is unknown; use {' or '.join(ACTIVATIONS)}")
    eps = config.get("norm_eps")
    if not isinstance(eps, int | float) or not 0 < eps < 1:
        raise ValueError(f"norm_eps {eps!r} of a tower is not in (0, 1)")
