"""The sets of sounds with captions that a script can train on."""

from __future__ import annotations

import os
from typing import Protocol

from ..contracts import Samples
from ..files.find import ManifestFile, TarFiles, find_files
from ..files.opening import demonstration_size
from ..files.table_files import TableFiles
from ..own import OwnData
from .decoding import ClipDecoder, require_decoders
from .manifest import Manifest
from .own import OwnSounds
from .sidecars import SoundFolder, Texts, list_sounds
from .tables import TableSounds
from .tars import Tars
from .tones import Tones


class Sounds(Samples, Protocol):
    """A numbered set of sounds; a sample is a clip of one, contiguous float32 (clip_samples,) in [-1, 1]."""

    def texts(self, index: int) -> Texts:
        """The texts of the sound: one caption or several, and its class if the set has classes.

        Raises OSError or ValueError, in one line, if there is no caption.
        """
        ...


def open_sounds(spec: str | OwnData | None, *, sample_rate: int, clip_seconds: float, seed: int = 0) -> Sounds:
    """Open a set of sounds by its name:

    - `demo:tones` (also None), `demo:tones:<number of sounds>`;
    - a manifest, .csv, .tsv or JSON lines (see `Manifest`);
    - a folder of sounds, each with a .txt or .json beside it (see `SoundFolder`);
    - webdataset tars (see `Tars`): one .tar, a folder of them, a pattern (`tars/*.tar`) or a range (`{000..010}.tar`);
    - Arrow or parquet files, or a folder of them (see `data.files.tables`);
    - a user's own dataset (`OwnData`).

    No sound is opened. Raises ValueError, in one line, if there is no such set or nothing in it.
    """
    if not (sample_rate > 0 and round(clip_seconds * sample_rate) > 0):
        raise ValueError(f"there is no sample in a clip of {clip_seconds:g} s at {sample_rate} Hz")
    clips = ClipDecoder(sample_rate, round(clip_seconds * sample_rate), seed)
    spec = "demo:tones" if spec is None else spec
    if not isinstance(spec, OwnData) and (n := demonstration_size(spec, "tones", "sounds")) is not None:
        return Tones(n, sample_rate=sample_rate, clip_samples=clips.clip_samples, seed=seed)
    require_decoders()
    if isinstance(spec, OwnData):
        return OwnSounds(spec, clips)
    return _open_files(os.path.expanduser(spec), clips)


def _open_files(path: str, clips: ClipDecoder) -> Sounds:
    files = find_files(path, "sounds", list_sounds, tables=True)
    if isinstance(files, TableFiles):
        return TableSounds(files, clips)
    if isinstance(files, ManifestFile):
        return Manifest(files.path, clips)
    return Tars(files.paths, clips) if isinstance(files, TarFiles) else SoundFolder(files, clips)
