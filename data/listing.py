"""The files below a folder, found by their names; no file is opened."""

from __future__ import annotations

import os
import stat


def list_files(folder: str, endings: tuple[str, ...], what: str, demo: str) -> tuple[list[str], int]:
    """Relative paths ('/' between the parts) of the files below `folder` with such endings (lower case), sorted, and
    the number of other files; no file is opened.

    Linked folders are followed, each real folder is visited once; names that begin with a dot are passed over.
    Raises ValueError, in one line, where the folder is missing, no folder or not readable; it says that a folder of
    `what` is wanted, or the set `demo`.
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
            if entry.is_dir():
                folders.append(name)
            elif entry.name.lower().endswith(endings) and entry.is_file():
                files.append(name)
            else:
                n_others += 1
        pending += sorted(folders, reverse=True)  # of two links to one folder, follow the first in order
    return sorted(files), n_others


def _scan(path: str) -> tuple[tuple[int, int], list[os.DirEntry[str]]]:
    """Folder -> (device and inode, which identify it under any path; its entries without the hidden ones)."""
    try:
        status = os.stat(path)
        with os.scandir(path) as entries:
            return (status.st_dev, status.st_ino), [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise ValueError(f"cannot read the folder {path!r}: {error.strerror}") from None
