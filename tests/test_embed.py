"""embed.py: embeddings are the model's, search finds them. What both scripts do is in
test_filled_folders.py."""

# ruff: noqa: F811  (fixtures are imported)
from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import filling
import numpy as np
import pytest
import safetensors.numpy
import soundfile
import torch
from filling import CLIP, EMBED, RATE, SOUNDS, mulan
from filling_fixtures import model, on_one_cpu, source, whole  # noqa: F401
from torch.nn import functional as F

import embed
from tandem.data.tokenizers import open_tokenizer
from tests.scripts import lines


@pytest.fixture(scope="module")
def script() -> filling.Script:
    return EMBED


def answers(capsys: pytest.CaptureFixture[str], model: Path, index: Path, *queries: str, more: Any = ()) -> list[Any]:
    capsys.readouterr()
    said = [word for query in queries for word in ("--query", query)]
    embed.main(["--model", str(model), "--index", str(index), *said, "--json", *map(str, more)])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


# Embedding.


@pytest.mark.parametrize("max_clips", [6, 1])
def test_embeddings_are_those_of_the_model_on_evenly_spread_clips(max_clips, model, source, tmp_path):
    found = EMBED.rows(EMBED.fill(model, source, tmp_path, "--max_clips", max_clips))
    assert list(found) == list(SOUNDS)
    for name, seconds in SOUNDS.items():
        samples, _ = soundfile.read(source / name, dtype="float32")
        spare, count = len(samples) - CLIP, min(max_clips, int(np.ceil(len(samples) / CLIP)))
        if seconds <= CLIP / RATE:
            clips = [np.resize(samples, CLIP)]
        elif count == 1:
            clips = [samples[spare // 2 :][:CLIP]]  # the middle
        else:
            clips = [samples[i * spare // (count - 1) :][:CLIP] for i in range(count)]
        with torch.no_grad():
            of_clips = mulan().encode_audio(torch.from_numpy(np.stack(clips)))
        np.testing.assert_allclose(found[name], F.normalize(of_clips.mean(0), dim=0), atol=1e-5)
        assert found[name].dtype == np.float32 and np.linalg.norm(found[name]) == pytest.approx(1, abs=1e-6)


def test_a_manifest_and_the_demonstration_are_embedded_like_files(whole, model, source, tmp_path, capsys):
    (tmp_path / "broken.wav").touch()
    rows = f"{source}/long.wav,,\n{source}/a.wav,,\n{source}/long.wav,1,2.5\nbroken.wav,7,\n"
    (tmp_path / "set.csv").write_text(f"path,start_s,end_s\n{rows}")
    index = EMBED.fill(model, tmp_path / "set.csv", tmp_path / "index")
    part, broken = {"start_seconds": 1, "end_seconds": 2.5}, str(tmp_path / "broken.wav")
    assert [{key: line[key] for key in ("path", *part) if key in line} for line in lines(index / "index.jsonl")] == [
        {"path": f"{source}/long.wav"}, {"path": f"{source}/a.wav"}, {"path": f"{source}/long.wav", **part}
    ]  # fmt: skip
    assert f"cannot read {broken} from 7 s: " in capsys.readouterr().out
    assert [bad | {"reason": ""} for bad in EMBED.bad(index)] == [{"path": broken, "start_seconds": 7, "reason": ""}]
    (answer,) = answers(capsys, model, index, "a dog")
    assert sum(part.items() <= match.items() for match in answer["matches"]) == 1
    embed.main(["--model", str(model), "--index", str(index), "--query", "a dog"])
    assert capsys.readouterr().out.count("/long.wav from 1 s to 2.5 s\n") == 1
    (tmp_path / "part").mkdir()
    samples, rate = soundfile.read(source / "long.wav", dtype="float32")
    soundfile.write(tmp_path / "part" / "p.wav", samples[rate : round(2.5 * rate)], rate, subtype="FLOAT")
    of_part = EMBED.rows(EMBED.fill(model, tmp_path / "part", tmp_path / "of part"))["p.wav"]
    vectors = safetensors.numpy.load_file(index / "embeddings-00000.safetensors")["embeddings"]
    of_files = EMBED.rows(whole)
    expected = [of_files["long.wav"], of_files["a.wav"], of_part]
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    mulan(sample_rate=8000).save_pretrained(tmp_path / "8k")
    assert len(EMBED.rows(EMBED.fill(tmp_path / "8k", "demo:tones:5", tmp_path / "demo"))) == 5


# Search.


def test_matches_are_the_rows_in_the_order_of_their_cosines(whole, model, capsys):
    found = EMBED.rows(whole)
    tokenizer = open_tokenizer("clip", 16)
    for text, answer in zip(("a dog", "two cats"), answers(capsys, model, whole, "a dog", "two cats"), strict=True):
        tokens, lengths = tokenizer.encode([text])
        with torch.no_grad():
            query = mulan().encode_text(tokens, torch.tensor(lengths))[0].numpy()
        cosines = {name: float(embedding @ query) for name, embedding in found.items()}
        assert answer["query"] == text
        assert [match["path"] for match in answer["matches"]] == sorted(cosines, key=lambda name: -cosines[name])
        assert [match["rank"] for match in answer["matches"]] == list(range(1, 10))
        for match in answer["matches"]:
            assert match["cosine"] == pytest.approx(cosines[match["path"]], abs=1e-5)


def test_queries_of_a_file_are_its_lines_without_marks_of_editors(whole, model, tmp_path, capsys):
    (tmp_path / "queries.txt").write_bytes("\ufeffa dog\r\n\r\n\ufefftwo\u2028cats\r\n".encode())
    found = answers(capsys, model, whole, "\ufeffa cat", more=["--query_file", tmp_path / "queries.txt"])
    assert [answer["query"] for answer in found] == ["a cat", "a dog", "two\u2028cats"]


def test_a_sound_that_is_in_the_index_finds_itself(whole, model, source, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(source))
    for name, folder in (("long.wav", source), ("b.flac", "~")):  # of several clips; shorter than one
        (answer,) = answers(capsys, model, whole, f"{folder}/{name}", more=["--top_k", 2])
        assert [match["rank"] for match in answer["matches"]] == [1, 2]
        assert answer["matches"][0]["path"] == name
        assert answer["matches"][0]["cosine"] == pytest.approx(1, abs=3e-7)


def test_captions_stand_beside_the_paths_where_there_are_some(model, source, tmp_path, capsys):
    folder = shutil.copytree(source, tmp_path / "sounds")
    (folder / "a.txt").write_text("a first tone\nanother caption\n")
    (folder / "b.json").write_text('{"caption": "a second tone"}')
    (folder / "quiet.json").write_text("no JSON")
    captions = {"a.wav": "a first tone", "b.flac": "a second tone"}
    index = EMBED.fill(model, folder, tmp_path / "index")
    said = lines(index / "index.jsonl")
    assert {line["path"]: line["captions"][0] for line in said if "captions" in line} == captions
    (answer,) = answers(capsys, model, index, "a dog")
    assert {match["path"]: match["caption"] for match in answer["matches"] if "caption" in match} == captions
    embed.main(["--model", str(model), "--index", str(index), "--query", "a dog"])
    table = capsys.readouterr().out.splitlines()
    assert table[1].split() == ["rank", "cosine", "path", "caption"]
    assert any(line.endswith("  a.wav   a first tone") for line in table) and "another" not in "".join(table)
    (tmp_path / "set.csv").write_text(f"path,caption\n{source}/a.wav,of the manifest\n")
    (line,) = lines(EMBED.fill(model, tmp_path / "set.csv", tmp_path / "of manifest") / "index.jsonl")
    assert line["captions"] == ["of the manifest"]


BERT = {
    "model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "layer_norm_eps": 1e-6, "vocab_size": 8, "max_position_embeddings": 16, "type_vocab_size": 2, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("shape", [{"vocab_size": 3}, {"text_tower": BERT}], ids=lambda shape: "".join(shape))
def test_the_tokenizer_beside_the_model_is_used(shape, source, tmp_path, capsys):
    """A pretrained tower may know more tokens: many are made larger than their tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    own = Tokenizer(models.WordLevel({"a": 0, "dog": 1, "[UNK]": 2}, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    mulan(**shape).save_pretrained(tmp_path / "model")
    index = EMBED.fill(tmp_path / "model", source, tmp_path / "index")
    said = EMBED.refused(capsys, "--model", tmp_path / "model", "--index", index, "--query", "a dog")
    assert f"model takes {3 if 'vocab_size' in shape else 8} tokens" in said and "tokenizer.json" in said
    own.save(str(tmp_path / "model" / "tokenizer.json"))
    (answer,) = answers(capsys, tmp_path / "model", index, "a dog", more=["--top_k", 1])
    with torch.no_grad():
        query = mulan(**shape).encode_text(torch.tensor([[0, 1]]), torch.tensor([2]))[0].numpy()
    assert answer["matches"][0]["cosine"] == pytest.approx(max(e @ query for e in EMBED.rows(index).values()), abs=1e-5)
