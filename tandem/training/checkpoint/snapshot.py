"""A copy on the CPU of the state of a run, for a checkpoint that is written while training goes on."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.devices import has_pinned_memory

from .format import Tree

_CHUNK_BYTES = 1 << 28  # of pinned memory; a larger tensor has a larger chunk
_ALIGNED_BYTES = 64
_MAX_UNUSED = 1 / 16  # share of the memory of a state that may be unused in its last chunk

Key = tuple[str, str]  # the part of a state, and the path of a tensor in it, joined with '/'


class CopyBuffers:
    """The buffers into which the snapshots of a run copy tensors: one for each tensor, which the next snapshot reuses.

    Tensors of an accelerator are copied to pinned memory. PyTorch rounds each allocation of that up to a power of two
    (`CachingHostAllocatorImpl::allocate` in ATen/core/CachingHostAllocator.h), so tensors share chunks of such sizes.
    """

    def __init__(self) -> None:
        self._buffers: dict[Key, Tensor] = {}

    def pin(self, tensors: Mapping[Key, Tensor]) -> None:
        """Allocate pinned buffers for the tensors that have none. Only shapes and dtypes matter.

        Raises:
            MemoryError: one line.
        """
        missing = {key: tensor for key, tensor in tensors.items() if not self._has_buffer(key, tensor)}
        for size, keys in pack_chunks({key: tensor.nbytes for key, tensor in missing.items()}):
            try:
                chunk, start = torch.empty(size, dtype=torch.uint8, pin_memory=True), 0
            except RuntimeError as error:
                total = sum(tensor.nbytes for tensor in missing.values())
                raise MemoryError(
                    f"saves copy the state of the run to {total / 1e9:.1f} GB of pinned (page-locked) memory, which "
                    f"this machine cannot give: {str(error).splitlines()[0]}"
                ) from error
            for key in keys:
                buffer = chunk[start : start + missing[key].nbytes]
                self._buffers[key] = buffer.view(missing[key].dtype).view(missing[key].shape)
                start += _aligned(buffer.nbytes)

    def buffer(self, key: Key, tensor: Tensor) -> Tensor:
        """The buffer for the copy of a tensor, allocated if there is none."""
        if has_pinned_memory(tensor.device):
            self.pin({key: tensor})
        elif not self._has_buffer(key, tensor):
            self._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return self._buffers[key]

    def _has_buffer(self, key: Key, tensor: Tensor) -> bool:
        buffer = self._buffers.get(key)
        return buffer is not None and (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype)


class Snapshot:
    """Copies of all tensors of a state, and its JSON values.

    The constructor starts the copies from an accelerator to pinned memory; work queued later on the accelerator cannot
    change them. `finish` copies the tensors on the CPU and may run in another thread; until it returns, these tensors
    must not change.

    Args:
        parts: Nested dicts of tensors, JSON values, and functions that return a tensor, which is copied at once.
        buffers: Hold the copies; those of older snapshots are overwritten.
        keep: Whether this process needs the copies; if not, it only calls the functions, which are collective.
    """

    def __init__(self, parts: Mapping[str, Tree], *, buffers: CopyBuffers | None = None, keep: bool = True) -> None:
        self.tensors: dict[str, dict[str, Tensor]] = {name: {} for name in parts}
        self._buffers = CopyBuffers() if buffers is None else buffers
        self._to_copy: dict[Key, Tensor] = {}
        self._event: torch.Event | None = None
        self._finished = threading.Event()
        values = separate_tensors(parts, self._add_tensor if keep else lambda *_: None)
        device_tensors = {key: tensor for key, tensor in self._to_copy.items() if tensor.device.type != "cpu"}
        self._buffers.pin({key: tensor for key, tensor in device_tensors.items() if has_pinned_memory(tensor.device)})
        for key in device_tensors:
            self._copy(key, self._to_copy.pop(key))
        # The conversion to JSON and back copies the values, and raises now if a value could not be written later.
        self.values: dict[str, Tree] = json.loads(json.dumps(values)) if keep else {}
        if any(tensor.is_pinned() for part in self.tensors.values() for tensor in part.values()):
            self._event = torch.Event(torch.accelerator.current_accelerator())
            self._event.record()

    def _add_tensor(self, key: Key, tensor: Tensor, is_fetched: bool) -> None:
        if is_fetched:
            self._copy(key, tensor)
        else:
            self._to_copy[key] = tensor

    def _copy(self, key: Key, tensor: Tensor) -> None:
        """Copy a tensor, or start its transfer from an accelerator. The tensor's memory may then be reused at once,
        because work that is queued later runs after the transfer."""
        (part, name), copy = key, self._buffers.buffer(key, tensor)
        self.tensors[part][name] = copy.copy_(tensor, non_blocking=copy.is_pinned())

    def finish(self) -> None:
        """Complete the copies. Called once, by one thread."""
        try:
            for key, tensor in self._to_copy.items():
                self._copy(key, tensor)
            if self._event is not None:
                self._event.synchronize()
        finally:
            self._to_copy = {}
            self._finished.set()

    def wait(self) -> None:
        """Return when the state may change again."""
        self._finished.wait()


def separate_tensors(
    tree: Mapping[str, Any], visit: Callable[[Key, Tensor, bool], object], path: tuple[str, ...] = ()
) -> dict[str, Tree]:
    """The JSON values of a state, which are nested as the state is. `visit` is called with the key of each tensor, the
    tensor, and whether a function has returned it."""
    values: Tree = {}
    for name, value in tree.items():
        assert isinstance(name, str) and "/" not in name, f"{name!r} in {path} must be a string without '/'"
        leaf = value() if callable(value) else value
        if isinstance(leaf, Mapping):
            values[name] = separate_tensors(leaf, visit, (*path, name))
        elif isinstance(leaf, Tensor):
            part, *names = (*path, name)
            visit((part, "/".join(names)), leaf.detach(), callable(value))
        else:
            values[name] = leaf
    return values


def pinned_shapes(parts: Mapping[str, Tree]) -> dict[Key, Tensor]:
    """Meta tensors with the shapes of all tensors that a snapshot copies to pinned memory. Collective."""
    shapes: dict[Key, Tensor] = {}

    def record(key: Key, tensor: Tensor, _: bool) -> None:
        if has_pinned_memory(tensor.device):
            shapes[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    separate_tensors(parts, record)
    return shapes


def pack_chunks(sizes: Mapping[Any, int]) -> Iterator[tuple[int, Sequence[Any]]]:
    """Pack aligned blocks of these sizes (bytes) into chunks of memory. Yields the size of each chunk, a power of two,
    and the keys of its blocks in their order: large blocks come first, smaller ones fill the rest."""
    remaining = {key: _aligned(size) for key, size in sorted(sizes.items(), key=lambda item: -item[1])}
    max_unused = sum(remaining.values()) * _MAX_UNUSED
    while remaining:
        total, largest = sum(remaining.values()), next(iter(remaining.values()))
        size = _power_of_two(total)
        if size - total > max_unused:
            size //= 2
        size = free = max(min(size, _CHUNK_BYTES), _power_of_two(largest))
        keys = []
        for key, block_size in remaining.items():
            if block_size <= free:
                keys.append(key)
                free -= block_size
        for key in keys:
            del remaining[key]
        yield size, keys


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`; 0 for 0."""
    return 1 << (size - 1).bit_length() if size else 0
