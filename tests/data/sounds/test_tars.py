"""Webdataset tars: read at random, by an index that is made once from their headers."""

from __future__ import annotations

import io
import os
import sys
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

import data.files.tars
from data.files.tars import scan
from data.sets import open_sounds
from data.sounds.tars import MEMBERS
from tests.data.helpers import one_line, write_tar
from tests.data.sources import captions, sound

RATE = 8000


def shard(path: Path, n: int, first: int = 0) -> Path:
    """A tar of n sounds."""
    return write_tar(path, {f"{number:06d}": sound(number) for number in range(first, first + n)})


def opened(spec: Path | str, seconds: float = 0.5):
    return open_sounds(str(spec), sample_rate=RATE, clip_seconds=seconds)


def test_index_is_kept_beside_the_tar_and_made_once(tmp_path, monkeypatch):
    path = shard(tmp_path / "a.tar", 5)
    first = opened(path)
    assert (tmp_path / ".a.tar.index.npz").is_file()
    monkeypatch.setattr(data.files.tars, "scan", lambda *_: pytest.fail("made a second time"))
    again = opened(path)
    assert [again.texts(i).captions for i in range(5)] == [captions(i) for i in range(5)]
    assert all(torch.equal(again.load(i), first.load(i)) for i in range(5))


def test_index_of_another_tar_of_that_name_is_not_used(tmp_path):
    path = shard(tmp_path / "a.tar", 5)
    opened(path)
    shard(path, 3, first=20)
    sounds = opened(path)
    assert [sounds.texts(i).captions for i in range(len(sounds))] == [captions(i) for i in (20, 21, 22)]
    # Of the same size, but written later.
    for time, name in enumerate("xy"):
        write_tar(path, {name: sound(0)})
        os.utime(path, ns=(0, 10**18 + time))
        assert opened(path).describe(0) == f"{path}/{name}.wav"


def test_tar_is_read_where_its_index_can_be_kept_nowhere(tmp_path, own_cache):
    path = shard(tmp_path / "a.tar", 5)
    (tmp_path / ".a.tar.index.npz" / "occupied").mkdir(parents=True)  # nothing can be written there, not by root either
    own_cache.write_text("no folder")
    assert len(opened(path)) == 5


def test_damaged_index_is_made_anew(tmp_path):
    path = shard(tmp_path / "a.tar", 5)
    opened(path)
    kept = tmp_path / ".a.tar.index.npz"
    whole = kept.read_bytes()
    for damaged in (b"", b"PK\x03\x04 and nothing else", b"no archive" * 50, whole[: len(whole) // 2]):
        kept.write_bytes(damaged)
        assert len(opened(path)) == 5
        assert kept.stat().st_size == len(whole)


def claiming(size: bytes, kind: bytes) -> bytes:
    """The header of a tar's member with this size and kind."""
    header = bytearray(tarfile.TarInfo("a").tobuf())
    header[124:136], header[156:157], header[148:156] = size, kind, b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


@pytest.mark.parametrize(
    ("size", "kind", "expected"),
    [
        (b"\x80" + (10**12).to_bytes(11, "big"), b"L", "1000000000000 bytes"),
        (b"\x80" + (3 << 30).to_bytes(11, "big"), b"x", "3221225472 bytes"),
        (b"\xff" * 8 + b"\xff\xff\xf8\x00", b"0", "damaged or cut off"),
    ],
)
def test_a_header_that_claims_much_or_less_than_nothing_takes_no_memory(tmp_path, size, kind, expected):
    path = tmp_path / "a.tar"
    path.write_bytes(claiming(size, kind))
    os.truncate(path, 4 << 30)
    tracemalloc.start()
    assert expected in one_line(opened, path)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_a_kept_index_that_waits_or_has_no_end_or_lies_is_not_read(tmp_path):
    path = shard(tmp_path / "a.tar", 5)
    opened(path)
    kept = tmp_path / ".a.tar.index.npz"
    with np.load(kept) as stored:
        content = {name: stored[name] for name in stored}

    for damage in (
        lambda: os.mkfifo(kept),
        lambda: (kept.touch(), os.truncate(kept, 1 << 40)),
        lambda: np.savez(kept, **{**content, "table": np.full_like(content["table"], 10**15)}),
    ):
        kept.unlink()
        damage()
        assert len(opened(path)) == 5 and opened(path).load(0).shape == opened(path).load(4).shape


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel counts the bytes")
def test_index_is_made_from_the_headers_alone(tmp_path):
    path = write_tar(tmp_path / "a.tar", {f"{i:02d}": {"wav": bytes(200_000), "txt": b"a"} for i in range(20)})

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = bytes_read()
    scan(str(path), MEMBERS)
    read = bytes_read() - before
    # 40 members; webdataset's have a time with fractions, and that takes three blocks of 512 bytes
    assert read < 40 * 1600 + 2000 < path.stat().st_size / 20


def test_tar_that_is_cut_off_is_an_error_wherever_it_was_cut(tmp_path):
    """Also between two members, where `tarfile` sees nothing wrong."""
    content = shard(tmp_path / "a.tar", 4).read_bytes()
    with tarfile.open(tmp_path / "a.tar") as tar:
        members = tar.getmembers()
    last = members[-1]
    cuts = {m.offset for m in members} | {m.offset + 100 for m in members} | {m.offset_data for m in members}
    cuts |= {m.offset_data + m.size // 2 for m in members} | {last.offset_data + last.size + 1}
    end = -(-(last.offset_data + last.size) // 512) * 512
    assert content[end:] == bytes(len(content) - end) and len(content) >= end + 1024
    for cut in sorted(cuts | {end}):
        (tmp_path / "b.tar").write_bytes(content[:cut])
        text = one_line(opened, tmp_path / "b.tar")
        assert str(tmp_path / "b.tar") in text and "damaged or cut off" in text, cut
    (tmp_path / "b.tar").write_bytes(content[: end + 512])
    assert len(opened(tmp_path / "b.tar")) == 4


def test_file_that_is_no_tar_or_damaged_in_its_middle_is_named(tmp_path):
    path = shard(tmp_path / "a.tar", 4)
    with tarfile.open(path) as tar:
        at = tar.getmembers()[4].offset
    content = bytearray(path.read_bytes())
    content[at : at + 512] = b"\xff" * 512
    path.write_bytes(content)
    assert f"no header at byte {at}" in one_line(opened, path)
    for content in (b"", b"no tar" * 500, bytes(10240)):
        path.write_bytes(content)
        assert str(path) in one_line(opened, path)


@pytest.mark.parametrize("style", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_folders_are_read(tmp_path, style):
    name = "ünïcode/" + "long/" * 40 + "a.b"
    with tarfile.open(tmp_path / "a.tar", "w", format=style) as tar:
        members = {"wav": sound(0)["wav"], "json": b'{"text": ["one", "two"]}', "tags.txt": b"three"}
        for ending, content in members.items():
            member = tarfile.TarInfo(f"{name}.{ending}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    sounds = opened(tmp_path / "a.tar")
    assert sounds.texts(0).captions == ["one", "two"]
    assert sounds.describe(0) == f"{tmp_path / 'a.tar'}/{name}.wav"
    assert sounds.load(0).std() > 0.1


@pytest.mark.parametrize(
    "sample, expected",
    [({"wav": sound(0)["wav"]}, "has a caption"),
     ({"wav": sound(0)["wav"], "flac": b"", "txt": b"a"}, "two sounds of one name")],
)  # fmt: skip
def test_tar_without_captions_or_with_a_name_twice_is_refused(tmp_path, sample, expected):
    assert expected in one_line(opened, write_tar(tmp_path / "a.tar", {"0": sample}))


def test_brackets_in_the_name_of_a_folder_are_no_pattern(tmp_path):
    folder = tmp_path / "set [1] {0..1}"
    folder.mkdir()
    shard(folder / "a.tar", 4)
    assert len(opened(folder)) == len(opened(folder / "a.tar")) == 4
