"""The count of floating point operations, against closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import flop_counter

from tandem.config.models.autoencoders import DiscreteVAEConfig
from tandem.flops import FlopCounter, recomputation
from tandem.models.autoencoders.discrete_vae import DiscreteVAE
from tandem.models.layers.recompute import recompute_in_backward


def flops_of(compute: Callable[[], Tensor]) -> float:
    """Of a forward and a backward pass."""
    with FlopCounter() as counter:
        compute().sum().backward()
    return counter.flops


def weights(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_a_linear_layer_has_one_product_forward_and_two_backward() -> None:
    assert flops_of(lambda: F.linear(weights(5, 7), weights(11, 7), weights(11))) == 3 * 2 * 5 * 7 * 11
    data = torch.randn(5, 7)
    assert flops_of(lambda: F.linear(data, weights(11, 7))) == 2 * 2 * 5 * 7 * 11  # nobody needs the data's gradient


def test_attention_has_two_products_forward_and_four_or_five_backward() -> None:
    """The fused kernel computes the first product again within its backward pass, which PyTorch's formula counts."""
    query, key, value = weights(2, 3, 16, 8), weights(2, 3, 32, 8), weights(2, 3, 32, 8)
    product = 2 * (2 * 3) * 16 * 32 * 8
    plain = flops_of(lambda: (query @ key.mT).softmax(-1) @ value)
    assert plain == 6 * product
    assert flops_of(lambda: F.scaled_dot_product_attention(query, key, value)) in (6 * product, 7 * product)


def test_the_layers_of_the_discrete_vae_have_the_operations_of_their_shapes() -> None:
    """Two halvings of 16 pixels, no residual blocks: convolutions of 4 x 4 with stride 2, then one of 1 x 1 to the
    codes; codes times codebook; a convolution of 1 x 1 and its mirror image, transposed convolutions of 4 x 4."""
    config = DiscreteVAEConfig(
        image_size=16, num_layers=2, num_resnet_blocks=0, num_tokens=16, codebook_dim=6, hidden_dim=8
    )
    model, b, codes, wide, width = DiscreteVAE(config), 3, 16, 8, 6
    images = torch.rand(b, 3, 16, 16)
    noise = torch.zeros(b, *model.noise_shape)
    first, second, to_codes = 8 * 8 * 16 * 3 * wide, 4 * 4 * 16 * wide * wide, 4 * 4 * wide * codes
    codebook = 4 * 4 * codes * width
    grow, last, colours = 4 * 4 * 16 * width * wide, 8 * 8 * 16 * wide * wide, 16 * 16 * wide * 3
    forward = first + second + to_codes + codebook + grow + last + colours
    backward = 2 * forward - first  # the images need no gradient
    assert flops_of(lambda: model(images, noise=noise, temperature=1.0).recon_loss) == 2 * b * (forward + backward)


@pytest.fixture
def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(4 * 36, 5))


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 8, 8)


def test_what_is_computed_again_is_left_out(layers: nn.Sequential, images: Tensor) -> None:
    once = flops_of(lambda: layers(images))
    assert once > 0
    recompute = flop_counter.FlopCounterMode(display=False)
    with recompute:
        recompute_in_backward(layers, images, when=True).sum().backward()
    assert recompute.get_total_flops() > once
    assert flops_of(lambda: recompute_in_backward(layers, images, when=True)) == once

    def twice() -> Any:
        with recomputation():
            layers(images)
        return layers(images)

    assert flops_of(twice) == once


def test_counting_changes_no_bit_of_a_compiled_model_and_finds_the_same(layers: nn.Sequential, images: Tensor) -> None:
    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(layers(images).square().sum(), list(layers.parameters())))

    with FlopCounter() as plain:
        gradients()
    layers.compile()
    expected = gradients()
    with FlopCounter() as compiled:
        counted = gradients()
    assert compiled.flops == plain.flops > 0
    for each, other in zip(counted, expected, strict=True):
        assert torch.equal(each, other)


def test_a_call_that_no_formula_knows_makes_the_number_unknown_and_is_computed(
    layers: nn.Sequential, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*args: Any, **kwargs: Any) -> int:
        raise AssertionError

    monkeypatch.setitem(flop_counter.flop_registry, torch.ops.aten.convolution, unknown)
    with FlopCounter() as counter:
        out = layers(images)
    assert counter.flops != counter.flops
    assert torch.equal(out, layers(images))
