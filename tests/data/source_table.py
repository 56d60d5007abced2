"""Every place that a script's samples may come from, as rows of a table: `SOURCES`.

A `Kind` is what a script trains on, opened by the function that the script calls with the script's own flags; its
records are numbered, {"png": content, "txt": content}. A `Source` writes records somewhere, and says by which flags a
run finds them there. Each test of test_sources.py is one behaviour that all of them have.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image, ImageSequence

from tandem.data.feed import TrainingData
from tandem.data.sets import decoder_data, image_data, sound_data, video_data
from tandem.data.tokenizers import open_tokenizer
from tests.data.helpers import Items, assert_same, joined, named, write_tar
from tests.data.sources.tables import save_to_disk, table, write_parquet
from tests.processes import Process, on_processes
from tests.scripts import DECODER, MULAN, RUN, TOKENIZER, VAE, VIDEO_TOKENIZER, WORDS, Script, words

N, BATCH = 40, 8
Record = Mapping[str, bytes]


def encoded(picture: Image.Image, ending: str, **options: Any) -> bytes:
    content = io.BytesIO()
    picture.save(content, {"jpg": "jpeg"}.get(ending, ending), **options)
    return content.getvalue()


def noise(number: int, height: int = 20, width: int = 24) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8))


def npy(array: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def gif(frames: Iterable[Image.Image]) -> bytes:
    """25 frames a second; those of grey are held as they are."""
    first, *others = frames
    return encoded(first, "gif", save_all=True, append_images=others, duration=40)


def wav(waveform: np.ndarray, rate: int) -> bytes:
    content = io.BytesIO()
    soundfile.write(content, waveform, rate, "FLOAT", format="WAV")
    return content.getvalue()


def embedding(number: int) -> np.ndarray:
    return np.random.default_rng(number).standard_normal(6).astype(np.float32)


@cache
def image(number: int) -> Record:
    ending = ("jpg", "png", "webp")[number % 3]
    return {ending: encoded(noise(number), ending)}


@cache
def conditioned_image(number: int) -> Record:
    return {**image(number), "txt": f"image  {number}\n".encode(), "img_emb.npy": npy(embedding(number))}


def wave(number: int) -> np.ndarray:
    """Noise of two channels, some of it shorter than a clip and some longer."""
    return np.random.default_rng(number).uniform(-0.5, 0.5, (2000 + 300 * number, 2)).astype(np.float32)


def captions(number: int) -> list[str]:
    return [f"{word} sound" for word in WORDS[number % 20 : number % 20 + 3]]


@cache
def sound(number: int) -> Record:
    return {"wav": wav(wave(number), 11025), "txt": "\n".join(captions(number)).encode()}


@cache
def video(number: int) -> Record:
    return {"gif": gif(noise(100 * number + frame).convert("L") for frame in range(8))}


@dataclass(frozen=True, eq=False)
class Kind:
    """What a script trains on.

    Args:
        open: The function that gives the script its feed.
        record: The files of the n-th sample; the first of them is the one that is decoded.
        flags: With these, what is loaded depends on the epoch, where that is possible.
        loaded: The entry of a batch with what was decoded.
    """

    script: Script
    open: Callable[[Any, Process], TrainingData]
    record: Callable[[int], Record]
    flags: Mapping[str, Any]
    loaded: str
    noun: str

    def feed(self, process: Process | None = None, **flags: Any) -> TrainingData:
        """The feed of the script with these flags; those that are None are not said, and [] is a flag without value."""
        said = {**RUN, **self.script.tiny, "batch_size": BATCH, **self.flags, **flags}
        if "valid_folder" in flags:
            said["valid_fraction"] = None
        if "dataset" not in flags:
            said = {self.script.data.flag: f"{self.script.data.demonstration}:{N}", **said}
        if "dataset" not in flags and str(said[self.script.data.flag]).startswith("demo:"):
            said |= dict.fromkeys(CROPS)  # of demonstrations nothing is cut
        given = {name: value for name, value in said.items() if value is not None}
        return self.open(self.script.parsed(*words(given)), process or Process())


CROPS = {"crop": "random", "crop_area": "0.3,0.9"}
IMAGES = Kind(VAE, image_data, image, {"random_flip": [], **CROPS}, "images", "image")
CONDITIONED = Kind(
    DECODER, lambda args, process: decoder_data(
        args, process, image_size=8, **{f"takes_{kind}": kind in args.condition_on for kind in ("image", "text")}
    ),
    conditioned_image, CROPS, "images", "image",
)  # fmt: skip
SOUNDS = Kind(
    MULAN, lambda args, process: sound_data(args, process, open_tokenizer(str(TOKENIZER), 8)), sound,
    {"clip_seconds": 0.5}, "waveforms", "sound",
)  # fmt: skip
VIDEOS = Kind(VIDEO_TOKENIZER, video_data, video, {"num_frames": 3, "random_flip": [], **CROPS}, "videos", "clip")

Records = Mapping[int, Record]
MEDIA = {"wav": "audio", "gif": "video"}  # other files are images


def in_folder(folder: Path, records: Records) -> Path:
    folder.mkdir(parents=True)
    for number, record in records.items():
        for ending, content in record.items():
            (folder / f"{number:03d}.{ending}").write_bytes(content)
    return folder


def in_tars(folder: Path, records: Records) -> Path:
    """Of 16 samples each, with another file beside each, and files beside the tars."""
    numbers = sorted(records)
    for shard, first in enumerate(range(0, len(numbers), 16)):
        samples = {f"{number:03d}": {**records[number], "cls": b"1"} for number in numbers[first : first + 16]}
        write_tar(folder / f"{shard:05d}.tar", samples)
        (folder / f"{shard:05d}_stats.json").touch()
    return folder


def cells(record: Record) -> dict[str, Any]:
    """What stands beside the file of a record, as columns of a table have it."""
    captions, found = captions_in(record), dict[str, Any]()
    if "txt" in record:
        found |= {"captions": captions} if "wav" in record else {"text": "".join(captions)}
    arrays = {"img_emb.npy": "image_embed", "text_emb.npy": "text_encodings"}
    return found | {
        name: np.load(io.BytesIO(record[ending])).tolist() for ending, name in arrays.items() if ending in record
    }


def captions_in(record: Record) -> list[str]:
    return record.get("txt", b"").decode(errors="replace").splitlines()


def as_table(write: Callable[..., Path]) -> Callable[..., Path]:
    """`columns`: more of them."""

    def written(folder: Path, records: Records, **columns: Sequence[Any]) -> Path:
        rows = [cells(record) for record in records.values()]
        first = next(iter(records.values()))
        media = [{"bytes": next(iter(record.values())), "path": None} for record in records.values()]
        beside = {name: [row.get(name) for row in rows] for name in dict.fromkeys(itertools.chain(*rows))}
        return write(folder, table({MEDIA.get(next(iter(first)), "image"): media, **beside, **columns}))

    return written


def as_manifest(ending: str) -> Callable[..., Path]:
    """The files lie in a folder beside. `columns`: more of them."""

    def written(folder: Path, records: Records, **columns: Sequence[Any]) -> Path:
        in_folder(folder / "files", records)
        rows = [
            {"path": f"files/{number:03d}.{next(iter(record))}", **cells(record)} for number, record in records.items()
        ]
        for name, values in columns.items():
            for row, value in zip(rows, values, strict=True):
                row[name] = value
        path = folder / f"set.{ending}"
        if ending == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            with path.open("w", newline="") as file:
                table = csv.DictWriter(file, [*dict.fromkeys(itertools.chain(*rows))])
                table.writeheader()
                table.writerows(
                    {k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows
                )
        return path

    return written


def decoded(record: Record) -> Any:
    """A record as the item of a user's own dataset."""
    content = io.BytesIO(next(iter(record.values())))
    if "wav" in record:
        samples, rate = soundfile.read(content, dtype="float32")
        return samples.T, rate, captions_in(record)
    picture = Image.open(content)
    if "gif" in record:
        frames = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(picture)]
        return np.stack(frames).transpose(0, 3, 1, 2).copy()
    beside = cells(record)
    for name in beside.keys() & {"image_embed", "text_encodings"}:
        beside[name] = np.array(beside[name], np.float32)
    return {"image": picture, **beside} if beside else picture


def as_dataset(folder: Path, records: Records) -> str:
    """A function of a module, as --dataset names it."""
    folder.mkdir(parents=True)
    contents = [*records.values()]
    return named(Items(lambda index: decoded(contents[index]), len(contents), " ".join(map(str, records))))


@dataclass(frozen=True, eq=False)
class Source:
    """A place of samples of a kind.

    Args:
        write: Writes records below a folder that is not there yet; returns what names them. None: the kind's
            demonstration.
        flags: More flags.
    """

    kind: Kind
    place: str
    write: Callable[[Path, Records], Path | str] | None
    flags: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind.script.data.flag.split('_')[0]}-{self.kind.loaded}-{self.place}"

    def written(self, folder: Path, numbers: Iterable[int] = range(N), **changed: Record) -> dict[str, Any]:
        """Write the records of these numbers; returns the flags of a run on them. `changed`: n3=..., other records."""
        if self.write is None:
            return dict(self.flags)
        records = {number: changed.get(f"n{number}") or self.kind.record(number) for number in numbers}
        flag = "dataset" if self.place == "own" else self.kind.script.data.flag
        return {**self.flags, flag: self.write(folder, records)}


FILES: dict[str, Callable[..., Path | str] | None] = {
    "folder": in_folder, "tars": in_tars, "arrow": as_table(save_to_disk), "parquet": as_table(write_parquet),
    "csv": as_manifest("csv"), "manifest": as_manifest("jsonl"), "own": as_dataset, "demonstration": None,
}  # fmt: skip
KINDS = {"images": IMAGES, "conditioned": CONDITIONED, "sounds": SOUNDS, "videos": VIDEOS}
SOURCES = {
    f"{name} of {place}": Source(kind, place, write) for name, kind in KINDS.items() for place, write in FILES.items()
}
SOURCES["videos and images"] = Source(VIDEOS, "two", None, {"image_folder": "demo:shapes:12", "image_every": 3})


def training(feed: TrainingData, n: int, start: int = 0) -> list[dict]:
    """The first n batches from a sample on."""
    return [feed.start(start), *(feed.next() for _ in range(n - 1))]


def passes(kind: Kind, flags: Mapping[str, Any], n: int, world_size: int = 1, start: int = 0) -> dict[str, list[dict]]:
    """n batches of training, a validation and a preview of 5, those of all processes put together."""

    def of_process(process: Process) -> dict[str, list[dict]]:
        feed = kind.feed(process, **flags)
        batches = training(feed, n, start)
        return {"train": batches, "preview": [feed.preview(5)], "valid": [*feed.validation()]}

    found = on_processes(world_size, of_process)
    train = [joined(parts) for parts in zip(*(of["train"] for of in found), strict=True)]
    for of in found:
        assert_same(of["preview"], found[0]["preview"])
    valid = by_position(joined([*itertools.chain(*(of["valid"] for of in found))]))
    return {"train": train, "preview": found[0]["preview"], "valid": [valid]}


def by_position(batch: dict) -> dict:
    """A batch with its samples in the order of their positions."""
    order = np.argsort(batch["positions"])
    return {
        key: [value[place] for place in order] if isinstance(value, list) else value[order]
        for key, value in batch.items()
    }
