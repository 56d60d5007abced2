"""Quantizers of image tokenizers behind one interface."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from .base import Quantizer
from .finite_scalar import FiniteScalarQuantizer, levels_of
from .index_backprop import IndexBackpropQuantizer
from .lookup_free import BinarySphericalQuantizer, LookupFreeQuantizer
from .vector import VectorQuantizer

_CLASSES: dict[str, type[Quantizer]] = {
    "lfq": LookupFreeQuantizer,
    "vq": VectorQuantizer,
    "fsq": FiniteScalarQuantizer,
    "bsq": BinarySphericalQuantizer,
    "ibq": IndexBackpropQuantizer,
}
QUANTIZERS = tuple(_CLASSES)


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
    if name not in _CLASSES:
        raise ValueError(f"quantizer {name!r} is unknown; use one of {', '.join(QUANTIZERS)}")
    kind = _CLASSES[name]
    parameters = inspect.signature(kind).parameters
    sizes: dict[str, Any] = {"codebook_size": codebook_size, "dim": dim}
    if kind is FiniteScalarQuantizer and codebook_size is not None and "levels" not in options:
        sizes["levels"] = levels_of(codebook_size)
    arguments = {key: size for key, size in sizes.items() if key in parameters and size is not None} | options
    if unknown := [key for key in arguments if key not in parameters]:
        raise ValueError(f"quantizer {name} has no option {', '.join(unknown)}; it has {', '.join(parameters)}")
    if missing := [key for key, it in parameters.items() if it.default is it.empty and key not in arguments]:
        raise ValueError(f"quantizer {name} needs {', '.join(missing)}")
    return kind(**arguments)


def tokenizer_quantizer(
    name: str, *, codebook_size: int, dim: int, diversity_gamma: float, inv_temperature: float,
    fsq_levels: Sequence[int] | None, vq_decay: float, vq_cosine: bool,
) -> Quantizer:  # fmt: skip
    """The quantizer of a tokenizer, which has the options of all quantizers; each takes its own.

    Raises:
        ValueError: an unknown name or a value out of range.
    """
    options: dict[str, dict[str, Any]] = {
        "lfq": {"diversity_gamma": diversity_gamma, "inv_temperature": inv_temperature},
        "bsq": {"diversity_gamma": diversity_gamma, "inv_temperature": inv_temperature},
        "ibq": {"diversity_gamma": diversity_gamma},
        "fsq": {} if fsq_levels is None else {"levels": fsq_levels},
        "vq": {"decay": vq_decay, "cosine": vq_cosine},
    }
    return make_quantizer(name, codebook_size=codebook_size, dim=dim, **options.get(name, {}))
