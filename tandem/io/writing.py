"""Writing of files so that a reader, or a run after a crash, sees the whole old or the whole new content.

No link is followed in the place of a temporary file, a lock file or a file to append to: otherwise whoever put the
link there could make a program overwrite any file of the user.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import itertools
import os
import re
import select
import shutil
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from .installed import program
from .reading import counted, open_regular, printable

_UMASK = os.umask(0)
os.umask(_UMASK)
NEW_FILE_MODE = 0o666 & ~_UMASK  # of open(); read here, because os.umask() is not thread-safe

#: The name of the thread that writes checkpoints; a process waits for it before it ends.
WRITER = "checkpoint"

LOCK_SECONDS = 10.0  # after a restart by the launcher, an old process may still be ending
LEASE_SECONDS = 120.0  # an NFS server keeps the lock of a crashed machine for 90 s by default
_WRITE_SECONDS = 1.0  # after which `say` gives up: a stopped terminal accepts nothing
_LONGEST_NAME = 255  # bytes of the name of a file
_LONGEST_HOLDER = 200  # bytes of a lock file that an error quotes


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file beside `path`, sync it, and rename it over `path`. Raises OSError."""
    with replacing(path) as temporary, create(temporary) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(
    path: Path, *, name: str | None = None, mode: int | None = NEW_FILE_MODE, is_synced: bool = True
) -> Iterator[Path]:
    """Yields the path of a temporary file beside `path`, which the body makes. Then the file is synced, if `is_synced`,
    and renamed over `path`. If anything fails, it is deleted and `path` is unchanged.

    Args:
        name: Name of the temporary file (default: one for each `path`). A leftover file of this name, from a killed
            process, is deleted.
        mode: The permissions of the file; None: those from the body.
    """
    temporary = path.with_name(name or _temporary_name(path.name))
    temporary.unlink(missing_ok=True)  # the leftover of a killed process, or a link
    try:
        yield temporary
        if mode is not None:
            temporary.chmod(mode)  # safetensors makes files that only the owner can read
        if is_synced:
            sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _temporary_name(name: str) -> str:
    temporary = f".{name}.tmp"
    if len(os.fsencode(temporary)) > _LONGEST_NAME:
        temporary = f".{hashlib.sha256(os.fsencode(name)).hexdigest()}.tmp"
    return temporary


def create(path: Path, mode: int = 0o666) -> BinaryIO:
    """Open a new file for writing; the umask applies to `mode`. Raises FileExistsError if the file or a link exists."""
    return os.fdopen(_open(path, os.O_WRONLY | os.O_EXCL, mode), "wb")


def open_appending(path: Path) -> BinaryIO:
    """Open a file for appending; make it if there is none. Its descriptor can be read, too.

    Raises:
        OSError: it cannot be opened, or is a link, a pipe or a device.
    """
    descriptor = _open(path, os.O_RDWR | os.O_APPEND)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file; remove it", str(path))
    return os.fdopen(descriptor, "ab")


def acquire_lock(
    path: Path, heartbeat: Callable[[str], None] = lambda phase: None, lease_seconds: float = LEASE_SECONDS
) -> BinaryIO:
    """Lock a file until the returned file is closed or this process ends.

    Waits up to 10 s for another process. If that is not known to run on this machine, reports it in one line and waits
    up to `lease_seconds` in all: a file server notices late that a machine has crashed. `heartbeat` is called
    during the wait.

    Raises:
        OSError: the file cannot be made, or is a link, a pipe or a device.
        ValueError: another process holds the lock.
    """
    file = open_appending(path)
    start, has_reported = time.monotonic(), False
    while not _try_lock(file):
        holder, seconds = _read_holder(path), time.monotonic() - start
        if seconds >= LOCK_SECONDS and (_is_running(_local_process(holder)) or seconds >= lease_seconds):
            file.close()
            raise ValueError(f"{path.parent} is in use by {holder}; end it first, or give another --output_dir")
        if seconds >= LOCK_SECONDS and not has_reported:
            has_reported = True
            say(
                f"{path.parent} is in use by {holder}; waiting for up to {counted(lease_seconds / 60, 'minute')}, in "
                "case that its machine has crashed and a file server has not noticed yet"
            )
        heartbeat(f"waiting for {path.parent}, which is in use by {holder}")
        time.sleep(0.2)
    file.truncate(0)
    file.write(f"{_this_process()} since {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}".encode())
    file.flush()
    return file


def _try_lock(file: BinaryIO) -> bool:
    """Lock the file; false if another process holds its lock. Also true on a file system without locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        pass
    return True


def wait_for_lock(file: BinaryIO, heartbeat: Callable[[], None] = lambda: None, byte: int | None = None) -> bool:
    """Lock a file, or one byte of it, until the file is closed; returns whether another process held the lock. It is
    polled, because a blocking call would look like one that hangs. Raises OSError on a file system without locks."""
    part, has_waited = () if byte is None else (1, byte), False
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, *part)
            return has_waited
        except (BlockingIOError, PermissionError):
            has_waited = True
            heartbeat()
            time.sleep(0.1)


def other_holder(path: Path, ours: BinaryIO) -> str | None:
    """None as long as the lock file at `path` is the file `ours`, which this process has locked, or does not exist. If
    the folder was replaced, the last process that wrote the file there, in words; None if it is this process."""
    # Do not open our own file: closing it once would release the lock.
    with contextlib.suppress(FileNotFoundError):
        if not os.path.samestat(os.fstat(ours.fileno()), path.stat()):
            holder = _read_holder(path)
            return None if holder.partition(" since ")[0] == _this_process() else holder
    return None


def is_stale_lock(path: Path) -> bool:
    """Whether the lock file `path` is that of a process of this machine that has ended. False if that is unknown, as
    for a process of another machine, or without locks. This process must not hold the lock."""
    process = _local_process(_read_holder(path))
    if process is None or _is_running(process):
        return False
    try:
        # Containers may share the machine's name, but not see each other's processes; they share the lock, too.
        with open_regular(path) as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (OSError, ValueError):
        return False
    return True


def move_aside(folder: Path) -> Path:
    """Rename a folder to a free name beside it, such as vae.old-1, make an empty one in its place, and return the new
    path. Of a link, which stays, the folder that it leads to is renamed."""
    folder = Path(os.path.realpath(folder) if folder.is_symlink() else os.path.abspath(folder))
    names = (folder.with_name(f"{folder.name}.old-{number}") for number in itertools.count(1))
    old_folder = folder.rename(next(path for path in names if not os.path.lexists(path)))
    folder.mkdir()
    return old_folder


def free_name(path: Path) -> Path:
    """`path` if nothing has this name, else the first free name with -2, -3, ... appended."""
    others = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(name for name in itertools.chain([path], others) if not os.path.lexists(name))


def delete(path: Path) -> str | None:
    """Delete a file, a link (not its target), or a folder with its content. Returns None, or the reason if something
    could not be deleted; then as much of a folder as possible is deleted."""
    try:
        os.unlink(path) if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)  # the first call ended at the first error
        return str(error.strerror or error) if os.path.lexists(path) else None
    return None


def sync(path: Path) -> None:
    """Make a file's content, or a folder's list of names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def processor_time(thread: threading.Thread) -> int | None:
    """Nanoseconds of processor time of a thread: they grow while it writes, but not while a disk hangs. None if the
    thread has ended, or the system does not state them."""
    try:  # proc(5); the C library's function may crash if the thread has ended
        return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_bytes().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def open_standard_streams() -> None:
    """Open the null device in place of standard streams that were closed before the start of this process. Otherwise
    sys.stderr, for example, is None, and the next file or socket gets the number of the closed stream, 2, so that C
    code writes its messages into this file. And escape what the encoding of a stream lacks: names of files may have any
    characters, and bytes that are no characters."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            assert null == descriptor, (null, descriptor)
            os.set_inheritable(null, True)
            if getattr(sys, name) is None:
                setattr(sys, name, open(null, "w" if descriptor else "r", closefd=False))  # noqa: SIM115
        if descriptor and isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str, *, unbuffered: bool = False) -> None:
    """Print one line on stderr, after the program's name; a closed stderr is ignored.

    `unbuffered` is for threads other than the main one, because the main thread may be inside print, or blocked there
    by a stopped terminal. The line is written to the file descriptor, past sys.stderr; on a terminal it begins below a
    progress bar.
    """
    with contextlib.suppress(OSError, ValueError):  # ValueError: the Python object is closed
        if not unbuffered:
            print(f"{program()}: {printable(text)}", file=sys.stderr, flush=True)
        elif select.select([], [2], [], _WRITE_SECONDS)[1]:
            newline = "\n" if os.isatty(2) else ""
            os.write(2, f"{newline}{program()}: {printable(text)}\n".encode(errors="replace"))


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _local_process(holder: str) -> int | None:
    """The process id in the description of a lock's holder, if it is or was a process of this machine."""
    match = re.match(r"process (\d{1,9}) on (\S+)", holder)
    return int(match[1]) if match and match[2] == socket.gethostname() else None


def _is_running(process: int | None) -> bool:
    if process is None:
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # of another user
    return True


def _read_holder(path: Path) -> str:
    """The last writer of a lock file, and when it took the lock, in words. This process must not hold it."""
    try:
        with open_regular(path) as file:
            holder = file.read(_LONGEST_HOLDER).decode(errors="replace").strip()
    except (OSError, ValueError):
        holder = ""
    return printable(holder) or "another process"


def _open(path: Path, flags: int, mode: int = 0o666) -> int:
    # O_NONBLOCK: opening a pipe that nobody reads would wait for ever.
    flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(errno.ELOOP, "it is a link; remove it", str(path)) from None
        raise
