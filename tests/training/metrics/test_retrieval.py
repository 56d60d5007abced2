"""Retrieval against a naive double loop, on one process and several; zero-shot classification."""

import math
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from tandem.training.metrics import retrieval
from tandem.training.metrics.retrieval import (
    RetrievalQuality,
    average_precision,
    class_embeddings,
    classification_values,
    zero_shot_hits,
)
from tests.processes import Process, on_processes

ALONE = Process()


def split(seed: int, clips: int, dim: int = 6, texts: int = 30) -> tuple[torch.Tensor, dict[str, torch.Tensor], list]:
    """Clips (n, d), embeddings of texts, and 0 to 4 captions of each clip, some of them shared or said twice."""
    generator = torch.Generator().manual_seed(seed)
    audio = torch.nn.functional.normalize(torch.randn(clips, dim, generator=generator), dim=1)
    embeddings = torch.nn.functional.normalize(torch.randn(texts, dim, generator=generator), dim=1)
    names = [f"text {number}" for number in range(texts)]
    counts = torch.randint(0, 5, (clips,), generator=generator).tolist()
    captions = [[names[i] for i in torch.randint(0, texts, (count,), generator=generator)] for count in counts]
    captions[0] = [names[3], names[4], names[3]]
    return audio, dict(zip(names, embeddings, strict=True)), captions


def add(quality: RetrievalQuality, data: Any, rows: list[int], **more: Any) -> None:
    audio, embeddings, captions = data
    own = [captions[row] for row in rows]
    text = [embeddings[caption] for of_clip in own for caption in of_clip]
    quality.add(audio[rows], torch.stack(text) if text else torch.empty(0, audio.shape[1]), own, **more)


def measured(audio: torch.Tensor, text: torch.Tensor, captions: list[list[str]]) -> dict[str, float]:
    quality = RetrievalQuality()
    quality.add(audio, text, captions)
    return quality.result(ALONE)


def measured_split(data: Any, *parts: list[int]) -> dict[str, float]:
    quality = RetrievalQuality()
    for rows in parts or [list(range(len(data[0])))]:
        add(quality, data, rows)
    return quality.result(ALONE)


def numbered(count: int) -> list[list[str]]:
    return [[str(number)] for number in range(count)]


def naive(data: Any) -> dict[str, float]:
    """The definition, candidate by candidate."""
    audio, embeddings, captions = data
    clips = audio.double().numpy()
    used = sorted({caption for own in captions for caption in own})
    texts = {name: embeddings[name].double().numpy() for name in used}
    directions = {
        "text_to_audio": [
            ([float(texts[caption] @ clip) for clip in clips], [caption in own for own in captions])
            for own_captions in captions
            for caption in sorted(set(own_captions))
        ],
        "audio_to_text": [
            ([float(texts[name] @ clip) for name in used], [name in own for name in used])
            for clip, own in zip(clips, captions, strict=True)
            if own
        ],
    }
    values = {}
    for direction, queries in directions.items():
        best, precisions, chances = [], [], []
        for scores, right in queries:
            order = sorted(range(len(scores)), key=lambda i: -scores[i])
            ranks = [rank for rank, i in enumerate(order, start=1) if right[i]]
            best.append(ranks[0])
            of_ranks = [j / rank for j, rank in enumerate(ranks, start=1) if rank <= 10]
            precisions.append(sum(of_ranks) / min(10, len(ranks)))
            chances.append(len(ranks) / len(scores))
        recalls = {f"r{k}": np.mean([rank <= k for rank in best]) for k in (1, 5, 10)}
        others = {"median_rank": median(best), "map10": np.mean(precisions), "chance_r1": np.mean(chances)}
        values |= {f"{direction}/{name}": value for name, value in {**recalls, **others}.items()}
    values["r10"] = (values["text_to_audio/r10"] + values["audio_to_text/r10"]) / 2
    return values


@pytest.mark.parametrize(("seed", "clips", "texts"), [(0, 40, 30), (1, 7, 5), (2, 60, 4), (3, 25, 200)])
def test_every_value_is_that_of_a_naive_double_loop(seed, clips, texts):
    data = split(seed, clips, texts=max(texts, 5))
    found, expected = measured_split(data, list(range(3)), list(range(3, clips))), naive(data)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-12)
    assert found["text_to_audio/r5"] > 0


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_clips_spread_raggedly_over_any_number_of_processes_give_the_very_same_values(world_size, monkeypatch):
    monkeypatch.setattr(retrieval, "_SCORES_AT_A_TIME", 64)  # two or three rows at a time
    data = split(4, 23)
    places = torch.randint(0, max(1, world_size - 1), (23,), generator=torch.Generator().manual_seed(5)).tolist()

    def measure(processes: Process) -> dict[str, float]:
        quality = RetrievalQuality()  # the last of several processes has no clips
        own = [row for row in range(23) if places[row] == processes.rank]
        for rows in (own[:4], own[4:]):
            if rows:
                add(quality, data, rows)
        return quality.result(processes)

    results = on_processes(world_size, measure)
    assert all(result == results[0] for result in results)
    assert results[0] == measured_split(data) == pytest.approx(naive(data), rel=1e-12)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("dim", [1, 3, 128])
def test_a_collapsed_model_finds_nothing_because_ties_count_against_it(world_size, dim):
    vector = torch.nn.functional.normalize(torch.randn(dim, generator=torch.Generator().manual_seed(1)), dim=0)

    def measure(processes: Process) -> dict[str, float]:
        quality = RetrievalQuality()
        names = [[f"{processes.rank} {number}"] for number in range(37)]
        quality.add(vector.expand(37, dim), vector.expand(37, dim), names)
        return quality.result(processes)

    found = on_processes(world_size, measure)[0]
    for direction in ("text_to_audio", "audio_to_text"):
        assert found[f"{direction}/r10"] == found[f"{direction}/map10"] == 0
        assert found[f"{direction}/median_rank"] == 37 * world_size
        assert found[f"{direction}/chance_r1"] == pytest.approx(1 / (37 * world_size))
    assert found["r10"] == 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_shared_caption_is_the_mean_of_what_several_batches_made_of_it(world_size):
    turns = torch.tensor([0.0, 80.0, 41.0, 39.0]).deg2rad()
    vectors = torch.stack([turns.cos(), turns.sin()], 1)

    def measure(processes: Process) -> dict[str, float]:
        quality = RetrievalQuality()
        # The text came out at 0 and at 80 degrees; its clips are at 39 and 41, others at 0 and 80.
        for place in range(processes.rank, 2, world_size):
            quality.add(vectors[[place, 2 + place]], vectors[[place]], [[], ["shared"]])
        return quality.result(processes)

    for result in on_processes(world_size, measure):
        assert result["text_to_audio/map10"] == result["text_to_audio/r1"] == 1


def test_without_any_caption_there_is_no_number_rather_than_a_good_one():
    quality = RetrievalQuality()
    quality.add(torch.eye(2), torch.empty(0, 2), [[], []])
    for result in on_processes(2, quality.result) + on_processes(2, RetrievalQuality().result):
        assert len(result) == 13 and all(math.isnan(value) for value in result.values())


def test_texts_that_no_encoding_has_are_told_apart_on_every_process():
    def measure(processes):
        quality = RetrievalQuality()
        row = torch.eye(2)[[processes.rank]]
        quality.add(row, row, [["\ud800" if processes.is_root else "?"]])
        return quality.result(processes)

    assert all(found["r10"] == found["text_to_audio/r1"] == 1 for found in on_processes(2, measure))


def test_class_embeddings_are_normalised_means_of_directions():
    text = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, -3.0], [0.0, -1.0]])
    expected = [[math.sqrt(0.5), math.sqrt(0.5)], [0, -1]]
    assert class_embeddings(text, 2).tolist() == [pytest.approx(row) for row in expected]


def test_a_collapsed_model_classifies_nothing_and_clips_without_labels_have_no_metric():
    hits = zero_shot_hits(torch.ones(4, 3), ["a", "b", None, "a"], ["a", "b"], torch.ones(2, 3))
    assert hits.tolist() == [False] * 3
    quality = RetrievalQuality()
    quality.add(torch.eye(2), torch.eye(2), [["a"], ["b"]])
    assert quality.classes(ALONE) == []


def test_zero_shot_accuracy_over_labelled_clips_of_all_processes():
    names, classes = ["cat", "dog", "owl"], torch.eye(3)
    labels = [["dog", None, "cat"], [None], ["owl", "owl", "dog"]]
    audio = [classes[[1, 0, 1]], classes[[2]], classes[[2, 0, 1]]]  # right, -, wrong; -; right, wrong, right

    def measure(processes: Process) -> tuple[list[str], dict[str, float]]:
        quality = RetrievalQuality()
        own, captions = labels[processes.rank], [["x"]] * len(labels[processes.rank])
        quality.add(audio[processes.rank][:1], torch.ones(1, 3), captions[:1], own[:1])
        quality.add(audio[processes.rank][1:], torch.ones(len(own) - 1, 3), captions[1:], own[1:])
        found = quality.classes(processes)
        return found, quality.zero_shot(processes, found, classes)

    assert on_processes(3, measure) == [(names, {"zero_shot/top1": 3 / 5, "zero_shot/chance_top1": 1 / 3})] * 3


@pytest.mark.parametrize("levels", [3, 50, 10**6])
def test_average_precision_is_that_of_scikit_learn_also_with_ties(levels):
    metrics = pytest.importorskip("sklearn.metrics")
    generator = torch.Generator().manual_seed(levels)
    for share in (0.02, 0.3, 1):
        scores = torch.randint(0, levels, (200,), generator=generator).double()
        is_relevant = torch.rand(200, generator=generator) < share
        expected = metrics.average_precision_score(is_relevant.numpy(), scores.numpy())
        assert average_precision(scores, is_relevant) == pytest.approx(expected, rel=1e-12)


def test_classes_are_counted_among_the_first_ones_with_ties_against_them_and_not_where_sounds_have_several():
    scores, is_class = -torch.arange(12.0).double().expand(6, 12).clone(), torch.zeros(6, 12, dtype=torch.bool)
    is_class[range(6), [0, 1, 4, 5, 11, 0]] = True
    scores[5, 1] = scores[5, 0]
    found = classification_values(scores, is_class)
    assert (found["top1"], found["top5"]) == (1 / 6, 4 / 6)
    assert classification_values(scores[:, :6], is_class[:, :6]).keys() == {"map"}, "a sound has no class left"
    is_class[0, 3] = True
    assert classification_values(scores, is_class).keys() == {"map"}
    perfect = torch.eye(3, dtype=torch.bool)
    assert classification_values(perfect.double(), perfect) == {"top1": 1, "map": 1}
    assert classification_values(torch.ones(3, 3).double(), perfect) == {"top1": 0, "map": pytest.approx(1 / 3)}
