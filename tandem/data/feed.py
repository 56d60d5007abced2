"""The batches of a run for one process, for training and for validation; and reports about samples that cannot be
read."""

from __future__ import annotations

import contextlib
import math
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tandem.data.sampling.stream import TrainingStream, ValidationStream
from tandem.data.sources.files import is_url
from tandem.devices import has_pinned_memory
from tandem.io.reading import counted, printable

from .bad_samples import BadSample, BadSampleLog, UserCodeError
from .fields import ConcatSamples, SampleDataset
from .sampling import order
from .sources import remote

if TYPE_CHECKING:
    from tandem.distributed import ProcessGroup

Batch = dict[str, Any]  # see `TrainingData`
_TRAINED_PER_VALIDATED = 10  # by default: samples trained on between two validations, per sample of a validation


@dataclass(frozen=True)
class ValidationBatches:
    """This process's batches of a validation, to be iterated once. `n_samples`: of all processes."""

    batches: Iterator[Batch]
    n_samples: int

    def __iter__(self) -> Iterator[Batch]:
        return self.batches


class TrainingData:
    """Opens a data set, splits it by seed, and gives each process its part of every batch. All processes must call the
    same methods in the same order.

    A batch is a dict whose tensors are on the device. Every entry has one element per sample, so that it can be cut
    into micro-batches; "positions" are those of the samples in the global batch, "ids" their indices in the set.

    Args:
        open_samples: Opens the set. It may raise ValueError on some processes only.
        args: The flags of all scripts, such as batch_size, seed (of the order) and split_seed.
        noun: What messages call one sample, such as "image".
        source: What messages call the set: its path.
        open_second: Opens a second set. Every update whose number (from 1) is a multiple of `second_every` trains on
            it; it has no validation split. Its indices follow those of the first set.
        open_valid: Opens a set that is the validation split (`--valid_folder`); then nothing of the first set is held
            out for it. Its indices follow those of all others.

    Raises:
        UserMistake: one line, if there are no such samples or too few, or if the processes do not see the same ones.
    """

    def __init__(
        self,
        open_samples: Callable[[], SampleDataset],
        args: Any,
        processes: ProcessGroup,
        *,
        noun: str,
        source: str,
        open_second: Callable[[], SampleDataset] | None = None,
        second_every: int = 1,
        open_valid: Callable[[], SampleDataset] | None = None,
    ) -> None:
        self._args, self._processes, self.noun, self._source = args, processes, noun, source
        self._valid_source = args.valid_folder if open_valid else ""
        self._has_shown_traceback = False
        with self._raise_on_all_ranks():
            processes.heartbeat("listing the samples", is_uninterrupted=True)
            # `first_samples` stays the first set; `samples` becomes all sets as one.
            self.first_samples = self.samples = first = open_samples()
            second = open_second() if open_second else None
            self.valid_samples = open_valid() if open_valid else None
            for extra in (second, self.valid_samples):
                self.samples = self.samples if extra is None else ConcatSamples(self.samples, extra)
        views = processes.gather_objects((len(self.samples), self.samples.fingerprint, socket.gethostname()))
        with processes.raise_on_all_ranks():
            sources = " and ".join(filter(None, [source, self._valid_source]))
            _check_views(views, f"{noun}s in {sources}")
            self.train_set, self.valid_set, self.test_set = make_split(first, args, source)
            if self.valid_samples is not None:
                indices = range(len(self.samples))[-len(self.valid_samples) :]
                self.valid_set = order.validation_indices(indices, split_seed_of(args), args.batch_size)
            #: The samples of the validation split that each validation but the last measures.
            self.valid_part = order.fixed_subset(self.valid_set, _count_validated(len(self.valid_set), args))
            self.samples_per_epoch = len(self.train_set)
            self._order = self._make_order()
            if second is not None:
                # The number of samples of both sets in which each sample of the first set occurs once.
                self.samples_per_epoch = math.ceil(len(self.train_set) * second_every / (second_every - 1))
                self._order = order.AlternatingOrder(
                    self._order, order.TrainingOrder(range(len(second)), args.seed),
                    every=second_every, batch_size=args.batch_size, offset=len(first),
                )  # fmt: skip
        self.skipped = self.samples.skipped  # a line about files that are no samples, or ""
        self._loading: dict[str, Any] = {  # arguments of every stream
            "rank": processes.rank, "world_size": processes.world_size, "batch_size": args.batch_size,
            "num_workers": args.num_workers, "on_bad_sample": args.on_bad_sample,
            "noun": f"{noun}s", "pin_memory": has_pinned_memory(processes.device),
            "waiting": processes.waiting_for_workers,
        }  # fmt: skip
        #: The endless stream of batches.
        self.batches: Iterator[Any] = iter(())
        self.bad_samples = BadSampleLog(len(self.samples))  # a part of the checkpoint
        self._unreported: list[BadSample] = []
        self._reported_counts = {"incomplete": 0, "partial": 0}  # the numbers of samples in the last lines about them
        self._partial = set[int]()  # indices of the samples that any process read only in part
        self._unshared_partial = set[int]()  # those of this process since the last exchange
        self._partial_example = ""

    def _make_order(self) -> order.Order:
        """The order of the training split of the first set, by --shuffle."""
        if self._args.shuffle != "shards":
            return order.TrainingOrder(self.train_set, self._args.seed)
        assert isinstance(self.train_set, order.Ranges)
        ranges = self.train_set.ranges
        return order.ShardOrder(ranges, self._args.seed, _make_fetcher(self.first_samples, ranges, self._args))

    def summary(self) -> str:
        """A line about the data and its split."""
        parts = {"to train on": self.train_set, "to validate": self.valid_set, "to test": self.test_set}
        n, noun = sum(map(len, parts.values())), self.noun
        counts = [f"{counted(len(part), noun)} {use}" for use, part in parts.items() if len(part) or use != "to test"]
        fraction, batch_size = self._args.valid_fraction, self._args.batch_size
        n_by_fraction = order.ceil_fraction(n, fraction)
        if self._valid_source:
            counts[1] += f" in {self._valid_source}"
        elif len(self.valid_set) == batch_size > n_by_fraction:
            counts[1] += f" (one batch, the minimum; --valid_fraction {fraction:g} would be {n_by_fraction})"
        if len(self.valid_part) < len(self.valid_set):
            counts[1] += f" ({len(self.valid_part)} at each validation, all at the end)"
        if n_second := len(self.samples) - n:
            counts.append(f"and {n_second} of the second set to train on")
        return f"{self._source}: {', '.join(counts)}"

    def start(self, start_samples: int) -> Batch:
        """Begin at a position of the endless order of samples; returns the first batch. Raises UserMistake on all
        processes if no sample can be read."""
        self._whole_validation = self._validation = ValidationStream(self.samples, self.valid_part, **self._loading)
        if len(self.valid_part) < len(self.valid_set):
            # Only `preview`, `validation_samples` and the validation at the end read the whole split.
            self._whole_validation = ValidationStream(self.samples, self.valid_set, **self._loading, keep_workers=False)
        self._training = TrainingStream(self.samples, self._order, start=start_samples, **self._loading)
        self.batches = iter(self._training)
        # On all ranks, because reading the first batch may fail on some of them only.
        with self._raise_on_all_ranks():
            self._processes.heartbeat("loading the first batch")
            batch = next(self.batches)
        return self._receive_batch(batch)

    def next(self) -> Batch:
        """The next batch of the order."""
        with self._processes.waiting_for("data"):
            try:
                batch = next(self.batches)
            except UserCodeError as error:
                self._show_traceback(error.traceback)
                raise
        return self._receive_batch(batch)

    def validation(
        self, whole: bool = False, check_stop_request: Callable[[], None] = lambda: None
    ) -> ValidationBatches:
        """One pass over `valid_part`, or over the `whole` validation split. All processes call `check_stop_request`
        after they load a batch; it may raise an error to end the pass."""
        stream, samples = (self._whole_validation, self.valid_set) if whole else (self._validation, self.valid_part)

        def batches() -> Iterator[Batch]:
            for batch in self._processes.iterate("validation data", stream):
                check_stop_request()
                yield self._receive_batch(batch)

        return ValidationBatches(batches(), len(samples))

    def validation_samples(self, positions: range) -> Batch:
        """The samples at these positions of the validation split, which wraps around, loaded in this process. Not
        collective."""
        return self._receive_batch(self._whole_validation.load(positions))

    def preview(self, count: int) -> Batch:
        """A batch of at most `count` samples, the same on every process: the first ones of the validation split, which
        are the same at every start; without a validation split, the first ones of this start's first batch. Every
        process loads them itself. Raises what `start` raises."""
        n_valid = len(self.valid_set)
        stream, limit = (self._whole_validation, n_valid) if n_valid else (self._training, self._args.batch_size)
        with self._raise_on_all_ranks():
            batch = stream.load(range(min(count, limit)))
        return self._receive_batch(batch)

    def report_bad_samples(self, say: Callable[[str], None]) -> None:
        """Report which files any process could not read since the last call, each file once, and how many were left
        out. Raises UserMistake if too many could not be read to continue. Collective."""
        new: list[BadSample] = []
        # Sum two numbers first: this runs with every line of metrics, and there is hardly ever anything to exchange.
        counts = self._processes.sum({"unreported": len(self._unreported), "partial": len(self._unshared_partial)})
        if counts["partial"]:
            self._report_partial(say)
        if counts["unreported"]:
            new = self.bad_samples.share(self._unreported, self._processes.gather_objects)
        for sample in new:
            if sample.is_incomplete:
                text = f"left out {counted(self.bad_samples.count_incomplete, self.noun)} so far, such as {sample}"
                self._say_if_doubled(say, "incomplete", self.bad_samples.count_incomplete, text)
            else:
                say(f"cannot read {sample}; the next {self.noun} takes its place")
                if self._processes.rank == 0:
                    self._show_traceback(sample.traceback)
        self._unreported.clear()
        if self.bad_samples.are_too_many:  # on every process, because all know the same samples
            with self._processes.raise_on_all_ranks():
                self.bad_samples.check()

    @contextlib.contextmanager
    def _raise_on_all_ranks(self) -> Iterator[None]:
        """Raise a ValueError of one process on all. The first rank whose user's dataset failed prints its traceback."""
        traceback = ""
        try:
            with self._processes.raise_on_all_ranks():
                try:
                    yield
                except UserCodeError as error:
                    traceback = error.traceback
                    raise
        except ValueError:  # on all processes
            have_traceback = self._processes.gather_objects(bool(traceback))
            if True not in have_traceback[: self._processes.rank]:
                self._show_traceback(traceback)
            raise

    def _show_traceback(self, traceback: str) -> None:
        """Print the first traceback of a user's dataset; later ones differ in nothing but the index."""
        if traceback and not self._has_shown_traceback:
            self._has_shown_traceback = True
            print("\n".join(map(printable, traceback.splitlines())), file=sys.stderr, flush=True)

    def _report_partial(self, say: Callable[[str], None]) -> None:
        """Report how many samples are read only in part. Collective."""
        by_rank = self._processes.gather_objects([sorted(self._unshared_partial), self._partial_example])
        self._partial.update(*(indices for indices, _ in by_rank))
        self._partial_example = next(example for _, example in by_rank if example)
        self._unshared_partial.clear()
        text = f"read only in part so far: {counted(len(self._partial), self.noun)}, such as {self._partial_example}"
        self._say_if_doubled(say, "partial", len(self._partial), text)

    def _say_if_doubled(self, say: Callable[[str], None], kind: str, count: int, text: str) -> None:
        """Print a line if the number of samples of this kind has doubled since the last such line."""
        if count >= 2 * self._reported_counts[kind]:
            self._reported_counts[kind] = count
            say(text)

    def _receive_batch(self, batch: Mapping[str, Any]) -> Batch:
        """The batch with its tensors on the device; its bad samples are recorded for the next report."""
        self._unreported += batch["bad"]
        partial = batch.get("partial", {})
        self._unshared_partial |= partial.keys() - self._partial
        self._partial_example = self._partial_example or next(iter(partial.values()), "")
        device = self._processes.device
        return {
            key: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for key, value in batch.items()
            if key not in ("bad", "partial")
        }


def _count_validated(n: int, args: Any) -> int:
    """The number of samples of a validation, of the n in the split; it does not depend on the number of processes."""
    limit = args.valid_samples
    if limit is None:  # 0, which means all samples, if --validate_every_n_steps is 0: one validation, at the end
        limit = math.ceil(args.batch_size * args.validate_every_n_steps / _TRAINED_PER_VALIDATED)
    return min(n, max(limit, args.batch_size)) if limit else n


def make_split(samples: SampleDataset, args: Any, source: str) -> order.Split:
    """The splits for training, validation and test. Raises ValueError, in one line, if there are too few samples, or
    flags need shards and there are none."""
    fractions = args.valid_fraction, getattr(args, "test_fraction", 0.0)
    by_shards, fallback = "--shuffle shards", "--shuffle samples"
    if args.shuffle != "shards":
        if getattr(args, "split_by", "sample") == "sample":
            return order.split_samples(len(samples), *fractions, split_seed_of(args), args.batch_size)
        by_shards, fallback = "--split_by shard", "--split_by sample"
    if (shards := samples.source.shards) is None:
        raise ValueError(f"{by_shards} takes several tars or several files of tables, not {source!r}: use {fallback}")
    return order.split_shards(shards, *fractions, split_seed_of(args), args.batch_size, fallback)


def _make_fetcher(
    samples: SampleDataset, ranges: Sequence[range], args: Any
) -> Callable[[Sequence[range]], None] | None:
    """A function that fetches training shards from a server into the cache before they are read; None if no shard is on
    a server or there is no cache. Raises ValueError, in one line."""
    shards, paths, trained = samples.source.shards or (), getattr(samples.source, "paths", ()), {*ranges}
    pairs = ((shard, path) for shard, path in zip(shards, paths, strict=False) if shard in trained and is_url(path))
    addresses = {shard.start: path for shard, path in pairs}  # first index of a shard -> its URL
    n_at_once = 2 * order.SHARDS_AT_ONCE  # the shards that are being read, and the next ones
    try:
        remote.configure(args.cache_dir if addresses else None, args.cache_gb, list(addresses.values()), n_at_once)
    except OSError as error:
        raise ValueError(f"--cache_dir {args.cache_dir} cannot be used: {error}") from None
    return partial(_fetch_shards, addresses, args.num_workers) if addresses and args.cache_dir else None


def _fetch_shards(addresses: Mapping[int, str], num_workers: int, shards: Sequence[range]) -> None:
    """Fetch shards in the process that reads samples. If there are workers, the main process does not fetch, because a
    process with threads should not fork."""
    if not num_workers or torch.utils.data.get_worker_info() is not None:
        remote.fetch_shards(addresses, shards)


def _check_views(views: Sequence[Sequence[Any]], noun: str) -> None:
    """Raise ValueError if not every rank sees the same samples. `views`: number, fingerprint and host by rank."""
    n, fingerprint, host = views[0]
    for rank, (rank_n, rank_fingerprint, rank_host) in enumerate(views):
        if rank_n != n or rank_fingerprint != fingerprint:
            hint = "" if rank_n != n else ", but of other names or in another order"
            raise ValueError(
                f"rank {rank} (on {rank_host}) sees {rank_n} {noun}, rank 0 (on {host}) sees {n}{hint}: every process "
                "has to see the same files; copy the whole folder or list to each machine again"
            )


def split_seed_of(args: Any) -> int:
    """The seed of the split into training and validation: --split_seed, or else --seed."""
    return int(args.seed if args.split_seed is None else args.split_seed)


def to_unit_range(images: Tensor) -> Tensor:
    """uint8 in [0, 255] -> float32 in [0, 1], same shape and device; floats stay as they are."""
    return images if images.is_floating_point() else images.to(torch.float32).div_(255)
