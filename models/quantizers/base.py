"""What every quantizer takes and gives, and what it needs of the other processes."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from einops import rearrange
from torch import Tensor, nn

from .statistics import AllReduce, GlobalMean

Self = TypeVar("Self", bound="Quantizer")


class Quantized(NamedTuple):
    """What a forward pass gives."""

    quantized: Tensor
    """(b, d, ...) fp32, the chosen codebook entries; their gradient goes straight through to z."""
    codes: Tensor
    """(b, ...) int64 in [0, num_codes)."""
    losses: dict[str, Tensor]
    """By name in `loss_names`, 0-d fp32, unweighted."""


def of_one_process(tensor: Tensor) -> Tensor:
    """Sum and concatenation over one process."""
    return tensor


class Quantizer(nn.Module, ABC):
    """Vectors to the nearest of a finite number of vectors.

    Losses are those of one process that holds the whole batch of the update, however many processes and micro-batches
    share it: averaged over both, value and gradient are the whole batch's. Processes and micro-batches hold equally
    many vectors. One update is

        for each micro-batch:  quantizer.observe(z)      only with several micro-batches, where `needs_observation`
        quantizer.pool()                                 likewise
        for each micro-batch:  quantizer(z), backward
        optimizer step
        quantizer.after_update(step, seed, skipped)

    In eval mode, and under `torch.no_grad`, a forward records nothing and asks nobody: its statistics are those of the
    batch at hand.

    Four attributes say how to reach the other processes; set them before training. They are neither saved nor copied
    by `copy.deepcopy`, which shares them.

    Args:
        num_codes: Entries of the codebook.
        dim: Channels of an entry.
        mean: Of the whole batch, where a loss is a function of one; `_observe` adds to it, the rest is done here.
    """

    loss_names: ClassVar[tuple[str, ...]] = ()
    """Keys of `Quantized.losses`, in train and eval mode."""

    all_reduce: Callable[[Tensor], Tensor]
    """Sum over the processes, as a new tensor."""
    gather: Callable[[Tensor], Tensor]
    """Concatenation over the processes along dimension 0, by rank."""
    rank: int
    """Where this process stands in what `gather` gives."""
    world_size: int

    def __init__(self, num_codes: int, dim: int, mean: GlobalMean | None = None) -> None:
        super().__init__()
        self.num_codes, self.dim, self._mean = num_codes, dim, mean
        self.all_reduce = self.gather = of_one_process
        self.rank, self.world_size = 0, 1

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        # A bound method would take its object with it: a backend with its sockets.
        memo.update({id(shared): shared for shared in (self.all_reduce, self.gather)})
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    @property
    def is_learning(self) -> bool:
        """Whether a forward counts for the update under way."""
        return self.training and torch.is_grad_enabled()

    @property
    def needs_observation(self) -> bool:
        """Whether, with several micro-batches per update, the next one has to be observed before it is trained on.

        The same on every process; it may change from update to update.
        """
        return self._mean is not None

    def forward(self, z: Tensor) -> Quantized:
        """z (b, dim, ...) of any floating dtype; computed in fp32, under autocast too.

        While learning, and where `needs_observation` without a `pool` before it, collective.

        Raises:
            ValueError: z has another number of channels.
        """
        with torch.autocast(z.device.type, enabled=False):
            rows, codes, losses = self._quantize(self._project(self._rows(z)))
            grid = (z.shape[0], *z.shape[2:])
            quantized = rearrange(rows.unflatten(0, grid), "b ... d -> b d ...").contiguous()
            return Quantized(quantized, codes.view(grid), losses)

    @torch.no_grad()
    def codes(self, z: Tensor) -> Tensor:
        """z (b, dim, ...) -> codes (b, ...) int64 of forward in eval mode, to the bit, without its losses. Local.

        Raises:
            ValueError: z has another number of channels.
        """
        with torch.autocast(z.device.type, enabled=False):
            return self._choose(self._project(self._rows(z))).view(z.shape[0], *z.shape[2:])

    def decode_codes(self, codes: Tensor) -> Tensor:
        """Codes (b, ...) int64 in [0, num_codes) -> (b, dim, ...) fp32, bit for bit the `quantized` of forward."""
        return rearrange(self._look_up(codes), "b ... d -> b d ...").contiguous()

    @torch.no_grad()
    def observe(self, z: Tensor) -> None:
        """Take a micro-batch of the coming update into the statistics of the whole batch. Local."""
        if self.needs_observation:
            with torch.autocast(z.device.type, enabled=False):
                self._observe(self._project(self._rows(z)))

    @torch.no_grad()
    def pool(self) -> None:
        """Make what was observed the statistics of every forward until `after_update`. Collective."""
        if self._mean is not None:
            self._mean.pool(self.all_reduce)

    @torch.no_grad()
    def after_update(self, step: int, seed: int, skipped: Tensor | None = None) -> None:
        """Once per update, after its last backward. Collective.

        Args:
            step: Number of the update, the same on every process.
            seed: Of the run.
            skipped: 0-d bool, whether the optimizer skipped this update: the codebook stays as it was.
        """
        if self._mean is not None:
            self._mean.clear()

    @property
    def _all_reduce_of_forward(self) -> AllReduce | None:
        """How a forward reaches the rest of the batch, or None where it asks nobody."""
        return self.all_reduce if self.is_learning else None

    @abstractmethod
    def _quantize(self, rows: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Projected vectors (n, dim) fp32 -> straight-through entries (n, dim), codes (n,), losses."""

    @abstractmethod
    def _choose(self, rows: Tensor) -> Tensor:
        """Projected vectors (n, dim) fp32 -> the codes (n,) that `_quantize` gives them."""

    @abstractmethod
    def _look_up(self, codes: Tensor) -> Tensor:
        """Codes (...) -> entries (..., dim) fp32."""

    def _observe(self, rows: Tensor) -> None:
        """Projected vectors (n, dim) fp32 of a micro-batch to come."""

    def _project(self, rows: Tensor) -> Tensor:
        """Vectors (n, dim) fp32 -> those that entries are compared with: their directions, where entries have one
        length; by default themselves."""
        return rows

    def _rows(self, z: Tensor) -> Tensor:
        """(b, dim, ...) -> (n, dim) fp32."""
        if z.ndim < 2 or z.shape[1] != self.dim:
            raise ValueError(
                f"z has the shape {tuple(z.shape)}, this quantizer takes (b, {self.dim}, ...): "
                f"project to {self.dim} channels first"
            )
        return rearrange(z.float(), "b d ... -> (b ...) d")


def straight_through(entries: Tensor, rows: Tensor) -> Tensor:
    """The value of `entries`, to the bit, with the gradient of `rows`; NaN where `rows` is not finite."""
    return entries + (rows - rows.detach())
