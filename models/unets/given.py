"""What the Unets of a decoder are given beside noise, and whether those of two decoders are given the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .conditions import Conditions

if TYPE_CHECKING:
    from ..decoder import Decoder
    from ..unet import Unet

CONDITIONS = (
    ("image_embed", "cond_on_image_embeds", "image_embed_dim"),
    ("text_encodings", "cond_on_text_encodings", "text_embed_dim"),
)
"""Of each condition its name, and the arguments of a Unet that say whether it takes it and how wide it is."""


def conditions_of(unet: Unet, conditions: Mapping[str, Tensor], batch: int, blocks: tuple[bool, ...]) -> Conditions:
    """The conditions of one or two blocks of ``batch`` rows, of which each keeps them or has the null condition."""
    keep = torch.tensor(blocks, device=next(unet.parameters()).device).repeat_interleave(batch)
    given: dict[str, Any] = {}
    for name, switch, _ in CONDITIONS:
        if getattr(unet.spec, switch):
            given[name] = torch.cat([conditions[name]] * len(blocks)) if any(blocks) and name in conditions else None
            given[f"keep_{name.split('_')[0]}"] = keep if given[name] is not None else torch.zeros_like(keep)
    return unet.condition(**given)


def is_conditional(unet: Unet) -> bool:
    """Whether a Unet takes an image embedding or a text."""
    return unet.spec.cond_on_image_embeds or unet.spec.cond_on_text_encodings


def takes_level(unet: Unet) -> bool:
    """Whether a Unet is told the noise level of its low-resolution condition."""
    return unet.spec.lowres_noise_cond


def check_batch(batch: int, conditions: Mapping[str, Tensor], *others: Tensor | None) -> None:
    """Raise ValueError, in one line, unless conditions and images are as many as the pictures that are drawn."""
    for value in (*conditions.values(), *others):
        if value is not None and len(value) != batch:
            raise ValueError(f"{len(value)} conditions or images for {batch} pictures: give one for each")


def check_guide(decoder: Decoder, guide: Decoder) -> None:
    """Raise ValueError, in one line, unless the estimates of a guide can stand beside those of a decoder: as many
    Unets, the same sizes and noise levels, and no condition that the decoder does not take. Objectives may differ."""
    if (n := len(guide.unets)) != len(decoder.unets):
        raise ValueError(f"the guide has {n} Unets and the decoder {len(decoder.unets)}: give one with as many")
    for index, (size, other) in enumerate(zip(decoder.image_sizes, guide.image_sizes, strict=True)):
        mine, theirs = decoder.unet(index).spec, guide.unet(index).spec
        ours, of_guide = decoder.schedule(index), guide.schedule(index)
        wrong = None
        if other != size:
            wrong = f"makes pictures of {other} pixels a side and that of the decoder of {size}"
        elif theirs.channels != mine.channels:
            wrong = f"has {theirs.channels} channels and that of the decoder {mine.channels}"
        elif of_guide.timesteps != ours.timesteps:
            wrong = f"has {of_guide.timesteps} noise levels and that of the decoder {ours.timesteps}"
        elif of_guide.is_flow != ours.is_flow or not torch.equal(of_guide.log_snr.cpu(), ours.log_snr.cpu()):
            wrong = "has another noise schedule than that of the decoder"
        elif theirs.lowres_noise_cond and decoder.lowres_schedule() is None:
            wrong = "takes the noise level of the smaller picture and the decoder adds no noise to it"
        for name, _, width in CONDITIONS:
            taken, needed = getattr(mine, width), getattr(theirs, width)  # None for a condition that it does not take
            if needed not in (None, taken):
                takes = f"of width {taken}" if taken else "none"
                wrong = wrong or f"takes {name} of width {needed} and that of the decoder {takes}"
        if wrong:
            raise ValueError(f"Unet {index + 1} of the guide {wrong}: give a guide that fits")
