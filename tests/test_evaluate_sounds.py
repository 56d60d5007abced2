"""evaluate.py --audio_data: zero-shot classification against scikit-learn, for any number of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from filling import CLIP, RATE, mulan, saved, write_sound
from filling_fixtures import on_one_cpu  # noqa: F401
from forks import fork
from sklearn.metrics import average_precision_score
from torch.nn import functional as F

import evaluate
from tandem.data.decoding.sounds import ClipDecoder
from tandem.data.sets import open_classified_sounds
from tandem.data.tokenizers import open_tokenizer
from tests.data.helpers import write_tar

COUNT = 12  # classes
TEMPLATES = ["This is a sound of {}.", "one can hear {} here"]


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and sounds in the layout of ESC-50: two of each class, of half a second to three."""
    folder = tmp_path_factory.mktemp("inputs")
    saved(folder / "mulan", mulan())
    rows = []
    for number in range(2 * COUNT):
        name = f"{1 + number % 5}-{number}-A.wav"
        write_sound(folder / "audio" / name, number, 0.5 + number % 6 / 2)
        rows.append(f"{name},{1 + number % 5},{number // 2},crackling_thing {number // 2},x.ogg")
    (folder / "meta").mkdir()
    (folder / "meta" / "esc.csv").write_text("\n".join(["filename,fold,target,category,src_file", *rows]))
    return folder


def flags(at: Path, output: Path, *more: Any) -> list[str]:
    words = ["--model", at / "mulan", "--audio_data", at / "meta" / "esc.csv", "--audio_folder", at / "audio"]
    words += ["--zero_shot_templates", "|".join(TEMPLATES), "--output", output, "--batch_size", 4, "--num_workers", 0]
    return [*map(str, words), *map(str, more)]


def embedded(at: Path) -> tuple[np.ndarray, np.ndarray]:
    """The sounds and the classes by the model alone."""
    model, tokenizer, sounds, texts = mulan(), open_tokenizer("clip", 16), [], []
    for row in (at / "meta" / "esc.csv").read_text().splitlines()[1:]:
        samples, _ = soundfile.read(at / "audio" / row.split(",")[0], dtype="float32")
        spare, count = len(samples) - CLIP, min(6, int(np.ceil(len(samples) / CLIP)))
        starts = [i * spare // (count - 1) for i in range(count)] if count > 1 else [0]
        clips = np.stack([samples[start:][:CLIP] for start in starts])
        sounds.append(F.normalize(model.encode_audio(torch.from_numpy(clips)).mean(0), dim=0))
    for name in sorted({f"crackling thing {number}" for number in range(COUNT)}):
        tokens, lengths = tokenizer.encode([template.replace("{}", name) for template in TEMPLATES])
        texts.append(F.normalize(model.encode_text(tokens, torch.tensor(lengths)).mean(0), dim=0))
    return torch.stack(sounds).numpy(), torch.stack(texts).numpy()


@torch.no_grad()
def test_values_are_those_of_scikit_learn_over_all_sounds_and_for_each_fold(
    at: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate.main(flags(at, tmp_path / "values", "--per_fold"))
    report = json.loads((tmp_path / "values.json").read_text())
    found = report["models"][str(at / "mulan")]
    names = sorted(f"crackling thing {number}" for number in range(COUNT))
    assert (report["classes"], report["samples"], report["zero_shot_templates"]) == (names, 2 * COUNT, TEMPLATES)
    sounds, texts = embedded(at)
    scores, truth = sounds @ texts.T, np.array([names.index(f"crackling thing {n // 2}") for n in range(2 * COUNT)])
    ranks = (scores > scores[range(len(truth)), truth][:, None]).sum(1)
    assert 0 < (ranks < 5).mean() < 1

    def expected(rows: np.ndarray) -> dict[str, float]:
        precisions = [average_precision_score(truth[rows] == c, scores[rows, c]) for c in {*truth[rows]}]
        return {"top1": np.mean(ranks[rows] < 1), "top5": np.mean(ranks[rows] < 5), "map": np.mean(precisions)}

    assert {name: found[name] for name in ("top1", "top5", "map")} == pytest.approx(expected(np.arange(2 * COUNT)))
    assert found["folds"].keys() == {"1", "2", "3", "4", "5"}
    for fold, values in found["folds"].items():
        rows = np.array([number for number in range(2 * COUNT) if 1 + number % 5 == int(fold)])
        assert values == pytest.approx({"samples": len(rows), **expected(rows)})
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith(f"24 sounds of {at / 'meta' / 'esc.csv'} in 12 classes: This is a sound of {{}}. | one")
    assert said[2].split() == ["top-1", "top-5", "mAP"] and said[-1].startswith(f"{at / 'mulan'}, fold 5 ")


def test_several_processes_find_the_bits_of_one(at: Path, tmp_path: Path) -> None:
    outputs = [tmp_path / "one", tmp_path / "several"]
    for output, processes in zip(outputs, (1, 3), strict=True):
        finished = fork("evaluate", flags(at, output), tmp_path / "log", processes)
        assert [rank.returncode for rank in finished] == [0] * processes, finished[0].output
    one, several = (output.with_suffix(".json").read_bytes() for output in outputs)
    assert several == one


def test_of_sounds_with_several_classes_the_mean_average_precision_alone_is_reported(at: Path, tmp_path: Path) -> None:
    path = tmp_path / "several.csv"
    rows = [f"{at}/audio/{file.name},Dog_bark|Dog{number % 3}" for number, file in enumerate((at / "audio").iterdir())]
    path.write_text("\n".join(["path,labels", *rows, f"{at}/none.wav,Dog1"]))
    words = ["--model", at / "mulan", "--audio_data", path, "--output", tmp_path / "values", "--num_workers", 0]
    evaluate.main([*map(str, words)])
    report = json.loads((tmp_path / "values.json").read_text())
    assert report["classes"] == ["Dog bark", "Dog0", "Dog1", "Dog2"] and report["samples"] == 2 * COUNT
    (values,) = report["models"].values()
    assert values.keys() == {"map", "config", "weights_sha256"} and 0 < values["map"] < 1


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet", "folder", "tar"])
def test_classes_are_read_from_every_source(form: str, tmp_path: Path) -> None:
    write_sound(tmp_path / "s" / "a.wav", 0, 0.5)
    sound, names = (tmp_path / "s" / "a.wav").read_bytes(), ["dog bark", "cat"]
    path, data = tmp_path / f"set.{form}", {"file_name": "s/a.wav", "label": ["dog_bark", "cat", "cat"], "fold": 3}
    if form == "csv":
        path.write_text("path,label,fold\ns/a.wav,dog_bark|cat,3\n")
    elif form == "jsonl":
        path.write_text(json.dumps(data))
    elif form == "parquet":
        import pyarrow
        from pyarrow import parquet

        column = [{"bytes": sound, "path": "a.wav"}]
        parquet.write_table(pyarrow.table({"audio": column, "category": [["dog_bark", "cat"]], "fold": [3]}), path)
    elif form == "tar":
        write_tar(path, {"a": {"wav": sound, "json": json.dumps(data).encode()}})
    else:
        path = tmp_path / "s"
        (path / "a.json").write_text(json.dumps(data))
    samples = open_classified_sounds(str(path), ClipDecoder(RATE, CLIP), 2, None)
    sample = samples.load(0)
    assert (len(samples), sample["classes"], sample["fold"]) == (1, names, "3")
    assert sample["waveforms"].shape == (1, CLIP)
