"""Quantizers of image and video tokenizers behind one interface."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tandem.config.models.autoencoders import LATENT_KINDS, QUANTIZERS

if TYPE_CHECKING:
    from tandem.config.models.autoencoders import QuantizerConfig

    from .base import Bottleneck


_CLASSES = {
    "lfq": ("lookup_free", "LookupFreeQuantizer"),
    "vq": ("vector", "VectorQuantizer"),
    "fsq": ("finite_scalar", "FiniteScalarQuantizer"),
    "bsq": ("lookup_free", "BinarySphericalQuantizer"),
    "ibq": ("index_backprop", "IndexBackpropQuantizer"),
    "kl": ("gaussian", "DiagonalGaussian"),  # of a configuration with `latent_dim`
}


def make_quantizer(config: QuantizerConfig) -> Any:
    """The `Quantizer` of a tokenizer's configuration.

    Raises:
        ValueError: an unknown name or a value out of range.
    """
    names = LATENT_KINDS if hasattr(config, "latent_dim") else QUANTIZERS
    if config.quantizer not in names:
        raise ValueError(f"quantizer {config.quantizer!r} is unknown; use one of {', '.join(names)}")
    module, class_name = _CLASSES[config.quantizer]
    quantizer: Bottleneck = getattr(importlib.import_module(f".{module}", __name__), class_name)(config)
    return quantizer
