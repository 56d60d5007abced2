"""The start of a training script, with the model of its --init_from on any number of processes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem import distributed
from tandem.commands import parser_of
from tandem.config.parser import ArgumentParser
from tandem.training.run_folder.folder import resumed_config
from tandem.training.run_folder.starts import last_start
from tandem.weights.card import KINDS
from tandem.weights.load import DISCRIMINATOR, READ, as_named, find, load, load_discriminator, newest, tokenizer_file


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
