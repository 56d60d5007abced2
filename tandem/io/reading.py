"""Reading of untrusted files: no pipe or device, a bounded length, one kind of error.

Links are followed: data sets and run folders may be linked. Only the files of a model folder or a checkpoint must be
inside it, see `check_inside`.
"""

from __future__ import annotations

import errno
import json
import lzma
import os
import re
import stat
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import yaml

READ_ERRORS: tuple[type[Exception], ...] = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, EOFError,
    MemoryError, NotImplementedError, struct.error, zipfile.BadZipFile, zlib.error,
    lzma.LZMAError, SyntaxError, tokenize.TokenError,
)  # fmt: skip
"""Errors of reading and parsing a damaged or hostile file (numpy parses headers as Python). Who reads safetensors files
catches SafetensorError, too. RuntimeError is not among them, because PyTorch raises it for mistakes of this program."""

# The longest files that are read whole. Config files have a few kB, and PyYAML takes a second for 100 kB.
LONGEST_FILE_BYTES, LONGEST_YAML_BYTES = 1 << 26, 1 << 18
BYTE_ORDER_MARK = "\ufeff"  # at the start of a file; texts joined by `cat` or copied from web pages have it inside
_LONGEST_LINE = 1 << 20  # bytes
_LONGEST_ERROR = 500  # characters
_OS_ERROR = re.compile(r"\(os error (\d+)\)$")  # system errors in messages of Rust, such as safetensors'
# Content that often stands in a file of another kind by mistake: its first bytes, its name, and the advice.
_OTHER_KINDS = (
    (rb"version https://git-lfs", "a pointer of Git LFS in the place of the file",
     "run `git lfs pull` in its repository, or download the file itself"),
    (rb"(?i)\s*<(!doctype|html|\?xml)", "a web page", "the download went wrong, perhaps for want of a login"),
    (rb"\x1f\x8b|\xfd7zXZ|BZh[1-9]|\x28\xb5\x2f\xfd|7z\xbc\xaf|Rar!\x1a|PK\x03\x04", "a compressed file", "unpack it"),
    (rb"\xff\xfe|\xfe\xff|([\t\n\r -~]\x00){2}|(\x00[\t\n\r -~]){2}", "UTF-16 text", "save it as UTF-8"),
)  # fmt: skip
LONGEST_BEGINNING = 512  # bytes that determine the kind of a file
# Lists, objects and keys in one file, and nodes of a YAML file with its aliases expanded. An empty list takes three
# bytes in a file and 64 in memory; numbers, which grow much less, are not counted.
_MOST_VALUES = 1 << 22


def open_regular(path: str | Path, limit: int | None = None) -> BinaryIO:
    """Open a file of at most `limit` bytes for reading; links are followed.

    Raises:
        OSError: it is missing, a folder or not readable.
        ValueError: one line, if it is longer, or no regular file: reading a pipe or a device may never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        _check_kind(path, status.st_mode)
        if limit is not None and status.st_size > limit:
            raise _too_long_error(path, limit)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: Path) -> Path:
    """The path, for a library that opens it by itself.

    Raises:
        OSError: it is missing or a folder.
        ValueError: one line, if it is a pipe or a device.
    """
    _check_kind(path, path.stat().st_mode)
    return path


def check_inside(path: Path, folder: Path) -> Path:
    """The path of a file in a folder, or in the cache of the Hugging Face Hub if the folder is one of its snapshots.

    Raises:
        ValueError: one line, if it is a link that leaves the folder: an untrusted folder may hold links to any file.
    """
    # realpath, because resolve() raises RuntimeError for links that lead to themselves; opening these raises OSError.
    if path.is_symlink():
        target, root = os.path.dirname(os.path.realpath(path)), os.path.realpath(folder)
        if target != root and not any(f"{target}/".startswith(f"{blobs}/") for blobs in _blob_folders(root)):
            raise ValueError(f"{path.name} is a link that leaves the folder; copy the folder with `cp -rL`")
    return path


def _blob_folders(folder: str) -> tuple[str, ...]:
    """The folders that links in a Hub snapshot, CACHE/models--USER--NAME/snapshots/COMMIT, point into: blobs/ of the
    model and of the cache. () for a folder that is no snapshot."""
    match = re.fullmatch(r"((.*)/models--[^/]+)/snapshots/[0-9a-f]{40}(?:/.*)?", folder)
    return (f"{match[1]}/blobs", f"{match[2]}/blobs") if match else ()


def read_bytes(path: str | Path, limit: int = LONGEST_FILE_BYTES) -> bytes:
    """The content of a regular file of at most `limit` bytes. Raises OSError and ValueError, as `open_regular`."""
    with open_regular(path, limit) as file:
        content = file.read(limit + 1)  # some system files, such as in /proc, do not state their length
    if len(content) > limit:
        raise _too_long_error(path, limit)
    return content


def read_lines(path: str | Path, first_byte: int = 0) -> Iterator[bytes]:
    """The lines of a file of any length, from a byte on. Raises OSError; ValueError if it is no regular file or a line
    is too long."""
    with open_regular(path) as file:
        file.seek(first_byte)
        while line := file.readline(_LONGEST_LINE + 1):
            if len(line) > _LONGEST_LINE:
                raise ValueError(f"a line of {os.path.basename(path)} is longer than {_LONGEST_LINE} bytes")
            yield line


def wrong_kind_text(beginning: bytes, more_kinds: tuple[tuple[bytes, str, str], ...] = ()) -> str:
    """If a file begins like one of another kind, such as a pointer of Git LFS: the part of a message that names the
    kind and says what to do; otherwise "". The kinds are `_OTHER_KINDS` and ``more_kinds``, tuples of the same form.
    ``beginning``: its first `LONGEST_BEGINNING` bytes."""
    for pattern, kind, remedy in (*_OTHER_KINDS, *more_kinds):
        if re.match(pattern, beginning):
            return f"it is {kind}; {remedy}"
    return ""


def plain_text(content: bytes) -> str:
    """A UTF-8 text without byte order marks. Raises ValueError, in one line, if it is not UTF-8."""
    if reason := wrong_kind_text(content[:LONGEST_BEGINNING]):
        raise ValueError(reason)
    try:
        return content.decode().replace(BYTE_ORDER_MARK, "")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no UTF-8 text ({error.reason}): save it as UTF-8") from None


def text_lines(text: str) -> list[str]:
    """The lines of a text, stripped, without empty ones. A line ends with CR or LF, as in editors: Unicode's other line
    separators, such as U+2028, occur inside texts of web pages."""
    return [line for part in re.split("[\r\n]", text) if (line := part.strip())]


def parse_json(content: bytes, **hooks: Any) -> Any:
    """The value in JSON; `hooks` are those of json.loads.

    Raises:
        ValueError: one line, if it is no JSON, nested too deeply, or has too many lists and objects for the memory.
    """
    if sum(map(content.count, (b"[", b"{", b":"))) > _MOST_VALUES:
        raise ValueError(f"it holds more than {_MOST_VALUES} lists, objects and keys")
    try:
        return json.loads(content, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:
        if reason := wrong_kind_text(content[:LONGEST_BEGINNING]):
            raise ValueError(reason) from None
        raise


def read_json(path: str | Path, limit: int = LONGEST_FILE_BYTES) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        OSError, ValueError: one line; it cannot be read, is no regular file, too long or too deep, or holds no object.
    """
    content = parse_json(read_bytes(path, limit))
    if not isinstance(content, dict):
        raise ValueError(f"{os.path.basename(path)} holds no JSON object")
    return content


def read_json_or_empty(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing, damaged, or holds something else."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def read_yaml(path: str | Path) -> Any:
    """The value in a YAML file, by PyYAML's SafeLoader.

    Raises:
        OSError, ValueError: one line, as for `compose_yaml`.
    """
    return _parse_yaml(path, lambda loader, node: None if node is None else loader.construct_document(node))


def compose_yaml(path: str | Path) -> yaml.Node | None:
    """The nodes of a YAML file, with their text and lines; None if it is empty. Nothing is constructed.

    Raises:
        OSError: it cannot be read.
        ValueError: one line, if it is no regular file, no UTF-8 text, no YAML, too long or nested too deeply, or if
            aliases (`*name`) make it much longer than it is.
    """
    return _parse_yaml(path, lambda loader, node: node)


def error_text(error: BaseException) -> str:
    """The text of an error, in one line; for a system error, the system's reason, for a KeyError what is missing."""
    text = str(getattr(error, "strerror", None) or error)
    text = f"it lacks {text}" if isinstance(error, KeyError) and text else text
    if number := _OS_ERROR.search(text):
        text = os.strerror(int(number[1]))
    return printable(" ".join(text.split())) or type(error).__name__


def printable(text: str) -> str:
    """Text with ? in place of every control character, so that no quoted file can control the terminal, and with the
    bytes of names that are not UTF-8 escaped."""
    text = text.encode(errors="backslashreplace").decode()
    return "".join(character if character.isprintable() else "?" for character in text)


def counted(number: float, noun: str) -> str:
    """A number of things, such as "1 image", "2 processes" or "0.5 minutes"."""
    plural = f"{noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"
    return f"{f'{number:g}' if isinstance(number, float) else number} {noun if number == 1 else plural}"


def one_line(error: BaseException) -> str:
    """The first line of an exception's message, which may quote a file, or its type if the message is empty."""
    lines = str(error).strip().splitlines()
    return printable(lines[0].strip()[:_LONGEST_ERROR]) if lines else type(error).__name__


def _parse_yaml(path: str | Path, convert: Any) -> Any:
    import yaml

    text = plain_text(read_bytes(path, LONGEST_YAML_BYTES))
    errors: tuple[type[Exception], ...] = (yaml.YAMLError, *READ_ERRORS)  # tags that do not fit their text raise others
    try:
        loader = yaml.SafeLoader(text)
        loader.name = str(path)  # for messages about a line
        try:
            node = loader.get_single_node()
            _check_aliases(node)
            return convert(loader, node)
        finally:
            loader.dispose()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except errors as error:
        raise ValueError(error_text(error)) from None


def _check_aliases(root: Any) -> None:
    """Raise a ValueError if a tree of YAML nodes, with aliases expanded, is too large or endless: ten aliases of ten
    aliases of ... fill any memory when they are copied or printed."""
    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        if isinstance(node.value, str):
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = _MOST_VALUES + 1  # the size of a node that contains itself
            children = (child for entry in node.value for child in (entry if isinstance(entry, tuple) else (entry,)))
            sizes[id(node)] = 1 + sum(map(size, children))
        return sizes[id(node)]

    if root is not None and size(root) > _MOST_VALUES:
        raise ValueError("its aliases make it endless, or far longer than the file")


def _check_kind(path: str | Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise ValueError(f"{os.path.basename(path)} is not a regular file")


def _too_long_error(path: str | Path, limit: int) -> ValueError:
    return ValueError(f"{os.path.basename(path)} is longer than {limit} bytes")
