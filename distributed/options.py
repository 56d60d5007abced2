"""The settings of engines, and what engines report of an update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `--help` must not import PyTorch
    from torch import Tensor

    from .batch import BatchPlan


@dataclass(frozen=True)
class Options:
    """How engines update; arguments and the backend's configuration are merged before anything starts."""

    plan: BatchPlan
    precision: str = "fp32"  # fp32, tf32, bf16 or fp16
    max_grad_norm: float = 0.0  # 0: no clipping
    max_skipped_updates: int = 20
    compile: bool = False
    timeout_minutes: float = 30.0
    check_replicas_every_n_steps: int = 1000  # 0: only before training
    deterministic: bool = False
    reduce_precision: str = "fp32"  # of the gradients that processes exchange: fp32 or bf16


@dataclass(frozen=True)
class Update:
    """What one ``Engine.step`` did. The tensors are on the device: reading them makes the host wait for it."""

    grad_norm: Tensor
    """L2 norm of the mean gradient before clipping, 0-d; the same on every process. NaN where an engine leaves it out,
    because it clips nothing and `Backend.norms_are_logged` is off."""
    skipped: Tensor
    """0-d bool: a gradient was not finite, so nothing was changed."""
    lr: float
    """The learning rate that was used; not the script's if the backend's configuration overrules it."""
