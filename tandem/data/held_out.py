"""The samples that a run trained on and those that it held out, its validation and test split: computed again from its
data and flags."""

from __future__ import annotations

import argparse
import hashlib
import os
from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

from tandem.data.sources.files import is_url
from tandem.data.sources.user_dataset import data_of

from .feed import make_split
from .fields import ConcatSamples, SampleDataset, SampleView
from .sets import image_opener, video_opener


class SampleSubset(SampleView):
    """Some samples of a set, by their indices."""

    def __init__(self, samples: SampleDataset, indices: Iterable[int]) -> None:
        self._samples, self._indices = samples, array("q", indices)
        self.fingerprint = samples.fingerprint + hashlib.sha256(self._indices.tobytes()).hexdigest()
        self.skipped = samples.skipped

    def __len__(self) -> int:
        return len(self._indices)

    def locate(self, index: int) -> tuple[SampleDataset, int]:
        return self._samples, self._indices[index]


class DataSplit(NamedTuple):
    """The samples that a run trains on, those that it holds out for validation and test, in the order of its data, and
    the fingerprint of the set before the split."""

    trained: SampleDataset
    held_out: SampleDataset
    fingerprint: str


def split_of_run(run: argparse.Namespace, **image_options: Any) -> DataSplit:
    """The split of the current data of a run with these arguments; `image_options`: see `image_opener`. Raises
    ValueError, in one line, if there are no such samples or too few."""
    is_video = run.data_flag == "video_folder"
    open_set = video_opener(run) if is_video else image_opener(run, **{"channels": run.channels, **image_options})
    spec = data_of(run, run.data_flag)
    samples = open_set(spec)
    train, *other_splits = make_split(samples, run, str(spec))
    train_samples: SampleDataset = SampleSubset(samples, map(train.at, range(len(train))))
    held_out_indices = sorted(indices.at(i) for indices in other_splits for i in range(len(indices)))
    held_out_samples: SampleDataset = SampleSubset(samples, held_out_indices)
    if run.valid_folder:
        held_out_samples = ConcatSamples(held_out_samples, open_set(run.valid_folder))
    if is_video and run.image_folder:
        train_samples = ConcatSamples(train_samples, image_opener(run, channels=run.channels)(run.image_folder))
    return DataSplit(train_samples, held_out_samples, samples.fingerprint)


def count_trained_on(run: argparse.Namespace, samples: SampleDataset, data: str) -> tuple[int, str | None]:
    """How many of the samples of `data` a run with these arguments trains on, compared by path; and the fingerprint of
    the run's data, None if it is another folder than `data` and was not listed. Raises what `split_of_run` raises, and
    ValueError, in one line, if there are no paths to compare."""
    folders = _data_folders(run)
    if run.dataset:
        raise ValueError(f"the run's data is --dataset {run.dataset}, whose items have no paths")
    if data.startswith("demo:") and any(folder.startswith("demo:") for folder in folders):
        raise ValueError(f"{data} and the run's data, {' and '.join(folders)}, are drawn and have no paths")
    if not any(_may_share_files(folder, data) for folder in folders):
        return 0, None
    split, real_folders = split_of_run(run), dict[str, str]()
    paths = {_real_path(split.trained.describe(index), real_folders) for index in range(len(split.trained))}
    n_trained_on = sum(_real_path(samples.describe(index), real_folders) in paths for index in range(len(samples)))
    return n_trained_on, split.fingerprint


def folders_of_run(run: argparse.Namespace) -> str:
    """The folders of a run's data, for a message. Relative paths are resolved from the current folder."""
    return " and ".join(
        folder if folder.startswith("demo:") or is_url(folder) else os.path.abspath(folder)
        for folder in _data_folders(run)
    )


def _data_folders(run: argparse.Namespace) -> list[str]:
    folders = [getattr(run, name, None) for name in ("image_folder", "video_folder")]
    return [os.path.expanduser(folder) for folder in folders if folder]


def _may_share_files(first: str, second: str) -> bool:
    """Whether two paths of data may lead to the same files: always, unless both are folders, neither of which lies
    inside the other. Manifests name any files, and patterns of tars have many spellings."""
    if any(path.startswith("demo:") for path in (first, second)):
        return False
    paths = [path if is_url(path) else os.path.realpath(os.path.expanduser(path)) for path in (first, second)]
    outer, inner = sorted(paths, key=len)
    are_folders = all(map(os.path.isdir, paths))
    return not are_folders or inner == outer or inner.startswith(os.path.join(outer, ""))


def _real_path(path: str, real_folders: dict[str, str]) -> str:
    """The path of a sample by its folder without links, which is looked up in `real_folders` or added to it. An address
    stays as it is."""
    if is_url(path):
        return path
    folder, name = os.path.split(path)
    if folder not in real_folders:
        real_folders[folder] = os.path.realpath(folder)
    return os.path.join(real_folders[folder], name)
