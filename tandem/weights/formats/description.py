"""Descriptions of model folders and of weights, for a person or a program, without building the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tandem.models.base import CONFIG_FILE, Headers, read_config, read_headers

# Dtypes in safetensors' notation -> PyTorch's names.
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64"}


def describe_model_folder(folder: Path) -> dict[str, Any]:
    """Facts about a `save_pretrained` folder, from its headers. Errors: see `read_headers`."""
    arguments = read_config(folder)
    files = read_headers(folder)
    tensors = _describe_headers({name: header for headers in files.values() for name, header in headers.items()})
    sizes = {file: (folder / file).stat().st_size for file in (CONFIG_FILE, *files)}
    return {"kind": "model folder", "model": arguments.pop("model"), "arguments": arguments, **tensors, "bytes": sizes}


def describe_weights(weights: Mapping[Any, Any]) -> dict[str, Any]:
    """Number of tensors, of parameters, and dtypes; values that are not tensors are left out."""
    tensors = {str(name): w for name, w in weights.items() if isinstance(w, Tensor)}
    return _describe_headers({name: (str(w.dtype), tuple(w.shape)) for name, w in tensors.items()})


def format_arguments(arguments: Mapping[str, Any]) -> str:
    """The arguments of a call, as in Python."""
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _describe_headers(headers: Headers) -> dict[str, Any]:
    dtypes = {_DTYPES.get(dtype, dtype).removeprefix("torch.") for dtype, _ in headers.values()}
    parameters = sum(math.prod(shape) for _, shape in headers.values())
    return {"tensors": len(headers), "parameters": parameters, "dtype": ", ".join(sorted(dtypes))}
