"""Moving averages of a model's weights: exponential, or with a power of time as their profile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .profiles import exponent_of

if TYPE_CHECKING:
    from distributed import Engine

    from .cascade import Cascade

Gathered = Callable[[], AbstractContextManager[Any]]

_TENSORS_AT_ONCE = 32  # moved by the same launches on a GPU; their differences are the memory that an update takes


class AveragedModel:
    """An average of the weights in fp32, of which each process holds as much as of the weights themselves: where these
    are sharded a part of each, so that an update of the average sends nothing and takes no memory for whole weights.

    Args:
        weights: Those to average, of an engine or a cascade of engines. The average starts from a copy of them.
    """

    def __init__(self, weights: Engine | Cascade) -> None:
        self._weights = weights
        self.module = weights.blank_copy().eval()
        self._parameters = dict(self.module.named_parameters())
        held = weights.held_weights()
        self._held = {name: held[name].detach().to(torch.float32, copy=True) for name in self._parameters}
        self.device = next(iter(self._held.values())).device
        self._let_go()

    @contextmanager
    def gathered(self) -> Iterator[Any]:
        """The averaged model, whole on every process, to read and evaluate, not to change. Collective."""
        for name, parameter in self._parameters.items():
            parameter.data = self._weights.whole_weight(name, self._held[name])
        try:
            yield self.module
        finally:
            self._let_go()

    @torch.no_grad()
    def move_towards(self, held: Mapping[str, Tensor], share: Tensor) -> None:
        """Move a share of the way, 0-d and on the device, to these weights, of which `held` is what this process holds;
        copy the buffers."""
        share, names = share.float(), list(self._held)
        for start in range(0, len(names), _TENSORS_AT_ONCE):
            averages = [self._held[name] for name in names[start : start + _TENSORS_AT_ONCE]]
            targets = [held[name].to(self._held[name]) for name in names[start : start + _TENSORS_AT_ONCE]]
            if self.device.type == "cpu":  # one pass over the memory
                torch._foreach_lerp_(averages, targets, [share] * len(averages))
            else:  # three kernels; lerp with a share that is on the device has one for each weight
                steps = torch._foreach_sub(targets, averages)
                torch._foreach_mul_(steps, share)
                torch._foreach_add_(averages, steps)
        for name, buffer in self.module.named_buffers():
            if name in held:
                buffer.copy_(held[name])

    def state(self) -> dict[str, Any]:
        """Averages and buffers by name. A weight that is spread over the processes is a function that returns it whole;
        all processes call these functions in the same order."""
        whole, is_sharded = self._weights.whole_weight, self._weights.is_sharded
        held = {name: partial(whole, name, part) if is_sharded else part for name, part in self._held.items()}
        return {name: held.get(name, tensor) for name, tensor in self.module.state_dict().items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take whole weights and buffers from `state`. Raises ValueError if its names or shapes are not the model's."""
        mine = {**self.module.state_dict(), **self._held}
        if odd := sorted(mine.keys() ^ state.keys()):
            lack = "missing" if odd[0] in mine else "not a weight of the model"
            raise ValueError(f"the averaged weights do not fit the model: {odd[0]} is {lack} ({len(odd)} in all)")
        for name, tensor in mine.items():
            try:
                part = self._weights.held_part(name, state[name]) if name in self._held else state[name]
                if part.shape != tensor.shape:
                    raise ValueError(f"the shape {tuple(part.shape)} is not the model's {tuple(tensor.shape)}")
            except ValueError as error:
                raise ValueError(f"the averaged weights do not fit the model: {name}: {error}") from None
            tensor.copy_(part)

    def _let_go(self) -> None:
        for parameter in self._parameters.values():
            parameter.data = parameter.data.new_empty(0)


class _Count:
    """Number of updates that an average holds. Skipped ones change no weights and do not count. The number is on the
    device, where it is known which updates are skipped, so that the host does not wait; `int` of it makes it wait."""

    def __init__(self, device: torch.device) -> None:
        self._number = torch.zeros((), dtype=torch.float64, device=device)

    def __int__(self) -> int:
        return int(self._number)

    def start_from(self, number: int) -> None:
        self._number.fill_(number)

    def next(self, skipped: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Count an update, unless one of these flags (0-d bool) is set. Returns whether it counts, and the number."""
        is_made = torch.ones_like(self._number, dtype=torch.bool)
        for flag in skipped:
            is_made = is_made & ~flag.to(is_made.device)
        self._number += is_made
        return is_made, self._number


class _Averages(ABC):
    """Averages of the same weights by name, each of which starts from a copy of them; the run keeps the first."""

    def __init__(self, weights: Engine | Cascade, names: Sequence[str]) -> None:
        self._weights = weights
        self._averages = {name: AveragedModel(weights) for name in names}
        self._updates = _Count(self._averages[names[0]].device)

    def update(self, *skipped: Tensor) -> None:
        """Add the weights after one update, unless one of these flags (0-d bool) says that it was skipped, as that of
        an engine's `Update`. Collective."""
        is_made, n = self._updates.next(skipped)
        held = self._weights.held_weights()
        for name, average in self._averages.items():
            average.move_towards(held, torch.where(is_made, self._share(name, n), 0.0))

    def averages(self) -> dict[str, Gathered]:
        """Models to evaluate beside the trained one, by name ("ema", or "ema_0.05" for each length): in the context of
        averages()[name]() the averaged model is whole on every process. Collective."""
        return {name: average.gathered for name, average in self._averages.items()}

    def state_dict(self) -> dict[str, Any]:
        """`live_state` with the tensors themselves. Collective."""
        return _fetched(self.live_state())

    @abstractmethod
    def live_state(self) -> dict[str, Any]:
        """The count of updates and the averaged weights; those that are sharded as functions that return them whole."""

    @abstractmethod
    def _share(self, name: str, n: Tensor) -> Tensor:
        """How far update n moves an average towards the weights."""


class ExponentialMovingAverage(_Averages):
    """Average a <- d a + (1 - d) w after every update, with d = min(decay, (1 + n) / (10 + n)) at update n = 1, 2, ...

    The smaller d of the first updates removes the random initial weights from the average sooner; it is the rule of
    TensorFlow's `tf.train.ExponentialMovingAverage(num_updates=...)`. Buffers are copied, not averaged.

    Args:
        weights: Those to average, of an engine or a cascade of engines; the average starts from a copy of them.
        decay: Largest weight d of the old average, in (0, 1).
    """

    def __init__(self, weights: Engine | Cascade, decay: float) -> None:
        assert 0 < decay < 1, decay
        super().__init__(weights, ["ema"])
        self.decay = decay

    def _share(self, name: str, n: Tensor) -> Tensor:
        return (9 / (10 + n)).clamp_min(1 - self.decay)

    def live_state(self) -> dict[str, Any]:
        return {"updates": int(self._updates), "weights": self._averages["ema"].state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore count and weights; missing or unexpected names are a ValueError."""
        if not state:
            raise ValueError("the checkpoint holds no average of the weights: continue with --ema_decay 0")
        if "powers" in state:
            raise ValueError(f"the checkpoint holds averages of another kind: continue with {_flag_of(state)}")
        self._averages["ema"].restore(state["weights"])
        self._updates.start_from(state["updates"])


class PowerAverages(_Averages):
    """Averages whose profile is a power of time: the weights of update k of n count in proportion to
    k^(g+1) - (k-1)^(g+1), about k^g. So an average grows with the run, and forgets the initial weights at once.

    a <- b a + (1 - b) w after update n = 1, 2, ..., with b = (1 - 1 / n)^(g + 1); Karras et al. 2024, section 3.1. The
    exponent g follows from the length, see `training.profiles.exponent_of`. Buffers are copied, not averaged.

    Args:
        weights: Those to average, of an engine or a cascade of engines.
        lengths: Relative lengths of the averages: the standard deviation of the profile, as a fraction of the run. The
            run keeps the average of the first one.

    Raises:
        ValueError: a length is given twice.
    """

    def __init__(self, weights: Engine | Cascade, lengths: Sequence[float]) -> None:
        names = [f"{length:g}" for length in lengths]
        if len(set(names)) < len(names):
            raise ValueError(f"--ema_power {' '.join(names)}: give each length once")
        self._exponents = {f"ema_{name}": exponent_of(float(name)) for name in names}
        super().__init__(weights, [*self._exponents])

    def _share(self, name: str, n: Tensor) -> Tensor:
        return 1 - (1 - 1 / n) ** (self._exponents[name] + 1)

    def live_state(self) -> dict[str, Any]:
        """The count of updates, and the averaged weights by length; those that are sharded as functions that return
        them whole."""
        powers = {name.removeprefix("ema_"): {"weights": of.state()} for name, of in self._averages.items()}
        return {"updates": int(self._updates), "powers": powers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore count and weights; other lengths than those of the state are a ValueError, as are missing or
        unexpected names."""
        if not state:
            raise ValueError("the checkpoint holds no average of the weights: continue without --ema_power")
        if {f"ema_{length}" for length in state.get("powers", ())} != set(self._averages):
            raise ValueError(f"the checkpoint holds other averages: continue with {_flag_of(state)}")
        for name, average in self._averages.items():
            average.restore(state["powers"][name.removeprefix("ema_")]["weights"])
        self._updates.start_from(state["updates"])


class NoAverage:
    """Takes the place of the average where none is asked for: the run keeps the trained model itself."""

    def update(self, *skipped: Tensor) -> None:
        pass

    def averages(self) -> dict[str, Gathered]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ValueError(
                f"the checkpoint holds an average of the weights, which would be dropped: set {_flag_of(state)}"
            )


Average = ExponentialMovingAverage | PowerAverages | NoAverage


def make_ema(weights: Engine | Cascade, decay: float, lengths: Sequence[float] | None = None) -> Average:
    """The averages of an engine's `weights` with these `lengths` (--ema_power), or the one with this `decay`
    (--ema_decay), or none for no length and 0."""
    if lengths:
        return PowerAverages(weights, lengths)
    return ExponentialMovingAverage(weights, decay) if decay > 0 else NoAverage()


def kept_weights(engine: Engine | Cascade, average: Average) -> AbstractContextManager[Any]:
    """Context of the model that the run keeps, whole on every process, to read and evaluate, not to change: the first
    average of the engine's weights, or these where there is none. Collective."""
    return next(iter(average.averages().values()), engine.gathered)()


def kept_metric(average: Average, name: str) -> str:
    """What a metric of a validation of that model is called: "valid/ema/psnr", or "valid/psnr" without an average."""
    return "/".join(["valid", *list(average.averages())[:1], name])


def _fetched(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with tensors in the places of the functions that return them."""
    return {
        key: _fetched(value) if isinstance(value, Mapping) else value() if callable(value) else value
        for key, value in state.items()
    }


def _flag_of(state: Mapping[str, Any]) -> str:
    """The flag with which a run has made this state."""
    return f"--ema_power {' '.join(state['powers'])}" if "powers" in state else "--ema_decay"
