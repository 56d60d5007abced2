"""embed.py from the command line to the files it leaves; a tiny model, one process."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from safetensors.numpy import load_file, save_file
from torch.nn import functional as F

import data
import embed
import training.files
from data.sounds.decoding import ClipDecoder
from data.sounds.long_sounds import clip_starts, read_clips
from data.stores.resumable import sha256_of
from data.stores.search import TopRows
from models import VQGAN, MuLaN, ResidualQuantizer

RATE, CLIP = 4000, 2000  # half a second
NAMES = [
    "a.wav",
    "b.flac",
    "dogs/1.ogg",
    "dogs/2.wav",
    "dogs/old/3.aiff",
    "long.wav",
    "quiet.au",
    "z/long.wav",
    "z/y.wav",
]
SECONDS = [0.5, 0.3, 0.5, 0.8, 0.5, 5.0, 0.5, 1.9, 0.5]
write_atomically = training.files.write_atomically


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the code under test catches it."""


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device whose numbers the tests know."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here survives a power cut anyway."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tones that glide from one pitch to another in noise, so that every part of each is its own."""
    folder = tmp_path_factory.mktemp("sounds")
    for seed, (name, seconds) in enumerate(zip(NAMES, SECONDS, strict=True)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(folder / name, waveform(seed, seconds), RATE)
    (folder / "notes.txt").write_text("no sound")
    return folder


def waveform(seed: int, seconds: float) -> np.ndarray:
    times = np.arange(round(seconds * RATE)) / RATE
    noise = np.random.default_rng(seed).uniform(-0.2, 0.2, len(times))
    return (0.5 * np.sin(2 * np.pi * (100 + 150 * seed + 300 * times) * times) + noise).astype(np.float32)


def mulan(seed: int = 0, **options: Any) -> MuLaN:
    sizes = {"audio_dim": 16, "audio_depth": 1, "text_dim": 16, "text_depth": 1, "heads": 2, "dim_head": 8}
    hearing = {"sample_rate": RATE, "clip_seconds": CLIP / RATE, "n_fft": 128, "hop_length": 64, "n_mels": 16}
    torch.manual_seed(seed)
    return MuLaN(**{**sizes, **hearing, "patch_size": 8, "max_text_tokens": 16, "dim_latent": 8, **options}).eval()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    mulan().save_pretrained(folder)
    return folder


def flags(model: Path, sounds: Path | str, output: Path, *more: str) -> list[str]:
    said = ["--model", model, "--audio", sounds, "--output", output]
    return [*map(str, said), "--files_per_shard", "4", "--batch_size", "3", "--num_workers", "0", *more]


def make_index(model: Path, sounds: Path | str, output: Path, *more: str) -> Path:
    embed.main(flags(model, sounds, output, *more))
    return output


@pytest.fixture(scope="module")
def whole(model: Path, sounds: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index, for tests that only read it or copy it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        return make_index(model, sounds, tmp_path_factory.mktemp("whole"))


def refused(capsys: pytest.CaptureFixture[str], *argv: Any) -> str:
    """The one line of an error, which ends the process with code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as raised:
        embed.main([str(word) for word in argv])
    assert raised.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("embed.py: error: ")
    return line


def answers(capsys: pytest.CaptureFixture[str], model: Path, index: Path, *queries: str, more: Any = ()) -> list[Any]:
    capsys.readouterr()
    said = [word for query in queries for word in ("--query", query)]
    embed.main(["--model", str(model), "--index", str(index), *said, "--json", *map(str, more)])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def files(folder: Path) -> dict[str, bytes]:
    """All but the lock, which names the process."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def stamps(folder: Path, pattern: str) -> dict[str, tuple[int, int]]:
    """What tells a file from one that was written again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob(pattern)}


def content(folder: Path) -> Any:
    return json.loads((folder / "index.json").read_text())


def lines(folder: Path, file: str = "index.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def all_embeddings(folder: Path) -> dict[str, np.ndarray]:
    """Embeddings by path, read as data/embeddings.py says it."""
    shards = [load_file(path)["embeddings"] for path in sorted(folder.glob("embeddings-*.safetensors"))]
    return {line["path"]: shards[line["shard"]][line["row"]] for line in lines(folder)}


def broken_copy(sounds: Path, folder: Path, *names: str) -> Path:
    shutil.copytree(sounds, folder)
    for name in names:
        (folder / name).write_bytes(b"no sound")
    return folder


# Embedding.


def test_embeddings_are_those_of_the_model_on_evenly_spread_clips(whole: Path, sounds: Path) -> None:
    found = all_embeddings(whole)
    assert list(found) == NAMES
    for name, seconds in zip(NAMES, SECONDS, strict=True):
        samples, _ = soundfile.read(sounds / name, dtype="float32")
        if seconds <= CLIP / RATE:
            clips = [np.resize(samples, CLIP)]
        else:
            count = min(6, int(np.ceil(len(samples) / CLIP)))
            clips = [samples[i * (len(samples) - CLIP) // (count - 1) :][:CLIP] for i in range(count)]
        with torch.no_grad():
            of_clips = mulan().encode_audio(torch.from_numpy(np.stack(clips)))
        np.testing.assert_allclose(found[name], F.normalize(of_clips.mean(0), dim=0), atol=1e-5)
        assert found[name].dtype == np.float32 and np.linalg.norm(found[name]) == pytest.approx(1, abs=1e-6)


def test_one_clip_is_the_middle_of_a_file(model: Path, sounds: Path, tmp_path: Path) -> None:
    found = all_embeddings(make_index(model, sounds, tmp_path / "index", "--max_clips", "1"))
    samples, _ = soundfile.read(sounds / "long.wav", dtype="float32")
    with torch.no_grad():
        expected = mulan().encode_audio(torch.from_numpy(samples[9000:11000])[None])[0]
    np.testing.assert_allclose(found["long.wav"], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("frames", "max_clips", "starts"),
    [
        (50, 6, [0]), (100, 6, [0]), (101, 6, [0, 1]), (200, 6, [0, 100]), (250, 6, [0, 75, 150]), (101, 1, [0]),
        (301, 1, [100]), (10_100, 6, [0, 2000, 4000, 6000, 8000, 10_000]), (1_000, 3, [0, 450, 900]),
    ],
)  # fmt: skip
def test_clips_hear_all_of_a_sound_or_are_spread_evenly(frames: int, max_clips: int, starts: list[int]) -> None:
    assert clip_starts(frames, 100, max_clips) == starts


def test_clips_of_another_sample_rate_are_whole_and_stand_where_they_should(tmp_path: Path) -> None:
    times = np.arange(44100 * 3) / 44100
    soundfile.write(tmp_path / "x.wav", np.sin(2 * np.pi * 440 * times) * times / 3, 44100)
    clips = read_clips(str(tmp_path / "x.wav"), ClipDecoder(16000, 16000), 6)
    assert clips.shape == (3, 16000)
    expected = np.sin(2 * np.pi * 440 * np.arange(48000) / 16000) * np.arange(48000) / 48000
    for clip, start in zip(clips, (0, 16000, 32000), strict=True):
        inner = slice(100, -100)
        np.testing.assert_allclose(clip[inner], expected[start:][:16000][inner], atol=2e-3)


def test_no_more_of_a_long_file_is_read_than_its_clips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soundfile.write(tmp_path / "x.wav", np.zeros(RATE * 600), RATE)
    read, frames = soundfile.SoundFile.read, []
    monkeypatch.setattr(
        soundfile.SoundFile, "read", lambda self, n, **more: (frames.append(n), read(self, n, **more))[1]
    )
    assert read_clips(str(tmp_path / "x.wav"), ClipDecoder(RATE, CLIP), 6).shape == (6, CLIP)
    assert sum(frames) == 6 * CLIP


def test_shards_and_index_say_the_same(whole: Path, model: Path) -> None:
    said = content(whole)
    assert [shard["rows"] for shard in said["shards"]] == [4, 4, 1]
    assert [shard["sha256"] for shard in said["shards"]] == [sha256_of([whole / s["file"]]) for s in said["shards"]]
    assert (said["rows"], said["files"], said["bad"]) == (9, 9, 0) and lines(whole, "bad.jsonl") == []
    assert [(line["shard"], line["row"]) for line in lines(whole)] == [(i // 4, i % 4) for i in range(9)]
    assert said["weights_sha256"] == sha256_of([model / "model.safetensors"])
    assert (said["config"]["clip_seconds"], said["max_clips"], said["dim"]) == (0.5, 6, 8)


def test_loader_workers_change_nothing(whole: Path, model: Path, sounds: Path, tmp_path: Path) -> None:
    assert files(make_index(model, sounds, tmp_path / "index", "--num_workers", "2")) == files(whole)


def test_every_forward_has_one_shape(
    model: Path, sounds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are chosen by shape: with another one the last bit may differ."""
    shapes, encode = [], MuLaN.encode_audio
    monkeypatch.setattr(MuLaN, "encode_audio", lambda self, x: (shapes.append(tuple(x.shape)), encode(self, x))[1])
    make_index(model, sounds, tmp_path / "index")
    assert set(shapes) == {(3, CLIP)} and len(shapes) == 5 // 3 + 1 + (1 + 6 + 1 + 4 + 2) // 3 + 1


def test_a_manifest_and_the_demonstration_are_embedded_by_their_middles(
    model: Path, sounds: Path, tmp_path: Path
) -> None:
    (tmp_path / "set.csv").write_text(f"path,caption\n{sounds}/long.wav,a long sound\n{sounds}/a.wav,a short one\n")
    found = all_embeddings(make_index(model, tmp_path / "set.csv", tmp_path / "index"))
    middles = all_embeddings(make_index(model, sounds, tmp_path / "middles", "--max_clips", "1"))
    assert list(found) == [f"{sounds}/long.wav", f"{sounds}/a.wav"]
    for path, embedding in found.items():
        np.testing.assert_allclose(embedding, middles[os.path.relpath(path, sounds)], atol=1e-6)
    mulan(sample_rate=8000).save_pretrained(tmp_path / "8k")
    assert len(all_embeddings(make_index(tmp_path / "8k", "demo:tones:5", tmp_path / "demo"))) == 5


def test_bf16_computes_in_bf16(whole: Path, model: Path, sounds: Path, tmp_path: Path) -> None:
    found = all_embeddings(make_index(model, sounds, tmp_path / "index", "--precision", "bf16"))
    exact = all_embeddings(whole)
    differences = [np.abs(found[name] - exact[name]).max() for name in NAMES]
    assert 1e-5 < max(differences) < 0.1


# Files that cannot be read.


def test_a_bad_file_is_left_out_and_named_and_changes_no_other_embedding(
    whole: Path, model: Path, sounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = make_index(model, broken_copy(sounds, tmp_path / "sounds", "b.flac"), tmp_path / "index")
    assert capsys.readouterr().out.count("b.flac") == 1
    found, exact = all_embeddings(index), all_embeddings(whole)
    assert list(found) == [name for name in NAMES if name != "b.flac"]
    for name, embedding in found.items():
        np.testing.assert_array_equal(embedding, exact[name])
    (bad,) = lines(index, "bad.jsonl")
    assert bad["path"] == "b.flac" and bad["reason"]
    assert [shard["rows"] for shard in content(index)["shards"]] == [3, 4, 1]


def test_a_shard_without_a_readable_sound_is_empty(
    model: Path, sounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = make_index(model, broken_copy(sounds, tmp_path / "sounds", NAMES[-1]), tmp_path / "index")
    assert load_file(index / "embeddings-00002.safetensors")["embeddings"].shape == (0, 8)
    (answer,) = answers(capsys, model, index, "a dog")
    assert len(answer["matches"]) == 8


def test_a_name_that_is_no_text_is_embedded_found_and_shown(
    model: Path, sounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sounds").mkdir()
    shutil.copy(sounds / "long.wav", os.fsencode(tmp_path / "sounds") + b"/\xff.wav")
    index = make_index(model, tmp_path / "sounds", tmp_path / "index")
    embed.main(["--model", str(model), "--index", str(index), "--query", "x"])
    assert r"\udcff.wav" in capsys.readouterr().out


def test_on_bad_sample_error_stops(
    model: Path, sounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = broken_copy(sounds, tmp_path / "sounds", "quiet.au")
    for _ in range(2):
        said = refused(capsys, *flags(model, broken, tmp_path / "index", "--on_bad_sample", "error"))
        assert "quiet.au" in said
    make_index(model, broken, tmp_path / "index", "--on_bad_sample", "skip")  # goes on where that one stopped
    assert len(lines(tmp_path / "index")) == 8


def test_too_many_bad_files_stop(model: Path, sounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = broken_copy(sounds, tmp_path / "sounds", "a.wav", "quiet.au")
    assert "2 of 9 samples could not be read" in refused(capsys, *flags(model, broken, tmp_path / "index"))
    assert not (tmp_path / "index" / "index.json").exists()


def test_embeddings_that_are_not_finite_stop(sounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoilt = mulan()
    for weight in spoilt.audio_latents.parameters():
        torch.nn.init.constant_(weight, torch.nan)
    spoilt.save_pretrained(tmp_path / "model")
    assert "not finite" in refused(capsys, *flags(tmp_path / "model", sounds, tmp_path / "index"))


# Going on.


def test_killed_at_any_write_and_started_again_gives_the_same_files(
    whole: Path, model: Path, sounds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_writes = 1 + 2 * 3 + 3  # settings; three shards with their records; three index files
    for fatal in range(n_writes):
        folder, written = tmp_path / str(fatal), []

        def write_or_die(path: Path, content: bytes, fatal: int = fatal, written: list[Path] = written) -> None:
            if len(written) == fatal:
                path.with_name(f".{path.name}.tmp").write_bytes(content[: len(content) // 2])
                raise Killed
            written.append(path)
            write_atomically(path, content)

        monkeypatch.setattr(training.files, "write_atomically", write_or_die)
        with pytest.raises(Killed):
            make_index(model, sounds, folder)
        monkeypatch.setattr(training.files, "write_atomically", write_atomically)
        before = stamps(folder, "*.safetensors")
        finished = {path.with_suffix(".safetensors").name for path in folder.glob("embeddings-*.json")}
        assert len(finished) == min(3, max(0, fatal - 1) // 2)
        make_index(model, sounds, folder)
        after = stamps(folder, "*.safetensors")
        assert {name for name in before if before[name] == after[name]} == finished
        assert files(folder) == files(whole)


@pytest.mark.parametrize("damage", ["shard", "record", "missing shard"])
def test_a_damaged_shard_is_computed_again(damage: str, whole: Path, model: Path, sounds: Path, tmp_path: Path) -> None:
    index = shutil.copytree(whole, tmp_path / "index")
    shard, record = index / "embeddings-00001.safetensors", index / "embeddings-00001.json"
    if damage == "shard":
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    elif damage == "record":
        record.write_text('{"rows": 4')
    else:
        shard.unlink()
    make_index(model, sounds, index)
    assert files(index) == files(whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_shard_under_way_and_exits_with_75(
    number: signal.Signals, whole: Path, model: Path, sounds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_and_signal(path: Path, content: bytes) -> None:
        if path.name == "embeddings-00000.safetensors":
            os.kill(os.getpid(), number)
        write_atomically(path, content)

    monkeypatch.setattr(training.files, "write_atomically", write_and_signal)
    with pytest.raises(SystemExit) as raised:
        make_index(model, sounds, tmp_path, "--query", "not yet")
    assert raised.value.code == 75
    assert sorted(files(tmp_path)) == ["embeddings-00000.json", "embeddings-00000.safetensors", "settings.json"]
    assert files(make_index(model, sounds, tmp_path)) == files(whole)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--max_clips", "2"], "max_clips was 6 and is now 2"),
        (["--files_per_shard", "5"], "files_per_shard was 4 and is now 5"),
        (["--batch_size", "4"], "batch_size was 3 and is now 4"),
        (["--precision", "bf16"], 'precision was "fp32" and is now "bf16"'),
    ],
)
def test_other_flags_are_refused_by_name(
    more: list[str], named: str, whole: Path, model: Path, sounds: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(whole)
    assert named in refused(capsys, *flags(model, sounds, whole, *more))
    assert files(whole) == before


def test_fresh_moves_the_old_index_aside(
    whole: Path, model: Path, sounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = shutil.copytree(whole, tmp_path / "index")
    make_index(model, sounds, index, "--fresh", "--files_per_shard", "5")
    assert files(tmp_path / "index.old-1") == files(whole) and len(content(index)["shards"]) == 2
    assert "index.old-1" in capsys.readouterr().out


# Search.


def test_matches_are_the_rows_in_the_order_of_their_cosines(
    whole: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = all_embeddings(whole)
    tokenizer = data.open_tokenizer("clip", 16)
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


def test_a_sound_that_is_in_the_index_finds_itself(
    whole: Path, model: Path, sounds: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("long.wav", "b.flac"):  # of several clips; shorter than one
        (answer,) = answers(capsys, model, whole, str(sounds / name), more=["--top_k", 2])
        assert [match["rank"] for match in answer["matches"]] == [1, 2]
        assert answer["matches"][0]["path"] == name
        assert answer["matches"][0]["cosine"] == pytest.approx(1, abs=3e-7)


def test_equal_cosines_come_in_the_order_of_the_rows(
    model: Path, sounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copies of one sound, in several shards and on several rows of them."""
    names = [f"{i:02d}.wav" for i in range(11)]
    (tmp_path / "sounds").mkdir()
    for name in names:
        shutil.copy(sounds / "long.wav", tmp_path / "sounds" / name)
    index = make_index(model, tmp_path / "sounds", tmp_path / "index")
    (answer,) = answers(capsys, model, index, "a dog", more=["--top_k", 7])
    assert len({match["cosine"] for match in answer["matches"]}) == 1
    assert [match["path"] for match in answer["matches"]] == names[:7]


def test_the_best_rows_do_not_depend_on_how_they_are_added() -> None:
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((500, 16)).astype(np.float32)
    rows[300:400] = rows[:100]  # ties
    queries = generator.standard_normal((3, 16)).astype(np.float32)
    exact = (rows.astype(np.float64) @ queries.T.astype(np.float64)).astype(np.float32)
    expected = np.stack([np.lexsort((np.arange(500), -column))[:40] for column in exact.T])
    for parts in ([500], [1, 250, 249], [7] * 70 + [10]):
        top = TopRows(queries, 40)
        for part in np.split(rows, np.cumsum(parts)[:-1]):
            top.add(part)
        np.testing.assert_array_equal(top.rows, expected)
        np.testing.assert_array_equal(top.cosines, np.take_along_axis(exact.T, expected, axis=1))


def test_a_query_does_not_depend_on_the_others(
    whole: Path, model: Path, sounds: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queries = ["a dog", str(sounds / "a.wav"), "a much longer sentence about several cats"]
    together = answers(capsys, model, whole, *queries)
    assert together == [answers(capsys, model, whole, query)[0] for query in queries]


def test_queries_come_from_a_file_too_and_a_table_is_shown(
    whole: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "queries").write_text("two cats\n\n a horse \n")
    said = ["--query", "a dog", "--query_file", str(tmp_path / "queries"), "--top_k", "2"]
    embed.main(["--model", str(model), "--index", str(whole), *said])
    tables = capsys.readouterr().out.split("\n\n")
    assert [table.splitlines()[0] for table in tables if table.strip()] == ["a dog", "two cats", "a horse"]
    assert tables[0].splitlines()[1].split() == ["rank", "cosine", "path"] and len(tables[0].splitlines()) == 4


def test_an_index_is_made_and_searched_by_one_command(
    model: Path, sounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_index(model, sounds, tmp_path, "--query", "a dog", "--json")
    (line,) = capsys.readouterr().out.splitlines()  # what it says beside is on stderr
    assert len(json.loads(line)["matches"]) == 9


def test_the_tokenizer_beside_the_model_is_used_and_else_that_of_clip(
    whole: Path, model: Path, sounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    assert embed.tokenizer_of(model) == "clip"
    own = Tokenizer(models.WordLevel({"a": 0, "dog": 1, "[UNK]": 2}, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    mulan(vocab_size=3).save_pretrained(tmp_path / "model")
    index = make_index(tmp_path / "model", sounds, tmp_path / "index")
    said = refused(capsys, "--model", tmp_path / "model", "--index", index, "--query", "a dog")
    assert "trained on 3 tokens" in said and "tokenizer.json" in said
    own.save(str(tmp_path / "model" / "tokenizer.json"))
    (answer,) = answers(capsys, tmp_path / "model", index, "a dog", more=["--top_k", 1])
    with torch.no_grad():
        query = mulan(vocab_size=3).encode_text(torch.tensor([[0, 1]]), torch.tensor([2]))[0].numpy()
    assert answer["matches"][0]["cosine"] == pytest.approx(
        max(e @ query for e in all_embeddings(index).values()), abs=1e-5
    )


# Codes.


def fitted(index: Path, folder: Path, *more: str) -> Path:
    sizes = ["--num_quantizers", "3", "--codebook_size", "4", "--quantizer_epochs", "3"]
    embed.main(["--index", str(index), "--fit_quantizer", str(folder), *sizes, *more])
    return folder


def test_a_quantizer_is_fitted_and_its_codes_are_written_beside_the_rows(
    whole: Path, model: Path, sounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = shutil.copytree(whole, tmp_path / "index")
    quantizer = ResidualQuantizer.from_pretrained(fitted(index, tmp_path / "quantizer"))
    embed.main(["--index", str(index), "--quantizer", str(tmp_path / "quantizer")])
    assert [shard["rows"] for shard in content(index / "codes")["shards"]] == [4, 4, 1]
    for number in range(3):
        codes = load_file(index / "codes" / f"codes-{number:05d}.safetensors")["codes"]
        rows = torch.from_numpy(load_file(index / f"embeddings-{number:05d}.safetensors")["embeddings"])
        assert codes.dtype == np.uint8 and np.array_equal(codes, quantizer.encode(rows).numpy())
    rows = torch.from_numpy(np.stack(list(all_embeddings(index).values())))
    assert F.mse_loss(quantizer.decode(quantizer.encode(rows)), rows) < 0.1 * rows.var(0).mean()
    (answer,) = answers(capsys, model, index, str(sounds / "a.wav"), more=["--quantizer", tmp_path / "quantizer"])
    assert answer["codes"] == load_file(index / "codes" / "codes-00000.safetensors")["codes"][0].tolist()


def test_fitting_again_gives_the_same_bytes_and_another_index_is_refused(
    whole: Path, model: Path, sounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = fitted(whole, tmp_path / "one"), fitted(whole, tmp_path / "other")
    assert files(one) == files(other)
    before = stamps(one, "*")
    fitted(whole, one)
    assert stamps(one, "*.safetensors") == {name: s for name, s in before.items() if name.endswith(".safetensors")}
    index = make_index(model, sounds, tmp_path / "index", "--max_clips", "1")
    said = refused(capsys, "--index", index, "--fit_quantizer", one, "--num_quantizers", "3")
    assert "index_sha256 was" in said and files(one) == files(other)


def test_a_quantizer_is_never_written_over_a_model(
    whole: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = shutil.copytree(model, tmp_path / "model")
    assert "settings.json" in refused(capsys, "--index", whole, "--fit_quantizer", copied)
    assert files(copied) == files(model)


def test_killed_while_codes_are_written_and_started_again_gives_the_same_files(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantizer = fitted(whole, tmp_path / "quantizer")
    folders = [shutil.copytree(whole, tmp_path / name) for name in ("straight", "killed")]
    embed.main(["--index", str(folders[0]), "--quantizer", str(quantizer)])

    def write_or_die(path: Path, content: bytes) -> None:
        if path.name == "codes-00001.json":
            raise Killed
        write_atomically(path, content)

    monkeypatch.setattr(training.files, "write_atomically", write_or_die)
    with pytest.raises(Killed):
        embed.main(["--index", str(folders[1]), "--quantizer", str(quantizer)])
    monkeypatch.setattr(training.files, "write_atomically", write_atomically)
    embed.main(["--index", str(folders[1]), "--quantizer", str(quantizer)])
    assert files(folders[1]) == files(folders[0])


# Mistakes.


def another_model(tmp: Path, seed: int = 1, **options: Any) -> Path:
    mulan(seed, **options).save_pretrained(tmp / "another")
    return tmp / "another"


def vqgan(tmp: Path) -> Path:
    VQGAN(image_size=16, dim=4, num_layers=2).save_pretrained(tmp / "vqgan")
    return tmp / "vqgan"


def folder(tmp: Path) -> Path:
    (tmp / "empty").mkdir()
    return tmp / "empty"


def text_file(tmp: Path, text: str = "") -> Path:
    (tmp / "file.wav").write_text(text)
    return tmp / "file.wav"


def of_four_channels(tmp: Path) -> Path:
    ResidualQuantizer(4, 2, 3).save_pretrained(tmp / "quantizer")
    return tmp / "quantizer"


EMBED = ("--model", "--audio", "--output")
QUERY = ("--model", "--index", "--query")
MISTAKES: dict[str, tuple[tuple[str, ...], Callable[[Path], dict[str, Any]], str]] = {
    "no model": (EMBED, lambda tmp: {"--model": tmp / "nowhere"}, "nowhere"),
    "another class of model": (EMBED, lambda tmp: {"--model": vqgan(tmp)}, "holds a VQGAN, not a MuLaN"),
    "no folder": (EMBED, lambda tmp: {"--audio": tmp / "nowhere"}, "nowhere"),
    "an empty folder": (EMBED, lambda tmp: {"--audio": folder(tmp)}, "no sound in"),
    "output is a file": (EMBED, lambda tmp: {"--output": text_file(tmp)}, "cannot write the folder"),
    "audio without output": (("--model", "--audio"), lambda tmp: {}, "which index?"),
    "audio without model": (("--audio", "--output"), lambda tmp: {}, "need --model"),
    "output without audio": (QUERY, lambda tmp: {"--output": tmp}, "--output is for --audio"),
    "nothing": ((), lambda tmp: {}, "nothing to do"),
    "an index alone": (("--index",), lambda tmp: {}, "nothing to do"),
    "query without index": (("--model", "--query"), lambda tmp: {}, "which index?"),
    "query without model": (("--index", "--query"), lambda tmp: {}, "need --model"),
    "no index": (QUERY, lambda tmp: {"--index": tmp / "nowhere"}, "no such folder"),
    "a folder of something else": (QUERY, lambda tmp: {"--index": folder(tmp)}, "holds no index"),
    "index of another model": (QUERY, lambda tmp: {"--model": another_model(tmp)}, "not made by"),
    "same weights, other clips": (
        QUERY,
        lambda tmp: {"--model": another_model(tmp, 0, clip_seconds=1.0)},
        "not made by",
    ),
    "no such sound": (QUERY, lambda tmp: {"--query": "missing.wav"}, "no file 'missing.wav'"),
    "a sound that is none": (QUERY, lambda tmp: {"--query": text_file(tmp, "text")}, "cannot read"),
    "an empty query": (QUERY, lambda tmp: {"--query": " "}, "empty"),
    "no file of queries": (QUERY, lambda tmp: {"--query_file": tmp / "nowhere"}, "cannot read the queries"),
    "top_k without query": (EMBED, lambda tmp: {"--top_k": 3}, "--top_k is for --query"),
    "quantizer flags alone": (EMBED, lambda tmp: {"--codebook_size": 3}, "--codebook_size is for --fit_quantizer"),
    "no quantizer": (("--index",), lambda tmp: {"--quantizer": tmp / "nowhere"}, "nowhere"),
    "a quantizer of another width": (("--index",), lambda tmp: {"--quantizer": of_four_channels(tmp)}, "not (b, 4)"),
    "a codebook of one": (("--index",), lambda tmp: {"--fit_quantizer": tmp / "q", "--codebook_size": 1}, "at least 2"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gives_one_line(
    mistake: str, whole: Path, model: Path, sounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual, make, expected = MISTAKES[mistake]
    index = shutil.copytree(whole, tmp_path / "index")
    values = {"--model": model, "--audio": sounds, "--output": tmp_path / "out", "--index": index, "--query": "a dog"}
    said = {**{flag: values[flag] for flag in usual}, **make(tmp_path)}
    assert expected in refused(capsys, *(word for pair in said.items() for word in pair))
    assert not (tmp_path / "out").exists()


def with_index(folder: Path, **changes: Any) -> None:
    (folder / "index.json").write_text(json.dumps({**content(folder), **changes}))


def with_shard(folder: Path, rows: np.ndarray) -> None:
    """Other content of the first shard, with the checksum to it."""
    path = folder / "embeddings-00000.safetensors"
    save_file({"embeddings": rows}, path)
    first, *rest = content(folder)["shards"]
    with_index(folder, shards=[{**first, "sha256": sha256_of([path])}, *rest])


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "unfinished": (lambda index: (index / "index.json").unlink(), "not finished"),
    "half an index": (lambda index: (index / "index.json").write_text('{"shards": ['), "cannot read"),
    "another kind of index": (lambda index: with_index(index, task="encode"), "something else"),
    "other lines": (lambda index: (index / "index.jsonl").write_text(""), "checksum"),
    "a shard elsewhere": (lambda index: with_index(index, shards=[{"file": "../x", "rows": 9}]), "'../x'"),
    "a changed shard": (lambda index: (index / "embeddings-00000.safetensors").write_bytes(b""), "checksum"),
    "no shard": (lambda index: (index / "embeddings-00001.safetensors").unlink(), "No such file"),
    "another shape": (lambda index: with_shard(index, np.zeros((4, 9), np.float32)), "not float32 (4, 8)"),
    "another dtype": (lambda index: with_shard(index, np.zeros((4, 8), np.float64)), "float64"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_refused_in_one_line(
    damage: str, whole: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = shutil.copytree(whole, tmp_path / "index")
    change, expected = DAMAGES[damage]
    change(index)
    assert expected in refused(capsys, "--model", model, "--index", index, "--query", "a dog")


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(
    whole: Path,
    model: Path,
    sounds: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_space(path: Path, content: bytes) -> None:
        if path.name == "embeddings-00001.safetensors":
            raise OSError(28, "No space left on device")
        write_atomically(path, content)

    monkeypatch.setattr(training.files, "write_atomically", no_space)
    assert "No space left on device" in refused(capsys, *flags(model, sounds, tmp_path))
    monkeypatch.setattr(training.files, "write_atomically", write_atomically)
    assert files(make_index(model, sounds, tmp_path)) == files(whole)
