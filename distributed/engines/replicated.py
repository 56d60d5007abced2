"""The engine of every backend with the whole model on each process: single, ddp and horovod.

These backends differ only in their communicators, so they compute the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .arithmetic import LossScaler, all_finite, clip_divisor, gradient_norm
from .base import Engine
from .optimizer_state import check_names, live_weights, read_optimizer, unfuse, write_optimizer
from .ordered_sum import OrderedSum
from .reducer import GradientReducer


class ReplicatedEngine(Engine):
    """A full replica per process; gradients are summed in buckets while the backward pass runs."""

    def _set_up(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._names: dict[Any, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._scaler = LossScaler(self._options.precision == "fp16", self._processes.device)
        parameters = list(self._names)
        self._reducer: GradientReducer | OrderedSum
        if self._plan.batch_parts:
            self._reducer = OrderedSum(parameters, self._processes.comm, self._plan.grad_accum_steps)
            for parameter, gradient in self._reducer.by_parameter.items():
                parameter.grad = gradient
            unfuse(optimizer)
        else:
            self._reducer = GradientReducer(
                parameters, self._processes.comm, self.name, self._plan.grad_accum_steps, self._processes.stop,
                torch.bfloat16 if self._options.reduce_precision == "bf16" else None,
            )  # fmt: skip
        if self._options.compile:
            if self._processes.world_size > 1 and not self._plan.batch_parts:
                cut_graph(model)
            model.compile()

    def _add_gradients(self, loss: Tensor, weight: float | Tensor, retain_graph: bool) -> None:
        loss = self._guard.weighted_loss(loss, weight * self._loss_scale())
        self._reducer.backward(loss, self._micro_batch, retain_graph)

    def _loss_scale(self) -> Tensor:
        """The factor of the gradients. In fp16 it undoes the weight 1 / (accumulation x processes) of each backward
        pass, with which the gradients of many processes would underflow."""
        count = self._plan.grad_accum_steps * self._plan.world_size if self._scaler.enabled else 1
        return self._scaler.scale * count

    @torch.no_grad()
    def _update(self, with_norm: bool) -> tuple[Tensor, Tensor]:
        gradients, norm = self._reduce_gradients(with_norm or self._max_grad_norm > 0)
        self._processes.heartbeat("updating the weights")
        scale = self._loss_scale()
        if norm is None:
            norm, finite, divisor = scale.new_full((), torch.nan), all_finite(gradients), scale.float()
        else:
            norm = norm / scale
            finite, divisor = torch.isfinite(norm), (clip_divisor(norm, self._max_grad_norm) * scale).float()
        divides = self._max_grad_norm > 0 or self._scaler.enabled
        self._processes.about_to_update()
        if getattr(self._optimizer, "_step_supports_amp_scaling", False):
            # Fused optimizers divide and skip in their kernel, so no pass over the gradients and no wait is needed.
            self._optimizer.grad_scale, self._optimizer.found_inf = (divisor if divides else None, (~finite).float())
            self._optimizer.step()
            del self._optimizer.grad_scale, self._optimizer.found_inf
        elif bool(finite):
            if divides:
                torch._foreach_div_(gradients, divisor.to(gradients[0].device))
            self._optimizer.step()
        self._clear_gradients()
        self._scaler.update(finite)
        return norm.float(), finite

    def _reduce_gradients(self, with_norm: bool) -> tuple[list[Tensor], Tensor | None]:
        """Finish the sums over the processes. Returns the gradients that this process's optimizer uses, and the norm of
        the whole model's gradients, 0-d fp64; None without `with_norm`."""
        self._reducer.finish()
        gradients = self._reducer.gradients
        return gradients, gradient_norm(gradients) if with_norm else None

    def _clear_gradients(self) -> None:
        """Drop the gradients of this update."""
        self._reducer.zero_()

    def _read_state(self) -> dict[str, Any]:
        return {
            "weights": live_weights(self.module),
            "optimizer": read_optimizer(self._optimizer, self._names),
            "scaler": self._scaler.state_dict(),
        }

    def _write_state(self, state: Mapping[str, Any]) -> None:
        check_names("weight", state["weights"], {k: v.shape for k, v in self.module.state_dict().items()})
        self.module.load_state_dict(state["weights"])
        write_optimizer(self._optimizer, self._names, state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])


def cut_graph(model: nn.Module) -> None:
    """Let torch.compile begin a new graph before each submodule that the model names in ``cut_before``. All gradients
    of a graph are stored at the end of its backward pass: with one graph, none could be sent earlier."""
    for name in getattr(model, "cut_before", ()):
        model.get_submodule(name).register_forward_pre_hook(torch.compiler.disable(_end_graph))


def _end_graph(module: nn.Module, inputs: Any) -> None:
    """Does nothing: a graph ends at a function that must not be compiled."""
