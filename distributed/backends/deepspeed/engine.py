"""The engine for DeepSpeed. DeepSpeed shards and updates; Tandem accumulates gradients, skips non-finite updates, and
reads and writes ZeRO's state in the form that all backends share: full fp32 weights and moments by parameter name.

Weights and moments of ZeRO 1-2 live in flat fp32 partitions, those of ZeRO 3 in one padded slice per parameter and
rank. Every method that reads or writes this state is collective unless its docstring says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from tandem.distributed.devices import available_threads, cpu_threads
from tandem.distributed.engines.arithmetic import clip_divisor, gradient_norm
from tandem.distributed.engines.base import Engine
from tandem.distributed.engines.optimizer_state import (
    check_moments,
    check_names,
    live_weights,
    portable_state,
    read_optimizer,
    unfuse,
    write_optimizer,
)
from tandem.distributed.engines.ordered_sum import OrderedSum
from tandem.distributed.errors import UserMistake
from tandem.io.installed import how_to_install

from .config import AUTO, complete_config, one_line_refusals

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
        self._parameters = {name: t for name, t in self._state_tensors().items() if isinstance(t, nn.Parameter)}
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
            self._clear_stored_gradients()
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
            self._write_gradients(ordered_sum.by_parameter)
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
        if not self._lacks_weights:
            return super().local_shards()
        return {name: self._local_shard(tensor) for name, tensor in self._state_tensors().items()}

    def _local_shard(self, tensor: Any) -> Tensor:
        """In fp32: at ZeRO 3 this process's slice of a weight, else the whole weight; a buffer is whole."""
        is_trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        if self._stage < 3 or not isinstance(tensor, nn.Parameter):
            return _to_fp32(safe_get_full_fp32_param(tensor) if is_trained else tensor)
        if not is_trained:
            local: Tensor = tensor.ds_tensor  # type: ignore[attr-defined]
            return local.detach().to(tensor.device, torch.float32)  # offloaded weights lie on the CPU
        if self._zero.offload_optimizer:
            return safe_get_local_fp32_param(tensor).detach()
        # DeepSpeed's own function waits for the device, for each parameter.
        group, start, size = self._zero.grad_position[self._zero.get_param_id(tensor)]
        return self._zero.fp32_partitioned_groups_flat[group].detach().narrow(0, start, size)

    def unshard(self, name: str, local: Tensor) -> Tensor:
        if self._stage < 3 or name not in self._parameters:
            return local
        parameter: Any = self._parameters[name]
        flat = local.new_empty(torch.distributed.get_world_size() * local.numel())
        torch.distributed.all_gather_into_tensor(flat, local.contiguous())
        return flat[: parameter.ds_numel].view(parameter.ds_shape)

    def shard(self, name: str, full: Tensor) -> Tensor:
        if self._stage < 3 or name not in self._parameters:
            return full
        parameter: Any = self._parameters[name]
        if tuple(full.shape) != tuple(parameter.ds_shape):
            raise ValueError(f"the shape {tuple(full.shape)} is not the model's {tuple(parameter.ds_shape)}")
        return _local_slice(parameter, full)

    def _read_weight(self, name: str, tensor: Tensor) -> Tensor:
        """A whole weight or buffer, in fp32."""
        return self.unshard(name, self._local_shard(tensor))

    def _read_state(self) -> dict[str, Any]:
        weights = live_weights(self.module)
        if self._lacks_weights:  # functions, because reading an offloaded weight copies it to the device
            weights = {name: partial(self._read_weight, name, tensor) for name, tensor in self._state_tensors().items()}
        return {"weights": weights, "optimizer": self._read_optimizer(), "scaler": self._scaler_state()}

    def _scaler_state(self) -> dict[str, float]:
        scaler = getattr(self._zero, "loss_scaler", None)
        if scaler is None or not self._ds.fp16_enabled():
            return {}
        updates_since_overflow = getattr(scaler, "cur_iter", 0) - getattr(scaler, "last_overflow_iter", -1) - 1
        hysteresis = getattr(scaler, "cur_hysteresis", 1)
        return {"scale": float(scaler.cur_scale), "finite_in_a_row": updates_since_overflow, "hysteresis": hysteresis}

    def _read_optimizer(self) -> dict[str, Any]:
        """Like ``optimizer_state.read_optimizer``, but sharded moments are functions that return them whole."""
        if self._stage == 0:
            return read_optimizer(self._optimizer, self._names)
        step, slots = 0, []
        for state in self._optimizer.state.values():
            step = max(step, int(state.get("step", 0)))
            slots = [slot for slot, value in state.items() if slot != "step" and isinstance(value, Tensor)]
        if slots and self._stage in (1, 2):
            # Link the moments again: DeepSpeed links them once, after the first step of the first parameter group,
            # which is too early for the other groups.
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()
        moments = {
            slot: {name: partial(safe_get_full_optimizer_state, p, slot) for p, name in self._names.items()}
            for slot in slots
        }
        return portable_state(self._optimizer, step, moments)

    def _write_state(self, state: Mapping[str, Any]) -> None:
        self._write_weights(state["weights"])
        self._write_optimizer(state["optimizer"])
        if state["scaler"] and self._ds.fp16_enabled():
            scaler = self._zero.loss_scaler
            scaler.cur_scale = state["scaler"]["scale"]
            # The scaler counts updates and remembers the update of the last overflow; -1 means never.
            scaler.cur_iter, scaler.last_overflow_iter = int(state["scaler"].get("finite_in_a_row", 0)), -1
            if "hysteresis" in state["scaler"]:
                scaler.cur_hysteresis = state["scaler"]["hysteresis"]
        n_applied = state["updates"] - state["skipped_updates"]
        if self._scheduler is not None and n_applied:
            self._scheduler.step(n_applied - 1)  # it counts from 0; skipped updates did not advance it

    @torch.no_grad()
    def _write_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set the fp32 weights that this process holds; ``_share_weights`` then refreshes the copies of the forward
        pass. No collective.

        Raises:
            ValueError: a weight is missing, unexpected or of another shape.
        """
        tensors = self._state_tensors()
        # ZeRO 3 leaves empty tensors in the module; their attribute ds_shape holds the full shape.
        check_names("weight", weights, {name: getattr(t, "ds_shape", t.shape) for name, t in tensors.items()})
        for name, tensor in tensors.items():
            weight = weights[name]
            if self._stage == 3 and isinstance(tensor, nn.Parameter):
                local = _local_slice(tensor, weight)
                tensor.ds_tensor.data.copy_(local)  # type: ignore[attr-defined]
                if tensor.requires_grad:
                    safe_set_local_fp32_param(tensor, local)
            else:
                tensor.data.copy_(weight)
                if self._stage and isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                    safe_set_full_fp32_param(tensor, weight.to(tensor.device).float())

    @torch.no_grad()
    def _write_optimizer(self, state: Mapping[str, Any]) -> None:
        """Create the moments as ZeRO does at its first step, then fill them. No collective.

        Raises:
            ValueError: a moment is missing, unexpected or of another shape.
        """
        if self._stage == 0:
            write_optimizer(self._optimizer, self._names, state)
            return
        shapes = {name: getattr(p, "ds_shape", p.shape) for p, name in self._names.items()}
        check_moments(self._optimizer, state, shapes)
        self._optimizer.state.clear()
        if self._stage in (1, 2):
            self._zero._hp_optimizer_states_linked = False  # clear() dropped the linked tensors, so link again
        if not state["moments"]:
            return
        for flat, group in self._flat_partitions():
            on_device = group.get("fused") or group.get("capturable")
            step = torch.tensor(float(state["step"]), device=flat.device if on_device else torch.device("cpu"))
            slots = {slot: torch.zeros_like(flat) for slot in state["moments"]}
            self._optimizer.state[flat] = {"step": step, **slots} if state["step"] else slots  # SGD has no step count
        if self._stage in (1, 2):
            self._zero._lazy_init_hp_params_optimizer_state()
        for slot, tensors in state["moments"].items():
            for parameter, name in self._names.items():
                if self._stage == 3:
                    safe_set_local_optimizer_state(parameter, _local_slice(parameter, tensors[name]), slot)
                else:
                    safe_set_full_optimizer_state(parameter, tensors[name], slot)

    @torch.no_grad()
    def _share_weights(self) -> None:
        """Refresh the copies that the forward pass reads from the fp32 weights."""
        if self._stage in (1, 2):
            self._zero.update_lp_params()
        elif self._stage == 3 and (persistent := self._zero.persistent_parameters):
            persistent[0].partition(persistent)  # else all_gather would keep the old gathered weights
            persistent[0].all_gather(persistent)

    @torch.no_grad()
    def _write_gradients(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Set the gradients of the optimizer's next step, without reducing, averaging or rounding them: whole tensors,
        equal on every process."""
        if self._stage == 0:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
        elif self._stage == 3:
            for i, group in enumerate(self._zero.fp16_groups):
                self._zero.averaged_gradients[i] = [_local_slice(p, gradients[p]) for p in group]
        else:
            for i, group in enumerate(self._zero.bit16_groups):
                flat = torch.zeros_like(self._zero.single_partition_of_fp32_groups[i])
                for mapping, gradient in [(p._hp_mapping, gradients[p]) for p in group if p._hp_mapping is not None]:
                    source, target = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
                    flat.narrow(0, target.start, target.numel).copy_(
                        gradient.flatten().narrow(0, source.start, source.numel)
                    )
                self._zero.averaged_gradients[i] = [flat]

    @torch.no_grad()
    def _clear_stored_gradients(self) -> None:
        """Set the gradients of the last update to zero. ZeRO 3, and ZeRO with its optimizer on the CPU, would reuse
        them for a parameter that gets no gradient in the next update."""
        if self._stage == 3:
            self._zero.grad_partitions_flat_buffer.zero_()
        for flat, _ in self._flat_partitions():
            if flat.grad is not None:
                flat.grad.zero_()

    def _flat_partitions(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """This rank's flat fp32 tensors, which the basic optimizer steps, with their parameter groups."""
        if self._stage < 3:
            return [(flat, group) for group in self._optimizer.param_groups for flat in group["params"]]
        # ZeRO 3 puts its flat tensors into the parameter groups only during a step.
        groups = self._zero.sub_group_to_group_id
        return [
            (flat, self._optimizer.param_groups[groups[i]])
            for i, flat in enumerate(self._zero.fp32_partitioned_groups_flat)
        ]

    def _state_tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers themselves, not copies, by name."""
        return dict(self.module.state_dict(keep_vars=True))


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


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.detach().float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.detach()


def _local_slice(parameter: Any, full: Tensor) -> Tensor:
    """This rank's slice of a full tensor at ZeRO 3, padded if the size does not divide by the number of ranks."""
    size = parameter.ds_tensor.numel()
    start = size * torch.distributed.get_rank()
    values = full.flatten()[start : start + size]  # of a memory-mapped file, only this part is read
    local = torch.zeros(size, dtype=torch.float32, device=parameter.ds_tensor.device)
    local[: values.numel()] = values
    return local
