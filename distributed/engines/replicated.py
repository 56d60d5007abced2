"""The engine of every backend that keeps the whole model on each process: one process, PyTorch, Horovod.

These backends differ in their communicator only, so their numbers cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..base import Backend
from .base import Engine
from .micro import clip_divisor, gradient_norm
from .optimizer_state import check_names, live_weights, read_optimizer, unfuse, write_optimizer
from .parts import GradientParts
from .precision import LossScaler
from .reducer import GradientReducer


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
        super().__init__(backend, model, optimizer, name=name, max_grad_norm=max_grad_norm)
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._scaler = LossScaler(backend.options.precision == "fp16", backend.device)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._reducer: GradientReducer | GradientParts
        if self._plan.batch_parts:
            self._reducer = GradientParts(parameters, backend.comm, self._plan.grad_accum_steps)
            for parameter, gradient in self._reducer.by_parameter.items():
                parameter.grad = gradient
            unfuse(optimizer)
        else:
            self._reducer = GradientReducer(parameters, backend.comm, name, self._plan.grad_accum_steps)
        if backend.options.compile:
            model.compile()

    def _add_gradients(self, loss: Tensor, weight: float | Tensor, retain_graph: bool) -> None:
        gradient = self._guard.poison(loss, weight * self._scaler.scale)
        self._reducer.backward(loss, gradient, self._micro_batch, retain_graph)

    @torch.no_grad()
    def _update(self) -> tuple[Tensor, Tensor]:
        self._reducer.finish()
        norm = gradient_norm(self._reducer.gradients) / self._scaler.scale
        finite = torch.isfinite(norm)
        divisor = (clip_divisor(norm, self._max_grad_norm) * self._scaler.scale).float()
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
        self._reducer.zero_()
        self._scaler.update(finite)
        return norm.float(), finite

    @contextmanager
    def gathered(self) -> Iterator[Any]:
        yield self.module

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
