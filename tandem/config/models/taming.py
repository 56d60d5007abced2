"""Configurations of the body of taming-transformers and latent diffusion, and of a continuous latent. Imports no
PyTorch, so that `--help` is fast."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.config.converters import any_float, non_negative_float, positive_float, size, sizes, width
from tandem.config.fields import ModelConfig, flag, given, when

TAMING, KL = "taming", "kl"
# Key in config.json: the scale is computed from statistics of latents that are saved with the weights.
SCALE_IS_MEASURED = "scale_is_measured"
_IS_TAMING = when("body", TAMING)
_LARGEST_SCALE = 1e6


@dataclass
class BodyConfig(ModelConfig):
    """The layers around the quantizer of an autoencoder of images."""

    body: str = flag(
        "muse",
        "layers of encoder and decoder: those of Muse's trainer, or taming's, which latent diffusion (Stable "
        "Diffusion's VAE), LlamaGen and IBQ have too",
        choices=("muse", TAMING),
        title="model",
        architecture=True,
    )
    ch_mult: tuple[int, ...] = flag(
        (1, 1, 2, 2, 4),
        "channels of each level as multiples of --dim, finest first; every level but the last halves the side",
        sizes,
        architecture=True,
        requires=_IS_TAMING,
    )
    attention_levels: tuple[int, ...] | None = flag(
        None,
        "levels with attention after each residual block; level 0 has full resolution (default: none but the middle); "
        "taming's attn_resolutions [16] at a resolution of 256 is level 4",
        sizes,
        architecture=True,
        requires=_IS_TAMING,
    )
    decoder_attention: bool = flag(
        True,
        "--attention_levels of the decoder, too; MAR's decoder has attention in the middle alone",
        architecture=True,
        requires=(_IS_TAMING, given("attention_levels", "LEVELS")),
    )
    z_channels: int | None = flag(
        None,
        "channels between encoder and quant_conv (default: those of a code or a latent)",
        width,
        architecture=True,
        requires=_IS_TAMING,
    )
    quant_conv: bool = flag(
        True, "1 x 1 convolutions around the quantizer; SD3 and FLUX have none", architecture=True, requires=_IS_TAMING
    )
    force_upcast: bool = flag(
        True,
        "value of force_upcast that convert.py export --to diffusers writes: a pipeline in fp16 then decodes in fp32",
        fixed_on_resume=True,
        requires=_IS_TAMING,
    )
    norm_groups: int = flag(
        32, "groups of every GroupNorm; they divide --dim", size, architecture=True, requires=_IS_TAMING
    )

    @classmethod
    def validate(cls, args: argparse.Namespace, parser: Any) -> None:
        if args.body == TAMING:
            args.num_layers = len(args.ch_mult) - 1
            if "num_resnet_blocks" not in args.explicit:
                args.num_resnet_blocks = (2,)


@dataclass
class LatentConfig(ModelConfig):
    """Configuration of a continuous latent (--quantizer kl). Its scale is measured in training, unless it is given."""

    latent_dim: int = flag(
        4, "channels of a latent (kl)", width, title="quantizer", architecture=True, requires=when("quantizer", KL)
    )
    scaling_factor: float | None = flag(
        None,
        "a diffusion model gets (latent - shift_factor) x scaling_factor (kl; default: 1 / the standard deviation of "
        "the latents, measured over the training data)",
        positive_float,
        fixed_on_resume=True,
        requires=when("quantizer", KL),
    )
    shift_factor: float | None = flag(
        None,
        "mean of the latents (kl; default: 0 beside --scaling_factor, else measured)",
        any_float,
        fixed_on_resume=True,
        requires=(when("quantizer", KL), given("scaling_factor", "NUMBER")),
    )

    @classmethod
    def architecture_of(cls, model: Mapping[str, Any], args: Any) -> dict[str, Any]:
        """Leave out a measured scale: the run goes on measuring it, from the averages in the weights."""
        return super().architecture_of(without_measured_scale(model), args)


def check_scale(config: LatentConfig) -> None:
    """Check the scale, which is not trusted. Raises ValueError, in one line, if a value is no number below 1e6, or the
    factor is not above 0."""
    for name in ("scaling_factor", "shift_factor"):
        if getattr(config, name) is not None:
            check_number(name, getattr(config, name))
    if config.scaling_factor is not None and config.scaling_factor <= 0:
        raise ValueError(f"scaling_factor {config.scaling_factor}: it has to be above 0")


def check_number(name: str, value: Any) -> None:
    """Raise ValueError, in one line, if an untrusted value is no number below 1e6."""
    if type(value) not in (int, float) or not abs(value) < _LARGEST_SCALE:
        raise ValueError(f"{name} {str(value)[:80]} is no number below {_LARGEST_SCALE:.0f}")


def without_measured_scale(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a model from config.json, without the scale if the model has measured it itself."""
    config = dict(config)
    return {**config, "scaling_factor": None, "shift_factor": None} if config.pop(SCALE_IS_MEASURED, False) else config


@dataclass
class LatentLossFlags:
    """Flags of the losses of a continuous latent."""

    latent: str = flag(
        "sample",
        "what the decoder is trained on: a sample of the latent's Gaussian, or its mode (kl)",
        choices=("sample", "mode"),
        title="quantizer",
        requires=when("quantizer", KL),
    )
    # Latent diffusion has 1e-6 beside an absolute error of images in [-1, 1], which is twice that of [0, 1].
    kl_loss_weight: float = flag(
        5e-7,
        "weight of the KL to the standard normal in nats, where it and the reconstruction error are both summed over a "
        "sample: over an image or a clip (kl)",
        non_negative_float,
        requires=when("quantizer", KL),
    )
