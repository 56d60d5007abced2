"""The order of samples: shuffles that are computed position by position, in constant memory."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from tandem.hashing import derive_key, mix64
from tandem.io.reading import counted

_FEISTEL_ROUNDS = 8
_TOLERANCE = 1e-9


class Permutation:
    """A shuffle of 0..n-1 that depends only on `key`. Each position is computed in O(1) time and memory.

    A balanced Feistel network (Luby and Rackoff 1988) permutes 0..4^k-1 for a 4^k >= n; a result outside 0..n-1 is
    sent through the network again until it is inside ("cycle walking", Black and Rogaway 2002): on average fewer than
    four times, for more than 16 items.
    """

    def __init__(self, n: int, *key: int | str) -> None:
        assert n > 0, n
        self.n = n
        # At least 3 bits, because with 2 some shuffles of 5 items would be more likely than others.
        self._half_bits = max(3, math.ceil((n - 1).bit_length() / 2))
        self._half_mask = (1 << self._half_bits) - 1
        self._round_keys = [derive_key(*key, "round", i) for i in range(_FEISTEL_ROUNDS)]

    def __call__(self, i: int) -> int:
        """Position i in 0..n-1 of the shuffle -> the item at it, in 0..n-1."""
        assert 0 <= i < self.n, (i, self.n)
        item = self._feistel(i)
        while item >= self.n:
            item = self._feistel(item)
        return item

    def _feistel(self, x: int) -> int:
        left, right = x >> self._half_bits, x & self._half_mask
        for key in self._round_keys:
            left, right = right, left ^ (mix64(key ^ right) & self._half_mask)
        return left << self._half_bits | right


class Indices:
    """`length` dataset indices. `at` computes the index at a position, so that no list is in memory."""

    def __init__(self, length: int, at: Callable[[int], int]) -> None:
        self._length, self.at = length, at

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> int:
        if not 0 <= i < self._length:
            raise IndexError(i)
        return self.at(i)


class Ranges(Indices):
    """The dataset indices of several ranges, concatenated; each access takes O(log(number of ranges))."""

    def __init__(self, ranges: Sequence[range]) -> None:
        self.ranges = list(ranges)
        self._ends = list(itertools.accumulate(map(len, self.ranges)))
        super().__init__(self._ends[-1] if self._ends else 0, self._at)

    def _at(self, i: int) -> int:
        number = bisect.bisect_right(self._ends, i)
        return self.ranges[number][i - self._ends[number]]  # a negative index counts from the range's end


def fixed_subset(indices: Indices, length: int) -> Indices:
    """A subset of `length` indices: the first ones, which are shuffled; but of `Ranges`, in which neighbours may be
    alike, those at equal distances."""
    return Indices(length, partial(_spread_index, indices, length) if isinstance(indices, Ranges) else indices.at)


def _spread_index(indices: Indices, length: int, i: int) -> int:
    return indices[i * len(indices) // length]


def _shuffled_index(permutation: Permutation, start: int, first: int, i: int) -> int:
    """The index at position start + i of a shuffle of the indices from `first` on."""
    return first + permutation(start + i)


class Split(NamedTuple):
    """The disjoint parts of a data set."""

    train: Indices
    valid: Indices
    test: Indices


def split_samples(n: int, valid_fraction: float, test_fraction: float, seed: int, batch_size: int) -> Split:
    """Divide a data set of n samples by seed.

    valid has max(ceil(valid_fraction * n), batch_size) samples, none if the fraction is 0; test likewise. `batch_size`
    is global. Raises ValueError if fewer than `batch_size` training samples remain.
    """
    n_valid, n_test = (max(ceil_fraction(n, f), batch_size) if f > 0 else 0 for f in (valid_fraction, test_fraction))
    n_train = n - n_valid - n_test
    if n_train < batch_size:
        raise ValueError(
            f"{counted(n, 'sample')}, too few: {_sizes_text(valid_fraction, n_valid, test_fraction, n_test)} (at least "
            f"a batch), which leaves {max(0, n_train)} to train on, less than one batch of {batch_size}: add data, or "
            "lower --batch_size or the fractions"
        )
    permutation, starts = Permutation(n, "split", seed), (0, n_train, n_train + n_valid)
    parts = zip((n_train, n_valid, n_test), starts, strict=True)
    return Split(*(Indices(size, partial(_shuffled_index, permutation, start, 0)) for size, start in parts))


def validation_indices(indices: range, seed: int, batch_size: int) -> Indices:
    """The validation split that consists of all `indices`, those of the set of --valid_folder: they are shuffled by
    seed, because neighbours in a folder may be alike. Raises ValueError if they are fewer than a global batch."""
    n = len(indices)
    if n < batch_size:
        raise ValueError(
            f"--valid_folder holds {counted(n, 'sample')}, less than one batch of {batch_size}: add some, or lower "
            "--batch_size"
        )
    return Indices(n, partial(_shuffled_index, Permutation(n, "split", seed), 0, indices.start))


def split_shards(
    shards: Sequence[range],
    valid_fraction: float,
    test_fraction: float,
    seed: int,
    batch_size: int,
    fallback: str = "--split_by sample",
) -> Split:
    """Divide a data set by whole shards, each a range of indices, by seed; empty shards are left out. `fallback` is
    the flag that messages recommend.

    valid takes ceil(valid_fraction * number of shards) of them, none if the fraction is 0; test likewise. Raises
    ValueError if no shard remains to train on, or a split is smaller than a global batch.
    """
    nonempty = [shard for shard in shards if len(shard)]
    n = len(nonempty)
    n_valid, n_test = ceil_fraction(n, valid_fraction), ceil_fraction(n, test_fraction)
    if n <= n_valid + n_test:
        raise ValueError(
            f"{counted(n, 'shard')}, too few: {_sizes_text(valid_fraction, n_valid, test_fraction, n_test)}, which "
            f"leaves none to train on: add shards, lower the fractions, or use {fallback}"
        )
    permutation = Permutation(n, "split shards", seed)
    shuffled = [nonempty[permutation(i)] for i in range(n)]
    n_train = n - n_valid - n_test
    parts = (shuffled[:n_train], shuffled[n_train : n_train + n_valid], shuffled[n_train + n_valid :])
    split = Split(*map(Ranges, parts))
    for name, part, indices in zip(("training", "validation", "test"), parts, split, strict=True):
        if part and len(indices) < batch_size:
            raise ValueError(
                f"the {name} split has {len(part)} of {counted(n, 'shard')} and {counted(len(indices), 'sample')}, "
                f"less than one batch of {batch_size}: lower --batch_size, or use {fallback}"
            )
    return split


def _sizes_text(valid_fraction: float, n_valid: int, test_fraction: float, n_test: int) -> str:
    test = f" and --test_fraction {test_fraction:g} {n_test}" if test_fraction else ""  # a flag of some scripts
    return f"--valid_fraction {valid_fraction:g} takes {n_valid}{test}"


def ceil_fraction(n: int, fraction: float) -> int:
    """ceil(fraction * n) without rounding errors: for 0.07 * 100 = 7.000000000000001 it is 7."""
    return math.ceil(fraction * n - _TOLERANCE)


class TrainingOrder:
    """The endless order of training: every epoch is another shuffle of the subset, by (seed, epoch) only."""

    def __init__(self, subset: Indices | range, seed: int) -> None:
        self._subset, self._seed = subset, seed

    def __call__(self, position: int, skip: int = 0) -> tuple[int, int]:
        """Number of samples seen so far -> (epoch, dataset index) of the next sample. `skip` > 0 gives the substitute
        for a sample that cannot be read: the one `skip` positions later in the same epoch, which wraps around."""
        n = len(self._subset)
        epoch, offset = divmod(position, n)
        return epoch, self._subset[_cached_permutation(n, "epoch", self._seed, epoch)((offset + skip) % n)]

    def __len__(self) -> int:
        """Samples per epoch."""
        return len(self._subset)


SHARDS_AT_ONCE = 4


class ShardOrder:
    """The endless order of training by shards: every epoch shuffles the shards, takes up to four at a time, and
    shuffles their samples, by (seed, epoch) only. An access costs O(log(number of shards)), the first one of an epoch
    O(number of shards).

    Args:
        shards: The indices of the samples of each shard.
        fetch: Called with the next shards whenever new ones are begun.
    """

    def __init__(
        self, shards: Sequence[range], seed: int, fetch: Callable[[Sequence[range]], None] | None = None
    ) -> None:
        self._shards, self._seed = [shard for shard in shards if len(shard)], seed
        self._n, self._fetch, self._current_window = sum(map(len, self._shards)), fetch, (-1, -1)
        self._epochs: dict[int, tuple[list[Ranges], list[int]]] = {}

    def __call__(self, position: int, skip: int = 0) -> tuple[int, int]:
        """As `TrainingOrder.__call__`; substitutes come from the shards that are read at the same time."""
        epoch, offset = divmod(position, self._n)
        windows, ends = self._epoch_windows(epoch)
        number = bisect.bisect_right(ends, offset)
        window = windows[number]
        if self._fetch is not None and self._current_window != (epoch, number):
            self._current_window = (epoch, number)
            is_last = number + 1 == len(windows)
            self._fetch((self._epoch_windows(epoch + 1)[0][0] if is_last else windows[number + 1]).ranges)
        shuffle = _cached_permutation(len(window), "window", self._seed, epoch, number)
        return epoch, window[shuffle((offset - ends[number] + skip) % len(window))]

    def __len__(self) -> int:
        """Samples per epoch."""
        return self._n

    def _epoch_windows(self, epoch: int) -> tuple[list[Ranges], list[int]]:
        """The windows of an epoch, groups of shards that are read together, and the position behind each."""
        if epoch not in self._epochs:
            n = len(self._shards)
            shuffle, n_windows = Permutation(n, "shards", self._seed, epoch), math.ceil(n / SHARDS_AT_ONCE)
            order = [self._shards[shuffle(i)] for i in range(n)]
            cuts = [n * i // n_windows for i in range(n_windows + 1)]
            windows = [Ranges(order[begin:end]) for begin, end in itertools.pairwise(cuts)]
            # Two epochs are cached, because both are used where one ends and the next begins.
            previous = dict(list(self._epochs.items())[-1:])
            self._epochs = {**previous, epoch: (windows, list(itertools.accumulate(map(len, windows))))}
        return self._epochs[epoch]


class ValidationOrder:
    """Every sample of the subset once, always in the same order; the epoch is always 0."""

    def __init__(self, subset: Indices) -> None:
        self._subset = subset

    def __call__(self, position: int, skip: int = 0) -> tuple[int, int]:
        """Position in 0..n-1 -> (0, dataset index); `skip` as in `TrainingOrder`."""
        return 0, self._subset[(position + skip) % len(self._subset)]

    def __len__(self) -> int:
        return len(self._subset)


class AlternatingOrder:
    """Two endless orders in turn: the updates (numbered from 1) that are multiples of `every` take their whole batch
    from `second`, the others from `first`.

    Args:
        offset: Added to the indices of `second`: the number of samples in the set of `first`, see `ConcatSamples`.
    """

    def __init__(self, first: Order, second: Order, *, every: int, batch_size: int, offset: int) -> None:
        self._first, self._second, self._offset = first, second, offset
        self._every, self._batch_size = every, batch_size

    def __call__(self, position: int, skip: int = 0) -> tuple[int, int]:
        """As `TrainingOrder.__call__`; the epoch is that of the order from which the sample comes."""
        update, offset = divmod(position, self._batch_size)
        n_before = update // self._every  # earlier updates with samples of the second order
        if (update + 1) % self._every:
            return self._first((update - n_before) * self._batch_size + offset, skip)
        epoch, index = self._second(n_before * self._batch_size + offset, skip)
        return epoch, self._offset + index

    def __len__(self) -> int:
        """Samples per epoch of the longer order."""
        return max(len(self._first), len(self._second))


Order = TrainingOrder | ShardOrder | AlternatingOrder | ValidationOrder
_cached_permutation = functools.lru_cache(maxsize=8)(Permutation)
