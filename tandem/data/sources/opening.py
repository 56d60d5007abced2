"""The choice of the source by a path: a manifest, tars, tables, or the files of a folder."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import re
from collections import Counter
from collections.abc import Sequence

from braceexpand import braceexpand

from . import remote
from .files import is_url, redact
from .folder import FolderSource, NothingFoundError, about_skipped, ending_of, skipped_line
from .manifest import ENDINGS as MANIFEST_ENDINGS
from .manifest import ManifestSource
from .record import FieldSpec, Files, RecordSource
from .table import ENDINGS as TABLE_ENDINGS
from .table import TableSource, check_alike, saved_files, tables_below
from .tar import TarSource, number_of

_BRACES = re.compile(r"\{([^{}]*(?:,|\.\.)[^{}]*)\}")
_RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)(?:\.\.-?[0-9]+)?")
_SERVER_ENDINGS = (".tar", *TABLE_ENDINGS, *MANIFEST_ENDINGS)
_MAX_FILES = 1 << 20  # of a pattern
_LONGEST_QUOTE = 200


def open_source(
    spec: str,
    field_specs: Sequence[FieldSpec],
    *,
    demo: str,
    start_shard: int = 0,
    end_shard: int | None = None,
    shard_width: int = 6,
    folder: str | None = None,
) -> RecordSource:
    """The samples of a path: a folder of files; a manifest; a .tar, a folder of tars, a pattern (`tars/*.tar`) or a
    range of them (`{000..010}.tar`), or a path with `{}` for the number; a .arrow or .parquet, a folder, a pattern or a
    range of them.

    Args:
        demo: The demonstration that messages recommend, such as "demo:shapes".
        start_shard, end_shard: Numbers of the first and of the last tar, inclusive; None: no limit.
        shard_width: Digits of the number in the place of `{}`.
        folder: The folder of the files that a manifest names, by default its own.

    Raises ValueError, in one line, if the path leads to no such source, or to one without samples.
    """
    path = _fill_number(os.path.expanduser(spec), start_shard, end_shard, shard_width)
    selects_tars = bool(start_shard) or end_shard is not None
    source = _find_files(path) or _open_folder(path, field_specs, demo)
    if isinstance(source, Files):
        paths = source.paths
        if _all_end_with(paths, (".tar",)):
            paths = _select_tars(paths, start_shard, end_shard) if selects_tars else paths
            return TarSource(paths, field_specs, source.skipped)
        if _all_end_with(paths, TABLE_ENDINGS):
            source = TableSource(source, field_specs)
        elif len(paths) == 1 and _all_end_with(paths, MANIFEST_ENDINGS):
            source = ManifestSource(paths[0], field_specs, folder)
        else:
            raise _unknown_source_error(path, paths, f"{field_specs[0].noun}s")
    if selects_tars:
        raise ValueError(f"--start_shard and --end_shard select tars, and {spec!r} holds none")
    return source


def _find_files(path: str) -> Files | None:
    """The files of a path; of a folder on a server, all tars or tables in it; None for a local path that is neither
    a file nor a pattern."""
    if path.startswith("pipe:"):
        raise ValueError(f"{path!r} is no path: files are read at random, so copy them to a disk of this machine first")
    if not is_url(path):
        if os.path.exists(path):
            return Files([path]) if os.path.isfile(path) else None
        return Files(expand_pattern(path)) if _BRACES.search(path) or glob.has_magic(path) else None
    remote.check_address(path)
    if _BRACES.search(path) or remote.is_pattern(path) or _all_end_with([path], _SERVER_ENDINGS):
        return Files(expand_pattern(path))
    files = remote.list_addresses(path)
    shards = [file for file in files if _all_end_with([file], (".tar",))]
    if not shards:
        shards = [file for file in files if _all_end_with([file], TABLE_ENDINGS)]
        check_alike(path, shards)
    others = Counter(map(ending_of, {*files} - {*shards}))
    skipped = skipped_line("file", repr(redact(path)), others.total(), about_skipped(others))
    return Files(shards, skipped=skipped) if shards else Files(files)


def _open_folder(path: str, field_specs: Sequence[FieldSpec], demo: str) -> RecordSource | Files:
    """The source of the files or tables below a folder, or of a folder of `save_to_disk`, or the paths of the tars."""
    try:
        folder = FolderSource(path, field_specs, demo)
    except NothingFoundError:
        with contextlib.suppress(NothingFoundError):
            return TableSource(saved_files(path) or tables_below(path), field_specs)
        raise
    if folder.tars and len(folder):
        raise ValueError(
            f"{path!r} holds tars and loose files, such as {folder.tars[0]!r} and {folder.describe(0)!r}: "
            f"give the one or the other, e.g. {os.path.join(path, '*.tar')!r}"
        )
    return Files(folder.tars, skipped=folder.skipped) if folder.tars else folder


def _all_end_with(paths: Sequence[str], endings: tuple[str, ...]) -> bool:
    return all(redact(path).lower().endswith(endings) for path in paths)


def _unknown_source_error(path: str, files: Sequence[str], noun: str) -> ValueError:
    hint = f"give a manifest ({' '.join(MANIFEST_ENDINGS)}), a folder of {noun}, or tars"
    if is_url(path):
        hint = "give tars, tables or a manifest, which may list single files on a server"
    elif _all_end_with(files, (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")):
        hint = "decompress it first: a compressed tar cannot be read at random"
    return ValueError(f"{redact(path)!r} is no set of {noun}: {hint}")


def _fill_number(path: str, first: int, last: int | None, width: int) -> str:
    """The pattern or range for a path with `{}`; other paths are returned unchanged."""
    if "{}" not in path:
        return path
    if last is None:
        return path.replace("{}", "[0-9]" * width)
    if last < first:
        raise ValueError(f"--end_shard {last} is smaller than --start_shard {first}")
    return path.replace("{}", f"{{{first:0{width}d}..{last:0{width}d}}}")


def _select_tars(paths: list[str], first: int, last: int | None) -> list[str]:
    numbers = [number_of(path, "--start_shard") for path in paths]
    last = max(numbers) if last is None else last
    selected = [path for path, number in zip(paths, numbers, strict=True) if first <= number <= last]
    if not selected:
        raise ValueError(
            f"no tar has a number from --start_shard {first} to --end_shard {last}: they have {min(numbers)} to "
            f"{max(numbers)}"
        )
    return selected


def expand_pattern(pattern: str) -> list[str]:
    """Paths of `{000..010}`, `{a,b}` and `*`, in order. Raises ValueError, in one line, if there are none, or it is an
    address with a password."""
    if is_url(pattern):
        remote.check_address(pattern)
    n_paths, quoted = 1, repr(pattern[:_LONGEST_QUOTE])
    for choices in _BRACES.findall(pattern):
        bounds = _RANGE.fullmatch(choices)
        n_paths *= int(bounds[2]) - int(bounds[1]) + 1 if bounds else choices.count(",") + 1
        if n_paths < 1:
            raise ValueError(f"the range {{{choices}}} in {quoted} is empty: write the smaller number first")
    paths = [*itertools.islice(braceexpand(pattern, escape=False), _MAX_FILES + 1)] if n_paths <= _MAX_FILES else []
    if not 0 < len(paths) <= _MAX_FILES:
        raise ValueError(f"{quoted} stands for more than {_MAX_FILES} files: name fewer at a time")
    if is_url(pattern):  # missing files are reported when they are opened
        return [file for path in paths for file in (remote.list_addresses(path) if remote.is_pattern(path) else [path])]
    if glob.has_magic(pattern):
        paths = sorted(match for path in paths for match in glob.glob(path))
        if not paths:
            raise ValueError(f"no file is named like {pattern!r}")
    elif missing := [path for path in paths if not os.path.exists(path)]:
        missing_text = f"{len(missing)} of the {len(paths)} files of {pattern!r} are missing"
        raise ValueError(f"{missing_text}, the first is {missing[0]!r}")
    return paths
