"""The VQGAN: its shapes, its codes, its files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from models import VQGAN
from tests.models.helpers import VQGAN as SIZES
from tests.models.helpers import some_images
from training.objectives.adversarial import last_layer_gradient

QUANTIZERS = ("lfq", "vq", "fsq", "bsq", "ibq")


def tiny(quantizer: str = "lfq", **changes: Any) -> VQGAN:
    torch.manual_seed(0)
    return VQGAN(**{**SIZES, "quantizer": quantizer, **changes})


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_a_forward_pass_gives_images_codes_and_losses_with_a_gradient_for_every_weight(quantizer: str) -> None:
    model = tiny(quantizer)
    out = model(some_images())
    assert out.reconstruction.shape == (2, 3, 16, 16) and out.reconstruction.dtype == torch.float32
    assert out.codes.shape == (2, 4, 4) and out.codes.dtype == torch.int64
    assert out.codes.min() >= 0 and out.codes.max() < model.num_codes
    assert out.features.shape == (2, 8, 16, 16) and not out.features.requires_grad
    assert set(out.losses) == set(model.quantizer.loss_names)
    assert all(loss.shape == () for loss in out.losses.values())
    (F.l1_loss(out.reconstruction, some_images()) + sum(out.losses.values())).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
    assert all(p.grad.any() for p in model.encoder[0].parameters() if p.grad is not None)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_codes_are_encoded_without_losses_and_decoded_to_the_bit(
    quantizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(quantizer).eval()
    with torch.no_grad():
        out = model(some_images())
        monkeypatch.setattr(model.quantizer, "_quantize", None)
        assert torch.equal(model.encode(some_images()), out.codes)
        assert torch.equal(model.decode(out.codes), out.reconstruction)
        assert torch.equal(model.decode(out.codes.flatten(1)), out.reconstruction)


def convolution(fan_in: int, fan_out: int, kernel: int) -> int:
    return fan_in * fan_out * kernel**2 + fan_out


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_the_layers_are_those_of_the_specification(blocks: int) -> None:
    """Counted by hand: conv5, then conv4 of stride 2 to dim x 1, 2, 4, 8, residual blocks on the last level, mirrored
    with twice as wide convolutions before the gates."""
    dim, bits = 16, 8
    widths = [dim, dim, 2 * dim, 4 * dim, 8 * dim]
    c = widths[-1]
    norm = 2 * c
    encoder = convolution(3, dim, 5) + sum(convolution(widths[i], widths[i + 1], 4) for i in range(4))
    encoder += blocks * (2 * (convolution(c, c, 3) + norm) + convolution(c, c, 1))
    decoder = convolution(dim, 3, 1) + sum(convolution(widths[i + 1], widths[i], 4) for i in range(4))
    decoder += blocks * (2 * (convolution(c, 2 * c, 3) + norm) + convolution(c, c, 1))
    projections = convolution(c, bits, 1) + convolution(bits, c, 1)
    model = VQGAN(image_size=32, dim=dim, num_layers=4, num_resnet_blocks=blocks, codebook_size=2**bits)
    assert sum(p.numel() for p in model.parameters()) == encoder + decoder + projections
    assert {layer.negative_slope for layer in model.modules() if isinstance(layer, nn.LeakyReLU)} == {0.1}
    assert {layer.num_groups for layer in model.modules() if isinstance(layer, nn.GroupNorm)} <= {16}


def test_residual_blocks_can_be_given_for_every_level_finest_first() -> None:
    model = tiny(num_resnet_blocks=[2, 0])
    for half in (model.encoder, model.decoder):
        names = [type(layer).__name__ for layer in half]
        assert names == ["Conv2d", "Sequential", "ResBlock", "ResBlock", "Sequential", "Conv2d"]


def test_nothing_squashes_the_output() -> None:
    model = tiny()
    with torch.no_grad():
        model.last_layer.bias.fill_(7.0)
        model.last_layer.weight.zero_()
        assert (model(some_images()).reconstruction == 7.0).all()


def test_an_adaptive_weight_needs_no_pass_through_the_model() -> None:
    """The gradient at the last layer from features and image gradient is autograd's."""
    model = tiny()
    out = model(some_images())
    loss = F.l1_loss(out.reconstruction, some_images())
    (expected,) = torch.autograd.grad(loss, model.last_layer.weight, retain_graph=True)
    (at_images,) = torch.autograd.grad(loss, out.reconstruction)
    ours = last_layer_gradient(out.features, at_images, tuple(model.last_layer.weight.shape))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("side", [(16, 16), (8, 24)])
def test_any_size_that_divides_is_taken(side: tuple[int, int]) -> None:
    model = tiny().eval()
    x = torch.rand(1, 3, *side)
    assert model.encode(x).shape == (1, side[0] // 4, side[1] // 4)
    assert model.decode(model.encode(x)).shape == x.shape
    with pytest.raises(ValueError, match="width 18 must be a multiple of"):
        model(torch.rand(1, 3, 16, 18))
    with pytest.raises(ValueError, match="no square"):
        model.decode(torch.zeros(1, 3, dtype=torch.int64))
