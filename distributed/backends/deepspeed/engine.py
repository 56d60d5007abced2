"""The engine for DeepSpeed. DeepSpeed shards and updates; Tandem accumulates gradients, skips non-finite updates, and
reads and writes ZeRO's state (state.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from torch import Tensor, nn

from tandem.distributed.devices import available_threads, cpu_threads
from tandem.distributed.engines.arithmetic import clip_divisor, gradient_norm
from tandem.distributed.engines.base import Engine
from tandem.distributed.engines.optimizer_state import unfuse
from tandem.distributed.engines.ordered_sum import OrderedSum
from tandem.distributed.errors import UserMistake
from tandem.io.installed import how_to_install

from .config import AUTO, complete_config, one_line_refusals
from .state import ZeroState

# Attributes of DeepSpeed that this module uses, most of them private: of the package, of the engine, and of its
# optimizer by ZeRO stage. Another version may name them differently.
CLASS_INTERNALS = (
    "DeepSpeedEngine._broadcast_model", "zero.Init._convert_to_deepspeed_param", "zero.Init._zero_init_param",
)  # fmt: skip
ENGINE_INTERNALS = (
    "_backward_prologue", "_config", "_running_engine_step", "allreduce_gradients", "basic_optimizer",
    "enable_backward_allreduce", "get_global_grad_norm",
)  # fmt: skip
ZERO_INTERNALS = {
    0: (),
    1: (
        "_hp_optimizer_states_linked", "_lazy_init_hp_params_optimizer_state", "averaged_gradients", "bit16_groups",
        "clear_backward_seen_flag", "clip_grad", "overflow", "single_partition_of_fp32_groups", "update_lp_params",
    ),
    3: (
        "averaged_gradients", "backward_epilogue", "clear_backward_seen_flag", "clip_grad", "fp16_groups",
        "fp32_partitioned_groups_flat", "get_param_id", "grad_partitions_flat_buffer", "grad_position",
        "offload_optimizer", "overflow", "persistent_parameters", "sub_group_to_group_id",
    ),
}  # fmt: skip
ZERO_INTERNALS[2] = ZERO_INTERNALS[1]

if TYPE_CHECKING:
    from tandem.distributed.base import Options
    from tandem.distributed.process_group import ProcessGroup


class ZeroEngine(Engine):
    """Wraps one ``deepspeed.initialize``. ZeRO 0 replicates, 1 shards moments, 2 also gradients, 3 also weights."""

    config: dict[str, Any]
    """The configuration with DeepSpeed's defaults."""

    def __init__(
        self, processes: ProcessGroup, options: Options, model: nn.Module, optimizer: torch.optim.Optimizer, *,
        zero_stage: int, config: dict[str, Any], config_path: str | None, warmup_steps: int,
        total_updates: int | None, name: str, max_grad_norm: float | None,
    ) -> None:  # fmt: skip
        self._stage, self.is_sharded = zero_stage, zero_stage == 3
        self._config, self._config_path = config, config_path
        self._warmup_steps, self._total_updates = warmup_steps, total_updates
        super().__init__(processes, options, model, optimizer, name=name, max_grad_norm=max_grad_norm)

    def _set_up(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        processes = self._processes
        full_config = complete_config(
            self._config,
            self._options,
            zero_stage=self._stage,
            max_grad_norm=self._max_grad_norm,
            learning_rate=self.lr,
            sizes=[parameter.numel() for parameter in model.parameters()],
            on_cpu=processes.device.type == "cpu",
            auto=self._auto_values(optimizer),
        )
        self._bucket_size = full_config["zero_optimization"]["reduce_bucket_size"]
        weights_are_low_precision = full_config["bf16"]["enabled"] or full_config["fp16"]["enabled"]
        self._lacks_weights = self._stage == 3 or weights_are_low_precision
        self._names: dict[Any, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._ordered_sum: OrderedSum | None = None
        if self._plan.batch_parts:
            self._ordered_sum = OrderedSum(list(self._names), processes.comm, self._plan.grad_accum_steps)
            unfuse(optimizer)
        if self._options.compile:
            model.compile()
        self._initialize(model, optimizer, full_config)
        self._optimizer = self._ds.basic_optimizer
        self._state = ZeroState(
            self._ds, self._zero, self._scheduler, model, self._names, self._stage, self._lacks_weights
        )
        self._sets_own_lr = self._scheduler is not None
        self.config = {
            **full_config,
            "zero_optimization": self._ds._config.zero_config.model_dump(mode="json"),
            "optimizer_in_use": type(self._optimizer).__name__,
        }
        if self._stage == 0 or self._ordered_sum is not None:
            self._ds._config.gradient_clipping = self._zero.clip_grad = 0.0  # this engine clips
        offload = self._ds._config.zero_config.offload_optimizer
        is_offloaded = offload is not None and offload.device != "none"
        # torchrun sets one CPU thread, in which an optimizer on the CPU would hold up the GPU.
        self._optimizer_threads = available_threads(processes.gather_objects) if is_offloaded else None
        self._casts_eager_weights = weights_are_low_precision and self._stage < 3

    def _initialize(self, model: nn.Module, optimizer: torch.optim.Optimizer, full_config: dict[str, Any]) -> None:
        """Call ``deepspeed.initialize``, and check that its engine and its optimizer have what this module uses."""
        groups: Any = list(self._names)
        if self._config.get("optimizer", {}).get("params", {}).get("weight_decay") == AUTO:
            # Apply --weight_decay as the script's optimizer does, which does not decay biases and scales.
            groups = [{name: group[name] for name in ("params", "weight_decay")} for group in optimizer.param_groups]
        with _without_broadcast(), one_line_refusals(self._config_path):
            self._ds, self._zero, _, self._scheduler = deepspeed.initialize(
                model=model,
                model_parameters=groups,
                optimizer=None if "optimizer" in self._config else optimizer,
                config=full_config,
                dist_init_required=False,
            )
        names = [f"engine.{name}" for name in ENGINE_INTERNALS]
        names += [f"optimizer.{name}" for name in ZERO_INTERNALS[self._stage]]
        check_internals(SimpleNamespace(engine=self._ds, optimizer=self._zero), names, f" at ZeRO {self._stage}")

    def _auto_values(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The values of "auto" in the JSON's sections optimizer and scheduler, by path: the settings of the script's
        optimizer, the warm-up of the flags from 0 over at most half of the run, and the run's number of updates."""
        group, updates = optimizer.param_groups[0], self._total_updates
        optimizer_values: dict[str, Any] = {name: group[name] for name in ("lr", "weight_decay") if name in group}
        optimizer_values["eps"] = group.get("eps", 1e-8)  # PyTorch's default, for an optimizer without eps
        if "betas" in group:
            optimizer_values["betas"] = list(group["betas"])
        warmup = self._warmup_steps if updates is None else min(self._warmup_steps, updates // 2)
        warmup = max(warmup, 1)  # the least that DeepSpeed takes
        scheduler_values: dict[str, Any] = {"warmup_min_lr": 0.0, "warmup_max_lr": self.lr, "warmup_num_steps": warmup}
        if updates is not None:
            scheduler_values["total_num_steps"] = updates
        return {
            f"{section}.params.{name}": value
            for section, values in (("optimizer", optimizer_values), ("scheduler", scheduler_values))
            for name, value in values.items()
        }

    # The forward pass calls the module, not DeepSpeed's engine. Hooks on the module are enough for sharding, and
    # DeepSpeed's engine would treat torch.autograd.grad through its outputs (which computes an adaptive loss weight) as
    # the backward pass of a training step.

    def _eager_forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._casts_eager_weights:  # the weights are fp32 already, or ZeRO 3 gathers them in their precision
            return super()._eager_forward(*args, **kwargs)
        weights = {name: parameter.float() for name, parameter in self.module.named_parameters()}
        with torch.compiler.set_stance("force_eager"):
            return torch.func.functional_call(self.module, weights, args, kwargs)

    def _add_gradients(self, loss: Tensor, weight: float | Tensor, retain_graph: bool) -> None:
        if retain_graph and self._stage == 3:
            raise RuntimeError(
                "ZeRO 3 frees gathered weights during a backward pass, so a second one cannot follow through the same "
                "graph; add the losses and call backward once, or run the forward pass again"
            )
        if self._ordered_sum is not None:
            self._ordered_sum.backward(self._guard.weighted_loss(loss, weight), self._micro_batch, retain_graph)
            if self._stage == 3:
                self._zero.backward_epilogue()  # frees the weights that this backward pass gathered
            return
        # DeepSpeed averages over the processes, and the update is the sum: multiply by their number.
        loss = self._guard.weighted_loss(loss, weight * self._processes.world_size)
        if self._stage:
            # ZeRO would let a second backward pass after one forward pass overwrite the gradients of the first. With
            # this flag cleared, ZeRO treats the coming backward pass as a new one.
            self._zero.clear_backward_seen_flag()
        # DeepSpeed calls it from hooks on the outputs of its own engine, which the forward pass does not call.
        loss.register_hook(lambda _: self._ds._backward_prologue())
        self._ds.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def _update(self, with_norm: bool) -> tuple[Tensor, Tensor]:
        self._processes.about_to_update()
        if self._ordered_sum is not None:
            norm, finite = self._step_ordered(self._ordered_sum)
        elif self._stage == 0:
            norm, finite = self._step_unsharded()
        else:
            with cpu_threads(self._optimizer_threads):
                self._ds.step()
            norm = self._ds.get_global_grad_norm()
            self._state.clear_gradients()
            # Filled on the device, because a copy of a number from the host would wait for the device.
            finite = torch.full((), not getattr(self._zero, "overflow", False), device=self._processes.device)
        norm = torch.as_tensor(norm if norm is not None else torch.nan, device=self._processes.device).float()
        return torch.where(finite, norm, torch.nan), finite

    @torch.no_grad()
    def _step_ordered(self, ordered_sum: OrderedSum) -> tuple[Tensor, Tensor]:
        """Reduce as the other backends do, and pass the result to DeepSpeed's optimizer, which then does not reduce."""
        ordered_sum.finish()
        norm = gradient_norm(ordered_sum.gradients)
        finite = torch.isfinite(norm)
        if bool(finite):
            torch._foreach_div_(ordered_sum.gradients, clip_divisor(norm, self._max_grad_norm).float())
            self._state.set_gradients(ordered_sum.by_parameter)
            self._zero.step()
            if self._scheduler is not None:
                self._scheduler.step()
        ordered_sum.zero_()
        return norm, finite

    def _step_unsharded(self) -> tuple[Tensor, Tensor]:
        """The step of ZeRO 0, which DeepSpeed would make even with a norm of NaN: check the norm first."""
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

    def local_shards(self) -> dict[str, Tensor]:
        return self._state.local_shards() if self._lacks_weights else super().local_shards()

    def unshard(self, name: str, local: Tensor) -> Tensor:
        return self._state.unshard(name, local)

    def shard(self, name: str, full: Tensor) -> Tensor:
        return self._state.shard(name, full)

    def _read_state(self) -> dict[str, Any]:
        return self._state.read()

    def _write_state(self, state: Mapping[str, Any]) -> None:
        self._state.write(state)

    def _share_weights(self) -> None:
        self._state.share_weights()


def check_internals(owner: Any, names: Iterable[str], context: str = "") -> None:
    """Check that DeepSpeed, or an object of it, has the attributes with these names (dotted).

    Raises:
        UserMistake: one line that names what is missing.
    """
    missing = []
    for name in names:
        try:
            attrgetter(name)(owner)
        except AttributeError:
            missing.append(name)
    if missing:
        raise UserMistake(
            f"DeepSpeed {deepspeed.__version__}{context} has no {', '.join(missing)}: it differs from the "
            f"versions that are allowed; install one of those with `{how_to_install('deepspeed')}`"
        )


@contextmanager
def _without_broadcast() -> Iterator[None]:
    """Context in which DeepSpeed does not broadcast the weights: the broadcast fails for 0-d parameters, and
    `check_replicas` has shown that all processes hold the same weights. Raises UserMistake if this version of DeepSpeed
    lacks one of the ``CLASS_INTERNALS``, which are replaced meanwhile."""
    check_internals(deepspeed, CLASS_INTERNALS)

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
