"""Passes over all samples, of which each process takes a share of the batches. Batches do not depend on the number of
processes."""

from __future__ import annotations

import argparse
import itertools
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from tandem.data.bad_samples import BadSample, BadSampleLog
from tandem.data.feed import to_unit_range
from tandem.data.fields import SampleDataset
from tandem.data.sampling.workers import Loader
from tandem.data.stores.encoding import load_samples
from tandem.data.stores.shards import PARTIAL
from tandem.devices import to_device
from tandem.distributed import ProcessGroup
from tandem.io.exits import AskedToStop
from tandem.io.reading import counted

ROUND_SECONDS = 1.0  # between exchanges of errors and signals
PROGRESS_SECONDS = 10.0  # between lines of progress
#: Images or videos in [0, 1], or the clips of sounds; and the notes of `load` or `load_clips`.
Batches = Iterator[tuple[Tensor, list[dict[str, Any]]]]


def load(samples: SampleDataset, index: int) -> tuple[Tensor, dict[str, Any]]:
    """The pixels of a sample, (1, ...), and its note: index, checksum, and a list for the measurements."""
    (pixels,) = samples.load(index).values()
    return pixels[None], {"index": index, "checksum": zlib.crc32(pixels.numpy()), "measurements": []}


def run_rounds(steps: Iterable[None], n_processed: Callable[[], int], processes: ProcessGroup) -> Iterator[int]:
    """Run `steps` of this process to their end. The processes exchange errors and signals every `ROUND_SECONDS`, so
    that none waits for the others at each batch. Yields the `n_processed` of all every `PROGRESS_SECONDS`. Collective.
    Raises AskedToStop after a signal."""
    steps, has_more, report_time = iter(steps), True, time.monotonic()
    while True:
        if processes.stop_requested(now=True):
            processes.say("asked to stop, with nothing written; the same command starts over")
            raise AskedToStop
        totals = processes.sum({"has more": has_more, "processed": n_processed()})
        if not totals["has more"]:
            return
        if time.monotonic() > report_time + PROGRESS_SECONDS:
            yield round(totals["processed"])
            report_time = time.monotonic()
        with processes.raise_on_all_ranks():
            end = time.monotonic() + ROUND_SECONDS
            for _ in steps:
                if time.monotonic() > end or processes.stop.is_requested_here:
                    break
            else:
                has_more = False


def process_batches(
    samples: SampleDataset, args: argparse.Namespace, processes: ProcessGroup, action: str,
    measure: Callable[[Batches], Iterable[None]],
    load_sample: Callable[[SampleDataset, int], tuple[Tensor, dict[str, Any]]] = load,
) -> None:  # fmt: skip
    """Run the generator `measure(batches of this process)` to its end, in rounds. Collective. Raises UserMistake, in
    one line, if too many samples cannot be read; AskedToStop after a signal."""
    n, rank, world = len(samples), processes.rank, processes.world_size
    n_processed, partial_reads, bad = 0, list[str](), list[BadSample]()
    requests = [range(first, min(first + args.batch_size, n)) for first in range(0, n, args.batch_size)]
    load_request = partial(load_samples, partial(load_sample, samples))
    loaded = Loader(load_request, requests[rank::world], args.num_workers, waiting=processes.waiting_for_workers)

    def batches() -> Batches:
        nonlocal n_processed
        for batch, notes, failures in loaded:
            bad.extend(BadSample(index, samples.describe(index), reason) for index, reason in failures.items())
            n_processed += len(notes) + len(failures)
            batch_notes = [note for _, note in notes]
            for note in batch_notes:
                if PARTIAL in note:
                    partial_reads.append(f"{samples.describe(note['index'])}: {note[PARTIAL]}")
            if notes:
                batch = to_device(batch, processes.device)
                yield batch if batch.is_floating_point() else to_unit_range(batch), batch_notes

    for n_of_all in run_rounds(measure(batches()), lambda: n_processed, processes):
        processes.say(f"{action} {n_of_all} of {n}")
    log = BadSampleLog(n)
    for sample in log.share(bad, processes.gather_objects):
        processes.say(f"cannot read {sample}; it is left out")
    counts, examples = zip(*processes.gather_objects([len(partial_reads), partial_reads[:1]]), strict=True)
    if any(counts):
        first = next(itertools.chain(*examples))
        processes.say(f"read only in part: {counted(sum(counts), 'sample')}, such as {first}")
    with processes.raise_on_all_ranks():
        log.check()
        if n - log.count < 2:
            readable = counted(n - log.count, "sample")
            raise ValueError(f"{readable} of {args.data} could be read: give at least 2, better thousands")


def require_same_files(samples: SampleDataset, args: argparse.Namespace, processes: ProcessGroup) -> None:
    """Raise UserMistake, in one line, if processes list other samples, or compute on other devices, than the first.
    Collective."""
    fingerprints = processes.gather_objects([len(samples), samples.fingerprint, processes.device.type])
    with processes.raise_on_all_ranks():
        if any(fingerprint != fingerprints[0] for fingerprint in fingerprints):
            raise ValueError(f"the processes do not see the same files in {args.data}, or compute on different devices")
