"""The state of a run at one moment, on the CPU, taken while training goes on."""

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .format import Tree


class Snapshot:
    """Copies of all tensors of a state, and its JSON values.

    Tensors on an accelerator are on their way to pinned memory when the constructor returns, ordered before whatever
    the accelerator is told to do next. Those on the CPU are copied by `finish`, which may run in a thread of its own:
    until it is through, they must not change.

    Args:
        parts: Nested dicts of tensors, JSON values, and functions that fetch a tensor which nobody else will change.
        reuse: A snapshot that is not needed any more, whose memory this one takes over.
        keep: Whether this process wants the result. Fetching is collective: the others call along.
    """

    def __init__(self, parts: Mapping[str, Tree], *, reuse: "Snapshot | None" = None, keep: bool = True) -> None:
        self.tensors: dict[str, dict[str, Tensor]] = {name: {} for name in parts}
        self._keep = keep
        self._buffers = reuse.tensors if reuse is not None else {}
        self._to_copy: list[tuple[str, str, Tensor]] = []
        self._finished = threading.Event()
        values = {name: self._split(name, part, ()) for name, part in parts.items()}
        # A copy, and the certainty that it can be written.
        self.values: dict[str, Tree] = json.loads(json.dumps(values)) if keep else {}
        self._event = self._start_transfers()

    def _split(self, part: str, tree: Mapping[str, Any], path: tuple[str, ...]) -> Tree:
        """`tree` without its tensors, which are taken under their '/'-joined path."""
        values: Tree = {}
        for key, value in tree.items():
            assert isinstance(key, str) and "/" not in key, f"{key!r} in {path} must be a string without '/'"
            name = "/".join((*path, key))
            if callable(value):
                fetched = value()
                if self._keep:
                    self.tensors[part][name] = fetched.detach().to("cpu").contiguous()
            elif isinstance(value, Tensor):
                if self._keep:
                    self._to_copy.append((part, name, value.detach()))
            elif isinstance(value, Mapping):
                values[key] = self._split(part, value, (*path, key))
            else:
                values[key] = value
        return values

    def _start_transfers(self) -> "torch.cuda.Event | None":
        on_device = [entry for entry in self._to_copy if entry[2].device.type == "cuda"]
        if not on_device:
            return None
        self._to_copy = [entry for entry in self._to_copy if entry[2].device.type != "cuda"]
        for part, name, tensor in on_device:
            self._buffer(part, name, tensor, pin_memory=True).copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return event

    def _buffer(self, part: str, name: str, tensor: Tensor, *, pin_memory: bool = False) -> Tensor:
        """Memory for the copy of a tensor: that of the snapshot before, where it fits."""
        buffer = self._buffers.get(part, {}).pop(name, None)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin_memory)
        self.tensors[part][name] = buffer
        return buffer

    def finish(self) -> None:
        """Complete the copies. Called once, by one thread."""
        try:
            for part, name, tensor in self._to_copy:
                self._buffer(part, name, tensor).copy_(tensor)
            if self._event is not None:
                self._event.synchronize()
        finally:
            self._to_copy, self._buffers = [], {}
            self._finished.set()

    def wait(self, mark: Callable[[], None] = lambda: None) -> None:
        """Return when the state may change again; `mark` is called now and then meanwhile."""
        while not self._finished.wait(1.0):
            mark()
