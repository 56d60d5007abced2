"""Gradients of one model, summed over the processes in fixed flat buckets while the backward pass still runs.

All backends that replicate the model use this reducer, so that all add the same numbers in the same order. Buckets
depend neither on timing nor on an earlier update, so a resumed run sums exactly as an uninterrupted one. (PyTorch's
DistributedDataParallel reorders its buckets after the first update; Horovod fuses tensors in the order of arrival.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tandem.distributed.collectives import Communicator, Handle

if TYPE_CHECKING:
    from tandem.distributed.signals import StopRequest

BUCKET_BYTES = 25 * 2**20  # at most: large enough to fill a link, small enough to start early (PyTorch DDP's default)
SMALLEST_BUCKET_BYTES = 2**20  # of all buckets but the last
# Fractions of a small model. The first bucket is small, because nothing is sent before it is full; so is the last,
# about the remaining eighth, because nothing is left to compute while it is sent. More buckets would take computing
# time from cores that also copy them through sockets.
_FIRST_BUCKET_FRACTION, _OTHER_BUCKET_FRACTION = 1 / 8, 3 / 8
ALIGNMENT_BYTES = 16


@dataclass
class _Bucket:
    buffer: Tensor  # flat; in the last bucket also the stop flag
    flat: Tensor  # the part of `buffer` with the gradients
    parameters: list[nn.Parameter]
    views: list[Tensor]  # of `flat`, in the shapes of the parameters
    n_ready: int = 0
    is_filled: bool = False  # each `parameter.grad` is its view
    rounded_buffer: Tensor | None = None  # a copy in `reduce_dtype`, which is summed instead
    handle: Handle | None = None

    def fill(self) -> None:
        """Move the gradients into the bucket, where a further backward pass adds to them."""
        if self.is_filled:
            return
        pairs = [(view, p.grad) for view, p in zip(self.views, self.parameters, strict=True) if p.grad is not None]
        if len(pairs) < len(self.views):  # a missing gradient counts as zero
            self.flat.zero_()
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
        for view, parameter in zip(self.views, self.parameters, strict=True):
            parameter.grad = view
        self.is_filled = True

    def empty(self) -> None:
        """Drop the gradients: autograd then stores the first gradient of a parameter instead of adding it to zeros."""
        for parameter in self.parameters:
            parameter.grad = None
        self.is_filled = False


@dataclass
class GradientReducer:
    """Sums gradients over the processes. When all gradients of a bucket are computed, they move into the bucket; until
    the end of the update ``parameter.grad`` is then a view of it.

    Any number of backward passes may run per update. After ``before_backward(is_last=True)`` each bucket is sent as
    soon as the coming pass has filled it; gradients of a further pass are still added correctly.

    Args:
        micro_batches: Their number per update.
        stop_request: Its flag is summed with the last bucket.
        reduce_dtype: Precision in which the processes exchange gradients; None: that of the gradients.
    """

    parameters: list[nn.Parameter]
    comm: Communicator
    name: str
    micro_batches: int = 1
    stop_request: StopRequest | None = None
    reduce_dtype: torch.dtype | None = None
    buckets: list[_Bucket] = field(default_factory=list)
    _sends_early: bool = False
    _next_bucket: int = 0  # to send: every process must call collectives in the same order

    def __post_init__(self) -> None:
        if self.comm.world_size == 1:
            self.stop_request = None
        # Gradients appear roughly in the reverse order of registration.
        total = sum(parameter.numel() * parameter.element_size() for parameter in self.parameters)
        first, others = (
            min(max(int(total * fraction), SMALLEST_BUCKET_BYTES), BUCKET_BYTES)
            for fraction in (_FIRST_BUCKET_FRACTION, _OTHER_BUCKET_FRACTION)
        )
        groups = split_by_size(reversed(self.parameters), others, first)
        for group in groups:
            sizes = [padded_size(parameter) for parameter in group]
            flag_size = int(self.stop_request is not None and group is groups[-1])
            buffer = group[0].new_zeros(sum(sizes) + flag_size, requires_grad=False)
            flat = buffer[: sum(sizes)]
            views = [view_like(parameter, chunk) for parameter, chunk in zip(group, flat.split(sizes), strict=True)]
            bucket = _Bucket(buffer, flat, group, views)
            self.buckets.append(bucket)
            for parameter in group:
                parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, bucket))

    @property
    def gradients(self) -> list[Tensor]:
        """The flat buckets: after ``finish`` every gradient of this model, in few tensors."""
        return [bucket.flat for bucket in self.buckets]

    def zero_(self) -> None:
        """Drop all gradients; a parameter that gets none in an update counts with zeros."""
        for bucket in self.buckets:
            bucket.empty()
        self._reset()

    def backward(self, loss: Tensor, micro_batch: int | None, retain_graph: bool) -> None:
        """Add the gradients of ``loss``, of micro-batch number ``micro_batch`` (None: it belongs to none)."""
        self.before_backward(is_last=micro_batch == self.micro_batches - 1)
        loss.backward(retain_graph=retain_graph)

    def before_backward(self, is_last: bool) -> None:
        """Prepare for a backward pass; ``is_last``: it is expected to be the last one of this update."""
        if self._next_bucket:  # buckets are summed: keep the sum on the root only, so that the next sum counts it once
            self.finish()
            if self.comm.rank != 0:
                torch._foreach_zero_(self.gradients)
        self._reset()
        self._sends_early = is_last and self.comm.world_size > 1

    def finish(self) -> None:
        """Sum every bucket over the processes, and wait for the sums."""
        self._send_buckets(only_full=False)
        for bucket in self.buckets:
            assert bucket.handle is not None
            bucket.handle.wait()
            if bucket.rounded_buffer is not None:
                bucket.buffer.copy_(bucket.rounded_buffer)
                bucket.rounded_buffer = None
        if self.stop_request is not None and self.buckets:
            self.stop_request.read_sum(self.buckets[-1].buffer[-1])
        self._sends_early = False

    def _on_gradient(self, bucket: _Bucket, _: Tensor) -> None:
        if bucket.handle is not None:
            raise RuntimeError(
                "a gradient was computed twice in one backward pass (reentrant checkpointing?); "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        bucket.n_ready += 1
        if bucket.n_ready == len(bucket.parameters):
            bucket.fill()
            if self._sends_early:
                self._send_buckets(only_full=True)

    def _send_buckets(self, only_full: bool) -> None:
        for bucket in self.buckets[self._next_bucket :]:
            if only_full and bucket.n_ready < len(bucket.parameters):
                return
            bucket.fill()
            if self.stop_request is not None and bucket is self.buckets[-1]:
                bucket.buffer[-1].fill_(float(self.stop_request.contribute_flag()))
            if self.reduce_dtype is not None and self.comm.world_size > 1:
                bucket.rounded_buffer = bucket.buffer.to(self.reduce_dtype)
            tensor = bucket.buffer if bucket.rounded_buffer is None else bucket.rounded_buffer
            bucket.handle = self.comm.all_reduce_(tensor, f"{self.name}.gradients.{self._next_bucket}")
            self._next_bucket += 1

    def _reset(self) -> None:
        self._next_bucket = 0
        for bucket in self.buckets:
            bucket.n_ready, bucket.handle = 0, None


def split_by_size(
    parameters: Iterable[nn.Parameter], limit_bytes: int, first_bytes: int | None = None
) -> list[list[nn.Parameter]]:
    """Consecutive groups of one dtype and device; each has at most ``limit_bytes``, the first one ``first_bytes`` if
    that is given, or is one larger parameter."""
    groups: list[list[nn.Parameter]] = []
    group_bytes = 0
    for parameter in parameters:
        size = padded_size(parameter) * parameter.element_size()
        is_same_kind = groups and (groups[-1][0].dtype, groups[-1][0].device) == (parameter.dtype, parameter.device)
        limit = first_bytes if len(groups) == 1 and first_bytes is not None else limit_bytes
        if not is_same_kind or group_bytes + size > limit:
            groups.append([])
            group_bytes = 0
        groups[-1].append(parameter)
        group_bytes += size
    return groups


def padded_size(parameter: Tensor) -> int:
    """Elements of a bucket for one parameter: padded with zeros, so that each parameter begins at a multiple of 16
    bytes, which kernels load at once."""
    unit = max(ALIGNMENT_BYTES // parameter.element_size(), 1)
    return math.ceil(parameter.numel() / unit) * unit


def view_like(parameter: nn.Parameter, chunk: Tensor) -> Tensor:
    """A view of the parameter's ``chunk`` of a bucket, without padding and with the parameter's strides: fused
    optimizers read both in memory order."""
    chunk = chunk[: parameter.numel()]
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return chunk.as_strided(parameter.shape, parameter.stride())
    return chunk.view(parameter.shape)
