"""The engine for DeepSpeed. DeepSpeed shards and updates; Tandem accumulates gradients and skips non-finite
updates; `state.py` reads and writes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from torch import Tensor, nn

from ...devices import cpu_threads, own_threads
from ...engines.micro import clip_divisor, gradient_norm
from ...engines.optimizer_state import unfuse
from ...engines.parts import GradientParts
from .config import refusals, resolve
from .state import OF_CLASSES, OF_ENGINE, OF_ZERO, ZeroState, check_inside

if TYPE_CHECKING:
    from . import DeepSpeedBackend


class ZeroEngine(ZeroState):
    """Wraps one ``deepspeed.initialize``. ZeRO 0 replicates, 1 shards moments, 2 also gradients, 3 also weights."""

    _backend: DeepSpeedBackend

    def _set_up(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        backend, self._stage = self._backend, self._backend.zero_stage
        self.is_sharded = self._stage == 3
        runtime = resolve(
            backend.config,
            backend.options,
            zero_stage=self._stage,
            max_grad_norm=self._max_grad_norm,
            learning_rate=self.lr,
            sizes=[parameter.numel() for parameter in model.parameters()],
            on_cpu=backend.device.type == "cpu",
        )
        self._bucket_size = runtime["zero_optimization"]["reduce_bucket_size"]
        weights_are_low_precision = runtime["bf16"]["enabled"] or runtime["fp16"]["enabled"]
        # ``gathered`` fills this copy with the full fp32 weights if the module does not hold them.
        self._twin = copy.deepcopy(self._blank) if self._stage == 3 or weights_are_low_precision else None
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._parts: GradientParts | None = None
        if self._plan.batch_parts:
            self._parts = GradientParts(trainable, backend.comm, self._plan.grad_accum_steps)
            unfuse(optimizer)
        if backend.options.compile:
            model.compile()
        with _without_broadcast(), refusals(backend.config_path):
            self._ds, self._zero, _, self._scheduler = deepspeed.initialize(
                model=model,
                model_parameters=trainable,
                optimizer=None if "optimizer" in backend.config else optimizer,
                config=runtime,
                dist_init_required=False,
            )
        inside = SimpleNamespace(engine=self._ds, optimizer=self._zero)
        names = [f"engine.{name}" for name in OF_ENGINE] + [f"optimizer.{name}" for name in OF_ZERO[self._stage]]
        check_inside(inside, names, f" at ZeRO {self._stage}")
        self._optimizer = self._ds.basic_optimizer
        self._parameters: dict[str, Any] = dict(self.module.named_parameters())
        self._sets_own_lr = self._scheduler is not None
        backend.resolved[self.name] = {
            **runtime,
            "zero_optimization": self._ds._config.zero_config.model_dump(mode="json"),
            "optimizer_in_use": type(self._optimizer).__name__,
        }
        self._is_unsharded_fp32 = self._stage == 0 and not weights_are_low_precision
        if self._is_unsharded_fp32 or self._parts is not None:
            self._ds._config.gradient_clipping = self._zero.clip_grad = 0.0  # this engine clips
        offload = self._ds._config.zero_config.offload_optimizer
        is_offloaded = offload is not None and offload.device != "none"
        # In one thread, which is what torchrun sets, an optimizer on the CPU would hold up the GPU.
        self._optimizer_threads = own_threads(backend.gather_objects) if is_offloaded else None
        self._plain_weights_are_cast = weights_are_low_precision and self._stage < 3

    # The forward pass calls the module, not DeepSpeed's engine. Hooks on the module are enough for sharding, and
    # DeepSpeed's engine would treat torch.autograd.grad through its outputs (which computes an adaptive loss weight) as
    # the backward pass of a training step.

    def _plain_forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._plain_weights_are_cast:
            return super()._plain_forward(*args, **kwargs)
        weights = {name: parameter.float() for name, parameter in self.module.named_parameters()}
        with torch.compiler.set_stance("force_eager"):
            return torch.func.functional_call(self.module, weights, args, kwargs)

    def _add_gradients(self, loss: Tensor, weight: float | Tensor, retain_graph: bool) -> None:
        if retain_graph and self._stage == 3:
            raise RuntimeError(
                "ZeRO 3 frees gathered weights during a backward pass, so a second one cannot follow through the same "
                "graph; add the losses and call backward once, or run the forward pass again"
            )
        if self._parts is not None:
            self._parts.backward(loss, self._guard.poison(loss, weight), self._micro_batch, retain_graph)
            if self._stage == 3:
                self._zero.backward_epilogue()  # frees the weights that this backward pass gathered
            return
        # DeepSpeed averages over the processes, but the update is the sum: multiply by their number.
        loss = loss * self._guard.poison(loss, weight * self._backend.world_size)
        if self._stage:
            # ZeRO would let a second backward pass after one forward pass overwrite the gradients of the first. With
            # this flag cleared, ZeRO treats the coming backward pass as a new one.
            self._zero.clear_backward_seen_flag()
        loss.register_hook(lambda _: self._ds._backward_prologue())
        self._ds.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def _update(self) -> tuple[Tensor, Tensor]:
        self._backend.about_to_update()
        if self._parts is not None:
            norm, finite = self._step_with(self._parts)
        elif self._is_unsharded_fp32:
            norm, finite = self._step_unsharded()
        else:
            with cpu_threads(self._optimizer_threads):
                self._ds.step()
            norm = self._ds.get_global_grad_norm()
            if self._stage:
                self._zero_old_gradients()
            finite = torch.tensor(not getattr(self._zero, "overflow", False), device=self._backend.device)
        norm = torch.as_tensor(norm if norm is not None else torch.nan, device=self._backend.device).float()
        return torch.where(finite, norm, torch.nan), finite

    @torch.no_grad()
    def _step_with(self, parts: GradientParts) -> tuple[Tensor, Tensor]:
        """Reduce as the other backends do, and pass the result to DeepSpeed's optimizer, which then does not reduce."""
        parts.finish()
        norm = gradient_norm(parts.gradients)
        finite = torch.isfinite(norm)
        if bool(finite):
            torch._foreach_div_(parts.gradients, clip_divisor(norm, self._max_grad_norm).float())
            self._write_gradients(parts.by_parameter)
            self._zero.step()
            if self._scheduler is not None:
                self._scheduler.step()
        parts.zero_()
        return norm, finite

    def _step_unsharded(self) -> tuple[Tensor, Tensor]:
        """ZeRO 0 in fp32 is a plain optimizer. DeepSpeed would let it step with a NaN norm, so check the norm first."""
        for parameter in [p for p in self.module.parameters() if p.requires_grad and p.grad is None]:
            parameter.grad = torch.zeros_like(parameter)
        self._ds._running_engine_step = True  # as in DeepSpeed's own step()
        self._ds.allreduce_gradients(bucket_size=self._bucket_size)
        self._ds._running_engine_step = False
        grads = [p.grad for p in self.module.parameters() if p.requires_grad and p.grad is not None]
        norm = gradient_norm(grads)
        finite = torch.isfinite(norm)
        if bool(finite):
            if self._max_grad_norm > 0:
                torch._foreach_mul_(grads, (self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0).float())
            self._ds.enable_backward_allreduce = False  # the gradients are reduced above
            self._ds.step()
            self._ds.enable_backward_allreduce = True
        else:
            self._ds.zero_grad()
        return norm, finite

    @contextmanager
    def twice_differentiable(self) -> Iterator[None]:
        if self._stage == 3:
            # ZeRO 3 frees weights after the first backward pass unless a submodule still uses them. This entry claims
            # that one does, until the update clears the entry.
            for parameter in self.module.parameters():
                parameter.ds_active_sub_modules.add("second backward pass")  # type: ignore[attr-defined]
        with super().twice_differentiable():
            yield


@contextmanager
def _without_broadcast() -> Iterator[None]:
    """Keeps DeepSpeed from broadcasting the weights. The broadcast fails for 0-d parameters, and it is not needed: all
    processes have been checked to hold the same weights. Raises UserMistake if it cannot be kept from it."""
    check_inside(deepspeed, OF_CLASSES)

    def shard(init: Any, parameter: nn.Parameter) -> None:
        init._convert_to_deepspeed_param(parameter)
        parameter.partition()  # type: ignore[attr-defined]

    originals = deepspeed.DeepSpeedEngine._broadcast_model, deepspeed.zero.Init._zero_init_param
    deepspeed.DeepSpeedEngine._broadcast_model = lambda engine: None
    deepspeed.zero.Init._zero_init_param = shard
    try:
        yield
    finally:
        deepspeed.DeepSpeedEngine._broadcast_model, deepspeed.zero.Init._zero_init_param = originals
