"""A user's map-style dataset (`--dataset MODULE:FUNCTION`): its construction, and its items as records."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import operator
import os
import random
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tandem.data.bad_samples import UserCodeError
from tandem.hashing import derive_key
from tandem.io.installed import HOME

from .index import fingerprint_of
from .record import MOST_EXAMPLES, Record

ITEM = "item"  # the only key of a record: its value is the whole item
_LONGEST_QUOTE = 200


class DatasetSpec(NamedTuple):
    """The value of --dataset, and the run's arguments, which are passed to its function."""

    spec: str
    args: argparse.Namespace

    def __str__(self) -> str:
        return self.spec


def data_of(args: argparse.Namespace, flag: str) -> DatasetSpec | Any:
    """The `DatasetSpec` of --dataset if it is set, else the value of `flag`."""
    spec = getattr(args, "dataset", None)
    return DatasetSpec(spec, args) if spec else getattr(args, flag)


class UserDatasetSource:
    """The dataset that the function of --dataset returns. A record is {"item": an item}. See `RecordSource` for the
    methods.

    The fingerprint is the dataset's attribute `fingerprint`, or else that of its name and length. The global generators
    of random, numpy and PyTorch are seeded for each item, by (seed, index), or with `augment` by (seed, epoch, index),
    so that random items are the same in all processes.

    Raises ValueError, in one line, if there is no such function, or its result is no map-style dataset; and
    `UserCodeError` if the user's code raises anything.
    """

    shards: Sequence[range] | None = None
    skipped = ""

    def __init__(self, data: DatasetSpec) -> None:
        self._spec, self._seed = data.spec, data.args.seed
        self._dataset, self._length = _make_dataset(data)
        fingerprint = getattr(self._dataset, "fingerprint", None)
        text = f"{self._spec} {self._length}" if fingerprint is None or callable(fingerprint) else str(fingerprint)
        self.fingerprint = fingerprint_of([text.encode()])

    def __len__(self) -> int:
        return self._length

    def describe(self, index: int) -> str:
        return f"{self._spec}[{index}]"

    def name(self, index: int) -> str:
        return f"{index:09d}"

    def examples(self, name: str) -> Sequence[int]:
        """The indices of the first items: what an item holds is known only after it is loaded."""
        return range(min(self._length, MOST_EXAMPLES))

    def record(self, index: int, epoch: int = 0, augment: bool = False) -> Record:
        """Raises `UserCodeError` if the dataset raises any error."""
        key_parts = ("augmented", epoch) if augment else ("plain",)
        with _errors_in_one_line(), _seeded(derive_key("dataset", self._seed, *key_parts, index)):
            return {ITEM: self._dataset[index]}


def _search_scripts_folder_last() -> None:
    """Put the current folder first in sys.path and the scripts' folder last, so that a user's dataset imports the same
    modules as without this project: the scripts' folder, which Python puts first, holds `distributed` and `tests`."""
    current = os.path.realpath(os.curdir)
    entries = [entry for entry in sys.path if os.path.realpath(entry) != current]
    sys.path[:] = [os.getcwd(), *sorted(entries, key=lambda entry: os.path.realpath(entry) == str(HOME))]


def _make_dataset(data: DatasetSpec) -> tuple[Any, int]:
    flag = f"--dataset {data.spec}: "
    module_name, _, function_name = data.spec.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *function_name.split("."))):
        example = "such as my_data:photos for the function photos of my_data.py"
        raise ValueError(f"{flag}expected MODULE:FUNCTION, {example}")
    if module_name.partition(".")[0] == "tandem":
        raise ValueError(f"{flag}{module_name} is a name of this project; give your module another one")
    _search_scripts_folder_last()
    with _errors_in_one_line(f"{flag}importing {module_name} failed: "):
        exists = module_name in sys.modules or importlib.util.find_spec(module_name)
        module = importlib.import_module(module_name) if exists else None
    if module is None:
        raise ValueError(
            f"{flag}there is no module {module_name}: it has to be in the current folder, in the script's, or in "
            "PYTHONPATH"
        )
    try:
        function = operator.attrgetter(function_name)(module)
    except AttributeError:
        raise ValueError(f"{flag}{getattr(module, '__file__', module_name)} has no function {function_name}") from None
    with _errors_in_one_line(f"{flag}the function failed: "):
        flags = vars(data.args)
        invocation = flags.get("invocation")
        dataset = function(invocation.namespace(flags) if invocation else argparse.Namespace(**flags))
    if not (hasattr(type(dataset), "__len__") and hasattr(type(dataset), "__getitem__")):
        raise ValueError(
            f"{flag}the function returned {describe_object(dataset)}, which has not both __len__ and __getitem__: "
            "samples are read by index, in an order that every process and every start computes"
        )
    with _errors_in_one_line(f"{flag}len() of what the function returned failed: "):
        length = len(dataset)
    if not length:
        raise ValueError(f"{flag}what the function returned is empty")
    return dataset, length


@contextlib.contextmanager
def _errors_in_one_line(prefix: str = "") -> Iterator[None]:
    """Context in which an error of the user's code becomes `UserCodeError`, with its type, its text and its line."""
    try:
        yield
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        other_code = (__file__, "<frozen", os.path.dirname(importlib.__file__))  # this file, and Python's imports
        all_frames = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in all_frames if not frame.filename.startswith(other_code)]
        location = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
        summary = f"{prefix}{type(error).__name__}{f': {text}' if text else ''}{location}"
        raise UserCodeError(summary, "".join(traceback.format_exception(error))) from None


@contextlib.contextmanager
def _seeded(key: int) -> Iterator[None]:
    """Context in which the global generators of random numbers are seeded with a key; their states are restored
    afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002  (users' code draws from it)
    torch.default_generator.manual_seed(key & ((1 << 63) - 1))  # only the CPU's: loaders do not use a GPU
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


def as_array(part: Any) -> np.ndarray | None:
    """An array, or a tensor on any device -> an array; None for anything else."""
    if isinstance(part, torch.Tensor):
        part = part.detach().cpu()
        return np.asarray(part.float() if part.dtype == torch.bfloat16 else part)
    return part if isinstance(part, np.ndarray) else None


def describe_object(value: Any) -> str:
    """The description of an object for an error."""
    array = as_array(value)
    if array is not None:
        kind = "a tensor" if isinstance(value, torch.Tensor) else "an array"
        is_float = array.size and array.dtype.kind == "f"
        extent = f" with values from {array.min():g} to {array.max():g}" if is_float else ""
        return f"{kind} of shape {tuple(array.shape)} and type {array.dtype}{extent}"
    if isinstance(value, Mapping):
        entries = ", ".join(f"{key}: {type(entry).__name__}" for key, entry in value.items())
        return f"a mapping with {entries[:_LONGEST_QUOTE] or 'nothing'}"
    if isinstance(value, (tuple, list)):
        kinds = ", ".join(type(entry).__name__ for entry in value[:8])
        return f"a {type(value).__name__} of {len(value)} ({kinds})"
    return "None" if value is None else f"{type(value).__name__} {value!r}"[:_LONGEST_QUOTE]
