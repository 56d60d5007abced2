"""Moving averages (EMA) of a model's weights: with exponential or power-function profiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tandem.devices import fp64_device
from tandem.io.renamed import with_added_statistics

from .power_function import exponent_of

if TYPE_CHECKING:
    from tandem.distributed.engines.base import Engine

    from .cascade import Cascade

OpenModel = Callable[[], AbstractContextManager[Any]]
"""Returns a context in which a model is whole on every process."""

Share = Callable[[Tensor], Tensor]
"""n -> 1 - decay at update n = 1, 2, ... (float64, 0-d)."""

_LENGTH_PREFIX = "ema_"  # begins the name of an average with a power-function profile; its length follows
_TENSORS_AT_ONCE = 32  # in one foreach operation, which on a GPU allocates their differences


class AveragedModel:
    """An fp32 average of the weights, sharded like the weights: if they are sharded, an update of the average sends
    nothing and takes no memory for whole weights.

    Args:
        engine: An engine or a cascade of engines. The average starts from a copy of its weights.
    """

    def __init__(self, engine: Engine | Cascade) -> None:
        self._engine = engine
        self.module = engine.empty_copy().eval()
        self._parameters = dict(self.module.named_parameters())
        local_weights = engine.local_shards()
        self._shards = {name: local_weights[name].detach().to(torch.float32, copy=True) for name in self._parameters}
        self.device = next(iter(self._shards.values())).device
        self._empty_parameters()

    @contextmanager
    def full_weights(self) -> Iterator[Any]:
        """The averaged model, whole on every process, to read and evaluate, not to change. Collective."""
        for name, parameter in self._parameters.items():
            parameter.data = self._engine.unshard(name, self._shards[name])
        try:
            yield self.module
        finally:
            self._empty_parameters()

    @torch.no_grad()
    def move_towards(self, local_weights: Mapping[str, Tensor], share: Tensor, prefix: str = "") -> None:
        """average += share (weights - average), for the weights whose names begin with `prefix`; such buffers are
        copied. `local_weights` are this process's shards, by name; `share` is 0-d."""
        share, names = share.float().to(self.device), [name for name in self._shards if name.startswith(prefix)]
        for start in range(0, len(names), _TENSORS_AT_ONCE):
            averages = [self._shards[name] for name in names[start : start + _TENSORS_AT_ONCE]]
            targets = [local_weights[name].to(self._shards[name]) for name in names[start : start + _TENSORS_AT_ONCE]]
            if self.device.type == "cpu":  # one pass over the memory
                torch._foreach_lerp_(averages, targets, [share] * len(averages))
            else:  # three kernels: lerp with a share on the device would launch one for each weight
                steps = torch._foreach_sub(targets, averages)
                torch._foreach_mul_(steps, share)
                torch._foreach_add_(averages, steps)
        for name, buffer in self.module.named_buffers():
            if name in local_weights and name.startswith(prefix):
                buffer.copy_(local_weights[name])

    def state(self) -> dict[str, Any]:
        """Averages and buffers by name. If weights are sharded, the averages are functions that return them whole,
        which all processes call in the same order."""
        averages: dict[str, Any] = self._shards
        if self._engine.is_sharded:
            averages = {name: partial(self._engine.unshard, name, shard) for name, shard in self._shards.items()}
        return {name: averages.get(name, tensor) for name, tensor in self.module.state_dict().items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore from whole weights and buffers. Raises ValueError if names or shapes are not the model's."""
        tensors = {**self.module.state_dict(), **self._shards}
        state = with_added_statistics(state, self.module)
        if names := sorted(tensors.keys() ^ state.keys()):
            fault = "missing" if names[0] in tensors else "not a weight of the model"
            raise ValueError(f"the averaged weights do not fit the model: {names[0]} is {fault} ({len(names)} in all)")
        for name, tensor in tensors.items():
            try:
                local = self._engine.shard(name, state[name]) if name in self._shards else state[name]
                if local.shape != tensor.shape:
                    raise ValueError(f"the shape {tuple(local.shape)} is not the model's {tuple(tensor.shape)}")
            except ValueError as error:
                raise ValueError(f"the averaged weights do not fit the model: {name}: {error}") from None
            tensor.copy_(local)

    def _empty_parameters(self) -> None:
        for parameter in self._parameters.values():
            parameter.data = parameter.data.new_empty(0)


class WeightAverages:
    """Averages of the same weights, by name; each starts from a copy of the weights. The first one becomes the model of
    the run; if there is none, the trained model does. Buffers are copied, not averaged.

    Args:
        engine: An engine or a cascade of engines, whose weights are averaged.
        shares: That of each average, by name.
        prefixes: Of the names of weights that are updated together; each prefix has its own count of updates.
    """

    def __init__(self, engine: Engine | Cascade, shares: Mapping[str, Share], prefixes: Sequence[str] = ("",)) -> None:
        self._engine, self._shares = engine, shares
        self._averages = {name: AveragedModel(engine) for name in shares}
        device = next((fp64_device(average.device) for average in self._averages.values()), None)
        # Numbers of averaged updates: on the device, if it has fp64, because the flags of skipped updates are there.
        self._updates = {prefix: torch.zeros((), dtype=torch.float64, device=device) for prefix in prefixes}

    def update(self, *skipped: Tensor) -> None:
        """Average the weights after an update. `skipped` has a flag for each prefix (0-d bool, `Update.skipped`): a
        skipped update does not count. Without flags none was skipped. Collective."""
        if not self._averages:
            return
        local_weights = self._engine.local_shards()
        flags = skipped or [torch.tensor(False)] * len(self._updates)
        for (prefix, updates), flag in zip(self._updates.items(), flags, strict=True):
            is_applied = ~flag.to(updates.device)
            updates += is_applied
            for name, average in self._averages.items():
                average.move_towards(local_weights, torch.where(is_applied, self._shares[name](updates), 0.0), prefix)

    def averages(self) -> dict[str, OpenModel]:
        """`AveragedModel.full_weights` of each average, by name: "ema", or "ema_0.05" for each length."""
        return {name: average.full_weights for name, average in self._averages.items()}

    def state_dict(self) -> dict[str, Any]:
        """The count of updates, by prefix if there are prefixes, and the states of the averages
        (`AveragedModel.state`), by length if there are lengths: references, not copies. Empty without an average."""
        if not self._averages:
            return {}
        states = {name: {"weights": average.state()} for name, average in self._averages.items()}
        by_length = {"powers": {name.removeprefix(_LENGTH_PREFIX): state for name, state in states.items()}}
        counts = {prefix: int(updates) for prefix, updates in self._updates.items()}
        return {"updates": counts.get("", counts), **states.get("ema", by_length)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore counts and weights. Raises ValueError for other averages, or another order of them, because the first
        becomes the model of the run, and for missing or unexpected names."""
        weights = {f"{_LENGTH_PREFIX}{length}": entry["weights"] for length, entry in state.get("powers", {}).items()}
        if "weights" in state:
            weights["ema"] = state["weights"]
        if list(weights) != list(self._averages):
            flag = f"--ema_power {' '.join(state['powers'])}" if "powers" in state else "--ema_decay"
            kind, flag = ("other averages", flag) if state else ("no average", "--ema_decay 0 and without --ema_power")
            raise ValueError(f"the checkpoint holds {kind} of the weights: continue with {flag}")
        for name, average in self._averages.items():
            average.restore(weights[name])
        counts = state.get("updates", 0)
        for prefix, updates in self._updates.items():  # an earlier version saved one count for all
            updates.fill_(counts[prefix] if isinstance(counts, Mapping) else counts)


def make_ema(
    engine: Engine | Cascade, decay: float, lengths: Sequence[float] | None = None, prefixes: Sequence[str] = ("",)
) -> WeightAverages:
    """The averages with these `lengths` (--ema_power), or the one with this `decay` (--ema_decay), or none for no
    length and decay 0. `engine` and `prefixes`: see `WeightAverages`. Raises ValueError if a length is given twice."""
    names = [f"{length:g}" for length in lengths or ()]
    if len(set(names)) < len(names):
        raise ValueError(f"--ema_power {' '.join(names)}: give each length once")
    shares = {f"{_LENGTH_PREFIX}{name}": power_of_time(float(name)) for name in names}
    if not names and decay > 0:
        shares = {"ema": exponential(decay)}
    return WeightAverages(engine, shares, prefixes)


def exponential(decay: float) -> Share:
    """n -> 1 - d of the average a <- d a + (1 - d) w, with d = min(decay, (1 + n) / (10 + n)) at update n = 1, 2, ...

    The smaller d of the first updates removes the random initial weights from the average sooner; it is the rule of
    TensorFlow's `tf.train.ExponentialMovingAverage(num_updates=...)`. The decay lies in (0, 1).
    """
    return lambda n: (9 / (10 + n)).clamp_min(1 - decay)


def power_of_time(length: float) -> Share:
    """n -> 1 - b of an average with a power-function profile: a <- b a + (1 - b) w with b = (1 - 1 / n)^(g + 1) at
    update n = 1, 2, ... (Karras et al. 2024, section 3.1).

    The weights of update k of n count in proportion to k^(g+1) - (k-1)^(g+1), about k^g: the average covers a constant
    fraction of the run, and the initial weights have no part in it. The exponent g follows from the length, the
    standard deviation of the profile as a fraction of the run (`power_function.exponent_of`).
    """
    exponent = exponent_of(length)
    return lambda n: 1 - (1 - 1 / n) ** (exponent + 1)


def final_weights(engine: Engine | Cascade, average: WeightAverages) -> AbstractContextManager[Any]:
    """Context of the model of the run, whole on every process, to read and evaluate, not to change: the first average,
    or without one the engine's weights. Collective."""
    return next(iter(average.averages().values()), engine.full_weights)()


def final_metric(average: WeightAverages, name: str) -> str:
    """A validation metric of the model of `final_weights`: "valid/ema/psnr", or "valid/psnr" without an average."""
    return "/".join(["valid", *list(average.averages())[:1], name])
