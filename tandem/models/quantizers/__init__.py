"""Quantizers of image tokenizers behind one interface.

Importing this file alone imports no PyTorch, because --help reads the names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tandem.config.models.autoencoders import QuantizerConfig

    from .base import Bottleneck


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
# Of a configuration with `latent_dim`.
_CONTINUOUS = {"kl": _Kind("or no codes: continuous latents", "gaussian", "DiagonalGaussian")}
#: What each quantizer is, in a few words, by name.
QUANTIZERS = {name: kind.words for name, kind in _KINDS.items()}
#: And what there is beside them where latents may be continuous.
LATENTS = {**QUANTIZERS, **{name: kind.words for name, kind in _CONTINUOUS.items()}}


def make_quantizer(config: QuantizerConfig) -> Any:
    """The `Quantizer` of a tokenizer's configuration.

    Raises:
        ValueError: an unknown name or a value out of range.
    """
    kinds = {**_KINDS, **(_CONTINUOUS if hasattr(config, "latent_dim") else {})}
    if config.quantizer not in kinds:
        raise ValueError(f"quantizer {config.quantizer!r} is unknown; use one of {', '.join(kinds)}")
    _, module, name = kinds[config.quantizer]
    made: Bottleneck = getattr(importlib.import_module(f".{module}", __name__), name)(config)
    return made
