"""Parsers of the scripts, their start on any number of processes, and the model of --init_from."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem import distributed
from tandem.commands import script_parser
from tandem.config.autoencoder_training import DISCRIMINATOR
from tandem.config.converters import FOLDER, PRECISIONS, size, thread_count, worker_count
from tandem.config.parser import ArgumentParser
from tandem.training.run_folder.folder import read_config_to_resume
from tandem.training.run_folder.starts import last_start
from tandem.weights.card import KINDS
from tandem.weights.load import (
    assumptions_of,
    default_weights_path,
    discriminator_folder,
    load_discriminator,
    load_model,
    resolve,
    tokenizer_file,
    with_user_name,
)

if TYPE_CHECKING:
    from tandem.distributed import ProcessGroup


def training_parser(script: str, text: str, config: type) -> ArgumentParser:
    """The parser of a training script, with the flags of its configuration and of all backends."""
    parser = ArgumentParser(script, text, is_root=distributed.launched_as_root)
    parser.add_config(config)
    distributed.add_arguments(parser)
    scripts = sorted({kind.script for kind in KINDS.values()} - {script})
    parser.scripts_with = lambda names: [script for script in scripts if script_parser(script).has_flags(names)]
    return parser


def inference_parser(
    script: str, text: str, usage: str, config: type, *, batch_size: int, unit: str, num_workers_help: str,
    model_help: str = "",
) -> ArgumentParser:  # fmt: skip
    """The parser of a script that uses trained weights, with the flags of its configuration and of all backends.

    Args:
        usage: What the usage line shows before "[flags]".
        unit: Unit of a batch, such as "IMAGES".
        model_help: Help of --model; "" if the configuration has --model and --output.
    """
    parser = ArgumentParser(script, text, is_root=distributed.launched_as_root)
    parser.usage = f"%(prog)s {usage} [flags]"
    # fmt: off
    if model_help:
        add = parser.add_argument_group("from and to").add_argument
        add("--model", required=True, type=FOLDER, metavar="DIR", help=model_help)
        add("--output", "--output_dir", required=True, type=FOLDER, metavar="DIR",
            help="folder to write; if it is there and incomplete, it is continued")
        add("--fresh", action="store_true", help="start over; the old content is moved to DIR.old-N")
    parser.add_config(config)
    add = parser.add_argument_group("computation").add_argument
    add("--batch_size", type=size, default=batch_size, metavar=unit,
        help=f"{unit.lower()} per forward pass of a process")
    add("--precision", type=str.lower, choices=PRECISIONS, default="fp32",
        help="precision of the forward pass; tf32: fp32, but GPUs may round the factors of products to 10 bits of the "
        "mantissa")
    add("--num_workers", type=worker_count, default=2, metavar="N", help=num_workers_help)
    add("--cpu_threads", type=thread_count, default=1, metavar="N",
        help="threads of each process, on a CPU; starting more processes is faster than more threads")
    # fmt: on
    distributed.add_arguments(parser, trains=False)
    return parser


def start_inference(
    run: Callable[[argparse.Namespace, ProcessGroup], None], parser: ArgumentParser, argv: Sequence[str] | None
) -> None:
    """Parse the arguments of a script that uses trained weights, connect the processes, and call ``run(args,
    processes)``."""
    args = parser.parse(argv)

    def start(processes: ProcessGroup) -> None:
        require_same_flags(parser, args, processes)
        run(args, processes)

    distributed.launch_inference(start, parser, args)


def start_training(
    train: Callable[[Any, distributed.Backend], None], parser: ArgumentParser, argv: Sequence[str] | None,
    demo_config: Path,
) -> None:  # fmt: skip
    """Parse a script's arguments (`ArgumentParser.parse`), connect the processes (`distributed.launch`), fetch the
    model of --init_from and take its architecture where no flag sets another one, and call ``train(config, backend)``.
    ``config`` is an instance of the parser's dataclass. Its ``invocation.settings["init_from"]``, which config.yaml
    records, names the model, one of the Hub with its commit. A resumed run fetches no model: it keeps the architecture
    and the ``init_from`` of its config.yaml, and ``config.init_from`` is None."""

    def start(args: argparse.Namespace, settings: dict[str, Any], backend: distributed.Backend) -> None:
        processes, source = backend.processes, args.init_from
        require_same_flags(parser, args, processes)
        resumed = read_config_to_resume(args, processes)
        origin = fetch_model(source, processes) if resumed is None else resumed.get("init_from")
        if source:
            with processes.raise_on_all_ranks():
                if resumed is None:
                    lines = adopt_architecture(parser, args)
                else:
                    lines = restore_architecture(parser, args, resumed)
            for line in lines:
                processes.say(line)
            settings = parser.settings(args)
        if resumed is not None:
            args.init_from = None
            settings |= keep_tokenizer(args, resumed)
        train(parser.to_config(args, {**settings, "init_from": origin}, resumed), backend)

    distributed.launch(start, parser, parser.parse(argv, demo_config), last_start)


def require_same_flags(parser: ArgumentParser, args: argparse.Namespace, processes: ProcessGroup) -> None:
    """Raise UserMistake, in one line on every process, if a flag has another value on one of them than on rank 0: a
    user has edited the command on one machine, or a process of another job has connected to the port of this one.
    Collective."""
    settings: dict[str, Any] = json.loads(json.dumps(parser.settings_of_all(args), default=str))
    root_settings = processes.broadcast_object(settings)
    with processes.raise_on_all_ranks():
        for name, value in settings.items():
            if root_settings.get(name) != value:
                raise ValueError(
                    f"--{name} is {value} on rank {processes.rank} and {root_settings.get(name)} on rank 0: start all "
                    "processes with the same flags; two jobs on one machine need a MASTER_PORT each"
                )


def adopt_architecture(parser: ArgumentParser, args: argparse.Namespace) -> list[str]:
    """Give a run the architecture of the model of --init_from, where no flag sets another one.

    Returns:
        Lines for the user about the values that were taken.

    Raises:
        ValueError: one line, if there is no model, or its description, which is not trusted, is not valid.
    """
    source, model = args.init_from, describe_model(args.init_from)
    values: dict[str, Any] = {}
    if model["model"] in KINDS and KINDS[model["model"]].script == args.script:  # others are refused later
        try:
            values = parser.config.architecture_of(model, args)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{source} does not describe a {model['model']}: {error!r}") from None
    flags = parser.adopt(args, values, source)
    lines = [f"architecture of {source}: {' '.join(flags)}"] if flags else []
    if getattr(args, "init_discriminator", False):
        is_there = "discriminator_config" in model
        lines.append(f"discriminator: {f'that of {source}' if is_there else f'a new one, because {source} has none'}")
    return lines + ([f"assumed of {source}: {model['assumed']}"] if "assumed" in model else [])


def restore_architecture(parser: ArgumentParser, args: argparse.Namespace, resumed: Mapping[str, Any]) -> list[str]:
    """Give a resumed run the architecture that it took at its first start, where no flag sets another one (which is
    refused later).

    Args:
        resumed: The settings in config.yaml of the run.

    Returns:
        Lines for the user about the values that were taken.

    Raises:
        ValueError: one line, if config.yaml lacks a flag, or has a value that does not fit one.
    """
    run, origin = args.output_dir, resumed.get("init_from")
    try:
        first_args = argparse.Namespace(**{**vars(args), **resumed, "explicit": frozenset()})
        values = parser.config.architecture_of(resumed, first_args)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{run}/config.yaml does not describe the run: {error!r}; restore it") from None
    unset_values = {name: value for name, value in values.items() if name not in args.explicit}
    flags = parser.adopt(args, unset_values, f"{run}/config.yaml")
    lines = [f"architecture of {run}: {' '.join(flags)}"] if flags else []
    if str(origin).partition("@")[0] != args.init_from.partition("@")[0]:
        start_text = f"from {origin}" if origin else "without --init_from"
        lines.append(
            f"--init_from {args.init_from} is not read: the run in {run} began {start_text} and goes on from its "
            "checkpoint; give another --output_dir to start from that model"
        )
    return lines


def keep_tokenizer(args: argparse.Namespace, resumed: Mapping[str, Any]) -> dict[str, str]:
    """Let a resumed run read its tokenizer from the run folder, unless the user gives another one, because the original
    file may be gone. Returns the setting for config.yaml; {} for a script without a tokenizer."""
    from tandem.data.tokenizers import TOKENIZER_FILE

    name = resumed.get("tokenizer")
    if not isinstance(name, str) or ("tokenizer" in args.explicit and args.tokenizer != name):
        return {}
    file = Path(args.output_dir, TOKENIZER_FILE)
    args.tokenizer = str(file) if file.is_file() else name
    return {"tokenizer": name}


def describe_model(path: str | Path) -> dict[str, Any]:
    """The class, as "model", and the constructor arguments of the model at a user's ``path``, unchecked. Optional keys:
    "discriminator_config", the same of the discriminator that lies beside it; "tokenizer", a value for --tokenizer; and
    "assumed", a text about values that the file lacks.

    Raises:
        ValueError: one line, if there is no model.
    """
    from tandem.models.base import read_config
    from tandem.training.checkpoint.format import read_checkpoint
    from tandem.training.checkpoint.models import read_descriptions

    extras: dict[str, Any] = {}
    with with_user_name(path):
        kind, location = resolve(default_weights_path(Path(path)))
        if kind == "file":
            description = load_model(location, is_lazy=True).description()
            loaded = load_discriminator(location)
            discriminator = loaded and loaded.description()
            assumed = assumptions_of(location, description)
            extras = {"assumed": assumed} if assumed else {}
        elif kind == "checkpoint":
            models = read_descriptions(read_checkpoint(location, verify=False)[0], location)
            description, discriminator = next(iter(models.values())), models.get(DISCRIMINATOR)
        else:
            description = read_config(location)
            discriminator = read_config(folder) if (folder := discriminator_folder(location)) else None
        if "vocab_size" in description and kind != "file":
            extras = {"tokenizer": str(tokenizer_file(location) or "clip")}
        return {**description, **extras, **({"discriminator_config": discriminator} if discriminator else {})}


def fetch_model(name: str | None, processes: ProcessGroup) -> str | None:
    """Fetch the same commit of a model for all processes: the root asks the Hub for the commit, then one process of
    each machine downloads it, and the others find it in the cache. Where the root finds a local path of this name, no
    process asks the Hub. Collective.

    Returns:
        USER/NAME@COMMIT; the name itself if it is not that of a model on the Hub.

    Raises:
        UserMistake: the same line on every process, if one of them cannot have the model.
    """
    if name is None:
        return None
    from .weights import hub

    pinned_name, is_on_hub = name, False
    with processes.raise_on_all_ranks():
        if processes.is_root and (is_on_hub := hub.is_on_hub(name)):
            model, _ = hub.parse_name(name) or (name, None)
            processes.heartbeat("downloading the model", is_uninterrupted=True)
            pinned_name = f"{model}@{hub.snapshot_of(hub.download(name)).name}"
    pinned_name, is_on_hub = processes.broadcast_object([pinned_name, is_on_hub])
    if not is_on_hub:
        hub.set_folder(name, Path(name))
        return name
    for is_first in (True, False):
        with processes.raise_on_all_ranks():
            if (processes.local_rank == 0) == is_first:
                processes.heartbeat("downloading the model", is_uninterrupted=True)
                hub.set_folder(name, hub.download(pinned_name))
    return pinned_name
