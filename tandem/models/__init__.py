"""The models: plain modules, independent of command lines, processes, run folders and loggers.

The module of a model is imported at the first access to the model, so that importing this package loads no PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.models.audio_text.mulan import MuLaN, MulanOutput
    from tandem.models.autoencoders.discrete_vae import DiscreteVAE, VAEOutput
    from tandem.models.autoencoders.discriminator import Discriminator, VideoDiscriminator
    from tandem.models.autoencoders.video_tokenizer import VideoTokenizer, VideoTokenizerOutput
    from tandem.models.autoencoders.vqgan import VQGAN, VQGANOutput
    from tandem.models.diffusion.decoder import Decoder
    from tandem.models.diffusion.unet import Unet
    from tandem.models.layers.video.causal import StreamState

    from .base import build_in_memory

__all__ = [
    "VQGAN", "Decoder", "DiscreteVAE", "Discriminator", "MuLaN", "MulanOutput", "StreamState", "Unet",
    "VAEOutput", "VQGANOutput", "VideoDiscriminator", "VideoTokenizer", "VideoTokenizerOutput", "build_in_memory",
]  # fmt: skip

_MODULES = {
    "VQGAN": "autoencoders.vqgan", "Decoder": "diffusion.decoder", "DiscreteVAE": "autoencoders.discrete_vae",
    "Discriminator": "autoencoders.discriminator", "MuLaN": "audio_text.mulan", "MulanOutput": "audio_text.mulan",
    "StreamState": "layers.video.causal", "Unet": "diffusion.unet", "VAEOutput": "autoencoders.discrete_vae",
    "VQGANOutput": "autoencoders.vqgan", "VideoDiscriminator": "autoencoders.discriminator",
    "VideoTokenizer": "autoencoders.video_tokenizer", "VideoTokenizerOutput": "autoencoders.video_tokenizer",
    "build_in_memory": "base",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
