"""The sets of sounds: manifests, folders with texts beside the sounds, and the names by which they are opened."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from data.decoding.texts import Texts
from data.fields import texts_of
from data.sets import open_sounds
from data.tokenizers import open_tokenizer
from tests.data.helpers import OfOne, one_line
from tests.scripts import TOKENIZER

RATE = 8000


def write_sound(path: Path, seconds: float = 1.0, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.random.default_rng(seed).uniform(-0.5, 0.5, round(seconds * RATE)), RATE)
    return path


class Captioned(OfOne):
    def texts(self, index: int) -> Texts:
        return texts_of(self.samples.source.record(index))


def opened(spec: Path | str) -> Captioned:
    words = open_tokenizer(str(TOKENIZER), 8)
    return Captioned(open_sounds(str(spec), sample_rate=RATE, clip_seconds=0.5, tokenizer=words), "waveforms")


def bad(sounds, index: int) -> str:
    """Why there is no sample."""
    with pytest.raises((ValueError, OSError)) as error:
        sounds.texts(index)
        sounds.load(index)
    assert "\n" not in str(error.value)
    return str(error.value)


def manifest(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return path


def listed(sounds) -> list[list[str]]:
    return [sounds.texts(i).captions for i in range(len(sounds))]


SAME_ROWS = {
    "set.csv": 'path,caption,label\nclips/a.wav,"a bell, loud",bell\nclips/b.wav,rain,\n',
    "set.tsv": "path\tcaption\tlabel\nclips/a.wav\ta bell, loud\tbell\nclips/b.wav\train\t\n",
    "set.jsonl": '{"path": "clips/a.wav", "caption": "a bell, loud", "label": "bell"}\n'
    '\n{"caption": "rain", "path": "clips/b.wav"}\n',
}
SAME_ROWS["set.ndjson"] = SAME_ROWS["set.json"] = SAME_ROWS["set.jsonl"]


def test_columns_of_public_tables_are_read(tmp_path):
    for name in "ab":
        soundfile.write(tmp_path / f"{name}.wav", np.full(4 * RATE, {"a": 0.25, "b": 0.5}[name]), RATE)
    clotho = (
        "file_name,caption_1,caption_2,caption_3,caption_4,caption_5\na.wav,one,two,three,four,five\nb.wav,six,,,,\n"
    )
    sounds = opened(manifest(tmp_path / "clotho.csv", clotho))
    assert listed(sounds) == [["one", "two", "three", "four", "five"], ["six"]]
    assert sounds.load(1).mean() == pytest.approx(0.5, abs=1e-3)
    music = "file_name,ytid,start_s,end_s,caption\na.wav,x,1,2,a song\nb.wav,y,9,19,another\n"
    sounds = opened(manifest(tmp_path / "musiccaps.csv", music))
    assert listed(sounds) == [["a song"], ["another"]] and len(sounds.load(0)) == RATE // 2
    assert "4 s, and its clip begins at 9 s" in bad(sounds, 1)
    assert listed(opened(manifest(tmp_path / "text.csv", "file_name,text\na.wav,a bell\n"))) == [["a bell"]]


@pytest.mark.parametrize("name", SAME_ROWS)
def test_manifest_of_every_kind_says_the_same(tmp_path, name):
    first, second = write_sound(tmp_path / "clips/a.wav", seed=1), write_sound(tmp_path / "clips/b.wav", seed=2)
    sounds = opened(manifest(tmp_path / name, SAME_ROWS[name]))
    assert listed(sounds) == [["a bell, loud"], ["rain"]]
    assert [sounds.texts(i).label for i in range(2)] == ["bell", None]
    assert [sounds.describe(i) for i in range(2)] == [str(first), str(second)]
    expected = torch.from_numpy(soundfile.read(second, dtype="float32")[0])[2000:6000]
    assert torch.equal(sounds.load(1), expected)


def test_paths_are_relative_to_the_manifest_or_absolute(tmp_path, monkeypatch):
    elsewhere = write_sound(tmp_path / "elsewhere/b.wav")
    write_sound(tmp_path / "lists/a.wav")
    manifest(tmp_path / "lists/set.csv", f"path,caption\na.wav,one\n../elsewhere/b.wav,two\n{elsewhere},three\n")
    monkeypatch.chdir(tmp_path)
    sounds = opened("lists/set.csv")
    assert len({sounds.load(i).shape for i in range(3)}) == 1
    assert torch.equal(sounds.load(1), sounds.load(2))


@pytest.mark.parametrize(
    "written, captions",
    [
        ('{"captions": ["one", "two"]}', ["one", "two"]),
        ('{"captions": "one|two | three"}', ["one", "two", "three"]),
        ('{"captions": "[music] | [applause]"}', ["[music]", "[applause]"]),
        ('{"caption": "one", "captions": ["two", "one", " "]}', ["one", "two"]),
        ('{"caption": "half a \\ud83d sign"}', ["half a ? sign"]),
    ],
)
def test_several_captions_of_a_sound_are_told_apart(tmp_path, written, captions):
    path = manifest(tmp_path / "set.jsonl", json.dumps({"path": "a.wav"})[:-1] + ", " + written[1:])
    assert listed(opened(path)) == [captions]


def test_captions_in_tables(tmp_path):
    path = manifest(tmp_path / "set.csv", 'path,captions\na.wav,one|two\nb.wav,"[""three"", ""four, five""]"\n')
    assert listed(opened(path)) == [["one", "two"], ["three", "four, five"]]
    path.write_bytes("\ufeffpath, caption\r\na.wav,ünïcode\r\n\r\n".encode())  # a byte order mark, CRLF
    assert listed(opened(path)) == [["ünïcode"]]


def test_rows_may_be_parts_of_one_long_file(tmp_path):
    samples = np.arange(10 * RATE) / 2**20
    soundfile.write(tmp_path / "a.wav", samples, RATE, subtype="FLOAT")
    rows = "path,caption,start_seconds,end_seconds\na.wav,one,2,3\na.wav,two,8,\na.wav,all,,\na.wav,none,11,12\n"
    sounds = opened(manifest(tmp_path / "set.csv", rows))
    starts = [float(sounds.load(i)[0]) * 2**20 / RATE for i in range(3)]
    assert starts == [2.25, 8.75, 4.75]
    assert all(2 <= float(sounds.load(0, epoch, True)[0]) * 2**20 / RATE <= 2.5 for epoch in range(20))
    assert "lasts 10 s" in bad(sounds, 3)


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("a.csv", "file,caption\na.wav,one\n", "it has file, caption"), ("a.csv", "path,caption\n", "has no rows"),
        ("a.csv", "path,caption\na.wav,one\n,two\n", "line 3"),
        ("a.csv", "path,caption\na.wav,a bell, loud\n", "3 cells under 2 columns"),
        ("a.csv", 'path,caption\na.wav,"' + "x" * 200_000, "it is no table"),
        ("a.csv", "path,caption,start_seconds\na.wav,one,nan\n", "line 2: its start_seconds is 'nan'"),
        ("a.csv", "path,caption,start_seconds,end_seconds\na.wav,one,5,5\n", "line 2"),
        ("a.jsonl", '{"path": "a.wav", "caption": "one"}\n{"path": "b', "line 2"),
        ("a.jsonl", '{"path": "a\\u0000.wav", "caption": "one"}', "line 1"),
        ("a.jsonl", '{"path": "a.wav", "start_seconds": ' + "9" * 4000 + "}", f"start_seconds is {'9' * 40}"),
        ("a.jsonl", "[" * 100_000, "line 1"),
    ],
)  # fmt: skip
def test_manifest_that_cannot_be_understood_is_refused_with_its_line(tmp_path, name, content, expected):
    path = manifest(tmp_path / name, content)
    text = one_line(opened, path)
    assert str(path) in text and expected in text


def test_folder_has_its_texts_beside_the_sounds(tmp_path):
    for name in ("a.wav", "deep/er/b.FLAC", "deep/c.ogg", "d.wav"):
        write_sound(tmp_path / name)
    (tmp_path / "a.txt").write_text("one\n\n  two \none\n")
    (tmp_path / "deep/er/b.json").write_text('{"caption": "three", "label": "bell"}')
    (tmp_path / "deep/c.json").write_text('{"text": ["four", "five"], "label": 7}')
    (tmp_path / "d.json").write_text('{"captions": ["six"]}')
    (tmp_path / "d.txt").write_text("a .json is read before this")
    (tmp_path / ".hidden.wav").write_text("")
    sounds = opened(tmp_path)
    assert [Path(sounds.describe(i)).relative_to(tmp_path).as_posix() for i in range(4)] == [
        "a.wav", "d.wav", "deep/c.ogg", "deep/er/b.FLAC",
    ]  # fmt: skip
    assert listed(sounds) == [["one", "two"], ["six"], ["four", "five"], ["three"]]
    assert [sounds.texts(i).label for i in range(4)] == [None, None, "7", "bell"]
    assert all(sounds.load(i).shape == (RATE // 2,) for i in range(4))


def test_sound_without_a_caption_is_bad_and_the_others_are_not(tmp_path):
    jsons = ["no json", "[]", '{"caption": 5}', "{}", '{"caption": " "}']
    for i in range(8):
        write_sound(tmp_path / f"{i}.wav")
    for i, content in enumerate(jsons):
        (tmp_path / f"{i}.json").write_text(content)
    (tmp_path / "5.txt").write_text("one")
    (tmp_path / "6.txt").write_text("\n")
    sounds = opened(tmp_path)
    assert all("caption" in bad(sounds, i) for i in range(5))
    assert sounds.texts(5).captions == ["one"]
    assert "caption" in bad(sounds, 6)
    assert ".txt" in bad(sounds, 7) and ".json" in bad(sounds, 7)
