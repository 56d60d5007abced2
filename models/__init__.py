"""The models: plain modules that know nothing of arguments, processes, run folders or loggers.

A model's module is imported when the model is first asked for, so that --help can read the names of quantizers without
PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decoder import Decoder
    from .discrete_vae import DiscreteVAE, VAEOutput
    from .discriminator import Discriminator, VideoDiscriminator
    from .files.building import build_in_memory
    from .mulan import MuLaN, MulanOutput
    from .unet import Unet
    from .video.causal import StreamState
    from .video_tokenizer import VideoTokenizer, VideoTokenizerOutput
    from .vqgan import VQGAN, VQGANOutput

__all__ = [
    "VQGAN", "Decoder", "DiscreteVAE", "Discriminator", "MuLaN", "MulanOutput", "StreamState", "Unet",
    "VAEOutput", "VQGANOutput", "VideoDiscriminator", "VideoTokenizer", "VideoTokenizerOutput", "build_in_memory",
]  # fmt: skip

_MODULES = {
    "VQGAN": "vqgan", "Decoder": "decoder", "DiscreteVAE": "discrete_vae", "Discriminator": "discriminator",
    "MuLaN": "mulan", "MulanOutput": "mulan", "StreamState": "video.causal", "Unet": "unet",
    "VAEOutput": "discrete_vae", "VQGANOutput": "vqgan", "VideoDiscriminator": "discriminator",
    "VideoTokenizer": "video_tokenizer", "VideoTokenizerOutput": "video_tokenizer",
    "build_in_memory": "files.building",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
