"""A user's own map-style dataset (`--dataset MODULE:FUNCTION`): how it is made, asked for an item, and checked."""

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

from ..bad_samples import Raised
from ..hashing import derive_key
from .index import fingerprint_of
from .record import MOST_EXAMPLES, Record

ITEM = "item"  # the key of a record, which holds an item whole: fields take their parts (`data.items`)
_LONGEST_QUOTE = 200
_OURS = {"data", "distributed", "models", "tandem", "training"}  # a module of a user's by such a name would be hidden


class OwnData(NamedTuple):
    """What --dataset names, and the run's arguments, which its function gets."""

    spec: str
    args: argparse.Namespace

    def __str__(self) -> str:
        return self.spec


def data_of(args: argparse.Namespace, flag: str) -> OwnData | Any:
    """Where a run's samples are: what --dataset names, or else the value of another flag."""
    spec = getattr(args, "dataset", None)
    return OwnData(spec, args) if spec else getattr(args, flag)


class OwnSource:
    """What the function of --dataset returns. A record is {"item": an item}. See `Source` for the methods.

    The fingerprint is the dataset's own, or that of its name and length. The global generators of random, numpy and
    PyTorch are seeded for each item, so that one which is drawn by them is the same in any process: by (seed, index),
    with `augment` by (seed, epoch, index).

    Raises ValueError, in one line, if there is no such function, or its result is no map-style dataset; and `Raised` if
    the user's code raises anything.
    """

    shards: Sequence[range] | None = None
    skipped = ""

    def __init__(self, data: OwnData) -> None:
        self._spec, self._seed = data.spec, data.args.seed
        self._dataset, self._length = _made(data)
        own = getattr(self._dataset, "fingerprint", None)
        found = f"{self._spec} {self._length}" if own is None or callable(own) else str(own)
        self.fingerprint = fingerprint_of([found.encode()])

    def __len__(self) -> int:
        return self._length

    def describe(self, index: int) -> str:
        return f"{self._spec}[{index}]"

    def name(self, index: int) -> str:
        return f"{index:09d}"

    def examples(self, name: str) -> Sequence[int]:
        """The first items: they have to be made to see what they hold."""
        return range(min(self._length, MOST_EXAMPLES))

    def record(self, index: int, epoch: int = 0, augment: bool = False) -> Record:
        """Raises `Raised` if the dataset raises any error."""
        drawn = ("augmented", epoch) if augment else ("plain",)
        with _in_one_line(), _seeded(derive_key("dataset", self._seed, *drawn, index)):
            return {ITEM: self._dataset[index]}


def _made(data: OwnData) -> tuple[Any, int]:
    """The dataset and its length."""
    said = f"--dataset {data.spec}: "
    module_name, _, function_name = data.spec.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *function_name.split("."))):
        raise ValueError(
            f"{said}expected MODULE:FUNCTION, such as my_data:photos for the function photos of my_data.py"
        )
    if module_name.partition(".")[0] in _OURS:
        raise ValueError(f"{said}{module_name} is a name of this project; give your module another one")
    if os.getcwd() not in sys.path:  # the script's folder is there already
        sys.path.append(os.getcwd())
    with _in_one_line(f"{said}importing {module_name} failed: "):
        is_there = module_name in sys.modules or importlib.util.find_spec(module_name)
        module = importlib.import_module(module_name) if is_there else None
    if module is None:
        raise ValueError(
            f"{said}there is no module {module_name}: it has to be in the current folder, in the script's, or in "
            "PYTHONPATH"
        )
    try:
        function = operator.attrgetter(function_name)(module)
    except AttributeError:
        raise ValueError(f"{said}{getattr(module, '__file__', module_name)} has no function {function_name}") from None
    with _in_one_line(f"{said}the function failed: "):
        dataset = function(argparse.Namespace(**vars(data.args)))
    if not (hasattr(type(dataset), "__len__") and hasattr(type(dataset), "__getitem__")):
        raise ValueError(
            f"{said}the function returned {shown(dataset)}, which has not both __len__ and __getitem__: "
            "samples are read at random, so that every process and every start see the same ones"
        )
    with _in_one_line(f"{said}len() of what the function returned failed: "):
        length = len(dataset)
    if not length:
        raise ValueError(f"{said}what the function returned is empty")
    return dataset, length


@contextlib.contextmanager
def _in_one_line(before: str = "") -> Iterator[None]:
    """Context in which what a user's code raises becomes `Raised`: its type, its text, and the line that raised it."""
    try:
        yield
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        files = (__file__, "<frozen", os.path.dirname(importlib.__file__))
        frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(files)]
        where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
        said = f"{before}{type(error).__name__}{f': {text}' if text else ''}{where}"
        raise Raised(said, "".join(traceback.format_exception(error))) from None


@contextlib.contextmanager
def _seeded(key: int) -> Iterator[None]:
    """Context in which the global generators of random numbers begin at a key; afterwards they are as before."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002  (users' code draws from it)
    torch.default_generator.manual_seed(key & ((1 << 63) - 1))  # of the CPU alone: loaders do not touch a GPU
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])


def part_of(item: Any, *names: str, place: int | None = 0) -> Any:
    """A part of an item: the first of these keys that a mapping has, or the entry of a tuple at a place, if it has one
    there; an item that is neither is its part 0. None if there is no such part."""
    if isinstance(item, Mapping):
        return next((item[name] for name in names if item.get(name) is not None), None)
    if isinstance(item, (tuple, list)):
        return None if place is None or len(item) <= place else item[place]
    return item if place == 0 else None


def as_array(part: Any) -> np.ndarray | None:
    """An array, or a tensor of any device, as an array; None for anything else."""
    if isinstance(part, torch.Tensor):
        part = part.detach().cpu()
        return np.asarray(part.float() if part.dtype == torch.bfloat16 else part)
    return part if isinstance(part, np.ndarray) else None


def as_bytes(array: np.ndarray) -> np.ndarray | None:
    """Pixels: uint8 as they are, floats in [0, 1] as uint8; None for others."""
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind != "f" or not array.size:
        return None
    if not (float(array.min()) >= -1e-3 and float(array.max()) <= 1 + 1e-3):  # of an interpolation; not of NaN
        return None
    return np.rint(array.clip(0, 1) * 255).astype(np.uint8)


def shown(found: Any) -> str:
    """What something is, for an error."""
    array = as_array(found)
    if array is not None:
        kind = "a tensor" if isinstance(found, torch.Tensor) else "an array"
        values = (
            f" with values from {array.min():g} to {array.max():g}" if array.size and array.dtype.kind == "f" else ""
        )
        return f"{kind} of shape {tuple(array.shape)} and type {array.dtype}{values}"
    if isinstance(found, Mapping):
        entries = ", ".join(f"{key}: {type(value).__name__}" for key, value in found.items())
        return f"a mapping with {entries[:_LONGEST_QUOTE] or 'nothing'}"
    if isinstance(found, (tuple, list)):
        kinds = ", ".join(type(entry).__name__ for entry in found[:8])
        return f"a {type(found).__name__} of {len(found)} ({kinds})"
    return "None" if found is None else f"{type(found).__name__} {found!r}"[:_LONGEST_QUOTE]
