"""The values of an update for its line of metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from PIL import Image
from torch import Tensor

from tandem.devices import double
from tandem.training.metrics.averages import code_statistics, count_codes
from tandem.training.metrics.directions import COSTS
from tandem.training.visuals.images import code_histogram

from .clock import Clock, peak_memory
from .operations import Operations

if TYPE_CHECKING:
    from tandem.distributed import ProcessGroup
    from tandem.distributed.engines.base import Update

    from .progress import Progress


class Metrics:
    """Losses and other values of the update that is being made. Nothing is computed for an update without a line.

    Args:
        every_n_steps: Updates between two lines; the last update has one in any case.
        draw_codes_every_n_steps: Updates between two histograms of the codes of a batch, for a run without a validation
            split (0: only at the end); None: no histograms.
    """

    def __init__(
        self,
        every_n_steps: int,
        progress: Progress,
        processes: ProcessGroup,
        grad_accum_steps: int,
        clock: Clock,
        operations: Operations,
        draw_codes_every_n_steps: int | None = None,
    ) -> None:
        self._draw_codes_every = draw_codes_every_n_steps
        self._histogram: Image.Image | None = None
        self._every, self._progress, self._processes, self._clock = every_n_steps, progress, processes, clock
        self._grad_accum_steps, self._operations = grad_accum_steps, operations
        self._sums: dict[str, Tensor] = {}
        self._values: dict[str, Any] = {}

    @property
    def is_line_due(self) -> bool:
        """Whether a line follows the update that is being made."""
        return self._progress.due(self._every, ahead=1)

    @property
    def are_codes_due(self) -> bool:
        """Whether `log_codes` needs the codes of the update that is being made."""
        return self.is_line_due or self._is_histogram_due

    @property
    def _is_histogram_due(self) -> bool:
        return self._draw_codes_every is not None and self._progress.due(self._draw_codes_every, ahead=1)

    def add(self, **losses: Tensor) -> None:
        """Record losses (0-d) of a micro-batch: the line has their means over all micro-batches and processes."""
        if self.is_line_due:
            for name, loss in losses.items():
                # fp64: the same sum however the batch is spread over processes and micro-batches.
                share = double(loss.detach()) / self._grad_accum_steps
                self._sums[name] = self._sums[name] + share if name in self._sums else share

    def log(self, update: Update | None = None, /, **values: Any) -> None:
        """Record the result of an engine's step and other values of this update: numbers or 0-d tensors, equal on all
        processes. Tensors are read only if a line follows."""
        if self.is_line_due:
            step_values = {"lr": update.lr, "grad_norm": update.grad_norm} if update else {}
            self._values |= {**values, **step_values}

    def log_codes(self, codes: Sequence[Tensor], num_codes: int) -> None:
        """Record the codes of this update's micro-batches, integers of any shape below `num_codes`: the line has their
        statistics, and `pictures` their histogram. Collective if `are_codes_due`; otherwise, and for a model without
        codes, it does nothing."""
        if self.are_codes_due and num_codes:
            counts = count_codes(codes, num_codes, self._processes.sum)
            self.log(**code_statistics(counts))
            if self._is_histogram_due and self._processes.is_root:
                self._histogram = code_histogram(counts)

    def pictures(self) -> Iterator[tuple[str, Image.Image]]:
        """Pictures of the newest update and their names, on the root; each is yielded only once."""
        if self._histogram is not None:
            yield "codes", self._histogram
        self._histogram = None

    def line(self, skipped_updates: int) -> dict[str, Any]:
        """The values recorded for the newest update, and its costs. Collective."""
        values = {name: value.item() if isinstance(value, Tensor) else value for name, value in self._values.items()}
        means = self._processes.mean({**self._sums, **self._clock.waits(), "flops": self._operations.mean_since_line()})
        flops = means.pop("flops") * self._processes.world_size / self._progress.batch_size
        operations = {} if math.isnan(flops) else {"gflop_per_sample": float(f"{flops / 1e9:.6g}")}
        waits = {name: round(means.pop(name), 3) for name in [*means] if name in COSTS}
        self._sums, self._values = {}, {}
        costs = {**operations, **waits, **peak_memory(self._processes.device)}
        return {**means, **values, "skipped_updates": skipped_updates, **costs}
