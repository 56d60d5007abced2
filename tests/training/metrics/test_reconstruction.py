"""Image quality against closed forms and scikit-image."""

import math

import pytest
import torch
from skimage.metrics import structural_similarity

from tandem.training.metrics.reconstruction import ReconstructedVariance, psnr, ssim
from tests.processes import on_processes


def pictures(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("images", "reconstructions", "expected"),
    [([0.5], [0.6], 20), ([0.5], [0.49], 40), ([1], [7], 100), ([1], [-1], 0), ([0.2, 0.4, 0, 0], [0] * 4, 13.0103)],
    ids=["error 0.1", "error 0.01", "clamped, equal: capped", "clamped", "mean squared error (0.04 + 0.16) / 4"],
)
def test_psnr_is_minus_ten_log10_of_the_mean_squared_error(images, reconstructions, expected):
    x, y = (torch.tensor(values).float().reshape(1, 1, 1, -1) for values in (images, reconstructions))
    assert psnr(x.expand(2, 3, 4, -1), y.expand(2, 3, 4, -1)).tolist() == pytest.approx([expected] * 2, abs=1e-3)


@pytest.mark.parametrize(
    ("channels", "height", "width", "noise"), [(3, 32, 48, 0.1), (1, 11, 11, 0.5), (4, 20, 13, 0.01)]
)
def test_ssim_equals_scikit_image(channels, height, width, noise):
    smooth = torch.nn.functional.interpolate(pictures(0, 2, channels, 4, 4), size=(height, width), mode="bilinear")
    noisy = (smooth + noise * (pictures(1, *smooth.shape) - 0.5)).clamp(0, 1)
    expected = [
        structural_similarity(
            x.double().numpy(), y.double().numpy(), data_range=1.0, channel_axis=0,
            gaussian_weights=True, sigma=1.5, use_sample_covariance=False,
        )
        for x, y in zip(smooth, noisy, strict=True)
    ]  # fmt: skip
    assert ssim(smooth, noisy).tolist() == pytest.approx(expected, abs=1e-6)


def test_ssim_takes_images_smaller_than_its_window():
    images = pictures(0, 1, 3, 8, 5)
    assert ssim(images, images).item() == pytest.approx(1.0)
    assert -1 <= ssim(images, 1 - images).item() < 0.5


def test_ssim_does_not_follow_autocast():
    x, y = pictures(0, 1, 3, 16, 16), pictures(1, 1, 3, 16, 16)
    expected = ssim(x, y)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ssim(x, y), expected)


def coarse_images(channels: int = 3) -> torch.Tensor:
    """Six images of 4 x 4 parts that are each of one colour, 8 x 12 pixels, in [0.25, 0.75]."""
    parts = 0.25 + 0.5 * pictures(2, 6, channels, 4, 4)
    return parts.repeat_interleave(2, 2).repeat_interleave(3, 3)


def variances(*pairs: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    measured = ReconstructedVariance()
    for images, reconstructions in pairs:
        measured.add(images, reconstructions)
    return measured.result()


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, 1.5])
def test_reconstructions_between_the_mean_image_and_the_image_keep_a_share_of_the_variance(share, channels):
    images = coarse_images(channels=channels)
    mean = images.mean(0, keepdim=True)
    found = variances((images, mean + share * (images - mean)))
    assert found["variance_kept"] == pytest.approx(share**2, abs=1e-6)
    assert found["explained_variance"] == pytest.approx(1 - (1 - share) ** 2, abs=1e-6)


def test_one_reconstruction_of_all_images_keeps_nothing_whatever_it_shows():
    images = coarse_images()
    for pattern in (images[:1], pictures(3, 1, 3, 8, 12), torch.zeros(1, 3, 8, 12)):
        found = variances((images, pattern.expand_as(images)))
        assert found["variance_kept"] == pytest.approx(0, abs=1e-9)
        assert found["explained_variance"] < -0.01


def test_noise_that_is_finer_than_a_part_costs_no_variance():
    images = coarse_images()
    chequered = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).repeat(4, 6) * 0.2
    assert variances((images, images + chequered)) == pytest.approx({"variance_kept": 1, "explained_variance": 1})


def test_reconstructed_variance_pools_exactly_over_batches_and_processes_even_one_without_images():
    images, others = coarse_images(), coarse_images().flip(2) * 0.9
    whole = variances((images, others))
    assert variances((images[:1], others[:1]), (images[1:], others[1:])) == pytest.approx(whole)

    def work(here):
        measured = ReconstructedVariance()
        if here.is_root:
            measured.add(images, others)
        return measured.result(here.sum)

    assert on_processes(2, work) == [pytest.approx(whole)] * 2


def test_equal_images_have_no_variance_to_keep():
    images = pictures(0, 1, 3, 8, 8).expand(4, 3, 8, 8)
    assert all(math.isnan(value) for value in variances((images, pictures(1, 4, 3, 8, 8))).values())
