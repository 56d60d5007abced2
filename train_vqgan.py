"""Train a VQGAN: images to a grid of codes and back, with a discriminator that makes reconstructions look real.

    python train_vqgan.py                                     # the demonstration, minutes on two cores
    python train_vqgan.py --image_folder photos/              # one process, debugging
    torchrun --nproc_per_node 8 train_vqgan.py --image_folder photos/
    deepspeed train_vqgan.py --deepspeed_config configs/deepspeed/zero2.json --image_folder photos/
    horovodrun -np 8 python train_vqgan.py --image_folder photos/

All give the same numbers. Run the same command again to resume: docs/running.md; its flags: docs/vqgan.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem import data, distributed, models, schedules, training
from tandem.config.autoencoder_training import GANFlags, LatentRegularizerFlags, perceptual_loss_warning
from tandem.config.converters import FILE, epoch_counts, two_fractions
from tandem.config.data import ImageFlags, data_path
from tandem.config.fields import flag
from tandem.config.models.autoencoders import QuantizerLossFlags, VQGANConfig
from tandem.config.models.taming import LatentLossFlags
from tandem.config.parser import ArgumentParser
from tandem.config.shared import VALIDATION, RateFlags, RunFlags, start_flag
from tandem.launch import start_training, training_parser
from tandem.sides import height_and_width
from tandem.weights.load import init_discriminator, init_model, load_vision

if TYPE_CHECKING:  # PyTorch takes seconds to import: it is imported only after the arguments have been checked
    from PIL import Image
    from torch import Tensor

DEMO_CONFIG = Path(__file__).parent / "configs" / "vqgan" / "demo.yaml"
# What the terminal shows of a line of metrics.jsonl.
COLUMNS = ("recon_loss", "codes_used", "discr_loss", "valid/psnr", "valid/rfid", "valid/lpips", "valid/codes_used")


@dataclass
class ScriptFlags:
    """Where the weights come from, the reconstruction loss, Adam and its learning rate, and what is measured."""

    init_from: str | None = start_flag(
        "start the generator from a run, a checkpoint, a model/ folder, USER/NAME of the Hugging Face Hub, a folder of "
        "diffusers or a file of taming-transformers, latent diffusion, LlamaGen, IBQ or muse-maskgit-pytorch",
        title="model",
    )
    l2_recon_loss: bool = flag(False, "mean squared instead of absolute error", title="reconstruction loss")
    betas: tuple[float, float] = flag((0.9, 0.999), "betas of Adam", two_fractions, title="schedule")
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
class Config(
    ImageFlags, VQGANConfig, LatentLossFlags, QuantizerLossFlags, LatentRegularizerFlags, ScriptFlags, RateFlags,
    GANFlags, RunFlags,
):  # fmt: skip
    """Every flag of this script."""

    output_dir: str = "runs/vqgan"
    ema_decay: float = 0.995
    save_every_n_steps: int = 1000


def build_parser() -> ArgumentParser:
    return training_parser("train_vqgan.py", "Train a VQGAN.", Config)


def build_model(config: Config) -> models.VQGAN:
    """The generator with seeded weights, the same on every process, or with those of ``--init_from``."""
    generator: models.VQGAN = init_model(models.VQGAN, config)
    if config.train == "decoder":
        generator.freeze_encoder()
    return generator


def build_discriminator(config: Config) -> models.Discriminator:
    """The discriminator with seeded weights, the same on every process, or with those of ``--init_from``."""
    model_class = models.MaskBitDiscriminator if config.discriminator == "maskbit" else models.Discriminator
    return init_discriminator(model_class, config)


def train(config: Config, backend: distributed.Backend) -> None:
    import torch
    from torch.nn import functional as F

    processes, device = backend.processes, backend.processes.device
    with processes.raise_on_all_ranks():
        generator, discriminator = build_model(config).to(device), build_discriminator(config).to(device)
        heartbeat = partial(processes.heartbeat, "fetching weights")
        inception = training.load_inception(config.fid_weights, device, heartbeat)
        options: Any = {"side": min(height_and_width(config.image_size)), "device": device, "heartbeat": heartbeat}
        perceptual = models.load_perceptual(
            config.perceptual, config.perceptual_weights, gram=config.gram_loss_weight > 0, **options
        )
        lpips = models.load_lpips(config.lpips_weights, **options)
        vision = load_vision(config.align_with, device, heartbeat)
    feed = data.image_data(config, processes)
    networks: dict[str, Any] = {"generator": generator, "discriminator": discriminator}
    networks |= {} if vision is None else {"projection": vision}  # the model that a checkpoint's projection belongs to
    run = training.Run(config, backend, feed, models=networks)

    generator.quantizer.connect(processes)
    adam = partial(torch.optim.Adam, lr=config.learning_rate, fused=True)
    trainable = [weight for weight in generator.parameters() if weight.requires_grad]
    vqgan = backend.wrap(generator, adam(trainable, betas=config.betas), name="generator")
    ema = training.make_ema(vqgan, config.ema_decay, config.ema_power)
    discr_lr = config.discr_learning_rate or config.learning_rate
    discr_optimizer = adam(discriminator.parameters(), lr=discr_lr, betas=config.discr_betas or config.betas)
    discr = backend.wrap(discriminator, discr_optimizer, name="discriminator", max_grad_norm=config.discr_max_grad_norm)
    pixel_loss = F.mse_loss if config.l2_recon_loss else F.l1_loss
    latent_losses = training.LatentLosses(config, vqgan, "images", device, pixel_loss, perceptual)
    values_per_latent = generator.channels * 4**generator.num_layers  # values of the image that share a latent
    output = f"{config.output_dir}/{generator.latent_kind}"

    def images_of(batch: Mapping[str, Any]) -> Tensor:
        return data.to_unit_range(batch["images"])

    def validate(model: models.VQGAN, batches: data.ValidationBatches, step: int) -> dict[str, float | Image.Image]:
        quality = training.ReconstructionQuality(model.num_codes, device, ["recon_loss"], lpips, inception)
        return training.evaluate_autoencoder(model, map(images_of, batches), pixel_loss, quality, processes.sum)

    def draw(versions: Mapping[str, models.VQGAN], samples: Mapping[str, Any], step: int) -> Image.Image:
        images = images_of(samples)
        return training.grid({"original": images, **training.reconstructions(versions, images)})

    alignment = training.Alignment(
        config, backend, vqgan, vision, lambda projection: adam(projection.parameters(), betas=config.betas), run.add
    )
    gan_loss = training.GANLoss(
        config, vqgan, discr, processes, images=images_of, pixel_loss=pixel_loss, perceptual_loss=perceptual,
        generator_inputs=lambda samples, step: {**latent_losses.inputs(samples, step), **alignment.generator_inputs()},
        log=run.add,
    )  # fmt: skip
    autocast = backend.autocast()  # errors, sums and the features of Inception are fp32 or fp64 nevertheless
    evaluation = training.Evaluation(
        vqgan, ema, write={"model": models.VQGAN.save_pretrained}, discriminator=discr,
        validate=autocast(validate), draw=autocast(draw), watch=training.ReconstructionAlarm().check,
        next_command=("encode.py", "--image_folder", data_path(config), "--output", output),
    )  # fmt: skip
    total_steps, with_warmup = run.progress.total_steps, partial(schedules.with_warmup, config.lr_schedule, lowest=0.1)
    columns = gan_loss.possible_columns(COLUMNS, total_steps)
    run.resume(columns, generator=vqgan, discriminator=discr, lecam=gan_loss.lecam, ema=ema, **alignment.parts)
    run.say(None if run.is_complete else perceptual_loss_warning(config))

    for step, batch in training.updates(
        run, evaluation, preview=config.num_images_save, update_kind=latent_losses.update_kind(gan_loss.active_terms)
    ):
        drop = schedules.drop_factor(run.progress.epoch, config.lr_drop_epochs)
        vqgan.lr = drop * with_warmup(step, total_steps, config.learning_rate, config.lr_warmup_steps)
        discr.lr = drop * with_warmup(step, total_steps, discr_lr, config.lr_warmup_steps)
        entropy_factor = schedules.linear(step, config.entropy_anneal_steps, config.entropy_anneal_factor, 1.0)
        weights = {"commitment": config.commitment_loss_weight, "entropy": config.entropy_loss_weight * entropy_factor}
        weights["kl"] = config.kl_loss_weight / values_per_latent  # the KL is per latent, the errors are per value
        weights["equivariance_loss"], weights["alignment_loss"] = config.equivariance_weight, config.align_weight
        fakes, codes, aligned = [], [], []
        # With --grad_accum_steps, passes without gradients come first, for statistics of codes and an adaptive weight.
        for micro_batch in gan_loss.micro_batches(batch, step):
            out = vqgan(micro_batch.images, **micro_batch.generator_inputs)
            recon, adversarial, gan_weight = gan_loss(out, micro_batch)
            alignment_term, aligned_pair = alignment.terms(out, micro_batch)
            terms = {**out.losses, **latent_losses.terms(out, micro_batch), **alignment_term}
            loss = recon + gan_weight * adversarial + sum(weights[name] * term for name, term in terms.items())
            vqgan.backward(loss)
            fakes.append(out.reconstruction.detach())
            codes.append(out.codes)
            aligned.append(aligned_pair)
            run.add(loss=loss, **terms)
        update = vqgan.step(with_norm=run.is_line_due)
        alignment.update(batch, aligned, vqgan.lr, with_norm=run.is_line_due)
        generator.quantizer.after_step(step, config.seed, update.skipped)
        ema.update(update.skipped)
        run.log_codes(codes, generator.num_codes)
        run.log(update, **({"entropy_loss_weight": weights["entropy"]} if "entropy" in terms else {}))
        if gan_loss.is_adversarial(step):
            discr_update = gan_loss.update_discriminator(batch, step, fakes, with_norm=run.is_line_due)
            run.log(discr_grad_norm=discr_update.grad_norm, discr_lr=discr_update.lr)


def main(argv: Sequence[str] | None = None) -> None:
    start_training(train, build_parser(), argv, DEMO_CONFIG)


if __name__ == "__main__":
    main()
