"""What FLUX.2's autoencoder has beside the one of Stable Diffusion 3: a BatchNorm without weights, whose statistics
normalise patches of 2 x 2 latents, channel by channel. Here they are those of a `VQGAN` with latent_patch 2."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tandem.config.models.taming import check_number
from tandem.io.published import shape_of
from tandem.models.autoencoders.vqgan import VQGAN

CLASS = "AutoencoderKLFlux2"  # of diffusers
PATCH = 2  # side of a patch in all of its files
EPSILON = "batch_norm_eps"
_EPSILON = 1e-4
_MAX_PATCH = 16
MEAN = "bn.running_mean"
_NAMES = (MEAN, "bn.running_var", "bn.num_batches_tracked")
# In FLUX.2's own file these convolutions stand inside of the encoder and the decoder.
_INNER_CONV = re.compile(r"^(?:encoder\.(?=quant_conv\.)|decoder\.(?=post_quant_conv\.))")


def outer_name(name: str) -> str:
    """The name in latent diffusion of a weight in FLUX.2's own file."""
    return _INNER_CONV.sub("", name)


def read_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """latent_patch, and `EPSILON`, from an untrusted configuration. Raises ValueError, in one line, for others."""
    sides, epsilon = config.get("patch_size", [PATCH] * 2), config.get(EPSILON, _EPSILON)
    patch = next((side for side in range(1, _MAX_PATCH + 1) if sides == [side, side]), None)
    if patch is None:
        raise ValueError(f"its patch_size is {str(sides)[:80]}, not a whole number from 1 to {_MAX_PATCH}, twice")
    check_number(EPSILON, epsilon)
    return {"latent_patch": patch, EPSILON: epsilon}


def pop_statistics(state: dict[str, Tensor], epsilon: float = _EPSILON) -> list[list[float]]:
    """Take the BatchNorm out of a state dict. Returns the means, and the deviations by which a pipeline divides, the
    square roots of variance + epsilon. Raises ValueError, in one line, if one of the two is missing."""
    for name in _NAMES[:2]:
        shape_of(state, name, 1)
    mean, variance, _ = (state.pop(name, None) for name in _NAMES)
    assert mean is not None and variance is not None
    return [mean.tolist(), (variance.double() + epsilon).sqrt().tolist()]


def public_statistics(model: VQGAN) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The options of the class, and the BatchNorm, of a model of ours; 0 and 1 of unknown statistics."""
    count = model.quantizer.channel_stats.shape[1]
    mean, std = model.latents_mean or [0.0] * count, model.latents_std or [1.0] * count
    variance = (torch.tensor(std, dtype=torch.float64).square() - _EPSILON).clamp_min(0)
    options = {"_class_name": CLASS, "patch_size": [model.config["latent_patch"]] * 2, EPSILON: _EPSILON}
    return options, dict(zip(_NAMES, (torch.tensor(mean), variance.float(), torch.tensor(0)), strict=True))
