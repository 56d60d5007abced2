"""Sets of samples on servers are those on disk: the same order, the same bits, however the server behaves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tandem.data.sources import remote
from tandem.data.sources.opening import open_source
from tandem.data.sources.record import FieldSpec
from tests.data.helpers import assert_same, one_line
from tests.data.source_table import FILES, IMAGES, KINDS, N, passes
from tests.fault_proxy import Proxy
from tests.file_servers import http_server, servers_of

PLACES = ["tars", "parquet", "arrow", "csv", "manifest"]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """What names the set of a kind in a place."""
    root = tmp_path_factory.mktemp("sets")
    found = {}
    for name, kind in KINDS.items():
        records = {number: kind.record(number) for number in range(N)}
        for place in PLACES:
            write: Any = FILES[place]
            found[name, place] = write(root / f"{name}-{place}", records)
    return found


@pytest.fixture(scope="module")
def servers(sets, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[str, Proxy]]]:
    root = next(iter(sets.values())).parent
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(remote, "_PAUSE", 0.01)
        yield stack.enter_context(servers_of(root, tmp_path_factory.mktemp("log") / "moto.log"))
        remote.configure(None)


@pytest.fixture
def address(sets, servers) -> Callable[..., str]:
    """What names a set on a server."""

    def of(server: str, name: str, place: str) -> str:
        path = sets[name, place]
        root = next(iter(sets.values())).parent
        name = path.relative_to(root).as_posix()
        if server == "http" and path.is_dir():  # which cannot be listed
            files = sorted(file.name for ending in ("tar", "arrow", "parquet") for file in path.glob(f"*.{ending}"))
            name += f"/{files[0]}" if len(files) == 1 else f"/{{{','.join(files)}}}"
        return f"{servers[server][0]}/{name}"

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


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", KINDS)
def test_a_set_in_a_bucket_is_the_set_on_disk(name, place, address, on_disk):
    check_same(passes(KINDS[name], flags(name, address("s3", name, place)), 12), on_disk(name, place))


def test_files_of_a_bucket_that_are_not_read_are_counted(address, sets):
    at = address("s3", "images", "tars")
    said = opened(at).skipped
    n = len([*sets["images", "tars"].glob("*.json")])
    assert said.startswith(f"{n} files are skipped in {at!r}: {n} .json; ") and n > 1
    assert f"members are skipped in {n} tars, the first '{at}/00000.tar': {N} .cls, " in said


@pytest.mark.parametrize("place", PLACES)
def test_a_set_on_a_web_server_is_the_set_on_disk(place, address, on_disk):
    check_same(passes(IMAGES, flags("images", address("http", "images", place)), 12), on_disk("images", place))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_shards_that_are_kept_are_those_on_disk_for_any_number_of_processes_and_after_a_stop(
    world_size, address, on_disk, tmp_path
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
    servers["http"][1].faults = [503] * 5
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
            with pytest.raises(ValueError, match=r"not below its list|no address of a server"):
                source.record(index)["image"].read(100)
        assert source.record(4)["image"].read(1 << 20) == (tmp_path / "web/a.png").read_bytes()
        here = tmp_path / "here.csv"
        here.write_text(here.read_text().replace("ADDRESS", at))
        source = opened(str(here))
        contents = [source.record(index)["image"].read(1 << 20) for index in range(2)]
        assert contents == [(tmp_path / "web/a.png").read_bytes()] * 2
        assert source.describe(0) == f"{at}/a.png"


def opened(path: str) -> Any:
    return open_source(path, [FieldSpec("image", "image", (".png",), ("image",), feature="Image")], demo="demo:shapes")


def test_a_damaged_arrow_file_on_a_server_is_refused_in_one_line(sets, tmp_path):
    content = next(sets["images", "arrow"].glob("*.arrow")).read_bytes()
    with http_server(tmp_path) as at:
        for damaged in (content[:-8], content[: len(content) // 2], b"ARROW1" + content, b"", bytes(99)):
            (tmp_path / "a.arrow").write_bytes(damaged)
            remote._fetch_info.cache_clear()
            assert one_line(opened, f"{at}/a.arrow", kind=(ValueError, OSError))
