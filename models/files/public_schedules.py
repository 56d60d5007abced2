"""The noise schedules of decoders in files of DALLE2-pytorch 1.15.6, which have a name and a table: the name does not
say whether the last level is noise alone, nor that the schedule is shifted, the table does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..decoder import schedule_of
from ..diffusion.schedule import Schedule

_CLOSE = 1e-3  # of alpha^2, in proportion; a shift of the log SNR by 0.001 makes as much
_LARGEST_SHIFT = 1 << 16  # pixels


def noise_arguments(settings: Mapping[str, Any], tables: Sequence[Tensor | None]) -> dict[str, Any]:
    """The arguments zero_terminal_snr and noise_shift of a `Decoder` whose schedules are those of a file.

    Args:
        settings: Of `dalle2.PublicDecoder`.
        tables: For each unet alpha^2 (T,), "alphas_cumprod" there; None: the file has only the schedule's name.

    Raises:
        ValueError: one line, if there are none.
    """
    names, sizes, timesteps = settings["beta_schedule"], settings["image_sizes"], settings["timesteps"]
    rows = zip(names, sizes, tables, strict=True)
    known = [(name, size, table) for name, size, table in rows if table is not None]
    for number, table in enumerate(tables, start=1):
        if table is not None and len(table) != timesteps:
            raise ValueError(f"unet {number} has {len(table)} noise levels, and its configuration says {timesteps}")
    for zero in (False, True):
        found = {_shift_of(size, schedule_of(name, size, timesteps, zero), table) for name, size, table in known}
        for shift in (None, *sorted(each for each in found if each)):
            if all(_is(schedule_of(name, size, timesteps, zero, shift), table) for name, size, table in known):
                return {"zero_terminal_snr": zero, "noise_shift": shift}
    raise ValueError(
        f"the noise levels of its unets are none that {', '.join(dict.fromkeys(names))} can have here, with or without "
        "a last level of SNR 0 and a shift of them all by the size of the pictures"
    )


def schedule_tensors(prefix: str, betas: Tensor) -> dict[str, Tensor]:
    """The 13 tensors of a public noise scheduler (Ho et al. 2020, equations 4 to 7), fp32 (T,) and computed in fp64.

    Args:
        prefix: Of their names.
        betas: The variances beta (T,) of the schedule.
    """
    betas = betas.detach().cpu().double()
    kept = torch.cumprod(1 - betas, dim=0)
    before = torch.cat([torch.ones(1, dtype=kept.dtype), kept[:-1]])
    variance = betas * (1 - before) / (1 - kept)
    tensors = {
        "betas": betas,
        "alphas_cumprod": kept,
        "alphas_cumprod_prev": before,
        "sqrt_alphas_cumprod": kept.sqrt(),
        "sqrt_one_minus_alphas_cumprod": (1 - kept).sqrt(),
        "log_one_minus_alphas_cumprod": (1 - kept).log(),
        "sqrt_recip_alphas_cumprod": kept.rsqrt(),
        "sqrt_recipm1_alphas_cumprod": (1 / kept - 1).sqrt(),
        "posterior_variance": variance,
        "posterior_log_variance_clipped": variance.clamp_min(1e-20).log(),
        "posterior_mean_coef1": betas * before.sqrt() / (1 - kept),
        "posterior_mean_coef2": (1 - before) * (1 - betas).sqrt() / (1 - kept),
        "p2_loss_weight": torch.ones_like(betas),
    }
    return {f"{prefix}.{name}": tensor.float() for name, tensor in tensors.items()}


def _shift_of(image_size: int, plain: Schedule, table: Tensor) -> int | None:
    """The `noise_shift` with which a schedule that is ``plain`` without one agrees with a table at one level, where the
    table is most precise; None if there is none."""
    level = int((table.double() - 0.5).abs().argmin())
    shift = float(torch.logit(table[level].double()) - plain.log_snr[level])
    side = image_size * math.exp(shift / 2) if abs(shift) < 50 else 0
    return round(side) if 1 <= round(side) <= _LARGEST_SHIFT else None


def _is(schedule: Schedule, table: Tensor) -> bool:
    numbers = torch.finfo(table.dtype)
    close = max(_CLOSE, 4 * numbers.eps)
    return torch.allclose(schedule.log_snr.sigmoid(), table.double(), rtol=close, atol=numbers.tiny)
