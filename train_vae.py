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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem import data, distributed, models, schedules, training
from tandem.config.converters import FILE, non_negative_float, positive_float
from tandem.config.data import ImageFlags, data_path
from tandem.config.fields import flag
from tandem.config.models.autoencoders import DiscreteVAEConfig
from tandem.config.parser import ArgumentParser
from tandem.config.shared import RunFlags, start_flag
from tandem.launch import start_training, training_parser
from tandem.sides import height_and_width
from tandem.weights.load import init_model

if TYPE_CHECKING:  # PyTorch takes seconds to import: it is imported only after the arguments have been checked
    from PIL import Image
    from torch import Tensor


DEMO_CONFIG = Path(__file__).parent / "configs" / "vae" / "demo.yaml"
# What the terminal shows of a line of metrics.jsonl.
COLUMNS = ("recon_loss", "codes_used", "temperature", "valid/psnr", "valid/loss", "valid/codes_used")


@dataclass
class ScriptFlags:
    """The loss, its schedules, and where the weights come from."""

    init_from: str | None = start_flag(
        "start from a run, a checkpoint, a model/ folder, a vae-final.pt or USER/NAME of the Hugging Face Hub",
        FILE,
        title="model",
    )
    starting_temp: float = flag(1.0, "Gumbel temperature at the start", positive_float, title="loss and schedules")
    temp_min: float = flag(0.5, "lowest temperature", positive_float)
    anneal_rate: float = flag(
        1e-06,
        "after update n = 1, 101, 201, ... the temperature is multiplied by exp(-RATE x (n - 1))",
        non_negative_float,
    )
    learning_rate: float = flag(0.001, "learning rate of Adam at the start", positive_float)
    lr_decay_rate: float = flag(0.98, "factor on the learning rate after updates 1, 101, 201, ...", positive_float)

    @classmethod
    def validate(cls, args: argparse.Namespace, parser: ArgumentParser) -> None:
        for side in height_and_width(args.image_size):
            halvings, layers = side.bit_length() - 1, args.num_layers
            if halvings < layers:
                parser.error(
                    f"--image_size {side} is less than 2^num_layers for --num_layers {layers}; "
                    "raise --image_size or lower --num_layers"
                )
            if side != 1 << halvings:
                parser.error(f"--image_size {side} is not a power of two; use {1 << halvings} or {2 << halvings}")
        if args.reinmax and not args.straight_through:
            parser.error("--reinmax refines the gradient of --straight_through; give both")
        if args.starting_temp < args.temp_min:
            start, lowest = f"--starting_temp {args.starting_temp}", f"--temp_min {args.temp_min}"
            parser.error(f"{start} is below {lowest}, the lowest temperature; raise the one or lower the other")


@dataclass
class Config(ImageFlags, DiscreteVAEConfig, ScriptFlags, RunFlags):
    """Every flag of this script."""

    output_dir: str = "runs/vae"


def build_parser() -> ArgumentParser:
    return training_parser("train_vae.py", "Train the discrete VAE of DALL-E.", Config)


def build_model(config: Config) -> models.DiscreteVAE:
    """The model with seeded weights, the same on every process, or with those of ``--init_from``."""
    return init_model(models.DiscreteVAE, config)


def train(config: Config, backend: distributed.Backend) -> None:
    import torch

    from tandem.weights.formats.dalle import has_dalle_shape, save_dalle

    processes, device = backend.processes, backend.processes.device
    with processes.raise_on_all_ranks():  # if this fails on one process, all end
        model = build_model(config).to(device)
    feed = data.image_data(config, processes)
    run = training.Run(config, backend, feed, models={"engine": model})

    vae = backend.wrap(model, torch.optim.Adam(model.parameters(), lr=config.learning_rate, fused=True), name="vae")
    ema = training.make_ema(vae, config.ema_decay, config.ema_power)
    noise = training.Noise(config.seed, "gumbel")
    temperature_at = partial(
        schedules.anneal, start=config.starting_temp, rate=config.anneal_rate, lowest=config.temp_min
    )

    def objective(out: models.VAEOutput) -> Tensor:
        return out.recon_loss + config.kl_loss_weight * out.kl

    def validate(
        model: models.DiscreteVAE, batches: data.ValidationBatches, step: int
    ) -> dict[str, float | Image.Image]:
        """Noise-free loss, quality of hard reconstructions, and a picture of how often each code was chosen."""
        quality = training.ReconstructionQuality(model.num_tokens, device)
        for batch in batches:
            images = data.to_unit_range(batch["images"])
            codes = model.get_codebook_indices(images)
            loss = objective(model(images, temperature=temperature_at(step)))
            quality.add(images, model.decode(codes), codes, loss=loss)
        values, counts = quality.result(processes.sum)
        return {**values, "codes": training.code_histogram(counts)}

    def draw(versions: Mapping[str, models.DiscreteVAE], samples: data.Batch, step: int) -> Image.Image:
        """Originals, soft and hard reconstructions by the final model: the average if there is one."""
        model, images = training.final_model(versions), data.to_unit_range(samples["images"])
        soft = model(images, temperature=temperature_at(step)).reconstruction
        hard = model.decode(model.get_codebook_indices(images))
        return training.grid({"original": images, "soft": soft, "hard": hard})

    alarm = training.ReconstructionAlarm(
        remedy="a smaller --kl_loss_weight or --learning_rate", codes_remedy="a larger --kl_loss_weight"
    )
    codes_folder = f"{config.output_dir}/codes"
    autocast = backend.autocast()  # errors and sums are fp32 or fp64 nevertheless
    exports: dict[str, Any] = {"vae-final.pt": save_dalle} if has_dalle_shape(model.config) else {}
    evaluation = training.Evaluation(
        vae, ema, write={"model": models.DiscreteVAE.save_pretrained, **exports},
        validate=autocast(validate), draw=autocast(draw), watch=alarm.check,
        next_command=("encode.py", "--image_folder", data_path(config), "--output", codes_folder),
    )  # fmt: skip
    run.resume(COLUMNS, engine=vae, ema=ema)

    for step, batch in training.updates(run, evaluation, preview=config.num_images_save):
        temperature, codes = temperature_at(step), []
        vae.lr = schedules.decay(step, config.learning_rate, config.lr_decay_rate)
        for micro_batch in vae.micro_batches(batch):
            images = data.to_unit_range(micro_batch["images"])
            gumbel = noise.gumbel(step, micro_batch["positions"], model.noise_shape, device)
            out = vae(images, noise=gumbel, temperature=temperature, with_codes=run.are_codes_due)
            loss = objective(out)
            vae.backward(loss)
            codes += [] if out.codes is None else [out.codes]
            run.add(loss=loss, recon_loss=out.recon_loss, kl=out.kl)
        update = vae.step(with_norm=run.is_line_due)
        ema.update(update.skipped)
        run.log_codes(codes, model.num_codes)
        run.log(update, temperature=temperature)


def main(argv: Sequence[str] | None = None) -> None:
    start_training(train, build_parser(), argv, DEMO_CONFIG)


if __name__ == "__main__":
    main()
