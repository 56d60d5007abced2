"""Quantizers of image and video tokenizers behind one interface."""

from __future__ import annotations

from typing import Any

from tandem.config.models.autoencoders import QuantizerConfig, check_choices

from .finite_scalar import FiniteScalarQuantizer
from .gaussian import DiagonalGaussian
from .index_backprop import IndexBackpropQuantizer
from .lookup_free import LookupFreeQuantizer
from .vector import VectorQuantizer

_CLASSES: dict[str, Any] = {
    "lfq": LookupFreeQuantizer,
    "vq": VectorQuantizer,
    "fsq": FiniteScalarQuantizer,
    "bsq": LookupFreeQuantizer,
    "ibq": IndexBackpropQuantizer,
    "kl": DiagonalGaussian,
}


def make_quantizer(config: QuantizerConfig) -> Any:
    """The `Bottleneck` of a tokenizer's configuration.

    Raises:
        ValueError: an unknown name or a value out of range.
    """
    check_choices(config)
    return _CLASSES[config.quantizer](config)
