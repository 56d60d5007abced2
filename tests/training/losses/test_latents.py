"""Noise on latents and equivariant latents: functions of the seed, the update and the place in the batch, against
computations by hand."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from tandem.models import VQGAN, VideoTokenizer
from tandem.training.losses.gan import MicroBatch
from tandem.training.losses.latents import LatentLosses
from tandem.transforms import Transform

SIDE = 16
CPU = torch.device("cpu")


def model(quantizer="kl", **arguments):
    torch.manual_seed(0)
    return VQGAN.from_dict({"image_size": SIDE, "dim": 8, "num_layers": 2, "quantizer": quantizer, **arguments})


def engine(module):
    return SimpleNamespace(module=module, autocast=nullcontext)


def losses(generator, perceptual_loss=None, **flags):
    config = SimpleNamespace(
        **{"seed": 3, "quantizer": "kl", "latent": "sample", "equivariance_weight": 0.0, "latent_noise": 0.0,
           "perceptual_loss_weight": 1.0, "image_size": SIDE, **flags}
    )  # fmt: skip
    return LatentLosses(config, engine(generator), "images", CPU, F.l1_loss, perceptual_loss)


def batch(*positions):
    images = torch.rand(64, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    return {"images": images[list(positions)], "positions": list(positions)}


ALL = {"equivariance_weight": 1.0, "latent_noise": 3.0}


def test_without_flags_a_generator_of_codes_gets_nothing():
    assert losses(model("lfq", codebook_size=64), quantizer="lfq").inputs(batch(0, 1), 0) == {}
    assert losses(model(), latent="mode").inputs(batch(0, 1), 0) == {}


def test_what_a_sample_gets_does_not_depend_on_how_the_batch_is_divided():
    whole, part = (losses(model(), **ALL).inputs(batch(*places), 5) for places in (range(8), (3, 6)))
    for name in ("noise", "latent_noise", "noise_levels"):
        assert torch.equal(whole[name][[3, 6]], part[name])
    assert whole["transform"].quarters == part["transform"].quarters
    assert torch.equal(whole["transform"].turns[[3, 6]], part["transform"].turns)


def test_the_noise_has_the_deviation_of_its_flag_and_levels_are_uniform():
    inputs = losses(model(), **ALL).inputs(batch(*range(64)), 0)
    assert inputs["latent_noise"].std().item() == pytest.approx(3.0, rel=0.05)
    assert not torch.equal(inputs["latent_noise"], 3 * inputs["noise"])
    levels = inputs["noise_levels"].sort().values
    assert (levels - (torch.arange(64) + 0.5) / 64).abs().max() < 0.2 and 0 <= levels[0] <= levels[-1] < 1


def test_all_sizes_and_turns_occur_but_the_image_as_it_is():
    drawn = [losses(model(), **ALL).inputs(batch(*range(8)), step)["transform"] for step in range(40)]
    assert {transform.quarters for transform in drawn} == {4, 3, 2}  # a quarter of 4 places would be a single one
    for quarters in (4, 3, 2):
        turns = {turn for transform in drawn if transform.quarters == quarters for turn in transform.turns.tolist()}
        assert turns == ({1, 2, 3} if quarters == 4 else {0, 1, 2, 3})


def test_the_decoder_gets_latents_mixed_with_noise():
    generator, inputs = model().eval(), losses(model(), **ALL, latent="mode").inputs(batch(0, 1), 0)
    images = batch(0, 1)["images"]
    latents = generator.encode(images)
    t = inputs["noise_levels"].reshape(2, 1, 1, 1)
    expected = generator.decode((1 - t) * latents + t * inputs["latent_noise"])
    torch.testing.assert_close(generator(images, **inputs).reconstruction, expected)


@pytest.mark.parametrize(
    ("quantizer", "more"), [("kl", {}), ("lfq", {"codebook_size": 64}), ("vq", {"codebook_size": 16})]
)
def test_the_term_is_the_error_of_changed_latents_against_changed_images(quantizer, more):
    generator = model(quantizer, **more).eval()
    latent_losses = losses(generator, quantizer=quantizer, latent="mode", equivariance_weight=1.0)
    images, transform = batch(0, 1)["images"], Transform(2, torch.tensor([1, 2]))
    out = generator(images, transform=transform)
    terms = latent_losses.terms(out, MicroBatch(images, {"transform": transform}, {}, is_adversarial=False))
    errors = []
    for image, turns in zip(images[:, None], transform.turns.tolist(), strict=True):
        z = generator._encode(image)
        z = generator.quantizer.codes(z) if quantizer == "kl" else z  # codes are chosen after the transform
        z = F.avg_pool2d(torch.rot90(z, turns, (2, 3)), 2)
        made = generator.decode(z if quantizer == "kl" else generator.quantizer.codes(z))
        errors.append((made - F.avg_pool2d(torch.rot90(image, turns, (2, 3)), 2)).abs().mean())
    assert terms["equivariance_loss"].item() == pytest.approx(torch.stack(errors).mean().item(), rel=1e-5)


def test_the_term_trains_encoder_and_decoder_and_teaches_a_codebook_nothing():
    generator = model("vq", codebook_size=16).train()
    images, transform = batch(*range(4))["images"], Transform(2, torch.tensor([0, 1, 2, 3]))
    averages = {name: value.clone() for name, value in generator.quantizer.state_dict().items()}
    z = transform(generator._encode(images))
    generator.quantizer.requantize(z).square().sum().backward()
    assert generator.encoder[0].weight.grad.abs().max() > 0
    assert all(torch.equal(value, averages[name]) for name, value in generator.quantizer.state_dict().items())


def test_a_video_gets_noise_of_the_shape_of_its_codes_and_one_change_for_all_frames():
    torch.manual_seed(0)
    layers = "residual,compress_space,compress_space,compress_time"
    generator = VideoTokenizer.from_dict(
        {"image_size": SIDE, "layers": layers, "init_dim": 8, "codebook_size": 64}
    ).eval()
    videos = torch.rand(2, 3, 5, SIDE, SIDE)
    config = SimpleNamespace(
        seed=0, quantizer="lfq", equivariance_weight=1.0, latent_noise=1.0, perceptual_loss_weight=1.0, image_size=SIDE
    )
    latent_losses = LatentLosses(config, engine(generator), "videos", CPU, F.mse_loss, None)
    inputs = latent_losses.inputs({"videos": videos, "positions": [0, 1]}, 0)
    out = generator(videos, **inputs)
    changed = inputs["transform"](videos)
    assert out.transformed.shape == changed.shape
    terms = latent_losses.terms(out, MicroBatch(videos, inputs, {}, is_adversarial=False))
    assert terms["equivariance_loss"].item() == pytest.approx(F.mse_loss(out.transformed, changed).item())


def test_updates_of_other_sizes_are_of_other_kinds_and_a_single_latent_is_refused():
    latent_losses = losses(model(), equivariance_weight=1.0)
    kind = latent_losses.update_kind(lambda step, batch: step == 0)
    assert [kind(step) for step in range(9)] == [(step == 0, latent_losses.size(step)) for step in range(9)]
    assert len({latent_losses.size(step) for step in range(40)}) == 3
    assert losses(model()).update_kind(lambda step, batch: 1)(5) == (1, 4)
    with pytest.raises(ValueError, match="a single latent"):
        losses(model(), equivariance_weight=1.0, image_size=4)


@pytest.mark.parametrize(("perceptual", "share"), [("vgg", 0), ("lpips", 0), ("resnet50", 1)])
def test_images_too_small_for_a_perceptual_loss_have_the_pixels_error_alone(perceptual, share):
    generator, images = model(), batch(0, 1)["images"]
    options = {"latent": "mode", "equivariance_weight": 1.0, "perceptual": perceptual, "perceptual_loss_weight": 3.0}
    latent_losses = losses(generator, lambda fakes, images: {"perceptual_loss": torch.tensor(2.0)}, **options)
    for quarters, expected in ((4, 1), (2, share)):
        transform = Transform(quarters, torch.tensor([1, 2]))
        out = generator(images, transform=transform)
        terms = latent_losses.terms(out, MicroBatch(images, {"transform": transform}, {}, is_adversarial=False))
        pixels = F.l1_loss(out.transformed, transform(images)).item()
        assert terms["equivariance_loss"].item() == pytest.approx(pixels + 6.0 * expected)
