"""The models: plain modules, independent of command lines, processes, run folders and loggers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.lazy import lazy_names

if TYPE_CHECKING:
    from .audio_text.mulan import MuLaN, MulanOutput
    from .autoencoders.discrete_vae import DiscreteVAE, VAEOutput
    from .autoencoders.discriminator import Discriminator, MaskBitDiscriminator, VideoDiscriminator
    from .autoencoders.video_tokenizer import VideoTokenizer, VideoTokenizerOutput
    from .autoencoders.vqgan import VQGAN, VQGANOutput
    from .base import build_in_memory
    from .diffusion.decoder import Decoder
    from .diffusion.losses import DiffusionLoss, DiffusionLossOutput
    from .diffusion.unet import Unet
    from .features.clip import Clip, with_embeddings
    from .features.i3d import i3d_features
    from .features.lpips import load_lpips, load_perceptual
    from .features.vision import VisionFeatures
    from .layers.video.blocks import check_frames
    from .layers.video.causal import StreamState

__all__ = [
    "VQGAN", "Clip", "Decoder", "DiffusionLoss", "DiffusionLossOutput", "DiscreteVAE", "Discriminator",
    "MaskBitDiscriminator", "MuLaN", "MulanOutput", "StreamState", "Unet", "VAEOutput", "VQGANOutput",
    "VideoDiscriminator", "VideoTokenizer", "VideoTokenizerOutput", "VisionFeatures", "build_in_memory", "check_frames",
    "i3d_features", "load_lpips", "load_perceptual", "with_embeddings",
]  # fmt: skip

__getattr__ = lazy_names(__name__, {
    "Clip": "features.clip", "Decoder": "diffusion.decoder", "DiffusionLoss": "diffusion.losses",
    "DiffusionLossOutput": "diffusion.losses", "DiscreteVAE": "autoencoders.discrete_vae",
    "Discriminator": "autoencoders.discriminator", "MaskBitDiscriminator": "autoencoders.discriminator",
    "MuLaN": "audio_text.mulan", "MulanOutput": "audio_text.mulan",
    "StreamState": "layers.video.causal", "Unet": "diffusion.unet", "VAEOutput": "autoencoders.discrete_vae",
    "VQGAN": "autoencoders.vqgan", "VQGANOutput": "autoencoders.vqgan",
    "VideoDiscriminator": "autoencoders.discriminator", "VideoTokenizer": "autoencoders.video_tokenizer",
    "VideoTokenizerOutput": "autoencoders.video_tokenizer", "VisionFeatures": "features.vision",
    "build_in_memory": "base", "check_frames": "layers.video.blocks", "i3d_features": "features.i3d",
    "load_lpips": "features.lpips", "load_perceptual": "features.lpips", "with_embeddings": "features.clip",
})  # fmt: skip
