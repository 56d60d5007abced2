"""Optimizers of transformers."""

import torch
from torch import nn

from tandem.files.installed import how_to_install


def make_optimizer(
    model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float, *, lion: bool = False
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019), or Lion (Chen et al. 2023; the package lion-pytorch).

    Weights of two or more dimensions decay; scales, biases and temperatures do not. Frozen weights have no state.

    Raises:
        ValueError: one line, if the package is missing.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in weights if weight.ndim >= 2], "weight_decay": weight_decay},
        {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
    ]
    if not lion:
        return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)
    try:
        from lion_pytorch import Lion
    except ImportError:
        raise ValueError(f"--use_lion needs the package lion-pytorch: {how_to_install('lion')}") from None
    optimizer: torch.optim.Optimizer = Lion(groups, lr=lr, betas=betas)
    return optimizer
