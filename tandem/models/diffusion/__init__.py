"""Diffusion: noise schedules, losses, and samplers, for any network that denoises."""

from __future__ import annotations

from .losses import DiffusionLoss, Losses
from .sampling import Denoised, Inpaint, apply_guidance, dynamic_threshold, sample
from .schedule import Schedule

__all__ = [
    "Denoised",
    "DiffusionLoss",
    "Inpaint",
    "Losses",
    "Schedule",
    "apply_guidance",
    "dynamic_threshold",
    "sample",
]
