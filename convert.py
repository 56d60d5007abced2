"""Look at trained weights, and convert them from one form to another.

    python convert.py inspect PATH
    python convert.py export PATH --to model DIR
    python convert.py export PATH --to dalle FILE.pt
    python convert.py export PATH --to dalle2 FILE.pth
    python convert.py import PATH RUN_DIR
    python convert.py average RUN --ema_length 0.07 DIR

PATH is a run folder (of which the newest checkpoint is taken), a checkpoint, a model folder or a .pt file. No code in
it is run.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.files.reading import printable
from training.flags.converters import average_length
from training.flags.parser import ArgumentParser
from training.run.folder import script_of

# Part of the norm of a profile that an average of another length may miss.
FARTHEST_PROFILE = 0.2

# Importing PyTorch takes seconds, so functions import it, and models, only after the arguments have been checked.


def vae_flags(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flags with which train_vae.py builds a DiscreteVAE of these arguments; ValueError if it cannot."""
    if config["channels"] not in (3, 4):
        raise ValueError(f"train_vae.py trains on 3 or 4 channels, this model has {config['channels']}")
    check_normalization(config, "train_vae.py")
    flags = {key: config[key] for key in ("image_size", "num_tokens", "num_layers", "num_resnet_blocks", "hidden_dim")}
    return {**flags, "emb_dim": config["codebook_dim"], "transparent": config["channels"] == 4}


def check_normalization(config: Mapping[str, Any], target: str) -> None:
    """Raise a ValueError if a DiscreteVAE does not have the default normalisation: ``target`` supports no other."""
    from models import DiscreteVAE

    default = DiscreteVAE(num_tokens=1, codebook_dim=1, hidden_dim=1, channels=config["channels"])
    if config["normalization"] != default.config["normalization"]:
        raise ValueError(f"{target} has no setting for images that are normalised by {config['normalization']}")


def vqgan_flags(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flags with which train_vqgan.py builds a VQGAN of these arguments; ValueError if it cannot."""
    if config["channels"] != 3:
        raise ValueError(f"train_vqgan.py trains on 3 channels, this model has {config['channels']}")
    return as_flags({name: value for name, value in config.items() if name != "channels"})


def tokenizer_flags(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flags with which train_tokenizer.py builds a VideoTokenizer of these arguments; ValueError if it cannot."""
    from inspect import signature

    from models import VideoTokenizer
    from train_tokenizer import GENERATOR

    for name in sorted(config.keys() - set(GENERATOR)):
        if config[name] != (usual := signature(VideoTokenizer).parameters[name].default):
            raise ValueError(f"train_tokenizer.py trains with {name} {usual} alone, this model has {config[name]}")
    return as_flags({name: config[name] for name in GENERATOR})


def decoder_flags(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flags with which train_decoder.py builds a Decoder of these arguments; ValueError if it cannot."""
    from train_decoder import build_model, build_parser
    from training.flags.unets import flags_that_make

    return flags_that_make(config, build_parser(), lambda args, widths: build_model(args, widths).config)


def as_flags(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Lists as flags have them: "1,2,3"."""
    return {name: ",".join(map(str, value)) if isinstance(value, list) else value for name, value in arguments.items()}


@dataclass(frozen=True)
class Script:
    """A training script, which has build_parser, build_model and MODEL_ARGUMENTS, and the model that it trains."""

    module: str
    model: str  # name of its class
    weights: Callable[[Mapping[str, Any]], Mapping[str, Any]]  # parts of a checkpoint -> weights of the model
    flags: Callable[[Mapping[str, Any]], dict[str, Any]]  # constructor arguments of the model -> the script's flags
    # Weights -> what build_model needs besides the arguments.
    of_weights: Callable[[Mapping[str, Any]], tuple[Any, ...]] = lambda weights: ()


def weights_of(part: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Takes the weights of one part of a checkpoint."""
    return lambda parts: parts[part]["weights"]


def weights_of_unets(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a decoder as trained: of each Unet's engine, without the weight of its loss, and of the Unets that
    were not trained."""
    weights = {f"unets.{name}": tensor for name, tensor in parts["others"]["weights"].items()}
    for part, content in parts.items():
        number = part.removeprefix("unet")
        if part != number and number.isdecimal():
            weights |= {
                f"unets.{int(number) - 1}.{name.removeprefix('network.')}": tensor
                for name, tensor in content["weights"].items() if not name.startswith("loss_weight.")
            }  # fmt: skip
    return weights


def widths_of_decoder(weights: Mapping[str, Any]) -> tuple[dict[str, Any]]:
    """The widths of a decoder's conditions, which its script takes from the data."""
    from training.flags.unets import widths_of

    return (widths_of(weights),)


SCRIPTS = (
    Script("train_vae", "DiscreteVAE", weights_of("engine"), vae_flags),
    Script("train_vqgan", "VQGAN", weights_of("generator"), vqgan_flags),
    Script("train_tokenizer", "VideoTokenizer", weights_of("generator"), tokenizer_flags),
    Script("train_decoder", "Decoder", weights_of_unets, decoder_flags, widths_of_decoder),
)


def build_parser() -> ArgumentParser:
    parser = ArgumentParser("convert.py", "Look at trained weights, and convert them from one form to another.")
    parser.usage = None  # None makes argparse generate the usage line
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(
        run: Callable[[argparse.Namespace], None], name: str, text: str,
        path: tuple[str, str] = ("PATH", "run folder, checkpoint, model folder or .pt file"),
    ) -> Callable[..., Any]:  # fmt: skip
        sub = commands.add_parser(name, description=text, help=text)
        sub.usage = None
        sub.set_defaults(run=run)
        sub.add_argument("path", metavar=path[0], help=path[1])
        return sub.add_argument

    # fmt: off
    weights: dict[str, Any] = {
        "choices": ("best", "ema", "online"), "default": "best",
        "help": "weights of a checkpoint: their moving average (ema), as trained (online), or ema if it exists (best)"}
    add = command(inspect, "inspect", "Describe the contents of PATH without loading its weights.")
    add("--json", action="store_true", help="print JSON")
    add("--no_checksums", action="store_true", help="do not read all of a checkpoint to verify its checksums")

    add = command(export, "export", "Write a model folder or a .pt file.")
    add("out", metavar="OUT", help="folder or file to write")
    add("--to", choices=("model", "dalle", "dalle2"), required=True,
        help="a folder of model.safetensors and config.json, DALLE-pytorch's vae-final.pt, or a decoder of "
        "DALLE2-pytorch")
    add("--weights", **weights)
    add("--force", action="store_true", help="replace OUT where it exists")

    add = command(import_weights, "import", "Make a run folder from which a training starts with these weights.")
    add("run_dir", metavar="RUN_DIR", help="new folder")
    add("--weights", **weights)

    add = command(average, "average", "Write a model folder with an average of the weights of another length.",
                  ("RUN", "folder of a run with --ema_power"))
    add("out", metavar="OUT", help="folder to write")
    add("--ema_length", type=average_length, required=True, metavar="LENGTH",
        help="standard deviation of the average's profile as a fraction of the run up to its last save, such as 0.07")
    add("--force", action="store_true", help="replace OUT where it exists")
    # fmt: on
    return parser


def find(path: Path) -> tuple[str, Path]:
    """The kind of ``path`` ("file", "checkpoint" or "model") and its path; for a run folder, its newest checkpoint."""
    from models.files.pretrained import CONFIG_FILE
    from training.checkpoints.store import latest_checkpoint

    for file, kind in ((path, "file"), (path / "state.json", "checkpoint"), (path / CONFIG_FILE, "model")):
        if file.is_file():
            return kind, path
    if latest := latest_checkpoint(path / "checkpoints"):
        return "checkpoint", latest
    for folder in (path / "model", path / "init"):  # the checkpoints were deleted, or training has not started
        if (folder / CONFIG_FILE).is_file():
            return "model", folder
    missing = "" if path.exists() else " it does not exist;"
    raise ValueError(f"{path}:{missing} expected a run folder with a checkpoint, a checkpoint, a model folder or a .pt")


def model_folder(path: str | Path, *kinds: str) -> Path:
    """The model folder for what a user calls a model: a model folder, a run folder or a checkpoint of one, or a .pt
    file. Of a run folder it is model/, unless a later update has been saved. A model that is in no such folder yet is
    written to a temporary one, which is deleted when this process ends.

    Args:
        kinds: Names of the classes that will do.

    Raises:
        ValueError: one line, if there is no model, or it is of another kind.
    """
    from models.files.pretrained import read_config

    folder = _find_or_write_model(Path(path))
    kind = read_config(folder)[0]
    if kinds and kind not in kinds:
        makers = {script.model: script.module for script in SCRIPTS} | {"MuLaN": "train_mulan"}
        of_script = f" of {makers[kind]}.py" if kind in makers else ""
        raise ValueError(f"{path} holds a {kind[:80]}{of_script}, not a {' or a '.join(kinds)}")
    return folder


def _find_or_write_model(path: Path) -> Path:
    from models.files.pretrained import CONFIG_FILE
    from tandem.files.reading import read_json_or_empty

    kind, where = find(path)
    if kind == "model":
        return where
    model, best = path / "model", path / "best"
    step = read_json_or_empty(model / "training.json").get("step")
    if isinstance(step, int) and where.name == f"step_{step:08d}" and (model / CONFIG_FILE).is_file():
        return model
    if kind == "checkpoint" and script_of(where.parent.parent) == "train_mulan.py":
        if (best / CONFIG_FILE).is_file():
            return best
        raise ValueError(f"{path}: of train_mulan.py, give the run folder, or best/ or model/ in it: no checkpoint")
    folder = Path(tempfile.mkdtemp(prefix="model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    load_model(where, "best").save_pretrained(folder / where.name)
    return folder / where.name


def read(folder: Path, verify: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parts and metadata of a checkpoint. Tensors are read when used; ``verify`` compares the checksums of files."""
    from models.files.errors import one_line
    from training.checkpoints.store import read_checkpoint

    try:
        if odd := [path for path in folder.iterdir() if not path.is_file()]:
            raise ValueError(f"{odd[0]} is not a regular file")
        parts, meta = read_checkpoint(folder, verify=verify)
    except RuntimeError as error:  # a file is too large to be mapped into memory
        raise ValueError(f"cannot read the checkpoint {folder}: {one_line(error)}") from None
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise ValueError(f"cannot read the checkpoint {folder}: its part {name} is no JSON object")
    return parts, meta


def arguments_of(run: Path) -> tuple[Script, argparse.Namespace]:
    """The script that trained a run, and its arguments, from config.yaml."""
    from tandem.files.reading import read_yaml

    path = run / "config.yaml"
    try:
        config = read_yaml(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"the checkpoint's model is described by its run's config.yaml, but: {error}") from None
    for script in SCRIPTS:
        module = importlib.import_module(script.module)
        if isinstance(config, dict) and set(module.MODEL_ARGUMENTS) <= set(config):
            parser = module.build_parser()
            parser.prog = "convert.py"
            args = parser.parse(["--config", str(path)])
            args.init_from = None  # the weights that the run started from may be gone
            return script, args
    raise ValueError(f"{path} is no config of {' or '.join(f'{script.module}.py' for script in SCRIPTS)}")


def build(script: Script, args: argparse.Namespace, weights: Mapping[str, Any]) -> Any:
    """The model that a script trains with these arguments, holding ``weights``; ValueError if they do not fit."""
    from models.files.building import build_with_weights, check_arguments

    module = importlib.import_module(script.module)
    check_arguments({name: getattr(args, name) for name in module.MODEL_ARGUMENTS}, weights)
    return build_with_weights(lambda: module.build_model(args, *script.of_weights(weights)), weights)


def load_checkpoint(folder: Path, which: str) -> Any:
    """The model in a checkpoint, with the weights ``which``: "ema" (their moving average), "online" (as trained), or
    "best", which means the moving average if there is one, and else the weights as trained."""
    from models.files.errors import one_line

    script, args = arguments_of(Path(os.path.abspath(folder)).parent.parent)
    parts = read(folder)[0]
    average = parts.get("ema")
    if which == "ema" and not average:
        raise ValueError(f"{folder} holds no average of the weights; leave --weights out, or use --weights online")
    try:
        weights = kept_average(average)["weights"] if average and which != "online" else script.weights(parts)
        return build(script, args, weights)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} does not hold the model of its run: {one_line(error)}") from None


def kept_average(part: Mapping[str, Any]) -> Any:
    """Of a checkpoint's averages the one that the run keeps: the only one, or that of the first --ema_power."""
    if not isinstance(part.get("powers"), dict):
        return part
    first = next(iter(part["powers"].values()), None)
    return first if isinstance(first, dict) else {}


def load_model(path: Path, which: str) -> Any:
    """The model at ``path``, which may be of any kind that `find` knows."""
    import models
    from models.files.pretrained import read_config
    from models.files.public_decoder import is_public_decoder, load_public_decoder

    kind, where = find(path)
    if kind == "checkpoint":
        return load_checkpoint(where, which)
    if kind == "file" and is_public_decoder(where):
        return load_public_decoder([where], weights=which)
    if which != "best":
        raise ValueError(f"--weights {which} is for checkpoints; {where} holds one set of weights: leave it out")
    if kind == "file":
        return models.DiscreteVAE.from_dalle(where)
    name = read_config(where)[0]
    model: Any = getattr(models, name, None)
    if not hasattr(model, "from_pretrained"):
        raise ValueError(f"{where} holds a {name[:80]}, which is no model of this version")
    return model.from_pretrained(where)


def inspect(args: argparse.Namespace) -> None:
    from models.files.description import describe_dalle_file, describe_model_folder
    from models.files.public_decoder import describe_public_decoder, is_public_decoder

    kind, where = find(Path(args.path))
    if kind == "checkpoint":
        facts = describe_checkpoint(where, is_checked=not args.no_checksums)
    elif kind == "model":
        facts = describe_model_folder(where)
    else:
        facts = describe_public_decoder(where) if is_public_decoder(where) else describe_dalle_file(where)
    facts = {"path": str(where), **facts}
    print(json.dumps(facts, indent=2) if args.json else "\n".join(map(printable, lines_of(facts))))
    if facts.get("checksums") not in (None, "hold", "not checked"):
        raise SystemExit(1)


def describe_checkpoint(folder: Path, is_checked: bool) -> dict[str, Any]:
    from models.files.description import describe_weights

    checksums = "not checked"
    parts, meta = read(folder, verify=False)
    if is_checked:
        try:
            read(folder)
            checksums = "hold"
        except ValueError as error:
            checksums = f"do not hold: {error}"
    facts: dict[str, dict[str, Any]] = {}
    for name, part in sorted(parts.items()):
        weights = kept_average(part).get("weights")
        facts[name] = describe_weights(weights) if isinstance(weights, dict) else {}
        if isinstance(powers := part.get("powers"), dict):
            facts[name]["ema_power"] = ", ".join(powers)
        if isinstance(optimizer := part.get("optimizer"), dict):
            facts[name] |= {"optimizer": optimizer.get("type"), "optimizer_step": optimizer.get("step")}
    samples, batch_size = (parts.get("progress", {}).get(name) for name in ("samples", "batch_size"))
    is_known = isinstance(samples, int) and isinstance(batch_size, int) and batch_size > 0
    return {
        "kind": "checkpoint", "step": samples // batch_size if is_known else None, "samples": samples,
        "written_by": meta,
        "parts": facts,
        "bytes": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
        "checksums": checksums,
    }  # fmt: skip


def lines_of(facts: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Facts as lines of text. Mappings below the third level, such as a resolved configuration, are left out: only
    --json shows them."""
    for key, value in facts.items():
        if isinstance(value, dict) and len(indent) < 4:
            yield f"{indent}{key}:"
            yield from lines_of(value, indent + "  ")
        elif not isinstance(value, dict):
            yield f"{indent}{key}: {f'{value:,}' if type(value) is int else value}"


def new_output(args: argparse.Namespace, is_folder: bool, kind: str) -> Path:
    """The path to write to, unless something is there that must stay."""
    out = Path(args.out)
    if out.exists() and out.is_dir() != is_folder:
        raise ValueError(f"{out} is a {'file' if is_folder else 'folder'}; {kind} writes another kind")
    if not args.force and (any(out.iterdir()) if out.is_dir() else out.exists()):
        raise ValueError(f"{out} exists already; give another name, or --force to replace it")
    return out


def export(args: argparse.Namespace) -> None:
    from models import Decoder, DiscreteVAE
    from models.files.public_decoder import save_public_decoder

    is_folder = args.to == "model"
    out = new_output(args, is_folder, f"--to {args.to}")
    model = load_model(Path(args.path), args.weights)
    if is_folder:
        model.save_pretrained(out)
    elif isinstance(model, Decoder) and args.to == "dalle2":
        out.parent.mkdir(parents=True, exist_ok=True)
        save_public_decoder(model, out)
    elif isinstance(model, DiscreteVAE) and args.to == "dalle":
        check_normalization(model.config, "the .pt format")
        out.parent.mkdir(parents=True, exist_ok=True)
        model.save_dalle(out)
    else:
        kind = "DiscreteVAE" if args.to == "dalle" else "Decoder"
        raise ValueError(f"--to {args.to} is for a {kind}, and {args.path} holds a {type(model).__name__}")
    print(f"wrote {out}: {described(model)}")


def described(model: Any) -> str:
    return f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters"


def average(args: argparse.Namespace) -> None:
    """Write the model of a run with an average of its weights that is made of those in snapshots/. Buffers, which no
    average averages, are those of the last save."""
    from training.checkpoints.averages import AverageFiles

    run, out = Path(args.path), new_output(args, is_folder=True, kind="average")
    script, settings = arguments_of(run)
    files = AverageFiles(run / "snapshots")
    model = build(script, settings, files.newest("ema"))
    parameters = dict(model.named_parameters(remove_duplicate=False))  # every name in the weights
    weights, updates, distance = files.of_length("ema", args.ema_length, parameters)
    if distance > FARTHEST_PROFILE:
        raise ValueError(
            f"the averages in {run / 'snapshots'} miss {distance:.0%} of the profile of length {args.ema_length}: "
            "choose a length nearer to theirs, save more often, or train with several --ema_power"
        )
    model.load_state_dict(weights, strict=False)
    model.save_pretrained(out)
    print(f"wrote {out}: {described(model)}, averaged over {updates} updates; it misses {distance:.2%} of the profile")


def _holds_only(folder: Path, names: Mapping[str, Collection[str]]) -> bool:
    """Whether a folder holds nothing but folders of these names, and these nothing but files of theirs."""
    if not folder.is_dir() or {path.name for path in folder.iterdir()} - names.keys():
        return False
    return all(not {path.name for path in inner.iterdir()} - {*names[inner.name]} for inner in folder.iterdir())


def import_weights(args: argparse.Namespace) -> None:
    """Copy the weights into a new run folder, and write a start.yaml with their path and the flags that they need."""
    import yaml

    from tandem.files.writing import write_atomically

    run_dir = Path(args.run_dir)
    # start.yaml is written last, so a folder without it is what a try left that did not finish.
    unfinished = {"init": {"model.safetensors", "config.json", ".model.safetensors.tmp", ".config.json.tmp"}}
    if run_dir.exists() and not _holds_only(run_dir, unfinished):
        raise ValueError(f"{run_dir} exists already; give a new folder")
    model = load_model(Path(args.path), args.weights)
    found = [script for script in SCRIPTS if script.model == type(model).__name__]
    if not found:
        raise ValueError(f"no script trains a {type(model).__name__}")
    script, start, weights = found[0], run_dir / "start.yaml", run_dir / "init"
    settings = {**script.flags(model.config), "init_from": str(weights), "output_dir": str(run_dir)}
    model.save_pretrained(weights)
    write_atomically(start, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).encode())
    print(f"made {run_dir}; start it with: python {script.module}.py --config {start}, and your data")


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
