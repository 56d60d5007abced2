"""What the convolutional models share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import VQGAN, DiscreteVAE, Discriminator
from tests.models.helpers import VAE, some_images
from tests.models.helpers import VQGAN as TINY_VQGAN

MODELS: dict[str, Callable[[], nn.Module]] = {
    "VQGAN": lambda: VQGAN(**TINY_VQGAN),
    "DiscreteVAE": lambda: DiscreteVAE(**VAE, num_resnet_blocks=1),
    "Discriminator": lambda: Discriminator(dim=8, layers=2),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=list(MODELS))
def test_convolutions_see_activations_channels_last_whatever_the_order_of_the_weights(
    make: Callable[[], nn.Module],
) -> None:
    """Backends store weights in orders of their own, from which the bits of a result must not follow."""
    torch.manual_seed(0)
    model, images = make().eval(), some_images(size=16)
    seen = []

    def watch(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
        seen.append(output.is_contiguous(memory_format=torch.channels_last))

    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d)]
    for layer in layers:
        layer.register_forward_hook(watch)
        assert layer.weight.is_contiguous()
    results: list[Any] = []
    for order in (torch.contiguous_format, torch.channels_last):
        out = model.to(memory_format=order)(images)
        results.append(out if isinstance(out, Tensor) else out.reconstruction)
    assert len(seen) == 4 * len(layers) and all(seen)
    assert torch.equal(*results)
