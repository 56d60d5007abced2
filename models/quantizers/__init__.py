"""Quantizers of image tokenizers behind one interface.

Importing this file alone imports no PyTorch, because --help reads the names.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .base import Quantizer


class _Kind(NamedTuple):
    """A quantizer: what it is, in a few words for --help; its module; its class."""

    words: str
    module: str
    name: str


_KINDS = {
    "lfq": _Kind("lookup-free", "lookup_free", "LookupFreeQuantizer"),
    "vq": _Kind("vector (EMA codebook)", "vector", "VectorQuantizer"),
    "fsq": _Kind("finite scalar", "finite_scalar", "FiniteScalarQuantizer"),
    "bsq": _Kind("binary spherical", "lookup_free", "BinarySphericalQuantizer"),
    "ibq": _Kind("index backpropagation", "index_backprop", "IndexBackpropQuantizer"),
}
#: What each quantizer is, in a few words, by name.
QUANTIZERS = {name: kind.words for name, kind in _KINDS.items()}


def make_quantizer(name: str, *, codebook_size: int | None = None, dim: int | None = None, **options: Any) -> Quantizer:
    """A quantizer by name.

    Args:
        name: One of `QUANTIZERS`.
        codebook_size: Number of codes. For fsq it is approximate, and ignored if ``levels`` are given.
        dim: Channels of vq and ibq; ignored by the others, whose channels follow from the codebook.
        options: Other keyword arguments of the quantizer's class.

    Raises:
        ValueError: an unknown name or option, or a value out of range.
    """
    if name not in _KINDS:
        raise ValueError(f"quantizer {name!r} is unknown; use one of {', '.join(QUANTIZERS)}")
    kind: type[Quantizer] = getattr(importlib.import_module(f".{_KINDS[name].module}", __name__), _KINDS[name].name)
    parameters = inspect.signature(kind).parameters
    sizes: dict[str, Any] = {"codebook_size": codebook_size, "dim": dim}
    if name == "fsq" and codebook_size is not None and "levels" not in options:
        from .finite_scalar import levels_of

        sizes["levels"] = levels_of(codebook_size)
    arguments = {key: size for key, size in sizes.items() if key in parameters and size is not None} | options
    if unknown := [key for key in arguments if key not in parameters]:
        raise ValueError(f"quantizer {name} has no option {', '.join(unknown)}; it has {', '.join(parameters)}")
    if missing := [key for key, it in parameters.items() if it.default is it.empty and key not in arguments]:
        raise ValueError(f"quantizer {name} needs {', '.join(missing)}")
    return kind(**arguments)


def tokenizer_quantizer(
    name: str, *, codebook_size: int, dim: int, diversity_gamma: float, inv_temperature: float | None,
    fsq_levels: Sequence[int] | None, vq_decay: float, vq_cosine: bool,
) -> Quantizer:  # fmt: skip
    """The quantizer of a tokenizer, which has the options of all quantizers; each takes its own, None for its default.

    Raises:
        ValueError: an unknown name or a value out of range.
    """
    options: dict[str, dict[str, Any]] = {
        "lfq": {"diversity_gamma": diversity_gamma, "inv_temperature": inv_temperature},
        "bsq": {"diversity_gamma": diversity_gamma, "inv_temperature": inv_temperature},
        "ibq": {"diversity_gamma": diversity_gamma},
        "fsq": {"levels": fsq_levels},
        "vq": {"decay": vq_decay, "cosine": vq_cosine},
    }
    given = {key: value for key, value in options.get(name, {}).items() if value is not None}
    return make_quantizer(name, codebook_size=codebook_size, dim=dim, **given)
