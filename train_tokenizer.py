"""Train a tokenizer of videos and images: clips to a grid of codes and back. It is causal: a code depends on no later
frame, so an image is a clip of one frame, and a film of any length can be encoded as it comes.

    python train_tokenizer.py                                     # the demonstration, minutes on two cores
    python train_tokenizer.py --video_folder clips/               # one process, debugging
    torchrun --nproc_per_node 8 train_tokenizer.py --video_folder clips/
    deepspeed train_tokenizer.py --deepspeed_config configs/deepspeed/zero2.json --video_folder clips/
    horovodrun -np 8 python train_tokenizer.py --video_folder clips/

All give the same numbers. Run the same command again to resume: docs/running.md; its flags: docs/tokenizer.md.
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
from tandem.config.converters import FILE, FOLDER
from tandem.config.data import VideoFlags, data_path
from tandem.config.fields import flag, given
from tandem.config.models.autoencoders import QuantizerLossFlags, VideoTokenizerConfig
from tandem.config.parser import ArgumentParser
from tandem.config.shared import DecayingOptimizerFlags, RunFlags
from tandem.launch import start_training, training_parser
from tandem.weights.load import init_discriminator, init_model

if TYPE_CHECKING:  # PyTorch takes seconds to import: it is imported only after the arguments have been checked
    from PIL import Image
    from torch import Tensor

    from tandem.models import VideoDiscriminator, VideoTokenizer
    from tandem.training.visuals.images import Sample

DEMO_CONFIG = Path(__file__).parent / "configs" / "tokenizer" / "demo.yaml"
# What the terminal shows of a line of metrics.jsonl.
COLUMNS = ("recon_loss", "codes_used", "discr_loss", "valid/psnr", "valid/rfvd", "valid/lpips", "valid/codes_used")


@dataclass
class LossFlags:
    """Where the weights come from, the reconstruction loss, and what is measured."""

    init_from: str | None = flag(
        None,
        "start the generator from a run, a checkpoint, a model/ folder or USER/NAME of the Hugging Face Hub, "
        "whose architecture is taken where no flag sets another",
        FOLDER,
        title="model",
    )
    inflate: bool = flag(
        False,
        "the model of --init_from was trained on images: frames begin as images, without memory of earlier ones",
        requires=given("init_from", "DIR"),
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
    VideoFlags, VideoTokenizerConfig, QuantizerLossFlags, LossFlags, DecayingOptimizerFlags, GANFlags, RunFlags
):
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


def build_model(args: argparse.Namespace) -> VideoTokenizer:
    """The generator with seeded weights, the same on every process, or with those of `--init_from`."""
    from tandem.models import VideoTokenizer
    from tandem.models.layers.video.blocks import check_frames

    load = VideoTokenizer.inflate_from if args.inflate else VideoTokenizer.load_weights_from
    generator: VideoTokenizer = init_model(VideoTokenizer, args, load)
    check_frames(args.num_frames, generator.frames_per_code)
    if args.train == "decoder":
        generator.freeze_encoder()
    return generator


def build_discriminator(args: argparse.Namespace) -> VideoDiscriminator:
    """The discriminator with seeded weights, the same on every process."""
    from tandem.models import VideoDiscriminator

    return init_discriminator(VideoDiscriminator, args)


def train(args: argparse.Namespace, settings: dict[str, Any], backend: distributed.Backend) -> None:
    from torch.nn import functional as F

    from tandem.data.feed import to_unit_range
    from tandem.data.sets import video_data
    from tandem.devices import to_device
    from tandem.models import VideoTokenizer
    from tandem.models.features.i3d import i3d_features
    from tandem.models.features.lpips import load_lpips, load_perceptual
    from tandem.training.ema import make_ema
    from tandem.training.evaluation import Evaluation
    from tandem.training.loop import updates
    from tandem.training.losses.gan import GANLoss, frames_of
    from tandem.training.metrics.autoencoders import evaluate_autoencoder, reconstructions
    from tandem.training.metrics.collapse import ReconstructionAlarm
    from tandem.training.metrics.videos import VideoQuality
    from tandem.training.noise import Noise
    from tandem.training.optimizers import make_optimizer
    from tandem.training.run import Run
    from tandem.training.visuals.videos import film

    with backend.raise_on_all_ranks():
        generator, discriminator = build_model(args).to(backend.device), build_discriminator(args).to(backend.device)
        heartbeat = partial(backend.heartbeat, "fetching weights")
        perceptual = load_perceptual(
            args.perceptual, args.perceptual_weights, backend.device, side=args.image_size, heartbeat=heartbeat
        )
        lpips = load_lpips(args.lpips_weights, args.image_size, backend.device, heartbeat)
        i3d = i3d_features(args.fvd_weights, args.num_frames, backend.device)
        discriminator_options = args.discr_learning_rate or args.learning_rate, args.discr_betas or args.betas
        networks = ((generator, args.learning_rate, args.betas), (discriminator, *discriminator_options))
        optimizers = [make_optimizer(model, rate, betas, args.weight_decay, lion=args.use_lion)
                for model, rate, betas in networks]  # fmt: skip
    feed = video_data(args, backend)
    models = {"generator": generator, "discriminator": discriminator}
    run = Run(args, settings, backend, feed, models=models, columns=COLUMNS)
    generator.quantizer.connect(backend)
    in_precision = backend.autocast()  # errors, sums and the features of the I3D are fp32 or fp64 nevertheless
    tokenizer = backend.wrap(generator, optimizers[0], name="generator")
    ema, noise = make_ema(tokenizer, args.ema_decay, args.ema_power), Noise(args.seed, "frame")
    discr = backend.wrap(discriminator, optimizers[1], name="discriminator", max_grad_norm=args.discr_max_grad_norm)

    def videos_of(batch: Mapping[str, Any]) -> Tensor:
        return to_unit_range(batch["videos"])

    def sample_frames(micro: Mapping[str, Any], step: int) -> dict[str, Tensor]:
        """A frame of each clip, for the losses that judge single frames."""
        shares = noise.uniform(step, micro["positions"], ())  # on the CPU, so that every device draws the same
        return {"frames": to_device((shares * micro["videos"].shape[2]).long(), backend.device)}

    def reconstruction_loss(fake: Tensor, videos: Tensor, frames: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        pixel_error = pixel_loss(fake, videos)
        if perceptual is None:
            return pixel_error, {"recon_loss": pixel_error}
        perceptual_error = perceptual(frames_of(fake, frames), frames_of(videos, frames))
        loss = pixel_error + args.perceptual_loss_weight * perceptual_error
        return loss, {"recon_loss": pixel_error, "perceptual_loss": perceptual_error}

    def validate(model: VideoTokenizer, step: int) -> dict[str, float | Image.Image]:
        quality = VideoQuality(model.num_codes, args.num_frames, backend.device, ["recon_loss"], lpips, i3d)
        return evaluate_autoencoder(model, map(videos_of, feed.validation()), pixel_loss, quality, backend.sum)

    def draw(models: Mapping[str, VideoTokenizer], samples: Mapping[str, Any], step: int) -> Sample:
        clips = videos_of(samples)
        return film(clips, reconstructions(models, clips), fps=args.fps or 8)

    pixel_loss = F.l1_loss if args.l1_recon_loss else F.mse_loss
    gan = GANLoss(
        args, tokenizer, discr, backend, images=videos_of, loss_inputs=sample_frames,
        reconstruction_loss=reconstruction_loss, log=run.add,
    )  # fmt: skip
    evaluation = Evaluation(
        tokenizer, ema, write={"model": VideoTokenizer.save_pretrained}, watch=ReconstructionAlarm().check,
        validate=in_precision(validate), draw=in_precision(draw),
        use=("encode.py", "--video_folder", data_path(args, "video_folder"), "--output", f"{args.output_dir}/codes"),
    )  # fmt: skip
    run.resume(generator=tokenizer, discriminator=discr, lecam=gan.lecam, ema=ema)
    run.say(None if run.is_complete else perceptual_loss_warning(args))

    total_steps, peak = run.progress.total_steps, args.discr_learning_rate or args.learning_rate
    with_warmup = partial(schedules.with_warmup, args.lr_schedule)

    for step, batch in updates(
        run, evaluation, preview=args.num_videos_save, kind=lambda step, _: gan.active_terms(step)
    ):
        tokenizer.lr = with_warmup(step, total_steps, args.learning_rate, args.lr_warmup_steps)
        discr.lr = with_warmup(step, total_steps, peak, args.lr_warmup_steps)
        entropy_factor = schedules.linear(step, args.entropy_anneal_steps, args.entropy_anneal_factor, 1.0)
        weights = {"commitment": args.commitment_loss_weight, "entropy": args.entropy_loss_weight * entropy_factor}
        (is_adversarial, with_penalty), codes = gan.active_terms(step), []
        for videos in gan.micro_batches(batch, step, is_active=is_adversarial):
            out = tokenizer(videos)
            recon, adversarial = gan(out)
            loss = recon + gan.weight * adversarial + sum(weights[name] * term for name, term in out.losses.items())
            tokenizer.backward(gan.surrogate_loss(loss))
            codes.append(out.codes)
            run.add(loss=loss, **out.losses)
        update = tokenizer.step()
        gan.update_codebook(update.skipped)
        ema.update(update.skipped)
        if is_adversarial:
            for discr_loss, lecam, penalty in gan.discriminator_losses(with_penalty=with_penalty):
                discr.backward(discr_loss + args.lecam_weight * lecam + args.penalty_weight * penalty)
            discr_update = discr.step()
            gan.update_lecam(discr_update.skipped)
            run.log(discr_grad_norm=discr_update.grad_norm)
        run.log_codes(codes, generator.num_codes)
        run.log(update, entropy_loss_weight=weights["entropy"])


def main(argv: Sequence[str] | None = None) -> None:
    start_training(train, build_parser(), argv, DEMO_CONFIG)


if __name__ == "__main__":
    main()
