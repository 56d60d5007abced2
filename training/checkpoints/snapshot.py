"""A copy of the state of a run on the CPU, made while training goes on."""

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .format import Tree


class Snapshot:
    """Copies of all tensors of a state, and its JSON values.

    The constructor starts the copies from an accelerator to pinned memory; work queued later on the accelerator cannot
    change them. `finish` copies the tensors on the CPU and may run in another thread; until it returns, these tensors
    must not change.

    Args:
        parts: Nested dicts of tensors, JSON values, and functions that return a tensor which does not change later.
        reuse: An older snapshot that is no longer needed, whose memory is used again.
        keep: Whether this process needs the copies. All processes call the functions, because they are collective.
    """

    def __init__(self, parts: Mapping[str, Tree], *, reuse: "Snapshot | None" = None, keep: bool = True) -> None:
        self.tensors: dict[str, dict[str, Tensor]] = {name: {} for name in parts}
        self._keep = keep
        self._buffers = reuse.tensors if reuse is not None else {}
        self._to_copy: list[tuple[str, str, Tensor]] = []
        self._finished = threading.Event()
        values = {name: self._split(name, part, ()) for name, part in parts.items()}
        # The conversion to JSON and back copies the values, and raises now if a value could not be written later.
        self.values: dict[str, Tree] = json.loads(json.dumps(values)) if keep else {}
        self._event = self._start_transfers()

    def _split(self, part: str, tree: Mapping[str, Any], path: tuple[str, ...]) -> Tree:
        """The JSON values of `tree`; its tensors are collected under their path, joined with '/'."""
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
        """Memory for the copy of a tensor: the older snapshot's if it fits."""
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
        """Return when the state may change again; `mark` is called now and then during the wait."""
        while not self._finished.wait(1.0):
            mark()
