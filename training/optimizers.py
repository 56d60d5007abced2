"""Optimizers of transformers."""

import re

import torch
from torch import nn

from tandem.files.installed import missing_package

_NEVER = re.compile(r"(.*_)?(gamma|bias)|null_.*")


def make_optimizer(
    model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float, *, lion: bool = False
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019), or Lion (Chen et al. 2023; the package lion-pytorch).

    Weights with two or more dimensions above 1 decay, but for scales, biases and what stands in the place of a missing
    condition (their names are gamma, bias, or begin with null_), of which several may lie in one tensor. With one
    dimension above 1, as in (1, d, 1, 1), or none, nothing decays. Frozen weights have no state.

    Raises:
        ValueError: one line, if the package is missing.
    """
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            (decaying if _decays(name, weight) else others).append(weight)
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    if not lion:
        return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)
    try:
        from lion_pytorch import Lion
    except ImportError:
        raise missing_package("--use_lion", "lion-pytorch", "lion") from None
    optimizer: torch.optim.Optimizer = Lion(groups, lr=lr, betas=betas)
    return optimizer


def _decays(name: str, weight: nn.Parameter) -> bool:
    is_matrix = sum(size > 1 for size in weight.shape) >= 2
    return is_matrix and not _NEVER.fullmatch(name.rpartition(".")[2])
