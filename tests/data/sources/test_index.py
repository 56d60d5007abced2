"""Indices that are kept for later starts: used while they are true, and not a moment longer."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.data.sources import index
from tandem.data.sources.index import Dependencies, Index, IndexData, PackedStrings, cached_index
from tests.data.helpers import in_processes, one_line
from tests.training.disk import left_by_kills

ROWS = ["", "a", "new\nline", "ü", os.fsdecode(b"not \xff utf-8"), *map(str, range(500))]


@pytest.fixture(autouse=True)
def no_tick(monkeypatch) -> None:
    """A clock without ticks."""
    monkeypatch.setattr(index, "_CLOCK_TICK_NS", 0)


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "set").write_text("of rows")
    return tmp_path / "set"


def made(path: Path | str, rows: list[str] = ROWS) -> IndexData:
    watched = Dependencies()
    watched.add("", os.stat(path))
    strings, squares = PackedStrings(), array("q", (place * place for place in range(len(rows))))
    for row in rows:
        strings.append(row)
    return IndexData({"rows": strings, "squares": squares}, f"of {len(rows)}", {"more": "ü"}, watched)


def opened(path: Path, make: Callable[[Path], IndexData] = made, **options: Any) -> Index:
    return cached_index(str(path), "test", lambda: make(path), **{"min_strings": 1, **options})


def again(path: Path, **options: Any) -> Index:
    """As it is found by a later start."""
    return opened(path, lambda path: pytest.fail("made a second time"), **options)


def content(found: Index) -> tuple[list[str], list[int]]:
    """All that is in it, read in both ways."""
    rows = found.strings("rows")
    squares = found.numbers("squares", len(rows))
    assert [rows[i] for i in range(len(rows))] == [*rows]
    assert [squares[i] for i in range(len(rows))] == squares.to_numpy().tolist()
    return [*rows], squares.to_numpy().tolist()


def in_files(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f".{path.name}.*.index"))


def test_an_index_is_made_once_and_read_again_also_after_pickling(file, monkeypatch):
    expected = ROWS, [i * i for i in range(len(ROWS))]
    monkeypatch.setattr(index, "_STRINGS_AT_ONCE", 64)
    for found in (opened(file), again(file), opened(file, min_strings=10_000)):
        for one in (found, pickle.loads(pickle.dumps(found))):
            assert content(one) == expected and one.fingerprint == f"of {len(ROWS)}" and one.facts == {"more": "ü"}
    assert len(pickle.dumps(again(file))) < 1000, "where it is, not what is in it"
    [path] = in_files(file)
    assert content(cached_index(str(file), "other kind", lambda: made(file, ["x"]))) == (["x"], [0])
    assert in_files(file) == [path], "short ones are not kept"
    sent = pickle.dumps(again(file))
    file.write_text("other rows")
    opened(file, lambda path: made(path, ["b"]))
    assert "was damaged or replaced" in one_line(pickle.loads, sent)
    path.unlink()
    assert "was damaged or replaced" in one_line(pickle.loads, sent)


def test_it_is_made_again_if_anything_it_depends_on_has_changed(file):
    opened(file, depends="one")
    again(file, depends="one")
    assert content(opened(file, lambda path: made(path, ["b"]), depends="two")) == (["b"], [0])
    status = file.stat()
    file.write_text("of lines")
    os.utime(file, ns=(0, status.st_mtime_ns))  # as tools set it that copy files
    assert content(opened(file, lambda path: made(path, ["c"]), depends="two")) == (["c"], [0])
    again(file, depends="two")


def test_what_has_changed_within_a_tick_of_the_clock_is_not_kept(file, monkeypatch):
    """It may change again without getting another time."""
    monkeypatch.setattr(index, "_CLOCK_TICK_NS", 10**18)
    assert len(opened(file).strings("rows")) == len(ROWS) and not in_files(file)


def test_a_damaged_index_is_made_again_or_is_an_error_where_it_is_read(file):
    """The columns are not read at a start; what is wrong in them is found when it is needed."""
    opened(file)
    [path] = in_files(file)
    whole = path.read_bytes()
    head, _, rest = whole.partition(b"\n")
    header = json.loads(head)
    columns = header["columns"]
    forged = [
        {**header, "key": "of another program"}, {"key": header["key"]}, [], {**header, "columns": columns[1:]},
        {**header, "columns": [[name, 1 << 70, n] for name, _, n in columns]},
        {**header, "columns": [[name, -1, n] for name, _, n in columns]},
        {**header, "columns": [[name, str(n), size] for name, n, size in columns]},
    ]  # fmt: skip
    for bad in (
        b"",
        head,
        whole[:-1],
        whole + b"\0",
        b"[" * 5000,
        *(json.dumps(h).encode() + b"\n" + rest for h in forged),
    ):
        path.write_bytes(bad)
        assert content(opened(file))[0] == ROWS, bad[:80]
        assert path.read_bytes() == whole
    ends = whole.index(np.array([0, 0, 1, 9], np.int64).tobytes())
    for value in (-1, columns[1][2] + 8, 1 << 30, 1 << 62):  # the second is a place in the next column
        path.write_bytes(whole[: ends + 16] + np.int64(value).tobytes() + whole[ends + 24 :])
        assert "delete it" in one_line(again(file).strings("rows").__getitem__, 1)
    path.write_bytes(whole)
    found = again(file)
    os.truncate(path, len(head) + 100)
    for read in (lambda: found.strings("rows")[300], lambda: found.numbers("squares", len(ROWS)).to_numpy()):
        assert f"{str(path)!r} was damaged or replaced: delete it" in one_line(read)
    for name, n in (("none", len(ROWS)), ("rows", len(ROWS)), ("squares", 3)):
        assert "was damaged" in one_line(found.numbers, name, n)
    path.unlink()
    os.mkfifo(path)  # opening it would wait for ever
    assert content(opened(file))[0] == ROWS


def test_it_is_kept_in_the_cache_of_the_user_where_the_folder_takes_none_or_in_memory(file, own_cache):
    opened(file)
    [path] = in_files(file)
    path.unlink()
    (path / "occupied").mkdir(parents=True)  # nothing can be written there, not by root either
    opened(file)
    assert len(list((own_cache / "tandem/lists").iterdir())) == 1
    again(file)
    shutil.rmtree(own_cache)
    own_cache.write_text("no folder")
    assert content(opened(file))[0] == content(opened(file))[0] == ROWS
    own_cache.unlink()
    assert content(cached_index("s3://bucket/set", "test", lambda: made(file), min_strings=1))[0] == ROWS
    assert len(list((own_cache / "tandem/lists").iterdir())) == 1


def test_who_may_not_read_a_set_may_not_read_the_index_of_it(tmp_path):
    for mode, expected in ((0o700, 0o600), (0o755, 0o644), (0o750, 0o640)):
        folder = tmp_path / f"set{mode:o}"
        folder.mkdir()
        folder.chmod(mode)
        opened(folder)
        assert in_files(folder)[0].stat().st_mode & 0o777 == expected


def test_of_several_processes_that_start_at_once_one_makes_it(file):
    def make(path: Path) -> IndexData:
        with open(f"{path}.log", "a") as log:
            log.write("made\n")
        time.sleep(0.3)  # the others come meanwhile
        return made(path)

    assert in_processes(4, lambda _: content(opened(file, make))[0]) == [ROWS] * 4
    assert Path(f"{file}.log").read_text() == "made\n"
    assert {path.name for path in file.parent.iterdir()} == {"set", "set.log", in_files(file)[0].name}


def test_a_process_that_waits_for_the_list_of_another_uses_the_processor_as_the_watchdog_wants(file):
    context = multiprocessing.get_context("fork")
    with index.one_process_at_a_time(str(file), "test"):
        waiting = context.Process(target=opened, args=(file,))
        waiting.start()
        used, deadline = set[bytes](), time.monotonic() + 30
        while len(used) < 8:
            assert time.monotonic() < deadline and waiting.is_alive()
            time.sleep(0.3)
            used.add(Path(f"/proc/{waiting.pid}/schedstat").read_bytes())
    waiting.join()
    assert waiting.exitcode == 0


def test_forked_processes_read_it_and_their_memory_does_not_grow_with_it(file):
    rows = [f"{number:0100d}" for number in range(200_000)]
    opened(file, lambda path: made(path, rows))
    found = again(file)

    def grown(_: int) -> tuple[int, int]:
        def own() -> int:  # KiB
            return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0])

        before = own()
        return sum(len(row) for row in found.strings("rows")), own() - before

    [(n, kib)] = in_processes(1, grown)
    assert n == 20_000_000 and kib < 10_000


def test_what_a_process_left_that_was_killed_while_it_saved_is_deleted(file):
    unfinished = 0
    for left in left_by_kills(file.parent, lambda: opened(file)):
        unfinished += len(list(left.glob(".index-*")))
        assert content(opened(left / "set"))[0] == ROWS
        assert {path.name for path in left.iterdir()} == {"set", in_files(file)[0].name}
    assert unfinished
