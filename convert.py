"""Look at trained weights, and carry them from one form to another.

    python convert.py inspect PATH
    python convert.py export PATH --to model DIR
    python convert.py export PATH --to dalle FILE.pt
    python convert.py import PATH RUN_DIR

PATH is a run folder (its newest checkpoint counts), a checkpoint, a model folder or a .pt file. Nothing in it is run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.flags.parser import ArgumentParser

if TYPE_CHECKING:  # PyTorch takes seconds to import: only after the arguments are known to be right
    from models.files.pretrained import Headers

CHECKSUMS_BROKEN = 1  # exit code
# PyTorch's words for those of safetensors.
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64"}


def vae_flags(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of train_vae.py that make a DiscreteVAE with these constructor arguments.

    Raises:
        ValueError: there are none.
    """
    if config["channels"] not in (3, 4):
        raise ValueError(f"train_vae.py trains on 3 or 4 channels, this model has {config['channels']}")
    check_normalization(config, "train_vae.py")
    same = ("image_size", "num_tokens", "num_layers", "num_resnet_blocks", "hidden_dim")
    said = {name: config[name] for name in same}
    return {**said, "emb_dim": config["codebook_dim"], "transparent": config["channels"] == 4}


def check_normalization(config: Mapping[str, Any], whose: str) -> None:
    """What cannot be told how images are normalised takes the usual way, and so must a DiscreteVAE that goes there."""
    import torch

    from models import DiscreteVAE

    with torch.device("meta"):
        usual = DiscreteVAE(channels=config["channels"]).config["normalization"]
    if config["normalization"] != usual:
        raise ValueError(f"{whose} cannot be told that images are normalised by {config['normalization']}")


def vqgan_flags(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of train_vqgan.py that make a VQGAN with these constructor arguments.

    Raises:
        ValueError: there are none.
    """
    if config["channels"] != 3:
        raise ValueError(f"train_vqgan.py trains on 3 channels, this model has {config['channels']}")
    lists = {name: config[name] for name in ("num_resnet_blocks", "fsq_levels") if config[name] is not None}
    said = {name: value for name, value in config.items() if name not in {*lists, "channels", "fsq_levels"}}
    return said | {name: ",".join(map(str, values)) for name, values in lists.items()}


@dataclass(frozen=True)
class Script:
    """A training script - one with build_parser, build_model and MODEL_ARGUMENTS - and the model that it trains.

    Args:
        module: Name of the script.
        model: Name of the model's class.
        weights: Part of its checkpoints that holds the model.
        average: Part that holds the moving average of its weights, where there is one.
        flags: The script's flags for constructor arguments of the model.
    """

    module: str
    model: str
    weights: str
    average: str
    flags: Callable[[Mapping[str, Any]], dict[str, Any]]


SCRIPTS = (
    Script("train_vae", "DiscreteVAE", weights="engine", average="ema", flags=vae_flags),
    Script("train_vqgan", "VQGAN", weights="generator", average="ema", flags=vqgan_flags),
)


def build_parser() -> ArgumentParser:
    parser = ArgumentParser("convert.py", "Look at trained weights, and carry them from one form to another.")
    parser.usage = None  # argparse's own
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(run: Callable[[argparse.Namespace], None], name: str, text: str) -> Callable[..., Any]:
        sub = commands.add_parser(name, description=text, help=text)
        sub.usage = None
        sub.set_defaults(run=run)
        sub.add_argument("path", metavar="PATH", help="run folder, checkpoint, model folder or .pt file")
        return sub.add_argument

    which = {"choices": ("best", "ema", "online"), "default": "best"}
    # fmt: off
    add = command(inspect, "inspect", "Say what is in it, without loading it.")
    add("--json", action="store_true", help="for programs")
    add("--no_checksums", action="store_true", help="do not read a checkpoint whole to check it")

    add = command(export, "export", "Write a model folder or a .pt file.")
    add("out", metavar="OUT", help="folder or file to write")
    add("--to", choices=("model", "dalle"), required=True,
        help="a folder of model.safetensors and config.json, or DALLE-pytorch's vae-final.pt")
    add("--weights", **which,
        help="of a checkpoint: the moving average where there is one, the moving average, or the trained weights")
    add("--force", action="store_true", help="replace what is there")

    add = command(import_weights, "import", "Make a run folder from which a training starts with these weights.")
    add("run_dir", metavar="RUN_DIR", help="new folder")
    add("--weights", **which, help="of a checkpoint, as for export")
    # fmt: on
    return parser


# Reading.


def find(path: Path) -> tuple[str, Path]:
    """What is at ``path`` ("file", "checkpoint" or "model"), and where: a run stands for its newest checkpoint."""
    from models.files.pretrained import CONFIG_FILE
    from training.checkpoints.store import latest_checkpoint

    for file, kind in ((path, "file"), (path / "state.json", "checkpoint"), (path / CONFIG_FILE, "model")):
        if file.is_file():
            return kind, path
    if latest := latest_checkpoint(path / "checkpoints"):
        return "checkpoint", latest
    for folder in (path / "model", path / "init"):  # checkpoints deleted, or not trained yet
        if (folder / CONFIG_FILE).is_file():
            return "model", folder
    missing = "" if path.exists() else "there is nothing; "
    raise ValueError(f"{path}: {missing}expected a run folder with a checkpoint, a checkpoint, a model folder or a .pt")


def read(folder: Path, verify: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parts and meta of a checkpoint; its tensors are read where they are looked at, and all of them to ``verify``."""
    from models.files.pretrained import one_line
    from training.checkpoints.store import read_checkpoint

    try:
        if odd := [path.name for path in folder.iterdir() if not path.is_file()]:
            raise ValueError(f"{folder / odd[0]} is not a regular file")
        parts, meta = read_checkpoint(folder, verify=verify)
    except RuntimeError as error:  # a file too large to be mapped
        raise ValueError(f"cannot read the checkpoint {folder}: {one_line(error)}") from None
    if odd := [name for name, part in parts.items() if not isinstance(part, dict)]:
        raise ValueError(f"cannot read the checkpoint {folder}: {odd[0]} is no part")
    return parts, meta


def arguments_of(run: Path) -> tuple[Script, argparse.Namespace]:
    """The script that trained a run, and its arguments, from config.yaml."""
    import yaml

    path = run / "config.yaml"
    try:
        said = yaml.safe_load(path.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the checkpoint's model is described by its run's config.yaml, but: {reason}") from None
    for script in SCRIPTS:
        module = importlib.import_module(script.module)
        if isinstance(said, dict) and set(module.MODEL_ARGUMENTS) <= set(said):
            parser = module.build_parser()
            parser.prog = "convert.py"
            args = parser.parse(["--config", str(path)])
            args.init_from = None  # where it once started from
            return script, args
    raise ValueError(f"{path} is of no script known here ({', '.join(f'{script.module}.py' for script in SCRIPTS)})")


def load_checkpoint(folder: Path, which: str) -> Any:
    """The model in a checkpoint: "ema", "online", or "best", which is the average where there is one."""
    from torch import Tensor

    from models.files.pretrained import build_with_weights, check_arguments, one_line

    script, args = arguments_of(Path(os.path.abspath(folder)).parent.parent)
    module = importlib.import_module(script.module)
    parts, _ = read(folder)
    average = parts.get(script.average)
    if which == "ema" and not average:
        raise ValueError(f"{folder} holds no average of the weights; leave --weights out, or say online")
    try:
        part = average if average and which != "online" else parts[script.weights]
        weights: dict[str, Tensor] = part["weights"]
        if not all(isinstance(tensor, Tensor) for tensor in weights.values()):
            raise ValueError("a weight is not a tensor")
        check_arguments({name: getattr(args, name) for name in module.MODEL_ARGUMENTS}, weights)
        return build_with_weights(lambda: module.build_model(args), weights)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} does not hold the model of its run: {one_line(error)}") from None


def load_model(path: Path, which: str) -> Any:
    """The model at ``path``, whatever form it has there."""
    import models
    from models.files.pretrained import read_config

    kind, where = find(path)
    if kind == "checkpoint":
        return load_checkpoint(where, which)
    if which != "best":
        raise ValueError(f"--weights {which} is for checkpoints; {where} holds one set of weights: leave it out")
    if kind == "file":
        return models.DiscreteVAE.from_dalle(where)
    name, _ = read_config(where)
    model: Any = getattr(models, name) if name in models.__all__ else None
    if not hasattr(model, "from_pretrained"):
        raise ValueError(f"{where} holds a {name[:80]}, which is no model known here")
    return model.from_pretrained(where)


# inspect


def inspect(args: argparse.Namespace) -> None:
    from models.files.pretrained import printable

    kind, where = find(Path(args.path))
    if kind == "checkpoint":
        facts = describe_checkpoint(where, is_checked=not args.no_checksums)
    else:
        facts = describe_model_folder(where) if kind == "model" else describe_dalle_file(where)
    facts = {"path": str(where), **facts}
    print(json.dumps(facts, indent=2) if args.json else "\n".join(printable(line) for line in lines_of(facts)))
    if facts.get("checksums") not in (None, "hold", "not checked"):
        raise SystemExit(CHECKSUMS_BROKEN)


def describe_checkpoint(folder: Path, is_checked: bool) -> dict[str, Any]:
    checksums = "not checked"
    parts, meta = read(folder, verify=False)
    if is_checked:
        try:
            read(folder)
            checksums = "hold"
        except ValueError as error:
            checksums = f"do not hold: {error}"
    clock = parts.get("progress", {})
    samples, batch_size = clock.get("samples"), clock.get("batch_size")
    is_known = isinstance(samples, int) and isinstance(batch_size, int) and batch_size > 0
    return {
        "kind": "checkpoint",
        "step": samples // batch_size if is_known else None,
        "samples": samples,
        "written_by": meta,
        "parts": {name: describe_part(part) for name, part in sorted(parts.items())},
        "bytes": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
        "checksums": checksums,
    }


def describe_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """Its weights and its optimizer, where it has them."""
    weights, optimizer = part.get("weights"), part.get("optimizer")
    facts = describe_weights(headers_of(weights)) if isinstance(weights, dict) else {}
    if isinstance(optimizer, dict):
        facts |= {"optimizer": optimizer.get("type"), "optimizer_step": optimizer.get("step")}
    return facts


def headers_of(weights: Mapping[Any, Any]) -> Headers:
    from torch import Tensor

    return {str(name): (str(w.dtype), tuple(w.shape)) for name, w in weights.items() if isinstance(w, Tensor)}


def describe_model_folder(folder: Path) -> dict[str, Any]:
    from models.files.pretrained import CONFIG_FILE, read_config, read_headers

    name, arguments = read_config(folder)
    files = read_headers(folder)
    return {
        "kind": "model folder",
        "model": name,
        "arguments": arguments,
        **describe_weights({name: header for headers in files.values() for name, header in headers.items()}),
        "bytes": {file: (folder / file).stat().st_size for file in (CONFIG_FILE, *files)},
    }


def describe_dalle_file(path: Path) -> dict[str, Any]:
    from models.discrete_vae import DALLE_HPARAMS
    from models.files.pretrained import load_dalle_file

    hparams, weights = load_dalle_file(path, DALLE_HPARAMS)
    return {
        "kind": "DALLE-pytorch file",
        "model": "DiscreteVAE",
        "arguments": hparams,
        **describe_weights(headers_of(weights)),
        "bytes": {path.name: path.stat().st_size},
    }


def describe_weights(headers: Headers) -> dict[str, Any]:
    dtypes = {DTYPES.get(dtype, dtype).removeprefix("torch.") for dtype, _ in headers.values()}
    return {
        "tensors": len(headers),
        "parameters": sum(math.prod(shape) for _, shape in headers.values()),
        "dtype": ", ".join(sorted(dtypes)),
    }


def lines_of(facts: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Facts for a person; a resolved configuration inside them is for --json."""
    for key, value in facts.items():
        if isinstance(value, dict) and len(indent) < 4:
            yield f"{indent}{key}:"
            yield from lines_of(value, indent + "  ")
        elif not isinstance(value, dict):
            yield f"{indent}{key}: {f'{value:,}' if type(value) is int else value}"


# export and import


def export(args: argparse.Namespace) -> None:
    from models import DiscreteVAE

    out = Path(args.out)
    is_folder = args.to == "model"
    if out.exists() and out.is_dir() != is_folder:
        raise ValueError(f"{out} is a {'file' if is_folder else 'folder'}; --to {args.to} writes another kind")
    is_there = any(out.iterdir()) if out.is_dir() else out.exists()
    if is_there and not args.force:
        raise ValueError(f"{out} is there already; give another name, or --force to replace it")
    model = load_model(Path(args.path), args.weights)
    if is_folder:
        model.save_pretrained(out)
    else:
        if not isinstance(model, DiscreteVAE):
            raise ValueError(f"--to dalle is for a DiscreteVAE, and {args.path} holds a {type(model).__name__}")
        check_normalization(model.config, "the .pt format")
        out.parent.mkdir(parents=True, exist_ok=True)
        model.save_dalle(out)
    print(f"wrote {out}: {type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters")


def import_weights(args: argparse.Namespace) -> None:
    """Copy the weights into a new run folder, and write a start.yaml that names them and the flags that they need."""
    import yaml

    from training.files import write_atomically

    run_dir = Path(args.run_dir)
    if run_dir.exists() and not (run_dir.is_dir() and not any(run_dir.iterdir())):
        raise ValueError(f"{run_dir} is there already; give a new folder")
    model = load_model(Path(args.path), args.weights)
    script = next((script for script in SCRIPTS if script.model == type(model).__name__), None)
    if script is None:
        raise ValueError(f"no script trains a {type(model).__name__}")
    start, weights = run_dir / "start.yaml", run_dir / "init"
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
        from models.files.pretrained import printable

        parser.error(printable(" ".join(str(error).split())))


if __name__ == "__main__":
    main()
