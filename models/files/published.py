"""Weights of public networks, as their authors publish them: one file that maps names to tensors."""

from __future__ import annotations

import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tandem.files.reading import check_regular

from .archive import check_archive, check_old_file, check_sizes
from .errors import one_line

# Where a network's file is published. By torch.hub's convention ("load_state_dict_from_url", pytorch.org), the digits
# behind the last - of a name are the beginning of the file's SHA-256.
_SOURCES = {
    "vgg16": "https://download.pytorch.org/models/vgg16-397923af.pth (528 MB; its SHA-256 begins with 397923af)",
    "inception": "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/"
    "pt_inception-2015-12-05-6726825d.pth (its SHA-256 begins with 6726825d)",
    "i3d": "i3d_pretrained_400.pt of https://github.com/npurson/fid-metrics/releases/tag/v1.0 (50 MB, no checksum is "
    "published)",
}


def where_from(network: str) -> str:
    """One clause that says where the weights of "vgg16", "inception" or "i3d" are published."""
    return f"it is published as {_SOURCES[network]}"


def read_state_dict(
    path: Path, names: Collection[str] | None = None, part: str = "", *, network: str = ""
) -> dict[str, Tensor]:
    """Tensors by name, on the CPU, from a .safetensors file or from a .pt or .pth file of any version of PyTorch.

    Args:
        names: Read only these tensors.
        part: Key of a .pt or .pth file under which the tensors stand, if it has such a key.
        network: Of `where_from`, if the message about a missing file is to say where to get it.

    Raises:
        ValueError: one line, if the file is missing, damaged, hostile or something else.
    """
    try:
        found = _read(path, names, part)
    except OSError as error:
        source = f"; {where_from(network)}" if network and not path.exists() else ""
        raise ValueError(f"cannot read {path}: {error.strerror or error}{source}") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{path} holds no weights that can be read without running code: {one_line(error)}") from None
    if not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in found.items()):
        raise ValueError(f"{path} holds something beside names and tensors; give a file of plain weights")
    check_sizes(path, found.values())
    return found


def _read(path: Path, names: Collection[str] | None, part: str) -> dict[Any, Any]:
    if check_regular(path).suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if names is None or name in names}  # noqa: SIM118
    in_archive = zipfile.is_zipfile(path)
    check_archive(path) if in_archive else check_old_file(path)
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=in_archive)
    if part and isinstance(content, dict):
        content = content.get(part, content)
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not a dict")
    return {name: value for name, value in content.items() if names is None or name in names}
