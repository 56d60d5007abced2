"""Tars as sources: read at random, by an index that is made once from their headers."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import tarfile
import tracemalloc
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tandem.data.sources import tar as tars
from tandem.data.sources.opening import open_source
from tandem.data.sources.record import FieldSpec
from tandem.data.sources.tar import TarSource, members
from tests.data.helpers import one_line, write_tar

IMAGE = FieldSpec("image", "image", (".png", ".jpg"))
TEXTS = FieldSpec("texts", "caption", (".json", ".txt"), as_cells=True)
EMBEDDING = FieldSpec("image_embed", "image embedding", (".img_emb.npy", ".npy"))
WANTED = (IMAGE, TEXTS, EMBEDDING)


@pytest.fixture(autouse=True)
def keeps_short_lists(monkeypatch) -> None:
    monkeypatch.setattr(tars, "_MIN_CACHED_SAMPLES", 1)


def files(number: int) -> dict[str, bytes]:
    return {"png": f"image {number}".encode() * number, "txt": f"text {number}".encode()}


def shard(path: Path, n: int, first: int = 0) -> Path:
    return write_tar(path, {f"{number:06d}": files(number) for number in range(first, first + n)})


def opened(*paths: Path) -> TarSource:
    return TarSource([str(path) for path in paths], WANTED)


def content(source: TarSource) -> list[dict[str, tuple[str, bytes]]]:
    """The name of the file and its bytes, of all members of all samples."""
    records = [source.record(number) for number in range(len(source))]
    return [{name: (entry.name, entry.read(1 << 20)) for name, entry in record.items()} for record in records]


def expected(*numbers: int) -> list[dict[str, tuple[str, bytes]]]:
    return [
        {"image": (f"{n:06d}.png", files(n)["png"]), "texts": (f"{n:06d}.txt", files(n)["txt"])} for n in numbers
    ]  # fmt: skip


def cached_index(path: Path) -> list[Path]:
    return sorted(path.glob(".*.index"))


def made_of(path: Path, *names: str) -> Path:
    """A tar of members of these names, each with its name as content."""
    with tarfile.open(path, "w") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(name.encode())
            tar.addfile(member, io.BytesIO(name.encode()))
    return path


def test_one_index_of_all_tars_is_kept_and_the_tars_are_not_scanned_again(tmp_path, monkeypatch):
    paths = [shard(tmp_path / "set" / f"{number}.tar", 5, 5 * number) for number in range(3)]
    first = opened(*paths)
    assert content(first) == expected(*range(15))
    assert len(cached_index(tmp_path)) == 1 and not cached_index(tmp_path / "set")
    monkeypatch.setattr(tars, "members", lambda *given: pytest.fail("scanned a second time"))
    monkeypatch.chdir(tmp_path)
    for again in (
        opened(*paths),
        TarSource([f"set/{n}.tar" for n in range(3)], WANTED),
        pickle.loads(pickle.dumps(first)),
    ):
        assert content(again) == expected(*range(15)) and again.fingerprint == first.fingerprint
    assert first.shards == [range(5), range(5, 10), range(10, 15)]
    assert [first.shard(number) for number in (0, 4, 5, 14)] == [0, 0, 1, 2]
    assert first.name(7) == "000007.png" and first.describe(7) == f"{paths[1]}/000007.png"
    assert first.examples("texts") == [*range(10, 15), *range(10)], "the longest texts first"
    assert first.examples("image_embed") == first.examples("none") == []


def test_the_index_of_another_tar_of_that_name_is_not_used(tmp_path):
    path = shard(tmp_path / "a.tar", 5)
    assert content(opened(path)) == expected(*range(5)) and cached_index(tmp_path)
    shard(path, 3, first=20)
    assert content(opened(path)) == expected(20, 21, 22)
    # Of the same size, but written later.
    for time, name in enumerate("xy"):
        write_tar(path, {name: files(0)})
        os.utime(path, ns=(0, 10**18 + time))
        assert opened(path).describe(0) == f"{path}/{name}.png"


def test_a_sample_has_the_members_of_its_name_up_to_the_first_dot(tmp_path):
    """An ending has to be all of the rest, unless nothing else is there; the first ending is taken."""
    path = made_of(
        tmp_path / "a.tar", "b.npy", "d/a.txt", "d/a.PNG", "a.png", "a.mask.png", "a.json", "a.txt", "c.mask.jpg",
        "c.tags.txt", "b.jpg", "b.img_emb.npy", "b.other.json", "d/a.x.npy", ".hidden.png", "e.txt", "f.png/",
        "d/.g.png",
    )  # fmt: skip
    found = [{name: read.decode() for name, (_, read) in record.items()} for record in content(opened(path))]
    assert found == [
        {"image": "b.jpg", "image_embed": "b.img_emb.npy", "texts": "b.other.json"},
        {"image": "d/a.PNG", "texts": "d/a.txt"},
        {"image": "a.png", "texts": "a.json"},
        {"image": "c.mask.jpg", "texts": "c.tags.txt"},
    ]
    assert [opened(path).name(number) for number in range(4)] == ["b.jpg", "d/a.PNG", "a.png", "c.mask.jpg"]
    masked = TarSource([str(path)], [IMAGE, FieldSpec("mask", "mask", (".mask.png", ".mask.jpg"))])
    assert [len(masked.record(number)) for number in range(len(masked))] == [1, 2, 1], "a mask is no image"


@pytest.mark.parametrize("names", [("0.png", "0.txt", "0.jpg"), ("0.a.png", "0.b.png")])
def test_two_images_of_one_name_are_refused(names, tmp_path):
    said = one_line(opened, made_of(tmp_path / "a.tar", *names))
    assert f"two images of one name, {names[0]!r} and {names[-1]!r}" in said
    if names[0] == "0.a.png":
        assert opened(made_of(tmp_path / "b.tar", *names, "0.jpg")).name(0) == "0.jpg"


def test_the_fingerprint_is_that_of_names_tars_and_what_stands_beside(tmp_path):
    one, same, fewer, other = (tmp_path / name for name in ("one.tar", "same.tar", "fewer.tar", "other.tar"))
    for path, names in ((one, "0.png 0.txt 1.png"), (same, "0.png 0.cls 0.txt 1.png"), (fewer, "0.png 1.png"),
                        (other, "0.png 0.json 1.png")):  # fmt: skip
        made_of(path, *names.split())
    prints = [opened(*paths).fingerprint for paths in ([one], [same], [fewer], [other], [one, same], [same, one])]
    assert prints[0] == prints[1] and len({*prints[1:5]}) == 4 and prints[4] == prints[5]


def claiming(size: bytes, kind: bytes) -> bytes:
    """The header of a tar's member with this size and kind."""
    header = bytearray(tarfile.TarInfo("a").tobuf())
    header[124:136], header[156:157], header[148:156] = size, kind, b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


@pytest.mark.parametrize(
    ("size", "kind", "said"),
    [
        (b"\x80" + (10**12).to_bytes(11, "big"), b"L", "1000000000000 bytes"),
        (b"\x80" + (3 << 30).to_bytes(11, "big"), b"x", "3221225472 bytes"),
        (b"\x80" + (10**12).to_bytes(11, "big"), b"0", "'a' lies beyond its end"),
        (b"\xff" * 8 + b"\xff\xff\xf8\x00", b"0", "has a size below 0"),
        (b"00000000x00\0", b"0", "damaged or cut off"),
    ],
)
def test_a_header_that_claims_much_or_less_than_nothing_takes_no_memory(tmp_path, size, kind, said):
    path = tmp_path / "a.tar"
    path.write_bytes(claiming(size, kind))
    os.truncate(path, 4 << 30)
    tracemalloc.start()
    text = one_line(opened, path)
    assert said in text and "damaged or cut off" in text
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


@pytest.mark.parametrize(
    "line", [b"-5 path=a\n", b"0 path=a\n", b"9999 path=a\n", b"path=a\n", b"11 size=-1\n", b"10 size=x\n"]
)
def test_an_extended_header_that_is_none_is_damage(tmp_path, line):
    header = claiming(b"%011o\0" % len(line), b"x") + line.ljust(512, b"\0")
    (tmp_path / "a.tar").write_bytes(header + tarfile.TarInfo("a.png").tobuf() + bytes(1024))
    assert "damaged or cut off" in one_line(opened, tmp_path / "a.tar")


def test_an_index_that_lies_about_places_leads_to_no_byte_outside(tmp_path):
    """What it says of the beginnings of tars is checked at the start, and the rest where it is used."""
    path = shard(tmp_path / "a.tar", 5)
    opened(path)
    [index] = cached_index(tmp_path)
    whole = index.read_bytes()
    place = opened(path).record(3)["image"].offset
    at = whole.index(np.int64(place).tobytes())
    for forged in (10**15, -1, path.stat().st_size - 1):
        index.write_bytes(whole[:at] + np.int64(forged).tobytes() + whole[at + 8 :])
        assert "was damaged or replaced: delete it" in one_line(opened(path).record, 3)
        assert len(opened(path).record(2)) == 2
    for lost in ("png", "txt"):  # a sample without its image, and one with the text beside a JSON without the JSON
        at = whole.index(np.array([len(files(n)[lost]) for n in range(5)], np.int64).tobytes()) + 8 * 3
        index.write_bytes(whole[:at] + np.int64(-1).tobytes() + whole[at + 8 :])
        assert "was damaged" in one_line(opened(path).record, 3), lost
    at = whole.index(np.array([0, 5], np.int64).tobytes())
    for forged in ([0, 4], [1, 5], [5, 0]):
        index.write_bytes(whole[:at] + np.array(forged).tobytes() + whole[at + 16 :])
        assert "was damaged" in one_line(opened, path)


def test_headers_alone_are_read_and_short_members_in_few_reads(tmp_path, monkeypatch):
    pread, sizes = os.pread, list[int]()
    monkeypatch.setattr(os, "pread", lambda *request: (content := pread(*request), sizes.append(len(content)))[0])

    def reads(path: Path) -> tuple[int, int, int]:
        """Number of reads, their bytes, and the members that were found."""
        sizes.clear()
        n = len([*members(str(path), Counter(), [])])
        return len(sizes), sum(sizes), n

    large = write_tar(tmp_path / "a.tar", {f"{i:02d}": {"png": bytes(200_000), "txt": b"a"} for i in range(20)})
    n_reads, n_bytes, n = reads(large)
    # Two headers and what lies between them fit into 2 KiB or into one piece of 64 KiB.
    assert n == 40 and n_reads < 50 and n_bytes < large.stat().st_size / 20
    small = write_tar(tmp_path / "b.tar", {f"{i:03d}": {"png": bytes(2000), "txt": b"a"} for i in range(200)})
    n_reads, n_bytes, n = reads(small)
    assert n == 400 and n_reads < 40 and n_bytes < 1.2 * small.stat().st_size


def test_a_tar_that_is_cut_off_is_an_error_or_between_two_members_a_line(tmp_path):
    """There it may also be the tar of a program that writes no mark of the end."""
    content_of = shard(tmp_path / "a.tar", 4).read_bytes()
    with tarfile.open(tmp_path / "a.tar") as tar:
        found = tar.getmembers()
    last = found[-1]
    cuts = {0} | {m.offset + 100 for m in found} | {m.offset_data for m in found}
    cuts |= {m.offset_data + m.size // 2 for m in found} | {last.offset_data + last.size + 1}
    end = -(-(last.offset_data + last.size) // 512) * 512
    assert content_of[end:] == bytes(len(content_of) - end) and len(content_of) >= end + 1024
    cuts -= {m.offset for m in found[1:]} | {end}
    for cut in sorted(cuts):
        (tmp_path / "b.tar").write_bytes(content_of[:cut])
        text = one_line(opened, tmp_path / "b.tar")
        assert str(tmp_path / "b.tar") in text and "damaged or cut off" in text, cut
    for n, cut in enumerate([m.offset for m in found[2::2]] + [end], 1):
        (tmp_path / "b.tar").write_bytes(content_of[:cut])
        for _ in range(2):  # the second time by the list that is kept
            source = opened(tmp_path / "b.tar")
            assert content(source) == expected(*range(n))
            assert source.skipped == f"1 tar without a mark of the end, perhaps cut off: {str(tmp_path / 'b.tar')!r}"
    two = opened(tmp_path / "a.tar", tmp_path / "b.tar", shutil.copy(tmp_path / "b.tar", tmp_path / "c.tar"))
    assert two.skipped == f"2 tars without a mark of the end, perhaps cut off: such as {str(tmp_path / 'b.tar')!r}"
    (tmp_path / "b.tar").write_bytes(content_of[: end + 512])
    assert len(source := opened(tmp_path / "b.tar")) == 4 and source.skipped == ""


def test_tars_that_were_appended_to_one_another_are_read(tmp_path):
    """As `cat` does, with the zeros that programs write behind their ends."""
    parts = [shard(tmp_path / f"{number}.tar", 3, 3 * number).read_bytes() for number in range(4)]
    last = parts[0].rstrip(b"\0")
    parts[0] = last.ljust(-(-len(last) // 512) * 512 + 512, b"\0")  # a lone block of zeros
    parts[1] += bytes(1 << 19)
    with tarfile.open(fileobj=(extended := io.BytesIO()), mode="w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("ü" * 200 + ".png")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"last"))
    (tmp_path / "all.tar").write_bytes(b"".join(parts) + extended.getvalue())
    source = opened(tmp_path / "all.tar")
    assert content(source)[:12] == expected(*range(12)) and source.skipped == ""
    assert len(source) == 13 and source.record(12)["image"].read(9) == b"last"
    (tmp_path / "twice.tar").write_bytes(parts[2] * 2)
    assert "two images of one name" in one_line(opened, tmp_path / "twice.tar")
    (tmp_path / "cut.tar").write_bytes(parts[2] + parts[3][:3000])
    assert "damaged or cut off" in one_line(opened, tmp_path / "cut.tar")


@pytest.mark.parametrize("behind", [b"text" * 200, b"\0" * 1536 + b"x", 1 << 40])
def test_something_else_behind_the_end_is_not_read_and_said(behind, tmp_path):
    path = shard(tmp_path / "a.tar", 3)
    if isinstance(behind, int):
        os.truncate(path, behind)  # zeros without end, which nobody looks at
    else:
        path.write_bytes(path.read_bytes() + behind)
    for _ in range(2):
        source = opened(path)
        assert content(source) == expected(0, 1, 2)
        assert source.skipped == f"1 tar with bytes behind the end, which are not read: {str(path)!r}"


def test_members_that_are_part_of_no_sample_are_counted(tmp_path):
    names = ["0.png", "0.txt", "0.cls", "1.png", "1.json", "1.txt", "b/2.txt", "3.npy", "4.x.pdf", "README", ".5.png"]
    path = made_of(tmp_path / "a.tar", *names)
    with tarfile.open(path, "a") as tar:
        for number, kind in enumerate((tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE)):
            member = tarfile.TarInfo(f"{6 + number}.png")
            member.type, member.linkname = kind, "0.png"
            tar.addfile(member)
    other = made_of(tmp_path / "b.tar", "7.png", "7.cls", "8.json")
    for _ in range(2):
        source = opened(path, other)
        assert [source.name(number) for number in range(3)] == ["0.png", "1.png", "7.png"]
        about = "2 .cls, 1 .txt, 2 linked, 1 .json, 1 .npy, 1 .pdf, 1 without an ending"
        line, alone = source.skipped.split("; ")
        assert line.startswith(f"9 members are skipped in 2 tars, the first {str(path)!r}: ")
        assert sorted(line.split(": ")[1].split(", ")) == sorted(about.split(", "))
        assert alone == "3 of them beside no image of the same name, such as '3.npy'"
    said = one_line(opened, made_of(tmp_path / "c.tar", "0.txt", "0.gif"))
    assert said.endswith("2 members are skipped in " + f"{str(tmp_path / 'c.tar')!r}: 1 .txt, 1 .gif; 1 of them beside "
                         "no image of the same name, such as '0.txt'")  # fmt: skip


def test_a_sparse_member_is_refused_in_one_line(tmp_path):
    path = made_of(tmp_path / "a.tar", "0.png")
    with tarfile.open(path, "a") as tar:
        member = tarfile.TarInfo("1.png")
        member.type = tarfile.GNUTYPE_SPARSE
        tar.addfile(member)
    assert "'1.png' is a sparse file: write the tar without --sparse" in one_line(opened, path)


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
def test_letters_with_accents_may_be_composed_or_not_in_the_names_of_members(tmp_path, forms):
    image, text = (unicodedata.normalize(form, name) for form, name in zip(forms, ("ü/é.png", "ü/é.txt"), strict=True))
    both = unicodedata.normalize(forms[0], "가.txt")
    path = made_of(tmp_path / "a.tar", text, image, *(unicodedata.normalize(form, "가.png") for form in forms), both)
    found = [{name: read.decode() for name, (_, read) in record.items()} for record in content(opened(path))]
    assert found[0] == {"image": image, "texts": text}
    assert [record.get("texts") for record in found[1:]] == [both, None], "of one form each its own"


def test_a_file_that_is_no_tar_or_damaged_in_its_middle_is_named(tmp_path):
    path = shard(tmp_path / "a.tar", 4)
    with tarfile.open(path) as tar:
        at = tar.getmembers()[4].offset
    damaged = bytearray(path.read_bytes())
    damaged[at : at + 512] = b"\xff" * 512
    path.write_bytes(damaged)
    assert f"no header at byte {at}" in one_line(opened, shard(tmp_path / "whole.tar", 2), path)
    for text in (b"", b"no tar" * 500, bytes(10240)):
        path.write_bytes(text)
        assert str(path) in one_line(opened, path)
    assert "no image (.png .jpg) in" in one_line(opened, path)
    path.unlink()
    assert one_line(opened, path) == f"cannot read the tar {str(path)!r}: No such file or directory"
    os.mkfifo(path)  # opening it would wait for ever
    assert "no" in one_line(opened, path)


@pytest.mark.parametrize("style", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_that_tarfile_finds(tmp_path, style):
    """Long names, folders, links, global headers, names that are no text, and sizes in bytes."""
    draw = random.Random(0)
    names = ["a.png", "d" * 90 + "/" + "n" * 95 + ".png", "x" * 100, "ü/ß.png"]
    names += [os.fsdecode(b"\xff.png")] if style != tarfile.USTAR_FORMAT else []
    if style != tarfile.USTAR_FORMAT:
        names += ["ünïcode/" + "long/" * 40 + "a.b", "l" * 300, "e" * 99 + ".p"]
    with tarfile.open(tmp_path / "a.tar", "w", format=style, pax_headers={"comment": "of all"}) as tar:
        for number, name in enumerate(names * 3):
            member = tarfile.TarInfo(name)
            member.type = (tarfile.REGTYPE, tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.AREGTYPE)[
                number % 5
            ]
            member.linkname, member.mtime = "k" * 200 if style != tarfile.USTAR_FORMAT else "k", 1.25 * number
            member.size = draw.choice([0, 1, 511, 512, 513, 3000])  # links may claim to have content
            tar.addfile(member, io.BytesIO(bytes(member.size)) if member.isreg() else None)
    with tarfile.open(tmp_path / "a.tar") as tar:
        found = [(member.name, member.offset_data, member.size) for member in tar if member.isreg()]
    assert [*members(str(tmp_path / "a.tar"), Counter(), [])] == found and len(found) > 6


@pytest.mark.parametrize("start, end, numbers", [(0, None, range(15)), (1, None, range(5, 15)), (1, 1, range(5, 10))])
def test_tars_are_named_by_a_folder_a_pattern_a_range_and_their_numbers(start, end, numbers, tmp_path):
    folder = tmp_path / "set [1] {0..1}"
    for number in range(3):
        shard(folder / f"{number:03d}.tar", 5, 5 * number)

    def found(spec: str, **flags: int) -> list:
        return content(open_source(str(tmp_path / spec), WANTED, demo="demo:shapes", **flags))  # type: ignore[arg-type]

    flags = {"start_shard": start, "shard_width": 3, **({} if end is None else {"end_shard": end})}
    assert found(folder.name, **flags) == found(f"{folder.name}/", **flags) == expected(*numbers)
    folder.rename(tmp_path / "set")
    for spec in ("set/*.tar", "set/{000..002}.tar", "set/00{0..2}.tar", "set/00[0-2].tar", "set/{}.tar"):
        assert found(spec, **flags) == expected(*numbers)
    assert found("set/001.tar") == expected(*range(5, 10))
    assert found("set/{000,002}.tar") == expected(*range(5), *range(10, 15))
    for spec, said in (
        ("set/none*.tar", "no file is named like"), ("set/{001..004}.tar", "2 of the 4 files"),
        ("set/{002..001}.tar", "is empty"), ("{0..1000000000000}.tar", "stands for more than 1048576 files"),
        ("{000..999}/{000..999}/{0..9}.tar", "stands for more than"), ("{0..99999999999999999999}.tar", "stands for"),
        ("{a,b}" * 21 + "{0..9}.tar", "stands for more"), ("set/{000..002.tar", "{000..002"),
    ):  # fmt: skip
        assert said in one_line(found, spec)
    with pytest.raises(ValueError, match="no tar has a number from --start_shard 7 to --end_shard 9: they have 0 to 2"):
        found("set", start_shard=7, end_shard=9)
    assert "is smaller than" in one_line(found, "set/{}.tar", start_shard=2, end_shard=1)


def test_what_is_no_set_is_refused_in_one_line(tmp_path):
    def said(name: str, **flags: int) -> str:
        return one_line(open_source, str(tmp_path / name), WANTED, demo="demo:shapes", **flags)

    assert str(tmp_path / "phtos") in said("phtos") and ", or demo:shapes to try without one" in said("phtos")
    (tmp_path / "empty").mkdir()
    assert "holds nothing: files that end" in said("empty")
    (tmp_path / "empty" / "a.pdf").touch()
    assert "1 other file: files that end in .png .jpg .tar are read" in said("empty")
    assert "copy them to a disk" in one_line(open_source, "pipe:cat 000.tar", WANTED, demo="demo:shapes")
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "001.png").touch()
    assert "--start_shard and --end_shard select tars" in said("mixed", end_shard=3)
    assert "is no set of images: give a" in said("mixed/001.png")
    made_of(tmp_path / "mixed" / "texts.tar", "0.txt")
    assert "the one or the other" in said("mixed") and "no image (.png .jpg) in" in said("mixed/texts.tar")
    shard(tmp_path / "beside" / "000.tar", 2)
    (tmp_path / "beside" / "000_stats.json").touch()
    beside = open_source(str(tmp_path / "beside"), WANTED, demo="demo:shapes")
    assert beside.skipped == f"1 file is skipped in {str(tmp_path / 'beside')!r}: 1 .json"
    (tmp_path / "a.tar.gz").touch()
    assert "decompress" in said("a.tar.gz")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert said("loop").startswith(f"cannot read the folder {str(tmp_path / 'loop')!r}: ")
