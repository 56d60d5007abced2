"""Continuous latents: a diagonal Gaussian, its divergence, its samples, and the scale that is measured."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from tandem.config.models.autoencoders import VQGANConfig
from tandem.models import VQGAN
from tandem.models.quantizers import make_quantizer
from tandem.models.quantizers.gaussian import (
    DiagonalGaussian,
    came_with_weights,
    compute_channel_statistics,
    compute_scale,
)
from tests.models.helpers import TAMING, assert_same_bits, some, some_images, state_of
from tests.processes import Process, on_processes

DIM = 3


def gaussian(patch: int = 1) -> DiagonalGaussian:
    made = make_quantizer(VQGANConfig(quantizer="kl", latent_dim=DIM, latent_patch=patch))
    assert isinstance(made, DiagonalGaussian)
    return made


def some_z(batch: int = 4, seed: int = 1) -> Tensor:
    return 2 * some(batch, 2 * DIM, 3, 3, seed=seed) + 0.5


def test_the_loss_is_the_divergence_in_nats_of_a_latent() -> None:
    z = some_z().requires_grad_()
    kl = gaussian()(z).losses["kl"]
    mean, log_variance = z.detach().chunk(2, dim=1)
    expected = kl_divergence(Normal(mean, (log_variance / 2).exp()), Normal(0.0, 1.0)).sum(1).mean()
    torch.testing.assert_close(kl, expected)
    assert gaussian()(torch.zeros(2, 2 * DIM, 3, 3)).losses["kl"] == 0  # the standard normal
    kl.backward()
    torch.testing.assert_close(z.grad[:, :DIM], mean / (len(z) * 9))


def test_a_sample_has_the_mean_and_the_deviation_that_the_encoder_says() -> None:
    quantizer, z, noise = gaussian().eval(), some_z().requires_grad_(), some(4, DIM, 3, 3, seed=2)
    out = quantizer(z, noise)
    mean, deviation = z.detach()[:, :DIM], (z.detach()[:, DIM:] / 2).exp()
    torch.testing.assert_close(out.quantized, mean + deviation * noise)
    assert torch.equal(quantizer(z).quantized, mean) and torch.equal(quantizer.codes(z), mean)
    assert torch.equal(quantizer.decode_codes(mean), mean) and not len(out.codes)
    out.quantized.sum().backward()
    torch.testing.assert_close(z.grad, torch.cat([torch.ones_like(mean), deviation * noise / 2], dim=1))


def test_numbers_beyond_any_variance_stay_finite_and_the_precision_is_fp32() -> None:
    quantizer, z = gaussian().eval(), torch.full((1, 2 * DIM, 1, 1), 1000.0)
    assert quantizer(z, torch.ones(1, DIM, 1, 1)).quantized.isfinite().all()
    half = some_z().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(quantizer(half).losses["kl"], quantizer(half.float()).losses["kl"])
    assert gaussian().half().latent_stats.dtype == torch.float32


def updated(quantizer: DiagonalGaussian, batches: list[Tensor], step: int = 0, **more: Any) -> None:
    for z in batches:
        quantizer(z)
    quantizer.after_step(step, 0, **more)


def test_the_scale_is_that_of_the_latents_of_the_updates_and_a_skipped_one_counts_for_nothing() -> None:
    quantizer = gaussian()
    assert compute_scale(quantizer.latent_stats) is compute_channel_statistics(quantizer.channel_stats) is None
    updated(quantizer, [some_z()])
    means = some_z()[:, :DIM].double()
    scaling, shift = compute_scale(quantizer.latent_stats)
    assert math.isclose(shift, means.mean(), rel_tol=1e-5)
    assert math.isclose(scaling, 1 / means.std(correction=0), rel_tol=1e-5)
    channels = means.transpose(0, 1).flatten(1).numpy()
    mean, deviation = compute_channel_statistics(quantizer.channel_stats)
    np.testing.assert_allclose(mean, channels.mean(1), rtol=1e-5)
    np.testing.assert_allclose(deviation, channels.std(1), rtol=1e-5)
    before = state_of(quantizer)
    updated(quantizer, [torch.full_like(some_z(), math.nan)], skipped=torch.tensor(True))
    quantizer.eval()(some_z(seed=2))
    quantizer.after_step(2, 0)
    assert_same_bits(quantizer, before)
    updated(quantizer.train(), [some_z(seed=2)], skipped=torch.tensor(False))
    assert not torch.equal(quantizer.latent_stats, before["latent_stats"])


def test_with_patches_each_place_of_a_patch_has_statistics_of_its_own() -> None:
    """By number c p^2 + y p + x, as FLUX.2's BatchNorm has them; the scale of all latents is the same."""
    patched = gaussian(patch=2)
    z = 2 * some(4, 2 * DIM, 4, 6) + some(1, 2 * DIM, 2, 2, seed=2).repeat(1, 1, 2, 3)
    updated(patched, [z])
    mean, deviation = compute_channel_statistics(patched.channel_stats)
    for channel, line, column in itertools.product(range(DIM), range(2), range(2)):
        number, values = 4 * channel + 2 * line + column, z[:, channel, line::2, column::2]
        assert mean[number] == pytest.approx(values.mean().item(), rel=1e-4)
        assert deviation[number] == pytest.approx(values.std(correction=0).item(), rel=1e-4)
    plain = gaussian()
    updated(plain, [z])
    torch.testing.assert_close(patched.latent_stats, plain.latent_stats)


def test_the_scale_of_many_updates_is_an_average_that_forgets() -> None:
    quantizer, expected, by_channel = gaussian(), torch.zeros(3, dtype=torch.float64), np.zeros((3, DIM))
    for step in range(5):
        z = some_z(seed=step) * (step + 1)
        updated(quantizer, [z], step)
        means = z[:, :DIM].double()
        now = torch.stack([torch.ones_like(means.mean()), means.mean(), means.square().mean()])
        expected = 0.99 * expected + 0.01 * now
        channels = means.transpose(0, 1).flatten(1).numpy()
        moments = np.ones(DIM), channels.mean(1), np.square(channels).mean(1)
        by_channel += 0.01 * 0.99 ** (4 - step) * np.stack(moments)
    torch.testing.assert_close(quantizer.latent_stats.double(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(quantizer.channel_stats, by_channel, rtol=1e-5, atol=1e-6)


def test_the_weight_of_given_statistics_stays_1_and_that_of_measured_ones_below() -> None:
    given, measured = torch.ones(3, DIM), torch.zeros(3, DIM)
    for _ in range(3000):  # beyond the point where fp32 rounds an update to nothing
        given, measured = (stats.lerp(torch.ones(3, DIM), 0.01) for stats in (given, measured))
    assert torch.equal(measured.lerp(torch.ones(3, DIM), 0.01), measured)
    assert came_with_weights(given) and not came_with_weights(measured)


def test_a_channel_that_says_nothing_is_not_blown_up() -> None:
    quantizer, z = gaussian(), some_z()
    z[:, 1] = 0.3
    for step in range(3):
        updated(quantizer, [z], step)
    mean, deviation = compute_channel_statistics(quantizer.channel_stats)
    assert deviation[1] >= 1e-6 and abs(z[0, 1, 0, 0].item() - mean[1]) / deviation[1] < 0.1 < deviation[0]


@pytest.mark.parametrize(("processes", "micro_batches", "patch"), [(1, 4, 1), (2, 2, 3), (4, 1, 1)])
def test_the_scale_is_that_of_the_whole_batch_however_it_is_cut(processes: int, micro_batches: int, patch: int) -> None:
    whole = gaussian(patch)
    updated(whole, [some_z(8)])

    def work(process: Process) -> list[Tensor]:
        quantizer = gaussian(patch)
        quantizer.connect(process)
        own = some_z(8).chunk(processes)[process.rank]
        updated(quantizer, list(own.chunk(micro_batches)))
        return [quantizer.latent_stats, quantizer.channel_stats]

    for found in on_processes(processes, work):
        torch.testing.assert_close(found, [whole.latent_stats, whole.channel_stats], rtol=1e-6, atol=0)


@pytest.mark.parametrize("given", [False, True])
def test_a_saved_model_says_its_scale(given: bool, tmp_path: Path) -> None:
    scale = {"scaling_factor": 0.5, "shift_factor": 0.25} if given else {}
    torch.manual_seed(0)
    model = VQGAN.from_dict({**TAMING, "quantizer": "kl", "latent_dim": DIM, **scale})
    model(some_images())
    model.quantizer.after_step(0, 0)
    model.eval().save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    latents = model.encode(some_images())
    expected = (0.5, 0.25) if given else (1 / latents.std(correction=0).item(), latents.mean().item())
    assert (said["scaling_factor"], said["shift_factor"]) == pytest.approx(expected, rel=1e-4)
    assert model.description()["scaling_factor"] == said["scaling_factor"]
    channels = latents.transpose(0, 1).flatten(1)
    assert said["latents_mean"] == pytest.approx(channels.mean(1).tolist(), rel=1e-4, abs=1e-5)
    assert said["latents_std"] == pytest.approx(channels.std(1, correction=0).tolist(), rel=1e-4)
    loaded = VQGAN.from_pretrained(tmp_path)
    assert torch.equal(loaded.encode(some_images()), latents)
    assert loaded.saved_config() == model.saved_config()
    for each in (model, loaded):
        assert (each.scaling_factor, each.shift_factor) == (said["scaling_factor"], said["shift_factor"])
        assert (each.latents_mean, each.latents_std) == (said["latents_mean"], said["latents_std"])
        assert each.config.items() <= said.items()


def test_a_scale_without_a_shift_shifts_by_nothing_and_an_unknown_one_is_none() -> None:
    for quantizer, given, expected in (("kl", 0.5, (0.5, 0.0)), ("kl", None, (None, None)), ("vq", None, (None, None))):
        model = VQGAN.from_dict({**TAMING, "quantizer": quantizer, "latent_dim": DIM, "scaling_factor": given})
        assert (model.scaling_factor, model.shift_factor) == expected
        assert model.latents_mean is model.latents_std is None
