"""Files that stand in the place of others: pointers of Git LFS, web pages, compressed files, text of another encoding.
Whatever is to be read, one line says what they are and what to do."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.data.decoding.arrays import read_array_header
from tandem.data.decoding.images import decode_image
from tandem.data.decoding.sounds import ClipDecoder as SoundDecoder
from tandem.data.decoding.texts import read_single_text, read_texts
from tandem.data.decoding.videos import ClipDecoder as VideoDecoder
from tandem.data.fields import TEXTS, ImageField
from tandem.data.sources.opening import open_source
from tandem.data.sources.record import FileRef
from tandem.data.tokenizers import open_tokenizer
from tandem.io.reading import read_json, read_yaml
from tests.data.helpers import one_line

TABLE = b"path,caption\nred.png,a red square\n"
KINDS = {
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 3346\n", "git lfs pull"),
    "html": (b"\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n", "a web page"),
    "gzip": (gzip.compress(TABLE), "a compressed file; unpack it"),
    "zstd": (b"\x28\xb5\x2f\xfd" + TABLE, "a compressed file; unpack it"),
    "zip": (b"PK\3\4" + bytes(60), "a compressed file; unpack it"),
}
UTF_16 = {  # with and without a mark of the byte order
    encoding: (TABLE.decode().encode(encoding), "it is UTF-16 text; save it as UTF-8")
    for encoding in ("utf-16", "utf-16-le", "utf-16-be")
}
TEXT_ENDINGS = (".csv", ".tsv", ".jsonl", ".txt", ".caption.txt", ".yaml")


def opened(path: Path) -> Any:
    return open_source(str(path), [ImageField(8).spec, TEXTS], demo="demo:shapes")


READERS: dict[str, Callable[[Path], Any]] = {
    **dict.fromkeys((".tar", ".parquet", ".arrow", ".csv", ".tsv", ".jsonl"), opened),
    ".png": lambda path: decode_image(FileRef(str(path)), 8, 3),
    ".flac": lambda path: SoundDecoder(16000, 1600).load(FileRef(str(path)), 0),
    ".mp4": lambda path: VideoDecoder(8, 2).load(FileRef(str(path)), 0),
    ".npy": lambda path: read_array_header(FileRef(str(path))),
    ".txt": lambda path: read_texts(FileRef(str(path))),
    ".caption.txt": lambda path: read_single_text(FileRef(str(path))),
    ".caption.json": lambda path: read_texts(FileRef(str(path))),
    ".tokenizer.json": lambda path: open_tokenizer(str(path), 8),
    ".json": read_json,
    ".yaml": read_yaml,
}


@pytest.mark.parametrize("ending", READERS)
def test_what_stands_in_the_place_of_a_file_is_named_with_what_to_do(ending: str, tmp_path: Path) -> None:
    for kind, (content, words) in {**KINDS, **(UTF_16 if ending in TEXT_ENDINGS else {})}.items():
        path = tmp_path / f"{kind}{ending}"
        path.write_bytes(content)
        assert words in one_line(READERS[ending], path), kind


def test_captions_that_only_look_alike_are_captions(tmp_path: Path) -> None:
    for caption in ("version 2 of a poster", "Rar! says the bird", "BZhang in a park", "<head> of a horse", "a\0b"):
        (tmp_path / "a.txt").write_text(caption)
        assert read_single_text(FileRef(str(tmp_path / "a.txt"))) == caption


@pytest.mark.parametrize("begin", ["", "a", "ab", "abc"])
def test_a_text_longer_than_what_is_read_ends_with_a_whole_letter(begin, tmp_path):
    ref = FileRef(str(tmp_path / "a.txt"))
    for read, limit in ((read_single_text, 1 << 16), (lambda ref: read_texts(ref).captions[0], 1 << 20)):
        (tmp_path / "a.txt").write_text(begin + limit * "🔔", encoding="utf-8")
        assert read(ref) == begin + (limit - len(begin)) // 4 * "🔔"
        (tmp_path / "a.txt").write_bytes(b"a\xf0" + limit * b"b")
        assert "no UTF-8" in one_line(read, ref)
