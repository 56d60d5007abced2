"""Train a tokenizer of videos and images: clips to a grid of codes and back. It is causal: a code depends on no later
frame, so an image is a clip of one frame, and a film of any length can be encoded as it comes.

    python train_tokenizer.py                                     # the demonstration, minutes on two cores
    python train_tokenizer.py --video_folder clips/               # one process, debugging
    torchrun --nproc_per_node 8 train_tokenizer.py --video_folder clips/
    deepspeed train_tokenizer.py --deepspeed_config configs/deepspeed/zero2.json --video_folder clips/
    horovodrun -np 8 python train_tokenizer.py --video_folder clips/

All give the same numbers. Run the same command again to resume; see docs/running.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import distributed
from hub import with_models
from models.quantizers import QUANTIZERS
from training import schedules
from training.flags.autoencoders import add_adversary_arguments, add_quantizer_arguments, without_perceptual_loss
from training.flags.converters import non_negative_float, non_negative_int, positive_float, size, size_or_0
from training.flags.idle import refuse_idle_flags
from training.flags.own_data import place_of
from training.flags.parser import ArgumentParser
from training.flags.public_names import add_public_names
from training.flags.shared import add_optimizer_arguments, add_run_arguments, add_video_arguments
from training.run.starts import last_start

if TYPE_CHECKING:  # PyTorch takes seconds to import: it is imported only after the arguments have been checked
    import torch
    from PIL import Image
    from torch import Tensor

    from data import Feed, VideoBatch
    from models import VideoDiscriminator, VideoTokenizer
    from training.pictures.images import Sample

DEMO_CONFIG = Path(__file__).parent / "configs" / "tokenizer" / "demo.yaml"
# Arguments of the generator that a resumed run may not change: its weights would not fit, or mean something else.
LASTING = (
    "layers", "init_dim", "max_dim", "input_kernel", "output_kernel", "residual_kernel", "pad_mode", "norm",
    "separate_first_frame", "patch_size", "patch", "time_window", "soft_clamp", "quantizer", "codebook_size",
    "codebook_dim", "fsq_levels", "vq_cosine",
)  # fmt: skip
GENERATOR = (*LASTING, "image_size", "diversity_gamma", "inv_temperature", "vq_decay", "gradient_checkpointing")
MODEL_ARGUMENTS = (*LASTING, "image_size", "discr_dim", "discr_layers")
# What the terminal shows of a line of metrics.jsonl.
COLUMNS = ("recon_loss", "codes_used", "discr_loss", "valid/psnr", "valid/rfvd", "valid/lpips", "valid/codes_used")
LAYERS = (
    "residual,compress_space,consecutive_residual:2,compress_space,consecutive_residual:2,linear_attend_space,"
    "compress_space,consecutive_residual:2,attend_space" + 2 * ",compress_time,consecutive_residual:2" + ",attend_time"
)


def build_parser() -> ArgumentParser:
    text = "Train a causal tokenizer of videos and images."
    parser = ArgumentParser("train_tokenizer.py", text, is_root=distributed.launched_as_root)
    add_video_arguments(parser, image_size=128, image_size_help="a multiple of patch_size x 2^(compress_space layers)")
    # fmt: off
    add = parser.add_argument_group("model").add_argument
    add("--layers", default=LAYERS, metavar="NAME[:N],...",
        help="layers of the encoder, mirrored in the decoder: residual, residual_space, consecutive_residual:NUMBER, "
        "compress_space[:CHANNELS], compress_time[:CHANNELS], attend_space, attend_time, linear_attend_space, "
        "gateloop_time, adaptive")
    add("--init_dim", type=size, default=64, metavar="DIM", help="channels before the first layer")
    add("--max_dim", type=size, metavar="DIM", help="no layer has more channels (default: no limit)")
    add("--input_kernel", type=size, default=7, metavar="N", help="side of the first convolution's kernel")
    add("--output_kernel", type=size, default=3, metavar="N", help="side of the last convolution's kernel")
    add("--residual_kernel", type=size, default=3, metavar="N", help="side of the residual layers' kernels")
    add("--pad_mode", choices=("constant", "replicate", "reflect"), default="constant",
        help="padding in space of the first and the last convolution")
    add("--norm", choices=("none", "rms"), default="none",
        help="rms: RMSNorm over the channels of each position before the convolutions of residual layers")
    add("--patch_size", type=size, default=1, metavar="PIXELS",
        help="cut frames into patches of this side before the first layer; a power of two")
    add("--patch", choices=("haar", "pixels"), default="haar",
        help="what a patch becomes: its Haar wavelet coefficients, or its pixels")
    add("--separate_first_frame", action="store_true", help="give the first frame convolutions of its own")
    add("--time_window", type=size_or_0, default=16, metavar="FRAMES",
        help="attend_time looks back so many latent frames, which bounds the memory of a stream; 0: to the beginning")
    add("--soft_clamp", type=non_negative_float, default=10.0, metavar="X",
        help="lfq gets X tanh(z / X) instead of z; 0: z")
    add("--init_from", metavar="DIR",
        help="start the generator from a run, a checkpoint, a model/ folder or USER/NAME of the Hugging Face Hub")
    add("--inflate", action="store_true",
        help="the model of --init_from was trained on images: frames begin as images, without memory of earlier ones")
    add("--train_decoder_only", action="store_true", help="keep the encoder and the codebook as --init_from has them")

    add_quantizer_arguments(parser, QUANTIZERS, codebook_size=1024, commitment_loss_weight=1.0, diversity_gamma=2.5)
    add = parser.add_argument_group("reconstruction loss").add_argument
    add("--l1_recon_loss", action="store_true", help="mean absolute instead of squared error")

    add = parser.add_argument_group("schedule").add_argument
    add("--learning_rate", type=positive_float, default=1e-5, metavar="LR", help="highest learning rate")
    add("--lr_warmup_steps", type=non_negative_int, default=1000, metavar="UPDATES",
        help="updates of linear warm-up from 0, at most half of the run")
    add("--lr_cosine", action="store_true", help="let the learning rate fall to 0 along a cosine; constant otherwise")
    add_optimizer_arguments(parser, betas="0.9,0.99", weight_decay=0.01)

    add = parser.add_argument_group("evaluation").add_argument
    add("--lpips_weights", metavar="FILE", help="report LPIPS on the validation split with these weights")
    add("--fvd_weights", metavar="FILE", help="report rFVD with these weights of an I3D (a plain state dict)")
    # fmt: on
    add_adversary_arguments(parser, penalty="zero_centred", perceptual_loss_weight=0.1)
    add_run_arguments(parser, output_dir="runs/tokenizer", ema_decay=0.999, split_seed=42, is_deep=True)
    distributed.add_arguments(parser)
    add_public_names(parser, "train_tokenizer")
    return parser


def build_model(args: argparse.Namespace) -> VideoTokenizer:
    """The generator with seeded weights, the same on every process, or with those of `--init_from`."""
    import torch

    from models import VideoTokenizer, build_in_memory
    from models.video.layers import check_frames
    from trained import load_from

    torch.manual_seed(args.seed)
    generator = build_in_memory(VideoTokenizer, **{name: getattr(args, name) for name in GENERATOR})
    check_frames(args.num_frames, generator.frames_per_code)
    if args.init_from:
        load = generator.inflate_from if args.inflate else generator.load_weights_from
        load_from(args.init_from, "VideoTokenizer", load)
    if args.train_decoder_only:
        generator.freeze_encoder()
    return generator


def build_discriminator(args: argparse.Namespace) -> VideoDiscriminator:
    """The discriminator with seeded weights, the same on every process."""
    import torch

    from models import VideoDiscriminator, build_in_memory

    torch.manual_seed(args.seed)
    discriminator = build_in_memory(VideoDiscriminator, dim=args.discr_dim or args.init_dim, layers=args.discr_layers)
    discriminator.check_side(args.image_size)
    return discriminator


def evaluate(
    model: VideoTokenizer, feed: Feed[VideoBatch], error: Callable[[Tensor, Tensor], Tensor], num_frames: int,
    networks: Mapping[str, Any], backend: distributed.Backend,
) -> dict[str, float | Image.Image]:  # fmt: skip
    """Quality over the validation split and all processes, and a picture of how often each code was chosen."""
    from data import to_unit_range
    from training.measures.videos import VideoQuality
    from training.pictures.images import code_histogram

    quality = VideoQuality(model.num_codes, num_frames, backend.device, losses=["recon_loss"], **networks)
    was_training = model.training
    model.eval()
    for batch in feed.validation():
        videos = to_unit_range(batch["videos"])
        out = model(videos)
        quality.add(videos, out.reconstruction, out.codes, recon_loss=error(out.reconstruction, videos))
    model.train(was_training)
    values, counts = quality.result(backend.sum)
    return {**values, "codes": code_histogram(counts)}


def reconstructions(models: Mapping[str, VideoTokenizer], shown: VideoBatch, fps: float) -> Sample:
    """Clips and their reconstructions by each model, frame by frame."""
    from data import to_unit_range
    from training.pictures.film import film

    clips = to_unit_range(shown["videos"])
    return film(clips, {name: model.decode(model.encode(clips)) for name, model in models.items()}, fps=fps)


def load_metric_networks(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Networks by which validation measures reconstructions, if their weights are given."""
    from models.i3d import i3d_features
    from models.perceptual import load_perceptual

    kind = "lpips" if args.lpips_weights else "none"
    lpips = load_perceptual(kind, args.lpips_weights, device, side=args.image_size, flag="--lpips_weights")
    return {"lpips": lpips, "i3d": i3d_features(args.fvd_weights, args.num_frames, device)}


def train(args: argparse.Namespace, settings: dict[str, Any], backend: distributed.Backend) -> None:
    from torch.nn import functional as F

    import data
    from models import VideoTokenizer
    from models.perceptual import load_perceptual
    from training.ema import make_ema
    from training.measures.collapse import ReconstructionAlarm
    from training.noise import Noise
    from training.objectives.adversaries import Judge, frames_of
    from training.optimizers import make_optimizer
    from training.run.loop import Evaluation
    from training.run.run import Run

    with backend.agreement():
        generator, discriminator = build_model(args).to(backend.device), build_discriminator(args).to(backend.device)
        perceptual = load_perceptual(args.perceptual, args.perceptual_weights, backend.device, side=args.image_size)
        networks = load_metric_networks(args, backend.device)
        both = ((generator, args.betas), (discriminator, args.discr_betas or args.betas))
        adam = [make_optimizer(model, args.learning_rate, betas, args.weight_decay, lion=args.use_lion)
                for model, betas in both]  # fmt: skip
    feed = data.video_feed(args, backend)
    run = Run(
        args, settings, backend, feed, models={"generator": generator, "discriminator": discriminator},
        model_arguments=MODEL_ARGUMENTS, columns=COLUMNS,
        resolve=lambda said: {**said, "discr_dim": said.get("discr_dim") or said.get("init_dim")},
    )  # fmt: skip
    generator.quantizer.connect(backend)
    in_precision = backend.autocast()  # errors, sums and the features of the I3D are fp32 or fp64 nevertheless
    tokenizer = backend.wrap(generator, adam[0], name="generator")
    ema, noise = make_ema(tokenizer, args.ema_decay, args.ema_power), Noise(args.seed, "frame")
    critic = backend.wrap(discriminator, adam[1], name="discriminator", max_grad_norm=args.discr_max_grad_norm)

    def drawn_frames(micro: Mapping[str, Any], step: int) -> dict[str, Tensor]:
        """A frame of each clip, for the losses that judge single frames."""
        shares = noise.uniform(step, micro["positions"], ())  # on the CPU, so that every device draws the same
        return {"frames": (shares * micro["videos"].shape[2]).long().to(backend.device, non_blocking=True)}

    def reconstruction_loss(fake: Tensor, videos: Tensor, frames: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        of_pixels = error(fake, videos)
        if perceptual is None:
            return of_pixels, {"recon_loss": of_pixels}
        of_frames = perceptual(frames_of(fake, frames), frames_of(videos, frames))
        loss = of_pixels + args.perceptual_loss_weight * of_frames
        return loss, {"recon_loss": of_pixels, "perceptual_loss": of_frames}

    error = F.l1_loss if args.l1_recon_loss else F.mse_loss
    judge = Judge(
        args, tokenizer, critic, backend, images=lambda micro: data.to_unit_range(micro["videos"]), given=drawn_frames,
        reconstruction_loss=reconstruction_loss, log=run.add,
    )  # fmt: skip
    evaluation = Evaluation(
        tokenizer, ema, write={"model": VideoTokenizer.save_pretrained}, watch=ReconstructionAlarm().check,
        validate=in_precision(lambda model, step: evaluate(model, feed, error, args.num_frames, networks, backend)),
        draw=in_precision(lambda models, shown, step: reconstructions(models, shown, args.fps or 8)),
        use=("tokenize_videos.py", "--video_folder", place_of(args, "video_folder"), "--output", "codes/"),
    )  # fmt: skip
    run.resume(generator=tokenizer, discriminator=critic, lecam=judge.lecam, ema=ema)
    if (line := without_perceptual_loss(args)) and not run.is_complete:
        run.say(line)

    total_steps, peak = run.progress.total_steps, args.discr_learning_rate or args.learning_rate
    warmed_up = schedules.warmup_cosine if args.lr_cosine else schedules.warmup_constant

    for step, batch in run.updates(evaluation, preview=args.num_videos_save):
        tokenizer.lr = warmed_up(step, total_steps, args.learning_rate, args.lr_warmup_steps)
        critic.lr = warmed_up(step, total_steps, peak, args.lr_warmup_steps)
        times = schedules.linear(step, args.entropy_anneal_steps, args.entropy_anneal_factor, 1.0)
        weights = {"commitment": args.commitment_loss_weight, "entropy": args.entropy_loss_weight * times}
        is_adversarial, codes = step >= args.discr_start_step, []
        for videos in judge.micro_batches(batch, step, is_active=is_adversarial):
            out = tokenizer(videos)
            recon, adversarial = judge(out)
            loss = recon + judge.weight * adversarial + sum(weights[name] * term for name, term in out.losses.items())
            tokenizer.backward(judge.carried(loss))
            codes.append(out.codes)
            run.add(loss=loss, **out.losses)
        update = tokenizer.step()
        judge.update_codebook(update.skipped)
        ema.update(update.skipped)
        if is_adversarial:
            is_punished = step % args.apply_grad_penalty_every == 0
            for discr_loss, lecam, penalty in judge.critic_losses(with_penalty=is_punished):
                critic.backward(discr_loss + args.lecam_weight * lecam + args.penalty_weight * penalty)
            of_critic = critic.step()
            judge.update_lecam(of_critic.skipped)
            run.log(discr_grad_norm=of_critic.grad_norm)
        run.log_codes(codes, generator.num_codes)
        run.log(update, entropy_loss_weight=weights["entropy"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse(argv, demonstration=DEMO_CONFIG, data_flag="video_folder")
    refuse_idle_flags(parser, args, "quantizer", "adversary", "videos")
    parser.refuse_idle(args, ["time_window"], "layers", "with attend_time", "attend_time" in args.layers)
    parser.refuse_idle(args, ["patch"], "patch_size", "above 1", args.patch_size > 1)
    parser.refuse_idle(args, ["inflate", "train_decoder_only"], "init_from", "DIR", args.init_from is not None)
    is_validated = args.valid_fraction > 0 or args.valid_folder is not None
    parser.refuse_idle(args, ["lpips_weights", "fvd_weights"], "valid_fraction", "above 0", is_validated)
    distributed.launch(with_models(train), parser, args, last_start)


if __name__ == "__main__":
    main()
