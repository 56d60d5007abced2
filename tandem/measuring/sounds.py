"""Embeddings of the sounds that a MuLaN classifies."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tandem.data.fields import SampleDataset
from tandem.data.stores.encoding import encode_in_batches
from tandem.distributed import ProcessGroup
from tandem.embedding import Embedder, unit_means

from .passes import Batches, process_batches


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
