"""Trained models, by whatever a user calls one: a run folder, a checkpoint, a model folder, a .pt file or a name
on the Hugging Face Hub."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

from training.run.starts import script_of

DISCRIMINATOR = "discriminator"  # folder in a model's folder: of the discriminator that it was trained against

# Importing PyTorch takes seconds, so functions import it, and models, only after the arguments have been checked.


@dataclass(frozen=True)
class Script:
    """A training script, which has build_parser, build_model and MODEL_ARGUMENTS, and the model that it trains."""

    module: str
    model: str  # name of its class
    weights: Callable[[Mapping[str, Any]], Mapping[str, Any]]  # parts of a checkpoint -> weights of the model
    # Weights -> what build_model needs besides the arguments.
    of_weights: Callable[[Mapping[str, Any]], tuple[Any, ...]] = lambda weights: ()
    has_tokenizer: bool = False  # a folder of its model holds a tokenizer's file, too

    def imported(self) -> Any:
        """Its module, which an installed package has inside of itself."""
        return importlib.import_module(f"{__package__}.{self.module}" if __package__ else self.module)


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


def vocabulary_of_mulan(weights: Mapping[str, Any]) -> tuple[SimpleNamespace]:
    """What a MuLaN of either layout is built from beside the arguments: the size of its tokenizer's vocabulary."""
    names = [name for name in ("text.tokens.weight", "text.token_emb.weight") if name in weights]
    return (SimpleNamespace(vocab_size=len(weights[names[0]])),)


SCRIPTS = (
    Script("train_vae", "DiscreteVAE", weights_of("engine")),
    Script("train_vqgan", "VQGAN", weights_of("generator")),
    Script("train_mulan", "MuLaN", weights_of("engine"), vocabulary_of_mulan, has_tokenizer=True),
    # Of --layout musiclm.
    Script("train_mulan", "MusicLMMuLaN", weights_of("engine"), vocabulary_of_mulan, has_tokenizer=True),
    Script("train_tokenizer", "VideoTokenizer", weights_of("generator")),
    Script("train_decoder", "Decoder", weights_of_unets, widths_of_decoder),
)


def find(path: Path) -> tuple[str, Path]:
    """The kind of ``path`` ("file", "checkpoint" or "model") and its path; for a run folder, its newest checkpoint, and
    for the name of a model on the Hugging Face Hub, its folder in the cache."""
    from models.files.hub import local
    from models.files.pretrained import CONFIG_FILE
    from training.checkpoints.store import latest_checkpoint

    path = local(path)
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


class Trained(NamedTuple):
    """A model as scripts use it.

    model: In eval mode, on the CPU.
    about: What identifies it: "config", its class as "model" and its constructor arguments, and "weights_sha256", of
        the files of its weights, or of the file that they would be.
    tokenizer: The file of its tokenizer; None for a model without one, or with that of CLIP.
    """

    model: Any
    about: dict[str, Any]
    tokenizer: Path | None


def open_model(path: str | Path, *kinds: str) -> Trained:
    """The model of what a user calls a model: a model folder, a run folder or a checkpoint of one, or a public
    package's file. Of a run folder it is model/, unless a later update has been saved; then it is best/ of MuLan, and
    of others the newest checkpoint. Nothing is written.

    Args:
        kinds: Names of the classes that will do.

    Raises:
        ValueError: one line, if there is no model, or it is of another kind.
    """
    from data.stores.output import sha256_of
    from models.files.pretrained import read_config, read_headers

    kind, where = _find_newest(Path(path))
    if kind == "model":
        name, arguments = read_config(where)
        _require_kind(path, name, kinds)
        about: dict[str, Any] = {"config": {"model": name, **arguments}}
        about["weights_sha256"] = sha256_of(where / file for file in sorted(read_headers(where)))
        model = load_model(where, "best")
    else:
        model = load_model(where, "best")
        name = type(model).__name__
        _require_kind(path, name, kinds)
        about = {"config": {"model": name, **json.loads(json.dumps(model.config))}, "weights_sha256": _sha256_of(model)}
    has_tokenizer = any(script.has_tokenizer for script in SCRIPTS if script.model == name)
    return Trained(model.eval(), about, tokenizer_file(where) if has_tokenizer else None)


def load_from(path: str, kind: str, load: Callable[[Any], None]) -> None:
    """Call ``load`` with the folder of a model of this ``kind``, or with the model itself where there is none, for what
    a user calls a model, see `open_model`. Errors name ``path``, and the flag of an argument that is on or off."""
    from models.files.pretrained import read_config

    found, where = _find_newest(Path(path))
    source: Any = where if found == "model" else load_model(where, "best")
    _require_kind(path, read_config(where)[0] if found == "model" else type(source).__name__, (kind,))
    try:
        load(source)
    except ValueError as error:
        before, needed, differing = str(error).replace(str(source), path).partition("; they need ")
        flags = differing.replace("centred False", "--no-centred").replace("centred True", "--centred")
        raise ValueError(before + needed + flags) from None


def _require_kind(path: str | Path, found: str, kinds: Sequence[str]) -> None:
    if kinds and found not in kinds:
        makers = {script.model: script.module for script in SCRIPTS}
        of_script = f" of {makers[found]}.py" if found in makers else ""
        raise ValueError(f"{path} holds a {found[:80]}{of_script}, not a {' or a '.join(kinds)}")


def _find_newest(path: Path) -> tuple[str, Path]:
    """As `find`, but for a run folder the model folder in it that is as new as its newest checkpoint, if there is one,
    and of a MuLaN best/."""
    from models.files.pretrained import CONFIG_FILE
    from tandem.files.reading import read_json_or_empty

    kind, where = find(path)
    if kind != "checkpoint":
        return kind, where
    model, best = path / "model", path / "best"
    step = read_json_or_empty(model / "training.json").get("step")
    if isinstance(step, int) and where.name == f"step_{step:08d}" and (model / CONFIG_FILE).is_file():
        return "model", model
    if script_of(path) == "train_mulan.py" and (best / CONFIG_FILE).is_file():
        return "model", best
    return kind, where


def _sha256_of(model: Any) -> str:
    """The checksum of the file that `save_pretrained` would write."""
    from safetensors.torch import save

    from models.files.writing import on_cpu

    return hashlib.sha256(save(on_cpu(model.state_dict()))).hexdigest()


def write_model(model: Any, source: Path, folder: Path) -> None:
    """Write a model folder of a model that came from ``source``: with its tokenizer's file, if it has one.

    Raises:
        ValueError: one line, if the tokenizer is not to be found.
        OSError: one line, if the folder could not be written.
    """
    from data.tokenizers import FILE
    from tandem.files.reading import LONGEST_JSON_BYTES, read_bytes
    from tandem.files.writing import write_atomically

    if any(script.has_tokenizer for script in SCRIPTS if script.model == type(model).__name__):
        file = tokenizer_file(source)
        folder.mkdir(parents=True, exist_ok=True)
        if file is not None:
            write_atomically(folder / FILE, read_bytes(file, LONGEST_JSON_BYTES))
        else:
            (folder / FILE).unlink(missing_ok=True)  # of the model that was there before
    model.save_pretrained(folder)


def tokenizer_file(path: Path) -> Path | None:
    """The tokenizer.json that belongs to the MuLaN at ``path``; None for the tokenizer of CLIP, which has no file, and
    for a public package's file, which does not say its tokenizer. Raises ValueError, in one line, if a checkpoint's
    tokenizer is gone."""
    from data.tokenizers import FILE, sha256_of_tokenizer
    from tandem.files.reading import LONGEST_JSON_BYTES, read_bytes

    kind, where = find(path)
    if kind == "file":
        return None
    if kind == "model":
        return where / FILE if (where / FILE).exists() else None
    run = Path(os.path.abspath(where)).parent.parent
    name = str(arguments_of(run)[1].tokenizer)
    wanted = read_parts(where)[0].get("tokenizer", {}).get("sha256")
    if wanted == sha256_of_tokenizer(name, b""):
        return None
    for file in (Path(name).expanduser(), run / "model" / FILE, run / "best" / FILE):
        if file.is_file() and sha256_of_tokenizer(name, read_bytes(file, LONGEST_JSON_BYTES)) == wanted:
            return file
    raise ValueError(
        f"{where}: the tokenizer {name} that it was trained with is gone or has changed, and the model needs it"
    )


def require_same_tokenizer(tokenizer: Any, path: str) -> None:
    """Raise ValueError, in one line, if the MuLaN that the user calls ``path`` has another tokenizer. A public
    package's file does not say its tokenizer."""
    if not Path(path).is_file():
        tokenizer.require_same(path, tokenizer_file(Path(path)))


def read_parts(folder: Path, verify: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
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


def refuse(message: str, **_: object) -> NoReturn:
    """Raise ValueError: of a config.yaml that is not what the user runs, mistakes are said by whoever reads it."""
    raise ValueError(message)


def arguments_of(run: Path) -> tuple[Script, argparse.Namespace]:
    """The script that trained a run, and its arguments, from config.yaml."""
    from tandem.files.reading import read_yaml

    path = run / "config.yaml"
    try:
        config = read_yaml(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"the checkpoint's model is described by its run's config.yaml, but: {error}") from None
    for script in SCRIPTS:
        module = script.imported()
        before = getattr(module, "BEFORE", {})
        if isinstance(config, dict) and set(module.MODEL_ARGUMENTS) <= {*before, *config}:
            parser = module.build_parser()
            parser.error = refuse
            args = parser.parse(["--config", str(path)])
            for name in before.keys() - config.keys():
                setattr(args, name, before[name])
            args.init_from = None  # the weights that the run started from may be gone
            return script, args
    raise ValueError(f"{path} is no config of {' or '.join(f'{script.module}.py' for script in SCRIPTS)}")


def build(script: Script, args: argparse.Namespace, weights: Mapping[str, Any]) -> Any:
    """The model that a script trains with these arguments, holding ``weights``; ValueError if they do not fit."""
    from models.files.building import build_with_weights, check_arguments

    module = script.imported()
    asked = (*module.MODEL_ARGUMENTS, *getattr(module, "LATER_MODEL_ARGUMENTS", ()))
    check_arguments({name: getattr(args, name) for name in asked}, weights)
    return build_with_weights(lambda: module.build_model(args, *script.of_weights(weights)), weights)


def load_checkpoint(folder: Path, which: str) -> Any:
    """The model in a checkpoint, with the weights ``which``: "ema" (their moving average), "online" (as trained), or
    "best", which means the moving average if there is one, and else the weights as trained."""
    from models.files.errors import one_line
    from models.files.towers import Tower

    script, args = arguments_of(Path(os.path.abspath(folder)).parent.parent)
    parts = read_parts(folder)[0]
    average = parts.get("ema")
    if which == "ema" and not average:
        raise ValueError(f"{folder} holds no average of the weights; leave --weights out, or use --weights online")
    try:
        if isinstance(towers := parts.get("towers"), dict):
            args.towers = {name: Tower(config, {}) for name, config in towers.items()}
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
    from models.files.public import format_of

    kind, where = find(path)
    if kind == "checkpoint":
        return load_checkpoint(where, which)
    if kind == "file":
        return format_of(where).load(where, which)
    if which != "best":
        raise ValueError(f"--weights {which} is for checkpoints; {where} holds one set of weights: leave it out")
    name = read_config(where)[0]
    model: Any = getattr(models, name, None)
    if not hasattr(model, "from_pretrained"):
        raise ValueError(f"{where} holds a {name[:80]}, which is no model of this version")
    return model.from_pretrained(where)


def load_discriminator(path: Path, *, of_runs: bool = True) -> Any:
    """The discriminator of the VQGAN at ``path``, as trained: in a public package's file, in a model folder that
    ``convert.py import`` made of one or, with ``of_runs``, in a checkpoint; None if there is none.

    Raises:
        ValueError: one line, if it is damaged or of another model.
    """
    from models import Discriminator
    from models.files.building import build_with_weights
    from models.files.errors import one_line
    from models.files.pretrained import CONFIG_FILE
    from models.files.public import format_of

    kind, where = find(path)
    if kind == "file":
        load = format_of(where).load_discriminator
        return load(where) if load else None
    if kind == "model":
        folder = where / DISCRIMINATOR
        return Discriminator.from_pretrained(folder) if (folder / CONFIG_FILE).is_file() else None
    if not of_runs:
        return None
    script, args = arguments_of(Path(os.path.abspath(where)).parent.parent)
    try:
        weights = read_parts(where)[0]["discriminator"]["weights"]
        return build_with_weights(lambda: script.imported().build_discriminator(args), weights)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where} does not hold the discriminator of its run: {one_line(error)}") from None
