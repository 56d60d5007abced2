"""Model folders: weights in safetensors, constructor arguments in config.json."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor, nn

from tandem.config.fields import ModelConfig
from tandem.io.installed import command_of
from tandem.io.reading import READ_ERRORS, check_inside, one_line, read_json
from tandem.io.renamed import rename_settings, rename_weights, without_unmeasured_statistics
from tandem.io.weights import check_weights_file, on_cpu, replacing_model_file

from .building import build_on_meta, build_with_weights, check_arguments

CONFIG_FILE = "config.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"

_READ_ERRORS: tuple[type[Exception], ...] = (*READ_ERRORS, RuntimeError, SafetensorError)

# Attributes that config.json states for people and other programs, beside the constructor arguments, and "training".
# `read_config` drops them; older files lack them.
_EXTRAS = ("num_codes", "latents_mean", "latents_std")
_IGNORED = (*_EXTRAS, "training")

# Dtype in safetensors' notation (F32, BF16, I64, ...) and shape of tensors by name.
Headers = dict[str, tuple[str, tuple[int, ...]]]

Self = TypeVar("Self", bound="Pretrained")


class Pretrained(nn.Module):
    """A model that can be saved to a folder and built from one."""

    Config: ClassVar[type[ModelConfig]]
    """The dataclass that the constructor takes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._arguments: dict[str, Any] = config.to_dict()

    @property
    def config(self) -> dict[str, Any]:
        """The fields of the configuration by name, of JSON's types."""
        return self._arguments

    @classmethod
    def from_dict(cls: type[Self], arguments: Mapping[str, Any]) -> Self:
        """The model of this `config`. Raises TypeError for an unknown name, and what the constructor raises."""
        return cls(cls.Config(**arguments))

    def save_pretrained(self, folder: str | Path, training: Mapping[str, Any] | None = None) -> None:
        """Write model.safetensors, then the config.json that makes the folder loadable; each file atomically.

        Args:
            training: How the weights were trained, of JSON's types: "training" in config.json.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with replacing_model_file(folder / _WEIGHTS) as path:
            save_file(self._saved_weights(), path)
        with replacing_model_file(folder / CONFIG_FILE) as path:
            values = {name: getattr(self, name, None) for name in _EXTRAS if name not in self.config}
            extra = {name: value for name, value in values.items() if value is not None}
            extra |= {"training": training} if training else {}
            path.write_text(json.dumps({"model": type(self).__name__, **extra, **self.saved_config()}, indent=2) + "\n")

    def saved_config(self) -> dict[str, Any]:
        """Constructor arguments of this model in its present state: `config`, and what was measured in training."""
        return self.config

    def description(self) -> dict[str, Any]:
        """The class, as "model", and the constructor arguments, as they are read back from config.json."""
        return {"model": type(self).__name__, **json.loads(json.dumps(self.saved_config()))}

    def sha256(self) -> str:
        """The checksum of the file of weights that `save_pretrained` would write."""
        return hashlib.sha256(save(self._saved_weights())).hexdigest()

    def _saved_weights(self) -> dict[str, Tensor]:
        return without_unmeasured_statistics(on_cpu(self.state_dict()))

    def push_to_hub(
        self, repo_id: str, *, commit_message: str = "Upload a model", private: bool | None = None,
        token: str | bool | None = None, branch: str | None = None, create_pr: bool | None = None, **patterns: Any,
    ) -> str:  # fmt: skip
        """Upload the model folder to the Hugging Face Hub in one commit, with a card unless the repository has one. A
        tokenizer and a discriminator that are there stay. The arguments are those of huggingface_hub's
        ``PyTorchModelHubMixin.push_to_hub``, without config, which is always the model's, and model_card_kwargs.

        Args:
            repo_id: USER/NAME; created if it does not exist.
            private: Make it private; one that exists and is public is refused. None: as the account has it.
            token: None: that of HF_TOKEN or of the login.
            branch: To commit to; made if it does not exist. None: main.
            create_pr: Make a pull request of the commit.
            patterns: allow_patterns, ignore_patterns, delete_patterns: a pattern of names of files, or several.

        Returns:
            The address of the commit, or of the pull request.

        Raises:
            ValueError: one line, if it failed.
        """
        options = {"private": private, "token": token, "branch": branch, "create_pr": create_pr, **patterns}
        return str(_weights_module("push").push_model(self, repo_id, commit_message, **options))

    @classmethod
    def from_pretrained(
        cls: type[Self], source: str | Path, filename: str | None = None, *, revision: str | None = None, **options: Any
    ) -> Self:
        """The model in a folder that ``save_pretrained`` wrote, or in a folder or a file of another package
        (docs/formats.md), in eval mode.

        Args:
            source: A path or, without one, USER/NAME or USER/NAME@REVISION of the Hugging Face Hub.
            filename: The file of weights in the folder or the repository, if it is of another package and not the only
                one.
            revision: A branch, a tag or a commit on the Hub.
            options: token, cache_dir, force_download, local_files_only, as for ``huggingface_hub.hf_hub_download``. The
                environment variables of huggingface_hub hold, too.

        Raises:
            ValueError: one line, if a file is missing, damaged, hostile or of another model, or the Hub lacks it.
        """
        model: Self = _weights_module("load").load_pretrained(cls, source, filename, revision=revision, **options)
        return model

    @classmethod
    def from_folder(cls: type[Self], folder: Path) -> Self:
        """The model that ``save_pretrained`` wrote, in eval mode. The weights may be in several files with an index.

        Raises:
            ValueError: one line, if a file is missing, damaged, hostile or of another model.
        """
        config = read_config(folder)
        if (class_name := config.pop("model")) != cls.__name__:
            raise ValueError(f"{folder} holds a {class_name}, not a {cls.__name__}")
        return cls.from_weights(folder, config, read_weights(folder))

    def load_weights_from(self, source: str | Path | Pretrained, name: str = "the other model") -> None:
        """Copy the weights of a ``save_pretrained`` folder, or of another model of this class, which errors call
        ``name``.

        Raises:
            ValueError: one line, naming the arguments in which the two models differ.
        """
        if not isinstance(source, Pretrained):
            source, name = self.from_pretrained(source), str(source)
        assert isinstance(source, type(self)), type(source)
        ours, theirs = self._architecture(), source._architecture()
        if differences := [f"{key} {theirs[key]}" for key in ours if key in theirs and theirs[key] != ours[key]]:
            raise ValueError(f"the weights in {name} are of another model; they need {', '.join(differences)}")
        self.load_state_dict(source.state_dict())

    def _architecture(self) -> dict[str, Any]:
        """The constructor arguments on which the weights depend."""
        ignored = self.Config.without_effect_on_weights() | self.Config.unused(SimpleNamespace(**self.config))
        return {name: value for name, value in self.config.items() if name not in ignored}

    @classmethod
    def from_weights(
        cls: type[Self], source: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], is_lazy: bool = False
    ) -> Self:
        """The model of untrusted constructor arguments and weights, in eval mode.

        Args:
            is_lazy: See `build_with_weights`.

        Raises:
            ValueError: one line that names ``source``, if they do not fit, or a weight is not finite.
        """
        field_names = {field.name for field in dataclasses.fields(cls.Config)}
        if unknown := sorted(config.keys() - field_names):
            names = ", ".join(repr(name[:40]) for name in unknown[:3])
            raise ValueError(f"{source} was written by another version, whose {cls.__name__} has {names}")
        try:
            check_arguments(config, weights)
            if bad_weight := next((name for name in weights if not weights[name].isfinite().all()), None):
                raise ValueError(f"{bad_weight} is not finite")
            return build_with_weights(lambda: cls.from_dict(config), weights, is_lazy=is_lazy).eval()
        except (TypeError, RuntimeError, ValueError) as error:
            raise ValueError(f"{source} does not hold a {cls.__name__}: {one_line(error)}") from None


def build_in_memory(model_class: type[Self], /, **arguments: Any) -> Self:
    """``model_class.from_dict(arguments)``, after a check that its weights fit into the memory of this machine.

    Raises:
        ValueError: one line that names the argument that is too large, or says how large the model would be. Others:
            as ``model_class``.
    """
    check_arguments(arguments)
    build_on_meta(lambda: model_class.from_dict(arguments))
    return model_class.from_dict(arguments)


def _weights_module(name: str) -> Any:
    """A module of tandem.weights, by its name: that package imports the models."""
    return importlib.import_module(f"tandem.weights.{name}")


def get_model_class(name: str, source: Path) -> type[Pretrained]:
    """A class of models by its name. Raises ValueError, in one line that names ``source``, if there is none."""
    model_class = getattr(importlib.import_module(__package__), name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, Pretrained)):
        raise ValueError(f"{source} holds a {name[:80]}, which is no model of this version")
    return model_class


def build(description: Mapping[str, Any], weights: Mapping[str, Tensor], source: Path, is_lazy: bool = False) -> Any:
    """The model of a `Pretrained.description`, with these weights; ``is_lazy`` as in `build_with_weights`. Raises
    ValueError, in one line that names ``source``, if they do not fit."""
    arguments = {name: value for name, value in description.items() if name != "model"}
    return get_model_class(description["model"], source).from_weights(source, arguments, weights, is_lazy)


def read_config(folder: Path) -> dict[str, Any]:
    """The `Pretrained.description` in a folder: the model's class and its constructor arguments, unchecked.

    Raises:
        ValueError: one line, if there is no such config.json.
    """
    with _translate_errors(folder):
        config = read_json(check_inside(folder / CONFIG_FILE, folder))
        class_name = config.get("model")
        if not (isinstance(class_name, str) and class_name.isidentifier()):
            foreign_type = config.get("architectures") or config.get("model_type")
            hint = f", but one of transformers, {str(foreign_type)[:80]}" if foreign_type else ""
            raise ValueError(f"its {CONFIG_FILE} names no model of this package{hint}")
        return rename_settings({name: value for name, value in config.items() if name not in _IGNORED})


def holds_weights(folder: Path) -> bool:
    """Whether a folder holds all files of its weights. Their content is not read."""
    try:
        with _translate_errors(folder):
            return all(path.is_file() for path in _weight_files(folder))
    except ValueError:
        return False


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder's safetensors by name, on the CPU.

    Raises:
        ValueError: one line, if a file is missing, damaged or hostile.
    """
    weights: dict[str, Tensor] = {}
    with _translate_errors(folder):
        for path, names in _weight_files(folder).items():
            with safe_open(check_weights_file(path), framework="pt") as file:
                weights |= {name: file.get_tensor(name) for name in names or file.keys()}
    return rename_weights(weights)


def read_headers(folder: Path) -> dict[str, Headers]:
    """The tensors of a folder's weights by file name, without reading them.

    Raises:
        ValueError: one line, if a file is missing, damaged or hostile.
    """
    headers: dict[str, Headers] = {}
    with _translate_errors(folder):
        for path, names in _weight_files(folder).items():
            # The framework "pt" would reserve memory for the whole file.
            with safe_open(check_weights_file(path), framework="numpy") as file:
                slices = {name: file.get_slice(name) for name in names or file.keys()}
                headers[path.name] = {name: (w.get_dtype(), tuple(w.get_shape())) for name, w in slices.items()}
    return headers


def _weight_files(folder: Path) -> dict[Path, list[str]]:
    """The files of a folder's weights, each with the names of the tensors to read from it; an empty list means all."""
    if (folder / _WEIGHTS).exists() or not (folder / _INDEX).exists():
        return {check_inside(folder / _WEIGHTS, folder): []}
    return read_weight_index(folder / _INDEX)


def read_weight_index(index: Path) -> dict[Path, list[str]]:
    """The files that an index of weights names, beside it, each with the names of its tensors.

    Raises:
        OSError, ValueError: one line, if there is no index, it is damaged, or it names something outside of its folder.
    """
    folder = index.parent
    weight_map = read_json(check_inside(index, folder)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"its {index.name} has no weight_map")
    files: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in ("", ".", "..") or any(character in file for character in "/\\:\0"):
            raise ValueError(f"its {index.name} names {str(file)[:80]!r}, which is no file in the folder")
        files.setdefault(folder / file, []).append(name)
    for path in files:
        check_inside(path, folder)
    return files


@contextmanager
def _translate_errors(folder: Path) -> Iterator[None]:
    """Turn every error of reading a model folder into a ValueError of one line."""
    try:
        yield
    except OSError as error:
        if (folder / "model" / CONFIG_FILE).is_file():
            raise ValueError(f"{folder} is a run folder; its model is in {folder / 'model'}") from None
        run_folder = folder if (folder / "checkpoints").is_dir() else folder.parent
        if (run_folder / "checkpoints").is_dir() and not (folder / CONFIG_FILE).exists():
            export = shlex.join([*command_of("convert.py"), "export", str(run_folder), "DIR", "--to", "model"])
            raise ValueError(f"{folder} has no model until the run ends; to export its checkpoint: {export}") from None
        raise ValueError(f"cannot read {error.filename or folder / _WEIGHTS}: {error.strerror or error}") from None
    except _READ_ERRORS as error:
        raise ValueError(f"{folder} is not a model folder: {one_line(error)}") from None
