"""The recipes of configs/ against the formulas of their sources: not the weights in the files are compared, which mean
something only beside the range of the images and the forms of the losses, but the gradients that they make.

A script is started with its recipe, tiny, until it has built what it trains with; the losses of that are compared with
those of the source, written out here, at the same images. All gradients of a model must be the same multiple of the
source's, because Adam does not see a common factor.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import tandem.models.features.lpips
from tandem.models import VQGAN as VQGAN_MODEL
from tandem.models import Discriminator, VideoTokenizer
from tandem.models.features.lpips import PerceptualLoss
from tandem.training.losses import gan
from tandem.training.losses.adversarial import ADVERSARIAL_LOSSES, LeCam, adaptive_weight
from tests.models.helpers import narrow
from tests.models.towers import vision_folder
from tests.scripts import RUN, VIDEO_TOKENIZER, VQGAN, Script, metrics, words

HEADS = {VQGAN: 1, VIDEO_TOKENIZER: 3}
RECIPES = {VQGAN: "imagenet256", VIDEO_TOKENIZER: "ucf101_128"}
TINY: dict[Script, dict[str, Any]] = {
    VQGAN: {"dim": 4, "num_layers": 2, "num_resnet_blocks": "1", "codebook_size": 64},
    VIDEO_TOKENIZER: {"num_frames": 5, "layers": "compress_space:8,compress_time:8", "init_dim": 4},
}


class BuiltError(BaseException):
    """Ends a script when it has built what it trains with."""


class Built:
    """What a script with its recipe trains with."""

    def __init__(self, args: argparse.Namespace, model: Any, given: Mapping[str, Any]) -> None:
        self.args, self.quantizer = args, model.quantizer
        self.pixel_loss, self.perceptual_loss = given["pixel_loss"], given["perceptual_loss"]
        self.images = given["images"]
        self.adversarial = ADVERSARIAL_LOSSES[args.gan_loss]
        adaptive = args.gan_weight == "adaptive"  # of losses as large as those of the source
        self.gan_weight = args.gan_weight_scale * (1.0 if adaptive else args.gan_weight)

    def loss(self, fake: Tensor, images: Tensor, **inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The reconstruction loss as `GANLoss` adds it up, and its first part."""
        error = self.pixel_loss(fake, images)
        terms = self.perceptual_loss(fake, images, **inputs)
        return error + gan.weigh_perceptual(terms, self.args), {"recon_loss": error}


def network(kind: str = "lpips", *_: Any, **__: Any) -> Any:
    """An LPIPS of few channels, or a ResNet of few blocks."""
    if kind == "resnet50":
        return narrow(kind)
    torch.manual_seed(5)
    loss = PerceptualLoss("lpips", (4, 4, 4, 4, 4))
    for head in loss.heads:
        head.weight.abs_()
    return loss


def built(script: Script, folder: Path, name: str = "", **changes: Any) -> Built:
    """What the script makes of its recipe, with a tiny model and the demonstration's data."""
    recipe = ["--config", str(script.configs / f"{name or RECIPES[script]}.yaml")]
    data = {script.data.flag: f"{script.data.demonstration}:64", "output_dir": folder}
    tiny = words({**RUN, **data, "image_size": 32, "discr_layers": 1, **(changes or TINY[script])})
    found: list[Built] = []

    def stop(_: Any, generator: Any, *__: Any, **given: Any) -> None:
        more = ("--init_from", str(changes["init_from"])) if "init_from" in changes else ()
        found.append(Built(script.parsed(*recipe, *more), generator.module, given))
        raise BuiltError

    # The losses that a script builds go nowhere else, and no flag makes a perceptual network narrower than the
    # published one of 15 million weights.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tandem.models.features.lpips, "load_perceptual", network)
        patch.setattr(gan, "GANLoss", stop)
        with pytest.raises(BuiltError):
            script.main(*recipe, *tiny)
    return found[0]


@pytest.fixture(scope="module", params=RECIPES, ids=str)
def recipe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Script, Built]:
    return request.param, built(request.param, tmp_path_factory.mktemp("run"))


def share(ours: Tensor, theirs: Tensor, at: Tensor) -> float:
    """The number s with which our gradient is s times theirs."""
    (mine,), (public,) = (torch.autograd.grad(loss, at, retain_graph=True) for loss in (ours, theirs))
    found = float((mine * public).sum() / public.square().sum())
    assert found > 0
    torch.testing.assert_close(mine, found * public, rtol=1e-3, atol=1e-3 * found * float(public.abs().max()))
    return found


def logits_of(images: Tensor) -> Tensor:
    """Of a discriminator: (b, c, ...) -> (b, 12)."""
    weight = torch.randn(images[0].numel(), 12, generator=torch.Generator().manual_seed(3)) / 50
    return images.flatten(1) @ weight


def test_the_generators_losses_stand_to_one_another_as_in_the_source(recipe: tuple[Script, Built]) -> None:
    script, built = recipe
    shape = (2, 3, 32, 32) if script is VQGAN else (2, 3, 5, 32, 32)
    drawn = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = built.images({"images": drawn, "videos": drawn})
    unit = drawn / 255
    assert images.min() == 0 and images.max() == 1  # what the weights of both files are made for
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    fake = (images + 0.055 * noise).requires_grad_()
    public = 2 * fake - 1  # there, images are in [-1, 1]

    frames = [{}] if script is VQGAN else [{"frames": torch.full((2,), frame)} for frame in range(5)]
    totals, parts = zip(*(built.loss(fake, images, **given) for given in frames), strict=True)
    error = torch.stack([each["recon_loss"] for each in parts]).mean()
    perceptual = torch.stack([*totals]).mean() - error  # of the frames that may be drawn
    adversarial = built.gan_weight * built.adversarial.generator([logits_of(fake)] * HEADS[script])

    # vqperceptual.py and video_vqperceptual.py, with gen_loss_weight of the configuration. LPIPS, whose constants for
    # images in [-1, 1] are those for [0, 1] rewritten, is the mean over all frames.
    gen_loss_weight = {VQGAN: 0.1, VIDEO_TOKENIZER: 0.3}[script]
    flat = (lambda x: x) if script is VQGAN else (lambda x: x.transpose(1, 2).flatten(0, 1))
    lpips = network().distances(flat(fake), flat(unit)).mean()
    g_loss = F.softplus(-logits_of(fake).mean(1)).mean()
    shares = [
        share(error, (public - (2 * unit - 1)).abs().mean(), fake),
        share(perceptual, lpips, fake),
        share(adversarial, gen_loss_weight * g_loss, fake),
        *(shares_of_codes(built) if script is VQGAN else ()),
    ]
    assert shares == pytest.approx([shares[0]] * len(shares), rel=1e-3)
    assert (built.args.entropy_anneal_steps, built.args.discr_start_step) == (0, 0)


SMALL = {"dim": 4, "norm_groups": 2, "num_resnet_blocks": 1}
# Of taming's VQLPIPSWithDiscriminator, LlamaGen's VQLoss and the model card of ft-MSE: the error of the pixels, and the
# weights of LPIPS, of the generator's adversarial loss, of the vectors' distance from their entries; and whether the
# third is adaptive, which follows the range of the images by itself.
PUBLISHED: dict[str, tuple[Any, float, float, float, bool]] = {
    "taming_f16": (F.l1_loss, 1.0, 0.8, 1.0, True), "llamagen_f16": (F.mse_loss, 1.0, 0.5, 0.25, False),
    "finetune_sd_vae": (F.mse_loss, 0.1, 0.5, 0.0, True), "kl_f8_half_size": (F.l1_loss, 1.0, 0.5, 0.0, True),
    "kl_f8_decoder": (F.l1_loss, 1.0, 0.5, 0.0, True), "va_vae_f16": (F.l1_loss, 1.0, 0.5, 0.0, True),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_losses_around_the_body_of_taming_stand_to_one_another_as_in_the_source(name: str, tmp_path: Path) -> None:
    error, lpips_weight, gan_weight, commitment_weight, is_adaptive = PUBLISHED[name]
    changes: dict[str, Any] = SMALL
    if name in ("finetune_sd_vae", "kl_f8_decoder"):
        VQGAN_MODEL.from_dict({"body": "taming", "quantizer": "kl", "image_size": 32, **SMALL, "num_resnet_blocks": [1],
                          "ch_mult": [1, 2]}).save_pretrained(tmp_path / "model")  # fmt: skip
        changes = {"init_from": tmp_path / "model"}
    if name == "va_vae_f16":
        vision_folder(tmp_path / "vision")
        changes = {**SMALL, "align_with": tmp_path / "vision"}
    made = built(VQGAN, tmp_path / "run", name, **changes)
    drawn = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = made.images({"images": drawn})
    fake = (images + 0.05 * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))).requires_grad_()
    total, parts = made.loss(fake, images)
    theirs = error(2 * fake - 1, 2 * images - 1)
    of_pixels = share(parts["recon_loss"], theirs, fake)
    assert share(total, theirs + lpips_weight * network().distances(fake, images).mean(), fake) == pytest.approx(
        of_pixels, rel=1e-3
    )
    assert made.gan_weight == pytest.approx(gan_weight * (1 if is_adaptive else of_pixels))
    if not commitment_weight:  # continuous latents; errors are summed over an image there, of 3 colours
        assert made.args.train == "decoder" or made.args.kl_loss_weight == pytest.approx(1e-6 * of_pixels)
        side = 128 if name == "kl_f8_half_size" else 256
        assert made.args.gan_weight_max == pytest.approx(1e4 / (3 * side**2) * of_pixels, rel=0.01)
    else:
        assert made.args.commitment_loss_weight == pytest.approx(commitment_weight * of_pixels)
    clipped = {"llamagen_f16": (1.0 * of_pixels, 1.0 / (0.5 * 0.5))}.get(name, (0.0, None))
    assert (made.args.max_grad_norm, made.args.discr_max_grad_norm) == pytest.approx(clipped)
    assert made.args.penalty_weight == made.args.lecam_weight == 0


def test_the_losses_of_vqgan_plus_stand_to_one_another_as_in_the_code_of_maskbit(tmp_path: Path) -> None:
    """losses.py and gan_utils.py with vqgan_plus_10bit.yaml, for images in [0, 1]. Of one logit for real and one for
    generated images, LeCam's mean over logits is the function of their mean that it is there."""
    made = built(VQGAN, tmp_path, "vqgan_plus", **SMALL, discr_dim=4)
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    fake = (images + 0.05 * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))).requires_grad_()
    total, parts = made.loss(fake, images)
    theirs, distance = 4.0 * F.mse_loss(fake, images), narrow("resnet50").distances(fake, images).mean()
    factor = share(parts["recon_loss"], theirs, fake)
    assert share(total, theirs + 0.1 * distance, fake) == pytest.approx(factor, rel=1e-3)
    assert share(total - parts["recon_loss"], 0.1 * distance, fake) == pytest.approx(factor, rel=1e-3)
    args = made.args
    ours = made.gan_weight, args.commitment_loss_weight, args.max_grad_norm
    assert ours == pytest.approx((0.02 * factor, 0.25 * factor, 1.0 * factor))

    real, generated = torch.tensor([0.2], requires_grad=True), torch.tensor([-0.1])
    lecam = LeCam(args.lecam_decay)
    lecam.update(torch.tensor(0.3), torch.tensor(-0.2))
    hinge = 0.5 * ((1 - real).relu().mean() + (1 + generated).relu().mean())
    regulariser = (real.mean() + 0.2).relu().square() + (0.3 - generated.mean()).relu().square()
    factor = share(made.adversarial.discriminator(real, generated), hinge, real)
    found = share(args.lecam_weight * lecam(real, generated), 0.001 * regulariser, real)
    assert (found, args.discr_max_grad_norm) == pytest.approx((factor, factor))
    assert args.penalty_weight == 0 and (args.discriminator, args.discr_start_step) == ("maskbit", 20000)


@pytest.mark.parametrize("name", ["wan_f8", "finetune_wan"])
def test_the_losses_of_wan_stand_to_one_another_as_in_its_report(name: str, tmp_path: Path) -> None:
    """3 L1 + 3e-6 KL + 3 LPIPS of videos in [-1, 1] (arXiv:2503.20314, section 4.1), the KL as in latent diffusion."""
    changes: dict[str, Any] = {"num_frames": 5, "init_dim": 4, "ch_mult": "1,2,2", "num_resnet_blocks": 1}
    changes |= {"time_levels": "0,1"}
    if name == "finetune_wan":
        VideoTokenizer.from_dict({
            "body": "wan", "quantizer": "kl", "image_size": 32, "init_dim": 4, "ch_mult": [1, 2, 2],
            "num_resnet_blocks": 1, "time_levels": [0, 1],
        }).save_pretrained(tmp_path / "model")  # fmt: skip
        changes = {"init_from": tmp_path / "model", "num_frames": 5, "clip_frames": 5}
    made = built(VIDEO_TOKENIZER, tmp_path / "run", name, **changes)
    videos = torch.rand(2, 3, 5, 32, 32, generator=torch.Generator().manual_seed(0))
    fake = (videos + 0.05 * torch.randn(videos.shape, generator=torch.Generator().manual_seed(1))).requires_grad_()
    totals, parts = zip(*(made.loss(fake, videos, frames=torch.full((2,), frame)) for frame in range(5)), strict=True)
    error = ((2 * fake - 1) - (2 * videos - 1)).abs().mean()
    pictures = [x.transpose(1, 2).flatten(0, 1) for x in (fake, videos)]
    factor = share(parts[0]["recon_loss"], 3 * error, fake)
    theirs = 3 * error + 3 * network().distances(*pictures).mean()
    assert share(torch.stack([*totals]).mean(), theirs, fake) == pytest.approx(factor, rel=1e-3)
    assert made.args.train == "decoder" or made.args.kl_loss_weight == pytest.approx(3e-6 * factor)


@pytest.mark.parametrize("strength, is_limited", [(1, True), (1000, False)])
def test_a_decoder_is_fine_tuned_by_the_gradient_that_the_loss_of_latent_diffusion_has(
    strength: float, is_limited: bool, tmp_path: Path
) -> None:
    """contperceptual.py with the squared error of ft-MSE and disc_weight 0.5, for images of 256 pixels: its adaptive
    weight is at most 1e4 beside errors that are summed over an image."""
    arguments = {**SMALL, "num_resnet_blocks": [1], "ch_mult": [1, 2]}
    VQGAN_MODEL.from_dict({"body": "taming", "quantizer": "kl", "image_size": 32, **arguments}).save_pretrained(
        tmp_path
    )
    made = built(VQGAN, tmp_path / "run", "finetune_sd_vae", init_from=tmp_path)
    torch.manual_seed(0)
    images, features = torch.rand(2, 3, 256, 256), torch.randn(2, 4, 256, 256)
    discriminator = Discriminator.from_dict({"dim": 8, "layers": 3})
    last_layer = torch.full((3, 4, 1, 1), 0.02, requires_grad=True)
    fake = images + F.conv2d(features, last_layer)
    adversarial = -strength * discriminator(fake).mean()

    def at_last_layer(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, last_layer, retain_graph=True)[0]

    error = ((2 * fake - 1) - (2 * images - 1)).square() + 0.1 * network().distances(fake, images).mean()
    nll = error.sum() / len(images)
    adaptive = at_last_layer(nll).norm() / (at_last_layer(adversarial).norm() + 1e-4)
    assert (adaptive > 1e4) == is_limited
    theirs = nll + 0.5 * adaptive.clamp(0, 1e4) * adversarial
    total, _ = made.loss(fake, images)
    limit = made.args.gan_weight_max
    weight = adaptive_weight(at_last_layer(total), at_last_layer(adversarial), limit) * made.args.gan_weight_scale
    assert share(total + weight * adversarial, theirs, fake) == pytest.approx(1 / (4 * 3 * 256**2), rel=1e-3)


def shares_of_codes(built: Built) -> list[float]:
    """Of commitment and entropy (lookup_free_quantize.py), with commit_weight 0.25 and codebook_weight 0.1."""
    z = (0.01 * torch.randn(2, 6, 4, 4, generator=torch.Generator().manual_seed(2))).requires_grad_()
    _, _, losses = built.quantizer.train()(z)
    rows = z.movedim(1, -1).reshape(-1, 6)
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 6)
    p = (2 * rows @ corners.T / 0.01).softmax(1)
    entropies = [-(q * q.clamp_min(1e-30).log()).sum(-1).mean() for q in (p, p.mean(0))]
    weights = built.args.commitment_loss_weight, built.args.entropy_loss_weight
    return [
        share(weights[0] * losses["commitment"], 0.25 * (rows - rows.detach().sign()).square().mean(), z),
        share(weights[1] * losses["entropy"], 0.1 * (entropies[0] - entropies[1]), z),
    ]


def test_the_discriminators_losses_stand_to_one_another_as_in_the_source(recipe: tuple[Script, Built]) -> None:
    _, built = recipe
    assert built.args.penalty_weight == 0  # there is none there
    real, fake = (torch.randn(2, 12, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in (0, 1))
    lecam = LeCam(built.args.lecam_decay)
    lecam.update(torch.tensor(0.3), torch.tensor(-0.2))
    hinge = 0.5 * ((1 - real).relu().mean() + (1 + fake).relu().mean())
    regulariser = (real + 0.2).relu().square().mean() + (0.3 - fake).relu().square().mean()
    shares = [
        share(built.adversarial.discriminator(real, fake), hinge, real),
        share(built.args.lecam_weight * lecam(real, fake), 0.05 * regulariser, real),
        share(built.args.lecam_weight * lecam(real, fake), 0.05 * regulariser, fake),
    ]
    assert shares == pytest.approx([shares[0]] * 3)


def test_the_learning_rates_fall_to_a_tenth_after_each_of_the_epochs(tmp_path: Path) -> None:
    # An epoch is 51 images, 6.4 updates of 8: the eighth update is the first after one epoch.
    run = VQGAN.train(tmp_path / "run", "--lr_drop_epochs", "1,9", "--learning_rate", "2e-3", "--max_steps", "9")
    assert [line["lr"] for line in metrics(run)] == pytest.approx([2e-3] * 7 + [2e-4] * 2)
    assert VQGAN.arguments_of(run).lr_drop_epochs == (1, 9)
