"""Sentences become the tokens that their vocabularies were published with."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import tokenizers
import torch

from tandem.data.tokenizers import open_tokenizer
from tests.data.helpers import one_line

START, END = 49406, 49407
# As OpenAI's CLIP gives them.
PUBLISHED = {
    "hello world!": [3306, 1002, 256],
    "a photo of a cat": [320, 1125, 539, 320, 2368],
    "A  Photo of\na CAT": [320, 1125, 539, 320, 2368],
}


def test_clip_tokens_are_those_of_clip():
    tokenizer = open_tokenizer("clip", 16)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.max_text_tokens) == ("clip", 49408, 16)
    tokens, lengths = tokenizer.encode(list(PUBLISHED))
    expected = [[START, *published, END] for published in PUBLISHED.values()]
    assert tokens.shape == (3, 16) and tokens.dtype == torch.int64
    assert lengths == [len(row) for row in expected]
    assert tokens.tolist() == [row + [0] * (16 - len(row)) for row in expected]


def test_longer_text_keeps_its_beginning_and_the_mark_of_the_end():
    (short, long), lengths = open_tokenizer("clip", 8).encode(["a photo of a cat", "a photo of a cat and a dog"])
    assert lengths == [7, 8]
    assert long.tolist() == [START, 320, 1125, 539, 320, 2368, 537, END]
    assert short.tolist() == [START, 320, 1125, 539, 320, 2368, END, 0]


def test_without_marks_clip_is_the_tokenizer_of_x_clip() -> None:
    """musiclm-pytorch's texts; a pickle of it, which a loader's process gets, makes none either."""
    for tokenizer in (plain := open_tokenizer("clip", 4, add_special_tokens=False), pickle.loads(pickle.dumps(plain))):
        tokens, lengths = tokenizer.encode(["a photo of a cat", "hello world!"])
        assert tokens.tolist() == [[320, 1125, 539, 320], [3306, 1002, 256, 0]] and lengths == [4, 3]
    assert open_tokenizer("clip", 1, add_special_tokens=False).encode(["a cat"])[0].tolist() == [[320]]


def hugging_face(path: Path, words: dict[str, int], marks: bool = True) -> str:
    unknown = "[UNK]" if "[UNK]" in words else None
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=unknown))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if marks:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", words["[CLS]"]), ("[SEP]", words["[SEP]"])]
        )
    tokenizer.enable_padding(length=99)  # what the file says of lengths does not count
    tokenizer.enable_truncation(5)
    tokenizer.save(str(path))
    return str(path)


WORDS = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "bell": 4, "rings": 5, "loud": 6, "and": 7, "clear": 41}


def test_tokenizer_of_hugging_face_is_read_from_its_file(tmp_path):
    tokenizer = open_tokenizer(hugging_face(tmp_path / "tokenizer.json", WORDS), 8)
    tokens, lengths = tokenizer.encode(["a bell rings", "a bell rings loud and clear and loud", "a gong"])
    assert tokens.tolist() == [[1, 3, 4, 5, 2, 0, 0, 0], [1, 3, 4, 5, 6, 7, 41, 2], [1, 3, 0, 2, 0, 0, 0, 0]]
    assert lengths == [5, 8, 4]
    assert tokenizer.vocab_size == 42, "the largest token counts, not their number"
    assert tokenizer.name == str(tmp_path / "tokenizer.json")
    edited = tmp_path / "edited.json"
    edited.write_bytes(b"\xef\xbb\xbf" + (tmp_path / "tokenizer.json").read_bytes())
    assert open_tokenizer(str(edited), 8).state_dict()["sha256"] == tokenizer.state_dict()["sha256"]


def test_tokenizer_without_marks_has_none_and_refuses_what_it_cannot_read(tmp_path):
    tokenizer = open_tokenizer(hugging_face(tmp_path / "tokenizer.json", WORDS, marks=False), 3)
    tokens, lengths = tokenizer.encode(["a bell", "a bell rings loud"])
    assert tokens.tolist() == [[3, 4, 0], [3, 4, 5]] and lengths == [2, 3]
    assert "makes no token of the text ' '" in one_line(tokenizer.encode, ["bell", " "])
    words = {word: number for word, number in WORDS.items() if word != "[UNK]"}
    tokenizer = open_tokenizer(hugging_face(tmp_path / "words.json", words, marks=False), 8)
    assert "cannot read the text 'gong'" in one_line(tokenizer.encode, ["bell", "gong"])


@pytest.mark.parametrize("content", ["", "{}", "no json", '{"model": {"type": "none"}}'])
def test_what_is_no_tokenizer_is_named(tmp_path, content):
    assert "no tokenizer 'clpi': give clip" in one_line(open_tokenizer, "clpi", 8)
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    assert str(path) in one_line(open_tokenizer, str(path), 8)


def test_a_tokenizer_whose_start_token_is_missing_is_refused_although_its_package_panics(tmp_path):
    path = Path(hugging_face(tmp_path / "tokenizer.json", WORDS))
    content = json.loads(path.read_text())
    del content["post_processor"]["special_tokens"]["[CLS]"]
    path.write_text(json.dumps(content))
    assert "tokenizer.json': no entry found for key; it has to be" in one_line(open_tokenizer, str(path), 8)


def test_room_for_the_marks_alone_is_refused(tmp_path):
    for spec, room in (("clip", 1), ("clip", 2), (hugging_face(tmp_path / "t.json", WORDS), 2)):
        assert f"--max_text_tokens {room}" in one_line(open_tokenizer, spec, room)
