"""Collective operations, built on two that each backend defines: all-reduce and all-gather."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.devices import sum_dtype, to_numbers


class Handle(Protocol):
    """An all-reduce under way."""

    def wait(self) -> Any: ...


class Communicator:
    """Collectives of a single process, and the base class of other communicators, which define ``all_reduce_`` and
    ``all_gather``. Every process calls collectives in the same order, with the same ``name``.

    Objects and numbers are exchanged between the CPUs, through Gloo: NCCL would queue them behind the device's other
    work, and the host would wait for that."""

    rank = 0
    world_size = 1

    def wait(self) -> None:
        """Return at once: for a single process, this object is the handle of its all-reduces."""

    def all_reduce_(self, tensor: Tensor, name: str) -> Handle:
        """Start summing ``tensor`` over the processes, in place; done when the handle's ``wait`` returns."""
        return self

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all processes, by rank; equal shapes."""
        return [tensor]

    def sum_scalars(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Sums of a dict of numbers or 0-d tensors over the processes, in one fp64 sum. If tensors are on a device, the
        host waits for it once."""
        if not values:
            return {}
        tensors = {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}
        device_tensors = {name: tensor for name, tensor in tensors.items() if tensor.device.type != "cpu"}
        device_numbers = to_numbers([*device_tensors.values()])
        host_values = {**values, **tensors, **dict(zip(device_tensors, device_numbers, strict=True))}
        # Python's floats have 64 bits; without a dtype, torch would round them to fp32.
        packed = torch.tensor([float(number) for number in host_values.values()], dtype=torch.float64)
        self.all_reduce_(packed, "sum_scalars").wait()
        return dict(zip(values, packed.tolist(), strict=True))

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        """A new tensor with the sum over the processes: of integers as they are, of booleans in int64, of floating
        numbers in fp64 and then rounded once, so that the order of the processes hardly ever changes the result."""
        is_floating = tensor.is_floating_point()
        dtype = sum_dtype(tensor.device) if is_floating else torch.int64 if tensor.dtype == torch.bool else tensor.dtype
        total = tensor.detach().to(dtype, copy=True).contiguous()
        self.all_reduce_(total, "sum_tensor").wait()
        return total.to(tensor.dtype) if is_floating else total

    def gather(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Concatenate along dimension 0, by rank; the sizes of dimension 0 may differ. Differentiable.

        ``sizes`` are those of dimension 0 by rank; without them the processes exchange them, and the host waits.

        Backward sums the gradient of the concatenated tensor over all processes, and each process takes the rows of its
        own tensor. Once an engine has averaged over the processes, that is the gradient of one process with all rows.
        """
        if self.world_size == 1:
            return tensor
        return _Gather.apply(tensor, self, sizes)

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all processes, by rank. They are sent as JSON, not pickled."""
        return [_decode_json(text) for text in self._all_gather_ragged(_encode_json(value))]

    def broadcast_object(self, value: Any) -> Any:
        """The root's JSON value. What a process receives does not grow with the number of processes."""
        own = _encode_json(value) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        size = int(self.sum_scalars({"size": len(own)})["size"])
        return _decode_json(self._join_bytes(own, 0, size))

    def _all_gather_ragged(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        """The tensors of all processes, by rank; the sizes of dimension 0 may differ. See `gather`."""
        if sizes is None:
            own_size = torch.full((1,), len(tensor), device=tensor.device)
            sizes = torch.cat(self.all_gather(own_size)).tolist()
        largest, total = max(sizes), sum(sizes)
        if not total:
            return [tensor] * self.world_size
        if 2 * total < self.world_size * largest:
            # Few processes have most rows: send no padding, although a sum sends every byte twice.
            row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
            own = tensor.contiguous().view(-1).view(torch.uint8)
            all_bytes = self._join_bytes(own, sum(sizes[: self.rank]) * row_bytes, total * row_bytes)
            return list(all_bytes.view(tensor.dtype).view(total, *tensor.shape[1:]).split(list(sizes)))
        padded = tensor.new_zeros((largest, *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        return [rows[:size] for rows, size in zip(self.all_gather(padded), sizes, strict=True)]

    def _join_bytes(self, own: Tensor, start: int, total: int) -> Tensor:
        """uint8 (total,): the bytes ``own`` of every process, placed at the offset ``start`` that this process passes.
        The places of two processes must not overlap."""
        words = torch.zeros(math.ceil(total / 8), dtype=torch.int64, device=own.device)  # Horovod adds no uint8
        all_bytes = words.view(torch.uint8)[:total]
        all_bytes[start : start + len(own)] = own
        if total:
            self.all_reduce_(words, "sum_of_bytes").wait()  # exact, because no two processes set the same bit
        return all_bytes


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Communicator, sizes: Sequence[int] | None) -> Tensor:
        tensors = comm._all_gather_ragged(tensor.detach(), sizes)
        ctx.comm, ctx.sizes = comm, [len(rows) for rows in tensors]
        return torch.cat(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = ctx.comm.sum_tensor(grads[0])
        start = sum(ctx.sizes[: ctx.comm.rank])
        return total[start : start + ctx.sizes[ctx.comm.rank]], None, None


def _encode_json(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode_json(encoded: Tensor) -> Any:
    return json.loads(encoded.numpy().tobytes())
