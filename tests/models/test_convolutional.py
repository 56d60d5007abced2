"""What the convolutional models share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import VQGAN, DiscreteVAE, Discriminator, VideoDiscriminator
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


CRITICS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "VQGAN": (MODELS["VQGAN"], (2, 3, 16, 16)),
    "Discriminator": (MODELS["Discriminator"], (2, 3, 16, 16)),
    "VideoDiscriminator": (lambda: VideoDiscriminator(dim=8, layers=2), (2, 3, 3, 16, 16)),
}


@pytest.mark.parametrize(("make", "shape"), CRITICS.values(), ids=list(CRITICS))
def test_activation_functions_hold_no_second_tensor_and_gradients_are_the_same(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model, images = make().eval(), torch.rand(shape)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    further = {"frames": torch.zeros(len(images), dtype=torch.int64)} if images.dim() == 5 else {}

    def held() -> tuple[int, list[Tensor | None]]:
        """Bytes that the backward pass needs besides weights, and the gradients, those of a gradient's norm too."""
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in own:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        x = images.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = model(x, **further)
        n_bytes = sum(kept.values())
        made = out if isinstance(out, list) else [out if isinstance(out, Tensor) else out.reconstruction]
        loss = sum(each.square().mean() for each in made)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        twice = loss + gradient.square().sum()
        return n_bytes, list(torch.autograd.grad(twice, list(model.parameters()), allow_unused=True))

    n_bytes, gradients = held()
    for layer in model.modules():
        if isinstance(layer, nn.LeakyReLU):
            layer.inplace = False
    n_bytes_apart, expected = held()
    assert n_bytes < 0.9 * n_bytes_apart
    assert [gradient is None for gradient in gradients] == [gradient is None for gradient in expected]
    for ours, theirs in zip(gradients, expected, strict=True):
        assert ours is None or theirs is None or torch.equal(ours, theirs)
