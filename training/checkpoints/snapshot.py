"""A copy of the state of a run on the CPU, made while training goes on."""

import json
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tandem.devices import has_pinned_memory

from .format import Tree


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
        self._old = reuse.tensors if reuse is not None else {}
        self._to_copy: list[tuple[str, str, Tensor]] = []
        self._event: torch.Event | None = None
        self._finished = threading.Event()
        values = {name: self._split(name, part, ()) for name, part in parts.items()}
        # The conversion to JSON and back copies the values, and raises now if a value could not be written later.
        self.values: dict[str, Tree] = json.loads(json.dumps(values)) if keep else {}
        if any(tensor.is_pinned() for part in self.tensors.values() for tensor in part.values()):
            self._event = torch.Event(torch.accelerator.current_accelerator())
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
            elif self._keep and (is_fetched or found.device.type != "cpu"):
                self._copy(part, name, found.detach())
            elif self._keep:
                self._to_copy.append((part, name, found.detach()))
        return values

    def _copy(self, part: str, name: str, tensor: Tensor) -> None:
        """Copy a tensor, or start its transfer from an accelerator: the accelerator's memory may be used for something
        else at once, because that is queued after the transfer."""
        copy = self._old.get(part, {}).get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            pin = has_pinned_memory(tensor.device)
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
        self.tensors[part][name] = copy.copy_(tensor, non_blocking=copy.is_pinned())

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
