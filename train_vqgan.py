"""Train a VQGAN: images to a grid of codes and back, with a discriminator that makes reconstructions look real.

    python train_vqgan.py                                     # the demonstration, minutes on two cores
    python train_vqgan.py --image_folder photos/              # one process, debugging
    torchrun --nproc_per_node 8 train_vqgan.py --image_folder photos/
    deepspeed train_vqgan.py --deepspeed_config configs/deepspeed/zero2.json --image_folder photos/
    horovodrun -np 8 python train_vqgan.py --image_folder photos/

All give the same numbers. Run the same command again to resume: docs/running.md; its flags: docs/vqgan.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem import distributed, schedules
from tandem.config.autoencoder_training import VALIDATION, GANFlags, perceptual_loss_warning
from tandem.config.converters import FILE, FOLDER, epoch_counts, two_fractions
from tandem.config.data import ImageFlags, data_path
from tandem.config.fields import flag
from tandem.config.models.autoencoders import QuantizerLossFlags, VQGANConfig
from tandem.config.models.taming import KL, LatentLossFlags
from tandem.config.parser import ArgumentParser
from tandem.config.shared import RateFlags, RunFlags
from tandem.launch import start_training, training_parser
from tandem.weights.load import init_discriminator, init_model

if TYPE_CHECKING:  # PyTorch takes seconds to import: it is imported only after the arguments have been checked
    from PIL import Image
    from torch import Tensor

    from tandem.models import VQGAN, Discriminator

DEMO_CONFIG = Path(__file__).parent / "configs" / "vqgan" / "demo.yaml"
# What the terminal shows of a line of metrics.jsonl.
COLUMNS = ("recon_loss", "codes_used", "discr_loss", "valid/psnr", "valid/rfid", "valid/lpips", "valid/codes_used")


@dataclass
class LossFlags:
    """Where the weights and the learning rate come from, the reconstruction loss, and what is measured."""

    init_from: str | None = flag(
        None,
        "start the generator from a run, a checkpoint, a model/ folder, USER/NAME of the Hugging Face Hub, a folder of "
        "diffusers or a file of taming-transformers, latent diffusion, LlamaGen, IBQ or muse-maskgit-pytorch, whose "
        "architecture is taken where no flag sets another; a file of the last also has the discriminator",
        FOLDER,
        title="model",
    )
    l2_recon_loss: bool = flag(False, "mean squared instead of absolute error", title="reconstruction loss")
    betas: tuple[float, ...] = flag((0.9, 0.999), "betas of Adam", two_fractions, title="schedule")
    lr_drop_epochs: tuple[float, ...] | None = flag(
        None, "divide the learning rates by 10 after each of these numbers of epochs", epoch_counts
    )
    fid_weights: str | None = flag(
        None,
        "report rFID by these weights (pt_inception-2015-12-05): a file, or published, which fetches them",
        FILE,
        requires=VALIDATION,
        title="evaluation",
    )


@dataclass
class Config(ImageFlags, VQGANConfig, LatentLossFlags, QuantizerLossFlags, LossFlags, RateFlags, GANFlags, RunFlags):
    """Every flag of this script."""

    output_dir: str = "runs/vqgan"
    ema_decay: float = 0.995
    save_every_n_steps: int = 1000


def build_parser() -> ArgumentParser:
    return training_parser("train_vqgan.py", "Train a VQGAN.", Config)


def build_model(args: argparse.Namespace) -> VQGAN:
    """The generator with seeded weights, the same on every process, or with those of ``--init_from``."""
    from tandem.models import VQGAN

    generator: VQGAN = init_model(VQGAN, args)
    if args.train == "decoder":
        generator.freeze_encoder()
    return generator


def build_discriminator(args: argparse.Namespace) -> Discriminator:
    """The discriminator with seeded weights, the same on every process, or with those in a file of ``--init_from``."""
    from tandem.models import Discriminator

    return init_discriminator(Discriminator, args)


def train(args: argparse.Namespace, settings: dict[str, Any], backend: distributed.Backend) -> None:
    import torch
    from torch.nn import functional as F

    from tandem.data.feed import to_unit_range
    from tandem.data.sets import image_data
    from tandem.io.published import INCEPTION, load_published_weights
    from tandem.models import VQGAN
    from tandem.models.features.lpips import load_lpips, load_perceptual
    from tandem.training.ema import make_ema
    from tandem.training.evaluation import Evaluation
    from tandem.training.loop import updates
    from tandem.training.losses.gan import GANLoss
    from tandem.training.metrics.autoencoders import evaluate_autoencoder, reconstructions
    from tandem.training.metrics.collapse import ReconstructionAlarm
    from tandem.training.metrics.fid import Inception
    from tandem.training.metrics.reconstruction import ReconstructionQuality
    from tandem.training.noise import Noise
    from tandem.training.run import Run
    from tandem.training.visuals.images import grid

    with backend.raise_on_all_ranks():
        generator, discriminator = build_model(args).to(backend.device), build_discriminator(args).to(backend.device)
        heartbeat = partial(backend.heartbeat, "fetching weights")
        perceptual = load_perceptual(
            args.perceptual, args.perceptual_weights, backend.device, side=args.image_size, heartbeat=heartbeat
        )
        lpips = load_lpips(args.lpips_weights, args.image_size, backend.device, heartbeat)
        inception = (
            Inception(load_published_weights(INCEPTION, args.fid_weights, heartbeat), backend.device)
            if args.fid_weights
            else None
        )
    feed = image_data(args, backend)
    models = {"generator": generator, "discriminator": discriminator}
    columns = [name for name in COLUMNS if generator.num_codes or not name.endswith("codes_used")]
    run = Run(args, settings, backend, feed, models=models, columns=columns)

    generator.quantizer.connect(backend)
    adam = partial(torch.optim.Adam, lr=args.learning_rate, fused=True)
    trainable = [weight for weight in generator.parameters() if weight.requires_grad]
    vqgan = backend.wrap(generator, adam(trainable, betas=args.betas), name="generator")
    ema = make_ema(vqgan, args.ema_decay, args.ema_power)
    peak = args.discr_learning_rate or args.learning_rate
    discr_optimizer = adam(discriminator.parameters(), lr=peak, betas=args.discr_betas or args.betas)
    discr = backend.wrap(discriminator, discr_optimizer, name="discriminator", max_grad_norm=args.discr_max_grad_norm)
    pixel_loss, noise = F.mse_loss if args.l2_recon_loss else F.l1_loss, Noise(args.seed, "latents")
    pixels_per_latent = generator.channels * 4**generator.num_layers  # numbers of the image per latent vector
    outputs = "codes" if generator.num_codes else "latents"

    def images_of(batch: Mapping[str, Any]) -> Tensor:
        return to_unit_range(batch["images"])

    def reconstruction_loss(fake: Tensor, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        recon = pixel_loss(fake, images)
        if perceptual is None:
            return recon, {"recon_loss": recon}
        distance = perceptual(fake, images)
        return recon + args.perceptual_loss_weight * distance, {"recon_loss": recon, "perceptual_loss": distance}

    def validate(model: VQGAN, step: int) -> dict[str, float | Image.Image]:
        quality = ReconstructionQuality(model.num_codes, backend.device, ["recon_loss"], lpips, inception)
        return evaluate_autoencoder(model, map(images_of, feed.validation()), pixel_loss, quality, backend.sum)

    def draw(models: Mapping[str, VQGAN], samples: Mapping[str, Any], step: int) -> Image.Image:
        images = images_of(samples)
        return grid({"original": images, **reconstructions(models, images)})

    def sample_noise(micro: Mapping[str, Any], step: int) -> dict[str, Tensor]:
        is_sampled = args.quantizer == KL and args.latent == "sample"
        shape = generator.latent_shape(args.image_size)
        return {"noise": noise.normal(step, micro["positions"], shape, backend.device)} if is_sampled else {}

    gan = GANLoss(
        args, vqgan, discr, backend, images=images_of, generator_inputs=sample_noise,
        reconstruction_loss=reconstruction_loss, log=run.add,
    )  # fmt: skip
    in_precision = backend.autocast()  # errors, sums and the features of Inception are fp32 or fp64 nevertheless
    evaluation = Evaluation(
        vqgan, ema, write={"model": VQGAN.save_pretrained}, watch=ReconstructionAlarm().check,
        validate=in_precision(validate), draw=in_precision(draw),
        use=("encode.py", "--image_folder", data_path(args, "image_folder"), "--output",
             f"{args.output_dir}/{outputs}"),
    )  # fmt: skip
    run.resume(generator=vqgan, discriminator=discr, lecam=gan.lecam, ema=ema)
    run.say(None if run.is_complete else perceptual_loss_warning(args))

    total_steps = run.progress.total_steps
    with_warmup = partial(schedules.with_warmup, args.lr_schedule, lowest=0.1)

    for step, batch in updates(
        run, evaluation, preview=args.num_images_save, kind=lambda step, _: gan.active_terms(step)
    ):
        drop = schedules.drop_factor(run.progress.epoch, args.lr_drop_epochs)
        vqgan.lr = drop * with_warmup(step, total_steps, args.learning_rate, args.lr_warmup_steps)
        discr.lr = drop * with_warmup(step, total_steps, peak, args.lr_warmup_steps)
        entropy_factor = schedules.linear(step, args.entropy_anneal_steps, args.entropy_anneal_factor, 1.0)
        weights = {"commitment": args.commitment_loss_weight, "entropy": args.entropy_loss_weight * entropy_factor}
        weights["kl"] = args.kl_loss_weight / pixels_per_latent
        (is_adversarial, with_penalty), codes = gan.active_terms(step), []
        for images in gan.micro_batches(batch, step, is_active=is_adversarial):
            out = vqgan(images, **gan.generator_inputs)
            recon, adversarial = gan(out)
            loss = recon + gan.weight * adversarial + sum(weights[name] * term for name, term in out.losses.items())
            vqgan.backward(gan.surrogate_loss(loss))
            codes.append(out.codes)
            run.add(loss=loss, **out.losses)
        update = vqgan.step()
        gan.update_codebook(update.skipped)
        ema.update(update.skipped)
        if generator.num_codes:
            run.log_codes(codes, generator.num_codes)
            run.log(entropy_loss_weight=weights["entropy"])
        run.log(update)
        if is_adversarial:
            for discr_loss, lecam, penalty in gan.discriminator_losses(with_penalty=with_penalty):
                discr.backward(discr_loss + args.lecam_weight * lecam + args.penalty_weight * penalty)
            discr_update = discr.step()
            gan.update_lecam(discr_update.skipped)
            run.log(discr_grad_norm=discr_update.grad_norm)


def main(argv: Sequence[str] | None = None) -> None:
    start_training(train, build_parser(), argv, DEMO_CONFIG)


if __name__ == "__main__":
    main()
