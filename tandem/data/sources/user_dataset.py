"""A user's map-style dataset (`--dataset MODULE:FUNCTION`): its construction, the parts of its items that fields read,
and the errors for wrong items."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import math
import operator
import os
import random
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from tandem.data.bad_samples import BadDatasetItem, UserCodeError
from tandem.data.decoding.sounds import SAMPLE_RATES
from tandem.data.decoding.texts import Texts, sentence, texts_of_object
from tandem.hashing import derive_key
from tandem.io.installed import HOME

from .index import fingerprint_of
from .record import MOST_EXAMPLES, FileRef, Record

ITEM = "item"  # the only key of a record: its value is the whole item
IMAGE_NAMES = ("image", "img")
ARRAY_SHAPES = {1: "(d,)", 2: "(tokens, d)"}  # of stored embeddings, by dimensions
_LONGEST_QUOTE = 200
_MOST_CHANNELS = 64
_IMAGE = (
    "a PIL image, or a tensor or array of uint8 or floats from 0 to 1 whose 1, 3 or 4 channels come first (c, h, w); "
    'or a mapping with such an "image", or a tuple that begins with one'
)
_CLIP = (
    "a tensor or array (frames, channels, height, width) of 1, 3 or 4 channels, uint8 or floats from 0 to 1; or a "
    'mapping with such a "video", or a tuple that begins with one'
)
_SOUND = (
    'a tuple (waveform, sample rate, caption or captions), or a mapping with "waveform", "sample_rate" and "caption" '
    'or "captions": the waveform a tensor or array of floats, (samples,) or (channels, samples), the rate a whole '
    f"number of Hz from {SAMPLE_RATES[0]} to {SAMPLE_RATES[1]}, a caption a text"
)


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
        """The first items, because only the making of an item shows what it holds."""
        return range(min(self._length, MOST_EXAMPLES))

    def record(self, index: int, epoch: int = 0, augment: bool = False) -> Record:
        """Raises `UserCodeError` if the dataset raises any error."""
        key_parts = ("augmented", epoch) if augment else ("plain",)
        with _errors_in_one_line(), _seeded(derive_key("dataset", self._seed, *key_parts, index)):
            return {ITEM: self._dataset[index]}


def _search_own_folder_last() -> None:
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
    _search_own_folder_last()
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
            "samples are read at random, so that every process and every start see the same ones"
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
        files = (__file__, "<frozen", os.path.dirname(importlib.__file__))
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(files)]
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


def item_part(item: Any, *names: str, place: int | None = 0) -> Any:
    """A part of an item: of a mapping the value of the first key of `names` that exists; of a tuple the entry at
    `place`; of any other item the item itself, at place 0. None if there is no such part."""
    if isinstance(item, Mapping):
        return next((item[name] for name in names if item.get(name) is not None), None)
    if isinstance(item, (tuple, list)):
        return None if place is None or len(item) <= place else item[place]
    return item if place == 0 else None


def as_array(part: Any) -> np.ndarray | None:
    """An array, or a tensor on any device -> an array; None for anything else."""
    if isinstance(part, torch.Tensor):
        part = part.detach().cpu()
        return np.asarray(part.float() if part.dtype == torch.bfloat16 else part)
    return part if isinstance(part, np.ndarray) else None


def as_uint8(array: np.ndarray) -> np.ndarray | None:
    """Pixels as uint8: uint8 unchanged, floats in [0, 1] converted; None for others."""
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind != "f" or not array.size:
        return None
    # An interpolation may exceed the range a little; NaN fails both comparisons.
    if not (float(array.min()) >= -1e-3 and float(array.max()) <= 1 + 1e-3):
        return None
    return np.rint(array.clip(0, 1) * 255).astype(np.uint8)


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


def item_error(value: Any, expected: str) -> BadDatasetItem:
    """The error for an item of a user's dataset that the script cannot train on; its text follows the item's name."""
    return BadDatasetItem(f"is {describe_object(value)}; it has to be {expected}")


def image_of(item: Any) -> Image.Image:
    return _to_picture(item_part(item, *IMAGE_NAMES), item, _IMAGE)


class Video(NamedTuple):
    """The frames (t, c, h, w) of an item, c 1, 3 or 4, uint8 or floats."""

    item: Any
    frames: np.ndarray

    def picture(self, number: int) -> Image.Image:
        return _to_picture(self.frames[number], item_part(self.item, "video"), _CLIP)

    @property
    def fps(self) -> float:
        """Frames per second, which an item has to state only for --fps."""
        fps = item_part(self.item, "fps", place=None)
        if not (isinstance(fps, (int, float, np.number)) and 0 < float(fps) < math.inf):
            raise item_error(self.item, 'for --fps, a mapping with a "video" and its "fps", above 0')
        return float(fps)


def video_of(item: Any) -> Video:
    frames = as_array(item_part(item, "video"))
    if frames is None or frames.ndim != 4 or 0 in frames.shape:
        raise item_error(item, _CLIP)
    return Video(item, frames)


def sound_of(item: Any) -> FileRef:
    """The sound of an item of a user's dataset, as a WAV file of floats in memory. Waveform and rate are parts of the
    item, or the "array" and "sampling_rate" of its "audio"."""
    import soundfile

    waveform: Any = item_part(item, "waveform", "audio")
    rate: Any = item_part(item, "sample_rate", "sampling_rate", place=1)
    if isinstance(waveform, Mapping):  # as the library datasets decodes a sound
        waveform, rate = waveform.get("array"), waveform.get("sampling_rate")
    array = as_array(waveform)
    rate = rate.item() if hasattr(rate, "item") and getattr(rate, "size", 1) == 1 else rate
    least, most = SAMPLE_RATES
    is_rate = isinstance(rate, int) and not isinstance(rate, bool) and least <= rate <= most
    if array is None or array.dtype.kind != "f" or array.ndim not in (1, 2) or not is_rate:
        raise item_error(waveform if is_rate and array is not None else item, _SOUND)
    if array.ndim == 2 and array.shape[0] > _MOST_CHANNELS:
        raise item_error(array, "(channels, samples), channels first")
    if 0 in array.shape:
        raise ValueError("it holds no sound")
    content = io.BytesIO()
    soundfile.write(content, array.astype(np.float32).T, rate, format="WAV", subtype="FLOAT")
    return FileRef.in_memory(content.getbuffer(), "")


def texts_of(item: Any) -> Texts:
    """The texts of an item of a user's dataset."""
    if isinstance(item, (tuple, list)):
        item = {"caption": item[2] if len(item) > 2 else None, "label": item[3] if len(item) > 3 else None}
    if not isinstance(item, Mapping):
        raise item_error(item, _SOUND)
    try:
        return texts_of_object({key: list(value) if isinstance(value, tuple) else value for key, value in item.items()})
    except ValueError:
        raise item_error(item, _SOUND) from None


def caption_of(item: Any) -> str:
    """The caption of an item of a user's dataset; "" for a tuple of an image and its class."""
    caption = item_part(item, "caption", "text", "captions", place=1)
    if isinstance(caption, (list, tuple)):
        caption = caption[0] if caption else None
    if isinstance(item, (tuple, list)) and not isinstance(caption, str):
        caption = None
    if not (caption is None or isinstance(caption, str)):
        raise item_error(item, 'one whose "caption" is a text')
    return sentence(caption or "")


def array_of(item: Any, name: str, dimensions: int) -> np.ndarray | None:
    """The array of floats of this name in an item, None if it has none. `dimensions`: 1 or 2."""
    if isinstance(item, Mapping) and item.get(name) is None:
        return None
    array = as_array(item.get(name) if isinstance(item, Mapping) else None)
    if array is None or array.dtype.kind != "f" or array.ndim != dimensions or 0 in array.shape:
        raise missing_array_error(item, name, dimensions)
    return array


def missing_array_error(item: Any, name: str, dimensions: int) -> BadDatasetItem:
    """The error for an item without this array."""
    form = ARRAY_SHAPES[dimensions]
    return item_error(item, f'a mapping with an "image" and a "{name}", a tensor or array of floats {form}')


def _to_picture(part: Any, value: Any, expected: str) -> Image.Image:
    """PIL image, or tensor or array (c, h, w) -> PIL image. For anything else, raises `item_error` with `value` and
    `expected`."""
    if isinstance(part, Image.Image):
        return part
    array, pixels = as_array(part), None
    if array is not None and array.ndim == 3 and array.shape[0] in (1, 3, 4) and 0 not in array.shape:
        pixels = as_uint8(array)
    if pixels is None:
        raise item_error(value, expected)
    return Image.fromarray(np.ascontiguousarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)))
