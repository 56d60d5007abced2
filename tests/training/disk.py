"""A disk that fails."""

import errno
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.files import reading


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
