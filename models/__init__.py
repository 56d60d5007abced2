"""The models: plain modules that know nothing of arguments, processes, run folders or loggers."""

from __future__ import annotations

from .decoder import Decoder
from .discrete_vae import DiscreteVAE, VAEOutput
from .discriminator import Discriminator
from .files.building import build_in_memory
from .mulan import MuLaN, MulanOutput
from .quantizers.residual import ResidualQuantizer
from .unet import Unet
from .video_discriminator import VideoDiscriminator
from .video_tokenizer import VideoTokenizer, VideoTokenizerOutput
from .vqgan import VQGAN, VQGANOutput

__all__ = [
    "VQGAN", "Decoder", "DiscreteVAE", "Discriminator", "MuLaN", "MulanOutput", "ResidualQuantizer", "Unet",
    "VAEOutput", "VQGANOutput", "VideoDiscriminator", "VideoTokenizer", "VideoTokenizerOutput", "build_in_memory",
]  # fmt: skip
