"""Flags that several scripts have. Standard library only, so that `--help` answers at once."""

import argparse
from collections.abc import Mapping

from .converters import (
    fraction,
    names_of,
    non_negative_float,
    non_negative_int,
    number_or,
    positive_float,
    positive_int,
    whole_numbers,
)


def add_image_arguments(parser: argparse.ArgumentParser, *, image_size: int, image_size_help: str) -> None:
    """Add the flags of every script that trains on images."""
    # fmt: off
    add = parser.add_argument_group("images").add_argument
    add("--image_folder", metavar="DIR", default="demo:shapes",
        help="folder of jpg, png, webp, bmp, nested as you like; demo:shapes draws its own")
    add("--image_size", type=positive_int, default=image_size, metavar="PIXELS", help=image_size_help)
    add("--random_flip", action="store_true", help="mirror half of the training images")
    add("--num_images_save", type=positive_int, default=4, metavar="N",
        help="images in a sample grid; without a validation split at most a batch")
    # fmt: on


def add_sound_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every script that trains on sounds and texts."""
    # fmt: off
    add = parser.add_argument_group("sounds and texts").add_argument
    add("--audio_data", metavar="PATH", default="demo:tones",
        help="csv or jsonl manifest, folder with a .txt or .json per sound, webdataset tars; demo:tones makes its own")
    add("--sample_rate", type=positive_int, default=16000, metavar="HZ", help="to which sounds are resampled")
    add("--clip_seconds", type=positive_float, default=10.0, metavar="SECONDS",
        help="of a sound that are heard at a time: anywhere in training, the middle in validation")
    add("--data_max_length", type=positive_int, metavar="SAMPLES", help="the same, counted in samples")
    add("--tokenizer", default="clip", metavar="FILE", help="clip, or a Hugging Face tokenizer.json")
    add("--max_text_tokens", type=positive_int, default=256, metavar="TOKENS", help="longer texts are cut off")
    add("--split_seed", type=non_negative_int, default=42, metavar="INT", help="of the validation split")
    add("--num_sounds_shown", type=positive_int, default=8, metavar="N", help="sounds in a picture of spectrograms")

    add = parser.add_argument_group("spectrogram").add_argument
    add("--spectrogram", type=str.lower, choices=("log_mel", "power"), default="log_mel", help="what the model hears")
    add("--n_fft", type=positive_int, default=1024, metavar="SAMPLES", help="window of the Fourier transform")
    add("--hop_length", type=positive_int, default=160, metavar="SAMPLES", help="between two windows")
    add("--n_mels", type=positive_int, default=64, metavar="BANDS", help="mel bands")
    add("--fmin", type=non_negative_float, default=0.0, metavar="HZ", help="the lowest frequency")
    add("--fmax", type=positive_float, metavar="HZ", help="the highest (default: half of --sample_rate)")
    add("--time_mask_fraction", type=fraction, default=0.2, metavar="FRACTION",
        help="SpecAugment: hide up to this part of the time")
    add("--frequency_mask_fraction", type=fraction, default=0.25, metavar="FRACTION", help="and of the frequencies")
    # fmt: on


def add_quantizer_arguments(parser: argparse.ArgumentParser, *, codebook_size: int) -> None:
    """Add the flags of every script whose model has a quantizer."""
    # fmt: off
    add = parser.add_argument_group("quantizer").add_argument
    add("--quantizer", type=str.lower, choices=("lfq", "vq", "fsq", "bsq", "ibq"), default="lfq",
        help="lookup-free, vector (EMA codebook), finite scalar, binary spherical, index backpropagation")
    add("--codebook_size", type=positive_int, default=codebook_size, metavar="CODES",
        help="a power of two for lfq and bsq")
    add("--codebook_dim", type=positive_int, default=32, metavar="DIM", help="width of a codebook entry (vq, ibq)")
    add("--vq_decay", type=fraction, default=0.8, metavar="DECAY",
        help="decay of the moving averages that are the codebook (vq)")
    add("--vq_cosine", action="store_true",
        help="take the codebook entry at the smallest angle instead of distance (vq)")
    add("--fsq_levels", type=whole_numbers, metavar="N,N...",
        help="levels per dimension, instead of those that make --codebook_size (fsq)")
    add("--commitment_loss_weight", type=non_negative_float, default=0.25, metavar="WEIGHT",
        help="weight of the loss that keeps the encoder near its codes")
    add("--entropy_loss_weight", type=non_negative_float, default=0.1, metavar="WEIGHT",
        help="weight of H(code of a position) - gamma H(code over the batch) in nats (lfq, bsq, ibq)")
    add("--diversity_gamma", type=non_negative_float, default=1.0, metavar="GAMMA",
        help="gamma in the formula of --entropy_loss_weight")
    add("--inv_temperature", type=positive_float, default=100.0, metavar="X",
        help="inverse temperature of the soft codes in the entropy loss (lfq, bsq)")
    add("--entropy_anneal_factor", type=positive_float, default=1.0, metavar="FACTOR",
        help="at the start, the entropy loss counts this many times --entropy_loss_weight")
    add("--entropy_anneal_steps", type=non_negative_int, default=0, metavar="UPDATES",
        help="updates over which that factor falls to 1")
    # fmt: on


def add_adversary_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every script that trains against a discriminator (`training.objectives.adversaries`)."""
    # fmt: off
    add = parser.add_argument_group("perceptual loss").add_argument
    add("--perceptual", type=str.lower, choices=("none", "vgg", "lpips"), default="none",
        help="perceptual loss: VGG16 features or LPIPS; both need weights")
    add("--perceptual_weights", metavar="FILE", help="its weights, where torch.hub's cache does not hold them")
    add("--perceptual_loss_weight", type=non_negative_float, default=1.0, metavar="WEIGHT", help="of that loss")

    add = parser.add_argument_group("adversary").add_argument
    add("--discr_dim", type=positive_int, metavar="DIM", help="channels of the discriminator (default: --dim)")
    add("--discr_layers", type=positive_int, default=4, metavar="N", help="its halvings; it needs 4 x 2^N pixels")
    add("--discr_start_step", type=non_negative_int, default=0, metavar="UPDATES", help="it takes part from then on")
    add("--discr_learning_rate", type=positive_float, metavar="LR", help="(default: --learning_rate)")
    add("--discr_max_grad_norm", type=non_negative_float, metavar="NORM", help="(default: --max_grad_norm)")
    add("--gan_loss", type=str.lower, choices=("hinge", "bce"), default="hinge",
        help="of both models")
    add("--gan_weight", type=number_or("adaptive"), default="adaptive", metavar="WEIGHT",
        help="of the adversarial loss: a number, or adaptive, as strong as the reconstruction at the last layer")
    add("--gan_weight_scale", type=non_negative_float, default=1.0, metavar="FACTOR", help="times that weight")
    add("--penalty_weight", type=non_negative_float, default=10.0, metavar="WEIGHT", help="of the gradient penalty")
    add("--apply_grad_penalty_every", type=positive_int, default=4, metavar="UPDATES",
        help="how often that penalty is computed")
    add("--lecam_weight", type=non_negative_float, default=0.0, metavar="WEIGHT", help="of the LeCam regulariser")
    add("--lecam_decay", type=fraction, default=0.999, metavar="DECAY", help="of its averages")
    # fmt: on


def add_run_arguments(
    parser: argparse.ArgumentParser,
    *,
    output_dir: str,
    epochs: float = 20,
    batch_size: int = 8,
    max_grad_norm: float = 0.0,
    precision: str = "fp32",
    num_workers: int = 2,
    ema_decay: float = 0.0,
    valid_fraction: float = 0.05,
    validate_every_n_steps: int = 100,
    sample_every_n_steps: int = 100,
    save_every_n_steps: int = 100,
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Add the flags that every script has. The parameters are the script's own defaults; `aliases` gives flags a second
    name, that of the public script: {"max_steps": "num_train_steps"}."""

    def names(flag: str) -> list[str]:
        return [f"--{flag}", *(f"--{alias}" for name, alias in (aliases or {}).items() if name == flag)]

    # fmt: off
    add = parser.add_argument_group("run").add_argument
    add("--output_dir", default=output_dir, metavar="DIR", help="run folder; a run that it holds is resumed")
    add("--config", metavar="FILE", help="YAML file of flags without dashes; the command line wins")
    add("--fresh", action="store_true", help="start over; a run that output_dir holds is moved to DIR.old-N")
    add("--seed", type=non_negative_int, default=0, metavar="INT", help="of weights, data order, noise and split")
    add("--epochs", type=positive_float, default=epochs, metavar="EPOCHS", help="passes over the training data")
    add(*names("max_steps"), type=positive_int, metavar="UPDATES",
        help="stop after so many updates if epochs last longer")

    add = parser.add_argument_group("optimisation").add_argument
    add("--batch_size", type=positive_int, default=batch_size, metavar="SAMPLES",
        help="samples per update, over all processes and accumulation steps")
    add(*names("grad_accum_steps"), type=positive_int, default=1, metavar="N",
        help="micro-batches per update and process")
    add("--max_grad_norm", type=non_negative_float, default=max_grad_norm, metavar="NORM",
        help="clip the gradient to this 2-norm; 0: no clipping")
    add("--ema_decay", type=fraction, default=ema_decay, metavar="DECAY",
        help="of the exponential moving average of the weights, per update; 0: no average")
    add("--max_skipped_updates", type=non_negative_int, default=20, metavar="UPDATES",
        help="stop after so many non-finite updates in a row")

    add = parser.add_argument_group("precision").add_argument
    add("--precision", type=str.lower, choices=("fp32", "bf16", "fp16"), default=precision,
        help="of the forward and backward pass; weights and moments stay fp32")
    add("--compile", action="store_true", help="compile the model with torch.compile")

    add = parser.add_argument_group("data loading").add_argument
    add("--num_workers", type=non_negative_int, default=num_workers, metavar="N",
        help="loader processes per training process; 0: load in the training process")
    add(*names("valid_fraction"), type=fraction, default=valid_fraction, metavar="FRACTION",
        help="of the data, held out by seed for validation; 0: none")
    add("--on_bad_sample", type=str.lower, choices=("replace", "error"), default="replace",
        help="where a file cannot be read: take the next in the order, or stop")

    add = parser.add_argument_group("validation and logging").add_argument
    add("--log_every_n_steps", type=positive_int, default=10, metavar="UPDATES", help="write a line of metrics.jsonl")
    add("--validate_every_n_steps", type=non_negative_int, default=validate_every_n_steps, metavar="UPDATES",
        help="measure on the validation split; 0: only at the end")
    add("--sample_every_n_steps", type=non_negative_int, default=sample_every_n_steps, metavar="UPDATES",
        help="write a picture to samples/; 0: only at the end")
    add("--report_to", type=names_of("tensorboard", "wandb"), default="none", metavar="NAMES",
        help="trackers beside metrics.jsonl: none, or a comma list of tensorboard, wandb")

    add = parser.add_argument_group("checkpoints").add_argument
    add(*names("save_every_n_steps"), type=non_negative_int, default=save_every_n_steps, metavar="UPDATES",
        help="write a checkpoint; 0: only at the end")
    add("--keep_n_checkpoints", type=positive_int, default=3, metavar="N", help="the newest; older ones are deleted")
    add("--save_before_minutes", type=positive_float, metavar="MINUTES",
        help="save and exit with code 75 before the process is this old: for a scheduler's wall-time limit")
    # fmt: on
