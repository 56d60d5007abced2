"""Writing files so that a reader, or a run after a crash, sees either the old or the new content, never a part."""

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, TextIO

_UMASK = os.umask(0)
os.umask(_UMASK)
NEW_FILE_MODE = 0o666 & ~_UMASK  # what open() gives a new file; read here, because os.umask() is not safe in a thread

_LOCK_SECONDS = 10.0  # after a restart by the launcher, an old process may still be ending


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file beside `path`, sync it, and rename it over `path`."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing, damaged, or holds something else."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def hold(path: Path) -> TextIO:
    """Lock a file until the returned file is closed or this process ends. Waits up to 10 s for another process.

    Raises:
        ValueError: another process holds the lock.
    """
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 stays open, because closing it would release the lock
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            if time.monotonic() < deadline:
                time.sleep(0.2)
                continue
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise ValueError(
                f"{path.parent} is in use by {holder}; end it first, or give another --output_dir"
            ) from None
        except OSError:
            return file  # a file system without locks
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        return file


def sync(path: Path) -> None:
    """Make a file's content, or a folder's list of names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
