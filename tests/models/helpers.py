"""What several tests of the models use: small sizes, random inputs, comparisons."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.quantizers import make_quantizer
from models.quantizers.base import Quantizer

Run = Callable[[int, Callable[[Any], Any]], list[Any]]

VAE: dict[str, Any] = {"image_size": 16, "num_tokens": 13, "codebook_dim": 6, "num_layers": 2, "hidden_dim": 5}
VQGAN: dict[str, Any] = {"image_size": 16, "dim": 8, "num_layers": 2, "codebook_size": 256}
TOKENIZER: dict[str, Any] = {
    "image_size": 8, "layers": "residual,compress_space:6,compress_time,residual", "init_dim": 4, "input_kernel": 3,
    "norm": "rms", "codebook_size": 16,
}  # fmt: skip
# 64 bands x 51 frames: 4 x 3 patches.
MULAN: dict[str, Any] = {
    "clip_seconds": 0.5, "audio_dim": 16, "audio_depth": 2, "text_dim": 12, "text_depth": 2, "heads": 2, "dim_head": 4,
    "vocab_size": 40, "max_text_tokens": 10, "dim_latent": 6,
}  # fmt: skip
UNET: dict[str, Any] = {
    "dim": 8, "dim_mults": [1, 2], "cond_dim": 12, "num_resnet_blocks": [1, 1], "attn_heads": 2, "attn_dim_head": 4,
    "cross_attn_heads": 2, "cross_attn_dim_head": 4, "cond_on_image_embeds": True, "image_embed_dim": 5,
    "cond_on_text_encodings": True, "text_embed_dim": 7, "max_text_len": 6,
}  # fmt: skip


def some(*shape: int, seed: int = 1) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_images(batch: int = 2, channels: int = 3, size: int = 16, seed: int = 1) -> Tensor:
    return torch.rand(batch, channels, size, size, generator=torch.Generator().manual_seed(seed))


def some_videos(batch: int = 2, frames: int = 5, height: int = 8, width: int = 8, seed: int = 1) -> Tensor:
    return torch.rand(batch, 3, frames, height, width, generator=torch.Generator().manual_seed(seed))


def some_unet_inputs(batch: int = 4, side: int = 8) -> dict[str, Tensor]:
    """For a model of UNET."""
    return {
        "x": some(batch, 3, side, side), "time": torch.arange(batch) * 300, "image_embed": some(batch, 5, seed=2),
        "text_encodings": some(batch, 4, 7, seed=3),
    }  # fmt: skip


def in_rows(z: Tensor) -> Tensor:
    return z.movedim(1, -1).flatten(0, -2)


def quantizer_of(name: str, **options: Any) -> Quantizer:
    torch.manual_seed(0)
    return make_quantizer(name, **options)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_bits(one: Any, other: Any) -> None:
    """Of two state dicts or models."""
    ours, theirs = (it.state_dict() if isinstance(it, nn.Module) else it for it in (one, other))
    assert ours.keys() == theirs.keys()
    same = {name: ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours}
    assert [name for name in same if not same[name]] == []


def one_line_of(read: Callable[[Path], object], path: Path) -> str:
    """The error of reading a path: one line that names it."""
    with pytest.raises(ValueError) as caught:
        read(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


class Call:
    """Pickled as a call, which runs where the file is unpickled as usual."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


class Process:
    """One of several; each collective waits for all of them."""

    def __init__(self, rank: int, world_size: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self.rank, self.world_size, self._barrier, self._slots = rank, world_size, barrier, slots
        self.collectives = 0

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self.collectives += 1
        self._slots[self.rank] = tensor.detach().clone()
        self._barrier.wait()
        parts = list(self._slots)
        self._barrier.wait()
        return parts

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange(tensor)).sum(0)

    def gather(self, tensor: Tensor) -> Tensor:
        return torch.cat(self._exchange(tensor))

    def connect(self, quantizer: Any) -> None:
        quantizer.all_reduce, quantizer.gather = self.all_reduce, self.gather
        quantizer.rank, quantizer.world_size = self.rank, self.world_size
