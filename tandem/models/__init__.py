"""The models: plain modules, independent of command lines, processes, run folders and loggers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.lazy import lazy_names

if TYPE_CHECKING:
    from tandem.models.audio_text.mulan import MuLaN, MulanOutput
    from tandem.models.autoencoders.discrete_vae import DiscreteVAE, VAEOutput
    from tandem.models.autoencoders.discriminator import Discriminator, VideoDiscriminator
    from tandem.models.autoencoders.video_tokenizer import VideoTokenizer, VideoTokenizerOutput
    from tandem.models.autoencoders.vqgan import VQGAN, VQGANOutput
    from tandem.models.diffusion.decoder import Decoder
    from tandem.models.diffusion.unet import Unet
    from tandem.models.features.i3d import i3d_features
    from tandem.models.features.lpips import load_lpips, load_perceptual
    from tandem.models.layers.video.blocks import check_frames
    from tandem.models.layers.video.causal import StreamState

    from .base import build_in_memory

__all__ = [
    "VQGAN", "Decoder", "DiscreteVAE", "Discriminator", "MuLaN", "MulanOutput", "StreamState", "Unet",
    "VAEOutput", "VQGANOutput", "VideoDiscriminator", "VideoTokenizer", "VideoTokenizerOutput", "build_in_memory",
    "check_frames", "i3d_features", "load_lpips", "load_perceptual",
]  # fmt: skip

__getattr__ = lazy_names(__name__, {
    "VQGAN": "autoencoders.vqgan", "Decoder": "diffusion.decoder", "DiscreteVAE": "autoencoders.discrete_vae",
    "Discriminator": "autoencoders.discriminator", "MuLaN": "audio_text.mulan", "MulanOutput": "audio_text.mulan",
    "StreamState": "layers.video.causal", "Unet": "diffusion.unet", "VAEOutput": "autoencoders.discrete_vae",
    "VQGANOutput": "autoencoders.vqgan", "VideoDiscriminator": "autoencoders.discriminator",
    "VideoTokenizer": "autoencoders.video_tokenizer", "VideoTokenizerOutput": "autoencoders.video_tokenizer",
    "build_in_memory": "base", "check_frames": "layers.video.blocks", "i3d_features": "features.i3d",
    "load_lpips": "features.lpips", "load_perceptual": "features.lpips",
})  # fmt: skip
