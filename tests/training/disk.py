"""A disk that fails, and what a kill leaves on it."""

import errno
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tandem.io import reading

# Names of the C functions and methods that change the disk.
FILE_OPERATIONS = {
    "open", "write", "flush", "fsync", "mkdir", "rename", "replace", "truncate", "unlink", "rmdir", "scandir",
    "serialize_file", "__exit__",
}  # fmt: skip


def left_by_kills(folder: Path, action: Callable[[], object]) -> list[Path]:
    """Copies of a folder, each as a kill before or after a file operation of the action would leave it, in their order
    and without those that are equal to the one before; the last one is that of no kill.

    The operations are those of this thread and of those that the action starts, of which one at a time may change the
    folder. A kernel keeps what a killed process has written, and what stands in its buffers is lost; so it is in a
    copy.
    """
    copies: list[Path] = []
    seen: list[dict[str, bytes | None]] = []

    def copy() -> None:
        content = {str(path): None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}
        if not seen or content != seen[-1]:
            seen.append(content)
            copies.append(folder.with_name(f"{folder.name} {len(copies)}"))
            shutil.copytree(folder, copies[-1])

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("c_call", "c_return") and getattr(argument, "__name__", "") in FILE_OPERATIONS:
            copy()

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    copy()
    return copies


def failing(
    monkeypatch: pytest.MonkeyPatch,
    first: int,
    names: tuple[str, ...],
    *,
    reason: int = errno.ENOSPC,
    forever: bool = True,
    any_thread: bool = False,
) -> list[str]:
    """The call number `first`, from 1, of these functions of os, or Path.write_text, fails, and all later ones if
    `forever`; returns the names of those that did. Other threads are left alone, unless `any_thread`, and so is what
    reads a file, because a disk that cannot be written can be read."""
    failed: list[str] = []
    count, owner = 0, threading.get_ident()

    def of(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            is_reading = sys._getframe(1).f_globals["__name__"] == reading.__name__
            if not is_reading and (any_thread or threading.get_ident() == owner):
                count += 1
                if count == first or (forever and count > first):
                    failed.append(original.__name__)
                    raise OSError(reason, os.strerror(reason), str(args[0]))
            return original(*args, **kwargs)

        return call

    for name in names:
        home = Path if name == "write_text" else os
        monkeypatch.setattr(home, name, of(getattr(home, name)))
    return failed


def busy(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Files of this name cannot be deleted, as on NFS those that a process holds open."""
    unlink = os.unlink

    def call(path: Any, **kwargs: Any) -> None:
        if os.path.basename(path) == name:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        unlink(path, **kwargs)

    monkeypatch.setattr(os, "unlink", call)
