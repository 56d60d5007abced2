from __future__ import annotations

import pytest
import torch

from tandem.config.models.decoder import SCHEDULES
from tandem.models.diffusion.schedule import Schedule

EVERY = [{"name": name, "zero_terminal_snr": zero} for name in SCHEDULES for zero in (False, True)]


def test_cosine_and_linear_schedules_have_the_published_numbers() -> None:
    cosine, linear = Schedule.from_name("cosine"), Schedule.from_name("linear")
    assert cosine.betas[0].item() == pytest.approx(4.128422e-5, rel=1e-6)
    assert cosine.alpha[499].item() ** 2 == pytest.approx(0.493844, abs=5e-7)
    assert cosine.alpha[999].item() ** 2 == pytest.approx(2.42877e-9, rel=1e-5)
    assert (cosine.betas > 0.999 - 1e-9).sum() == 1
    assert linear.alpha[499].item() ** 2 == pytest.approx(0.078587, abs=5e-7)
    assert linear.alpha[999].item() == pytest.approx(6.352818e-3, rel=1e-6)
    torch.testing.assert_close(linear.betas, torch.linspace(1e-4, 0.02, 1000).double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("options", EVERY, ids=str)
@pytest.mark.parametrize("timesteps", [2, 10, 1000])
def test_every_schedule_falls_strictly_and_is_exact_at_both_ends(options: dict, timesteps: int) -> None:
    schedule = Schedule.from_name(timesteps=timesteps, **options)
    assert (schedule.log_snr[1:] < schedule.log_snr[:-1]).all()
    assert schedule.ends_at_zero_snr == (options["zero_terminal_snr"] or options["name"] == "flow")
    total = schedule.alpha + schedule.sigma if schedule.is_flow else schedule.alpha**2 + schedule.sigma**2
    torch.testing.assert_close(total, torch.ones(timesteps).double(), rtol=1e-15, atol=0)
    snr = (schedule.alpha / schedule.sigma) ** 2
    torch.testing.assert_close(snr, schedule.log_snr.exp(), rtol=1e-12, atol=0)
    if not schedule.is_flow:
        assert ((schedule.betas > 0) & (schedule.betas <= 1)).all()


def test_zero_terminal_snr_ends_without_a_picture_and_leaves_the_first_level_as_it_was() -> None:
    plain, rescaled = Schedule.from_name("linear"), Schedule.from_name("linear", zero_terminal_snr=True)
    assert rescaled.alpha[-1] == 0 and rescaled.sigma[-1] == 1
    assert rescaled.alpha[0].item() == pytest.approx(plain.alpha[0].item(), rel=1e-14)
    middle = (plain.alpha[500] - plain.alpha[-1]) * plain.alpha[0] / (plain.alpha[0] - plain.alpha[-1])
    assert rescaled.alpha[500].item() == pytest.approx(middle.item(), rel=1e-12)


def test_flow_is_a_straight_line() -> None:
    time = torch.arange(1, 101).double() / 100
    torch.testing.assert_close(Schedule.from_name("flow", 100).sigma, time, rtol=1e-14, atol=0)


def test_a_noisy_picture_of_low_precision_is_computed_in_fp32_and_one_of_fp64_in_fp64() -> None:
    schedule, t = Schedule.from_name(), torch.tensor([0, 999])
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        alpha, sigma = schedule.at(t, torch.zeros(2, 3, 4, 4, dtype=dtype))
        assert alpha.shape == (2, 1, 1, 1) and alpha.dtype == sigma.dtype == expected
        assert torch.equal(alpha.flatten(), schedule.alpha[t].to(expected))
    x0, noise = torch.randn(2, 2, 3, 4, 4, dtype=torch.float64)
    expected_x = torch.stack([schedule.alpha[n] * x0[i] + schedule.sigma[n] * noise[i] for i, n in enumerate(t)])
    assert torch.equal(schedule.add_noise(x0, noise, t), expected_x)
