"""Flags of several scripts. Imports no PyTorch, so that `--help` is fast."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tandem.schedules import SHAPES

from .converters import (
    FILE,
    FOLDER,
    NAME,
    NAME_OR_PATH,
    PATH,
    PRECISIONS,
    Names,
    average_length,
    epoch_count,
    fraction,
    non_negative_float,
    non_negative_int,
    positive_float,
    positive_int,
    size,
    step_count,
    step_count_or_0,
    step_range,
    two_fractions,
    words,
    worker_count,
)
from .fields import Invocation, Requirement, flag, given, when

if TYPE_CHECKING:
    from tandem.distributed import ProcessGroup

    from .parser import ArgumentParser


#: The requirement of flags for the validation.
VALIDATION = Requirement(
    "valid_fraction", "above 0", lambda args: args.valid_fraction > 0 or args.valid_folder is not None
)


def validation_for(flag: str) -> Requirement:
    """The validation that a number of samples needs if it is above 0."""
    return VALIDATION._replace(is_met=lambda args: not getattr(args, flag) or VALIDATION.is_met(args))


def bad_sample_flag(requirement: Requirement) -> Any:
    """--on_bad_sample of a script that uses trained weights."""
    text = "leave out files that cannot be read, or stop at the first"
    return flag("skip", text, choices=("skip", "error"), requires=requirement)


@dataclass
class ClipFlags:
    """Flags of every script that computes embeddings by a CLIP."""

    clip: str | None = flag(
        None,
        "compute embeddings of images and texts with this model of open_clip, such as ViT-L-14-quickgelu, or the path "
        "of its open_clip_config.json; captions that are longer than its context are cut off",
        NAME_OR_PATH,
        title="embeddings",
        requires=Requirement(
            "condition_on",
            "image or text, or give --n_evaluation_samples",
            lambda args: bool(args.condition_on or args.n_evaluation_samples),
        ),
    )
    clip_weights: str | None = flag(
        None,
        "weights for --clip: a file (safetensors or a plain state dict), or open_clip's name of published ones, such "
        "as laion2b_s32b_b82k, which are fetched once (default: openai)",
        FILE,
        requires=given("clip", "NAME"),
    )


# In a config file, `lr_cosine: true` means cosine, and `lr_cosine: false` constant.
_SWITCHED = {**dict.fromkeys(("true", "yes", "on"), "cosine"), **dict.fromkeys(("false", "no", "off"), "constant")}


def _parse_shape(text: str) -> str:
    """The shape of the learning rate in a flag's text, which may be a YAML boolean."""
    return _SWITCHED.get(text.lower(), text.lower())


@dataclass
class ScheduleFlags:
    """Flags of every script whose learning rate may have one of several shapes."""

    lr_schedule: str = flag(
        "constant",
        "learning rate after the warm-up: constant, or falling along a cosine to 0, in train_vqgan.py to a tenth; "
        "--lr_cosine without a value means cosine",
        _parse_shape,
        choices=tuple(SHAPES),
        aliases="lr_cosine",
        nargs="?",
        const="cosine",
        title="schedule",
    )


@dataclass
class RateFlags(ScheduleFlags):
    """Flags of every script with one learning rate that is warmed up (`tandem.schedules`)."""

    learning_rate: float = flag(0.0003, "highest learning rate", positive_float, title="schedule", aliases="lr")
    lr_warmup_steps: int = flag(
        0, "updates of linear warm-up from 0, at most half of the run", step_count_or_0, aliases="warmup_steps"
    )


@dataclass
class OptimizerFlags:
    """Flags of every script that trains by AdamW or Lion (`make_optimizer`)."""

    betas: tuple[float, float] = flag((0.9, 0.99), "betas of the optimizer", two_fractions, title="optimizer")
    use_lion: bool = flag(False, "use Lion instead of AdamW", fixed_on_resume=bool)


@dataclass
class DecayingOptimizerFlags(RateFlags, OptimizerFlags):
    """`OptimizerFlags` with one learning rate and one weight decay."""

    weight_decay: float = flag(
        0.01, "weight decay of matrices; biases and scales do not decay", non_negative_float, title="optimizer"
    )


def start_flag(sources: str, convert: Any = FOLDER, **options: Any) -> Any:
    """The flag --init_from. `sources`: what a run can start from, in words."""
    return flag(None, f"{sources}, whose architecture is taken where no flag sets another", convert, **options)


ENDLESS = 1e9  # epochs, where the number of updates ends a run
TRACKERS = ("tensorboard", "wandb")
_WANDB = when("report_to", "wandb")


@dataclass
class RunFlags:
    """Flags of every training script."""

    invocation: Invocation = field(default_factory=Invocation)  # no flag: how the script was called
    output_dir: str = flag(
        "runs/",
        "run folder; a run that is in it already is resumed",
        FOLDER,
        title="run",
        aliases=("results_folder", "checkpoints_folder"),
    )
    config: str | None = flag(None, "YAML file of flags without dashes; flags on the command line override it", FILE)
    fresh: bool = flag(False, "start over; a run in --output_dir is renamed to DIR.old-N")
    dry_run: bool = flag(
        False,
        "make three updates, a validation, a picture and a checkpoint in a temporary folder, print the time and memory "
        "that they and the whole run take, and delete the folder",
    )
    seed: int = flag(0, "seed of the initial weights, the data order and the noise", non_negative_int)
    epochs: float = flag(
        20,
        "passes over the training data; the run ends with them or with --max_steps, whichever comes first, and says at "
        "the start which",
        epoch_count,
    )
    max_steps: int | None = flag(
        None,
        "updates after which the run ends, if --epochs does not end it before; given as --num_train_steps, and without "
        "--epochs, this number alone ends it",
        step_count,
        aliases="num_train_steps",
    )
    max_minutes: float | None = flag(
        None,
        "end the run, with a last validation, picture and model, when it has taken this long over all its starts, if "
        "--epochs and --max_steps have not ended it; the schedule of the learning rate still follows those two",
        positive_float,
        metavar="MINUTES",
    )
    batch_size: int = flag(
        8, "samples per update, over all processes and micro-batches", size, metavar="SAMPLES", title="optimisation"
    )
    grad_accum_steps: int = flag(
        1, "gradient accumulation: micro-batches per update, on each process", size, aliases="grad_accum_every"
    )
    max_grad_norm: float = flag(0.0, "clip the gradient to this 2-norm; 0: no clipping", non_negative_float)
    ema_decay: float = flag(0.0, "decay per update of a moving average of the weights; 0: no average", fraction)
    ema_power: list[float] | None = flag(
        None,
        "power-function averages of the weights (Karras et al. 2024) instead of --ema_decay: the relative width sigma "
        "of each, such as 0.05 0.10; the model of the run is the first one, and every save by --save_every_n_steps "
        "writes all to snapshots/, from which convert.py average makes other widths (default: none)",
        average_length,
        nargs="+",
    )
    max_skipped_updates: int = flag(
        20,
        "end the run after so many skipped updates in a row; an update is skipped if loss or gradient is not finite",
        step_count_or_0,
    )
    precision: str = flag(
        "fp32",
        "precision of the forward and backward pass, validation and pictures; weights and optimizer moments "
        "stay fp32; tf32: fp32, but GPUs may round the factors of products to 10 bits of the mantissa, which is faster "
        "there; with bf16 and fp16, GPUs compute the convolutions of gradient penalties in tf32",
        choices=PRECISIONS,
        title="precision",
    )
    compile: bool = flag(False, "compile the model with torch.compile")
    num_workers: int = flag(
        2, "loader processes per training process; 0: load in the training process", worker_count, title="data loading"
    )
    valid_fraction: float = flag(
        0.05, "fraction of the data held out for validation; 0: none", fraction, aliases="valid_frac"
    )
    valid_folder: str | None = flag(
        None, "data of the same kind that are all used for validation, instead of --valid_fraction", PATH
    )
    split_seed: int | None = flag(
        None,
        "seed that chooses the validation split; default for images: --seed",
        non_negative_int,
        aliases="random_split_seed",
    )
    valid_samples: int | None = flag(
        None,
        "samples of the validation split in each validation, always the same ones and at least a batch; 0: the whole "
        "split, which is also measured at the end of the run (default: a tenth of the samples that are trained on "
        "between two validations)",
        non_negative_int,
        metavar="SAMPLES",
        aliases="validation_samples",
        requires=validation_for("valid_samples"),
    )
    on_bad_sample: str = flag(
        "replace",
        "what to do about a file that cannot be read: replace it by the next sample, or stop with an error; accept: "
        "take what Pillow can read of an image that is cut off, and replace all others",
        choices=("replace", "accept", "error"),
    )
    log_every_n_steps: int = flag(
        10,
        "updates between two lines of metrics.jsonl; losses in a line are of its own update, not means",
        step_count,
        title="validation and logging",
    )
    validate_every_n_steps: int = flag(
        100, "updates between two validations; 0: only at the end", step_count_or_0, aliases="validate_every_step"
    )
    sample_every_n_steps: int = flag(
        100,
        "updates between two pictures in samples/; 0: only at the end",
        step_count_or_0,
        aliases="save_results_every",
    )
    profile_steps: tuple[int, int] | None = flag(
        None,
        "record these updates, counted from 1, with torch.profiler, and write a trace and a table to profile/ in the "
        "run folder",
        step_range,
    )
    report_to: tuple[str, ...] = flag(
        (), f"trackers beside metrics.jsonl: none, or a comma list of {', '.join(TRACKERS)}", Names(*TRACKERS)
    )
    wandb_project: str | None = flag(
        None, "project on Weights & Biases (default: wandb's default)", NAME, requires=_WANDB, aliases="project_name"
    )
    wandb_entity: str | None = flag(None, "user or team of the project (default: wandb's login)", NAME, requires=_WANDB)
    wandb_name: str | None = flag(
        None,
        "name of the run on Weights & Biases (default: that of its folder)",
        NAME,
        requires=_WANDB,
        aliases=("run_name", "wandb_run_name"),
    )
    wandb_tags: tuple[str, ...] | None = flag(None, "tags of the run on Weights & Biases", words, requires=_WANDB)
    save_every_n_steps: int = flag(
        100,
        "updates between two checkpoints; 0: only at the end",
        step_count_or_0,
        title="checkpoints",
        aliases=("save_model_every", "checkpoint_every_step"),
    )
    save_every_minutes: float = flag(
        20.0,
        "also save when the newest checkpoint is older than this; 0: never (the default if --save_every_n_steps is 0)",
        non_negative_float,
        metavar="MINUTES",
    )
    keep_n_checkpoints: int = flag(3, "keep this number of newest checkpoints and delete older ones", positive_int)
    save_before_minutes: float | None = flag(
        None,
        "save and exit with code 75 before this process has run so long, for the time limit of a scheduler",
        positive_float,
        metavar="MINUTES",
    )

    @classmethod
    def validate(cls, args: argparse.Namespace, parser: ArgumentParser) -> None:
        if args.aliases.get("max_steps") == "num_train_steps" and "epochs" not in args.explicit:
            args.epochs = ENDLESS
        if not args.save_every_n_steps and "save_every_minutes" not in args.explicit:
            args.save_every_minutes = 0.0
        parser.choose_one(args, ema_power=None, ema_decay=0.0)
        parser.choose_one(args, valid_folder=None, valid_fraction=0.0)


def kernel_settings(args: argparse.Namespace, processes: ProcessGroup) -> dict[str, Any]:
    """Settings that decide which kernels run, and therefore change the last bits of a result."""
    device = processes.device.type
    threads = args.cpu_threads if device == "cpu" else None
    return {"precision": args.precision, "deterministic": args.deterministic, "device": device, "cpu_threads": threads}
