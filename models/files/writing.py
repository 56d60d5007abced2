"""Writing weights: a file appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from .errors import one_line

_UMASK = os.umask(0)
os.umask(_UMASK)


def on_cpu(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous weights on the CPU, as both formats want them."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, moved onto ``path`` once it is complete and on the disk.

    Raises:
        OSError: one line, if it could not be written; ``path`` is then as it was.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.chmod(0o666 & ~_UMASK)  # safetensors makes files that only their owner can read
        os.replace(unfinished, path)
    except (OSError, SafetensorError) as error:  # safetensors raises its own error for any error of the disk
        reason = getattr(error, "strerror", None) or one_line(error)
        raise OSError(f"cannot write {path}: {reason}") from None
    finally:
        unfinished.unlink(missing_ok=True)
