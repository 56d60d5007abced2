"""Inspect trained weights, convert them between formats, and push them to the Hugging Face Hub.

    python convert.py inspect PATH
    python convert.py export PATH --to model DIR
    python convert.py export PATH --to dalle FILE.pt
    python convert.py export PATH --to muse FILE.pt
    python convert.py export PATH --to dalle2 FILE.pth
    python convert.py export PATH --to musiclm FILE.pt
    python convert.py export PATH --to diffusers DIR
    python convert.py export PATH --to taming FILE.ckpt
    python convert.py export PATH --to llamagen FILE.pt
    python convert.py config OLD NEW.yaml
    python convert.py average RUN --ema_length 0.07 DIR
    python convert.py push RUN USER/NAME

PATH is a run folder of any script (its newest checkpoint is read), a checkpoint, a model folder, a file or a folder of
a public package, or USER/NAME of a model on the Hugging Face Hub. No code in it is run. OLD is a training configuration
of DALLE2-pytorch, taming-transformers or latent diffusion.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tandem.commands import script_parser
from tandem.config.converters import FOLDER, PATH, average_length, positive_int
from tandem.config.parser import ArgumentParser
from tandem.io.exits import Failed, exit_codes
from tandem.io.installed import command_of
from tandem.io.reading import READ_ERRORS, counted, one_line, printable
from tandem.io.writing import write_atomically
from tandem.weights.load import load_discriminator, load_model, resolve, write_model
from tandem.weights.push import push

# The largest error of the profile of a combined average, as a fraction of the profile's norm.
LARGEST_PROFILE_ERROR = 0.2

# Importing PyTorch takes seconds, so functions import it, and models, only after the arguments have been checked.


def build_parser() -> ArgumentParser:
    parser = ArgumentParser("convert.py", "Inspect trained weights, and convert them between formats.")
    parser.usage = None  # None makes argparse generate the usage line
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(
        run: Callable[[argparse.Namespace], None], name: str, text: str,
        path: tuple[str, str] = ("PATH", "run folder, checkpoint, model folder, public file or USER/NAME of the Hub"),
        out: tuple[str, str] | None = None,
    ) -> Callable[..., Any]:  # fmt: skip
        subparser = commands.add_parser(name, description=text, help=text)
        subparser.usage = None
        subparser.set_defaults(run=run)
        subparser.add_argument("path", type=PATH, metavar=path[0], help=path[1])
        if out:
            subparser.add_argument("out", type=PATH, metavar=out[0], help=out[1])
            subparser.add_argument("--force", action="store_true", help=f"replace {out[0]} where it exists")
        return subparser.add_argument

    # fmt: off
    weights: dict[str, Any] = {
        "choices": ("best", "ema", "online"), "default": "best",
        "help": "weights of a checkpoint: their moving average (ema), as trained (online), or ema if it exists (best)"}
    add = command(inspect, "inspect", "Describe the contents of PATH without loading its weights.")
    add("--json", action="store_true", help="print JSON")
    add("--no_checksums", action="store_true", help="do not verify a checkpoint's checksums: that reads all of it")

    add = command(export, "export", "Write a model folder or a public package's file.",
                  out=("OUT", "folder or file to write"))
    add("--to", required=True,
        choices=("model", "dalle", "muse", "dalle2", "musiclm", "diffusers", "taming", "llamagen", "wan"),
        help="a folder of model.safetensors and config.json, DALLE-pytorch's vae-final.pt, a VQGanVAE of "
        "muse-maskgit-pytorch with its discriminator, a decoder of DALLE2-pytorch, a MuLaN of musiclm-pytorch, a "
        "folder of diffusers, or a file of taming-transformers and latent diffusion, of LlamaGen or of Wan")
    add("--weights", **weights)

    add = command(translate, "config", "Turn a training configuration of DALLE2-pytorch into one for train_decoder.py, "
                  "or one of an autoencoder of taming-transformers or latent diffusion into one for train_vqgan.py.",
                  ("OLD", "the configuration, JSON or YAML"), ("NEW", "YAML file to write, for --config"))
    add("--processes", type=positive_int, metavar="N",
        help="processes of the training: the batch size in OLD is for one, in NEW for all of them (default: as in OLD)")

    add = command(average, "average", "Write a model folder with a moving average of the weights, of another length.",
                  ("RUN", "folder of a run with --ema_power"), ("OUT", "folder to write"))
    add("--ema_length", type=average_length, required=True, metavar="LENGTH",
        help="standard deviation of the average's profile as a fraction of the run up to its last save, such as 0.07")

    add = command(push, "push", "Upload a model to the Hugging Face Hub, with a model card made from its run.",
                  ("RUN", "run folder, checkpoint or model folder"))
    add("name", metavar="USER/NAME", help="model on the Hub; created if it does not exist")
    add("--private", action="store_true", help="make it private")
    add("--branch", metavar="NAME", help="upload to this branch, which is created if it does not exist (default: main)")
    add("--message", default="Upload a model", metavar="TEXT", help="message of the commit")
    add("--no_picture", action="store_true", help="leave out the newest picture of the run, which may show the data")
    add("--no_discriminator", action="store_true", help="leave out the discriminator, which others need to train on")
    add("--dry_run", type=FOLDER, metavar="DIR", help="write what would be uploaded to DIR, and upload nothing; DIR "
        "can then be pushed in place of RUN, with an edited README.md")
    add("--weights", **weights)
    # fmt: on
    return parser


def inspect(args: argparse.Namespace) -> None:
    from tandem.weights.formats.description import describe_model_folder
    from tandem.weights.formats.detection import detect_format

    kind, location = resolve(Path(args.path))
    if kind == "checkpoint":
        facts = describe_checkpoint(location, is_checked=not args.no_checksums)
    elif kind == "model":
        facts = describe_model_folder(location)
    else:
        facts = detect_format(location).describe(location)
    facts = {"path": str(location), **facts}
    print(json.dumps(facts, indent=2) if args.json else "\n".join(map(printable, format_facts(facts))))
    if facts.get("checksums") not in (None, "hold", "not checked"):
        raise Failed


def describe_checkpoint(folder: Path, is_checked: bool) -> dict[str, Any]:
    from tandem.training.checkpoint.format import check_sums, read_checkpoint
    from tandem.training.checkpoint.models import MODELS, final_average
    from tandem.weights.formats.description import describe_weights

    checksums = "not checked"
    parts, meta = read_checkpoint(folder, verify=False)
    if is_checked:
        try:
            check_sums(folder)
            checksums = "hold"
        except ValueError as error:
            checksums = f"do not hold: {error}"
    facts: dict[str, dict[str, Any]] = {}
    for name, part in sorted(parts.items()):
        weights = final_average(part).get("weights")
        facts[name] = describe_weights(weights) if isinstance(weights, dict) else {}
        if isinstance(powers := part.get("powers"), dict):
            facts[name]["ema_power"] = ", ".join(powers)
        if isinstance(optimizer := part.get("optimizer"), dict):
            facts[name] |= {"optimizer": optimizer.get("type"), "optimizer_step": optimizer.get("step")}
    progress: Any = parts.get("progress", {})
    samples, batch_size = progress.get("samples"), progress.get("batch_size")
    has_step = isinstance(samples, int) and isinstance(batch_size, int) and batch_size > 0
    return {
        "kind": "checkpoint", "step": samples // batch_size if has_step else None,
        "samples": samples,
        "written_by": meta,
        "models": {
            name: with_latent_statistics(model, parts.get(name, {})) for name, model in parts.get(MODELS, {}).items()
        },
        "parts": facts,
        "bytes": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
        "checksums": checksums,
    }  # fmt: skip


def with_latent_statistics(model: Any, part: Mapping[str, Any]) -> Any:
    """A model's configuration in a checkpoint, with the scale of latents, and the mean and the deviation of each of
    their channels, from the statistics among its weights. The checkpoint is untrusted, so `model` and `part` may be of
    other types."""
    from tandem.models.quantizers.gaussian import compute_channel_statistics, compute_scale

    weights = part.get("weights")
    if not isinstance(model, dict) or not isinstance(weights, dict):
        return model
    latent_stats: Any = weights.get("quantizer.latent_stats")
    channel_stats: Any = weights.get("quantizer.channel_stats")
    if not model.get("scaling_factor") and getattr(latent_stats, "shape", None) == (3,):
        scaling_factor, shift_factor = compute_scale(latent_stats) or (None, None)
        model = {**model, "scaling_factor": scaling_factor, "shift_factor": shift_factor}
    if getattr(channel_stats, "ndim", None) == 2 and len(channel_stats) == 3:
        mean, std = compute_channel_statistics(channel_stats) or (None, None)
        model = {**model, "latents_mean": mean, "latents_std": std}
    return model


def format_facts(facts: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Facts as lines of text, without mappings below the third level, which only --json prints."""
    for key, value in facts.items():
        if isinstance(value, dict) and len(indent) < 4:
            yield f"{indent}{key}:"
            yield from format_facts(value, indent + "  ")
        elif not isinstance(value, dict):
            yield f"{indent}{key}: {f'{value:,}' if type(value) is int else value}"


def check_output(args: argparse.Namespace, is_folder: bool, writer: str) -> Path:
    """The output path. Raises ValueError, in one line, if something exists there that must not be replaced. `writer`:
    what writes to it, for the message."""
    out = Path(args.out)
    if out.exists() and out.is_dir() != is_folder:
        actual, expected = ("file", "folder") if is_folder else ("folder", "file")
        raise ValueError(f"{out} is a {actual}, and {writer} writes a {expected}; give another name")
    if not args.force and (any(out.iterdir()) if out.is_dir() else out.exists()):
        raise ValueError(f"{out} exists already; give another name, or --force to replace it")
    return out


def export(args: argparse.Namespace) -> None:
    from tandem.weights.formats.detection import FORMATS

    is_folder, path = args.to in ("model", "diffusers"), Path(args.path)
    out = check_output(args, is_folder, f"--to {args.to}")
    model, note = load_model(path, args.weights), None
    if args.to == "model":
        write_model(model, path, out)
    else:
        public = FORMATS[args.to]
        if type(model).__name__ not in public.models:
            classes = " or ".join(public.models)
            raise ValueError(f"--to {args.to} is for a {classes}, and {path} holds a {type(model).__name__}")
        extras = {"discriminator": load_discriminator(path)} if public.read_discriminator else {}
        out.parent.mkdir(parents=True, exist_ok=True)
        note = public.save(model, out, **extras)
    print(f"wrote {out}: {summarize_model(model)}" + (f"; {note}" if note else ""))


def summarize_model(model: Any) -> str:
    return f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters"


def average(args: argparse.Namespace) -> None:
    """Write the model of a run with a moving average of another length, combined from the averages in snapshots/. The
    buffers of the model are those of the last save."""
    from tandem.models.base import build
    from tandem.training.checkpoint.ema_files import EMAFiles

    run, out = Path(args.path), check_output(args, is_folder=True, writer="average")
    files = EMAFiles(run / "snapshots")
    model = build(load_model(run, is_lazy=True).description(), files.newest("ema"), run)
    parameters = dict(model.named_parameters(remove_duplicate=False))  # every name in the weights
    weights, updates, profile_error = files.reconstruct("ema", args.ema_length, parameters)
    if profile_error > LARGEST_PROFILE_ERROR:
        raise ValueError(
            f"the averages in {run / 'snapshots'} give the profile of length {args.ema_length} with an error of "
            f"{profile_error:.0%}: choose a length nearer to theirs, save more often, or train with several --ema_power"
        )
    model.load_state_dict(weights, strict=False)
    write_model(model, run, out)
    summary = f"averaged over {counted(updates, 'update')}; error of the profile {profile_error:.2%}"
    print(f"wrote {out}: {summarize_model(model)}, {summary}")


def translate(args: argparse.Namespace) -> None:
    """Write the flags for a public training configuration, and print a line for each key without a counterpart."""
    import yaml

    out = check_output(args, is_folder=False, writer="config")
    try:
        config = read_public_config(args.path)
        is_decoder = "decoder" in config
        if not is_decoder and "model" not in config:
            raise ValueError("it has no part about a decoder (DALLE2-pytorch) or a model (taming-transformers)")
        translation = (translate_dalle2 if is_decoder else translate_taming)(config, args.processes)
        parser = script_parser(translation.script)
        for name, (key, value) in translation.flags.items():
            try:
                parser.with_values({name: value})
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
    except READ_ERRORS as error:
        raise ValueError(f"{args.path}: {one_line(error)}") from None
    values = {name: value for name, (_, value) in translation.flags.items() if value is not None}
    all_settings = parser.settings(parser.with_values(values))
    settings = {name: all_settings[name] for name in values}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).encode())
    for line in translation.lines:
        print(printable(line))
    if args.processes is None and "batch_size" in settings:
        n = translation.processes
        processes, others = ("one process", "several") if n == 1 else (f"the {n} processes in {args.path}", "others")
        print(f"batch_size {settings['batch_size']} is for {processes}; for {others} give --processes")
    data = () if parser.data_flag in settings else (f"--{parser.data_flag}", "photos/")
    command = shlex.join([*command_of(translation.script), "--config", str(out), *data])
    print(f"wrote {out}; start it with: {command}")


def read_public_config(path: str) -> dict[str, Any]:
    """The content of a JSON or YAML file. Raises OSError, and ValueError, in one line, if it is no mapping."""
    from tandem.io.reading import LONGEST_FILE_BYTES, read_bytes, read_json, read_yaml

    is_json = read_bytes(path, LONGEST_FILE_BYTES).lstrip().startswith(b"{")
    config = read_json(path) if is_json else read_yaml(path)
    if not isinstance(config, dict):
        raise ValueError("it is no configuration: it holds no keys with values")
    return config


class Translation(NamedTuple):
    """The translation of a public configuration for ``processes`` processes: name of a flag -> (original key, value),
    and lines about the other keys."""

    script: str
    flags: dict[str, tuple[str, Any]]
    processes: int
    lines: list[str]


def translate_dalle2(config: dict[str, Any], processes: int | None) -> Translation:
    """Translate a configuration of DALLE2-pytorch. Raises ValueError, in one line."""
    from tandem.config.public_names import rows
    from tandem.models import Decoder
    from tandem.models.building import build_on_meta, check_arguments
    from tandem.weights.formats.config_keys import without_counterpart
    from tandem.weights.formats.dalle2_config import decoder_config, decoder_part
    from tandem.weights.formats.dalle2_keys import default_lines, flags_from_config, supported_keys

    parser, all_rows = script_parser("train_decoder.py"), rows("train_decoder.py")
    supported, other_keys = supported_keys(all_rows), {name: value for name, value in config.items() if name != "seed"}
    left_out = [*without_counterpart(other_keys, supported), *default_lines(config, supported)]
    # A run takes the width of its conditions from the data. Here, any width serves to check the architecture.
    model = decoder_config(decoder_part({"decoder": config.get("decoder")}), width=512).to_dict()
    check_arguments(model)
    build_on_meta(lambda: Decoder.from_dict(model))
    no_flags = argparse.Namespace(explicit=frozenset())  # the arguments of a command line without flags
    architecture = parser.config.architecture_of(model, no_flags)
    settings = parser.settings(parser.with_values(architecture))
    flags = flags_from_config(config, all_rows, {name: settings[name] for name in architecture}, processes or 1)
    return Translation("train_decoder.py", flags, processes or 1, [f"left out: {line}" for line in left_out])


def translate_taming(config: dict[str, Any], processes: int | None) -> Translation:
    """Translate a configuration of an autoencoder of taming-transformers or latent diffusion. Raises ValueError, in one
    line."""
    from tandem.config.public_names import rows
    from tandem.weights.formats.config_keys import without_counterpart
    from tandem.weights.formats.taming_yaml import count_processes, flags_from_yaml, select_autoencoder, supported_keys

    config, general_lines = select_autoencoder(config)
    supported = supported_keys([row for row in rows("train_vqgan.py") if not row.key.startswith("vae.")])
    left_out = [f"left out: {line}" for line in without_counterpart(config, supported)]
    processes = processes or count_processes(config)
    flags, lines = flags_from_yaml(config, processes)
    return Translation("train_vqgan.py", flags, processes, [*general_lines, *left_out, *lines])


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    with exit_codes(parser.error):
        try:
            args.run(args)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader, such as head, has closed the pipe
            # The interpreter flushes stdout at exit, which would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
