"""Building a model after a check of its size. A model from a file must not be much larger than the file's weights; a
model from a user's arguments must fit into the memory of the machine."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode

from tandem.io.reading import one_line
from tandem.io.renamed import with_added_statistics

# Whole numbers up to this are cheap for a constructor, whatever it does with them (2**n, [0] * n, a loop).
_MAX_CHEAP_NUMBER = 1 << 22

# More values than any model has arguments; a pickle of a hundred bytes can hold 2^60 of them, in nested lists, each of
# which holds the next one several times.
_MAX_VALUES = 1 << 20
_MAX_DEPTH = 100  # lists in lists

# A model may have this many tensors more than its file, so that an error can name the first missing one.
_MAX_SPARE_TENSORS = 1000

# Far more than any model of this package has; even an empty tensor takes about a kilobyte.
_MAX_TENSORS = 1 << 14

_RANDOM_FILLS = {Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_}

Model = TypeVar("Model", bound=nn.Module)


def check_arguments(arguments: Mapping[str, Any], weights: Mapping[str, Tensor] = MappingProxyType({})) -> None:
    """Check that constructor arguments have JSON's types, at any depth of lists and mappings, and that no integer is
    larger than both 2^22 and the largest dimension of the weights.

    Raises:
        ValueError: one line, naming the argument.
    """
    # Ignore empty tensors: a file that states a dimension of 0 can state any other dimensions, too, without any data.
    sizes = [size for tensor in weights.values() if tensor.numel() for size in tensor.shape]
    largest = max(_MAX_CHEAP_NUMBER, *sizes, 0)
    for name, value in arguments.items():
        for element in plain_values(name, value):
            if isinstance(element, int) and abs(element) > largest:
                raise ValueError(f"{name} {str(element)[:24]} is too large: {largest} is the most")


def plain_values(name: str, value: Any) -> Iterator[Any]:
    """The numbers, strings, booleans and nulls in a value of JSON, at any depth of lists and mappings.

    Raises:
        ValueError: one line that names the value, if it holds anything else, too many values or too many nested lists.
    """
    pending, count = [(value, 0)], 1
    while pending:
        value, depth = pending.pop()
        if isinstance(value, (dict, list, tuple)):
            count += len(value)
            if count > _MAX_VALUES:
                raise ValueError(f"{name} holds more than {_MAX_VALUES} values")
            if depth == _MAX_DEPTH:
                raise ValueError(f"{name} is nested too deeply")
            if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
                raise ValueError(f"{name} holds a dict whose keys are not all strings")
            items = value.values() if isinstance(value, dict) else value
            pending += [(item, depth + 1) for item in reversed(items)]
        elif value is None or isinstance(value, (bool, int, float, str)):
            yield value
        else:
            raise ValueError(f"{name} holds a {type(value).__name__}")


def build_on_meta(build: Callable[[], Model]) -> Model:
    """The model that ``build`` makes, without memory. Raises ValueError, in one line, if its weights would not fit into
    the memory of this machine."""
    memory = _memory_bytes()
    limits = f"more than {_MAX_TENSORS} tensors, or more than the {memory / 1e9:.3g} GB of memory that this machine has"
    error_text = f"the model would have {limits}: choose a smaller one"
    try:
        with torch.device("meta"), _SkipRandomValues(), _limit(_MAX_TENSORS, memory, error_text):
            return build()
    except (RuntimeError, OverflowError) as error:  # more numbers than PyTorch can count
        raise ValueError(f"there is no model of such a size: {one_line(error)}") from None


def require_room(what: str, *shape: int) -> None:
    """Raise a ValueError of one line, which begins with ``what``, if an fp32 tensor of this shape is larger than the
    memory of this machine."""
    needed, memory = 4 * math.prod(shape), _memory_bytes()
    if needed > memory:
        raise ValueError(f"{what}: {needed / 1e9:.3g} GB are more than the {memory / 1e9:.3g} GB that this machine has")


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def build_with_weights(build: Callable[[], Model], weights: Mapping[str, Tensor], *, is_lazy: bool = False) -> Model:
    """The model that ``build`` makes, with ``weights``. Names and shapes are compared before its memory is allocated.
    The global random generator stays as it is.

    Args:
        is_lazy: The model is only described or copied from: it takes no memory of its own. Its weights are the given
            tensors themselves, in their dtype, which may be mapped from a file; other buffers have no values.

    Raises:
        ValueError: one line that names the first weight that is missing, superfluous, or of another shape or kind.
    """
    try:
        with (
            torch.device("meta"),
            _SkipRandomValues(),
            _limit(len(weights) + _MAX_SPARE_TENSORS, math.inf, "the model would have many more weights than the file"),
        ):
            model = build()
            expected = dict(model.state_dict())
    except Exception as error:  # a constructor can raise anything for a file's values
        raise ValueError(one_line(error)) from None
    weights = with_added_statistics(weights, model)
    for name in [*expected, *weights]:
        ours, theirs = (tuple(tensors[name].shape) if name in tensors else "none" for tensors in (expected, weights))
        if ours != theirs:
            hint = ": it may be of an earlier version" if theirs == "none" else ""
            raise ValueError(f"{name} should have shape {ours}, not {theirs}{hint}")
        if expected[name].is_floating_point() != weights[name].is_floating_point():
            raise ValueError(f"{name} should be of the kind {expected[name].dtype}, not {weights[name].dtype}")
    if not is_lazy:
        with torch.random.fork_rng(devices=[]), _SkipRandomValues():  # the initial weights are replaced
            model = build()
    model.load_state_dict(weights, assign=is_lazy)
    return model


class _SkipRandomValues(TorchFunctionMode):
    """Context in which nothing fills a tensor with random values, because no process will read them. On the meta device
    PyTorch would import the front end of its compiler for `normal_`: 1.5 seconds at the start of every tool."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RANDOM_FILLS:
            return args[0] if args else kwargs["tensor"]
        if func is torch.randn:
            return torch.empty(*args, **{name: value for name, value in kwargs.items() if name != "generator"})
        return func(*args, **kwargs)


@contextmanager
def _limit(max_tensors: int, max_bytes: float, error_text: str) -> Iterator[None]:
    """Stop a constructor, by a ValueError with this text, when its parameters and buffers are more than ``max_tensors``
    or take more than ``max_bytes``."""
    num_tensors, num_bytes = 0, 0

    def count_tensor(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal num_tensors, num_bytes
        num_tensors, num_bytes = num_tensors + 1, num_bytes + (0 if tensor is None else tensor.nbytes)
        if num_tensors > max_tensors or num_bytes > max_bytes:
            raise ValueError(error_text)

    hooks = [
        torch_module.register_module_parameter_registration_hook(count_tensor),
        torch_module.register_module_buffer_registration_hook(count_tensor),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
