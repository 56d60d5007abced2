"""Diffusion: noise schedules, objectives, losses, and samplers, for any network that denoises."""

from __future__ import annotations

from .guidance import Denoise, Denoised, denoiser, guided
from .losses import DiffusionLoss, Losses
from .lowres import blur
from .objectives import LOSS_TYPES, LOSS_WEIGHTS, OBJECTIVES, WithLearnedWeight, check_combination
from .sampling import SAMPLERS, SPACINGS, Inpaint, dynamic_threshold, sample
from .schedule import SCHEDULES, Schedule

__all__ = [
    "LOSS_TYPES", "LOSS_WEIGHTS", "OBJECTIVES", "SAMPLERS", "SCHEDULES", "SPACINGS", "Denoise", "Denoised",
    "DiffusionLoss", "Inpaint", "Losses", "Schedule", "WithLearnedWeight", "blur", "check_combination", "denoiser",
    "dynamic_threshold", "guided", "sample",
]  # fmt: skip
