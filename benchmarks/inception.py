"""An Inception with random weights, for machines that may not fetch the published ones."""

from __future__ import annotations

import torch
import torchvision
from torch import Tensor


def random_inception() -> dict[str, Tensor]:
    """Random weights under the names of FID's Inception, which are torchvision's."""
    with torch.device("meta"):
        shapes = torchvision.models.inception_v3(weights=None, aux_logits=False, init_weights=False, num_classes=1008)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, value in shapes.state_dict().items():
        if name.endswith("num_batches_tracked"):
            continue  # the published file is older than these
        if value.dim() > 1:
            scale = (2 / value[0].numel()) ** 0.5
            weights[name] = (torch.randn(value.shape, generator=generator) * scale).half()
        else:
            ones = name.endswith(("running_var", "bn.weight"))
            weights[name] = torch.full(value.shape, 1.0 if ones else 0.0, dtype=torch.float16)
    return weights
