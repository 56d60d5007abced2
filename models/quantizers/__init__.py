"""Quantizers of image tokenizers behind one interface.

Importing this file alone imports no PyTorch, because --help reads the names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NamedTuple

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


def make_quantizer(config: QuantizerConfig) -> Quantizer:
    """The quantizer of a tokenizer's configuration.

    Raises:
        ValueError: an unknown name or a value out of range.
    """
    if config.quantizer not in _KINDS:
        raise ValueError(f"quantizer {config.quantizer!r} is unknown; use one of {', '.join(QUANTIZERS)}")
    _, module, name = _KINDS[config.quantizer]
    made: Quantizer = getattr(importlib.import_module(f".{module}", __name__), name)(config)
    return made
