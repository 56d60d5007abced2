"""Lists of files and rows that are kept for later starts: used while they are true, and not a moment longer."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.files import cache
from data.files.cache import Lists, Watched, kept_lists
from data.files.packed import PackedStrings
from data.sets import open_images, open_sounds, open_videos
from tests.data.helpers import one_line
from tests.training.disk import left_by_kills

# Also names whose order is another one with the slash than without, and some that other programs take for two.
NAMES = ["a/1.png", "a/deep/er/2.png", "a-b/1.png", "a.png", "ab.png", "B.jpg", "new\nline.png", " .png", "ü/ß.webp"]
NAMES += [os.fsdecode(b"not \xff utf-8.png"), os.fsdecode(b"\x80folder/1.png"), "z/0.png", "z/10.png", "z/9.png"]


@pytest.fixture(autouse=True)
def keeps_short_lists(tmp_path, monkeypatch) -> None:
    """With a clock without ticks, and `settle` in its place."""
    monkeypatch.setattr(cache, "FEWEST", 1)
    monkeypatch.setattr(cache, "CLOCK_TICK_NS", 0)


def settle(folder: Path) -> None:
    """Return when whatever changes from now on gets a later time than all that is there."""
    probe, newest = folder.parent / ".probe", 0
    for path in (folder, *folder.rglob("*")):
        newest = max(newest, path.lstat().st_ctime_ns)
    while not probe.exists() or probe.stat().st_mtime_ns <= newest:
        probe.write_bytes(b"")


def folder_of(path: Path, names: list[str] = NAMES) -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).touch()
    settle(path)
    return path


def names_in(folder: Path | str) -> list[str]:
    images = open_images(str(folder), image_size=8)
    return [images.name(index) for index in range(len(images))]


def kept(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f".{path.name}.*.list"))


@pytest.fixture
def scans(monkeypatch) -> list[str]:
    """The folders that were read."""
    read: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder=".": (read.append(folder), scandir(folder))[1])
    return read


def test_a_second_start_reads_no_folder_and_finds_the_same_names_in_the_same_order(tmp_path, scans):
    folder = folder_of(tmp_path / "set")
    scans.clear()
    assert names_in(folder) == sorted(NAMES)
    assert scans and len(kept(folder)) == 1
    scans.clear()
    assert names_in(folder) == names_in(f"{folder}/") == sorted(NAMES)
    assert not scans
    first, again = (open_images(str(folder), image_size=8) for _ in range(2))
    assert first.fingerprint == again.fingerprint and first.describe(0) == str(folder / sorted(NAMES)[0])


def test_lists_of_one_folder_for_other_kinds_of_samples_are_apart(tmp_path):
    folder = folder_of(tmp_path / "set", ["a.png", "a.txt", "b.wav", "b.json", "c.mp4"])
    for _ in range(2):
        assert names_in(folder) == ["a.png"]
        assert open_videos(str(folder), image_size=8, num_frames=1).name(1) == "c.mp4"
        assert len(open_sounds(str(folder), sample_rate=8000, clip_seconds=1)) == 1
    assert len(kept(folder)) == 3


CHANGES: dict[str, Callable[[Path], Any]] = {
    "added": lambda folder: (folder / "a/deep/er/3.png").touch(),
    "removed": lambda folder: (folder / "a/deep/er/2.png").unlink(),
    "renamed": lambda folder: (folder / "a/deep/er/2.png").rename(folder / "a/deep/er/x.png"),
    "moved": lambda folder: (folder / "z/0.png").rename(folder / "a/0.png"),
    "a folder added": lambda folder: shutil.copytree(folder / "a/deep/er", folder / "a/again"),
    "a folder replaced": lambda folder: (
        shutil.rmtree(folder / "z"), folder_of(folder / "z", ["7.png"]), os.utime(folder / "z", ns=(0, 10**18))
    ),
    "times set back": lambda folder: (
        (folder / "z/1.png").touch(), os.utime(folder / "z", ns=(0, folder.stat().st_mtime_ns))
    ),
    "a link to a file now leads nowhere": lambda folder: (folder.parent / "elsewhere/1.png").unlink(),
    "a file in a linked folder": lambda folder: (folder.parent / "linked/2.png").touch(),
    "a link to a folder leads elsewhere": lambda folder: (
        (folder.parent / "linked").rename(folder.parent / "old"), folder_of(folder.parent / "linked", ["9.png"])
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_anywhere_below_the_folder_is_read_again(change, tmp_path, scans):
    folder = folder_of(tmp_path / "set")
    folder_of(tmp_path / "elsewhere", ["1.png"])
    folder_of(tmp_path / "linked", ["1.png"])
    (folder / "z/link.png").symlink_to(tmp_path / "elsewhere/1.png")
    (folder / "other").symlink_to(tmp_path / "linked")
    settle(folder)
    before = names_in(folder)
    assert names_in(folder) == before and len(kept(folder)) == 1
    CHANGES[change](folder)
    settle(folder)
    scans.clear()
    after = names_in(folder)
    assert after != before and after == sorted(after) and scans
    kept(folder)[0].unlink()
    assert names_in(folder) == after


def test_a_change_within_a_tick_of_the_clock_is_not_missed(tmp_path, monkeypatch):
    """The folder is read again when the tick is over; a list of a folder that still changes then is not kept."""
    folder, waits = folder_of(tmp_path / "set"), []
    monkeypatch.setattr(cache, "CLOCK_TICK_NS", 10**18)
    monkeypatch.setattr(cache.time, "sleep", lambda seconds: (waits.append(seconds), (folder / "late.png").touch()))
    assert names_in(folder) == sorted([*NAMES, "late.png"]) and waits == [1e9]
    assert not kept(folder)
    (folder / "later.png").touch()
    assert "later.png" in names_in(folder)


def test_a_damaged_list_is_made_anew(tmp_path):
    folder = folder_of(tmp_path / "set")
    assert names_in(folder) == sorted(NAMES)
    [path] = kept(folder)
    whole = path.read_bytes()
    head, _, rest = whole.partition(b"\n")
    header = json.loads(head)
    forged = [
        {"key": "of another program", "parts": header["parts"]}, {"key": header["key"]}, [],
        {**header, "parts": [[name, 1 << 70, *part] for name, _, *part in header["parts"]]},
    ]  # fmt: skip
    contents = [b"", head, whole[:-1], whole + b"\0", b"[" * 5000]
    contents += [json.dumps(header).encode() + b"\n" + rest for header in forged]
    contents += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(head) + 1, len(whole), 7)]
    for content in contents:
        path.write_bytes(content)
        assert names_in(folder) == sorted(NAMES), content[:80]
        assert path.read_bytes() == whole
    path.unlink()
    os.mkfifo(path)  # opening it would wait for ever
    assert names_in(folder) == sorted(NAMES)


@pytest.mark.parametrize("what, name", [("samples", "a/../../outside.tar"), ("tars", "absolute")])
def test_a_list_that_was_made_to_do_harm_leads_to_no_other_file(what, name, tmp_path):
    """Forged by the function that writes true ones."""
    folder = folder_of(tmp_path / "set")
    with tarfile.open(tmp_path / "outside.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("0.png"))
    names_in(folder)
    [path] = kept(folder)
    key = json.loads(path.read_bytes().partition(b"\n")[0])["key"]
    path.unlink()
    watched, forged = Watched(), PackedStrings([str(tmp_path / "outside.tar") if name == "absolute" else name])
    watched.add("", folder.stat())
    parts = {part: forged if part == what else PackedStrings() for part in ("samples", "beside", "tars", "skipped")}
    kept_lists(str(folder), json.loads(key)[-1], list(parts), lambda: Lists(parts, watched))
    load = names_in if what == "tars" else lambda folder: open_images(str(folder), image_size=8).load(0)
    assert "is not true: delete it" in one_line(load, folder)
    assert not list(tmp_path.glob(".outside*")), "no index is made of it"


def test_lists_are_kept_in_the_cache_of_the_user_where_the_folder_takes_none_or_in_memory(tmp_path, scans):
    folder = folder_of(tmp_path / "set")
    names_in(folder)
    [path] = kept(folder)
    path.unlink()
    (path / "occupied").mkdir(parents=True)
    settle(folder)
    assert names_in(folder) == sorted(NAMES)
    assert len(list((tmp_path / "cache/tandem/lists").iterdir())) == 1
    scans.clear()
    assert names_in(folder) == sorted(NAMES) and not scans
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no folder")
    for _ in range(2):
        assert names_in(folder) == sorted(NAMES)


def test_who_may_not_read_a_folder_may_not_read_the_list_of_it(tmp_path):
    for mode, expected in ((0o700, 0o600), (0o755, 0o644), (0o750, 0o640)):
        folder = folder_of(tmp_path / f"set{mode:o}")
        folder.chmod(mode)
        settle(folder)
        names_in(folder)
        assert kept(folder)[0].stat().st_mode & 0o777 == expected


def _list_at_once(folder: str, together: Any, queue: Any) -> None:
    def made() -> Lists:
        with open(f"{folder}.log", "a") as log:
            log.write("made\n")
        watched = Watched()
        watched.add("", os.stat(folder))
        return Lists({"rows": PackedStrings(map(str, range(1000)))}, watched)

    together.wait()
    rows = kept_lists(folder, "test", ("rows",), made)["rows"]
    queue.put((type(rows).__name__, len(rows), rows[999]))


def test_of_several_processes_that_start_at_once_one_makes_the_list(tmp_path):
    folder = folder_of(tmp_path / "set")
    context = multiprocessing.get_context("fork")
    together, queue = context.Barrier(4), context.SimpleQueue()
    processes = [context.Process(target=_list_at_once, args=(str(folder), together, queue)) for _ in range(4)]
    for process in processes:
        process.start()
    assert [queue.get() for _ in processes] == [("StoredStrings", 1000, "999")] * 4
    for process in processes:
        process.join()
    assert Path(f"{folder}.log").read_text() == "made\n"
    assert {path.name for path in tmp_path.iterdir()} - {"set", ".probe", "set.log"} == {kept(folder)[0].name}


def test_what_a_process_left_that_was_killed_while_it_saved_is_deleted(tmp_path):
    folder = folder_of(tmp_path / "set")
    unfinished = 0
    for left in left_by_kills(tmp_path, lambda: names_in(folder)):
        unfinished += len(list(left.glob(".index-*")))
        settle(left / "set")
        assert names_in(left / "set") == sorted(NAMES)
        assert {path.name for path in left.iterdir()} == {"set", ".probe", kept(folder)[0].name}
    assert unfinished


def test_a_manifest_is_read_again_after_a_change_that_leaves_its_size_and_its_time(tmp_path):
    path = tmp_path / "set.jsonl"

    def read(name: str) -> str:
        path.write_text(json.dumps({"path": name, "start_seconds": 1 / 3, "end_seconds": 5.0}) + "\n")
        os.utime(path, ns=(0, 10**18))  # as tools set it that copy files
        settle(path)
        for _ in range(2):
            source = open_videos(str(path), image_size=8, num_frames=1).source(0)
            assert (source.start_seconds, source.end_seconds) == (1 / 3, 5.0)
        return os.path.relpath(source.path, tmp_path)

    for name in ("ü, ß.mp4", "a, ß.mp4"):
        assert read(name) == name
