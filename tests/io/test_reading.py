"""Files that would never end, fill the memory or crash a parser are one line of a ValueError, at once."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import yaml
from safetensors import SafetensorError

from tandem.io.reading import (
    check_inside,
    check_regular,
    compose_yaml,
    counted,
    error_text,
    open_regular,
    plain_text,
    read_bytes,
    read_json,
    read_json_or_empty,
    read_yaml,
    text_lines,
)
from tests.data.helpers import one_line


@pytest.mark.parametrize("read", [open_regular, check_regular, read_json, read_yaml, compose_yaml])
def test_a_pipe_a_device_and_a_link_to_one_are_refused_and_a_folder_is_said_to_be_one(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it: an ordinary open() would wait for ever
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "link", Path("/dev/null")):
        assert one_line(read, path) == f"{path.name} is not a regular file"
    with pytest.raises(IsADirectoryError):
        read(tmp_path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "missing")


def test_a_longer_file_is_refused_before_it_is_read_and_one_that_does_not_say_its_length_afterwards(tmp_path):
    path = tmp_path / "long.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    assert one_line(read_json, path) == f"long.json is longer than {1 << 26} bytes"
    assert one_line(read_yaml, path) == f"long.json is longer than {1 << 18} bytes"
    assert one_line(lambda path: read_bytes(path, 10), Path("/proc/self/status")) == "status is longer than 10 bytes"
    assert read_bytes(Path("/proc/self/status"), 1 << 20).startswith(b"Name:")


def test_marks_of_the_byte_order_are_no_part_of_a_text_wherever_they_stand(tmp_path):
    """Two files of Notepad, one after the other."""
    mark = b"\xef\xbb\xbf"
    assert plain_text(mark + "é\r\n".encode() + mark + b"two") == "é\r\ntwo"
    assert one_line(plain_text, "text".encode("utf-16")) == "it is UTF-16 text; save it as UTF-8"
    assert one_line(plain_text, "né".encode("latin-1")) == (
        "it is no UTF-8 text (unexpected end of data): save it as UTF-8"
    )
    (tmp_path / "a").write_bytes(mark + b'{"a": [1]}\r\n')
    assert read_json(tmp_path / "a") == read_yaml(tmp_path / "a") == {"a": [1]}


def test_lines_end_as_editors_end_them_and_at_no_other_character():
    lines = text_lines("one\r\n\r\n two\u2028three\x0b\x85 four \rfive\n\n")
    assert lines == ["one", "two\u2028three\x0b\x85 four", "five"]


@pytest.mark.parametrize(("content", "expected"), [
    ("[" * 100_000, "it is nested too deeply"), ('{"a":' * 100_000, "it is nested too deeply"),
    ('{"a": [' + "[]," * 4_200_000 + "0]}", "it holds more than 4194304 lists, objects and keys"),
    ("[1]", "a.json holds no JSON object"),
    ("{", "Expecting"), (b"\xff", "codec can't decode"), ('{"a": ' + "9" * 5000 + "}", "digits"),
], ids=["deep list", "deep object", "many values", "no object", "no JSON", "no text", "long number"])  # fmt: skip
def test_json_that_is_no_object_of_a_bounded_size_and_depth_is_refused(content, expected, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert expected in one_line(read_json, path)
    assert read_json_or_empty(path) == {}


MULTIPLYING = "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12))])


@pytest.mark.parametrize("read", [read_yaml, compose_yaml])
@pytest.mark.parametrize(("content", "expected"), [
    ("[" * 50_000, "it is nested too deeply"), (MULTIPLYING, "its aliases make it endless, or far longer"),
    ("a: &a [*a]", "its aliases make it endless"), ("a: [", "while parsing"), (b"a: \xff", "no UTF-8 text"),
    ("a: \x07", "special characters"),
], ids=["deep", "multiplying", "endless", "no YAML", "no text", "control character"])  # fmt: skip
def test_yaml_that_is_deep_endless_or_none_is_refused(read, content, expected, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert expected in one_line(read, path)


@pytest.mark.parametrize("value", ["!!int ''", "!!bool x", "!!timestamp x", "!!python/object/apply:os.getcwd []",
                                   "2024-99-99", "{[]: 1}"])  # fmt: skip
def test_a_yaml_tag_that_does_not_fit_its_text_is_one_line(value, tmp_path):
    (tmp_path / "a.yaml").write_text(f"a: {value}")
    one_line(read_yaml, tmp_path / "a.yaml")


def test_what_people_and_this_program_write_as_yaml_is_read(tmp_path):
    path = tmp_path / "a.yaml"
    shared = [1, 2]
    path.write_text(yaml.safe_dump({"a": shared, "b": shared, "c": {"d": None, "e": "ü"}}))
    assert "*id001" in path.read_text()
    assert read_yaml(path) == {"a": shared, "b": shared, "c": {"d": None, "e": "\u00fc"}}
    path.write_text("base: &base {a: 1, b: 2}\nmore: {<<: *base, b: 3}\n")
    assert read_yaml(path)["more"] == {"a": 1, "b": 3}
    path.write_text("# nothing\n")
    assert read_yaml(path) is None and compose_yaml(path) is None


def test_a_link_that_leaves_its_folder_is_refused_and_one_that_stays_in_it_is_not(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret").touch()
    (folder / "file").touch()
    (folder / "inside").symlink_to("file")
    (folder / "outside").symlink_to(tmp_path / "secret")
    (tmp_path / "linked").symlink_to("folder")
    for name in ("file", "inside"):
        assert check_inside(tmp_path / "linked" / name, tmp_path / "linked") == tmp_path / "linked" / name
    (folder / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        check_regular(check_inside(folder / "loop", folder))
    said = one_line(lambda path: check_inside(path, folder), folder / "outside")
    assert "outside is a link that leaves the folder" in said


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "a"), "No space left on device"),
        (SafetensorError(f"Error while serializing: I/O error: {os.strerror(28)} (os error 28)"), os.strerror(28)),
        (ValueError("two\nlines\x1b"), "two lines?"),
        (KeyError(), "KeyError"),
        (KeyError("grid"), "it lacks 'grid'"),
    ],
)
def test_the_words_of_an_error_are_one_line_and_of_the_system_why(error: Exception, words: str) -> None:
    assert error_text(error) == words


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "process", "1 process"), (0, "process", "0 processes"), (2, "micro-batch", "2 micro-batches"),
        (1.0, "minute", "1 minute"), (0.5, "minute", "0.5 minutes"), (1_500_000, "update", "1500000 updates"),
    ],
)  # fmt: skip
def test_a_number_of_things_is_in_the_singular_or_the_plural(number: float, noun: str, text: str) -> None:
    assert counted(number, noun) == text
