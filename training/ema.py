"""Moving averages of a model's weights: exponential, or with a power of time as their profile."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from .profiles import exponent_of

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
        self.module = _frozen_copy(module)

    @torch.no_grad()
    def update(self, gathered: Gathered) -> None:
        """Add the weights after one update. Collective. In the context `gathered()` every process holds a module with
        the full fp32 weights."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        with gathered() as module:
            _move_towards(self.module, module, 1 - decay)

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
        if "powers" in state:
            raise ValueError(f"the checkpoint holds averages of another kind: continue with {_flag_of(state)}")
        _restore(self.module, state["weights"])
        self.updates = state["updates"]


class PowerAverages:
    """Averages whose profile is a power of time: the weights of update k of n count in proportion to
    k^(g+1) - (k-1)^(g+1), about k^g. So an average grows with the run, and forgets the initial weights at once.

    a <- b a + (1 - b) w after update n = 1, 2, ..., with b = (1 - 1 / n)^(g + 1); Karras et al. 2024, section 3.1. The
    exponent g follows from the length, see `training.profiles.exponent_of`. Buffers are copied, not averaged.

    Args:
        module: The model before it is wrapped or sharded.
        lengths: Relative lengths of the averages: the standard deviation of the profile, as a fraction of the run. The
            run keeps the average of the first one.

    Raises:
        ValueError: a length is given twice.
    """

    def __init__(self, module: nn.Module, lengths: Sequence[float]) -> None:
        names = [f"{length:g}" for length in lengths]
        if len(set(names)) < len(names):
            raise ValueError(f"--ema_power {' '.join(names)}: give each length once")
        self.updates = 0
        self._exponents = {name: exponent_of(float(name)) for name in names}
        self._modules = {name: _frozen_copy(module) for name in names}

    @torch.no_grad()
    def update(self, gathered: Gathered) -> None:
        """Add the weights after one update. Collective; see `ExponentialMovingAverage.update`."""
        self.updates += 1
        with gathered() as module:
            for name, average in self._modules.items():
                _move_towards(average, module, 1 - (1 - 1 / self.updates) ** (self._exponents[name] + 1))

    def averages(self) -> dict[str, Any]:
        """Models to evaluate beside the trained one, by name: {"ema_0.05": an averaged model, ...}."""
        return {f"ema_{name}": module for name, module in self._modules.items()}

    def kept(self, module: Any) -> Any:
        """The model that the run keeps: the average of the first length."""
        return next(iter(self._modules.values()))

    def state_dict(self) -> dict[str, Any]:
        """The count of updates, and the averaged weights by length."""
        powers = {name: {"weights": module.state_dict()} for name, module in self._modules.items()}
        return {"updates": self.updates, "powers": powers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore count and weights; other lengths than those of the state are a ValueError, as are missing or
        unexpected names."""
        if not state:
            raise ValueError("the checkpoint holds no average of the weights: continue without --ema_power")
        if set(state.get("powers", ())) != set(self._modules):
            raise ValueError(f"the checkpoint holds other averages: continue with {_flag_of(state)}")
        for name, module in self._modules.items():
            _restore(module, state["powers"][name]["weights"])
        self.updates = state["updates"]


class NoAverage:
    """Takes the place of the average where none is asked for: the run keeps the trained model itself."""

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
            raise ValueError(
                f"the checkpoint holds an average of the weights, which would be dropped: set {_flag_of(state)}"
            )


Average = ExponentialMovingAverage | PowerAverages | NoAverage


def make_ema(module: nn.Module, decay: float, lengths: Sequence[float] | None = None) -> Average:
    """The averages of `module` with these `lengths` (--ema_power), or the one with this `decay` (--ema_decay), or none
    for no length and 0."""
    if lengths:
        return PowerAverages(module, lengths)
    return ExponentialMovingAverage(module, decay) if decay > 0 else NoAverage()


def _frozen_copy(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).float().eval().requires_grad_(False)


def _move_towards(average: nn.Module, module: nn.Module, share: float) -> None:
    """Move the parameters of `average` by a share of the way to those of `module`, and copy the buffers."""
    tensors = module.state_dict()
    averages = dict(average.named_parameters())
    weights = [tensors[name].to(parameter) for name, parameter in averages.items()]
    torch._foreach_lerp_(list(averages.values()), weights, share)
    for name, buffer in average.named_buffers():
        if name in tensors:
            buffer.copy_(tensors[name])


def _restore(module: nn.Module, weights: Mapping[str, Any]) -> None:
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"the averaged weights do not fit the model: {' '.join(str(error).split())}") from None


def _flag_of(state: Mapping[str, Any]) -> str:
    """The flag with which a run has made this state."""
    return f"--ema_power {' '.join(state['powers'])}" if "powers" in state else "--ema_decay"
