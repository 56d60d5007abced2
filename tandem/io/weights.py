"""Reading of files of weights, whose format is recognised by their content, not by their ending (`read_content`);
advice about files without weights; and writing of a model's files (`replacing_model_file`)."""

from __future__ import annotations

import io
import re
import struct
import zipfile
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from . import writing
from .archive import IGNORED_CLASSES, STATE_DICT_ADVICE, WRAPPER_NAMES, check_archive, check_old_file, substitute_for
from .reading import LONGEST_BEGINNING, check_regular, error_text, one_line, wrong_kind_text

# Prefixes that DataParallel and DDP, torch.compile, FSDP and modules of Lightning put before all names; some of them
# also put them before names of inner layers.
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "model.", "net.", "network.")
_INNER_WRAPPERS = re.compile(WRAPPER_NAMES.pattern.decode())

_COPY_ADVICE = "copy or download it again"
# Files mistaken for weights, in addition to those in `reading`: the first bytes, the kind, and the advice.
_NO_WEIGHTS = (
    (rb"GGUF", "in the GGUF format", "give the file of PyTorch or safetensors that it was made from"),
    (rb"\x08[\x01-\x0f]\x12", "in the ONNX format", "give the file of PyTorch that it was made from"),
    (rb"\x89HDF", "in the HDF5 format of Keras", "give the file of PyTorch or safetensors"),
    (rb"\x93NUMPY", "a NumPy array", "give the file of PyTorch or safetensors"),
    (rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF", "a picture or a sound", "give the file of a model"),
    (rb"\s*[\[{]", "JSON text", "give the file of the weights beside it"),
    (rb"[\t\n\r -~]+\Z", "text, such as a configuration", "give a run folder or the file of a model"),
)  # fmt: skip
_PICKLE = b"\x80"
_LONGEST_HEADER = 100_000_000  # bytes, of safetensors
# Folders of other tools: a file in them, the kind, and the command that makes a file of weights.
_OTHER_FOLDERS = (
    ("zero_to_fp32.py", "a checkpoint of DeepSpeed, whose weights are in pieces",
     "run `python zero_to_fp32.py . weights/` in it, and give weights/pytorch_model.bin"),
    ("*_optim_states.pt", "a part of a checkpoint of DeepSpeed, whose weights are in pieces",
     "run `python zero_to_fp32.py . weights/` in the folder above it, and give weights/pytorch_model.bin"),
    (".metadata", "a checkpoint of torch.distributed.checkpoint, whose weights are in pieces",
     "run `python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER weights.pt`"),
    ("step_*_ema_*.safetensors", "the averages of a run's weights", "give its run to `convert.py average`"),
)  # fmt: skip
WEIGHT_ENDINGS = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")


def read_content(path: Path, names: Container[str] | None = None) -> Any:
    """The content of a .safetensors file, or of a .pt, .pth or .ckpt file of any version of PyTorch, with tensors on
    the CPU and names of weights without the prefixes of wrappers. Runs no code of the file.

    Args:
        names: Read only these weights of a .safetensors file.

    Raises:
        ValueError: one line that names the file, if it is missing, damaged, hostile or no file of weights.
    """
    try:
        if reason := why_no_weights(check_regular(path)):
            raise _NoWeightsError(reason)
        if is_safetensors(path):
            with safe_open(path, framework="pt") as file:
                keys = file.keys()
                pairs = zip(keys, strip_wrappers(keys), strict=True)
                return {name: file.get_tensor(key) for key, name in pairs if names is None or name in names}
        is_archive = zipfile.is_zipfile(path)
        check_archive(path) if is_archive else check_old_file(path)
        with torch.serialization.safe_globals([substitute_for(name) for name in IGNORED_CLASSES]):
            if path.suffix == ".safetensors":  # from this ending torch.load would infer safetensors
                with path.open("rb") as file:
                    return _strip_names(torch.load(file, map_location="cpu", weights_only=True))
            return _strip_names(torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except _NoWeightsError as error:
        raise ValueError(f"{path} holds no weights: {error}") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is cut off or damaged ({one_line(error)}); {_COPY_ADVICE}") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{path} holds no weights that can be read without running code: {one_line(error)}") from None


class _NoWeightsError(ValueError):
    """A file holds no weights; the message is what `why_no_weights` returns."""


def check_weights_file(path: Path) -> Path:
    """The path, for a library that opens it by itself. Raises OSError, and ValueError, in one line, if it is no regular
    file or no file of weights."""
    if reason := why_no_weights(check_regular(path)):
        raise ValueError(f"{path.name} holds no weights: {reason}")
    return path


def is_safetensors(path: Path) -> bool:
    """Whether a file is one of safetensors, by its content: names are often changed."""
    with path.open("rb") as file:
        beginning = file.read(9)
    return beginning[8:] == b"{" and struct.unpack("<Q", beginning[:8])[0] <= _LONGEST_HEADER


def why_no_weights(path: Path) -> str:
    """The kind of a file that cannot hold weights, and the advice, as the end of a line; "" for one that may hold some.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        beginning = file.read(LONGEST_BEGINNING)
    if not beginning:
        return f"it is empty; {_COPY_ADVICE}"
    if is_safetensors(path):
        length, size = 8 + struct.unpack("<Q", beginning[:8])[0], path.stat().st_size
        return f"it is cut off: its header has {length} bytes, the file {size}; {_COPY_ADVICE}" if length > size else ""
    if beginning.startswith(b"PK\3\4"):
        if not zipfile.is_zipfile(path):
            return f"it is cut off: its end is missing; {_COPY_ADVICE}"
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
        if any(member.endswith("/constants.pkl") for member in members):
            return f"it is a program of TorchScript; {STATE_DICT_ADVICE}"
        if not any(member.lower().endswith("data.pkl") for member in members):
            return f"it is a zip of {len(members)} files, none of them PyTorch's; unpack it"
        return ""
    if reason := wrong_kind_text(beginning, _NO_WEIGHTS):
        return reason
    if beginning.startswith(_PICKLE):
        return ""
    return f"it begins as no file of PyTorch or safetensors does; {_COPY_ADVICE}"


def why_no_model(folder: Path) -> str:
    """What a folder without a readable model holds, and the advice, as the beginning of a sentence; "" if unknown."""
    for pattern, kind, remedy in _OTHER_FOLDERS:
        if next(folder.glob(pattern), None):
            return f"it is {kind}; {remedy}; "
    files = sorted(path for path in folder.glob("*") if path.suffix in WEIGHT_ENDINGS and path.is_file())
    return f"give one of its files in place of the folder, such as {files[0]}; " if files else ""


def _strip_names(content: Any) -> Any:
    """The content of a file. The prefixes of wrappers are removed from the keys of its mapping and of those inside."""

    def strip_mapping(value: Any) -> Any:
        is_mapping = isinstance(value, dict) and all(isinstance(key, str) for key in value)
        return dict(zip(strip_wrappers(value), value.values(), strict=True)) if is_mapping else value

    if not isinstance(content, dict):
        return content
    # By id, because a hostile file may refer to one mapping a million times.
    inner = {id(value): strip_mapping(value) for value in content.values()}
    return strip_mapping({key: inner[id(value)] for key, value in content.items()})


def strip_wrappers(names: Iterable[str]) -> list[str]:
    """Names of weights without the prefixes of wrappers; unchanged if two names would become equal."""
    stripped = [_INNER_WRAPPERS.sub("", name) for name in names]
    while wrapper := next(
        (prefix for prefix in _WRAPPERS if stripped and all(n.startswith(prefix) for n in stripped)), ""
    ):
        stripped = [name.removeprefix(wrapper) for name in stripped]
    return stripped if len(set(stripped)) == len(stripped) else list(names)


def first_names(content: Mapping[Any, Any]) -> str:
    """The first three keys of a file, for messages."""
    return ", ".join(repr(str(name)[:40]) for name in list(content)[:3]) or "nothing"


def on_cpu(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous weights on the CPU, as safetensors and the public packages' files require."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}


@contextmanager
def replacing_model_file(path: Path) -> Iterator[Path]:
    """A path to write to, moved onto ``path`` once it is complete and on the disk.

    Raises:
        OSError: one line, if it could not be written; ``path`` is then unchanged.
    """
    try:
        with writing.replacing(path) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:  # safetensors raises its own error for disk errors
        raise OSError(f"cannot write {path}: {error_text(error)}") from None


def save_pickled(content: Mapping[str, Any], path: Path) -> None:
    """Write a file of torch.save; it appears whole or not at all. Raises what `replacing_model_file` raises."""
    pickled = io.BytesIO()  # torch.save to a disk that becomes full would hide the reason
    torch.save(content, pickled)
    with replacing_model_file(path) as temporary, writing.create(temporary) as file:
        file.write(pickled.getbuffer())
