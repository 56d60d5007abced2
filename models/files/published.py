"""Weights of public networks, as their authors publish them: one file that maps names to tensors."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Collection, Container, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tandem.files.fetching import Published, fetched
from tandem.files.reading import check_regular, one_line

from .archive import Ignored, check_archive, check_old_file, check_sizes

VGG16 = Published(
    "torchvision's VGG16", ("vgg16-397923af.pth",), "https://download.pytorch.org/models/vgg16-397923af.pth",
    553_433_881, "397923af8e79cdbb6a7127f12361acd7a2f83e06b05044ddf496e83de57a5bf0",
)  # fmt: skip
LPIPS_HEADS = Published(
    "the heads of LPIPS 0.1", ("vgg_lpips.pth", "vgg.pth"),
    "https://github.com/richzhang/PerceptualSimilarity/raw/master/lpips/weights/v0.1/vgg.pth",
    7_289, "a78928a0af1e5f0fcb1f3b9e8f8c3a2a5a3de244d830ad5c1feddc79b8432868",
)  # fmt: skip
INCEPTION = Published(
    "FID's Inception", ("pt_inception-2015-12-05-6726825d.pth", "weights-inception-2015-12-05-6726825d.pth"),
    "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth",
    95_628_359, "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2",
)  # fmt: skip

#: What a flag takes in the place of a file: the published file, which is fetched if the cache does not hold it.
PUBLISHED = "published"


def weights_of(file: Published, given: str, mark: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
    """Tensors by name of a file that the user gives, or of the published one. Raises ValueError, in one line."""
    return read_state_dict(fetched(file, mark) if given == PUBLISHED else Path(given), published=str(file))


def read_state_dict(
    path: Path, names: Container[str] | None = None, part: str = "", *, published: str = "", also: Collection[str] = ()
) -> dict[str, Tensor]:
    """Tensors by name, on the CPU, from a .safetensors file or from a .pt or .pth file of any version of PyTorch.

    Args:
        names: Read only these tensors.
        part: Key of a .pt or .pth file under which the tensors stand, if it has such a key; of several, with spaces
            between them, the first that it has.
        published: What and where such a file is, for the message about a missing one.
        also: Classes of objects in a .pt or .pth file that are of no interest, as `ignored` of `check_archive`.

    Raises:
        ValueError: one line, if the file is missing, damaged, hostile or something else.
    """
    try:
        found = _read(path, names, part, also)
    except OSError as error:
        source = f"; give {published}" if published and not path.exists() else ""
        raise ValueError(f"cannot read {path}: {error.strerror or error}{source}") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{path} holds no weights that can be read without running code: {one_line(error)}") from None
    if not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in found.items()):
        raise ValueError(f"{path} holds something beside names and tensors; give a file of plain weights")
    check_sizes(path, found.values())
    return found


def shape_of(state: Mapping[str, Tensor], name: str, dimensions: int) -> tuple[int, ...]:
    """The shape of a tensor, from which arguments of its model follow. Raises ValueError, in one line, if there is none
    of so many dimensions."""
    if name not in state or state[name].ndim != dimensions:
        raise ValueError(f"it lacks {name} of {dimensions} dimensions")
    return tuple(state[name].shape)


def check_has_one_set(path: Path, which: str) -> None:
    """Raise a ValueError of one line if --weights chooses one of several sets of weights, where a file has one."""
    if which != "best":
        raise ValueError(f"--weights {which} is for checkpoints; {path} holds one set of weights: leave it out")


def _read(path: Path, names: Container[str] | None, part: str, also: Collection[str]) -> dict[Any, Any]:
    if check_regular(path).suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if names is None or name in names}  # noqa: SIM118
    in_archive = zipfile.is_zipfile(path)
    check_archive(path, also) if in_archive else check_old_file(path)
    with torch.serialization.safe_globals([(Ignored, name.replace(" ", ".")) for name in also]):
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=in_archive)
    if isinstance(content, dict):
        content = next((content[key] for key in part.split() if key in content), content)
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not a dict")
    return {name: value for name, value in content.items() if names is None or name in names}
