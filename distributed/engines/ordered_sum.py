"""The gradients of each part of the batch, added in an order that does not depend on the number of processes.

``--batch_parts N`` cuts each update's batch into N equal parts, on any number of processes. The rounding of an fp32 sum
depends on the order of its additions, so the order is fixed: neighbours are added in pairs, the pairs in pairs, and so
on while their number is even; the remaining sums are added from the left. A process computes consecutive parts and adds
these; then the processes gather the sums, and each of them makes the remaining additions. Every addition is the same on
any number of processes, and so are the bits of the result. (Sums in fp64 would depend on the order: they are inexact
where parts differ in size by more than 2^29, or cancel.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tandem.distributed.collectives import Communicator

from .reducer import BUCKET_BYTES, padded_size, split_by_size, view_like

GATHERED_BYTES = 4 * BUCKET_BYTES  # at most, of the sums that are gathered at a time


class OrderedSum:
    """Used like ``GradientReducer``: any number of ``backward`` calls per part, then ``finish``, then ``zero_``.

    The gradients come from ``torch.autograd.grad``, so that they trigger no hooks of the parameters, such as
    DeepSpeed's, and reach no parameter of another model.

    Args:
        parameters: The trained parameters, in full size (ZeRO 3 may empty them later).
        parts: The number of parts that this process computes.
    """

    def __init__(self, parameters: list[nn.Parameter], comm: Communicator, parts: int) -> None:
        self.parameters, self._comm = parameters, comm
        self._buckets: list[Tensor] = []  # each (parts, elements)
        self._views: dict[nn.Parameter, list[Tensor]] = {}
        for group in split_by_size(reversed(parameters), BUCKET_BYTES):
            sizes = [padded_size(parameter) for parameter in group]
            bucket = group[0].new_zeros(parts, sum(sizes), requires_grad=False)
            self._buckets.append(bucket)
            for parameter, columns in zip(group, bucket.split(sizes, dim=1), strict=True):
                self._views[parameter] = [view_like(parameter, row) for row in columns]

    @property
    def gradients(self) -> list[Tensor]:
        """After ``finish``: every gradient of this model, in few flat tensors."""
        return [bucket[0] for bucket in self._buckets]

    @property
    def by_parameter(self) -> dict[nn.Parameter, Tensor]:
        """Views of ``gradients`` in the shapes of the parameters."""
        return {parameter: views[0] for parameter, views in self._views.items()}

    def backward(self, loss: Tensor, micro_batch: int | None, retain_graph: bool) -> None:
        """Add the gradients of ``loss`` to part number ``micro_batch`` of this process (None: the loss belongs to no
        part, so its gradients are added to the first part)."""
        gradients = torch.autograd.grad(
            loss, self.parameters, retain_graph=retain_graph, allow_unused=True, materialize_grads=False
        )
        index = micro_batch or 0
        pairs = [(self._views[p][index], g) for p, g in zip(self.parameters, gradients, strict=True) if g is not None]
        if pairs:
            torch._foreach_add_([view for view, _ in pairs], [g.detach() for _, g in pairs])

    @torch.no_grad()
    def finish(self) -> None:
        """Sum all parts of all processes into ``gradients``. Collective."""
        for bucket in self._buckets:
            for columns in bucket.split(self._columns_at_once(bucket), dim=1):
                sums = _add_pairs(list(columns))
                if self._comm.world_size > 1:
                    gathered_sums = self._comm.all_gather(torch.stack(sums))
                    sums = _add_pairs([part for parts in gathered_sums for part in parts])
                columns[0].copy_(sum(sums[1:], start=sums[0]))

    def _columns_at_once(self, bucket: Tensor) -> int:
        """How many elements of each part to add at a time: gathered sums take more memory with more processes."""
        sums_per_process = len(bucket) // (len(bucket) & -len(bucket))  # the length of _add_pairs(local parts)
        column_bytes = self._comm.world_size * sums_per_process * bucket.element_size()
        return max(GATHERED_BYTES // column_bytes, 1)

    def zero_(self) -> None:
        """Set all gradients to zero; if a parameter gets no gradient in an update, its zeros count."""
        torch._foreach_zero_(self._buckets)


def _add_pairs(parts: list[Tensor]) -> list[Tensor]:
    """Sums of neighbours, of neighbouring sums and so on, while their number is even."""
    while len(parts) % 2 == 0:
        parts = list(torch._foreach_add(parts[0::2], parts[1::2]))
    return parts
