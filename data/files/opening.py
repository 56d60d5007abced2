"""Helpers to open a set of samples: the files of a folder, the names of generated sets, optional packages."""

from __future__ import annotations

import os
import stat

PREFIX = "demo:"
DEFAULT_SIZE, LARGEST_SIZE = 4096, 1 << 22
_LONGEST_QUOTE = 60


def list_files(folder: str, endings: tuple[str, ...], what: str, demo: str) -> tuple[list[str], int]:
    """Relative paths ('/' between the parts) of the files below `folder` with such endings (lower case), sorted, and
    the number of other files. No file is opened.

    Linked folders are followed, but each real folder is visited once; names that begin with a dot are skipped.
    Raises ValueError, in one line, if the folder is missing, no folder or not readable; the message asks for a folder
    of `what`, or the set `demo`.
    """
    try:
        mode = os.stat(folder).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"there is no folder {folder!r}: give the path of a folder of {what}, or {demo} to try without one"
        ) from None
    except OSError as error:
        raise ValueError(f"cannot read the folder {folder!r}: {error.strerror}") from None
    if not stat.S_ISDIR(mode):
        raise ValueError(f"{folder!r} is a file, not a folder: give the path of the folder that holds the {what}")
    files: list[str] = []
    n_others = 0
    visited = set()
    pending = [""]
    while pending:
        relative = pending.pop()
        identity, entries = _scan(os.path.join(folder, relative))
        if identity in visited:
            continue
        visited.add(identity)
        folders = []
        for entry in entries:
            name = f"{relative}/{entry.name}" if relative else entry.name
            is_folder, is_file = _kind(entry)
            if is_folder:
                folders.append(name)
            elif entry.name.lower().endswith(endings) and is_file:
                files.append(name)
            else:
                n_others += 1
        pending += sorted(folders, reverse=True)  # of two links to one folder, follow the first in order
    return sorted(files), n_others


def _kind(entry: os.DirEntry[str]) -> tuple[bool, bool]:
    """Whether an entry is a folder, and whether it is a file; neither, if it is a link to itself."""
    try:
        return entry.is_dir(), entry.is_file()
    except OSError:
        return False, False


def nothing_found(what: str, folder: str, n_others: int, endings: tuple[str, ...]) -> ValueError:
    """The error for a folder without samples: it names the endings that are read and counts the other files."""
    return ValueError(
        f"no {what} in {folder!r}, which holds {n_others} other file{'' if n_others == 1 else 's'}: "
        f"files that end in {' '.join(endings)} are read, in the folder and in those below it"
    )


def _scan(path: str) -> tuple[tuple[int, int], list[os.DirEntry[str]]]:
    """Folder -> (device and inode, which identify the folder under any path; its entries without hidden ones)."""
    try:
        status = os.stat(path)
        with os.scandir(path) as entries:
            return (status.st_dev, status.st_ino), [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise ValueError(f"cannot read the folder {path!r}: {error.strerror}") from None


def demonstration_size(spec: str, name: str, noun: str) -> int | None:
    """How many samples the set `demo:<name>` or `demo:<name>:<number>` holds; None if `spec` names no demonstration.
    `noun` is what messages call the samples.

    Raises ValueError, in one line, if `spec` names another demonstration, or its number is not a positive integer.
    """
    if not spec.startswith(PREFIX):
        return None
    said, _, number = spec.removeprefix(PREFIX).partition(":")
    if said != name:
        raise ValueError(f"there is no demonstration set {spec!r}: the only one is {PREFIX}{name}")
    if number == "":
        return DEFAULT_SIZE
    is_number = number.isascii() and number.isdigit() and len(number) <= len(str(LARGEST_SIZE))
    if not (is_number and 0 < int(number) <= LARGEST_SIZE):
        raise ValueError(
            f"{spec[:_LONGEST_QUOTE]!r} asks for {number[:_LONGEST_QUOTE]!r} {noun}, which is no number from 1 to "
            f"{LARGEST_SIZE}: write e.g. {PREFIX}{name}:{DEFAULT_SIZE}"
        )
    return int(number)


def missing_package(what: str, package: str, extra: str = "audio") -> ValueError:
    """The error that says how to install `package`, without which `what` does not work, by an extra of setup.py."""
    return ValueError(
        f'{what} needs the package {package}: pip install "tandem-training[{extra}]", or from a checkout '
        f'pip install -e ".[{extra}]"'
    )
