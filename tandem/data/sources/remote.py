"""Files in buckets and on servers, at any address that fsspec supports: read by ranges, with retries if a server
fails."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from tandem.io.installed import missing_package

from .cache import ShardCache
from .files import CREDENTIALS, SCHEME, LocalFile, RandomAccessFile, SeekableFile, redact

_PIECE = 16 << 20  # bytes of the longest request
_READ_AHEAD = 2 << 20  # bytes per request of a file that is read in small steps
_TRIES, _PAUSE_SECONDS = 5, 0.5  # the pause before the second attempt; each later pause is twice as long
_TIMEOUT_SECONDS, _SLOWEST_BYTES_PER_SECOND = 30.0, 1 << 18  # a request may take these seconds, plus size / this rate
_CONNECTIONS = 32
_SECRET = re.compile(r"[?&;][^=&;]*(sig|token|key|secret|pass|pwd|credential|auth)[^=&;]*=", re.IGNORECASE)
# Only this module retries requests: retries of libraries would multiply the attempts.
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"retries": {"total_max_attempts": 1}, "max_pool_connections": _CONNECTIONS}},
    "http": {"client_kwargs": {"trust_env": True}},  # passwords are in ~/.netrc
}
_EXTRA_PROTOCOLS = ("s3", "http", "hf")  # protocols of the extra `remote`
_PROTOCOL_ALIASES = {"s3a": "s3", "https": "http"}


class _Info(NamedTuple):
    size: int | None  # None: a folder
    version: str


def version(address: str) -> str:
    """A text that changes with the file: its size, and the server's checksum or time of modification. Raises OSError
    and ValueError, in one line."""
    return _fetch_info(address).version


def check_address(address: str) -> None:
    """Raise ValueError, in one line, if an address holds a password: run folders store flags, and other users see
    command lines."""
    if CREDENTIALS.search(address) or (_protocol(address) == "http" and _SECRET.search(address)):
        raise ValueError(
            f"{redact(address)!r} came with a password, key or signature, which would stand in config.yaml: give the "
            "address without it, and the password in ~/.netrc or as the server's own tools read it (docs/data.md)"
        )


def is_pattern(address: str) -> bool:
    """Whether an address is a pattern of several files, which the server has to list."""
    return re.search(r"[*\[]", address) is not None


def list_addresses(pattern: str) -> list[str]:
    """The addresses of a pattern, or of all files below a folder, sorted.

    Raises ValueError, in one line, if there are none, the server lists no files, refuses access or does not answer.
    """
    if _protocol(pattern) == "http":
        raise ValueError(
            f"{redact(pattern)!r} cannot be listed, because web servers list no files: give a range, such as "
            f"{redact(pattern).rpartition('/')[0]}/{{00000..00099}}.tar"
        )
    try:
        infos = _request(pattern, "glob" if is_pattern(pattern) else "find", detail=True)
    except OSError as error:
        raise ValueError(f"cannot list {redact(pattern)!r}: {error.strerror}") from None
    if not infos:
        raise ValueError(f"no file is named like {redact(pattern)!r}")
    fs_class, lowered = _fs_class(pattern)
    prefix = lowered.rstrip("/").removesuffix(fs_class._strip_protocol(lowered))
    addresses = {prefix + name: info for name, info in sorted(infos.items())}
    for address, info in addresses.items():
        with contextlib.suppress(OSError):  # a request for the single file may give what the listing lacks
            _listed_infos[address] = _parse_info(address, info)
    return [*addresses]


class RemoteFile(SeekableFile):
    """A file on a server; each process requests `size` once.

    Args:
        ahead: If above 0, each request asks for at least this many bytes, and the last answer is buffered: for files
            that are read in small steps.

    Raises:
        OSError: in one line, without passwords; the file cannot be read.
    """

    def __init__(self, address: str, ahead: int = 0) -> None:
        self._address, self._ahead = address, ahead
        self._buffer = (0, b"")  # offset and content

    @functools.cached_property
    def size(self) -> int:
        size = _fetch_info(self._address).size
        if size is None:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), redact(self._address))
        return size

    def pread(self, size: int, offset: int) -> bytes:
        """At most `size` bytes from `offset`; fewer only at the end of the file."""
        start, content = self._buffer
        if self._ahead and not start <= offset <= offset + size <= start + len(content):
            start, content = self._buffer = (offset, self._read(max(size, self._ahead), offset))
        return content[offset - start :][:size] if self._ahead else self._read(size, offset)

    def _read(self, size: int, offset: int) -> bytes:
        if not offset and size <= _PIECE and "size" not in self.__dict__:  # to ask for the size costs another request
            try:
                content = self._fetch_piece(0, size, least=0)
            except OSError as error:
                if error.errno != errno.EINVAL or self.size:  # an empty file has no ranges
                    raise
                return b""
            if len(content) == size or len(content) == self.size:
                return content
        end = min(offset + size, self.size)
        return b"".join(self._fetch_piece(at, min(_PIECE, end - at)) for at in range(offset, end, _PIECE))

    def _fetch_piece(self, offset: int, size: int, least: int | None = None) -> bytes:
        def check(content: bytes) -> None:
            if len(content) > size:
                raise OSError(errno.ENOTSUP, "the server sends whole files only, no parts of them")
            if len(content) < (size if least is None else least):
                raise ConnectionError("the server sent a part of the answer")

        return _request(self._address, "cat_file", check, size, start=offset, end=offset + size)


@contextlib.contextmanager
def open_remote(address: str, is_part: bool, ahead: int) -> Iterator[RandomAccessFile]:
    """The file at an address, see `open_range` for the arguments."""
    if is_part and (local := _open_cached(address)) is not None:
        with local:
            yield LocalFile(local)
    else:
        yield RemoteFile(address, min(ahead, _READ_AHEAD))


def configure(cache_dir: str | None, cache_gb: float = 0.0, shards: Sequence[str] = (), at_once: int = 1) -> None:
    """Cache whole shards in a folder of the local disk from now on, at most `cache_gb` * 10^9 bytes. With
    `cache_dir` None, files are read by ranges. This setting holds for processes forked later, too.

    Args:
        shards: Addresses of the training shards, of which `at_once` are read at a time: only these are cached; without
            any, all are.

    Raises:
        OSError, ValueError: in one line; the folder cannot be written to, or so many shards do not fit.
    """
    global _cache, _cached_addresses
    _cached_addresses = frozenset(shards)
    _cache = None if cache_dir is None else ShardCache(cache_dir, int(cache_gb * 1e9))
    if _cache is not None and shards:
        n_bytes = sum(sorted((_fetch_info(address).size or 0 for address in shards), reverse=True)[:at_once])
        if n_bytes > _cache.limit:
            raise ValueError(
                f"--cache_gb {cache_gb:g} is too little: {at_once} shards, which are needed at a time, have up to "
                f"{n_bytes / 1e9:.3g} GB, so that each would be fetched again and again"
            )


def fetch_shards(addresses: Mapping[int, str], shards: Sequence[range]) -> None:
    """Begin to fetch shards into the cache, in a thread; a reader waits for its shard. `addresses`: of the shards, by
    the index of their first sample."""
    shard_addresses = [addresses[shard.start] for shard in shards if shard.start in addresses]
    first = os.getpid() % max(len(shard_addresses), 1)  # processes begin with different shards

    def fetch() -> None:
        for address in shard_addresses[first:] + shard_addresses[:first]:
            with contextlib.suppress(OSError, ValueError):  # the reader of the shard gets the error, too
                if file := _open_cached(address):
                    file.close()

    threading.Thread(target=fetch, daemon=True).start()


_cache: ShardCache | None = None
_cached_addresses: frozenset[str] = frozenset()


def _open_cached(address: str) -> BinaryIO | None:
    """The local copy of a shard; None if it is not to be cached, or the cache has no room or fails. Raises errors of
    the server."""
    if _cache is None or (_cached_addresses and address not in _cached_addresses):
        return None
    size, file_version = _fetch_info(address)
    try:
        return None if size is None else _cache.open(f"{address}\n{file_version}", size, RemoteFile(address).pread)
    except OSError as error:
        if error.filename == redact(address):  # only errors of the server have this file name
            raise
        return None


def _protocol(address: str) -> str:
    """The scheme of an address; schemes of the same file system of fsspec have one name."""
    match = SCHEME.match(address)
    assert match is not None, address
    scheme = match[1].lower()
    return _PROTOCOL_ALIASES.get(scheme, scheme)


_listed_infos: dict[str, _Info] = {}  # from listings, by address; `_fetch_info` removes what it returns


@functools.lru_cache(maxsize=1 << 16)
def _fetch_info(address: str) -> _Info:
    """Size and version of a file, requested once in each process. Raises OSError and ValueError, in one line."""
    return _listed_infos.pop(address, None) or _parse_info(address, _request(address, "info"))


def _parse_info(address: str, info: Mapping[str, Any]) -> _Info:
    if info["type"] == "directory":
        return _Info(None, "")
    if not isinstance(size := info.get("size"), int):
        raise OSError(errno.ENOTSUP, "the server does not say how long the file is", redact(address))
    names = ("ETag", "etag", "md5Hash", "blob_id", "Last-Modified", "LastModified", "mtime", "updated")
    return _Info(size, f"{size} {next((info[name] for name in names if info.get(name) is not None), '')}")


@functools.lru_cache(maxsize=64)
def _make_filesystem(pid: int, thread: int, protocol: str, options: tuple[tuple[str, Any], ...]) -> Any:
    """A file system of fsspec: one per process, because the threads of its connections do not survive a fork; and one
    per thread if it is not asynchronous, because its connections then serve one request at a time."""
    import fsspec

    filesystem = fsspec.filesystem(protocol, skip_instance_cache=True, **_OPTIONS.get(protocol, {}), **dict(options))
    if protocol == "s3":
        filesystem.retries = 1
    return filesystem


def _fs_class(address: str) -> tuple[Any, str]:
    """The class of the file system for an address, and the address with the scheme in lower case, as it requires.
    Raises ValueError, in one line."""
    protocol = _protocol(address)
    try:
        import fsspec

        fs_class = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        package = error.name or getattr(error.__cause__, "name", None)  # fsspec's own errors have no name, but a cause
        if package and (package == "fsspec" or protocol in _EXTRA_PROTOCOLS):
            raise missing_package(redact(address), package, "remote") from None
        raise ValueError(f"{redact(address)} needs a package for {protocol}:// ({error})") from None
    except ValueError:
        raise ValueError(f"{redact(address)}: fsspec knows no addresses that begin with {protocol}://") from None
    if protocol in ("file", "local", "memory") or "::" in address:
        raise ValueError(f"{redact(address)} is no address of a server: give a path for files of this machine")
    scheme, path = address.split("://", 1)
    return fs_class, f"{scheme.lower()}://{path}"


def _filesystem(fs_class: Any, address: str) -> tuple[Any, str]:
    """The file system of an address, and the file's path there. Some connect at once, so it can raise anything."""
    options, thread = fs_class._get_kwargs_from_urls(address), 0 if fs_class.async_impl else threading.get_ident()
    try:
        filesystem = _make_filesystem(os.getpid(), thread, _protocol(address), tuple(sorted(options.items())))
    except (TypeError, AttributeError) as error:  # it needs options that no address holds
        raise ValueError(str(error)) from None
    return filesystem, fs_class._strip_protocol(address)


async def _fetch_range(http: Any, address: str, start: int, end: int) -> bytes:
    """Bytes start .. end - 1 of a file on a web server. A server may ignore the range and send the whole file: then one
    byte more is returned."""
    session = await http.set_session()
    content = bytearray()
    async with session.get(http.encode_url(address), headers={"Range": f"bytes={start}-{end - 1}"}) as answer:
        answer.raise_for_status()
        while len(content) <= end - start and (piece := await answer.content.readany()):
            content += piece
        if len(content) > end - start:
            answer.close()
    return bytes(content[: end - start + 1])


def _request(
    address: str, method: str, check: Callable[[Any], None] = lambda _: None, size: int = 0, **arguments: Any
) -> Any:
    """The result, of about `size` bytes, of a method of the file system for a file. `check` raises OSError if the
    result is incomplete. Failures are retried with growing pauses, unless a retry would fail, too.

    Raises OSError and ValueError, in one line that quotes no server and no library, whose texts may hold passwords.
    """
    fs_class, lowered = _fs_class(address)
    seconds = _TIMEOUT_SECONDS + size / _SLOWEST_BYTES_PER_SECOND
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE_SECONDS * 2 ** (attempt - 1) * (0.5 + random.SystemRandom().random()))
        try:
            filesystem, path = _filesystem(fs_class, lowered)
            if filesystem.async_impl:
                from fsspec.asyn import sync

                call = getattr(filesystem, f"_{method}")
                if method == "cat_file" and _protocol(address) == "http":
                    call = functools.partial(_fetch_range, filesystem)
                answer = sync(filesystem.loop, call, path, timeout=seconds, **arguments)
            else:
                answer = getattr(filesystem, method)(path, **arguments)
            check(answer)
            return answer
        except MemoryError:
            raise
        except Exception as error:
            code, reason = _explain_error(error, seconds)
            if code != errno.EIO:
                raise OSError(code, reason, redact(address)) from None
    raise OSError(errno.EIO, f"{reason}, {_TRIES} times in a row", redact(address)) from None


def _explain_error(error: BaseException, seconds: float) -> tuple[int, str]:
    """The errno of an error, EIO if another attempt may succeed, and a line for the user."""
    # fsspec raises FileNotFoundError for any failed request, and s3fs its own errors in place of botocore's.
    cause = error.__cause__
    if cause is not None and (isinstance(error, FileNotFoundError) or hasattr(cause, "response")):
        error = cause
    status, name = _http_status(error), type(error).__name__
    if isinstance(error, PermissionError) or status in (401, 403, 407) or "Credential" in name:
        return errno.EACCES, "the server refuses access: it asks for credentials that may read this"
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return errno.ENOENT, "the server has no such file"
    if isinstance(error, OSError) and error.errno == errno.ENOTSUP:
        return errno.ENOTSUP, str(error.strerror)
    if isinstance(error, TimeoutError) or "Timeout" in name:
        return errno.EIO, f"the server gave no answer in {seconds:.0f} seconds"
    if 400 <= status < 500 and status not in (408, 425, 429):
        return errno.EINVAL, f"the server refuses the request, with status {status}"
    if (isinstance(error, (ValueError, TypeError)) and "Decode" not in name) or "Validation" in name:
        return errno.EINVAL, "it is no address that can be read"
    return errno.EIO, f"the server answers with status {status}" if status else f"the connection failed ({name})"


def _http_status(error: BaseException) -> int:
    """The status of HTTP in an error of aiohttp, botocore or huggingface_hub; 0 if there is none."""
    response = getattr(error, "response", None)
    codes = [getattr(error, "status", 0), getattr(error, "code", 0), getattr(response, "status_code", 0)]
    if isinstance(response, dict):
        codes.append(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return next((int(code) for code in codes if str(code).isdigit() and int(code)), 0)
