"""The arguments of the public scripts and trainers, and what becomes of each here: the one table behind second names
of flags, answers to names that are no flags, and docs/coming_from.md (`scripts/coming_from.py`). Imports the standard
library only."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from .dalle2_keys import KEYS, Flag, Only

if TYPE_CHECKING:
    from .parser import ArgumentParser

NEEDED = "(needed)"  # an argument without a default
ENDLESS = 1e9  # epochs, where the number of updates ends a run


class Argument(NamedTuple):
    """An argument of a public script or trainer.

    Args:
        default: Its default there, or NEEDED.
        flag: The flag that does the same, of which its name becomes a second one; None: there is none.
        note: What differs; without a flag, what to do instead.
        value: Its default as the flag has it, if that is written in another way.
    """

    name: str
    default: Any
    flag: str | None
    note: str = ""
    value: Any = None


class Public(NamedTuple):
    """The public counterpart of a script. `batch`: what its batch size counts."""

    package: str
    trainer: str
    batch: str
    arguments: tuple[Argument, ...]


_BY_FLAGS = "flags of the model build it, see --help"
_MODEL = Argument("model", NEEDED, None, _BY_FLAGS)
_CONFIGURATION = "`convert.py config OLD.json NEW.yaml` turns such a configuration into one for --config, once"
_BACKENDS = "the launcher chooses the processes, and --distributed_backend, --precision and --num_workers the rest"
_MICRO_BATCH = "of one micro-batch of one process; --batch_size is that of an update over all of them"
_PER_PROCESS = "a micro-batch of one process"
_UPDATES = "--epochs then does not end the run, unless it is given too"
_NOTHING_IS_DELETED = "nothing is deleted: --fresh renames the folder of an earlier run"
_CLIPPING = "0: no clipping"
_NO_WAIT = "averages begin with the first update"
_EVERY = "averages are updated after every update; --ema_decay is per update"

_DALLE = Public(
    "DALLE-pytorch 1.6.6", "train_vae.py",
    "all processes with DeepSpeed, one process with Horovod",
    (
        Argument("image_folder", NEEDED, "image_folder"),
        Argument("image_size", 128, "image_size"),
        Argument("epochs", 20, "epochs"),
        Argument("batch_size", 8, "batch_size", "with Horovod that of one process; --batch_size is that of all"),
        Argument("learning_rate", 1e-3, "learning_rate"),
        Argument("lr_decay_rate", 0.98, "lr_decay_rate"),
        Argument("starting_temp", 1.0, "starting_temp"),
        Argument("temp_min", 0.5, "temp_min"),
        Argument("anneal_rate", 1e-6, "anneal_rate"),
        Argument("num_images_save", 4, "num_images_save"),
        Argument("num_tokens", 8192, "num_tokens"),
        Argument("num_layers", 3, "num_layers"),
        Argument("num_resnet_blocks", 2, "num_resnet_blocks"),
        Argument("smooth_l1_loss", False, "smooth_l1_loss"),
        Argument("emb_dim", 512, "codebook_dim"),
        Argument("hidden_dim", 256, "hidden_dim"),
        Argument("kl_loss_weight", 0.0, "kl_loss_weight",
                 "a mean here, a sum there: WEIGHT x (images of a process) x (positions of the grid) is the same"),
        Argument("transparent", False, "transparent"),
        Argument("distributed_backend", None, "distributed_backend", "dummy is single here", "auto"),
        Argument("distr_backend", None, "distributed_backend", "the same", "auto"),
        Argument("local_rank", -1, None, "the launcher passes it"),
        Argument("deepspeed", False, "deepspeed"),
        Argument("deepspeed_config", None, "deepspeed_config"),
        Argument("deepscale", False, None, "an old name: give --deepspeed"),
        Argument("deepscale_config", None, None, "an old name: give --deepspeed_config"),
        Argument("deepspeed_mpi", False, None, "start the processes by mpirun, which is found out"),
    ),
)  # fmt: skip

_MUSE = Public(
    "muse-maskgit-pytorch 0.3.5", "VQGanVAETrainer", _PER_PROCESS,
    (
        Argument("vae", NEEDED, None, _BY_FLAGS),
        Argument("folder", NEEDED, "image_folder"),
        Argument("num_train_steps", NEEDED, "max_steps", _UPDATES),
        Argument("batch_size", NEEDED, "batch_size", _MICRO_BATCH),
        Argument("image_size", NEEDED, "image_size"),
        Argument("lr", 3e-4, "learning_rate"),
        Argument("grad_accum_every", 1, "grad_accum_steps", "does not multiply the batch"),
        Argument("max_grad_norm", None, "max_grad_norm", _CLIPPING, 0.0),
        Argument("discr_max_grad_norm", None, "discr_max_grad_norm", "not given: as --max_grad_norm"),
        Argument("save_results_every", 100, "sample_every_n_steps", "its pictures; --validate_every_n_steps measures"),
        Argument("save_model_every", 1000, "save_every_n_steps"),
        Argument("results_folder", "./results", "output_dir"),
        Argument("valid_frac", 0.05, "valid_fraction"),
        Argument("random_split_seed", 42, "split_seed", "not given: --seed"),
        Argument("use_ema", True, None, "--ema_decay above 0 keeps an average, 0 none"),
        Argument("ema_beta", 0.995, "ema_decay", "had no effect there, where 0.9999 ran"),
        Argument("ema_update_after_step", 0, None, _NO_WAIT),
        Argument("ema_update_every", 1, None, _EVERY),
        Argument("apply_grad_penalty_every", 4, "apply_grad_penalty_every",
                 "had no effect there, where the penalty came in every update"),
        Argument("accelerate_kwargs", {}, None, _BACKENDS),
    ),
)  # fmt: skip

_MUSICLM = Public(
    "musiclm-pytorch 0.2.8", "MuLaNTrainer", _PER_PROCESS,
    (
        Argument("mulan", NEEDED, None, f"{_BY_FLAGS}; --layout musiclm makes that of the package"),
        Argument("dataset", NEEDED, "dataset", "names a function that makes it; for files, --audio_data"),
        Argument("num_train_steps", None, "max_steps", f"{_UPDATES}; without it, as many updates as samples"),
        Argument("batch_size", NEEDED, "batch_size", f"{_MICRO_BATCH}, and every pair is compared with all of them"),
        Argument("data_max_length", None, "data_max_length"),
        Argument("folder", None, "audio_data", "had no effect there"),
        Argument("lr", 3e-4, "learning_rate"),
        Argument("grad_accum_every", 1, "grad_accum_steps", "does not multiply the batch"),
        Argument("betas", (0.9, 0.99), "betas", "written 0.9,0.99"),
        Argument("max_grad_norm", 0.5, "max_grad_norm"),
        Argument("valid_frac", 0.05, "valid_fraction"),
        Argument("random_split_seed", 42, "split_seed"),
        Argument("save_model_every", 1000, "save_every_n_steps"),
        Argument("results_folder", "./results", "output_dir"),
        Argument("accelerate_kwargs", {}, None, _BACKENDS),
        Argument("use_lion", False, "use_lion"),
        Argument("force_clear_prev_results", None, None, _NOTHING_IS_DELETED),
        Argument("sigmoid_contrastive_loss", False, None, "of the model: --loss sigmoid"),
        Argument("decoupled_contrastive_learning", True, None, "of the model: --loss decoupled, or --loss softmax"),
        Argument("hierarchical_contrastive_loss", False, None, "of the model: --hierarchical_layers, a number"),
        Argument("mulan.hierarchical_contrastive_loss_layers", None, "hierarchical_layers",
                 "theirs are --hierarchical_spacing even; not given there: one less than the smaller depth", 0),
        Argument("transformer.attn_dropout", 0.0, "attn_dropout"),
        Argument("transformer.ff_dropout", 0.0, "ff_dropout"),
        Argument("transformer.ff_mult", 4, "ff_mult"),
        Argument("audio_transformer.patch_dropout_prob", 0.25, "patch_dropout"),
        Argument("audio_transformer.spec_n_fft", None, "n_fft", "128 there, of --spectrogram power"),
        Argument("audio_transformer.spec_win_length", None, "win_length", "24 there"),
        Argument("audio_transformer.spec_hop_length", None, "hop_length", "half of spec_win_length there"),
        Argument("audio_transformer.spec_pad_mode", None, "spectrogram_padding", "reflect there"),
    ),
)  # fmt: skip

_MAGVIT = Public(
    "magvit2-pytorch 0.5.1", "VideoTokenizerTrainer", _PER_PROCESS,
    (
        _MODEL,
        Argument("batch_size", NEEDED, "batch_size", _MICRO_BATCH),
        Argument("num_train_steps", NEEDED, "max_steps", _UPDATES),
        Argument("learning_rate", 1e-5, "learning_rate", "there, warm-up divides it by warmup_steps for ever"),
        Argument("grad_accum_every", 1, "grad_accum_steps", "does not multiply the batch"),
        Argument("apply_gradient_penalty_every", 4, "apply_grad_penalty_every"),
        Argument("max_grad_norm", None, "max_grad_norm", _CLIPPING, 0.0),
        Argument("dataset", None, "dataset", "names a function that makes it; for files, --video_folder"),
        Argument("dataset_folder", None, "video_folder", "images among its files are clips of one frame"),
        Argument("dataset_type", "videos", None, "--video_folder takes both; --image_folder adds images"),
        Argument("checkpoints_folder", "./checkpoints", "output_dir", "one folder for everything"),
        Argument("results_folder", "./results", "output_dir", "one folder for everything"),
        Argument("random_split_seed", 42, "split_seed"),
        Argument("valid_frac", 0.05, "valid_fraction"),
        Argument("validate_every_step", 100, "validate_every_n_steps"),
        Argument("checkpoint_every_step", 100, "save_every_n_steps"),
        Argument("num_frames", 17, "num_frames"),
        Argument("use_wandb_tracking", False, None, "--report_to wandb"),
        Argument("project_name", NEEDED, "wandb_project", "of its method trackers; with --report_to wandb"),
        Argument("run_name", None, "wandb_name", "of its method trackers; with --report_to wandb"),
        Argument("discr_start_after_step", 0.0, "discr_start_step"),
        Argument("warmup_steps", 1000, "lr_warmup_steps"),
        Argument("scheduler", None, None, "--lr_cosine, or a constant rate"),
        Argument("scheduler_kwargs", {}, None, "--lr_cosine, or a constant rate"),
        Argument("accelerate_kwargs", {}, None, _BACKENDS),
        Argument("ema_kwargs", {}, None, "--ema_decay, or --ema_power; theirs averages at every tenth update"),
        Argument("optimizer_kwargs", {}, None, "--betas, --weight_decay, --use_lion"),
        Argument("dataset_kwargs", {}, None, "--random_flip, --fps, --frame_stride, --short_clips"),
    ),
)  # fmt: skip


def _keys() -> Iterator[Argument]:
    """The keys of a training configuration, most of which are arguments of its trainer or decoder too."""
    for key, rule in KEYS.items():
        section, _, name = key.rpartition(".")
        if section not in ("decoder", "data", "train", "evaluate", "tracker", "tracker.log"):
            continue
        if name in _READ:
            yield Argument(key, *_READ[name])
        elif isinstance(rule, Flag):
            yield Argument(key, rule.usual, rule.name)
        elif isinstance(rule, Only) and {True, False} <= {*rule.values}:
            yield Argument(key, None, None, "leave it out: it changes nothing that is trained")
        elif isinstance(rule, Only):
            yield Argument(key, rule.values[0] if rule.values else None, None, rule.instead)
        else:
            yield Argument(key, None, None, "convert.py config reads it")


# Keys that need more than another name, or have another default there: that, and the flag or the answer.
_READ: Mapping[str, tuple[Any, str | None, str]] = {
    "image_size": (None, "image_sizes", ""), "image_sizes": (None, "image_sizes", ""),
    "timesteps": (1000, "timesteps", ""),
    "sample_timesteps": (None, "sample_timesteps", "not given there: all levels, by --sampler ddpm"),
    "beta_schedule": (None, "noise_schedule", "not given there: cosine, and linear for the last of several Unets"),
    "learned_variance": (True, None, "--learned_variance 1; there, of the first Unet alone"),
    "predict_x_start": (False, None, "--objective x_start"), "predict_v": (False, None, "--objective v"),
    "use_dynamic_thres": (False, "dynamic_thresholding", "a quantile such as 0.95; 0: none"),
    "dynamic_thres_percentile": (0.95, "dynamic_thresholding", "0: none"),
    "p2_loss_weight_gamma": (0.0, "p2_loss_weight_gamma", "with --loss_weight p2"),
    "random_crop_sizes": (None, "random_crop_sizes", ""),
    "clip": (None, "clip", "a name of open_clip; with --clip_weights"),
    "end_shard": (9999999, "end_shard", ""),
    "save_every_n_samples": (100000, None, "--save_every_n_steps, in updates"),
    "epoch_samples": (None, None, "--max_steps and --validate_every_n_steps, in updates"),
    "use_ema": (True, None, "--ema_decay above 0 keeps an average, 0 none"),
    "ema_beta": (0.999, None, "--ema_decay, its tenth root, because theirs averages at every tenth update"),
    "unet_training_mask": (None, None, "--train_unets with the numbers of the Unets to train"),
    "max_grad_norm": (0.5, "max_grad_norm", ""),
    "n_evaluation_samples": (1000, "n_evaluation_samples", "without measures there are none there"),
    "warmup_steps": (None, "lr_warmup_steps", "0: none"), "validation_samples": (None, "valid_samples", "0: all"),
    "log_type": ("console", None, "--report_to wandb"),
}  # fmt: skip

_DALLE2 = Public(
    "DALLE2-pytorch 1.15.6", "DecoderTrainer", _PER_PROCESS,
    (
        Argument("config_file", "./train_decoder_config.json", None, _CONFIGURATION),
        Argument("decoder", NEEDED, None, f"{_BY_FLAGS}; {_CONFIGURATION}"),
        Argument("accelerator", None, None, _BACKENDS),
        Argument("dataloaders", None, None, "--image_folder, --image_embeddings and --text_embeddings"),
        Argument("use_ema", True, None, _READ["use_ema"][2]),
        Argument("lr", 1e-4, "learning_rate", "", [1e-4]),
        Argument("wd", 1e-2, "weight_decay", "", [0.01]),
        Argument("eps", 1e-8, None, "leave it out: it is 1e-8"),
        Argument("warmup_steps", None, "lr_warmup_steps", "0: none", [0]),
        Argument("cosine_decay_max_steps", None, None, "--lr_cosine, which ends with the run"),
        Argument("max_grad_norm", 0.5, "max_grad_norm"),
        Argument("amp", False, None, "--precision bf16"),
        Argument("group_wd_params", True, None, "leave it out: biases and scales never decay"),
        *_keys(),
    ),
)  # fmt: skip

#: By the name of the script, without its ending.
PUBLIC: Mapping[str, Public] = {
    "train_vae": _DALLE, "train_vqgan": _MUSE, "train_mulan": _MUSICLM, "train_tokenizer": _MAGVIT,
    "train_decoder": _DALLE2,
}  # fmt: skip


def add_public_names(parser: ArgumentParser, script: str) -> None:
    """Give flags the second names that the public counterpart of `script` has for them, and the parser its answers to
    names that are no flags. Call it when the parser has all its flags."""
    public = PUBLIC[script]
    for argument in public.arguments:
        name = argument.name.rpartition(".")[2]
        if argument.flag is None:
            parser.answers.setdefault(f"--{name}", f"{public.package} has it: {argument.note}")
        elif f"--{name}" not in parser._option_string_actions:
            parser.add_name(f"--{argument.flag}", f"--{name}")
    parser.add_consequence(follow_public_names)


def follow_public_names(args: argparse.Namespace) -> None:
    """What a public name means beside its flag: num_train_steps alone ends a run, and epochs do not."""
    if args.said_as.get("max_steps") == "num_train_steps" and "epochs" not in args.explicit:
        args.epochs = ENDLESS


def batch_arithmetic(args: argparse.Namespace, world_size: int) -> str | None:
    """What a run trains on that is given a public name of gradient accumulation, in one line; None for others."""
    public = PUBLIC.get(args.script.removesuffix(".py"))
    name = args.said_as.get("grad_accum_steps", "grad_accum_steps")
    if public is None or name == "grad_accum_steps":
        return None
    batch, steps = args.batch_size, args.grad_accum_steps
    processes = f"{world_size} process{'es' if world_size > 1 else ''}"
    return (
        f"--{name} {steps}: an update trains on {batch} samples in all, over {processes} and {steps} micro-batches; "
        f"--batch_size {batch} of {public.package} is that of {public.batch}, for which --batch_size is {batch} x "
        f"{steps} x {world_size} = {batch * steps * world_size} here"
    )
