"""What a run did not train on: its validation and test split, found again by its data and its flags."""

from __future__ import annotations

import argparse
import hashlib
import os
from array import array
from collections.abc import Iterable
from typing import Any

from .feed import divided
from .fields import Joined, Samples
from .records.files import is_address
from .records.own import data_of
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


def divided_by(run: argparse.Namespace, **how: Any) -> tuple[Samples, Samples]:
    """What a run with these arguments trains on, and what it holds out for validations and a test, in the order of its
    data; `how`: see `images_of`. Raises ValueError, in one line, if there are no such samples or too few."""
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
    return trained, held_out


def count_trained_on(run: argparse.Namespace, samples: Samples, data: str) -> int:
    """How many of the samples, which are in `data`, a run with these arguments trains on: those with the same path. 0
    if its data is drawn, or no path but that of a user's dataset. Raises what `divided_by` raises."""
    folders = (getattr(run, name, None) for name in ("image_folder", "video_folder"))
    if run.dataset or not any(_may_share_files(folder, data) for folder in folders if folder):
        return 0
    trained, _ = divided_by(run)
    paths = {os.path.abspath(trained.describe(index)) for index in range(len(trained))}
    return sum(os.path.abspath(samples.describe(index)) in paths for index in range(len(samples)))


def _may_share_files(one: str, other: str) -> bool:
    """Whether one of two paths of data is the other, or lies inside it."""
    if any(path.startswith("demo:") for path in (one, other)):
        return False
    outer, inner = sorted((path if is_address(path) else os.path.realpath(path) for path in (one, other)), key=len)
    return inner == outer or inner.startswith(os.path.join(outer, ""))
