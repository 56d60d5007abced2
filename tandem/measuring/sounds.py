"""How well a MuLaN classifies sounds by the names of the classes."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.data.fields import SampleDataset
from tandem.data.stores.encoding import encode_in_batches
from tandem.distributed import ProcessGroup
from tandem.embedding import Embedder, unit_means
from tandem.training.metrics.retrieval import classification_values, prompts

from .passes import Batches, process_batches


class Classification(NamedTuple):
    """The classification of all sounds that could be read.

    classes: Their names, sorted.
    values: `classification_values` on the root; {} on other processes.
    folds: With --per_fold, on the root, the values and the number of "samples" of each fold, by its name; else {}.
    """

    n_sounds: int
    classes: list[str]
    values: dict[str, float]
    folds: dict[str, dict[str, float]]


def load_clips(sounds: SampleDataset, index: int) -> tuple[Tensor, dict[str, Any]]:
    """The clips (k, n) of a sound, and its note: index, number of clips, classes and fold."""
    sample = sounds.load(index)
    clips = sample.pop("waveforms")
    return clips, {"index": index, "clips": len(clips), **sample}


def embed_sounds(
    sounds: SampleDataset, embedder: Embedder, args: argparse.Namespace, processes: ProcessGroup
) -> tuple[Tensor, list[dict[str, Any]]]:
    """The embeddings (n, dim) of all sounds that can be read, on the CPU, and their notes. Collective. Raises
    AskedToStop after a signal."""
    vectors, notes = [torch.empty(0, embedder.dim)], list[dict[str, Any]]()  # of this process's sounds

    def embed_batches(batches: Batches) -> Iterator[None]:
        for clips, batch_notes in batches:
            rows = encode_in_batches(clips, embedder.embed_clips, args.batch_size)
            vectors.append(unit_means(rows.split([note["clips"] for note in batch_notes])))
            notes.extend(batch_notes)
            yield

    process_batches(sounds, args, processes, "embedded", embed_batches, load_clips)
    all_vectors = processes.gather(torch.cat(vectors).to(processes.device)).cpu()
    all_notes = [*itertools.chain(*processes.gather_objects(notes))]  # in the order of `all_vectors`
    order = sorted(range(len(all_notes)), key=lambda row: all_notes[row]["index"])
    return all_vectors[order], [all_notes[row] for row in order]


def classify_sounds(
    sounds: SampleDataset, embedder: Embedder, args: argparse.Namespace, processes: ProcessGroup
) -> Classification:
    """Compare each sound with the names of all classes in the sentences of --zero_shot_templates. Collective. Raises
    UserMistake if embeddings are not finite; AskedToStop after a signal."""
    vectors, notes = embed_sounds(sounds, embedder, args, processes)
    result = Classification(len(notes), sorted({name for note in notes for name in note["classes"]}), {}, {})
    with processes.raise_on_all_ranks():
        if processes.is_root:
            sentences = args.zero_shot_templates
            texts = torch.stack([embedder.embed_text(text) for text in prompts(result.classes, sentences)])
            # One product for all sounds: its bits do not depend on the number of processes.
            scores = vectors.double() @ unit_means(texts.split(len(sentences))).double().T
            is_class = torch.tensor([[name in note["classes"] for name in result.classes] for note in notes])
            result.values.update(classification_values(scores, is_class))
            folds = sorted({note["fold"] for note in notes}, key=lambda fold: (len(fold), fold))
            for fold in folds if args.per_fold else []:
                in_fold = torch.tensor([note["fold"] == fold for note in notes])
                values = classification_values(scores[in_fold], is_class[in_fold])
                result.folds[fold] = {"samples": int(in_fold.sum()), **values}
    return result
