"""Published files are fetched once, whole, and as published, from a server on this machine that can fail."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.io import fetching
from tandem.io.fetching import MIRROR, PublishedFile, fetch_file, fetch_from_hub
from tests import hub_server
from tests.data.helpers import in_processes
from tests.fault_proxy import Proxy, proxy_before
from tests.file_servers import http_server
from tests.models.helpers import refused

CONTENT = random.Random(0).randbytes(3_000_000)  # several blocks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    (folder / "weights.pth").write_bytes(CONTENT)
    return folder


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Proxy]:
    """Holds weights.pth; this machine's cache is empty."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(fetching, "_PAUSE_SECONDS", 0.01)
    with http_server(folder) as address, proxy_before(address) as proxy:
        yield proxy


@pytest.fixture
def file(server: Proxy) -> PublishedFile:
    digest = hashlib.sha256(CONTENT).hexdigest()
    return PublishedFile("some weights", ("ours.pth", "old.pth"), f"{server.address}/weights.pth", len(CONTENT), digest)


def cache(home: Path) -> Path:
    return home / "hub" / "checkpoints"


def visible(home: Path) -> list[str]:
    """What the cache holds, beside its empty lock files."""
    return sorted(name for name in os.listdir(cache(home)) if not name.endswith(".lock"))


def test_a_file_is_fetched_once_and_a_line_says_from_where_to_where_and_how_large(
    file: PublishedFile, server: Proxy, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = fetch_file(file)
    assert path == cache(tmp_path) / "ours.pth" and path.read_bytes() == CONTENT
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and all(text in said for text in (file.address, str(path), "3 MB", "some weights"))
    assert fetch_file(file) == path and len(server.requests) == 1 and not capfd.readouterr().err


@pytest.mark.parametrize("faults", [["cut", "cut"], ["half", 503]], ids=str)
def test_a_connection_that_breaks_is_tried_again(faults: list[Any], file: PublishedFile, server: Proxy) -> None:
    server.faults = faults
    assert fetch_file(file).read_bytes() == CONTENT and len(server.requests) == 3


@pytest.mark.parametrize(("fault", "requests", "reason"), [
    ("cut", 3, "no answer"), ("half", 3, "ended after 1500000 of 3000000 bytes"), (404, 1, "answers 404"),
    (503, 3, "answers 503"), (429, 3, "answers 429"),
])  # fmt: skip
def test_what_cannot_be_fetched_is_one_line_and_nothing_is_kept(
    fault: str | int, requests: int, reason: str, file: PublishedFile, server: Proxy, tmp_path: Path
) -> None:
    server.always = fault
    said = refused(fetch_file, file)
    assert reason in said and "ours.pth" in said and file.address in said and file.sha256 in said
    assert len(server.requests) == requests and visible(tmp_path) == []


@pytest.mark.parametrize("change", [{"sha256": "0" * 64}, {"size": len(CONTENT) - 1}], ids=str)
def test_another_file_is_refused_and_not_kept(
    change: dict[str, Any], file: PublishedFile, server: Proxy, tmp_path: Path
) -> None:
    said = refused(fetch_file, PublishedFile(**{**vars(file), **change}))
    assert "another file" in said and len(server.requests) == 1 and visible(tmp_path) == []


def test_four_processes_at_once_make_one_request_and_two_machines_two(
    file: PublishedFile, server: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.always = "slow"
    names = in_processes(4, lambda _: fetch_file(file).name)
    assert names == ["ours.pth"] * 4 and len(server.requests) == 1
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "other"))
    assert in_processes(4, lambda _: fetch_file(file).name) == names and len(server.requests) == 2
    assert visible(tmp_path) == visible(tmp_path / "other") == ["ours.pth"]


def test_processes_that_wait_fail_with_the_one_that_tried_and_the_next_one_tries_anew(
    file: PublishedFile, server: Proxy
) -> None:
    server.faults, server.slow_seconds = ["slow"], 2
    wrong = PublishedFile(**{**vars(file), "sha256": "0" * 64})
    assert in_processes(3, lambda _: refused(fetch_file, wrong)) == [refused(fetch_file, wrong)] * 3
    assert len(server.requests) == 2
    assert fetch_file(file).read_bytes() == CONTENT


def test_a_process_that_waits_shows_that_it_is_alive_and_goes_on_where_the_other_was_killed(
    file: PublishedFile, server: Proxy, tmp_path: Path
) -> None:
    class Seen(Exception):
        pass

    def heartbeat() -> None:
        raise Seen

    server.faults = ["slow"]
    server.slow_seconds = 60.0
    first = multiprocessing.get_context("fork").Process(target=fetch_file, args=(file,))
    first.start()
    deadline = time.monotonic() + 30
    while not server.requests:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(Seen):
        fetch_file(file, heartbeat)
    assert len(server.requests) == 1 and visible(tmp_path) == [".ours.pth.tmp"]
    fetch_file(file, first.kill)
    assert visible(tmp_path) == ["ours.pth"]


def test_offline_nothing_is_asked_and_the_line_says_what_is_published_where(
    file: PublishedFile, server: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = refused(fetch_file, file)
    assert all(text in said for text in (str(cache(tmp_path)), "ours.pth or old.pth", file.address, "HF_HUB_OFFLINE"))
    cache(tmp_path).mkdir(parents=True)
    (cache(tmp_path) / "old.pth").touch()
    assert fetch_file(file).name == "old.pth" and not server.requests


def test_a_mirror_may_be_another_server_or_a_folder(
    folder: Path, file: PublishedFile, server: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    elsewhere = PublishedFile(**{**vars(file), "address": "http://127.0.0.1:9/nobody/weights.pth"})
    monkeypatch.setenv(MIRROR, f"{server.address}/")
    fetch_file(elsewhere).unlink()
    monkeypatch.setenv(MIRROR, folder.as_uri())
    assert fetch_file(elsewhere).read_bytes() == CONTENT and len(server.requests) == 1
    for mirror, reason in (("no address", "no address"), ("http://bob:secret@127.0.0.1:9/", "a password")):
        monkeypatch.setenv(MIRROR, mirror)
        (cache(tmp_path) / "ours.pth").unlink(missing_ok=True)
        assert reason in (said := refused(fetch_file, elsewhere)) and "secret" not in said + capfd.readouterr().err


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[hub_server.Hub]:
    """Has bob/clip with weights.bin and config.json; this machine's cache is empty."""
    with hub_server.reached(tmp_path) as hub:
        hub.publish("bob/clip", {"weights.bin": CONTENT, "config.json": b"{}"})
        yield hub


def of_bob(name: str = "weights.bin", revision: str | None = None) -> Path:
    return fetch_from_hub("weights of Bob", "bob/clip", name, revision=revision)


def test_a_file_of_the_hub_is_fetched_once_by_four_processes_and_then_without_a_request(
    hub: hub_server.Hub, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert in_processes(4, lambda _: of_bob().name) == ["weights.bin"] * 4 and len(hub.downloads("weights.bin")) == 1
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and all(text in said for text in ("weights of Bob (3 MB)", hub.endpoint))
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert of_bob().read_bytes() == CONTENT and not hub.requests


def test_a_revision_of_the_hub_is_fetched_beside_another_one(
    hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = hub.publish("bob/clip", {"config.json": b"old"})
    hub.publish("bob/clip", {"config.json": b"new"})
    contents = [of_bob("config.json", revision).read_bytes() for revision in (old, None)]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert contents == [of_bob("config.json", revision).read_bytes() for revision in (old, None)] == [b"old", b"new"]
    assert "resolve/v1/config.json" in refused(of_bob, "config.json", "v1")


@pytest.mark.parametrize("name", ["weights.bin", "config.json"])  # with a checksum of LFS, and of git
@pytest.mark.parametrize("failure", ["other body", "cut", 404])
def test_what_the_hub_does_not_give_is_one_line_and_nothing_is_kept(
    failure: str | int, name: str, hub: hub_server.Hub
) -> None:
    hub.failure = failure
    said = refused(of_bob, name)
    assert f"{hub.endpoint}/bob/clip/resolve/main/{name}" in said and "weights of Bob" in said
    hub.failure = None
    assert of_bob(name).read_bytes() == hub.files("bob/clip")[name]


def test_a_process_shows_that_it_is_alive_while_a_file_comes(file: PublishedFile, hub: hub_server.Hub) -> None:
    for fetch in (
        lambda mark: fetch_file(file, mark),
        lambda mark: fetch_from_hub("it", "bob/clip", "weights.bin", mark),
    ):
        marks: list[None] = []
        assert fetch(lambda: marks.append(None)).read_bytes() == CONTENT and marks  # noqa: B023


def test_offline_the_hub_is_not_asked(hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = refused(of_bob)
    assert "HF_HUB_OFFLINE" in said and f"{hub.endpoint}/bob/clip" in said and not hub.requests
    assert "give its file, or copy this folder" in said  # nobody can put a file into the Hub's cache by hand


def test_a_cache_that_cannot_be_written_is_one_line(file: PublishedFile, tmp_path: Path) -> None:
    (tmp_path / "hub").touch()
    assert str(tmp_path) in refused(fetch_file, file)
