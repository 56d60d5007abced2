from __future__ import annotations

import torch
from torch.nn import functional as F

from models.diffusion import Schedule, augment
from models.diffusion.lowres import blur
from tests.models.helpers import some

IMAGES = some(3, 2, 7, 6).double()
SIGMA, SIZE = torch.tensor([0.0, 0.6, 2.0]), torch.tensor([5, 3, 5])


def test_each_image_is_blurred_by_its_own_gaussian() -> None:
    out = blur(IMAGES, SIGMA, SIZE, largest=5)
    assert torch.equal(out[0], IMAGES[0])
    for index, (sigma, size) in enumerate(zip(SIGMA.tolist()[1:], SIZE.tolist()[1:], strict=True), start=1):
        offsets = torch.arange(size).double() - size // 2
        taps = torch.exp(-offsets.square() / (2 * sigma**2))
        kernel = (taps[:, None] * taps / taps.sum() ** 2).expand(2, 1, size, size)
        padded = F.pad(IMAGES[index : index + 1], (size // 2,) * 4, mode="reflect")
        expected = F.conv2d(padded, kernel, groups=2)
        # sigma is fp32
        torch.testing.assert_close(out[index : index + 1], expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(
            blur(IMAGES[index : index + 1], SIGMA[index : index + 1], SIZE[index : index + 1], 5),
            out[index : index + 1],
        )


def test_noise_has_the_level_of_each_image_and_comes_after_the_blur() -> None:
    schedule, times, noise = Schedule("linear"), torch.tensor([0, 200, 999]), some(3, 2, 7, 6, seed=2).double()
    # The published decoder samples at level 200 of this schedule, whose alpha^2 is 0.65635.
    assert abs(schedule.alpha[200].item() ** 2 - 0.65635) < 5e-6
    out = augment(
        IMAGES, schedule, lowres_time=times, lowres_noise=noise, blur_sigma=SIGMA, blur_size=SIZE, largest_blur=5
    )
    blurred = blur(IMAGES, SIGMA, SIZE, 5)
    for index, t in enumerate(times):
        assert torch.equal(out[index], schedule.alpha[t] * blurred[index] + schedule.sigma[t] * noise[index])
    assert torch.equal(augment(IMAGES), IMAGES)
