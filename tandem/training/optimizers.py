"""AdamW or Lion, with weight decay of matrices only."""

import re
from typing import Any, cast

import torch
from torch import Tensor, nn

from tandem.io.installed import missing_package

_NO_DECAY_NAMES = re.compile(r"(.*_)?(gamma|bias)|null_.*")


def make_optimizer(
    model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float, *, lion: bool = False
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019), or Lion (Chen et al. 2023; the package lion-pytorch).

    Weights of which two or more dimensions are larger than 1 decay, except scales, biases and embeddings of a missing
    condition (named gamma, bias or null_...). Other weights, as of shape (1, d, 1, 1), do not decay. Frozen weights are
    not passed to the optimizer.

    Raises:
        ValueError: one line, if the package is missing.
    """
    decaying: list[nn.Parameter] = []
    other_weights: list[nn.Parameter] = []
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            is_matrix = sum(size > 1 for size in weight.shape) >= 2
            decays = is_matrix and not _NO_DECAY_NAMES.fullmatch(name.rpartition(".")[2])
            (decaying if decays else other_weights).append(weight)
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": other_weights, "weight_decay": 0.0}]
    if not lion:
        return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)
    try:
        from lion_pytorch import Lion
    except ImportError:
        raise missing_package("--use_lion", "lion-pytorch", "lion") from None
    optimizer: Any = Lion(groups, lr=lr, betas=betas)
    update = optimizer.update_fn

    def update_unless_skipped(weight: Tensor, gradient: Tensor, moment: Tensor, *settings: float) -> None:
        grad_scale, found_inf = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        gradient = gradient if grad_scale is None else gradient / grad_scale
        if found_inf is None or found_inf.device.type == "cpu":
            if not found_inf:
                update(weight, gradient, moment, *settings)
            return
        # The host would wait for the device to read `found_inf`: update, then restore if it is not 0.
        previous = weight.clone(), moment.clone()
        update(weight, gradient, moment, *settings)
        for tensor, old in zip((weight, moment), previous, strict=True):
            tensor.copy_(torch.where(found_inf.bool(), old, tensor))

    optimizer.update_fn = update_unless_skipped
    # As the fused AdamW does, it takes `grad_scale` and `found_inf` from the engine.
    optimizer._step_supports_amp_scaling = True
    return cast(torch.optim.Optimizer, optimizer)
