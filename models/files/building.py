"""Building a model from a file's arguments and weights: arguments cannot allocate much more memory than the weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .errors import one_line

# Whole numbers up to this are cheap for a constructor, whatever it does with them (2**n, [0] * n, a loop).
_HARMLESS_NUMBER = 1 << 22

# More values than any model has arguments; a pickle of a hundred bytes can hold 2^60 of them, in lists of one list.
_MOST_VALUES = 1 << 20

# A model may have this many tensors more than its file, so that the first one that is missing can be named.
_SPARE_TENSORS = 1000

Model = TypeVar("Model", bound=nn.Module)


def check_arguments(arguments: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Check that constructor arguments have JSON's types, at any depth of lists and mappings, and that no integer is
    larger than both 2^22 and the largest dimension of the weights.

    Raises:
        ValueError: one line, naming the argument.
    """
    # Ignore empty tensors: beside a dimension of 0, a file can state any other dimension without holding any data.
    sizes = [size for tensor in weights.values() if tensor.numel() for size in tensor.shape]
    largest = max(_HARMLESS_NUMBER, *sizes, 0)
    for name, value in arguments.items():
        try:
            for count, number in enumerate(_plain_values(name, value)):
                if count == _MOST_VALUES:
                    raise ValueError(f"{name} holds more than {_MOST_VALUES} values")
                if isinstance(number, int) and abs(number) > largest:
                    raise ValueError(f"{name} {str(number)[:24]} is larger than any dimension of the weights")
        except RecursionError:
            raise ValueError(f"{name} is nested too deeply") from None


def _plain_values(name: str, value: Any) -> Iterator[Any]:
    """The numbers, strings and so on in a value, which may be a list or a mapping with string keys, of such values. A
    list or a mapping itself counts as None, so that empty ones count too."""
    if isinstance(value, (list, tuple, dict)):
        yield None
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _plain_values(name, item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{name} holds a dict whose keys are not all strings")
            yield from _plain_values(name, item)
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield value
    else:
        raise ValueError(f"{name} holds a {type(value).__name__}")


def build_with_weights(build: Callable[[], Model], weights: Mapping[str, Tensor]) -> Model:
    """The model that ``build`` makes, holding ``weights``. Its memory is allocated after comparing names and shapes.

    Raises:
        ValueError: one line that names the first weight that is missing, superfluous, or of another shape or kind.
    """
    try:
        with torch.device("meta"), _at_most(len(weights) + _SPARE_TENSORS):
            expected = dict(build().state_dict())
    except Exception as error:  # a constructor can raise anything for a file's values
        raise ValueError(one_line(error)) from None
    for name in [*expected, *weights]:
        ours, theirs = (tuple(of[name].shape) if name in of else "none" for of in (expected, weights))
        if ours != theirs:
            raise ValueError(f"{name} should have shape {ours}, not {theirs}")
        if expected[name].is_floating_point() != weights[name].is_floating_point():
            raise ValueError(f"{name} should be of the kind {expected[name].dtype}, not {weights[name].dtype}")
    model = build()
    model.load_state_dict(weights)
    return model


@contextmanager
def _at_most(tensors: int) -> Iterator[None]:
    """Stop a constructor that makes more parameters and buffers than this, before a file's numbers fill the memory."""
    counter = itertools.count(1)

    def count(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if next(counter) > tensors:
            raise ValueError("the model would have many more weights than the file")

    hooks = [
        torch_module.register_module_parameter_registration_hook(count),
        torch_module.register_module_buffer_registration_hook(count),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
