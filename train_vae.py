"""Train the discrete VAE of DALL-E: images to a grid of codes and back.

    python train_vae.py                                       # the demonstration, minutes on two cores
    python train_vae.py --image_folder photos/                # one process, debugging
    torchrun --nproc_per_node 8 train_vae.py --image_folder photos/
    deepspeed train_vae.py --deepspeed_config configs/deepspeed/zero2.json --image_folder photos/
    horovodrun -np 8 python train_vae.py --image_folder photos/

All give the same numbers. Run the same command again to resume; see docs/running.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import distributed
from hub import with_models
from training import schedules
from training.flags.converters import non_negative_float, positive_float, size, size_or_0
from training.flags.idle import refuse_idle_flags
from training.flags.own_data import place_of
from training.flags.parser import ArgumentParser
from training.flags.public_names import add_public_names
from training.flags.shared import add_image_arguments, add_run_arguments
from training.run.starts import last_start

if TYPE_CHECKING:  # PyTorch takes seconds to import: it is imported only after the arguments have been checked
    from PIL import Image
    from torch import Tensor

    from data import Feed, ImageBatch
    from models import DiscreteVAE, VAEOutput

DEMO_CONFIG = Path(__file__).parent / "configs" / "vae" / "demo.yaml"
# Arguments that a resumed run may not change: its weights would not fit, or would mean something else.
MODEL_ARGUMENTS = (
    "image_size", "num_tokens", "emb_dim", "num_layers", "num_resnet_blocks", "hidden_dim", "transparent"
)  # fmt: skip
# The model's parameters, as its error messages name them -> the flags that set them.
FLAGS = {
    "num_tokens": "--num_tokens", "codebook_dim": "--emb_dim", "num_layers": "--num_layers",
    "num_resnet_blocks": "--num_resnet_blocks", "hidden_dim": "--hidden_dim", "channels 3": "no --transparent",
    "channels 4": "--transparent",
}  # fmt: skip
# What the terminal shows of a line of metrics.jsonl.
COLUMNS = ("recon_loss", "codes_used", "temperature", "valid/psnr", "valid/loss", "valid/codes_used")


def build_parser() -> ArgumentParser:
    parser = ArgumentParser("train_vae.py", "Train the discrete VAE of DALL-E.", is_root=distributed.launched_as_root)
    add_image_arguments(parser, image_size=128, image_size_help="a power of two")
    # fmt: off
    add = parser.add_argument_group("model").add_argument
    add("--transparent", action="store_true", help="RGBA instead of RGB")
    add("--num_tokens", type=size, default=8192, metavar="CODES", help="size of the codebook")
    add("--num_layers", type=size, default=3, metavar="N",
        help="halvings of the side: a code stands for 2^N x 2^N pixels")
    add("--num_resnet_blocks", type=size_or_0, default=2, metavar="N",
        help="residual blocks on the coarsest grid")
    add("--emb_dim", type=size, default=512, metavar="DIM", help="width of a codebook entry")
    add("--hidden_dim", type=size, default=256, metavar="DIM", help="channels of the convolutions")
    add("--init_from", metavar="FILE",
        help="start from a run, a checkpoint, a model/ folder, a vae-final.pt or USER/NAME of the Hugging Face Hub")

    add = parser.add_argument_group("loss and schedules").add_argument
    add("--smooth_l1_loss", action="store_true", help="smooth L1 instead of MSE")
    add("--kl_loss_weight", type=non_negative_float, default=0.0, metavar="WEIGHT",
        help="weight of KL(q || uniform), a mean over batch and positions in nats (DALLE-pytorch sums over positions)")
    add("--straight_through", action="store_true", help="hard codes forward, soft gradient")
    add("--reinmax", action="store_true", help="ReinMax gradient estimator; needs --straight_through")
    add("--starting_temp", type=positive_float, default=1.0, metavar="T",
        help="Gumbel-softmax temperature at the start")
    add("--temp_min", type=positive_float, default=0.5, metavar="T", help="lowest temperature")
    add("--anneal_rate", type=non_negative_float, default=1e-6, metavar="RATE",
        help="after updates 1, 101, 201, ... the temperature is multiplied by exp(-RATE x updates before that one)")
    add("--learning_rate", type=positive_float, default=1e-3, metavar="LR", help="learning rate of Adam at the start")
    add("--lr_decay_rate", type=positive_float, default=0.98, metavar="FACTOR",
        help="after updates 1, 101, 201, ... the learning rate is multiplied by it")
    # fmt: on
    add_run_arguments(parser, output_dir="runs/vae")
    distributed.add_arguments(parser)
    add_public_names(parser, "train_vae")
    return parser


def refuse_contradictions(parser: ArgumentParser, args: argparse.Namespace) -> None:
    """End with a one-line error if flags contradict one another."""
    side, halvings, layers = args.image_size, args.image_size.bit_length() - 1, args.num_layers
    if halvings < layers:
        parser.error(f"--image_size {side} is less than 2^num_layers for --num_layers {layers}; raise it or lower that")
    if side != 1 << halvings:
        parser.error(f"--image_size {side} is not a power of two; use {1 << halvings} or {2 << halvings}")
    if args.reinmax and not args.straight_through:
        parser.error("--reinmax refines the gradient of --straight_through; give both")
    if args.starting_temp < args.temp_min:
        start, lowest = f"--starting_temp {args.starting_temp}", f"--temp_min {args.temp_min}"
        parser.error(f"{start} is below {lowest}, the lowest temperature; raise the one or lower the other")


def build_model(args: argparse.Namespace) -> DiscreteVAE:
    """The model with seeded weights, the same on every process, or with those of ``--init_from``."""
    import torch

    from models import DiscreteVAE, build_in_memory
    from trained import load_from

    torch.manual_seed(args.seed)
    model = build_in_memory(
        DiscreteVAE,
        image_size=args.image_size,
        num_tokens=args.num_tokens,
        codebook_dim=args.emb_dim,
        num_layers=args.num_layers,
        num_resnet_blocks=args.num_resnet_blocks,
        hidden_dim=args.hidden_dim,
        channels=4 if args.transparent else 3,
        smooth_l1_loss=args.smooth_l1_loss,
        temperature=args.starting_temp,
        straight_through=args.straight_through,
        reinmax=args.reinmax,
        kl_div_loss_weight=args.kl_loss_weight,
    )
    if args.init_from:
        try:
            if Path(args.init_from).is_file():
                model.load_weights_from(args.init_from)
            else:
                load_from(args.init_from, "DiscreteVAE", model.load_weights_from)
        except ValueError as error:
            # Parameters are renamed to flags after this phrase only: the path in front of it stays as it is.
            before, needed, differing = str(error).partition("; they need ")
            for name, flag in FLAGS.items():
                differing = differing.replace(name, flag)
            raise ValueError(before + needed + differing) from None
    return model


def evaluate(
    model: DiscreteVAE,
    feed: Feed[ImageBatch],
    objective: Callable[[VAEOutput], Tensor],
    temperature: float,
    backend: distributed.Backend,
) -> dict[str, float | Image.Image]:
    """Noise-free loss and quality of hard reconstructions over the validation split and all processes, and a picture of
    how often each code was chosen."""
    from data import to_unit_range
    from training.measures.reconstruction import ReconstructionQuality
    from training.pictures.images import code_histogram

    quality = ReconstructionQuality(model.num_tokens, backend.device)
    for batch in feed.validation():
        images = to_unit_range(batch["images"])
        codes = model.get_codebook_indices(images)
        quality.add(images, model.decode(codes), codes, loss=objective(model(images, temperature=temperature)))
    values, counts = quality.result(backend.sum)
    return {**values, "codes": code_histogram(counts)}


def reconstructions(models: Mapping[str, DiscreteVAE], shown: ImageBatch, temperature: float) -> Image.Image:
    """Originals, soft and hard reconstructions by the model that is kept: the average if there is one."""
    from data import to_unit_range
    from training.pictures.images import grid
    from training.run.loop import kept_model

    model = kept_model(models)
    images = to_unit_range(shown["images"])
    soft = model(images, temperature=temperature).reconstruction
    return grid({"original": images, "soft": soft, "hard": model.decode(model.get_codebook_indices(images))})


def train(args: argparse.Namespace, settings: dict[str, Any], backend: distributed.Backend) -> None:
    import torch

    import data
    from models import DiscreteVAE
    from training.ema import make_ema
    from training.measures.collapse import ReconstructionAlarm
    from training.noise import Noise
    from training.run.loop import Evaluation
    from training.run.run import Run

    with backend.agreement():  # if this fails on one process, all of them end, so that none waits for it
        model = build_model(args).to(backend.device)
    feed = data.image_feed(args, backend, model.channels)
    run = Run(
        args, settings, backend, feed, models={"engine": model}, model_arguments=MODEL_ARGUMENTS, columns=COLUMNS
    )  # fmt: skip

    vae = backend.wrap(model, torch.optim.Adam(model.parameters(), lr=args.learning_rate, fused=True), name="vae")
    ema = make_ema(vae, args.ema_decay, args.ema_power)
    noise = Noise(args.seed, "gumbel")
    temperature_of = partial(schedules.annealed, start=args.starting_temp, rate=args.anneal_rate, lowest=args.temp_min)

    def objective(out: VAEOutput) -> Tensor:
        return out.recon_loss + args.kl_loss_weight * out.kl

    alarm = ReconstructionAlarm("a smaller --kl_loss_weight or --learning_rate", "a larger --kl_loss_weight")
    in_precision = backend.autocast()  # errors and sums are fp32 or fp64 nevertheless
    evaluation = Evaluation(
        vae,
        ema,
        validate=in_precision(lambda model, step: evaluate(model, feed, objective, temperature_of(step), backend)),
        draw=in_precision(lambda models, shown, step: reconstructions(models, shown, temperature_of(step))),
        write={"model": DiscreteVAE.save_pretrained, "vae-final.pt": DiscreteVAE.save_dalle},
        use=("tokenize_images.py", "--image_folder", place_of(args, "image_folder"), "--output", "codes/"),
        watch=alarm.check,
    )
    run.resume(engine=vae, ema=ema)

    for step, batch in run.updates(evaluation, preview=args.num_images_save):
        temperature, codes = temperature_of(step), []
        vae.lr = schedules.decay(step, args.learning_rate, args.lr_decay_rate)
        for micro in vae.micro_batches(batch):
            images = data.to_unit_range(micro["images"])
            gumbel = noise.gumbel(step, micro["positions"], model.noise_shape, backend.device)
            out = vae(images, noise=gumbel, temperature=temperature, with_codes=run.codes_due)
            loss = objective(out)
            vae.backward(loss)
            codes += [] if out.codes is None else [out.codes]
            run.add(loss=loss, recon_loss=out.recon_loss, kl=out.kl)
        update = vae.step()
        ema.update(update.skipped)
        run.log_codes(codes, model.num_codes)
        run.log(update, temperature=temperature)


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse(argv, demonstration=DEMO_CONFIG)
    refuse_contradictions(parser, args)
    refuse_idle_flags(parser, args, "images")
    distributed.launch(with_models(train), parser, args, last_start)


if __name__ == "__main__":
    main()
