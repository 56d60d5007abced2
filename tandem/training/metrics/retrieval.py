"""How well a model finds clips by their captions and captions by their clips, over all processes.

The protocol is that of Clotho and AudioCaps, whose clips have five captions each (LAION CLAP, Wu et al. 2023;
https://dcase.community/challenge2024/task-language-based-audio-retrieval):

- text to audio: every caption of every clip is a query, the clips are the candidates;
- audio to text: every clip is a query, the distinct captions are the candidates. Recall and median rank use the best
  of a clip's captions, mAP@10 uses all of them.

In the protocol all captions differ. Here several clips may share a caption: it is relevant to each of these clips, is
a single candidate, and is a query once for each of them.

The retrieval metrics of torchmetrics take the scores of all pairs at once and break ties by an unstable sort. Here
scores are computed in chunks, and ties count against the query.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tandem.devices import double, fp64_device

if TYPE_CHECKING:
    from tandem.distributed import ProcessGroup


TOP = 10
_RECALLS = (1, 5, 10)

# Scores that differ by less are ties, which count against the query: rounding makes the scores of equal vectors
# differ by about 1e-16 sqrt(d).
_TIE = 1e-12

_SCORES_AT_A_TIME = 1 << 22  # 32 MiB in float64


class Pairs(NamedTuple):
    """Each query with each of its relevant candidates: int64 indices (p,), sorted by query, each pair once."""

    queries: Tensor
    candidates: Tensor


class RetrievalQuality:
    """Embeddings of a validation split whose clips are spread over the processes, each clip on exactly one process.

    Args:
        device: Device of the model. Embeddings, float32, and scores, float64, are kept on its `fp64_device`.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = fp64_device(device)
        self._audio: list[Tensor] = []
        self._text: list[Tensor] = []
        self._captions: list[Sequence[str]] = []
        self._labels: list[Sequence[str | None]] = []

    def add(
        self, audio: Tensor, text: Tensor, captions: Sequence[Sequence[str]], labels: Sequence[str | None] | None = None
    ) -> None:
        """Add a batch of clips.

        Args:
            audio: Embeddings (b, d) of any length.
            text: Embeddings (m, d) of all captions, those of the first clip first.
            captions: Captions of each clip, m in all; a clip without captions is a candidate but not a query.
            labels: Class of each clip, or None if it has none.
        """
        count = sum(len(clip_captions) for clip_captions in captions)
        labels = [None] * len(audio) if labels is None else list(labels)
        assert len(captions) == len(labels) == len(audio) and len(text) == count, (len(audio), len(text), captions)
        self._captions += captions
        self._audio.append(audio.detach().float().to(self._device))
        self._text.append(text.detach().float().to(self._device))
        self._labels.append(labels)

    def result(self, processes: ProcessGroup, heartbeat: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Quality of retrieval in both directions, equal on every process and for any number of processes. Collective.

        Names begin with `text_to_audio/` or `audio_to_text/`, each followed by

        - `r1`, `r5`, `r10`: share of queries with a relevant candidate among the first 1, 5, 10, in [0, 1];
        - `median_rank`: median over queries of the rank, from 1, of the best relevant candidate;
        - `map10`: mean over queries of sum_j [r_j <= 10] j / r_j / min(10, n), where r_j is the rank of the j-th best
          of the n relevant candidates;
        - `chance_r1`: the expected r1 of a random order: mean of n / number of candidates.

        `r10`, without a prefix, is the mean of both directions. Ties and NaNs count against the query, so that a model
        which gives everything the same embedding has a recall of 0. All values are NaN if there are no queries.
        """
        corpus = self._gather_corpus(processes)
        if corpus is None:
            text_to_audio = audio_to_text = _summarize(torch.empty(0, 3), [])
        else:
            audio, text, clip_pairs = corpus
            text_pairs = _sort_pairs(clip_pairs.candidates, clip_pairs.queries)
            use_counts = torch.bincount(text_pairs.queries, minlength=len(text)).tolist()
            text_to_audio = _summarize(_rank_all(text, audio, text_pairs, processes, heartbeat), use_counts)
            has_caption = torch.bincount(clip_pairs.queries, minlength=len(audio)).clamp_max(1).tolist()
            audio_to_text = _summarize(_rank_all(audio, text, clip_pairs, processes, heartbeat), has_caption)
        return {
            **{f"text_to_audio/{name}": value for name, value in text_to_audio.items()},
            **{f"audio_to_text/{name}": value for name, value in audio_to_text.items()},
            "r10": (text_to_audio["r10"] + audio_to_text["r10"]) / 2,
        }

    def _gather_corpus(self, processes: ProcessGroup) -> tuple[Tensor, Tensor, Pairs] | None:
        """Unit vectors of all clips (n, d) and of all distinct captions (t, d), float64, and the captions of each
        clip; None if there is nothing to rank."""
        shards = processes.gather_objects([self._audio[0].shape[1] if self._audio else 0, self._captions])
        dim, captions = max(shard_dim for shard_dim, _ in shards), [texts for _, clips in shards for texts in clips]
        all_captions = [caption for texts in captions for caption in texts]
        if not all_captions:
            return None
        empty = torch.empty(0, dim, device=self._device)
        audio, text = (processes.gather(torch.cat([empty, *vectors])) for vectors in (self._audio, self._text))
        indices = {caption: index for index, caption in enumerate(sorted(set(all_captions)))}
        rows = torch.tensor([indices[caption] for caption in all_captions], device=self._device)
        clips = [clip for clip, texts in enumerate(captions) for _ in texts]
        # The embeddings of equal captions may differ in their last bits: take their mean, which does not depend on
        # their order.
        sums = torch.zeros(len(indices), dim, dtype=torch.float64, device=self._device)
        sums.index_add_(0, rows, text.double())
        return _unit_vectors(audio), _unit_vectors(sums), _sort_pairs(torch.tensor(clips, device=self._device), rows)

    def classes(self, processes: ProcessGroup) -> list[str]:
        """The distinct labels of all clips, sorted. Collective."""
        own_labels = sorted({label for labels in self._labels for label in labels if label is not None})
        return sorted(set().union(*processes.gather_objects(own_labels)))

    def zero_shot(self, processes: ProcessGroup, class_names: Sequence[str], embeddings: Tensor) -> dict[str, float]:
        """`zero_shot/top1`, the fraction of labelled clips that are nearest to their class, and
        `zero_shot/chance_top1`, 1 / number of classes. Collective.

        Args:
            class_names: The same on every process, at least one, every label among them; `classes` returns them.
            embeddings: Embeddings of the classes (c, d), in the order of `class_names` (`class_embeddings`).
        """
        batches = zip(self._audio, self._labels, strict=True)
        hits = [zero_shot_hits(audio, labels, class_names, embeddings.to(self._device)) for audio, labels in batches]
        counts = {"hits": sum(int(batch_hits.sum()) for batch_hits in hits), "labelled": sum(map(len, hits))}
        totals = processes.sum(counts)
        return {"zero_shot/top1": totals["hits"] / totals["labelled"], "zero_shot/chance_top1": 1 / len(class_names)}


def prompts(class_names: Sequence[str], templates: Sequence[str]) -> list[str]:
    """Every template with the name of every class in the place of {}: all of the first class, of the second, ..."""
    return [template.replace("{}", name) for name in class_names for template in templates]


def class_embeddings(text: Tensor, templates: int) -> Tensor:
    """Embeddings (c * templates, d) of the sentences from `prompts` -> one unit vector per class, (c, d) float64: the
    mean of the unit vectors of its sentences, normalised again (Radford et al. 2021, CLIP, section 3.1.4)."""
    return _unit_vectors(_unit_vectors(text).reshape(-1, templates, text.shape[1]).mean(1))


def zero_shot_hits(
    audio: Tensor, labels: Sequence[str | None], class_names: Sequence[str], embeddings: Tensor
) -> Tensor:
    """Whether each labelled clip is nearer to its own class than to any other: bool (number of labelled clips,).

    Args:
        audio: Embeddings of the clips (b, d).
        labels: Label of each clip, one of the `class_names` or None.
        class_names: Names of the c classes.
        embeddings: Embeddings of the classes (c, d).
    """
    rows = [row for row, label in enumerate(labels) if label is not None]
    index = {name: column for column, name in enumerate(class_names)}
    classes = torch.tensor([index[label] for label in labels if label is not None], dtype=torch.int64)
    relevant = functional.one_hot(classes, len(class_names)).bool().to(audio.device)
    return _rank_candidates(_unit_vectors(audio[rows]), _unit_vectors(embeddings), relevant)[:, 0] == 1


def classification_values(scores: Tensor, is_class: Tensor) -> dict[str, float]:
    """The values of a classification of n sounds in c classes by scores (n, c):

    - `top1`, and `top5` of more than 10 classes: share of sounds whose class is among the first 1, 5; ties count
      against it. Only if every sound has one class;
    - `map`: mean of the average precisions of the classes that a sound has.

    Args:
        scores: float64 on the CPU.
        is_class: bool (n, c), whether a sound is of a class; at least one is True.
    """
    values = dict[str, float]()
    if bool((is_class.sum(1) == 1).all()):
        n_before = ((scores >= scores[is_class][:, None] - _TIE) & ~is_class).sum(1)  # classes before that of the sound
        for k in (1, 5) if scores.shape[1] > 10 else (1,):
            values[f"top{k}"] = int((n_before < k).sum()) / len(scores)
    precisions = [average_precision(scores[:, c], is_class[:, c]) for c in is_class.any(0).nonzero().flatten().tolist()]
    return {**values, "map": statistics.fmean(precisions)}


def average_precision(scores: Tensor, is_relevant: Tensor) -> float:
    """Area below the steps of precision over recall, as scikit-learn's average_precision_score: the mean, over the
    relevant items, of the share of relevant ones among all items with at least their score. `scores` (n,);
    `is_relevant` bool (n,), at least one is True."""
    thresholds, everything = scores[is_relevant].sort().values, scores.sort().values
    n_relevant, n_items = (len(x) - torch.searchsorted(x, thresholds).double() for x in (thresholds, everything))
    return statistics.fmean((n_relevant / n_items).tolist())


def _unit_vectors(vectors: Tensor) -> Tensor:
    """(..., d) -> unit vectors float64."""
    return functional.normalize(double(vectors), dim=-1)


def _sort_pairs(queries: Tensor, candidates: Tensor) -> Pairs:
    pairs = torch.stack([queries, candidates]).unique(dim=1)  # a clip may have a caption twice
    return Pairs(pairs[0].contiguous(), pairs[1].contiguous())


def _rank_all(
    queries: Tensor, candidates: Tensor, pairs: Pairs, processes: ProcessGroup, heartbeat: Callable[[], None]
) -> Tensor:
    """`_rank_candidates` of all queries (q, 3), on the CPU. Each process computes a part; it calls `heartbeat` before
    each chunk. Collective."""
    rank, world_size = processes.rank, processes.world_size
    start, end = len(queries) * rank // world_size, len(queries) * (rank + 1) // world_size
    chunk = max(1, _SCORES_AT_A_TIME // len(candidates))
    results = [queries.new_empty(0, 3)]
    for first in range(start, end, chunk):
        heartbeat()
        stop = min(first + chunk, end)
        bounds = torch.searchsorted(pairs.queries, torch.tensor([first, stop], device=queries.device)).tolist()
        own_pairs = slice(*bounds)
        relevant = torch.zeros(stop - first, len(candidates), dtype=torch.bool, device=queries.device)
        relevant[pairs.queries[own_pairs] - first, pairs.candidates[own_pairs]] = True
        results.append(_rank_candidates(queries[first:stop], candidates, relevant))
    return processes.gather(torch.cat(results)).cpu()


def _rank_candidates(queries: Tensor, candidates: Tensor, relevant: Tensor) -> Tensor:
    """Rank of the best relevant candidate, average precision at 10, and chance of recall at 1: queries (q, d),
    candidates (c, d), relevant (q, c) bool -> float64 (q, 3), without meaning for a query that has no relevant
    candidate."""
    scores = queries @ candidates.T
    # NaNs count against the query: a NaN is the worst score of a relevant candidate and the best of another one.
    relevant_scores = scores.nan_to_num(nan=-math.inf).masked_fill_(~relevant, -math.inf)
    other_scores = scores.nan_to_num_(nan=math.inf).masked_fill_(relevant, -math.inf)
    top = min(TOP, len(candidates))
    best_relevant, best_others = relevant_scores.topk(top).values - _TIE, other_scores.topk(top).values
    best_rank = 1 + ((other_scores >= best_relevant[:, :1]) & ~relevant).sum(1)

    count = relevant.sum(1, keepdim=True)
    order = torch.arange(1, top + 1, device=scores.device)  # of each relevant candidate among the relevant ones
    # Their ranks among all candidates. At most 10 other candidates are counted: more make no difference.
    ranks = order + (best_others[:, None] >= best_relevant[..., None]).sum(2)
    precision = torch.where((order <= count) & (ranks <= TOP), order / ranks.double(), 0)
    average_precision = precision.sum(1) / count[:, 0].clamp(1, TOP)
    return torch.stack([best_rank.double(), average_precision, count[:, 0].double() / len(candidates)], dim=1)


def _summarize(results: Tensor, counts: Sequence[int]) -> dict[str, float]:
    """Statistics of the rows (q, 3) from `_rank_candidates`; query i is repeated counts[i] times. The order of
    queries does not matter, because the sums are exact."""
    rows = [row for row, count in zip(results.tolist(), counts, strict=True) for _ in range(count)]
    if not rows:
        return dict.fromkeys([*(f"r{k}" for k in _RECALLS), "median_rank", "map10", "chance_r1"], math.nan)
    ranks, precisions, chances = zip(*rows, strict=True)
    return {
        **{f"r{k}": sum(rank <= k for rank in ranks) / len(ranks) for k in _RECALLS},
        "median_rank": statistics.median(ranks),
        "map10": statistics.fmean(precisions),
        "chance_r1": statistics.fmean(chances),
    }
