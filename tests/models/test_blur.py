from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from models.decoder import blur
from tests.models.helpers import some

IMAGES = some(3, 2, 7, 6).double()
SIGMA = torch.tensor([0.0, 0.6, 2.0])


def test_each_image_is_blurred_by_its_own_gaussian() -> None:
    out = blur(IMAGES, SIGMA)
    assert torch.equal(out[0], IMAGES[0])
    for index, sigma in enumerate(SIGMA.tolist()[1:], start=1):
        taps = torch.exp(-torch.tensor([1, 0, 1]).double() / (2 * sigma**2))
        kernel = (taps[:, None] * taps / taps.sum() ** 2).expand(2, 1, 3, 3)
        padded = F.pad(IMAGES[index : index + 1], (1,) * 4, mode="reflect")
        expected = F.conv2d(padded, kernel, groups=2)
        # sigma is fp32
        torch.testing.assert_close(out[index : index + 1], expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(blur(IMAGES[index : index + 1], SIGMA[index : index + 1]), out[index : index + 1])


@pytest.mark.parametrize("side", [1, 2])
def test_the_smallest_images_are_blurred_too(side: int) -> None:
    images = torch.ones(3, 1, side, side)
    torch.testing.assert_close(blur(images, SIGMA), images)
