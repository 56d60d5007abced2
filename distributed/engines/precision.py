"""Forward precision (autocast around fp32 weights) and, for fp16, the dynamic loss scale."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def autocast(precision: str, device: torch.device) -> Iterator[None]:
    """The context of a forward pass: matrix products and convolutions in ``precision``, weights and losses in fp32.
    It can also decorate a function."""
    dtype = DTYPES[precision]
    if dtype == torch.float32:
        yield
    else:
        with torch.autocast(device.type, dtype=dtype):
            yield


class LossScaler:
    """Keeps small fp16 gradients above zero: the loss of a backward call x scale, gradients / scale.

    The scale halves after a non-finite update and doubles after ``growth_interval`` finite ones (Micikevicius et
    al. 2018, section 3.2). It stays on the device, so that the host need not wait. With ``enabled=False`` the scale is
    always 1.
    """

    def __init__(
        self, enabled: bool, device: torch.device, *, initial: float = 2.0**16, growth_interval: int = 2000
    ) -> None:
        self.enabled, self.growth_interval = enabled, growth_interval
        self.scale = torch.tensor(initial if enabled else 1.0, device=device)
        self._finite_in_a_row = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, finite: Tensor) -> None:
        """Adapt after an update; ``finite`` (0-d bool on the device): the update was made, not skipped."""
        if not self.enabled:
            return
        self._finite_in_a_row = torch.where(finite, self._finite_in_a_row + 1, 0)
        grow = self._finite_in_a_row >= self.growth_interval
        self._finite_in_a_row = torch.where(grow, 0, self._finite_in_a_row)
        factor = torch.where(finite, torch.where(grow, 2.0, 1.0), 0.5)
        self.scale = (self.scale * factor).clamp(1.0, 2.0**24)

    def state_dict(self) -> dict[str, float]:
        return {"scale": float(self.scale), "finite_in_a_row": int(self._finite_in_a_row)} if self.enabled else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self.enabled and state:
            self.scale.fill_(state["scale"])
            self._finite_in_a_row.fill_(int(state.get("finite_in_a_row", 0)))
