"""What processes say to one another, written once over the three primitives that each backend brings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor


class Handle(Protocol):
    """An all-reduce under way."""

    def wait(self) -> Any: ...


class Done:
    """A reduction that needed nobody else."""

    def wait(self) -> None:
        return None


class Communicator(Protocol):
    """The primitives. Every process calls them, in the same order and with the same ``name``."""

    rank: int
    world_size: int

    def all_reduce_(self, tensor: Tensor, name: str) -> Handle:
        """Start summing ``tensor`` over the processes, in place; done when the handle's ``wait`` returns."""
        ...

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all processes, by rank; equal shapes."""
        ...

    def shift(self, tensor: Tensor, rows: int) -> Tensor:
        """Around the ring: ``tensor`` goes to the next rank, the previous rank's, of ``rows`` rows, is returned. Shapes
        may differ in dimension 0."""
        ...


class Alone:
    """The communicator of one process."""

    rank = 0
    world_size = 1

    def all_reduce_(self, tensor: Tensor, name: str) -> Handle:
        return Done()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def shift(self, tensor: Tensor, rows: int) -> Tensor:
        return tensor


def sum_scalars(values: Mapping[str, Any], comm: Communicator, device: torch.device) -> dict[str, float]:
    """Sums of a dict of numbers or 0-d tensors over the processes: one transfer, in fp64, and one wait of the host."""
    if not values:
        return {}
    # Python's own numbers are doubles; torch would make fp32 of them.
    packed = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device).detach() for v in values.values()])
    comm.all_reduce_(packed, "sum_scalars").wait()
    return dict(zip(values, packed.tolist(), strict=True))


def sum_tensor(tensor: Tensor, comm: Communicator) -> Tensor:
    """A new tensor with the sum over the processes; integers are summed as such, floating numbers in fp64 and rounded
    once, so that the order in which processes are added hardly ever shows."""
    work = tensor.detach().clone()
    if tensor.is_floating_point():
        work = work.double()
    elif work.dtype == torch.bool:
        work = work.long()
    work = work.contiguous()
    comm.all_reduce_(work, "sum_tensor").wait()
    return work.to(tensor.dtype) if tensor.is_floating_point() else work


def gather(tensor: Tensor, comm: Communicator) -> Tensor:
    """Concatenate along dimension 0, by rank; the sizes of dimension 0 may differ. Differentiable.

    The gradient is that of a single process which holds the whole batch, once gradients are averaged over the
    processes (as every engine does): each process's part of the gradient summed over all processes.
    """
    if comm.world_size == 1:
        return tensor
    return _Gather.apply(tensor, comm)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Communicator) -> Tensor:
        own = torch.tensor([tensor.shape[0]], device=tensor.device)
        sizes = [int(size) for size in torch.cat(comm.all_gather(own)).tolist()]
        ctx.comm, ctx.sizes = comm, sizes
        longest = max(sizes)
        padded = tensor.detach().new_zeros((longest, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        parts = comm.all_gather(padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = sum_tensor(grads[0], ctx.comm)
        start = sum(ctx.sizes[: ctx.comm.rank])
        return total[start : start + ctx.sizes[ctx.comm.rank]], None


def gather_objects(value: Any, comm: Communicator, device: torch.device) -> list[Any]:
    """JSON-able values of all processes, by rank. No pickle crosses the network."""
    data = _to_bytes(value, device)
    size = torch.tensor([data.numel()], device=device)
    sizes = [int(s) for s in torch.cat(comm.all_gather(size)).tolist()]
    padded = data.new_zeros(max(sizes))
    padded[: data.numel()] = data
    parts = comm.all_gather(padded)
    return [_from_bytes(part[:size]) for part, size in zip(parts, sizes, strict=True)]


def broadcast_object(value: Any, comm: Communicator, device: torch.device) -> Any:
    """The root's JSON-able ``value``, on every process."""
    return gather_objects(value if comm.rank == 0 else None, comm, device)[0]


def _to_bytes(value: Any, device: torch.device) -> Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8).to(device)


def _from_bytes(data: Tensor) -> Any:
    return json.loads(bytes(data.tolist()))
