"""What the Unets of a cascade are conditioned on, for one or two blocks of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .conditions import Conditions

if TYPE_CHECKING:
    from ..unet import Unet


def conditions_of(unet: Unet, conditions: Mapping[str, Tensor], batch: int, blocks: tuple[bool, ...]) -> Conditions:
    """The conditions of one or two blocks of ``batch`` rows, of which each keeps them or has the null condition."""
    config = unet.config
    keep = torch.tensor(blocks, device=next(unet.parameters()).device).repeat_interleave(batch)
    given: dict[str, Any] = {}
    for kind, switch, name in (
        ("image", "cond_on_image_embeds", "image_embed"), ("text", "cond_on_text_encodings", "text_encodings"),
    ):  # fmt: skip
        if config[switch]:
            given[name] = torch.cat([conditions[name]] * len(blocks)) if any(blocks) and name in conditions else None
            given[f"keep_{kind}"] = keep if given[name] is not None else torch.zeros_like(keep)
    return unet.condition(**given)


def is_conditional(unet: Unet) -> bool:
    """Whether a Unet takes an image embedding or a text."""
    config = unet.config
    return bool(config["cond_on_image_embeds"] or config["cond_on_text_encodings"])


def takes_level(unet: Unet) -> bool:
    """Whether a Unet is told the noise level of its low-resolution condition."""
    config = unet.config
    return bool(config["lowres_noise_cond"])
