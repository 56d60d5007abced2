"""A copy of the state of a run on the CPU, made while training goes on."""

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .format import Tree

# PyTorch rounds each piece of pinned memory up to a power of two, so tensors share pieces of this size.
_SLAB_BYTES = 1 << 26
_ALIGNMENT_BYTES = 64


class Snapshot:
    """Copies of all tensors of a state, and its JSON values.

    The constructor starts the copies from an accelerator to pinned memory; work queued later on the accelerator cannot
    change them. `finish` copies the tensors on the CPU and may run in another thread; until it returns, these tensors
    must not change.

    Args:
        parts: Nested dicts of tensors, JSON values, and functions that fetch a tensor. What they return is copied
            before anything else happens.
        reuse: An older snapshot that is no longer needed, whose memory is used again.
        keep: Whether this process needs the copies; if not, it makes none. All processes call the functions, because
            they are collective.
    """

    def __init__(self, parts: Mapping[str, Tree], *, reuse: "Snapshot | None" = None, keep: bool = True) -> None:
        self.tensors: dict[str, dict[str, Tensor]] = {name: {} for name in parts}
        self._keep = keep
        self._memory: _Memory = _Memory(reuse._memory.slabs if reuse is not None else ())
        self._to_copy: list[tuple[str, str, Tensor]] = []
        self._event: torch.cuda.Event | None = None
        self._finished = threading.Event()
        values = {name: self._split(name, part, ()) for name, part in parts.items()}
        # The conversion to JSON and back copies the values, and raises now if a value could not be written later.
        self.values: dict[str, Tree] = json.loads(json.dumps(values)) if keep else {}
        if self._memory.is_pinned:
            self._event = torch.cuda.Event()
            self._event.record()

    def _split(self, part: str, tree: Mapping[str, Any], path: tuple[str, ...]) -> Tree:
        """The JSON values of `tree`; its tensors are copied, or wait for it, under their path, joined with '/'."""
        values: Tree = {}
        for key, value in tree.items():
            assert isinstance(key, str) and "/" not in key, f"{key!r} in {path} must be a string without '/'"
            name = "/".join((*path, key))
            is_fetched = callable(value)
            found = value() if is_fetched else value
            if isinstance(found, Mapping):
                values[key] = self._split(part, found, (*path, key))
            elif not isinstance(found, Tensor):
                values[key] = found
            elif self._keep and (is_fetched or found.device.type == "cuda"):
                self._copy(part, name, found.detach())
            elif self._keep:
                self._to_copy.append((part, name, found.detach()))
        return values

    def _copy(self, part: str, name: str, tensor: Tensor) -> None:
        """Copy a tensor, or start its transfer from an accelerator: the accelerator's memory may be used for something
        else at once, because that is queued after the transfer."""
        self.tensors[part][name] = self._memory.like(tensor).copy_(tensor, non_blocking=True)

    def finish(self) -> None:
        """Complete the copies. Called once, by one thread."""
        try:
            for part, name, tensor in self._to_copy:
                self._copy(part, name, tensor)
            if self._event is not None:
                self._event.synchronize()
        finally:
            self._to_copy = []
            self._finished.set()

    def wait(self) -> None:
        """Return when the state may change again."""
        self._finished.wait()


class _Memory:
    """Few large pieces of memory on the CPU that many tensors share; pinned if it is for copies from an accelerator.

    Args:
        slabs: Pieces (bytes) of an older memory to be used again.
    """

    def __init__(self, slabs: Sequence[Tensor]) -> None:
        self.slabs = list(slabs)
        #: Whether a tensor came from an accelerator.
        self.is_pinned = False
        self._used = [0] * len(self.slabs)

    def like(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor on the CPU with the shape and type of `tensor`, and unknown values."""
        pin = tensor.device.type == "cuda"
        self.is_pinned |= pin
        aligned = -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        slab = self._with_room(aligned, pin)
        start = self._used[slab]
        self._used[slab] += aligned
        return self.slabs[slab][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def _with_room(self, size: int, pin: bool) -> int:
        """The number of the first slab that has room; of a new one if none has."""
        for number, slab in enumerate(self.slabs):
            if self._used[number] + size <= len(slab) and slab.is_pinned() == pin:
                return number
        n_bytes = max(_SLAB_BYTES, 1 << (size - 1).bit_length())  # the next power of two
        self.slabs.append(torch.empty(n_bytes, dtype=torch.uint8, pin_memory=pin))
        self._used.append(0)
        return len(self.slabs) - 1
