"""Quantizers of image tokenizers behind one interface.

Importing this file alone imports no PyTorch, because --help reads the names.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ..configs import QuantizerConfig
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
    kind = _class_of(name)
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


def tokenizer_quantizer(config: QuantizerConfig) -> Quantizer:
    """The quantizer of a tokenizer, whose configuration has the options of all quantizers: a quantizer's parameter
    x is the field x or, of a quantizer q alone, q_x; None for its default.

    Raises:
        ValueError: an unknown name or a value out of range.
    """
    options: dict[str, Any] = {}
    for parameter in inspect.signature(_class_of(config.quantizer)).parameters.keys() - {"codebook_size", "dim"}:
        value = getattr(config, f"{config.quantizer}_{parameter}", getattr(config, parameter, None))
        options |= {} if value is None else {parameter: value}
    return make_quantizer(config.quantizer, codebook_size=config.codebook_size, dim=config.codebook_dim, **options)


def _class_of(name: str) -> type[Quantizer]:
    if name not in _KINDS:
        raise ValueError(f"quantizer {name!r} is unknown; use one of {', '.join(QUANTIZERS)}")
    found: type[Quantizer] = getattr(importlib.import_module(f".{_KINDS[name].module}", __name__), _KINDS[name].name)
    return found
