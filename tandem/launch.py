"""The start of a training script, with the model of its --init_from on any number of processes; models of the Hugging
Face Hub, and `convert.py push`."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem import distributed
from tandem.commands import parser_of
from tandem.config.fields import itself
from tandem.config.parser import ArgumentParser
from tandem.training.run_folder.folder import resumed_config
from tandem.training.run_folder.starts import last_start, script_of
from tandem.weights.card import PICTURE, Kind, model_card, newest_picture, public_settings
from tandem.weights.load import (
    DISCRIMINATOR,
    READ,
    as_named,
    find,
    load,
    load_discriminator,
    newest,
    tokenizer_file,
    write_model,
)

CARD = "README.md"

_IMAGES, _VIDEOS = ("image_folder", "images"), ("video_folder", "videos")
KINDS = {
    "DiscreteVAE": Kind(
        "a discrete VAE like that of DALL-E (Ramesh et al. 2021), which turns an image into a grid of codes and back",
        "train_vae.py", _IMAGES, "tandem-encode --model {} --image_folder DIR --output codes/",
        ("tandem", "image-tokenizer", "discrete-vae"),
    ),
    "VQGAN": Kind(
        "a VQGAN (Esser et al. 2021), which turns an image into a grid of codes and back",
        "train_vqgan.py", _IMAGES, "tandem-encode --model {} --image_folder DIR --output codes/",
        ("tandem", "image-tokenizer", "vqgan"),
    ),
    "MuLaN": Kind(
        "a MuLan (Huang et al. 2022), which embeds sounds and texts in one space",
        "train_mulan.py", ("audio_data", "sounds with captions"), "tandem-embed --model {} --audio DIR --output index/",
        ("tandem", "audio-text", "contrastive", "mulan"),
    ),
    "VideoTokenizer": Kind(
        "a causal tokenizer of videos and images like that of MAGVIT-v2 (Yu et al. 2024)",
        "train_tokenizer.py", _VIDEOS, "tandem-encode --model {} --video_folder DIR --output codes/",
        ("tandem", "video-tokenizer", "magvit2"),
    ),
    "Decoder": Kind(
        "a cascade of diffusion models like the decoder of DALL-E 2 (Ramesh et al. 2022), which draws images",
        "train_decoder.py", _IMAGES, "tandem-sample --model {} --output pictures/",
        ("tandem", "diffusion", "dalle2-decoder"),
    ),
}  # fmt: skip


def training_parser(script: str, text: str, config: type) -> ArgumentParser:
    """The parser of a training script, with the flags of its configuration and of all backends."""
    parser = ArgumentParser(script, text, is_root=distributed.launched_as_root)
    parser.add_config(config)
    distributed.add_arguments(parser)
    others = sorted({kind.script for kind in KINDS.values()} - {script})
    parser.scripts_with = lambda names: [other for other in others if parser_of(other).knows(names)]
    return parser


def start_training(
    train: Callable[..., None], parser: ArgumentParser, argv: Sequence[str] | None, demonstration: Path
) -> None:
    """Parse a script's arguments, see `ArgumentParser.parse`, and call ``train(args, settings, backend)`` on connected
    processes, see `distributed.launch`, when every one has the model of --init_from, whose shape the run adopts where
    no flag says another one. The settings name the commit of a model of the Hub, so that config.yaml says what the run
    started from. A run that goes on from a checkpoint does not look for that model: it keeps its own shape and origin,
    and ``train`` is given no ``init_from``."""

    def start(args: argparse.Namespace, settings: dict[str, Any], backend: Any) -> None:
        resumed, asked = resumed_config(args, backend), args.init_from
        origin = fetch(asked, backend) if resumed is None else resumed.get("init_from")
        if asked:
            with backend.agreement():
                news = adopt(parser, args) if resumed is None else adopt_again(parser, args, resumed)
            for line in news:
                backend.say(line)
            settings = parser.settings(args)
        if resumed is not None:
            args.init_from, args.resumed = None, resumed
            settings |= keep_tokenizer(args, resumed)
        train(args, {**settings, "init_from": origin}, backend)

    try:
        distributed.launch(start, parser, parser.parse(argv, demonstration), last_start)
    finally:
        READ.clear()


def adopt(parser: ArgumentParser, args: argparse.Namespace) -> list[str]:
    """Give a run the shape of the model of --init_from, where no flag says another one.

    Returns:
        What is to be said about it, in lines.

    Raises:
        ValueError: one line, if there is no model, or what describes it, which may be a stranger's, does not.
    """
    said, model = args.init_from, describe(args.init_from)
    shape: dict[str, Any] = {}
    if model["model"] in KINDS and KINDS[model["model"]].script == args.script:  # others are refused later
        try:
            shape = parser.config.shape_of(model, args)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{said} does not describe a {model['model']}: {error!r}") from None
    adopted = parser.adopt(args, shape, said)
    news = [f"as {said} has it: {' '.join(adopted)}"] if adopted else []
    return news + ([f"assumed of {said}, which does not say it: {model['assumed']}"] if "assumed" in model else [])


def adopt_again(parser: ArgumentParser, args: argparse.Namespace, resumed: Mapping[str, Any]) -> list[str]:
    """Give a run that goes on the shape that it adopted when it began, where no flag says another one, which is refused
    later.

    Args:
        resumed: What config.yaml of the run says.

    Returns:
        What is to be said about it, in lines.

    Raises:
        ValueError: one line, if config.yaml lacks a flag, or has a value that does not fit one.
    """
    run, origin = args.output_dir, resumed.get("init_from")
    try:
        began = argparse.Namespace(**{**vars(args), **resumed, "explicit": frozenset()})
        shape = parser.config.shape_of(resumed, began)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{run}/config.yaml does not describe the run: {error!r}; restore it") from None
    unsaid = {name: value for name, value in shape.items() if name not in args.explicit}
    adopted = parser.adopt(args, unsaid, f"{run}/config.yaml")
    news = [f"as {run} has it: {' '.join(adopted)}"] if adopted else []
    if str(origin).partition("@")[0] != args.init_from.partition("@")[0]:
        began_from = f"from {origin}" if origin else "without --init_from"
        news.append(
            f"--init_from {args.init_from} is not read: the run in {run} began {began_from} and goes on from its "
            "checkpoint; give another --output_dir to start from that model"
        )
    return news


def keep_tokenizer(args: argparse.Namespace, resumed: Mapping[str, Any]) -> dict[str, str]:
    """Let a run that goes on read its tokenizer from the run folder, unless the user says another one: the file that it
    began with may be gone. Returns what config.yaml says of it; nothing for a script without a tokenizer."""
    from tandem.data.tokenizers import FILE

    name = resumed.get("tokenizer")
    if not isinstance(name, str) or ("tokenizer" in args.explicit and args.tokenizer != name):
        return {}
    own = Path(args.output_dir, FILE)
    args.tokenizer = str(own) if own.is_file() else name
    return {"tokenizer": name}


def describe(path: str | Path) -> dict[str, Any]:
    """The class, as "model", and the constructor arguments of the model that a user calls ``path``, unchecked. Besides,
    where there are some: those of its "discriminator", from which a run can start, its "tokenizer", as --tokenizer
    takes it, and what is "assumed" of a file that does not say it, in words.

    Raises:
        ValueError: one line, if there is no model.
    """
    from tandem.models.base import read_config
    from tandem.training.checkpoint.format import read_checkpoint
    from tandem.training.checkpoint.models import models_in

    with as_named(path):
        kind, where = find(newest(Path(path)))
        if kind == "file":
            from tandem.weights.formats.detection import format_of

            model, discriminator = load(where), load_discriminator(where, of_runs=False)
            READ.update({(where, "best"): model, (where, DISCRIMINATOR): discriminator})
            found, others = model.description(), {"discriminator": discriminator.config} if discriminator else {}
            assumed = format_of(where).assumed
            return {**found, **others, **({"assumed": assumed(found)} if assumed else {})}
        if kind == "checkpoint":
            found = next(iter(models_in(read_checkpoint(where, verify=False)[0], where).values()))
        else:
            name, arguments = read_config(where)
            found = {"model": name, **arguments}
        return {**found, "tokenizer": str(tokenizer_file(where) or "clip")} if "vocab_size" in found else found


def fetch(name: str | None, backend: Any) -> str | None:
    """Let all processes have the same commit of a model: the root asks the Hub which it is, then one process of each
    machine downloads it, and the others find it in the cache. Where the root finds a local path of this name, no
    process asks the Hub. Collective.

    Returns:
        USER/NAME@COMMIT; the name as it is if it means no model on the Hub.

    Raises:
        UserMistake: the same line on every process, if one of them cannot have the model.
    """
    if name is None:
        return None
    from .weights import hub

    pinned, is_on_hub = name, False
    with backend.agreement():
        if backend.is_root and (is_on_hub := hub.is_on_hub(name)):
            model, _ = hub.split(name) or (name, None)
            backend.working("downloading the model")
            pinned = f"{model}@{hub.download(name).name}"
    pinned, is_on_hub = backend.broadcast_object([pinned, is_on_hub])
    if not is_on_hub:
        hub.use(name, Path(name))
        return name
    for is_first in (True, False):
        with backend.agreement():
            if (backend.local_rank == 0) == is_first:
                backend.working("downloading the model")
                hub.use(name, hub.download(pinned))
    return pinned


def add_push(command: Callable[..., Callable[..., Any]], weights: dict[str, Any]) -> None:
    """Add the command push to convert.py's; ``weights``: its --weights."""
    add = command(push, "push", "Upload a model to the Hugging Face Hub, with a model card made from its run.",
                  ("RUN", "run folder, checkpoint or model folder"))  # fmt: skip
    add("name", metavar="USER/NAME", help="model on the Hub; made if it does not exist")
    add("--private", action="store_true", help="make it private")
    add("--branch", metavar="NAME", help="upload to this branch, which is made if it does not exist (default: main)")
    add("--message", default="Upload a model", metavar="TEXT", help="of the commit")
    add("--no_picture", action="store_true", help="leave out the newest picture of the run, which may show the data")
    add("--dry_run", metavar="DIR", help="write the folder that would be uploaded to DIR, and upload nothing; a folder "
        "whose README.md was edited can be pushed in place of RUN")  # fmt: skip
    add("--weights", **weights)


def push(args: argparse.Namespace) -> None:
    """Write the model folder with its card, and upload it."""
    from .weights import hub

    model, revision = hub.split(args.name) or (None, None)
    if model is None or revision is not None:
        raise ValueError(f"{args.name} is no USER/NAME of the Hub; a branch is named by --branch")
    with tempfile.TemporaryDirectory(prefix="push-") as temporary:
        folder = Path(args.dry_run or f"{temporary}/model")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} exists already; give --dry_run another name")
        write_upload(args, folder)
        if args.dry_run:
            print(f"wrote {folder}; nothing was uploaded")
        else:
            address = hub.upload(folder, args.name, args.message, is_private=args.private, branch=args.branch)
            print(f"uploaded {args.path}: {address}")


def write_upload(args: argparse.Namespace, folder: Path) -> None:
    """Write what `push` uploads: the model, its card, and the newest picture of its run."""
    from tandem.io.reading import LONGEST_JSON_BYTES, read_bytes
    from tandem.io.writing import write_atomically

    from . import __version__

    path = Path(args.path)
    kind, where = find(path)
    model = load(path, args.weights)
    name = type(model).__name__
    if name not in KINDS:
        raise ValueError(f"{path} holds a {name}, and a card is made for {', '.join(KINDS)}")
    write_model(model, path, folder)
    if kind == "model" and (where / CARD).is_file():  # written by --dry_run, and perhaps edited
        for file in (CARD, PICTURE):
            if (where / file).is_file():
                write_atomically(folder / file, read_bytes(where / file, LONGEST_JSON_BYTES))
        return
    run = run_of(where)
    picture = newest_picture(run) if run and not args.no_picture else None
    if picture:
        write_atomically(folder / PICTURE, read_bytes(picture, LONGEST_JSON_BYTES))
    settings = settings_of(run, KINDS[name]) if run else {}
    weights = f"{sum(p.numel() for p in model.parameters()):,} parameters{origin_of(where, kind, args.weights)}"
    card = model_card(args.name, name, weights, KINDS[name], run, settings, picture is not None, __version__)
    write_atomically(folder / CARD, card.encode())


def origin_of(where: Path, kind: str, which: str) -> str:
    """Of which update weights are, and whether they are an average, as the end of a sentence; "" if it is not known."""
    from tandem.io.reading import read_json_or_empty
    from tandem.training.checkpoint.format import read_checkpoint

    if kind == "checkpoint":
        is_average = which != "online" and bool(read_checkpoint(where, verify=False)[0].get("ema"))
        what, number = "the moving average" if is_average else "as trained", where.name.removeprefix("step_")
        return f", {what} after update {int(number):,}" if number.isdecimal() else f", {what}"
    step = read_json_or_empty(where / "training.json").get("step")
    return f", after update {step:,}" if type(step) is int else ""


def run_of(where: Path) -> Path | None:
    """The run folder of a checkpoint or of a run's model; None if it is in none."""
    path = where.absolute()
    return next((folder for folder in path.parents[:2] if script_of(folder)), None)


def arguments_of(run: Path) -> argparse.Namespace:
    """The arguments of a run, as its config.yaml has them, at their defaults where that does not say them; besides,
    its `script` and `data_flag`. Raises ValueError, in one line, if this is no run folder, or it cannot be read."""
    from tandem.io.reading import read_yaml

    name = script_of(run)
    try:
        config = read_yaml(run / "config.yaml") if name else None
    except OSError:
        config = None
    if name is None or not isinstance(config, dict) or name not in {kind.script for kind in KINDS.values()}:
        raise ValueError(f"{run} is no run folder: expected its config.yaml and starts.jsonl")
    parser = parser_of(name)
    arguments = vars(parser.with_values(_known(config, parser)))
    return argparse.Namespace(**arguments, script=name, data_flag=parser.data_flag)


def _known(config: dict[str, Any], parser: ArgumentParser) -> dict[str, Any]:
    """What of a run's config.yaml the script knows."""
    return {name: config[name] for name in parser.settings(parser.with_values({})) if name in config}


def settings_of(run: Path, kind: Kind) -> dict[str, Any]:
    """What may be shown of a run's configuration, as far as the script knows it; nothing if that cannot be read."""
    from tandem.io.reading import read_yaml

    with contextlib.suppress(OSError, ValueError):
        if isinstance(config := read_yaml(run / "config.yaml"), dict):
            parser = parser_of(kind.script)
            known = _known(config, parser)
            settings = public_settings(parser, known, [name for name, part in parser.lasting.items() if part is itself])
            if config.get("dataset"):  # the flag of the other data is at its default then, which may be a demonstration
                settings.pop(kind.data[0], None)
            return settings
    return {}
