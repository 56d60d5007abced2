"""Image quality and code usage against closed forms and reference implementations; pooling over processes."""

import math

import pytest
import torch
from skimage.metrics import structural_similarity

from training.measures.averages import Averages, CodeUsage, code_statistics, psnr, ssim


def pictures(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def test_psnr_of_a_constant_error_is_minus_twenty_log10_of_it():
    images = torch.full((2, 3, 4, 4), 0.5)
    reconstructions = images.clone()
    reconstructions[0] += 0.1
    reconstructions[1] -= 0.01
    assert psnr(images, reconstructions).tolist() == pytest.approx([20.0, 40.0], abs=1e-3)


def test_psnr_clamps_to_the_range_and_caps_equal_images():
    images = torch.ones(1, 1, 2, 2)
    assert psnr(images, images * 7).item() == pytest.approx(100.0)
    assert psnr(images, -images).item() == pytest.approx(0.0)


def test_psnr_of_worked_example():
    # Mean squared error (0.04 + 0.16) / 4 = 0.05.
    images = torch.tensor([[[[0.2, 0.4], [0.0, 0.0]]]])
    assert psnr(images, torch.zeros_like(images)).item() == pytest.approx(-10 * math.log10(0.05))


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


def test_ssim_of_equal_images_is_one_and_of_constants_its_luminance_term():
    images = pictures(0, 2, 3, 16, 16)
    assert ssim(images, images).tolist() == pytest.approx([1.0, 1.0])
    x, y = torch.full((1, 1, 12, 12), 0.2), torch.full((1, 1, 12, 12), 0.6)
    assert ssim(x, y).item() == pytest.approx((2 * 0.12 + 1e-4) / (0.04 + 0.36 + 1e-4), rel=1e-6)


def test_ssim_takes_images_smaller_than_its_window():
    images = pictures(0, 1, 3, 8, 5)
    assert ssim(images, images).item() == pytest.approx(1.0)
    assert -1 <= ssim(images, 1 - images).item() < 0.5


def test_ssim_does_not_follow_autocast():
    x, y = pictures(0, 1, 3, 16, 16), pictures(1, 1, 3, 16, 16)
    expected = ssim(x, y)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ssim(x, y), expected)


def pooled(*readers):
    """The sum that each of several processes would get; a reader takes an all-reduce."""
    tensors = []

    def record(tensor):
        tensors.append(tensor)
        return tensor

    for read in readers:
        read(record)
    return lambda _: sum(tensors)


def test_averages_over_ragged_batches_and_processes_equal_the_mean_of_all_items():
    values = pictures(0, 11).double()
    ranks = [Averages("loss", "psnr") for _ in range(3)]
    ranks[0].add(loss=values[:4], psnr=values[:4] * 10)
    ranks[0].add(loss=values[4:5])
    ranks[1].add(loss=values[5:])
    result = ranks[2].result(pooled(*(rank.result for rank in ranks)))
    assert result == pytest.approx({"loss": values.mean().item(), "psnr": 10 * values[:4].mean().item()}, rel=1e-12)


def test_sums_survive_an_all_reduce_in_place():
    averages, usage = Averages("loss"), CodeUsage(2)
    averages.add(loss=torch.tensor([1.0, 3.0]))
    usage.add(torch.tensor([0, 1, 1]))
    for _ in range(2):
        assert averages.result(lambda sums: sums.add_(1)) == {"loss": pytest.approx((4 + 1) / (2 + 1))}
        assert usage.counts(lambda counts: counts.mul_(4)).tolist() == [4, 8]


def test_averages_take_scalars_and_can_be_read_twice():
    averages = Averages("loss")
    averages.add(loss=torch.tensor(2.0, requires_grad=True))
    averages.add(loss=torch.tensor(4.0))
    assert averages.result() == averages.result() == {"loss": 3.0}


def test_average_of_nothing_is_nan_and_of_an_unknown_name_an_error():
    assert math.isnan(Averages("loss").result()["loss"])
    with pytest.raises(KeyError):
        Averages("loss").add(accuracy=torch.ones(2))


def test_averages_do_not_lose_small_values_behind_a_large_sum():
    averages = Averages("x")
    averages.add(x=torch.tensor([2.0**24]))
    for _ in range(10):
        averages.add(x=torch.tensor([1.0]))
    assert averages.result()["x"] == (2**24 + 10) / 11


def test_code_counts_pool_over_batches_and_processes():
    codes = torch.randint(0, 7, (3, 4, 5), generator=torch.Generator().manual_seed(0))
    one, other = CodeUsage(8), CodeUsage(8)
    one.add(codes[0])
    one.add(codes[1])
    other.add(codes[2])
    counts = one.counts(pooled(one.counts, other.counts))
    assert counts.tolist() == [(codes == code).sum().item() for code in range(8)]


def test_perplexity_of_uniform_use_is_the_number_of_codes_and_of_one_code_is_one():
    assert code_statistics(torch.full((16,), 3)) == pytest.approx(
        {"codes_used": 16, "codes_used_fraction": 1, "perplexity": 16}
    )
    single = torch.zeros(16, dtype=torch.int64)
    single[3] = 5
    assert code_statistics(single) == pytest.approx({"codes_used": 1, "codes_used_fraction": 1 / 16, "perplexity": 1})


def test_perplexity_of_worked_example():
    # Shares 1/2, 1/4, 1/4: entropy 1.5 ln 2.
    assert code_statistics(torch.tensor([4, 2, 0, 2]))["perplexity"] == pytest.approx(2**1.5)
