"""Writing weights: a file appears whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from . import writing
from .reading import error_text


def on_cpu(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous weights on the CPU, as safetensors and the public packages' files require."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, moved onto ``path`` once it is complete and on the disk.

    Raises:
        OSError: one line, if it could not be written; ``path`` is then unchanged.
    """
    try:
        with writing.replacing(path) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:  # safetensors raises its own error for disk errors
        raise OSError(f"cannot write {path}: {error_text(error)}") from None
