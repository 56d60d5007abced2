"""`convert.py push` and `push_to_hub`: upload a model folder with its card to the Hugging Face Hub."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from tandem.config.autoencoder_training import DISCRIMINATOR

from .card import CARD, KINDS, PICTURE, model_card, newest_picture
from .load import discriminator_folder, load_model, resolve, write_model
from .origin import describe_origin, find_run, read_public_settings


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
            address = hub.upload(folder, args.name, args.message, private=args.private or None, branch=args.branch)
            print(f"uploaded {args.path}: {address}")


def write_upload(args: argparse.Namespace, folder: Path) -> None:
    """Write the files that `push` uploads: the model, its card, and the newest picture of its run."""
    from tandem import __version__
    from tandem.io.reading import LONGEST_FILE_BYTES, read_bytes
    from tandem.io.writing import write_atomically

    path = Path(args.path)
    kind, location = resolve(path)
    model = load_model(path, args.weights)
    name = type(model).__name__
    if name not in KINDS:
        raise ValueError(f"{path} holds a {name}, and a card is made for {', '.join(KINDS)}")
    if args.no_discriminator and kind == "model" and (location / CARD).is_file() and discriminator_folder(location):
        raise ValueError(
            f"--no_discriminator: delete {location / DISCRIMINATOR}, and what {location / CARD} says of it"
        )
    write_model(model, path, folder, with_discriminator=not args.no_discriminator)
    if kind == "model" and (location / CARD).is_file():  # written by --dry_run, and perhaps edited
        for file in (CARD, PICTURE):
            if (location / file).is_file():
                write_atomically(folder / file, read_bytes(location / file, LONGEST_FILE_BYTES))
        return
    run = find_run(location)
    picture = newest_picture(run) if run and not args.no_picture else None
    if picture:
        write_atomically(folder / PICTURE, read_bytes(picture, LONGEST_FILE_BYTES))
    settings = read_public_settings(run, KINDS[name]) if run else {}
    weights = f"{_count(model)} parameters{describe_origin(location, kind, args.weights)}"
    card = model_card(
        args.name, name, weights, KINDS[name], run, settings, has_picture=picture is not None,
        has_discriminator=discriminator_folder(folder) is not None, version=__version__,
    )  # fmt: skip
    write_atomically(folder / CARD, card.encode())


def push_model(model: Any, name: str, message: str, **options: Any) -> str:
    """`Pretrained.push_to_hub`. Without its run, the card says only what the model is and how it is used. A card, a
    tokenizer and a discriminator that the repository has stay: the model in memory has none."""
    from tandem import __version__
    from tandem.data.tokenizers import TOKENIZER_FILE

    from . import hub

    class_name = type(model).__name__
    with tempfile.TemporaryDirectory(prefix="push-") as temporary:
        folder = Path(temporary)
        model.save_pretrained(folder)
        if class_name in KINDS:
            weights = f"{_count(model)} parameters"
            card = model_card(
                name, class_name, weights, KINDS[class_name], None, {}, has_picture=False, has_discriminator=False,
                version=__version__,
            )  # fmt: skip
            (folder / CARD).write_text(card)
        return hub.upload(folder, name, message, protected=(CARD, TOKENIZER_FILE, f"{DISCRIMINATOR}/*"), **options)


def _count(model: Any) -> str:
    return f"{sum(parameter.numel() for parameter in model.parameters()):,}"
