"""Lists of files and rows that are kept for later starts: used while they are true, and not a moment longer."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import socket
import tarfile
import tempfile
import threading
import tracemalloc
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data import open_images, open_sounds, open_videos
from data.files import cache, manifest, opening, packed
from data.files.cache import Lists, Watched, kept_lists
from data.files.packed import PackedStrings, StoredStrings
from data.images.captioned import open_captioned
from data.images.embeddings import KINDS
from tests.data.helpers import one_line
from tests.processes import on_processes

# Also names whose order is another one with the slash than without, and some that other programs take for two.
NAMES = ["a/1.png", "a/deep/er/2.png", "a-b/1.png", "a.png", "ab.png", "B.jpg", "new\nline.png", " .png", "ü/ß.webp"]
NAMES += [os.fsdecode(b"not \xff utf-8.png"), os.fsdecode(b"\x80folder/1.png"), "z/0.png", "z/10.png", "z/9.png"]


@pytest.fixture(autouse=True)
def keeps_short_lists(tmp_path, monkeypatch) -> None:
    """With a clock without ticks, and `settle` in its place."""
    monkeypatch.setattr(cache, "_FEWEST", 1)
    monkeypatch.setattr(cache, "_CLOCK_TICK_NS", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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
    """The folders that were read, with all below them."""
    read: list[str] = []
    tree = opening._Tree
    monkeypatch.setattr(opening, "_Tree", lambda folder, endings: (read.append(folder), tree(folder, endings))[1])
    return read


def test_a_second_start_reads_no_folder_and_finds_the_same_names_in_the_same_order(tmp_path, scans):
    folder = folder_of(tmp_path / "set")
    assert names_in(folder) == sorted(NAMES)
    assert len(scans) == 1 and len(kept(folder)) == 1
    assert names_in(folder) == names_in(f"{folder}/") == sorted(NAMES)
    assert len(scans) == 1
    first, again = (open_images(str(folder), image_size=8) for _ in range(2))
    assert first.fingerprint == again.fingerprint and first.describe(0) == str(folder / sorted(NAMES)[0])
    kept(folder)[0].unlink()
    cache_files, cache.cache_files = cache.cache_files, lambda *_: []
    try:
        assert open_images(str(folder), image_size=8).fingerprint == first.fingerprint, "in memory as in a file"
    finally:
        cache.cache_files = cache_files


def test_long_lists_are_sorted_in_runs(tmp_path, monkeypatch):
    folder = folder_of(tmp_path / "set", [*NAMES, *(f"{i % 3}/{(i * 37) % 100}.png" for i in range(100))])
    whole = names_in(folder)
    assert whole == sorted(whole) and len(whole) == 114
    monkeypatch.setattr(opening, "_LONGEST_RUN", 3)
    kept(folder)[0].unlink()
    assert names_in(folder) == whole


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
    "renamed to no image": lambda folder: (folder / "a/deep/er/2.png").rename(folder / "a/deep/er/2.txt"),
    "moved": lambda folder: (folder / "z/0.png").rename(folder / "a/0.png"),
    "a folder added": lambda folder: shutil.copytree(folder / "a/deep/er", folder / "a/again"),
    "a folder renamed": lambda folder: (folder / "a/deep").rename(folder / "a/deeper"),
    "a folder replaced": lambda folder: (
        shutil.rmtree(folder / "z"), folder_of(folder / "z", ["7.png"]), os.utime(folder / "z", ns=(0, 10**18))
    ),
    "times set back": lambda folder: (
        (folder / "z/1.png").touch(), os.utime(folder / "z", ns=(0, folder.stat().st_mtime_ns))
    ),
    "a link to a file now leads nowhere": lambda folder: (folder.parent / "elsewhere/1.png").unlink(),
    "a link that led nowhere now leads to a file": lambda folder: (folder.parent / "missing.png").touch(),
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
    (folder / "z/dangling.png").symlink_to(tmp_path / "missing.png")
    (folder / "other").symlink_to(tmp_path / "linked")
    settle(folder)
    before = names_in(folder)
    assert names_in(folder) == before and len(kept(folder)) == 1
    n_scans = len(scans)
    CHANGES[change](folder)
    settle(folder)
    after = names_in(folder)
    assert after != before and after == sorted(after) and len(scans) > n_scans
    kept(folder)[0].unlink()
    assert names_in(folder) == after


def test_a_change_within_a_tick_of_the_clock_is_not_missed(tmp_path, monkeypatch):
    """The folder is read again when the tick is over; a list of a folder that still changes then is not kept."""
    folder, waits = folder_of(tmp_path / "set"), []
    monkeypatch.setattr(cache, "_CLOCK_TICK_NS", 10**18)
    monkeypatch.setattr(cache.time, "sleep", lambda seconds: (waits.append(seconds), (folder / "late.png").touch()))
    assert names_in(folder) == sorted([*NAMES, "late.png"]) and waits == [1e9]
    assert not kept(folder)
    (folder / "later.png").touch()
    assert "later.png" in names_in(folder)


def test_short_lists_leave_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_FEWEST", len(NAMES) + 1)
    assert names_in(folder_of(tmp_path / "set")) == sorted(NAMES)
    assert {path.name for path in tmp_path.iterdir()} == {"set", ".probe"}


def test_a_damaged_list_is_made_anew(tmp_path):
    folder = folder_of(tmp_path / "set")
    assert names_in(folder) == sorted(NAMES)
    [path] = kept(folder)
    whole = path.read_bytes()
    head, _, rest = whole.partition(b"\n")
    header = json.loads(head)
    parts = header["parts"]
    forged = [
        {"key": "of another program", "parts": header["parts"]}, {"key": header["key"]}, [], {"parts": 1},
        {**header, "parts": [[name, -1, 1 << 60, digest] for name, _, _, digest in header["parts"]]},
        {**header, "parts": [[[], *part] for _, *part in header["parts"]]},
        {**header, "parts": [[name, 1 << 70, *part] for name, _, *part in header["parts"]]},
        {**header, "parts": header["parts"][:-1]},
        {**header, "parts": [*parts[:-1], ["others", *parts[-1][1:]]]},
        {**header, "parts": [*parts, ["x", *parts[-1][1:]]]},
    ]  # fmt: skip
    contents = [
        b"",
        head,
        whole[:-1],
        whole + b"\0",
        b"[" * 5000,
        *(json.dumps(f).encode() + b"\n" + rest for f in forged),
    ]
    contents += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(head) + 1, len(whole), 7)]
    for content in contents:
        path.write_bytes(content)
        assert names_in(folder) == sorted(NAMES), content[:80]
        assert path.read_bytes() == whole
    path.unlink()
    os.mkfifo(path)  # opening it would wait for ever
    assert names_in(folder) == sorted(NAMES)


def test_a_list_that_was_made_to_do_harm_leads_to_no_other_file(tmp_path):
    folder = folder_of(tmp_path / "set")
    (tmp_path / "outside.png").touch()
    names_in(folder)
    [path] = kept(folder)
    key = json.loads(path.read_bytes().partition(b"\n")[0])["key"]
    for name in ("../outside.png", str(tmp_path / "outside.png"), "a/../../outside.png"):
        watched = Watched()
        watched.add("", folder.stat())
        parts = {
            "samples": PackedStrings([name]),
            "beside": PackedStrings(),
            "tars": PackedStrings(),
            "skipped": PackedStrings(),
        }
        cache._save(str(path), str(folder), key, Lists(parts, watched))
        images = open_images(str(folder), image_size=8)
        assert len(images) == 1, "the forged list is taken"
        assert "is not true: delete it" in one_line(images.load, 0)
        assert images.describe(0), "a message can name it"


@pytest.mark.parametrize(
    ("what", "ends"),
    [("watched", [700 << 20]), ("watched", [100 << 20] * 7), ("samples", [700 << 20]), ("samples", [0, 0])],
)
def test_little_is_read_of_a_list_that_is_long_but_for_the_disk(what, ends, tmp_path, monkeypatch):
    folder = folder_of(tmp_path / "set")
    names_in(folder)
    [path] = kept(folder)
    header = json.loads(path.read_bytes().partition(b"\n")[0])
    watched = Watched()
    watched.add("", folder.stat())
    cache._save(str(path), str(folder), header["key"], Lists({}, watched))
    [honest] = json.loads(path.read_bytes().partition(b"\n")[0])["parts"]
    long = [what, len(ends), 700 << 20, "0"]
    parts = [long if what == "watched" else honest, ["samples", 0, 0, "0"] if what == "watched" else long]
    parts += [["beside", 0, 0, "0"], ["tars", 0, 0, "0"]]
    with path.open("wb") as file:
        file.write(json.dumps({**header, "parts": parts}).encode() + b"\n")
        if what == "samples":
            file.write(b"".join(watched.lines.buffers))
        file.write(array("q", [0, *itertools.accumulate(ends)]).tobytes())
        file.truncate(file.tell() + (700 << 20) + 8 * (2 + (what == "watched")))
    read, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: (read.append(size), pread(file, size, at))[1])
    assert names_in(folder) == sorted(NAMES) and sum(read) < 16 << 20


@pytest.mark.parametrize("name", ["../outside.tar", "a/../../outside.tar", "absolute"])
def test_a_list_that_was_made_to_do_harm_leads_to_no_other_tar(name, tmp_path):
    folder = folder_of(tmp_path / "set")
    with tarfile.open(tmp_path / "outside.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("0.png"))
    names_in(folder)
    [path] = kept(folder)
    key = json.loads(path.read_bytes().partition(b"\n")[0])["key"]
    watched, tars = Watched(), PackedStrings([str(tmp_path / "outside.tar") if name == "absolute" else name])
    watched.add("", folder.stat())
    parts = {"samples": PackedStrings(), "beside": PackedStrings(), "tars": tars, "skipped": PackedStrings()}
    cache._save(str(path), str(folder), key, Lists(parts, watched))
    assert "is not true: delete it" in one_line(names_in, folder)
    assert not list(tmp_path.glob(".outside*")), "no index is made of it"


def test_what_stands_beside_all_files_is_found_in_one_pass(tmp_path, monkeypatch):
    stems = ["a", "a.b", "a.b.c", "a.z", "a-b", "a/b", "ab", "b", *map(str, range(300))]
    beside = [f"{stem}{'.img_emb' if place % 5 else '.text'}.npy" for place, stem in enumerate(stems) if place % 3]
    beside += [f"{stem}.npy" for stem in stems[::2]]
    folder = folder_of(tmp_path / "set", [*(f"{stem}.png" for stem in stems), *beside, "0.png.npy", "zz.npy"])
    read, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: (read.append(size), pread(file, size, at))[1])
    for _ in range(2):
        read.clear()
        files = open_captioned(str(folder), image_size=8)._places.images
        found = {kind: list(files.all_beside(kind.endings)) for kind in KINDS}
        assert len(read) < 100
        for kind in KINDS:
            assert found[kind] == [files.beside(index, kind.endings) for index in range(len(stems))]
            assert files.has_any_beside(kind.endings) and 50 < found[kind].count(None) < 300
        assert not files.has_any_beside([".txt"]) and list(files.all_beside([".txt"])) == [None] * len(stems)


def test_a_file_that_changes_while_it_is_used_is_named(tmp_path):
    folder = folder_of(tmp_path / "set")
    names_in(folder)
    images = open_images(str(folder), image_size=8)
    os.truncate(kept(folder)[0], 1000)
    assert str(kept(folder)[0]) in one_line(images.load, len(NAMES) - 1)


def test_lists_are_kept_in_the_cache_of_the_user_where_the_folder_takes_none_or_in_memory(tmp_path, scans, monkeypatch):
    folder = folder_of(tmp_path / "set")
    names_in(folder)
    [path] = kept(folder)
    path.unlink()
    (path / "occupied").mkdir(parents=True)
    settle(folder)
    assert names_in(folder) == sorted(NAMES)
    assert len(list((tmp_path / "cache/tandem/lists").iterdir())) == 1
    n_scans = len(scans)
    assert names_in(folder) == sorted(NAMES) and len(scans) == n_scans
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no folder")
    for _ in range(2):
        assert names_in(folder) == sorted(NAMES)
    # On a disk that is mounted read-only, not even a lock is made.
    monkeypatch.setattr(cache.os, "access", lambda *_: False)
    monkeypatch.setattr(cache, "open_appending", lambda *_: pytest.fail("made a lock"))
    assert names_in(folder) == sorted(NAMES)


def test_machines_that_share_a_home_do_not_replace_one_anothers_lists(tmp_path, monkeypatch):
    here = cache.cache_files("/data/set", ".list", "lists")
    assert here == cache.cache_files("/data/../data/set", ".list", "lists")
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    there = cache.cache_files("/data/set", ".list", "lists")
    assert here[0] == there[0] and os.path.dirname(here[1]) == os.path.dirname(there[1]) and here[1] != there[1]


@pytest.mark.parametrize("home", ["relative", ""])
def test_the_cache_of_the_user_may_have_a_relative_path_and_the_user_no_home(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user that the machine does not know
    _, path = cache.cache_files("/data/set", ".list", "lists")
    assert os.path.isabs(path), "else the search for the folder that it would be made in has no end"
    assert path.startswith(str(tmp_path)) and cache._can_be_made(path)


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


def _list_in_vain(folder: str, waiting: Any, first: Any, both: Any, queue: Any) -> None:
    locked, has_waited = cache._locked, []

    def locks(*place: Any) -> bool:
        if not (is_locked := locked(*place)) and not has_waited:
            has_waited.append(True)
            waiting.release()
        return is_locked

    def make() -> Lists:
        if first.acquire(block=False):
            assert all(waiting.acquire(timeout=60) for _ in range(2))
        else:
            both.wait(timeout=60)  # which only ends if both are here
        return Lists({"rows": PackedStrings(["one"])}, Watched())

    cache._locked = locks
    try:
        queue.put(list(kept_lists(folder, "test", ("rows",), make)["rows"]))
    except threading.BrokenBarrierError:
        queue.put("one after the other")


def test_where_no_list_is_kept_those_that_waited_list_at_the_same_time(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_FEWEST", 10)
    context = multiprocessing.get_context("fork")
    shared = context.Semaphore(0), context.Semaphore(1), context.Barrier(2), context.SimpleQueue()
    processes = [context.Process(target=_list_in_vain, args=(str(tmp_path), *shared)) for _ in range(3)]
    for process in processes:
        process.start()
    assert [shared[-1].get() for _ in processes] == [["one"]] * 3
    for process in processes:
        process.join()


def test_a_folder_with_a_time_in_the_future_is_listed_once(tmp_path, scans, monkeypatch):
    folder = folder_of(tmp_path / "set")
    os.utime(folder, ns=(0, 1 << 62))
    monkeypatch.setattr(cache.time, "sleep", lambda _: pytest.fail("waits"))
    assert names_in(folder) == sorted(NAMES) and len(scans) == 1 and not kept(folder)


def test_what_a_process_left_that_was_killed_while_it_saved_is_deleted(tmp_path):
    folder = folder_of(tmp_path / "set")
    process = multiprocessing.get_context("fork").Process(target=_killed, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == 9 and len(list(tmp_path.glob(".index-*"))) == 1
    assert names_in(folder) == sorted(NAMES)
    assert {path.name for path in tmp_path.iterdir()} == {"set", ".probe", kept(folder)[0].name}


def _killed(folder: Path) -> None:
    os.replace = lambda *_: os._exit(9)
    names_in(folder)


def test_a_lock_of_another_user_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    monkeypatch.setattr(cache, "_locked", lambda *_: pytest.fail("asked for the lock"))
    folder = folder_of(tmp_path / "set")
    assert names_in(folder) == sorted(NAMES) and len(kept(folder)) == 1


def test_threads_may_list_one_folder_at_once(tmp_path):
    folder = folder_of(tmp_path / "set")
    assert on_processes(3, lambda process: names_in(folder)) == [sorted(NAMES)] * 3
    assert threading.active_count() >= 1


def test_a_list_in_a_file_takes_no_memory_and_is_pickled_whole(tmp_path):
    folder = folder_of(tmp_path / "set", ["a.png"])
    watched = Watched()
    watched.add("", folder.stat())
    strings = PackedStrings(f"{i}.png" for i in range(20_000))
    kept_lists(str(folder), "test", ("rows",), lambda: Lists({"rows": strings}, watched))
    tracemalloc.start()
    rows = kept_lists(str(folder), "test", ("rows",), lambda: pytest.fail("made a second time"))["rows"]
    assert isinstance(rows, StoredStrings) and tracemalloc.get_traced_memory()[0] < 20_000
    tracemalloc.stop()
    assert list(rows) == list(strings) == list(pickle.loads(pickle.dumps(rows)))
    assert rows.fingerprint == strings.fingerprint and [rows[0], rows[19_999]] == ["0.png", "19999.png"]
    for index in (-1, 20_000):
        with pytest.raises(IndexError):
            rows[index]


def test_rows_that_are_long_together_are_read_one_by_one(tmp_path, monkeypatch):
    folder = folder_of(tmp_path / "set", ["a.png"])
    watched, strings = Watched(), PackedStrings(str(10**i) for i in range(100))
    watched.add("", folder.stat())
    monkeypatch.setattr(packed, "_LONGEST", 100)
    rows = kept_lists(str(folder), "test", ("rows",), lambda: Lists({"rows": strings}, watched))["rows"]
    assert isinstance(rows, StoredStrings) and list(rows) == list(strings)


ROWS = [("v/a.mp4", 0.1, 0.7), ("ü, ß.mp4", 0.0, 1e9), ("c.mp4", 1 / 3, 5.0)]


def written(path: Path, rows: list[tuple[str, float, float]]) -> Path:
    lines = [json.dumps({"path": name, "start_seconds": begin, "end_seconds": end}) for name, begin, end in rows]
    path.write_text("\n".join(lines) + "\n")
    settle(path)
    return path


def parts_in(path: Path) -> list[tuple[str, float, float]]:
    videos = open_videos(str(path), image_size=8, num_frames=1)
    sources = [videos.source(index) for index in range(len(videos))]
    assert [source.path for source in sources] == [videos.describe(index) for index in range(len(videos))]
    return [(os.path.relpath(source.path, path.parent), source.start_seconds, source.end_seconds) for source in sources]


def test_a_manifest_is_read_once_and_again_after_a_change_that_leaves_its_size(tmp_path, monkeypatch):
    path = written(tmp_path / "set.jsonl", ROWS)
    size, read, reads = path.stat().st_size, manifest._read, []
    monkeypatch.setattr(manifest, "_read", lambda *arguments: (reads.append(1), read(*arguments))[1])
    assert parts_in(path) == parts_in(path) == ROWS and len(reads) == 1
    changed = [("v/b.mp4", 0.1, 0.7), *ROWS[1:]]
    written(path, changed)
    assert path.stat().st_size == size and parts_in(path) == changed and len(reads) == 2
    os.utime(path, ns=(0, 10**18))
    settle(path)
    assert parts_in(path) == changed and len(reads) == 3, "a time that was set, as tools set it that copy files"
    path.write_text(path.read_text().replace("c.mp4", "d.mp4"))
    os.utime(path, ns=(0, 10**18))
    settle(path)
    assert parts_in(path)[2][0] == "d.mp4"


def test_captions_and_labels_of_a_manifest_are_those_of_the_first_start(tmp_path):
    path = tmp_path / "set.csv"
    path.write_text('path,captions,label\na.wav,"[""one"", ""two, ü""]",kind\nb.wav,three|four|three,\nc.wav,,\n')
    settle(path)
    cut = {"sample_rate": 8000, "clip_seconds": 1.0}
    for _ in range(2):
        sounds = open_sounds(str(path), **cut)
        assert sounds.texts(0) == (["one", "two, ü"], "kind") and sounds.texts(1) == (["three", "four"], None)
        assert one_line(sounds.texts, 2) == "it has no caption"
    assert len(kept(path)) == 1
