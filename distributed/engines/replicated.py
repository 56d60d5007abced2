"""The engine of every backend that keeps the whole model on each process: one process, PyTorch, Horovod.

They differ in the communicator alone, so there is nothing in which their numbers could differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..base import Backend
from ..options import Update
from .base import Engine
from .finite import SkipGuard
from .micro import backward_weight, clip_divisor, gradient_norm, no_gradients, split_batch
from .optimizer_state import check_names, live_weights, read_optimizer, unfuse, write_optimizer
from .parts import GradientParts
from .precision import LossScaler, autocast
from .reducer import GradientReducer
from .replicas import check_replicas, check_replicas_now_and_then


class ReplicatedEngine(Engine):
    """A full replica per process; gradients are summed in buckets while the backward pass runs."""

    def __init__(
        self,
        backend: Backend,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        name: str,
        max_grad_norm: float | None,
    ) -> None:
        options = backend.options
        check_replicas(model, "before training", backend.gather_objects)
        self.module, self._backend, self._optimizer, self._name = model, backend, optimizer, name
        self._precision, self._plan = options.precision, options.plan
        self._max_grad_norm = options.max_grad_norm if max_grad_norm is None else max_grad_norm
        trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in trainable}
        self._scaler = LossScaler(options.precision == "fp16", backend.device)
        parameters = [parameter for _, parameter in trainable]
        self._reducer: GradientReducer | GradientParts
        if self._plan.batch_parts:
            self._reducer = GradientParts(parameters, backend.comm, self._plan.grad_accum_steps)
            for parameter, gradient in self._reducer.by_parameter.items():
                parameter.grad = gradient
            unfuse(optimizer)
        else:
            self._reducer = GradientReducer(parameters, backend.comm, name, self._plan.grad_accum_steps)
        self._guard = SkipGuard(model, options.max_skipped_updates, backend.device, backend.gather_objects)
        self._is_frozen = self._is_plain = False
        self._micro_batch: int | None = None
        self._updates = 0
        if options.compile:
            model.compile()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_frozen:
            raise RuntimeError("this engine is frozen: call engine.module(...), which takes no part in an update")
        self._backend.watchdog.mark("forward", update=self._updates)
        if self._is_plain:
            return self.module.forward(*args, **kwargs)
        with autocast(self._precision, self._backend.device):
            return self.module(*args, **kwargs)

    def micro_batches(self, batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for index, part in enumerate(split_batch(batch, self._plan, self._backend.device)):
            self._micro_batch = index
            yield part
        self._micro_batch = None

    def backward(
        self,
        loss: Tensor,
        *,
        items: int | Tensor | None = None,
        total: int | Tensor | None = None,
        retain_graph: bool = False,
    ) -> None:
        if self._is_frozen:
            raise RuntimeError("this engine is frozen: its update is not under way")
        self._backend.watchdog.mark("backward", update=self._updates)
        weight = self._guard.poison(loss, backward_weight(items, total, self._plan) * self._scaler.scale)
        self._reducer.backward(loss, weight, self._micro_batch, retain_graph)
        self._backend.watchdog.mark("computing")

    @torch.no_grad()
    def step(self) -> Update:
        self._backend.watchdog.mark("reducing gradients", update=self._updates, collective=True)
        self._reducer.finish()
        norm = gradient_norm(self._reducer.gradients) / self._scaler.scale
        finite = torch.isfinite(norm)
        divisor = clip_divisor(norm, self._max_grad_norm) * self._scaler.scale
        self._update_weights(divisor.float(), finite)
        self._reducer.zero_()
        self._scaler.update(finite)
        self._updates += 1
        self._backend.watchdog.mark("computing", update=self._updates)
        self._guard.after_update(finite, self._updates)
        check_replicas_now_and_then(self._backend, self.module, self._name, self._updates)
        return Update(norm.float(), ~finite, self.lr)

    def _update_weights(self, divisor: Tensor, finite: Tensor) -> None:
        """One optimizer step with gradients / divisor, or none at all where they are not finite."""
        self._backend.about_to_update()
        if getattr(self._optimizer, "_step_supports_amp_scaling", False):
            # Fused optimizers divide and skip inside their kernel: no pass over the gradients, no wait of the host.
            self._optimizer.grad_scale = divisor  # type: ignore[attr-defined]
            self._optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
            self._optimizer.step()
            del self._optimizer.grad_scale, self._optimizer.found_inf  # type: ignore[attr-defined]
        elif bool(finite):
            torch._foreach_div_(self._reducer.gradients, divisor)
            self._optimizer.step()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        with no_gradients(self.module):
            self._is_frozen = True
            try:
                yield
            finally:
                self._is_frozen = False

    @contextmanager
    def twice_differentiable(self) -> Iterator[None]:
        self._is_plain = True
        try:
            yield
        finally:
            self._is_plain = False

    @contextmanager
    def gathered(self) -> Iterator[Any]:
        yield self.module

    @property
    def lr(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = value

    @property
    def skipped_updates(self) -> int:
        return int(self._guard.total)

    def live_state(self) -> dict[str, Any]:
        return {
            "weights": live_weights(self.module),
            "optimizer": read_optimizer(self._optimizer, self._names),
            "scaler": self._scaler.state_dict(),
            "updates": self._updates,
            "skipped_updates": self.skipped_updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._backend.about_to_update()
        check_names("weight", state["weights"], {k: v.shape for k, v in self.module.state_dict().items()})
        self.module.load_state_dict(state["weights"])
        write_optimizer(self._optimizer, self._names, state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])
        self._updates = state["updates"]
        self._guard.total.fill_(state["skipped_updates"])
