"""Folders as sources: which files are samples, what stands beside them, and their order."""

from __future__ import annotations

import os
import pickle
import shutil
import tarfile
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.data.sources import folder as folders
from tandem.data.sources import index
from tandem.data.sources.folder import FolderSource
from tandem.data.sources.index import IndexData, PackedStrings, cached_index
from tandem.data.sources.record import FieldSpec
from tests.data.helpers import one_line

IMAGE = FieldSpec("image", "image", (".png", ".jpg", ".webp"))
TEXTS = FieldSpec("texts", "caption", (".json", ".txt"), as_cells=True)
EMBEDDING = FieldSpec("image_embed", "image embedding", (".img_emb.npy", ".npy"))
# Also names whose order is another one with the slash than without, and some that other programs take for two.
NAMES = ["a/1.png", "a/deep/er/2.png", "a-b/1.png", "a.png", "ab.png", "B.jpg", "new\nline.png", " .png", "ü/ß.webp"]
NAMES += [os.fsdecode(b"not \xff utf-8.png"), os.fsdecode(b"\x80folder/1.png"), "z/0.png", "z/10.png", "z/9.png"]


@pytest.fixture(autouse=True)
def keeps_short_lists(monkeypatch) -> None:
    """With a clock without ticks, and `settle` in its place; lists are merged from runs."""
    monkeypatch.setattr(folders, "cached_index", lambda *arguments: cached_index(*arguments, min_strings=1))
    monkeypatch.setattr(folders, "_LONGEST_RUN", 3)
    monkeypatch.setattr(index, "_CLOCK_TICK_NS", 0)


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


def opened(folder: Path | str, *beside: FieldSpec) -> FolderSource:
    return FolderSource(str(folder), (IMAGE, *beside), "demo:shapes")


def names_in(folder: Path | str) -> list[str]:
    source = opened(folder)
    return [source.name(number) for number in range(len(source))]


def beside_of(source: FolderSource, name: str) -> dict[str, str]:
    """The relative path of what stands beside each sample that has it."""
    records = [source.record(number) for number in range(len(source))]
    return {
        source.name(number): os.path.relpath(record[name].path, source.folder)
        for number, record in enumerate(records) if name in record
    }  # fmt: skip


@pytest.fixture
def scans(monkeypatch) -> list[str]:
    """The folders that were read."""
    read: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder=".": (read.append(folder), scandir(folder))[1])
    return read


def test_files_are_in_the_order_of_the_relative_path_and_a_second_start_reads_no_folder(tmp_path, scans):
    folder = folder_of(tmp_path / "set", [*NAMES, ".hidden.png", ".cache/b.png", "c.PNG", "png", "g.png.part"])
    os.mkfifo(folder / "pipe.png")  # opening it would wait for ever
    settle(folder)
    scans.clear()
    expected = sorted([*NAMES, "c.PNG"])
    assert names_in(folder) == expected and scans
    scans.clear()
    assert names_in(folder) == names_in(f"{folder}/") == expected and not scans
    source = opened(folder)
    assert source.describe(0) == str(folder / expected[0]) and source.shards is None
    assert source.record(3) == {"image": (str(folder / expected[3]), *source.record(3)["image"][1:])}
    sent = pickle.loads(pickle.dumps(source))
    assert sent.record(5) == source.record(5) and sent.fingerprint == source.fingerprint


def test_what_stands_beside_has_the_same_name_but_for_the_ending_in_any_case(tmp_path):
    names = ["a.png", "a.b.png", "a-b.png", "A.png", "c.jpg", "d/a.png", "d/a.q/1.png", "e.png"]
    texts = ["a.TXT", "a.Txt", "a.b.json", "a.b.txt", "A.txt", "d/a.txt", "d/a.JSON", "c.jpg.txt", "alone.txt"]
    arrays = ["a.b.NPY", "a.img_emb.npy", "a.npy", "e.Img_Emb.Npy", "d/a.q/1.npy"]
    source = opened(folder_of(tmp_path / "set", [*names, *texts, *arrays]), TEXTS, EMBEDDING)
    assert beside_of(source, "texts") == {
        "a.png": "a.Txt", "a.b.png": "a.b.json", "A.png": "A.txt", "d/a.png": "d/a.JSON"
    }  # fmt: skip
    assert beside_of(source, "image_embed") == {
        "a.png": "a.img_emb.npy", "a.b.png": "a.b.NPY", "d/a.q/1.png": "d/a.q/1.npy", "e.png": "e.Img_Emb.Npy"
    }  # fmt: skip


def test_the_largest_arrays_beside_samples_are_the_first_examples(tmp_path):
    folder = folder_of(tmp_path / "set", ["a.png", "b.png", "c.png", "a.npy", "b.npy", "c.txt"])
    (folder / "b.npy").write_bytes(bytes(70))
    source = opened(folder, TEXTS, EMBEDDING)
    assert [source.examples(name) for name in ("image_embed", "texts", "none")] == [[1, 0], [2], []]


def test_the_fingerprint_is_that_of_names_and_of_what_stands_beside(tmp_path):
    two = ["a.png", "b.png"]
    sets = [two, ["a.png", "c.png"], [*two, "b.txt"], [*two, "b.json"], [*two, "a.txt"]]
    prints = [opened(folder_of(tmp_path / str(n) / "set", names), TEXTS).fingerprint for n, names in enumerate(sets)]
    assert len({*prints}) == len(sets)
    assert opened(folder_of(tmp_path / "copy", two), TEXTS).fingerprint == prints[0]


CHANGES: dict[str, Callable[[Path], Any]] = {
    "added": lambda folder: (folder / "a/deep/er/3.png").touch(),
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
    assert names_in(folder) == before
    CHANGES[change](folder)
    settle(folder)
    scans.clear()
    after = names_in(folder)
    assert after != before and after == sorted(after) and scans
    [path] = tmp_path.glob(".set.*.index")
    path.unlink()
    assert names_in(folder) == after


def test_linked_folders_are_followed_once_and_loops_end(tmp_path):
    folder = folder_of(tmp_path / "set", ["a/1.jpg"])
    folder_of(tmp_path / "elsewhere", ["2.jpg"])
    (folder / "a" / "loop").symlink_to(folder)
    (folder / "b").symlink_to(tmp_path / "elsewhere")
    (folder / "c").symlink_to(tmp_path / "elsewhere")
    (folder / "3.jpg").symlink_to(tmp_path / "elsewhere" / "2.jpg")
    (folder / "dangling.jpg").symlink_to(tmp_path / "nowhere.jpg")
    (folder / "itself.jpg").symlink_to(folder / "itself.jpg")
    assert names_in(folder) == ["3.jpg", "a/1.jpg", "b/2.jpg"]


def test_skipped_files_are_counted_by_ending_and_those_beside_samples_are_none(tmp_path):
    names = ["a.jpg", "b.HEIC", "c/d.heic", "a.txt", "README", ".hidden.heic", "f.a b"]
    folder = folder_of(tmp_path / "set", names)
    for _ in range(2):
        said = opened(folder).skipped
        assert said.startswith(f"5 files are skipped in {str(folder)!r}") and "2 .heic" in said
        assert all(part in said for part in ("1 .txt", "1 without an ending", "1 of another ending"))
    said = opened(folder, TEXTS).skipped
    assert said.startswith("4 files are") and ".txt" not in said
    assert opened(folder_of(tmp_path / "only", ["a.jpg"])).skipped == ""
    many = opened(folder_of(tmp_path / "many", ["a.jpg", *(f"b.{number}" for number in range(9))])).skipped
    assert many.startswith("9 files are") and many.endswith(", ...") and many.count("1 .") == 8


def test_what_stands_beside_no_sample_or_after_another_file_there_is_counted_and_one_of_it_is_named(tmp_path):
    """Captions that are called after the whole name of an image, that lie in another folder, or whose image is gone."""
    beside = ["c/a.txt", "a.json", "d/e.txt", "a.npy"]
    alone = ["10.png.txt", "c/b.txt", "texts/a.txt", "gone.img_emb.npy", "ü.txt"]
    names = ["a.png", "10.png", "c/a.png", "d/e.png", *beside, *alone]
    folder = folder_of(tmp_path / "set", [*names, "a.txt", "a.TXT", "d/e.Txt"])  # of which others are taken
    for _ in range(2):
        source = opened(folder, TEXTS, EMBEDDING)
        assert source.skipped == (
            f"8 files are skipped in {str(folder)!r}: 7 .txt, 1 .npy; 5 of them beside no image of the same name, such "
            "as '10.png.txt'"
        )
        read = {**beside_of(source, "texts"), **beside_of(source, "image_embed")}
        assert len(read) == 3 and read["d/e.png"] == "d/e.txt"
    assert opened(folder_of(tmp_path / "good", ["a.png", "a.txt", "a.jpg"]), TEXTS).skipped == ""


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
def test_letters_with_accents_may_be_composed_or_not_in_the_names_of_what_stands_beside(tmp_path, forms):
    """As systems, archives and keyboards differ."""

    def names(form: str, *plain: str) -> list[str]:
        return [unicodedata.normalize(form, name) for name in plain]

    images = names(forms[0], "café 1.png", "ü/é.png", "é.b.png", "가.png", "ñ.png", "ñ.jpg", "a.png")
    texts = names(forms[1], "café 1.TXT", "ü/é.txt", "é.b.img_emb.npy", "가.json", "ñ.txt", "à.txt", "a.txt")
    texts[1] = os.path.join(os.path.dirname(images[1]), os.path.basename(texts[1]))  # else they are two folders
    exact = names(forms[0], "가.txt", "ñ.json")
    folder = folder_of(tmp_path / "set", [*images, *texts, *exact])
    for _ in range(2):
        source = opened(folder, TEXTS, EMBEDDING)
        assert [source.name(number) for number in range(len(source))] == sorted(images)
        assert beside_of(source, "texts") == {
            images[0]: texts[0], images[1]: texts[1], images[3]: texts[3], images[4]: exact[1], images[5]: exact[1],
            "a.png": "a.txt",
        }  # fmt: skip
        assert beside_of(source, "image_embed") == {images[2]: texts[2]}
        assert source.skipped == (
            f"3 files are skipped in {str(folder)!r}: 3 .txt; 1 of them beside no image of the same name, such as "
            f"{texts[5]!r}"
        )


def test_a_list_in_a_folder_is_named_as_what_to_give_instead(tmp_path):
    folder = folder_of(tmp_path / "set", ["a.png", "b/list.csv", "metadata.jsonl", "a.json"])
    said = "; if 'b/list.csv' in it lists images, give its path instead"
    assert opened(folder).skipped.endswith(said)
    (folder / "a.png").unlink()
    assert one_line(opened, folder).endswith(said)


@pytest.mark.parametrize("forged", ["a/../../outside.tar", "/outside.tar", "spelling", "number", "facts", "examples"])
def test_an_index_that_was_made_to_do_harm_leads_to_no_other_file(forged, tmp_path, monkeypatch):
    folder, build = folder_of(tmp_path / "set", ["a.png", "a.txt"]), folders._Tree.build_index
    with tarfile.open(tmp_path / "outside.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("0.png"))
    columns = {"names": PackedStrings([forged])} if "tar" in forged else {}
    facts: dict[str, Any] = {
        "spelling": {"spellings": ["/../x.txt"]}, "number": {"spellings": []}, "facts": {"skipped": "1"},
        "examples": {"examples": {"texts": [1]}},
    }.get(forged, {})  # fmt: skip

    def forge(tree: Any) -> IndexData:
        data = build(tree)
        return data._replace(columns={**data.columns, **columns}, facts={**data.facts, **facts})

    monkeypatch.setattr(folders._Tree, "build_index", forge)
    for _ in range(2):  # the second time by the list that is kept
        assert "was damaged or replaced: delete it" in one_line(
            lambda: [opened(folder, TEXTS).record(0), opened(folder, TEXTS).examples("texts")]
        )


def test_a_folder_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    """Root may read every folder."""
    locked = folder_of(tmp_path / "set" / "locked", ["a.jpg"])
    scandir = os.scandir

    def refused(folder: Any = ".") -> Any:
        if Path(os.fspath(folder)) == locked:
            raise PermissionError(13, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refused)
    assert one_line(opened, locked.parent) == f"cannot read the folder {str(locked)!r}: Permission denied"
