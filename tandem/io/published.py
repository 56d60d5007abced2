"""Weights of public networks, as their authors publish them: one file that maps names to tensors."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from pathlib import Path

from torch import Tensor

from .archive import STATE_DICT_ADVICE, Ignored, check_sizes
from .fetching import PublishedFile, fetch_file
from .weights import first_names, read_content

VGG16 = PublishedFile(
    "torchvision's VGG16", ("vgg16-397923af.pth",), "https://download.pytorch.org/models/vgg16-397923af.pth",
    553_433_881, "397923af8e79cdbb6a7127f12361acd7a2f83e06b05044ddf496e83de57a5bf0",
)  # fmt: skip
LPIPS_HEADS = PublishedFile(
    "the heads of LPIPS 0.1", ("vgg_lpips.pth", "vgg.pth"),
    "https://github.com/richzhang/PerceptualSimilarity/raw/master/lpips/weights/v0.1/vgg.pth",
    7_289, "a78928a0af1e5f0fcb1f3b9e8f8c3a2a5a3de244d830ad5c1feddc79b8432868",
)  # fmt: skip
RESNET50 = PublishedFile(
    "torchvision's ResNet-50 (IMAGENET1K_V1)", ("resnet50-0676ba61.pth",),
    "https://download.pytorch.org/models/resnet50-0676ba61.pth",
    102_530_333, "0676ba61b6795bbe1773cffd859882e5e297624d384b6993f7c9e683e722fb8a",
)  # fmt: skip
INCEPTION = PublishedFile(
    "FID's Inception", ("pt_inception-2015-12-05-6726825d.pth", "weights-inception-2015-12-05-6726825d.pth"),
    "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth",
    95_628_359, "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2",
)  # fmt: skip

# Keys of the model's weights in the files of trainers; "module" is DeepSpeed's.
_USUAL_PARTS = ("state_dict", "model_state_dict", "model", "module", "weights")

#: The value of a flag that stands for the published file, which is downloaded unless it is in the cache.
PUBLISHED = "published"


def load_published_weights(
    file: PublishedFile, source: str, heartbeat: Callable[[], None] = lambda: None
) -> dict[str, Tensor]:
    """Tensors by name from the file ``source``, or from the published one. Raises ValueError, in one line."""
    return read_state_dict(fetch_file(file, heartbeat) if source == PUBLISHED else Path(source), published=str(file))


def read_state_dict(
    path: Path, names: Container[str] | None = None, part: str = "", *, published: str = ""
) -> dict[str, Tensor]:
    """Tensors by name, on the CPU, from a file that `read_content` reads.

    Args:
        names: Read only these tensors.
        part: Key of the tensors in the file, or several keys, separated by spaces, of which the first that exists is
            taken. `_USUAL_PARTS` are tried afterwards.
        published: A description of the published file, for the message about a missing file.

    Raises:
        ValueError: one line, if the file is missing, damaged, hostile or holds no state dict.
    """
    try:
        content = read_content(path, names)
    except ValueError as error:
        source = f"; give {published}" if published and not path.exists() else ""
        raise ValueError(f"{error}{source}") from None
    if isinstance(content, dict):
        parts = (content.get(key) for key in (*part.split(), *_USUAL_PARTS))
        content = next((value for value in parts if value is not None and not isinstance(value, Tensor)), content)
    if not isinstance(content, dict):
        kind = "an object of another class" if isinstance(content, Ignored) else f"a {type(content).__name__}"
        raise ValueError(
            f"{path} holds no weights: it holds {kind}, not a dict of names and tensors; {STATE_DICT_ADVICE}"
        )
    state = {name: value for name, value in content.items() if names is None or name in names}
    if not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in state.items()):
        raise ValueError(
            f"{path} holds something beside names and tensors: {first_names(content)}; give a file of plain weights"
        )
    check_sizes(path, state.values())
    return state


def part_with(state: Mapping[str, Tensor], name: str, prefixes: Container[str] = ()) -> tuple[str, dict[str, Tensor]]:
    """The prefix that a trainer has put before the names of a model, one of whose weights is ``name``, and the tensors
    with this prefix, without it. Other tensors, such as those of a loss, are left out; without a prefix, none.

    Args:
        prefixes: Where several models have such a weight, the one with this prefix is meant, or with none.

    Raises:
        ValueError: one line, if there are several models.
    """
    prefixes_in_file = [key.removesuffix(name) for key in state if key.endswith(name)]
    chosen = ["" for prefix in prefixes_in_file if not prefix]
    chosen = chosen or [prefix for prefix in prefixes_in_file if prefix in prefixes] or prefixes_in_file
    if len(chosen) > 1:
        raise ValueError(f"it holds {len(chosen)} models: {', '.join(chosen)[:80]}; give a file of one")
    prefix = "".join(chosen)
    return prefix, {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}


def shape_of(state: Mapping[str, Tensor], name: str, dimensions: int) -> tuple[int, ...]:
    """The shape of a tensor, from which arguments of its model are inferred. Raises ValueError, in one line, if the
    tensor is missing or has another number of dimensions."""
    if name not in state or state[name].ndim != dimensions:
        raise ValueError(f"it lacks {name} of {dimensions} dimensions")
    return tuple(state[name].shape)


def refuse_weights_flag(path: Path, weights: str) -> None:
    """Raise ValueError, in one line, if --weights is not its default: the file has one set of weights only."""
    if weights != "best":
        raise ValueError(f"--weights {weights} is for checkpoints; {path} holds one set of weights: leave it out")
