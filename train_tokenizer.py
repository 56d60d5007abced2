"""Train a tokenizer of videos and images: clips to a grid of codes, or continuous latents, and back. It is causal: a
code depends on no later frame, so an image is a clip of one frame, and a video of any length can be encoded chunk by
chunk.

    python train_tokenizer.py                                     # the demonstration, minutes on two cores
    python train_tokenizer.py --video_folder clips/               # one process, debugging
    torchrun --nproc_per_node 8 train_tokenizer.py --video_folder clips/
    deepspeed train_tokenizer.py --deepspeed_config configs/deepspeed/zero2.json --video_folder clips/
    horovodrun -np 8 python train_tokenizer.py --video_folder clips/

All give the same numbers. Run the same command again to resume: docs/running.md; its flags: docs/tokenizer.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem import data, distributed, models, schedules, training
from tandem.config.autoencoder_training import GANFlags, LatentRegularizerFlags, perceptual_loss_warning
from tandem.config.converters import FILE, sizes
from tandem.config.data import VideoFlags, data_path
from tandem.config.fields import flag, given
from tandem.config.models.autoencoders import QuantizerLossFlags, VideoTokenizerConfig
from tandem.config.models.taming import LatentLossFlags
from tandem.config.parser import ArgumentParser
from tandem.config.shared import VALIDATION, DecayingOptimizerFlags, RunFlags, start_flag
from tandem.launch import start_training, training_parser
from tandem.sides import height_and_width
from tandem.weights.load import init_discriminator, init_model, load_vision

if TYPE_CHECKING:  # PyTorch takes seconds to import: it is imported only after the arguments have been checked
    from PIL import Image
    from torch import Tensor

DEMO_CONFIG = Path(__file__).parent / "configs" / "tokenizer" / "demo.yaml"
# What the terminal shows of a line of metrics.jsonl.
COLUMNS = ("recon_loss", "codes_used", "discr_loss", "valid/psnr", "valid/rfvd", "valid/lpips", "valid/codes_used")


@dataclass
class ScriptFlags:
    """Where the weights come from, the reconstruction loss, and what is measured."""

    init_from: str | None = start_flag(
        "start the generator from a run, a checkpoint, a model/ folder, USER/NAME of the Hugging Face Hub, a folder of "
        "diffusers with a video autoencoder of Wan, or Wan's own .pth",
        title="model",
    )
    inflate: bool = flag(
        False,
        "for a model of --init_from that was trained on images: change its weights so that, before the first update, "
        "each frame is encoded without earlier ones",
        requires=given("init_from", "DIR"),
    )
    clip_frames: tuple[int, ...] | None = flag(
        None,
        "train on clips of several lengths: one of these numbers of frames is drawn for each update, and the clips of "
        "--num_frames are cut to it (default: --num_frames)",
        sizes,
        title="videos",
    )
    l1_recon_loss: bool = flag(False, "mean absolute instead of squared error", title="reconstruction loss")
    fvd_weights: str | None = flag(
        None,
        "report rFVD with these weights of I3D (a plain state dict)",
        FILE,
        requires=VALIDATION,
        title="evaluation",
    )


@dataclass
class Config(
    VideoFlags, VideoTokenizerConfig, LatentLossFlags, QuantizerLossFlags, LatentRegularizerFlags, ScriptFlags,
    DecayingOptimizerFlags, GANFlags, RunFlags,
):  # fmt: skip
    """Every flag of this script."""

    generator_width = "init_dim"
    output_dir: str = "runs/tokenizer"
    learning_rate: float = 1e-5
    lr_warmup_steps: int = 1000
    commitment_loss_weight: float = 1.0
    ema_decay: float = 0.999
    penalty: str = "zero_centred"
    perceptual_loss_weight: float = 0.1
    split_seed: int | None = 42


def build_parser() -> ArgumentParser:
    return training_parser("train_tokenizer.py", "Train a causal tokenizer of videos and images.", Config)


def build_model(config: Config) -> models.VideoTokenizer:
    """The generator with seeded weights, the same on every process, or with those of `--init_from`."""
    load = models.VideoTokenizer.inflate_from if config.inflate else models.VideoTokenizer.load_weights_from
    generator: models.VideoTokenizer = init_model(models.VideoTokenizer, config, load)
    models.check_frames(config.num_frames, generator.frames_per_code)
    for frames in config.clip_frames or ():
        models.check_frames(frames, generator.frames_per_code, "clip_frames")
    if config.clip_frames and max(config.clip_frames) > config.num_frames:
        raise ValueError(f"--clip_frames {max(config.clip_frames)} is more than --num_frames {config.num_frames}")
    if config.train == "decoder":
        generator.freeze_encoder()
    return generator


def build_discriminator(config: Config) -> models.VideoDiscriminator:
    """The discriminator with seeded weights, the same on every process, or with those of ``--init_from``."""
    return init_discriminator(models.VideoDiscriminator, config, frame_head=config.discriminator)


def train(config: Config, backend: distributed.Backend) -> None:
    from torch.nn import functional as F

    processes, device = backend.processes, backend.processes.device
    discr_lr, discr_betas = config.discr_learning_rate or config.learning_rate, config.discr_betas or config.betas
    with processes.raise_on_all_ranks():
        generator, discriminator = build_model(config).to(device), build_discriminator(config).to(device)
        heartbeat = partial(processes.heartbeat, "fetching weights")
        options: Any = {"side": min(height_and_width(config.image_size)), "device": device, "heartbeat": heartbeat}
        perceptual = models.load_perceptual(
            config.perceptual, config.perceptual_weights, gram=config.gram_loss_weight > 0, **options
        )
        lpips = models.load_lpips(config.lpips_weights, **options)
        vision = load_vision(config.align_with, device, heartbeat)
        i3d = models.i3d_features(config.fvd_weights, config.num_frames, device)
        make_optimizer = partial(training.make_optimizer, weight_decay=config.weight_decay, lion=config.use_lion)
        optimizer = make_optimizer(generator, config.learning_rate, config.betas)
        discr_optimizer = make_optimizer(discriminator, discr_lr, discr_betas)
    feed = data.video_data(config, processes)
    networks: dict[str, Any] = {"generator": generator, "discriminator": discriminator}
    networks |= {} if vision is None else {"projection": vision}  # the model that a checkpoint's projection belongs to
    run = training.Run(config, backend, feed, models=networks)
    generator.quantizer.connect(processes)
    autocast = backend.autocast()  # errors, sums and the features of the I3D are fp32 or fp64 nevertheless
    tokenizer = backend.wrap(generator, optimizer, name="generator")
    ema = training.make_ema(tokenizer, config.ema_decay, config.ema_power)
    lengths = config.clip_frames or (config.num_frames,)
    clip_draws = training.ClipDraws(config.seed, lengths, device, only_longest=config.dry_run)
    discr = backend.wrap(discriminator, discr_optimizer, name="discriminator", max_grad_norm=config.discr_max_grad_norm)
    output = f"{config.output_dir}/{generator.latent_kind}"

    def videos_of(batch: Mapping[str, Any]) -> Tensor:
        return data.to_unit_range(batch["videos"])

    def validate(
        model: models.VideoTokenizer, batches: data.ValidationBatches, step: int
    ) -> dict[str, float | Image.Image]:
        quality = training.VideoQuality(model.num_codes, config.num_frames, device, ["recon_loss"], lpips, i3d)
        return training.evaluate_autoencoder(model, map(videos_of, batches), pixel_loss, quality, processes.sum)

    def draw(versions: Mapping[str, models.VideoTokenizer], samples: Mapping[str, Any], step: int) -> training.Sample:
        clips = videos_of(samples)
        return training.film(clips, training.reconstructions(versions, clips), fps=config.fps or 8)

    pixel_loss = F.l1_loss if config.l1_recon_loss else F.mse_loss
    distance = perceptual and training.loss_of_frames(perceptual)
    latent_losses = training.LatentLosses(config, tokenizer, "videos", device, pixel_loss, distance)
    alignment = training.Alignment(
        config, backend, tokenizer, vision, partial(make_optimizer, lr=config.learning_rate, betas=config.betas),
        run.add,
    )  # fmt: skip
    gan_loss = training.GANLoss(
        config, tokenizer, discr, processes, images=videos_of, pixel_loss=pixel_loss,
        perceptual_loss=distance, loss_inputs=clip_draws.frames, log=run.add,
        generator_inputs=lambda samples, step: {**latent_losses.inputs(samples, step), **alignment.generator_inputs()},
    )  # fmt: skip
    evaluation = training.Evaluation(
        tokenizer, ema, write={"model": models.VideoTokenizer.save_pretrained}, discriminator=discr,
        validate=autocast(validate), draw=autocast(draw), watch=training.ReconstructionAlarm().check,
        next_command=("encode.py", "--video_folder", data_path(config), "--output", output),
    )  # fmt: skip
    total_steps, with_warmup = run.progress.total_steps, partial(schedules.with_warmup, config.lr_schedule)
    columns = gan_loss.possible_columns(COLUMNS, total_steps)
    run.resume(columns, generator=tokenizer, discriminator=discr, lecam=gan_loss.lecam, ema=ema, **alignment.parts)
    run.say(None if run.is_complete else perceptual_loss_warning(config))

    update_kind = clip_draws.update_kind(latent_losses.update_kind(gan_loss.active_terms))
    for step, batch in training.updates(run, evaluation, preview=config.num_videos_save, update_kind=update_kind):
        batch = clip_draws.cut(batch, step)
        tokenizer.lr = with_warmup(step, total_steps, config.learning_rate, config.lr_warmup_steps)
        discr.lr = with_warmup(step, total_steps, discr_lr, config.lr_warmup_steps)
        entropy_factor = schedules.linear(step, config.entropy_anneal_steps, config.entropy_anneal_factor, 1.0)
        weights = {"commitment": config.commitment_loss_weight, "entropy": config.entropy_loss_weight * entropy_factor}
        # The KL is per latent, the errors are per value of the clip, which may be an image.
        weights["kl"] = config.kl_loss_weight / generator.values_per_latent(frames=batch["videos"].shape[2])
        weights["equivariance_loss"], weights["alignment_loss"] = config.equivariance_weight, config.align_weight
        fakes, codes, aligned = [], [], []
        for micro_batch in gan_loss.micro_batches(batch, step):
            out = tokenizer(micro_batch.images, **micro_batch.generator_inputs)
            recon, adversarial, gan_weight = gan_loss(out, micro_batch)
            alignment_term, aligned_pair = alignment.terms(out, micro_batch)
            terms = {**out.losses, **latent_losses.terms(out, micro_batch), **alignment_term}
            loss = recon + gan_weight * adversarial + sum(weights[name] * term for name, term in terms.items())
            tokenizer.backward(loss)
            fakes.append(out.reconstruction.detach())
            codes.append(out.codes)
            aligned.append(aligned_pair)
            run.add(loss=loss, **terms)
        update = tokenizer.step(with_norm=run.is_line_due)
        alignment.update(batch, aligned, tokenizer.lr, with_norm=run.is_line_due)
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
