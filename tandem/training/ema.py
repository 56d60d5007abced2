"""Moving averages of a model's weights: exponential, or with a power of time as their profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tandem.devices import fp64_device

from .power_function import exponent_of

if TYPE_CHECKING:
    from tandem.distributed.engines.base import Engine

    from .cascade import Cascade

OpenModel = Callable[[], AbstractContextManager[Any]]

_LENGTH_PREFIX = "ema_"  # before the length, in the name of an average
_TENSORS_AT_ONCE = 32  # moved by the same launches on a GPU; their differences are the memory that an update takes


class AveragedModel:
    """An fp32 average of the weights, spread over the processes like the weights themselves: if they are sharded, an
    update of the average sends nothing and takes no memory for whole weights.

    Args:
        weights: An engine or a cascade of engines. The average starts from a copy of its weights.
    """

    def __init__(self, weights: Engine | Cascade) -> None:
        self._weights = weights
        self.module = weights.empty_copy().eval()
        self._parameters = dict(self.module.named_parameters())
        local_weights = weights.local_shards()
        self._local = {name: local_weights[name].detach().to(torch.float32, copy=True) for name in self._parameters}
        self.device = next(iter(self._local.values())).device
        self._empty_parameters()

    @contextmanager
    def full_weights(self) -> Iterator[Any]:
        """The averaged model, whole on every process, to read and evaluate, not to change. Collective."""
        for name, parameter in self._parameters.items():
            parameter.data = self._weights.unshard(name, self._local[name])
        try:
            yield self.module
        finally:
            self._empty_parameters()

    @torch.no_grad()
    def move_towards(self, local_weights: Mapping[str, Tensor], share: Tensor, part: str = "") -> None:
        """Move the averages of weights whose names begin with `part` by a `share` (0-d) of the way to `local_weights`,
        which are this process's weights; copy the buffers."""
        share, names = share.float().to(self.device), [name for name in self._local if name.startswith(part)]
        for start in range(0, len(names), _TENSORS_AT_ONCE):
            averages = [self._local[name] for name in names[start : start + _TENSORS_AT_ONCE]]
            targets = [local_weights[name].to(self._local[name]) for name in names[start : start + _TENSORS_AT_ONCE]]
            if self.device.type == "cpu":  # one pass over the memory
                torch._foreach_lerp_(averages, targets, [share] * len(averages))
            else:  # three kernels; lerp with a share that is on the device has one for each weight
                steps = torch._foreach_sub(targets, averages)
                torch._foreach_mul_(steps, share)
                torch._foreach_add_(averages, steps)
        for name, buffer in self.module.named_buffers():
            if name in local_weights and name.startswith(part):
                buffer.copy_(local_weights[name])

    def state(self) -> dict[str, Any]:
        """Averages and buffers by name. A sharded weight is a function that returns it whole; all processes call these
        functions in the same order."""
        unshard, is_sharded = self._weights.unshard, self._weights.is_sharded
        averages = {name: partial(unshard, name, local) if is_sharded else local for name, local in self._local.items()}
        return {name: averages.get(name, tensor) for name, tensor in self.module.state_dict().items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take whole weights and buffers from `state`. Raises ValueError if its names or shapes are not the model's."""
        tensors = {**self.module.state_dict(), **self._local}
        if names := sorted(tensors.keys() ^ state.keys()):
            fault = "missing" if names[0] in tensors else "not a weight of the model"
            raise ValueError(f"the averaged weights do not fit the model: {names[0]} is {fault} ({len(names)} in all)")
        for name, tensor in tensors.items():
            try:
                local = self._weights.shard(name, state[name]) if name in self._local else state[name]
                if local.shape != tensor.shape:
                    raise ValueError(f"the shape {tuple(local.shape)} is not the model's {tuple(tensor.shape)}")
            except ValueError as error:
                raise ValueError(f"the averaged weights do not fit the model: {name}: {error}") from None
            tensor.copy_(local)

    def _empty_parameters(self) -> None:
        for parameter in self._parameters.values():
            parameter.data = parameter.data.new_empty(0)


class Average:
    """Averages of the same weights by name, each of which starts from a copy of them; the run keeps the first. Without
    any, the run keeps the trained model itself. Buffers are copied, not averaged.

    Args:
        weights: An engine or a cascade of engines, whose weights are averaged.
        shares: For each average, n -> how far update n = 1, 2, ... (float64, 0-d) moves it towards the weights.
        parts: Prefixes of the names of weights that are updated together, each with a count of its own.
    """

    def __init__(
        self, weights: Engine | Cascade, shares: Mapping[str, Callable[[Tensor], Tensor]], parts: Sequence[str] = ("",)
    ) -> None:
        self._weights, self._shares = weights, shares
        self._averages = {name: AveragedModel(weights) for name in shares}
        device = next((fp64_device(average.device) for average in self._averages.values()), None)
        # Numbers of averaged updates: on the device, if it has fp64, because the flags of skipped updates are there and
        # the host need not wait for them.
        self._updates = {part: torch.zeros((), dtype=torch.float64, device=device) for part in parts}

    def update(self, *skipped: Tensor) -> None:
        """Add the weights after an update, except those of a part whose flag (0-d bool, as in an engine's `Update`) is
        set: its update was skipped and does not count. Without flags none was skipped. Collective."""
        if not self._averages:
            return
        local_weights = self._weights.local_shards()
        flags = skipped or [torch.tensor(False)] * len(self._updates)
        for (part, updates), flag in zip(self._updates.items(), flags, strict=True):
            is_made = ~flag.to(updates.device)
            updates += is_made
            for name, average in self._averages.items():
                average.move_towards(local_weights, torch.where(is_made, self._shares[name](updates), 0.0), part)

    def averages(self) -> dict[str, OpenModel]:
        """Models to evaluate beside the trained one, by name ("ema", or "ema_0.05" for each length): in the context of
        averages()[name]() the averaged model is whole on every process. Collective."""
        return {name: average.full_weights for name, average in self._averages.items()}

    def state_dict(self) -> dict[str, Any]:
        """`live_state` with the tensors themselves. Collective."""
        return _fetch(self.live_state())

    def live_state(self) -> dict[str, Any]:
        """The count of updates, by part if there are parts, and the averaged weights, by length if there are lengths;
        those that are sharded as functions that return them whole. Empty without an average."""
        if not self._averages:
            return {}
        states = {name: {"weights": average.state()} for name, average in self._averages.items()}
        by_length = {"powers": {name.removeprefix(_LENGTH_PREFIX): state for name, state in states.items()}}
        counts = {part: int(updates) for part, updates in self._updates.items()}
        return {"updates": counts.get("", counts), **states.get("ema", by_length)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore count and weights; other averages, and missing or unexpected names, are a ValueError."""
        weights = {f"{_LENGTH_PREFIX}{length}": entry["weights"] for length, entry in state.get("powers", {}).items()}
        if "weights" in state:
            weights["ema"] = state["weights"]
        if weights.keys() != self._averages.keys():
            flag = f"--ema_power {' '.join(state['powers'])}" if "powers" in state else "--ema_decay"
            kind, flag = ("other averages", flag) if state else ("no average", "--ema_decay 0 and without --ema_power")
            raise ValueError(f"the checkpoint holds {kind} of the weights: continue with {flag}")
        for name, average in self._averages.items():
            average.restore(weights[name])
        counts = state.get("updates", 0)
        for part, updates in self._updates.items():  # an earlier version saved one count for all
            updates.fill_(counts[part] if isinstance(counts, Mapping) else counts)


def make_ema(
    weights: Engine | Cascade, decay: float, lengths: Sequence[float] | None = None, parts: Sequence[str] = ("",)
) -> Average:
    """The averages of an engine's `weights` with these `lengths` (--ema_power), or the one with this `decay`
    (--ema_decay), or none for no length and 0; for `parts` see `Average`. Raises ValueError if a length is given
    twice."""
    names = [f"{length:g}" for length in lengths or ()]
    if len(set(names)) < len(names):
        raise ValueError(f"--ema_power {' '.join(names)}: give each length once")
    if names:
        return Average(weights, {f"{_LENGTH_PREFIX}{name}": power_of_time(float(name)) for name in names}, parts)
    return Average(weights, {"ema": exponential(decay)} if decay > 0 else {}, parts)


def exponential(decay: float) -> Callable[[Tensor], Tensor]:
    """The shares of the average a <- d a + (1 - d) w, with d = min(decay, (1 + n) / (10 + n)) at update n = 1, 2, ...

    The smaller d of the first updates removes the random initial weights from the average sooner; it is the rule of
    TensorFlow's `tf.train.ExponentialMovingAverage(num_updates=...)`. The decay lies in (0, 1).
    """
    return lambda n: (9 / (10 + n)).clamp_min(1 - decay)


def power_of_time(length: float) -> Callable[[Tensor], Tensor]:
    """The shares of an average whose profile is a power of time: the weights of update k of n count in proportion to
    k^(g+1) - (k-1)^(g+1), about k^g. So the average grows with the run, and forgets the initial weights at once.

    a <- b a + (1 - b) w after update n = 1, 2, ..., with b = (1 - 1 / n)^(g + 1); Karras et al. 2024, section 3.1. The
    exponent g follows from the length, the standard deviation of the profile as a fraction of the run
    (`tandem.training.power_function.exponent_of`).
    """
    exponent = exponent_of(length)
    return lambda n: 1 - (1 - 1 / n) ** (exponent + 1)


def final_weights(engine: Engine | Cascade, average: Average) -> AbstractContextManager[Any]:
    """Context of the model that the run keeps, whole on every process, to read and evaluate, not to change: the first
    average of the engine's weights, or without one these weights. Collective."""
    return next(iter(average.averages().values()), engine.full_weights)()


def final_metric(average: Average, name: str) -> str:
    """The name of that model's validation metric: "valid/ema/psnr", or "valid/psnr" without an average."""
    return "/".join(["valid", *list(average.averages())[:1], name])


def _fetch(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with tensors in the places of the functions that return them."""
    return {
        key: _fetch(value) if isinstance(value, Mapping) else value() if callable(value) else value
        for key, value in state.items()
    }
