"""Image folders and the names by which image sets are opened."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from data.sets import open_conditioned, open_images
from tests.data.helpers import one_line


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("listing a folder opens no file")


def listed(folder: Path) -> list[str]:
    images = open_images(str(folder), image_size=8)
    return [os.path.relpath(images.describe(i), folder) for i in range(len(images))]


def test_flat_nested_and_class_folders_are_read_in_the_order_of_the_relative_path(tmp_path):
    names = ["b.jpg", "dogs/2.png", "a.jpeg", "cats/old/1.webp", "dogs/10.bmp", "cats.jpg", "ünïcode/ß.jpg"]
    names += [f"{i % 3}/{i:02d}.jpg" for i in range(30)]
    for folder, made in (("one", names), ("two", reversed(names))):  # in whatever order the file system lists them
        touch(*(tmp_path / folder / name for name in made))
        assert listed(tmp_path / folder) == sorted(names)


def test_only_files_with_an_image_ending_are_read_and_no_hidden_ones(tmp_path):
    names = ["a.JPG", "b.Jpeg", "c.PNG", "d.WebP", "e.bMp", "f.txt", "jpg", "g.jpg.part", "._a.jpg", ".cache/b.jpg"]
    touch(*(tmp_path / name for name in names))
    os.mkfifo(tmp_path / "pipe.jpg")  # opening it would wait for ever
    assert listed(tmp_path) == names[:5]


def test_linked_folders_are_followed_once_and_loops_end(tmp_path):
    touch(tmp_path / "set" / "a" / "1.jpg", tmp_path / "elsewhere" / "2.jpg")
    (tmp_path / "set" / "a" / "loop").symlink_to(tmp_path / "set")
    (tmp_path / "set" / "b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "set" / "c").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "set" / "3.jpg").symlink_to(tmp_path / "elsewhere" / "2.jpg")
    (tmp_path / "set" / "dangling.jpg").symlink_to(tmp_path / "nowhere.jpg")
    (tmp_path / "set" / "itself.jpg").symlink_to(tmp_path / "set" / "itself.jpg")
    assert listed(tmp_path / "set") == ["3.jpg", "a/1.jpg", "b/2.jpg"]


def test_skipped_files_are_counted_by_ending_and_those_beside_samples_are_none(tmp_path):
    touch(*(tmp_path / name for name in ("a.jpg", "b.HEIC", "c/d.heic", "c/e.txt", "README", ".hidden.heic", "f.a b")))
    said = open_images(str(tmp_path), image_size=8).skipped
    assert said.startswith(f"5 files are skipped in {str(tmp_path)!r}") and "2 .heic" in said
    assert all(part in said for part in ("1 .txt", "1 without an ending", "1 of another ending"))
    beside = open_conditioned(str(tmp_path), image_size=8).skipped  # texts are captions there
    assert beside.startswith("4 files are") and ".txt" not in beside
    touch(tmp_path / "only" / "a.jpg")
    assert open_images(str(tmp_path / "only"), image_size=8).skipped == ""


def test_folder_that_may_not_be_read_is_named():
    # not in tmp_path, whose parents only their owner may enter
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        locked = Path(folder, "locked")
        touch(locked / "a.jpg")
        locked.chmod(0)
        uid = os.geteuid()
        if uid == 0:
            os.seteuid(65534)  # nobody: a lock does not keep root out
        try:
            text = one_line(open_images, folder, image_size=8)
            assert text == f"cannot read the folder {str(locked)!r}: Permission denied"
        finally:
            if uid == 0:
                os.seteuid(0)
            locked.chmod(0o755)
