"""The interface of all quantizers, and the mean of a statistic over the micro-batches and processes of an update."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from tandem.devices import sum_dtype

AllReduce = Callable[[Tensor], Tensor]
"""Sum over the processes; with one process it is the tensor itself."""


class Quantized(NamedTuple):
    """Results of `Quantizer.forward`."""

    quantized: Tensor
    """(b, d, ...) fp32, the chosen codebook entries; their gradient goes straight through to z."""
    codes: Tensor
    """(b, ...) int64 in [0, num_codes)."""
    losses: dict[str, Tensor]
    """By name in `loss_names`, 0-d fp32, unweighted."""


class GlobalMean:
    """Mean of a vector statistic over all items of an update.

    Sums are in fp64, so that the mean, rounded to fp32, hardly ever depends on the distribution of items to processes.
    """

    def __init__(self) -> None:
        self._local_sum: Tensor | None = None
        self._global_sum: Tensor | None = None

    def accumulate_stats(self, total: Tensor, count: int) -> None:
        """Add the sum (k,) over `count` items."""
        packed = _pack(total, count)
        self._local_sum = packed if self._local_sum is None else self._local_sum + packed

    def reduce_stats(self, all_reduce: AllReduce) -> None:
        """Fix the mean over the items of all processes, until `clear`. Collective."""
        if self._local_sum is None:
            raise RuntimeError("reduce_stats() before accumulate_stats(): there is nothing to reduce")
        self._global_sum, self._local_sum = all_reduce(self._local_sum), None

    def clear(self) -> None:
        """Forget the statistics of the update."""
        self._local_sum = self._global_sum = None

    def __call__(self, total: Tensor, count: int, all_reduce: AllReduce | None) -> Tensor:
        """Mean (k,) in fp64.

        Args:
            total: Sum (k,) over the `count` local items.
            all_reduce: None: the mean of the local items. Else the mean that `reduce_stats` fixed or, without one, the
                mean over all processes (collective).
        """
        if all_reduce is None:
            return total.detach().to(sum_dtype(total.device)) / count
        packed = self._global_sum if self._global_sum is not None else all_reduce(_pack(total, count))
        return packed[:-1] / packed[-1]


def _pack(total: Tensor, count: int) -> Tensor:
    wide_total = total.detach().to(sum_dtype(total.device))
    return torch.cat([wide_total, wide_total.new_full((1,), count)])


def single_process(tensor: Tensor) -> Tensor:
    """Sum or concatenation over one process: the tensor itself."""
    return tensor


class Bottleneck(nn.Module):
    """The layer between the encoder and the decoder of an autoencoder.

    Before training with several processes, `connect` sets all_reduce, gather, rank and world_size. They are not saved,
    and a `copy.deepcopy` shares the two functions with the original.

    Args:
        num_codes: Entries of the codebook; 0 if latents are continuous.
        dim: Channels of the decoder's input.

    Raises:
        ValueError: less than 1 channel.
    """

    loss_names: ClassVar[tuple[str, ...]] = ()
    """Keys of `Quantized.losses`, in train and eval mode."""
    keeps_fp32: ClassVar[bool] = False
    """Whether its tensors, such as a codebook of moving averages, stay in fp32 under `.bfloat16()` and `.half()`, which
    DeepSpeed calls on a whole model."""

    in_dim: int
    """Channels of the encoder's output."""
    all_reduce: AllReduce
    gather: Callable[[Tensor], Tensor]
    """Concatenation over the processes along dimension 0, by rank."""
    rank: int
    """Index of this process in the result of `gather`."""
    world_size: int

    def __init__(self, num_codes: int, dim: int) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"{'codebook_dim' if num_codes else 'latent_dim'} {dim}: give at least 1")
        self.num_codes, self.dim, self.in_dim = num_codes, dim, dim
        self.all_reduce = self.gather = single_process
        self.rank, self.world_size = 0, 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Bottleneck:
        # Share bound methods: a copy of one would copy its object, a backend with sockets, which cannot be copied.
        memo.update({id(shared): shared for shared in (self.all_reduce, self.gather)})
        clone = memo[id(self)] = self.__class__.__new__(self.__class__)
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Bottleneck:
        def convert(tensor: Tensor) -> Tensor:
            converted = fn(tensor)
            return tensor.to(converted.device) if converted.dtype in (torch.float16, torch.bfloat16) else converted

        return super()._apply(convert if self.keeps_fp32 else fn, recurse)

    def connect(self, processes: Any) -> None:
        """Share statistics with the other processes: `processes` has sum, gather, rank and world_size."""
        self.all_reduce, self.gather = processes.sum, processes.gather
        self.rank, self.world_size = processes.rank, processes.world_size

    def requantize(self, latents: Tensor) -> Tensor:
        """Changed latents (b, dim, ...) -> what the decoder gets for them, fp32, with the gradient of the latents.
        Nothing is learned from them: they are not latents of an image. Continuous latents stay as they are."""
        return latents.float()

    @property
    def is_learning(self) -> bool:
        """Whether a forward contributes to the current update."""
        return self.training and torch.is_grad_enabled()

    @property
    def needs_stats(self) -> bool:
        """Whether, with several micro-batches, `accumulate_stats` and `reduce_stats` must come before the forwards of
        the next update. It is the same on every process, but may change from one update to the next. False in eval
        mode."""
        return False


class Quantizer(Bottleneck, ABC):
    """Replaces each vector by the nearest of a finite number of vectors, the entries of a codebook.

    Averaged over processes and micro-batches, values and gradients of the losses equal those of one process that holds
    the whole batch of the update. Processes and micro-batches must hold equally many vectors. One update is

        for each micro-batch:  quantizer.accumulate_stats(z)    only with several micro-batches, if `needs_stats`
        quantizer.reduce_stats()                                  only after those
        for each micro-batch:  quantizer(z), backward
        optimizer step
        quantizer.after_step(step, seed, skipped)

    In eval mode, and under `torch.no_grad`, a forward records nothing and calls no collective: it uses the statistics
    of its own input.

    Args:
        num_codes: Entries of the codebook.
        dim: Channels of an entry.
        mean: The mean over the whole batch, if a loss needs one. A subclass adds to it in `_accumulate_stats`; this
            class reduces and clears it.

    Raises:
        ValueError: less than 2 entries, or less than 1 channel.
    """

    def __init__(self, num_codes: int, dim: int, mean: GlobalMean | None = None) -> None:
        super().__init__(num_codes, dim)
        if num_codes < 2:
            raise ValueError(f"codebook_size {num_codes}: give at least 2 entries")
        self._mean = mean

    def summary(self) -> str:
        """A short description of the codebook."""
        return f"{self.num_codes} codes"

    @property
    def needs_stats(self) -> bool:
        return self._mean is not None and self.training

    def forward(self, z: Tensor) -> Quantized:
        """z (b, dim, ...) of any floating dtype; computed in fp32, even under autocast.

        Collective while learning, if `needs_stats` and `reduce_stats` was not called before.

        Raises:
            ValueError: z has another number of channels.
        """
        with torch.autocast(z.device.type, enabled=False):
            entries, codes, losses = self._quantize(self._project(self._to_vectors(z)))
            grid = (z.shape[0], *z.shape[2:])
            quantized = rearrange(entries.unflatten(0, grid), "b ... d -> b d ...").contiguous()
            return Quantized(quantized, codes.view(grid), losses)

    @torch.no_grad()
    def codes(self, z: Tensor) -> Tensor:
        """z (b, dim, ...) -> codes (b, ...) int64, exactly those of forward in eval mode. Raises what forward raises;
        computes no losses and calls no collective."""
        with torch.autocast(z.device.type, enabled=False):
            return self._choose(self._project(self._to_vectors(z))).view(z.shape[0], *z.shape[2:])

    def decode_codes(self, codes: Tensor) -> Tensor:
        """Codes (b, ...) int64 in [0, num_codes) -> (b, dim, ...) fp32, bit for bit the `quantized` of forward."""
        return rearrange(self._look_up(codes), "b ... d -> b d ...").contiguous()

    def requantize(self, latents: Tensor) -> Tensor:
        return straight_through(self.decode_codes(self.codes(latents)).detach(), latents.float())

    @torch.no_grad()
    def accumulate_stats(self, z: Tensor) -> None:
        """Add a micro-batch of the coming update to the statistics of the whole batch. Calls no collective."""
        if self.needs_stats:
            with torch.autocast(z.device.type, enabled=False):
                self._accumulate_stats(self._project(self._to_vectors(z)))

    @torch.no_grad()
    def reduce_stats(self) -> None:
        """Fix the accumulated statistics for every forward until `after_step`. Collective."""
        if self._mean is not None:
            self._mean.reduce_stats(self.all_reduce)

    @torch.no_grad()
    def after_step(self, step: int, seed: int, skipped: Tensor | None = None) -> None:
        """End an update: to be called once per update, after the optimizer. Collective; in eval mode it does nothing.

        Args:
            step: Number of the update, the same on every process.
            seed: The seed of the run.
            skipped: 0-d bool, whether the optimizer skipped this update; if so, the codebook stays as it was.
        """
        if self._mean is not None:
            self._mean.clear()

    @property
    def _forward_all_reduce(self) -> AllReduce | None:
        """The all_reduce that a forward may use, or None if it must not call a collective."""
        return self.all_reduce if self.is_learning else None

    @abstractmethod
    def _quantize(self, vectors: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Projected vectors (n, dim) fp32 -> straight-through entries (n, dim), codes (n,), losses."""

    @abstractmethod
    def _choose(self, vectors: Tensor) -> Tensor:
        """Projected vectors (n, dim) fp32 -> the codes (n,) that `_quantize` gives them."""

    @abstractmethod
    def _look_up(self, codes: Tensor) -> Tensor:
        """Codes (...) -> entries (..., dim) fp32."""

    def _accumulate_stats(self, vectors: Tensor) -> None:
        """Add projected vectors (n, dim) fp32 of a micro-batch to the statistics."""

    def _project(self, vectors: Tensor) -> Tensor:
        """Vectors (n, dim) fp32 -> the vectors to compare with entries: unit vectors if all entries have the same
        length; by default, the vectors themselves."""
        return vectors

    def _to_vectors(self, z: Tensor) -> Tensor:
        """(b, dim, ...) -> (n, dim) fp32."""
        if z.ndim < 2 or z.shape[1] != self.dim:
            expected = f"this quantizer takes (b, {self.dim}, ...): project to {self.dim} channels first"
            raise ValueError(f"z has the shape {tuple(z.shape)}, {expected}")
        return rearrange(z.float(), "b d ... -> (b ...) d")


def straight_through(value: Tensor, gradient_source: Tensor) -> Tensor:
    """Exactly ``value``, with the gradient of ``gradient_source`` added to its own; NaN where ``gradient_source``
    is not finite."""
    return value + (gradient_source - gradient_source.detach())
