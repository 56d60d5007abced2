"""Updates with non-finite values: skipped by every process, counted on the device, explained when they stop the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import TrainingStopped


class SkipGuard:
    """Counts skipped updates and stops the run after ``limit`` in a row, naming rank and tensor.

    The gradient norm decides: it is non-finite on every process as soon as one process has one non-finite gradient (a
    non-finite loss makes its gradients NaN), so all processes agree without another message. On an accelerator the
    count is read one update late, so that the host never waits for it.
    """

    def __init__(
        self, watched: Callable[[], Iterable[tuple[str, Any]]], limit: int, device: torch.device,
        gather_objects: Callable[[Any], list[Any]],
    ) -> None:  # fmt: skip
        self._watched, self._limit, self._device, self._gather = watched, limit, device, gather_objects
        self._in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.total = torch.zeros((), dtype=torch.int64, device=device)
        self._reading: tuple[Tensor, Any] | None = None  # a copy to the host that is under way, and its event
        self._findings: list[str] = []
        self._hooks: list[Any] = []
        if limit <= 1:
            self._watch()

    def poison(self, loss: Tensor, factor: Tensor | float) -> Tensor:
        """The gradient to start backward with: ``factor``, or NaN if the loss is not finite."""
        if self._hooks and not bool(torch.isfinite(loss.detach()).all()):
            self._findings.insert(0, f"the loss is {loss.detach().float().mean().item()}")
        if not isinstance(factor, Tensor):
            factor = torch.full((), factor, device=loss.device)  # filled on the device: no copy, no wait
        factor = factor.to(loss.dtype)
        return torch.where(torch.isfinite(loss.detach()), factor, torch.nan)

    def after_update(self, finite: Tensor, update: int) -> None:
        """Count update number ``update``; ``finite`` is a bool tensor, the same on every process.

        Raises:
            TrainingStopped: ``limit`` updates in a row were skipped.
        """
        self._in_a_row = torch.where(finite, 0, self._in_a_row + 1)
        self.total += ~finite
        in_a_row = self._read()
        if in_a_row >= max(self._limit, 1):
            self._stop(in_a_row, update)
        if in_a_row and not self._hooks:
            self._watch()
        elif not in_a_row and self._limit > 1:
            self._unwatch()
        self._findings = []

    def _read(self) -> int:
        if self._device.type == "cpu" or self._hooks:  # after a skipped update the exact count matters more than speed
            return int(self._in_a_row)
        value = 0
        if self._reading is not None:
            copy, event = self._reading
            # The copy began an update ago, so this hardly waits. All processes read the count after the same update.
            event.synchronize()
            value = int(copy)
        copy = torch.empty((), dtype=torch.int64, pin_memory=True)
        copy.copy_(self._in_a_row, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._reading = (copy, event)
        return value

    def _watch(self) -> None:
        """From now on look at each local gradient before the processes' gradients are summed."""
        self._reading = None
        for name, parameter in self._watched():
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(partial(self._look_at, name)))

    def _unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _look_at(self, name: str, grad: Tensor) -> None:
        # The first non-finite gradient in backward order is nearest to the cause.
        if not self._findings and not bool(torch.isfinite(grad).all()):
            kind = "nan" if bool(torch.isnan(grad).any()) else "inf"
            self._findings.append(f"the gradient of {name} holds {kind}")

    def _stop(self, in_a_row: int, update: int) -> None:
        by_rank = self._gather(self._findings[:1])
        found = [f"rank {rank}: {what[0]}" for rank, what in enumerate(by_rank) if what]
        raise TrainingStopped(
            f"{in_a_row} updates in a row were skipped because of non-finite values, the last at update {update}: "
            + ("; ".join(found) or "only the sum over the processes is not finite")
            + ". The weights are those of the last good update; try a lower learning rate, --max_grad_norm, or fp32"
        )
