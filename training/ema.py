"""Exponential moving average of a model's weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

Gathered = Callable[[], AbstractContextManager[nn.Module]]


class ExponentialMovingAverage:
    """Average a <- d a + (1 - d) w after every update, with d = min(decay, (1 + n) / (10 + n)) at update n = 1, 2, ...

    The smaller d of the first updates removes the random initial weights from the average sooner; it is the rule of
    TensorFlow's `tf.train.ExponentialMovingAverage(num_updates=...)`. Buffers are copied, not averaged.

    Args:
        module: The model before it is wrapped or sharded; the average starts from a copy of it.
        decay: Largest weight d of the old average, in (0, 1).
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        assert 0 < decay < 1, decay
        self.decay = decay
        self.updates = 0
        self.module = copy.deepcopy(module).float().eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, gathered: Gathered) -> None:
        """Add the weights after one update. Collective. In the context `gathered()` every process holds a module with
        the full fp32 weights."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        with gathered() as module:
            tensors = module.state_dict()
            averages = dict(self.module.named_parameters())
            weights = [tensors[name].to(average) for name, average in averages.items()]
            torch._foreach_lerp_(list(averages.values()), weights, 1 - decay)
            for name, buffer in self.module.named_buffers():
                if name in tensors:
                    buffer.copy_(tensors[name])

    def averages(self) -> dict[str, Any]:
        """Models to evaluate beside the trained one, by name: {"ema": the averaged model}."""
        return {"ema": self.module}

    def kept(self, module: Any) -> Any:
        """The model that the run keeps: the average, not the trained `module`."""
        return self.module

    def state_dict(self) -> dict[str, Any]:
        """The count of updates and the averaged weights."""
        return {"updates": self.updates, "weights": self.module.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore count and weights; missing or unexpected names are a ValueError."""
        if not state:
            raise ValueError("the checkpoint holds no average of the weights: continue with --ema_decay 0")
        try:
            self.module.load_state_dict(state["weights"])
        except RuntimeError as error:
            raise ValueError(f"the averaged weights do not fit the model: {' '.join(str(error).split())}") from None
        self.updates = state["updates"]


class NoAverage:
    """Takes the place of the average with `--ema_decay 0`: the run keeps the trained model itself."""

    def update(self, gathered: Gathered) -> None:
        pass

    def averages(self) -> dict[str, Any]:
        return {}

    def kept(self, module: Any) -> Any:
        return module

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ValueError("the checkpoint holds an average of the weights; --ema_decay 0 drops it: set --ema_decay")


def make_ema(module: nn.Module, decay: float) -> ExponentialMovingAverage | NoAverage:
    """The average of `module` with `decay`, or none for 0."""
    return ExponentialMovingAverage(module, decay) if decay > 0 else NoAverage()
