"""The engine for DeepSpeed. DeepSpeed shards and updates; Tandem accumulates gradients, skips non-finite updates and
saves the state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from torch import Tensor, nn

from ...devices import cpu_threads, own_threads
from ...engines.base import Engine
from ...engines.micro import clip_divisor, gradient_norm
from ...engines.optimizer_state import live_weights, unfuse
from ...engines.parts import GradientParts
from .config import refusals, resolve
from .state import (
    check_classes,
    check_inside,
    held_part,
    held_weights,
    read_zero_optimizer,
    share_weights,
    weight_readers,
    whole_weight,
    write_gradients,
    write_weights,
    write_zero_optimizer,
    zero_old_gradients,
)

if TYPE_CHECKING:
    from .backend import DeepSpeedBackend


class ZeroEngine(Engine):
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
        check_inside(self._ds, self._zero, self._stage)
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
        self._optimizer_threads: Callable[[], AbstractContextManager[None]] = nullcontext
        if offload is not None and offload.device != "none":
            # In one thread, which is what torchrun sets, an optimizer on the CPU would hold up the GPU.
            self._optimizer_threads = partial(cpu_threads, own_threads(backend.gather_objects))
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
            with self._optimizer_threads():
                self._ds.step()
            norm = self._ds.get_global_grad_norm()
            if self._stage:
                zero_old_gradients(self._optimizer, self._zero, self._stage)
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
            write_gradients(self._zero, self._stage, parts.by_parameter)
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
    def gathered(self) -> Iterator[Any]:
        if self._twin is None:
            yield self.module
            return
        parameters, buffers = dict(self._twin.named_parameters()), dict(self._twin.named_buffers())
        for name, read in weight_readers(self.module, self._stage).items():
            weight = read()
            if name in parameters:
                parameters[name].data = weight.clone()
            elif name in buffers:
                buffers[name].copy_(weight)
        self._twin.train(self.module.training)
        try:
            yield self._twin
        finally:
            self._empty_twin()

    def _empty_twin(self) -> None:
        if self._twin is not None:
            for parameter in self._twin.parameters():
                parameter.data = parameter.data.new_empty(0)

    def held_weights(self) -> dict[str, Tensor]:
        if self._stage == 3:
            return held_weights(self.module, self._zero)
        if self._twin is None:
            return super().held_weights()
        return {name: read() for name, read in weight_readers(self.module, self._stage).items()}

    def whole_weight(self, name: str, held: Tensor) -> Tensor:
        return whole_weight(self._parameters[name], held) if self.is_sharded else held

    def held_part(self, name: str, whole: Tensor) -> Tensor:
        return held_part(self._parameters[name], whole) if self.is_sharded else whole

    def _read_state(self) -> dict[str, Any]:
        is_whole = self._is_unsharded_fp32
        return {
            "weights": live_weights(self.module) if is_whole else weight_readers(self.module, self._stage),
            "optimizer": read_zero_optimizer(self._optimizer, self._zero, self.module, self._stage),
            "scaler": self._scaler_state(),
        }

    def _scaler_state(self) -> dict[str, float]:
        scaler = getattr(self._zero, "loss_scaler", None)
        if scaler is None or not self._ds.fp16_enabled():
            return {}
        since_overflow = getattr(scaler, "cur_iter", 0) - getattr(scaler, "last_overflow_iter", -1) - 1
        hysteresis = getattr(scaler, "cur_hysteresis", 1)
        return {"scale": float(scaler.cur_scale), "finite_in_a_row": since_overflow, "hysteresis": hysteresis}

    def _write_state(self, state: Mapping[str, Any]) -> None:
        write_weights(self.module, self._zero, self._stage, state["weights"])
        write_zero_optimizer(self._optimizer, self._zero, self.module, self._stage, state["optimizer"])
        if state["scaler"] and self._ds.fp16_enabled():
            scaler = self._zero.loss_scaler
            scaler.cur_scale = state["scaler"]["scale"]
            # The scaler counts updates and remembers the update of the last overflow; -1 means never.
            scaler.cur_iter, scaler.last_overflow_iter = int(state["scaler"].get("finite_in_a_row", 0)), -1
            if "hysteresis" in state["scaler"]:
                scaler.cur_hysteresis = state["scaler"]["hysteresis"]
        applied = state["updates"] - state["skipped_updates"]
        if self._scheduler is not None and applied:
            self._scheduler.step(applied - 1)  # it counts from 0; skipped updates did not advance it

    def _share_weights(self) -> None:
        share_weights(self._zero, self._stage)


@contextmanager
def _without_broadcast() -> Iterator[None]:
    """Keeps DeepSpeed from broadcasting the weights. The broadcast fails for 0-d parameters, and it is not needed: all
    processes have been checked to hold the same weights. Raises UserMistake if it cannot be kept from it."""
    check_classes()

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
