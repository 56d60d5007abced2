"""The discriminator against its specification: sizes, every layer written out a second time, second derivatives."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.discriminator import Discriminator
from tests.models.helpers import some_images


def small(**overrides: int) -> Discriminator:
    torch.manual_seed(0)
    return Discriminator(**{"dim": 4, "layers": 2, "groups": 2, **overrides})


def reference(state: Mapping[str, Tensor], images: Tensor, layers: int, groups: int) -> Tensor:
    def conv(name: str, x: Tensor, **options: int) -> Tensor:
        return F.conv2d(x, state[f"{name}.weight"], state[f"{name}.bias"], **options)

    def leaky(x: Tensor) -> Tensor:
        return torch.where(x > 0, x, x * 0.1)

    x = leaky(conv("layers.0.0", images, padding=2))
    for level in range(1, layers + 1):
        x = conv(f"layers.{level}.0", x, stride=2, padding=1)
        grouped = x.reshape(len(x), groups, -1)
        mean, variance = grouped.mean(2, keepdim=True), grouped.var(2, keepdim=True, unbiased=False)
        x = ((grouped - mean) / (variance + 1e-5).sqrt()).reshape_as(x)
        scale, shift = state[f"layers.{level}.1.weight"], state[f"layers.{level}.1.bias"]
        x = leaky(x * scale[:, None, None] + shift[:, None, None])
    return conv("to_logits.2", leaky(conv("to_logits.0", x)))


def test_128_pixels_give_5_by_5_logits_and_the_channels_of_the_specification() -> None:
    model = Discriminator(dim=16)
    convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert [conv.out_channels for conv in convs] == [16, 16, 32, 64, 128, 128, 1]
    assert [conv.kernel_size[0] for conv in convs] == [5, 4, 4, 4, 4, 1, 4]
    norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    assert [norm.num_groups for norm in norms] == [16] * 4
    assert model(some_images(size=128)).shape == (2, 1, 5, 5)


def test_logits_equal_a_second_implementation() -> None:
    model, images = small(), some_images(size=20)
    for name, parameter in model.named_parameters():
        if ".1." in name and name.startswith("layers"):
            nn.init.uniform_(parameter, 0.5, 1.5)  # the scales and shifts of the norms start as 1 and 0
    expected = reference(model.state_dict(), images, layers=2, groups=2)
    torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-6)
    alone = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(alone, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dim", "groups"), [(16, [16, 16, 16]), (24, [8, 16, 16]), (10, [2, 4, 8]), (7, [1, 2, 4])])
def test_groups_that_do_not_divide_the_channels_become_their_common_divisor(dim: int, groups: list[int]) -> None:
    model = small(dim=dim, layers=3, groups=16)
    assert [module.num_groups for module in model.modules() if isinstance(module, nn.GroupNorm)] == groups
    assert model(some_images(size=32)).isfinite().all()


def test_it_can_be_differentiated_twice() -> None:
    model = small().double()
    images = some_images(1, size=4).double().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: model.layers(x).sum((2, 3)), images)


def test_memory_format_changes_no_value() -> None:
    model, images, last = small(), some_images(size=20), torch.channels_last
    expected = model(images)
    model.to(memory_format=last)
    torch.testing.assert_close(model(images.to(memory_format=last)), expected)
    assert model.layers(images.to(memory_format=last)).is_contiguous(memory_format=last)


def test_logits_are_fp32_under_autocast_and_in_a_model_cast_to_bf16() -> None:
    model, images = small(), some_images(size=20)
    expected = model(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(images)
    cast = model.bfloat16()(images)
    assert found.dtype == cast.dtype == torch.float32
    for logits in (found, cast):
        torch.testing.assert_close(logits, expected, rtol=0.05, atol=0.05)


def test_the_smallest_image_gives_one_logit_and_a_smaller_one_is_an_error_with_the_sizes() -> None:
    model = small()
    assert model(some_images()).shape == (2, 1, 1, 1)
    error = r"^images of 15 pixels are too small .* of 2 layers, which needs 16; use larger images or fewer layers$"
    for images in (some_images()[:, :, 1:], some_images()[..., 1:]):
        with pytest.raises(ValueError, match=error):
            model(images)
    with pytest.raises(ValueError, match=error):
        model.check_side(15)
