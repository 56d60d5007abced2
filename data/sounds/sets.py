"""The sets of sounds with captions that a script can train on."""

from __future__ import annotations

import glob
import os
import re
from typing import Protocol

from ..contracts import Samples
from ..opening import demonstration_size
from .decoding import ClipDecoder, require_decoders
from .manifest import ENDINGS as MANIFEST_ENDINGS
from .manifest import Manifest
from .sidecars import SoundFolder, Texts, list_sounds
from .tars import Tars
from .tones import Tones

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


class Sounds(Samples, Protocol):
    """A numbered set of sounds; a sample is a clip of one, contiguous float32 (clip_samples,) in [-1, 1]."""

    def texts(self, index: int) -> Texts:
        """The texts of the sound: one caption or several, and its class if the set has classes.

        Raises OSError or ValueError, in one line, if there is no caption.
        """
        ...


def open_sounds(spec: str | None, *, sample_rate: int, clip_seconds: float, seed: int = 0) -> Sounds:
    """Open a set of sounds by its name:

    - `demo:tones` (also None), `demo:tones:<number of sounds>`;
    - a manifest, .csv, .tsv or JSON lines (see `Manifest`);
    - a folder of sounds, each with a .txt or .json beside it (see `SoundFolder`);
    - webdataset tars (see `Tars`): one .tar, a folder of them, a pattern (`tars/*.tar`) or a range (`{000..010}.tar`).

    No sound is opened. Raises ValueError, in one line, if there is no such set or nothing in it.
    """
    if not (sample_rate > 0 and round(clip_seconds * sample_rate) > 0):
        raise ValueError(f"there is no sample in a clip of {clip_seconds:g} s at {sample_rate} Hz")
    clips = ClipDecoder(sample_rate, round(clip_seconds * sample_rate), seed)
    spec = "demo:tones" if spec is None else spec
    if (n := demonstration_size(spec, "tones", "sounds")) is not None:
        return Tones(n, sample_rate=sample_rate, clip_samples=clips.clip_samples, seed=seed)
    require_decoders()
    return _open_files(os.path.expanduser(spec), clips)


def _open_files(path: str, clips: ClipDecoder) -> Sounds:
    if os.path.isfile(path):
        if path.lower().endswith(MANIFEST_ENDINGS):
            return Manifest(path, clips)
        return Tars(_only_tars([path]), clips)
    if not os.path.exists(path) and (_RANGE.search(path) or glob.has_magic(path)):
        return Tars(_only_tars(_expanded(path)), clips)
    listed = list_sounds(path)
    tars = [name for name in listed if name.lower().endswith(".tar")]
    if tars and len(tars) < len(listed):
        loose = next(name for name in listed if not name.lower().endswith(".tar"))
        raise ValueError(
            f"{path!r} holds tars and loose files, such as {tars[0]!r} and {loose!r}: "
            f"give the one or the other, e.g. {os.path.join(path, '*.tar')!r}"
        )
    return Tars([os.path.join(path, name) for name in tars], clips) if tars else SoundFolder(path, listed, clips)


def _only_tars(paths: list[str]) -> list[str]:
    for path in paths:
        if not path.lower().endswith(".tar"):
            hint = f"give a manifest ({' '.join(MANIFEST_ENDINGS)}), a folder of sounds, or tars"
            if path.lower().endswith((".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")):
                hint = "decompress it first: a compressed tar cannot be read at random"
            raise ValueError(f"{path!r} is no set of sounds: {hint}")
    return paths


def _expanded(pattern: str) -> list[str]:
    """Paths of `{000..010}` and `*`, in order."""
    paths = [pattern]
    while _RANGE.search(paths[0]):
        paths = [expanded for path in paths for expanded in _counted(path)]
    if glob.has_magic(pattern):
        found = sorted(match for path in paths for match in glob.glob(path))
        if not found:
            raise ValueError(f"no file is named like {pattern!r}")
        return found
    if missing := [path for path in paths if not os.path.exists(path)]:
        n_missing = f"{len(missing)} of the {len(paths)} files of {pattern!r} are missing"
        raise ValueError(f"{n_missing}, the first is {missing[0]!r}")
    return paths


def _counted(path: str) -> list[str]:
    match = _RANGE.search(path)
    assert match is not None
    first, last = match.groups()
    if int(last) < int(first):
        raise ValueError(f"the range {match[0]} in {path!r} is empty: write the smaller number first")
    numbers = range(int(first), int(last) + 1)
    return [f"{path[: match.start()]}{number:0{len(first)}d}{path[match.end() :]}" for number in numbers]
