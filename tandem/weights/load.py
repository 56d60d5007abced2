"""Loading trained models from a run folder, a checkpoint, a model folder, a .pt file or a name on the Hugging Face
Hub."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from tandem.config.autoencoder_training import DISCRIMINATOR, discriminator_training
from tandem.config.models.autoencoders import discriminator_flags
from tandem.io.reading import read_bytes, read_json_or_empty
from tandem.io.writing import delete, write_atomically
from tandem.sides import height_and_width
from tandem.training.checkpoint.listing import step_of
from tandem.training.run_folder.starts import script_of

# Importing PyTorch takes seconds, so functions import it, and modules that need it, after arguments are checked.


def resolve(path: Path) -> tuple[str, Path]:
    """The kind of ``path`` ("file", "checkpoint" or "model") and its path; for a run folder, its newest checkpoint, and
    for the name of a model on the Hugging Face Hub, its folder in the cache."""
    from tandem.io.weights import why_no_model
    from tandem.models.base import CONFIG_FILE
    from tandem.training.checkpoint.listing import latest_checkpoint
    from tandem.weights.formats.diffusers import diffusers_folder

    from .hub import local_path

    path = local_path(path)
    if folder := diffusers_folder(path):
        return "file", folder
    for file, kind in ((path, "file"), (path / "state.json", "checkpoint"), (path / CONFIG_FILE, "model")):
        if file.is_file():
            return kind, path
    if latest := latest_checkpoint(path / "checkpoints"):
        return "checkpoint", latest
    if (path / "model" / CONFIG_FILE).is_file():  # the checkpoints were deleted
        return "model", path / "model"
    reason = why_no_model(path) if path.is_dir() else "" if path.exists() else "it does not exist; "
    raise ValueError(f"{path}: {reason}expected a run folder with a checkpoint, a checkpoint, a model folder or a .pt")


def load_model(path: str | Path, weights: str = "best", *, is_lazy: bool = False) -> Any:
    """The model at ``path``, which may be of any kind that `resolve` finds, on the CPU and in eval mode.

    Args:
        weights: Those of a checkpoint or a public file: "ema" (their moving average), "online" (as trained), or "best",
            which means the average if there is one.
        is_lazy: Allocate no memory for the model, which may then only be described or copied from
            (`build_with_weights`).

    Raises:
        ValueError: one line, if there is no model.
    """
    from tandem.io.published import refuse_weights_flag
    from tandem.models.base import build, read_config, read_weights
    from tandem.training.checkpoint.models import read_model
    from tandem.weights.formats.detection import detect_format

    kind, location = resolve(Path(path))
    if kind == "file":
        return detect_format(location).load(location, weights, is_lazy)
    if kind == "checkpoint":
        return build(*read_model(location, weights), location, is_lazy)
    refuse_weights_flag(location, weights)
    return build(read_config(location), read_weights(location), location, is_lazy)


def load_pretrained(cls: Any, source: str | Path, filename: str | None, **options: Any) -> Any:
    """`Pretrained.from_pretrained`; ``options``: of `hub.download`."""
    from tandem.weights.formats.diffusers import diffusers_folder

    from . import hub

    folder, location = Path(source), Path(source) / (filename or "")
    if hub.is_on_hub(str(source)):
        location = hub.download(str(source), filename, **options)
        folder = hub.snapshot_of(location)
    elif options.get("revision"):
        raise ValueError(f"{source} is a path of this machine, and has no revision {options['revision']}")
    with with_user_name(source, folder):
        if not (location.is_file() or diffusers_folder(location)):
            return cls.from_folder(location)
        model = load_model(location)
    _check_class(model, source, cls.__name__)
    return model


@contextmanager
def with_user_name(path: str | Path, folder: Path | None = None) -> Iterator[None]:
    """A context in whose errors the name of a model on the Hub replaces its folder in the cache."""
    from .hub import local_path

    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace(str(folder or local_path(Path(path))), str(path))) from None


class Trained(NamedTuple):
    """A trained model with its identity and its tokenizer.

    model: In eval mode, on the CPU.
    identity: "config", which holds its class as "model" and its constructor arguments, and "weights_sha256",
        the checksum of its files of weights, or of the file that save_pretrained would write.
    tokenizer: The file of its tokenizer; None for a model without a tokenizer, or with that of CLIP.
    assumed: A line about arguments that the file of a public package lacks, with their values; "" if it lacks none.
    """

    model: Any
    identity: dict[str, Any]
    tokenizer: Path | None
    assumed: str


def open_model(path: str | Path, *class_names: str) -> Trained:
    """The model at a path that a user gives: a model folder, a run folder or a checkpoint of one, or a public package's
    file. Of a run folder, `default_weights_path` is read.

    Args:
        class_names: Names of the accepted classes; none: any class.

    Raises:
        ValueError: one line, if there is no model, or it is of another kind.
    """
    from tandem.data.stores.output import sha256_of
    from tandem.models.base import read_headers

    source = default_weights_path(Path(path))
    model = load_user_model(path, *class_names)
    kind, location = resolve(source)
    is_folder = kind == "model"
    digest = sha256_of(location / name for name in sorted(read_headers(location))) if is_folder else model.sha256()
    identity = {"config": model.description(), "weights_sha256": digest}
    text = assumptions_of(location, identity["config"]) if kind == "file" else ""
    return Trained(model.eval(), identity, tokenizer_file(source), f"assumed of {path}: {text}" if text else "")


def assumptions_of(file: Path, description: Mapping[str, Any]) -> str:
    """A text about the arguments of a model that the file of a public package lacks; "" if it lacks none."""
    from .formats.detection import detect_format

    assumptions = detect_format(file).assumptions
    return assumptions(description) if assumptions else ""


def load_user_model(path: str | Path, *class_names: str, is_lazy: bool = False) -> Any:
    """The model of `open_model`, with its errors; ``is_lazy`` as in `load_model`."""
    with with_user_name(path):
        model = load_model(default_weights_path(Path(path)), is_lazy=is_lazy)
    _check_class(model, path, *class_names)
    return model


def _check_class(model: Any, path: str | Path, *class_names: str) -> None:
    from .card import KINDS

    if class_names and (class_name := type(model).__name__) not in class_names:
        origin = f" of {KINDS[class_name].script}" if class_name in KINDS else ""
        raise ValueError(f"{path} holds a {class_name}{origin}, not a {' or a '.join(class_names)}")


def init_model(
    cls: Any, args: Any, copy_weights: Callable[[Any, Any, str], None] | None = None, config: Any = None
) -> Any:
    """The model of this class that the arguments of a run describe. Its weights are those of --init_from, copied by
    `copy_weights` (default: ``cls.load_weights_from``); without --init_from they are random by --seed, the same on
    every process. ``config``: the model's configuration, if it depends on more than the arguments."""
    import torch

    from tandem.models import build_in_memory

    torch.manual_seed(args.seed)
    model = build_in_memory(cls, **(config or cls.Config.from_args(args)).to_dict())
    if args.init_from:
        source = load_user_model(args.init_from, cls.__name__, is_lazy=True)
        (copy_weights or cls.load_weights_from)(model, source, args.init_from)
    return model


def default_weights_path(path: Path) -> Path:
    """The path itself; but for a run folder its model/, if that is as new as the newest checkpoint, else for a run of
    train_mulan.py its best/, if there is one."""
    from tandem.models.base import CONFIG_FILE

    kind, location = resolve(path)
    if kind != "checkpoint":
        return path
    model, best = path / "model", path / "best"
    step = read_json_or_empty(model / "training.json").get("step")
    if isinstance(step, int) and location.name == f"step_{step:08d}" and (model / CONFIG_FILE).is_file():
        return model
    return best if script_of(path) == "train_mulan.py" and (best / CONFIG_FILE).is_file() else path


def write_model(model: Any, source: Path, folder: Path, *, with_discriminator: bool = True) -> None:
    """Write a model folder of a model that came from ``source``: with its tokenizer's file and its discriminator, if it
    has them.

    Raises:
        ValueError: one line, if the tokenizer cannot be found.
        OSError: one line, if the folder could not be written.
    """
    from tandem.data.tokenizers import TOKENIZER_FILE

    file = tokenizer_file(source)
    folder.mkdir(parents=True, exist_ok=True)
    if file is not None:
        write_atomically(folder / TOKENIZER_FILE, read_bytes(file))
    else:
        (folder / TOKENIZER_FILE).unlink(missing_ok=True)  # of an earlier model
    discriminator = load_discriminator(source) if with_discriminator else None
    if discriminator is not None:
        discriminator.save_pretrained(folder / DISCRIMINATOR, training=_discriminator_training(source))
    elif (old_folder := discriminator_folder(folder)) is not None:  # of an earlier model
        delete(old_folder)
    model.save_pretrained(folder)


def tokenizer_file(path: Path) -> Path | None:
    """The tokenizer.json that belongs to the MuLaN at ``path``; None for the tokenizer of CLIP, which has no file, for
    a model without texts, and for a public package's file, which does not name its tokenizer. Raises ValueError, in one
    line, if a checkpoint's tokenizer is gone."""
    from tandem.data.tokenizers import TOKENIZER_FILE, sha256_of_tokenizer
    from tandem.training.checkpoint.format import read_checkpoint

    kind, location = resolve(path)
    if kind != "checkpoint":
        return location / TOKENIZER_FILE if kind == "model" and (location / TOKENIZER_FILE).exists() else None
    run = Path(os.path.abspath(location)).parent.parent
    tokenizer = read_checkpoint(location, verify=False)[0].get("tokenizer", {})
    name, digest = str(tokenizer.get("name")), tokenizer.get("sha256")
    if digest in (None, sha256_of_tokenizer(name, b"")):  # no tokenizer, or one without a file
        return None
    for file in (Path(name).expanduser(), *(folder / TOKENIZER_FILE for folder in (run, run / "model", run / "best"))):
        if file.is_file() and sha256_of_tokenizer(name, read_bytes(file)) == digest:
            return file
    raise ValueError(f"{location}: the tokenizer {name} of the run is gone or has changed, and the model needs it")


def discriminator_folder(model_folder: Path) -> Path | None:
    """The folder of the discriminator in a model folder; None if there is none."""
    from tandem.models.base import CONFIG_FILE

    folder = model_folder / DISCRIMINATOR
    return folder if (folder / CONFIG_FILE).is_file() else None


def _discriminator_training(source: Path) -> dict[str, Any]:
    """`discriminator_training` of the discriminator at ``source``."""
    from tandem.models.base import CONFIG_FILE

    from .origin import find_run, read_run_arguments

    kind, location = resolve(source)
    if kind == "checkpoint" and (run := find_run(location)):
        with suppress(OSError, ValueError):  # somebody has changed the names or the config.yaml
            return discriminator_training(read_run_arguments(run), step_of(location))
    config = read_json_or_empty(location / DISCRIMINATOR / CONFIG_FILE) if kind == "model" else {}
    return config.get("training") or {"weights": "online"}


def load_discriminator(path: Path) -> Any:
    """The discriminator of the model at ``path``, as trained: in a checkpoint, a model folder or a public package's
    file; None if there is none.

    Raises:
        ValueError: one line, if it is damaged or of another model.
    """
    from tandem.models.base import build, read_config, read_weights
    from tandem.training.checkpoint.format import read_checkpoint
    from tandem.training.checkpoint.models import read_descriptions, read_model
    from tandem.weights.formats.detection import detect_format

    kind, location = resolve(path)
    if kind == "file":
        return detect_format(location).load_discriminator(location)
    if kind == "model":
        folder = discriminator_folder(location)
        return build(read_config(folder), read_weights(folder), folder) if folder else None
    if DISCRIMINATOR not in read_descriptions(read_checkpoint(location, verify=False)[0], location):
        return None
    return build(*read_model(location, name=DISCRIMINATOR), location)


def init_discriminator(model_class: Any, args: Any, **more: Any) -> Any:
    """The discriminator of this class that the arguments of a run, and `more` constructor arguments, describe. Its
    weights are those of --init_from if that has a discriminator and the run goes on with it, else random by --seed, the
    same on every process."""
    import torch

    from tandem.models import build_in_memory

    torch.manual_seed(args.seed)
    sizes = {"dim": args.discr_dim, "layers": args.discr_layers, "channels": args.channels}
    discriminator = build_in_memory(model_class, **sizes, **more)
    if args.init_from and args.init_discriminator:
        with with_user_name(args.init_from):
            pretrained = load_discriminator(default_weights_path(Path(args.init_from)))
        if pretrained and pretrained.description() != discriminator.description():
            values = discriminator_flags(pretrained.description())
            flags = " ".join(f"--{name} {value}" for name, value in values.items())
            raise ValueError(
                f"the discriminator of {args.init_from} needs {flags}; to begin with a new one: --no-init_discriminator"
            )
        if pretrained:
            discriminator.load_state_dict(pretrained.state_dict())
    discriminator.check_side(min(height_and_width(args.image_size)))
    return discriminator


def load_vision(name: str | None, device: Any, heartbeat: Callable[[], None] = lambda: None) -> Any:
    """The `VisionFeatures` of --align_with: a folder of transformers, or the name of a model of the Hugging Face Hub,
    USER/NAME or USER/NAME@REVISION, whose files are fetched unless its cache holds them; None without the flag.

    Args:
        heartbeat: Called while files are fetched.

    Raises:
        ValueError: as `read_vision`; or the files cannot be fetched.
    """
    if name is None:
        return None
    from tandem.io.fetching import fetch_from_hub
    from tandem.weights import hub
    from tandem.weights.formats.towers import VISION_FILES, import_vision_library, read_vision

    import_vision_library()  # fails before files are fetched
    folder = Path(name).expanduser()
    if (parsed := hub.parse_name(name)) and hub.is_on_hub(name):
        model, revision = parsed
        for file in VISION_FILES:
            folder = fetch_from_hub(f"{file} of --align_with {name}", model, file, heartbeat, revision=revision).parent
    return read_vision(folder).to(device)
