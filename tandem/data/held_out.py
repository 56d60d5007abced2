"""What a run did not train on: its validation and test split, found again by its data and its flags."""

from __future__ import annotations

import argparse
import hashlib
import os
from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

from tandem.data.sources.files import is_address
from tandem.data.sources.own import data_of

from .feed import divided
from .fields import Joined, Samples
from .sets import images_of, videos_of


class Part(Samples):
    """Some samples of a set, by their indices."""

    def __init__(self, samples: Samples, indices: Iterable[int]) -> None:
        self._samples, self._indices = samples, array("q", indices)
        self.fingerprint = samples.fingerprint + hashlib.sha256(self._indices.tobytes()).hexdigest()
        self.skipped = samples.skipped

    def __len__(self) -> int:
        return len(self._indices)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        return self._samples.load(self._indices[index], epoch, augment)

    def describe(self, index: int) -> str:
        return self._samples.describe(self._indices[index])

    def name(self, index: int) -> str:
        return self._samples.name(self._indices[index])


class Divided(NamedTuple):
    """What a run trains on, what it holds out for validations and a test, in the order of its data, and the fingerprint
    of the samples that are divided."""

    trained: Samples
    held_out: Samples
    fingerprint: str


def divided_by(run: argparse.Namespace, **how: Any) -> Divided:
    """The data of a run with these arguments, as it is now; `how`: see `images_of`. Raises ValueError, in one line, if
    there are no such samples or too few."""
    is_of_videos = run.data_flag == "video_folder"
    open_set = videos_of(run) if is_of_videos else images_of(run, **how)
    spec = data_of(run, run.data_flag)
    samples = open_set(spec)
    train, *others = divided(samples, run, str(spec))
    trained: Samples = Part(samples, map(train.at, range(len(train))))
    left_out = sorted(indices.at(place) for indices in others for place in range(len(indices)))
    held_out: Samples = Part(samples, left_out)
    if run.valid_folder:
        held_out = Joined(held_out, open_set(run.valid_folder))
    if is_of_videos and run.image_folder:
        trained = Joined(trained, images_of(run)(run.image_folder))
    return Divided(trained, held_out, samples.fingerprint)


def count_trained_on(run: argparse.Namespace, samples: Samples, data: str) -> tuple[int, str | None]:
    """How many of the samples, which are in `data`, a run with these arguments trains on: those with the same path; and
    the fingerprint of its data, None if no folder of that can share files with `data`, so that none was listed. Raises
    what `divided_by` raises, and ValueError, in one line, if paths do not tell."""
    folders = [folder for name in ("image_folder", "video_folder") if (folder := getattr(run, name, None))]
    if run.dataset:
        raise ValueError(f"the run's data is --dataset {run.dataset}, whose items have no paths")
    if data.startswith("demo:") and any(folder.startswith("demo:") for folder in folders):
        raise ValueError(f"{data} and the run's data, {' and '.join(folders)}, are drawn and have no paths")
    if not any(_may_share_files(folder, data) for folder in folders):
        return 0, None
    of_run = divided_by(run)
    paths = {os.path.abspath(of_run.trained.describe(index)) for index in range(len(of_run.trained))}
    return sum(os.path.abspath(samples.describe(index)) in paths for index in range(len(samples))), of_run.fingerprint


def places_of(run: argparse.Namespace) -> str:
    """Where the data of a run is. A relative path is one from the folder of this process."""
    folders = [folder for name in ("image_folder", "video_folder") if (folder := getattr(run, name, None))]
    drawn_or_far = [folder.startswith("demo:") or is_address(folder) for folder in folders]
    return " and ".join(
        folder if stays else os.path.abspath(folder) for folder, stays in zip(folders, drawn_or_far, strict=True)
    )


def _may_share_files(one: str, other: str) -> bool:
    """Whether one of two paths of data is the other, or lies inside it."""
    if any(path.startswith("demo:") for path in (one, other)):
        return False
    outer, inner = sorted((path if is_address(path) else os.path.realpath(path) for path in (one, other)), key=len)
    return inner == outer or inner.startswith(os.path.join(outer, ""))
