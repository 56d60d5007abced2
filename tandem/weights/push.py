"""`convert.py push`: a model folder with its card, uploaded to the Hugging Face Hub."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .card import CARD, KINDS, PICTURE, model_card, newest_picture
from .load import load_model, resolve, write_model
from .origin import describe_origin, find_run, read_public_settings


def add_push(command: Callable[..., Callable[..., Any]], weights: dict[str, Any]) -> None:
    """Add the command push to convert.py. ``weights``: the options of its --weights."""
    add = command(push, "push", "Upload a model to the Hugging Face Hub, with a model card made from its run.",
                  ("RUN", "run folder, checkpoint or model folder"))  # fmt: skip
    add("name", metavar="USER/NAME", help="model on the Hub; created if it does not exist")
    add("--private", action="store_true", help="make it private")
    add("--branch", metavar="NAME", help="upload to this branch, which is created if it does not exist (default: main)")
    add("--message", default="Upload a model", metavar="TEXT", help="message of the commit")
    add("--no_picture", action="store_true", help="leave out the newest picture of the run, which may show the data")
    add("--dry_run", metavar="DIR", help="write what would be uploaded to DIR, and upload nothing; DIR can then be "
        "pushed in place of RUN, with an edited README.md")  # fmt: skip
    add("--weights", **weights)


def push(args: argparse.Namespace) -> None:
    """Write the model folder with its card, and upload it."""
    from . import hub

    repository, revision = hub.parse_name(args.name) or (None, None)
    if repository is None or revision is not None:
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
    """Write the files that `push` uploads: the model, its card, and the newest picture of its run."""
    from tandem import __version__
    from tandem.io.reading import LONGEST_JSON_BYTES, read_bytes
    from tandem.io.writing import write_atomically

    path = Path(args.path)
    kind, location = resolve(path)
    model = load_model(path, args.weights)
    name = type(model).__name__
    if name not in KINDS:
        raise ValueError(f"{path} holds a {name}, and a card is made for {', '.join(KINDS)}")
    write_model(model, path, folder)
    if kind == "model" and (location / CARD).is_file():  # written by --dry_run, and perhaps edited
        for file in (CARD, PICTURE):
            if (location / file).is_file():
                write_atomically(folder / file, read_bytes(location / file, LONGEST_JSON_BYTES))
        return
    run = find_run(location)
    picture = newest_picture(run) if run and not args.no_picture else None
    if picture:
        write_atomically(folder / PICTURE, read_bytes(picture, LONGEST_JSON_BYTES))
    settings = read_public_settings(run, KINDS[name]) if run else {}
    count = sum(parameter.numel() for parameter in model.parameters())
    weights = f"{count:,} parameters{describe_origin(location, kind, args.weights)}"
    card = model_card(args.name, name, weights, KINDS[name], run, settings, picture is not None, __version__)
    write_atomically(folder / CARD, card.encode())
