"""The engine over DeepSpeed: its sharding and its optimizers, our accumulation, finiteness and neutral state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from ...base import Backend
from ...engines.base import Engine
from ...engines.finite import SkipGuard
from ...engines.micro import backward_weight, clip_divisor, gradient_norm, no_gradients, split_batch
from ...engines.optimizer_state import live_weights, unfuse
from ...engines.parts import GradientParts
from ...engines.precision import autocast
from ...engines.replicas import check_replicas, check_replicas_now_and_then
from ...options import Update
from .config import refusals, resolve
from .state import read_zero_optimizer, weight_readers, write_gradients, write_weights, write_zero_optimizer


class ZeroEngine(Engine):
    """One deepspeed.initialize; ZeRO 0 replicates, 1 shards moments, 2 gradients, 3 weights."""

    def __init__(
        self,
        backend: Backend,
        config: dict[str, Any],
        zero_stage: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        name: str,
        max_grad_norm: float | None,
        config_path: str | None = None,
    ) -> None:
        options = backend.options
        check_replicas(model, "before training", backend.gather_objects)
        self.module, self._backend, self._stage, self._name = model, backend, zero_stage, name
        self._precision, self._plan = options.precision, options.plan
        self._max_grad_norm = options.max_grad_norm if max_grad_norm is None else max_grad_norm
        runtime = resolve(
            config,
            world_size=backend.world_size,
            global_batch_size=options.plan.global_batch_size,
            zero_stage=zero_stage,
            precision=options.precision,
            max_grad_norm=self._max_grad_norm,
            learning_rate=float(optimizer.param_groups[0]["lr"]),
            parameter_count=sum(p.numel() for p in model.parameters()),
            on_cpu=backend.device.type == "cpu",
        )
        weights_are_low_precision = runtime["bf16"]["enabled"] or runtime["fp16"]["enabled"]
        # Where the module does not hold full fp32 weights, a plain twin does for as long as somebody reads it.
        self._twin = copy.deepcopy(model) if zero_stage == 3 or weights_are_low_precision else None
        self._empty_twin()
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._parts: GradientParts | None = None
        if self._plan.batch_parts:
            self._parts = GradientParts(trainable, backend.comm, self._plan.grad_accum_steps)
            unfuse(optimizer)
        if options.compile:
            model.compile()
        self._guard = SkipGuard(model, options.max_skipped_updates, backend.device, backend.gather_objects)
        with _weights_left_alone(), refusals(config_path):
            self._ds, self._optimizer, _, self._scheduler = deepspeed.initialize(
                model=model,
                model_parameters=trainable,
                optimizer=None if "optimizer" in config else optimizer,
                config=runtime,
                dist_init_required=False,
            )
        self.resolved_config = {
            **runtime,
            "zero_optimization": self._ds._config.zero_config.model_dump(mode="json"),
            "optimizer_in_use": type(self._ds.basic_optimizer).__name__,
        }
        self._is_unsharded_fp32 = zero_stage == 0 and not weights_are_low_precision
        if self._is_unsharded_fp32 or self._parts is not None:
            self._ds._config.gradient_clipping = self._optimizer.clip_grad = 0.0  # this engine clips
        self._is_frozen = self._is_plain = False
        self._plain_weights_are_cast = weights_are_low_precision and zero_stage < 3
        self._micro_batch: int | None = None
        self._updates = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_frozen:
            raise RuntimeError("this engine is frozen: call engine.module(...), which takes no part in an update")
        self._backend.watchdog.mark("forward", update=self._updates)
        # Not self._ds(...): that takes every backward through its outputs for a training step's, torch.autograd.grad
        # for an adaptive weight included. Its sharding works through hooks on the module.
        if self._is_plain and self._plain_weights_are_cast:
            weights = {name: parameter.float() for name, parameter in self.module.named_parameters()}
            with torch.compiler.set_stance("force_eager"):
                return torch.func.functional_call(self.module, weights, args, kwargs)
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
        if retain_graph and self._stage == 3:
            raise RuntimeError(
                "ZeRO 3 gives weights back during a backward pass, so that no second one can follow through the same "
                "graph; add the losses and call backward once, or run the forward pass again"
            )
        self._backend.watchdog.mark("backward", update=self._updates)
        weight = backward_weight(items, total, self._plan)
        if self._parts is not None:
            self._parts.backward(loss, self._guard.poison(loss, weight), self._micro_batch, retain_graph)
            if self._stage == 3:
                self._optimizer.backward_epilogue()  # gives back what this backward pass has gathered
        else:
            weight = weight * self._backend.world_size  # DeepSpeed averages
            self._backward_through_zero(loss * self._guard.poison(loss, weight), retain_graph)
        self._backend.watchdog.mark("computing")

    def _backward_through_zero(self, loss: Tensor, retain_graph: bool) -> None:
        if self._stage:
            # ZeRO takes a second backward after one forward for the same one and overwrites; this starts a new one.
            self._optimizer.clear_backward_seen_flag()
        loss.register_hook(lambda _: self._ds._backward_prologue())
        self._ds.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def step(self) -> Update:
        self._backend.watchdog.mark("reducing gradients", update=self._updates, collective=True)
        self._backend.about_to_update()
        rate = self.lr  # before a scheduler section of the JSON moves it on
        if self._parts is not None:
            norm, finite = self._step_with(self._parts)
        elif self._is_unsharded_fp32:
            norm, finite = self._step_unsharded()
        else:
            self._ds.step()
            norm = self._ds.get_global_grad_norm()
            finite = torch.tensor(not getattr(self._optimizer, "overflow", False), device=self._backend.device)
        norm = torch.as_tensor(norm if norm is not None else torch.nan, device=self._backend.device).float()
        norm = torch.where(finite, norm, torch.nan)
        self._updates += 1
        self._backend.watchdog.mark("computing", update=self._updates)
        self._guard.after_update(finite, self._updates)
        if self._stage < 3:  # there every process holds other slices, and nothing twice
            check_replicas_now_and_then(self._backend, self.module, self._name, self._updates)
        return Update(norm, ~finite, rate)

    @torch.no_grad()
    def _step_with(self, parts: GradientParts) -> tuple[Tensor, Tensor]:
        """The finished gradient, made as it is without DeepSpeed, goes to DeepSpeed's optimizer past its reduction."""
        parts.finish()
        norm = gradient_norm(parts.gradients)
        finite = torch.isfinite(norm)
        if bool(finite):
            torch._foreach_div_(parts.gradients, clip_divisor(norm, self._max_grad_norm).float())
            write_gradients(self._optimizer, self._stage, parts.by_parameter)
            self._optimizer.step()
            if self._scheduler is not None:
                self._scheduler.step()
        parts.zero_()
        return norm, finite

    def _step_unsharded(self) -> tuple[Tensor, Tensor]:
        """ZeRO 0 in fp32 is a plain optimizer, and DeepSpeed would clip with a NaN norm: look before it steps."""
        for parameter in [p for p in self.module.parameters() if p.requires_grad and p.grad is None]:
            parameter.grad = torch.zeros_like(parameter)
        self._ds._running_engine_step = True  # what step() says while it reduces
        self._ds.allreduce_gradients()
        self._ds._running_engine_step = False
        grads = [p.grad for p in self.module.parameters() if p.requires_grad and p.grad is not None]
        norm = gradient_norm(grads)
        finite = torch.isfinite(norm)
        if bool(finite):
            if self._max_grad_norm > 0:
                torch._foreach_mul_(grads, (self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0).float())
            self._ds.enable_backward_allreduce = False  # done above
            self._ds.step()
            self._ds.enable_backward_allreduce = True
        else:
            self._ds.zero_grad()
        return norm, finite

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
        if self._stage == 3:
            # ZeRO 3 gives weights back after a first backward pass, unless a submodule still uses them: so says this
            # entry, which the update clears.
            for parameter in self.module.parameters():
                parameter.ds_active_sub_modules.add("second backward pass")  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self._is_plain = False

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

    @property
    def lr(self) -> float:
        return float(self._ds.basic_optimizer.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        if self._scheduler is not None:
            return  # a scheduler section in the JSON wins
        for group in self._ds.basic_optimizer.param_groups:
            group["lr"] = value

    @property
    def skipped_updates(self) -> int:
        return int(self._guard.total)

    def live_state(self) -> dict[str, Any]:
        weights: Mapping[str, Any]
        if self._is_unsharded_fp32:
            weights = live_weights(self.module)
        else:
            readers = weight_readers(self.module, self._stage)
            weights = {name: partial(_on_cpu, read) for name, read in readers.items()}
        return {
            "weights": weights,
            "optimizer": read_zero_optimizer(self._ds.basic_optimizer, self._optimizer, self.module, self._stage),
            "scaler": self._scaler_state(),
            "updates": self._updates,
            "skipped_updates": self.skipped_updates,
        }

    def _scaler_state(self) -> dict[str, float]:
        scaler = getattr(self._optimizer, "loss_scaler", None)
        if scaler is None or not self._ds.fp16_enabled():
            return {}
        since_overflow = getattr(scaler, "cur_iter", 0) - getattr(scaler, "last_overflow_iter", -1) - 1
        hysteresis = getattr(scaler, "cur_hysteresis", 1)
        return {"scale": float(scaler.cur_scale), "finite_in_a_row": since_overflow, "hysteresis": hysteresis}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._backend.about_to_update()
        write_weights(self.module, self._optimizer, self._stage, state["weights"])
        write_zero_optimizer(self._ds.basic_optimizer, self._optimizer, self.module, self._stage, state["optimizer"])
        if state["scaler"] and self._ds.fp16_enabled():
            scaler = self._optimizer.loss_scaler
            scaler.cur_scale = state["scaler"]["scale"]
            # It counts updates and remembers the last overflow; -1 is its "never".
            scaler.cur_iter, scaler.last_overflow_iter = int(state["scaler"].get("finite_in_a_row", 0)), -1
            if "hysteresis" in state["scaler"]:
                scaler.cur_hysteresis = state["scaler"]["hysteresis"]
        self._updates = state["updates"]
        applied = state["updates"] - state["skipped_updates"]
        if self._scheduler is not None and applied:
            self._scheduler.step(applied - 1)  # counted from 0; a skipped update did not move it
        self._guard.total.fill_(state["skipped_updates"])


def _on_cpu(read: Callable[[], Tensor]) -> Tensor:
    return read().to("cpu", copy=True)


@contextmanager
def _weights_left_alone() -> Iterator[None]:
    """DeepSpeed broadcasts the weights byte by byte, which fails for 0-d parameters; that they are the same everywhere
    has been checked already."""

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
