"""Files on servers: the bytes that are on disk, whatever the server does; the cache of shards; no passwords. Sets of
samples on servers are those on disk: the same order, the same bits."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tandem.data.sampling.workers import Loader
from tandem.data.sources import remote
from tandem.data.sources.cache import ShardCache
from tandem.data.sources.files import is_url, redact
from tandem.data.sources.opening import expand_pattern, open_source
from tandem.data.sources.record import FieldSpec, FileRef, open_range
from tandem.io.installed import how_to_install
from tests.data.helpers import assert_same, in_processes, one_line
from tests.data.source_table import FILES, IMAGES, KINDS, N, passes
from tests.fault_proxy import Proxy
from tests.file_servers import http_server, servers_of

SECRET = "hunter2"
PLACES = ["tars", "parquet", "arrow", "csv", "manifest"]


class Server(NamedTuple):
    """A server whose files are those of `folder`, behind a proxy; `address` is what the folder is called there."""

    address: str
    folder: Path
    proxy: Proxy


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`files` below it, and the set of each kind in each of `PLACES`."""
    root = tmp_path_factory.mktemp("root")
    folder, draw = root / "files", random.Random(0)
    folder.mkdir()
    for number, size in enumerate((300_000, 200_000, 250_000, 150_000, 0)):
        (folder / f"{number:03d}.tar").write_bytes(draw.randbytes(size))
    (folder / "private.tar").write_bytes(b"secret")
    (folder / "whole.tar").write_bytes(bytes(100))
    Image.effect_noise((64, 64), 50).save(folder / "a@b.png")
    pq.write_table(pa.table({"n": list(range(10_000))}), folder / "table.parquet", row_group_size=1000)
    return root


@pytest.fixture(scope="module")
def sets(root: Path) -> dict[tuple[str, str], Path]:
    """What names the set of a kind in a place."""
    found = {}
    for name, kind in KINDS.items():
        records = {number: kind.record(number) for number in range(N)}
        for place in PLACES:
            write: Any = FILES[place]
            found[name, place] = write(root / f"{name}-{place}", records)
    return found


@pytest.fixture(scope="module")
def servers(root: Path, sets: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    log = tmp_path_factory.mktemp("log") / "moto.log"
    with servers_of(root, log) as found:
        yield {name: Server(f"{at}/files", root / "files", proxy) for name, (at, proxy) in found.items()}
    remote.configure(None)


@pytest.fixture(autouse=True)
def right_answers(servers: dict[str, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    for server in servers.values():
        server.proxy.faults, server.proxy.always, server.proxy.requests = [], None, []
    monkeypatch.setattr(remote, "_PAUSE_SECONDS", 0.01)
    remote._fetch_info.cache_clear()


@pytest.fixture(params=["s3", "http"])
def server(request: pytest.FixtureRequest, servers: dict[str, Server]) -> Server:
    return servers[request.param]


@pytest.fixture
def no_cache() -> Iterator[None]:
    yield
    remote.configure(None)


def failure(call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """What a call says when it fails."""
    text = one_line(call, *arguments, **{"kind": OSError, **named})
    assert SECRET not in text
    return text


def read(address: str, size: int = 1000, offset: int = 5) -> bytes:
    with open_range(FileRef(address), ahead=0) as file:
        return file.pread(size, offset)


def gets(server: Server) -> int:
    return sum("GET" in request for request in server.proxy.requests)


@pytest.mark.parametrize("ahead", [0, 1 << 16])
def test_any_range_is_what_it_is_on_disk(server, ahead):
    content, draw = (server.folder / "000.tar").read_bytes(), random.Random(1)
    file = remote.RemoteFile(f"{server.address}/000.tar", ahead)
    for size in (1, 500, 70_000, 1 << 20, 1 << 40):
        offset = draw.randrange(len(content))
        assert file.pread(size, offset) == content[offset : offset + size]
    assert file.pread(10, len(content) - 3) == content[-3:] and file.size == len(content)
    assert [file.pread(10, offset) for offset in (len(content), 1 << 40)] == [b"", b""]


def test_what_begins_at_0_costs_no_request_for_the_size(server):
    content = (server.folder / "000.tar").read_bytes()
    assert read(f"{server.address}/000.tar", 1000, 0) == content[:1000]
    assert len(server.proxy.requests) == 1
    assert read(f"{server.address}/000.tar", 1 << 20, 0) == content
    assert read(f"{server.address}/004.tar", 1 << 20, 0) == b"", "an empty file"


def test_long_reads_are_several_requests_and_one_of_them_may_fail(server, monkeypatch):
    monkeypatch.setattr(remote, "_PIECE", 70_000)
    content = (server.folder / "000.tar").read_bytes()
    server.proxy.faults = [503, "half"]
    assert read(f"{server.address}/000.tar", 1 << 20, 7) == content[7:]
    assert gets(server) == 5 + 2


def test_entries_are_read_by_few_requests(server):
    png, tar = (server.folder / name for name in ("a@b.png", "000.tar"))
    whole, part = FileRef(f"{server.address}/a@b.png"), FileRef(f"{server.address}/000.tar", 1000, 50_000)
    assert whole.read(1 << 30) == png.read_bytes() and part.read(1 << 30) == tar.read_bytes()[1000:51_000]
    with open_range(whole) as file, Image.open(io.BufferedReader(file)) as image:
        assert image.tobytes() == Image.open(png).tobytes()
    server.proxy.requests.clear()
    with open_range(part) as file:
        assert b"".join(iter(lambda: file.read(100), b"")) == tar.read_bytes()[1000:51_000]
    assert gets(server) == 1, "500 small steps"


@pytest.mark.parametrize("fault", ["cut", "half", 500, 503, 429, "slow"])
def test_a_server_that_fails_is_asked_again(server, fault, monkeypatch):
    monkeypatch.setattr(remote, "_TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(server.proxy, "slow_seconds", 3.0)
    server.proxy.faults = [fault] * (1 if fault == "slow" else 4)
    content = (server.folder / "001.tar").read_bytes()
    assert read(f"{server.address}/001.tar", 1000, 5) == content[5:1005]
    assert not server.proxy.faults


def test_pauses_between_attempts_grow(server, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(remote, "_PAUSE_SECONDS", 0.5)
    monkeypatch.setattr(remote.time, "sleep", pauses.append)
    server.proxy.always = 503
    failure(read, f"{server.address}/001.tar")
    assert len(pauses) == 4
    assert all(0.5 * 2**i * 0.5 <= pause <= 0.5 * 2**i * 1.5 for i, pause in enumerate(pauses))


@pytest.mark.parametrize("fault, reason, n_requests", [
    ("cut", "failed", 5), ("half", "failed", 5), (503, "503", 5), ("slow", "no answer in", 5),
    (403, "refuses access", 1), (404, "no such file", 1), (400, "400", 1),
])  # fmt: skip
def test_a_failure_is_one_line_after_as_many_attempts_as_may_help(server, fault, reason, n_requests, monkeypatch):
    monkeypatch.setattr(remote, "_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(server.proxy, "slow_seconds", 0.6)
    server.proxy.always = fault
    text = failure(read, f"{server.address}/001.tar", offset=0 if n_requests == 1 else 5)
    assert reason in text and "001.tar" in text and ("5 times in a row" in text) == (n_requests == 5)
    assert gets(server) == n_requests


def test_missing_files_and_servers_and_rights_are_errors_of_one_line(server):
    assert "no such file" in failure(read, f"{server.address}/missing.tar")
    assert "no such file" in failure(remote.version, f"{server.address}/missing.tar")
    if server.address.startswith("http"):
        assert "refuses access" in failure(read, f"{server.address}/private.tar")
        assert "whole files only" in failure(read, f"{server.address}/whole.tar")
        assert "connection failed" in failure(read, "http://127.0.0.1:9/000.tar")


def test_no_message_holds_a_password_or_a_signature(server):
    server.proxy.always = 403
    for path in ("001.tar?X-Amz-Signature=hunter2", "001.tar#hunter2"):
        failure(read, f"{server.address}/{path}", offset=0)
    assert redact(f"https://me:{SECRET}@host:1/a@b/c.tar?sig={SECRET}") == "https://host:1/a@b/c.tar"
    assert redact("hf://datasets/a/b@main/c.tar") == "hf://datasets/a/b@main/c.tar"
    assert redact(f"https://me:pa/{SECRET}@host/c.tar") == "https://host/c.tar"
    assert redact("https://host:80/a@b.tar") == "https://host:80/a@b.tar"
    for address in (f"https://me:{SECRET}@host/a.tar", f"s3://key:{SECRET}@bucket/a", f"https://host/a?sig={SECRET}"):
        assert "config.yaml" in failure(opened, address, kind=ValueError)
    for pattern in (f"https://me:pa/{SECRET}@host/c.tar", f"http://host/e_{{0..1}}.npy?token={SECRET}"):
        assert "came with a password" in failure(expand_pattern, pattern, kind=ValueError)


IMAGE = FieldSpec("image", "image", (".png",), ("image",), feature="Image")


def opened(path: str):
    return open_source(path, [IMAGE], demo="demo:shapes")


def test_folders_and_patterns_are_listed_by_the_server(servers):
    at = servers["s3"].address
    tars = [f"{at}/{number:03d}.tar" for number in range(5)]
    for pattern in ("0*.tar", "{000..004}.tar", "00[0-4].tar", "0{00,01,02,03,04}.tar"):
        assert expand_pattern(f"{at}/{pattern}") == tars
    everything = remote.list_addresses(at)
    assert everything == remote.list_addresses(f"{at}/") == sorted(everything)
    assert {*tars, f"{at}/a@b.png", f"{at}/table.parquet"} <= set(everything)
    assert "no file" in one_line(expand_pattern, f"{at}/x*.tar")
    assert "no file" in one_line(opened, f"{at}/x")
    assert "no such file" in one_line(opened, "s3://another-bucket/x")
    assert "no such file" in one_line(opened, f"{at}/missing.tar")


def test_a_web_server_cannot_list_and_the_line_says_what_to_give(servers):
    at = servers["http"].address
    for address in (f"{at}/*.tar", f"{at}/"):
        assert "{00000..00099}.tar" in one_line(opened, address)
    assert expand_pattern(f"{at}/000.tar?download=true") == [f"{at}/000.tar?download=true"]


@pytest.mark.parametrize("address", ["nix://a/b", "file:///etc/passwd", "memory://a", "zip://a::s3://bucket/b.zip"])
def test_what_is_no_address_of_a_server_is_refused(address):
    assert address.partition("://")[0] in one_line(opened, address)


@pytest.mark.parametrize("scheme", ["github", "reference", "dbfs", "jlab", "generic", "dir"])
def test_an_address_that_cannot_be_read_is_an_error_of_one_line(scheme):
    text = failure(read, f"{scheme}://a", kind=Exception)
    assert "no address that can be read" in text or "a package for" in text


def test_a_server_that_refuses_connections_while_a_file_system_is_made_is_asked_again():
    assert "the connection failed (ConnectionRefusedError), 5 times" in failure(read, "ftp://127.0.0.1:9/a.tar")


@pytest.mark.parametrize(
    "kind, met, n", [(ValueError, OSError, 1), (MemoryError, MemoryError, 1), (OSError, OSError, 5)]
)
def test_what_would_fail_again_is_tried_once(server, kind, met, n):
    def check(_: bytes) -> None:
        raise kind("again")

    with pytest.raises(met):
        remote._request(f"{server.address}/001.tar", "cat_file", check, start=0, end=10)
    assert gets(server) == n


def test_of_a_server_without_ranges_no_more_is_read_than_was_asked_for(servers):
    seen: list[int] = []
    address = f"{servers['http'].address}/whole.tar"
    remote._request(address, "cat_file", lambda content: seen.append(len(content)), start=0, end=10)
    assert seen == [11]


def test_threads_share_connections_only_if_these_serve_several_requests():
    for address, is_shared in (("s3://bucket/a", True), ("webhdfs://host/a", False)):
        kind, lowered = remote._fs_class(address)
        with ThreadPoolExecutor(1) as thread:
            there, again = (thread.submit(remote._filesystem, kind, lowered).result()[0] for _ in range(2))
        assert there is again and (there is remote._filesystem(kind, lowered)[0]) == is_shared


def test_schemes_may_be_written_in_capitals(server):
    address = server.address.replace("s3", "S3").replace("http", "HTTP")
    assert read(f"{address}/001.tar") == (server.folder / "001.tar").read_bytes()[5:1005]
    if address.startswith("S3"):
        tars = [f"{server.address}/{number:03d}.tar" for number in range(2)]
        assert remote.list_addresses(f"{address}/00[01].tar") == tars


def test_what_a_listing_says_of_files_is_not_asked_again(servers):
    addresses = remote.list_addresses(f"{servers['s3'].address}/0*.tar")
    servers["s3"].proxy.requests.clear()
    said = [(remote.version(address), remote.RemoteFile(address).size) for address in addresses]
    assert not servers["s3"].proxy.requests and said[0][1] == 300_000
    remote._fetch_info.cache_clear()
    remote._make_filesystem.cache_clear()
    assert [(remote.version(address), remote.RemoteFile(address).size) for address in addresses] == said
    assert len(servers["s3"].proxy.requests) == len(said)


def test_a_package_that_is_missing_is_named(monkeypatch):
    text = one_line(opened, "gs://bucket/a.tar")
    assert "gcsfs" in text and ".[remote]" not in text, "which brings it not"
    for package, scheme in {"s3fs": "s3", "aiohttp": "http", "huggingface_hub": "hf", "fsspec": "s3"}.items():
        with monkeypatch.context() as patch:
            # Forget what was imported before; private: fsspec has no other way.
            patch.delitem(sys.modules["fsspec.registry"]._registry, scheme, raising=False)
            patch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
            patch.setitem(sys.modules, package, None)
            text = one_line(opened, f"{scheme}://bucket/a.tar")
        assert text == f"{scheme}://bucket/a.tar needs the package {package}: {how_to_install('remote')}"


def test_paths_of_this_machine_are_no_addresses():
    assert not any(map(is_url, ("/a/b.tar", "a.tar", "demo:shapes", "c:/a", "pipe:cat a", "://a")))
    assert all(map(is_url, ("s3://a/b", "https://a/b.tar", "hf://datasets/a")))


def test_files_have_versions(server):
    names = ["000.tar", "001.tar"]
    first = [remote.version(f"{server.address}/{name}") for name in names]
    assert len(set(first)) == 2 and first[0].startswith("300000 ")


def hashed(request: tuple[str, int]) -> tuple[int, int]:
    return os.getpid(), hash(read(request[0], 1000, request[1]))


def test_loader_processes_that_are_forked_make_connections_of_their_own(server):
    address = f"{server.address}/000.tar"
    requests = [(address, offset) for offset in range(0, 200_000, 10_000)]
    expected = [hashed(request)[1] for request in requests]  # the connection of this process is in use before the fork
    for _ in range(2):
        pids, found = zip(*Loader(hashed, requests, 2), strict=True)
        assert list(found) == expected and len(set(pids)) == 2 and os.getpid() not in pids
        assert hashed(requests[0])[1] == expected[0]


# Sets of samples.


@pytest.fixture
def address(root, sets, servers) -> Callable[..., str]:
    """What names a set on a server."""

    def of(server: str, name: str, place: str) -> str:
        path = sets[name, place]
        name = path.relative_to(root).as_posix()
        if server == "http" and path.is_dir():  # which cannot be listed
            files = sorted(file.name for ending in ("tar", "arrow", "parquet") for file in path.glob(f"*.{ending}"))
            name += f"/{files[0]}" if len(files) == 1 else f"/{{{','.join(files)}}}"
        return f"{servers[server].address.removesuffix('/files')}/{name}"

    return of


@pytest.fixture(scope="module")
def on_disk(sets) -> Callable[..., dict[str, list[dict]]]:
    """The batches of a set on disk."""

    @cache
    def of(name: str, place: str, shuffle: str = "samples") -> dict[str, list[dict]]:
        return passes(KINDS[name], flags(name, sets[name, place], shuffle=shuffle), 12)

    return of


def flags(name: str, path: Path | str, **more: Any) -> dict[str, Any]:
    return {KINDS[name].script.data.flag: path, **more}


def check_same(found: dict[str, list[dict]], expected: dict[str, list[dict]]) -> None:
    for part, batches in expected.items():
        assert_same(found[part], batches)


# Each place with images, each kind from tars; the other pairs too in `make test-all`.
SETS = [
    pytest.param("s3", name, place, marks=() if name == "images" or place == "tars" else pytest.mark.long)
    for name in KINDS
    for place in PLACES
]


@pytest.mark.parametrize("server, name, place", [*SETS, *(("http", "images", place) for place in PLACES)])
def test_a_set_on_a_server_is_the_set_on_disk(server, name, place, address, on_disk):
    check_same(passes(KINDS[name], flags(name, address(server, name, place)), 12), on_disk(name, place))


def test_files_of_a_bucket_that_are_not_read_are_counted(address, sets):
    at = address("s3", "images", "tars")
    said = opened(at).skipped
    n = len([*sets["images", "tars"].glob("*.json")])
    assert said.startswith(f"{n} files are skipped in {at!r}: {n} .json; ") and n > 1
    assert f"members are skipped in {n} tars, the first '{at}/00000.tar': {N} .cls, " in said


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_shards_that_are_kept_are_those_on_disk_for_any_number_of_processes_and_after_a_stop(
    world_size, address, on_disk, tmp_path, no_cache
):
    expected = on_disk("images", "tars", "shards")
    said = flags("images", address("s3", "images", "tars"), shuffle="shards", cache_dir=tmp_path, num_workers=2)
    check_same(passes(IMAGES, said, 12, world_size), expected)
    resumed = passes(IMAGES, said, 5, world_size, start=7 * 8)
    assert_same(resumed["train"], expected["train"][7:])
    assert len([*tmp_path.glob("?" * 64)]) == 2, "the third one is that of validation"


def test_a_sample_that_the_server_does_not_give_is_a_bad_one(address, servers):
    feed = IMAGES.feed(**flags("images", address("http", "images", "csv")), num_workers=0)
    feed.start(0)
    feed.report_bad_samples(lambda line: None)
    servers["http"].proxy.faults = [503] * 5
    assert len(feed.next()["ids"]) == 8
    said: list[str] = []
    feed.report_bad_samples(said.append)
    assert len(said) == 1 and "503, 5 times in a row; the next image takes its place" in said[0]


def test_a_list_on_a_server_names_no_files_of_this_machine(tmp_path):
    Image.new("RGB", (16, 16)).save(tmp_path / "mine.png")
    (tmp_path / "web").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "web/a.png")
    rows = [str(tmp_path / "mine.png"), "../mine.png", "~/mine.png", "file:///etc/passwd", "a.png"]
    (tmp_path / "web/set.csv").write_text("path\n" + "\n".join(rows))
    (tmp_path / "here.csv").write_text("path\nADDRESS/a.png?sig=hunter2\nweb/a.png")
    with http_server(tmp_path / "web") as at:
        source = opened(f"{at}/set.csv")
        for index in range(4):
            with pytest.raises(ValueError, match=r"outside the folder of its list|no address of a server"):
                source.record(index)["image"].read(100)
        assert source.record(4)["image"].read(1 << 20) == (tmp_path / "web/a.png").read_bytes()
        here = tmp_path / "here.csv"
        here.write_text(here.read_text().replace("ADDRESS", at))
        source = opened(str(here))
        contents = [source.record(index)["image"].read(1 << 20) for index in range(2)]
        assert contents == [(tmp_path / "web/a.png").read_bytes()] * 2
        assert source.describe(0) == f"{at}/a.png"


def test_a_damaged_arrow_file_on_a_server_is_refused_in_one_line(sets, tmp_path):
    content = next(sets["images", "arrow"].glob("*.arrow")).read_bytes()
    with http_server(tmp_path) as at:
        for damaged in (content[:-8], content[: len(content) // 2], b"ARROW1" + content, b"", bytes(99)):
            (tmp_path / "a.arrow").write_bytes(damaged)
            remote._fetch_info.cache_clear()
            assert one_line(opened, f"{at}/a.arrow", kind=(ValueError, OSError))


# The cache of shards.


def sample(server: Server, number: int) -> bool:
    """Whether a part of a shard is what it is on disk."""
    entry = FileRef(f"{server.address}/{number:03d}.tar", 1000, 500)
    return entry.read(1 << 20) == (server.folder / f"{number:03d}.tar").read_bytes()[1000:1500]


def cached_index(cache: Path) -> int:
    """Bytes of the files in the cache, at a time at which none is made or deleted."""
    with open(cache / "lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sizes = []
        for path in cache.iterdir():
            with contextlib.suppress(FileNotFoundError):  # an empty one, of a process that has waited in vain
                sizes.append(path.stat().st_size)
        return sum(sizes)


def test_shards_are_fetched_once_and_the_cache_stays_within_its_bound(server, tmp_path, no_cache):
    remote.configure(str(tmp_path / "cache"), 0.0006)
    for number in (0, 0, 1, 0, 1):
        assert sample(server, number)
    assert gets(server) == 2
    assert sample(server, 2) and cached_index(tmp_path / "cache") <= 600_000, "0 was used before 1"
    server.proxy.requests.clear()
    assert sample(server, 1) and sample(server, 2) and gets(server) == 0
    assert sample(server, 0) and gets(server) == 1
    for number in random.Random(0).choices(range(4), k=40):
        assert sample(server, number) and cached_index(tmp_path / "cache") <= 600_000


def test_headers_are_read_by_ranges_and_samples_from_the_cache(server, tmp_path, no_cache):
    remote.configure(str(tmp_path / "cache"), 1)
    with open_range(FileRef(f"{server.address}/000.tar")) as file:
        file.pread(512, 0)
    assert cached_index(tmp_path / "cache") == 0
    with open_range(FileRef(f"{server.address}/table.parquet"), is_part=True) as table:
        assert pq.ParquetFile(table).read_row_group(3).num_rows == 1000
    assert cached_index(tmp_path / "cache") == (server.folder / "table.parquet").stat().st_size


def test_a_shard_that_is_deleted_while_it_is_read_can_be_read_to_its_end(server, tmp_path, no_cache):
    remote.configure(str(tmp_path / "cache"), 0.0003)
    content = (server.folder / "000.tar").read_bytes()
    with open_range(FileRef(f"{server.address}/000.tar", 0, 300_000)) as file:
        assert file.read(1000) == content[:1000]
        assert sample(server, 1)
        assert cached_index(tmp_path / "cache") == 200_000
        assert file.read() == content[1000:]


def test_a_shard_that_does_not_fit_is_read_by_ranges(server, tmp_path, no_cache):
    remote.configure(str(tmp_path / "cache"), 0.0002)
    assert sample(server, 0) and cached_index(tmp_path / "cache") == 0
    addresses = [f"{server.address}/{number:03d}.tar" for number in range(4)]
    text = one_line(remote.configure, str(tmp_path / "cache"), 0.0007, addresses, 3)
    assert "--cache_gb 0.0007" in text and "3 shards" in text and "0.00075 GB" in text


def test_shards_that_are_not_trained_on_are_read_by_ranges(server, tmp_path, no_cache):
    remote.configure(str(tmp_path / "cache"), 1, [f"{server.address}/000.tar"])
    assert sample(server, 0) and sample(server, 1) and cached_index(tmp_path / "cache") == 300_000


def test_a_cache_that_fails_is_gone_round(server, tmp_path, no_cache, monkeypatch):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    remote.configure(str(tmp_path / "cache"), 1)
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert sample(server, 0) and cached_index(tmp_path / "cache") == 0
    (tmp_path / "cache/lock").unlink()
    (tmp_path / "cache/lock").mkdir()  # as if another user had made it
    assert sample(server, 0)
    with pytest.raises(OSError, match="lock"):
        remote.configure(str(tmp_path / "cache"), 1)


def test_what_is_forked_while_a_shard_is_fetched_holds_up_nobody(tmp_path):
    cache, context = ShardCache(tmp_path, 100), multiprocessing.get_context("fork")
    end, found = context.Event(), []
    child = context.Process(target=end.wait, args=(60,), daemon=True)
    waits = threading.Thread(target=lambda: found.append(cache.open("a", 60, read)), daemon=True)

    def read(size: int, offset: int) -> bytes:
        waits.start()
        time.sleep(0.3)
        child.start()
        return bytes(60)

    with cache.open("a", 60, read) as file:
        assert len(file.read()) == 60
    waits.join(5)
    has_waited_for_it = waits.is_alive()
    end.set()
    child.join()
    waits.join()
    found[0].close()
    assert not has_waited_for_it


def test_files_of_others_in_the_folder_stay(server, tmp_path, no_cache):
    (tmp_path / "thesis.tex").write_bytes(bytes(1 << 20))
    remote.configure(str(tmp_path), 0.0003)
    assert sample(server, 0) and sample(server, 1)
    assert (tmp_path / "thesis.tex").stat().st_size == 1 << 20


def test_a_fetch_that_fails_leaves_nothing(server, tmp_path, no_cache):
    remote.configure(str(tmp_path / "cache"), 1)
    server.proxy.always = 503
    with pytest.raises(OSError, match="503"):
        sample(server, 0)
    assert cached_index(tmp_path / "cache") == 0
    server.proxy.always = None
    assert sample(server, 0)


def test_what_a_killed_process_has_left_is_used_by_nobody_and_deleted_when_room_is_needed(tmp_path):
    cache = ShardCache(tmp_path, 100)
    context = multiprocessing.get_context("fork")
    began = context.Event()

    def fetch() -> None:
        cache.open("a", 60, lambda size, offset: began.set() or time.sleep(600) or b"")

    process = context.Process(target=fetch, daemon=True)
    process.start()
    assert began.wait(30)
    assert cache.open("b", 60, lambda size, offset: bytes(60)) is None, "what is being fetched keeps its room"
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with cache.open("a", 60, lambda size, offset: b"c" * 60) as file:
        assert file.read() == b"c" * 60, "its own unfinished part takes no room"
    with cache.open("b", 60, lambda size, offset: b"b" * 60) as file:
        assert file.read() == b"b" * 60
    with cache.open("a", 30, lambda size, offset: b"a" * 30) as file:
        assert file.read() == b"a" * 30
    assert cached_index(tmp_path) == 90


def test_a_shard_that_has_changed_at_the_server_has_another_version_and_is_fetched_again(tmp_path, no_cache):
    (tmp_path / "files").mkdir()
    path, versions = tmp_path / "files/a.tar", []
    with http_server(tmp_path / "files") as address:
        remote.configure(str(tmp_path / "cache"), 1)
        for content, age in ((b"first", 0), (b"second", 0), (b"as long", 0), (b"as late", 60)):
            path.write_bytes(content)
            os.utime(path, (age, age))
            remote._fetch_info.cache_clear()  # a process asks once: this is another one
            assert FileRef(f"{address}/a.tar", 1, 4).read(100) == content[1:5]
            versions.append(remote.version(f"{address}/a.tar"))
    assert len({*versions}) == 4


def test_several_processes_share_the_cache_and_fetch_a_shard_once(server, tmp_path):
    def reads(seed: int) -> bool:
        remote.configure(str(tmp_path / "a"), 0.0006)
        order = random.Random(seed).choices(range(4), k=30)
        return all(sample(server, number) and cached_index(tmp_path / "a") <= 600_000 for number in order)

    def read_one(_: int) -> bool:
        remote.configure(str(tmp_path / "b"), 1)
        return sample(server, 0)

    assert in_processes(4, read_one) == [True] * 4 and gets(server) == 1
    assert in_processes(4, lambda _: reads(7)) == in_processes(4, reads) == [True] * 4


def test_shards_can_be_fetched_before_they_are_read(server, tmp_path, no_cache):
    remote.configure(str(tmp_path / "cache"), 1)
    addresses = {10 * number: f"{server.address}/{number:03d}.tar" for number in range(4)}
    addresses[99] = f"{server.address}/missing.tar"
    remote.fetch_shards(addresses, [range(10), range(99, 100), range(20, 30)])
    end = time.monotonic() + 30
    while len([*(tmp_path / "cache").glob("?" * 64)]) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    # Requests for missing.tar do not count: depending on the number of the process, it is the last that is fetched.
    assert sample(server, 0) and sample(server, 2)
    assert sum("GET" in request and "missing" not in request for request in server.proxy.requests) == 2
