"""Reads and writes ZeRO's state in the form that all backends share: full fp32 weights and moments by parameter name.

Weights and moments of ZeRO 1-2 live in flat fp32 partitions, those of ZeRO 3 in one padded slice per parameter and
rank. Every method here is a collective, but those that say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

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

from tandem.files.installed import how_to_install

from ...engines.base import Engine
from ...engines.optimizer_state import (
    check_moments,
    check_names,
    live_weights,
    neutral_state,
    read_optimizer,
    write_optimizer,
)
from ...errors import UserMistake

# What this package uses of DeepSpeed's inside, which another version may name differently.
OF_CLASSES = (
    "DeepSpeedEngine._broadcast_model", "zero.Init._convert_to_deepspeed_param", "zero.Init._zero_init_param",
)  # fmt: skip
OF_ENGINE = (
    "_backward_prologue", "_config", "_running_engine_step", "allreduce_gradients", "basic_optimizer",
    "enable_backward_allreduce", "get_global_grad_norm",
)  # fmt: skip
OF_ZERO = {
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
OF_ZERO[2] = OF_ZERO[1]


def check_inside(of: Any, names: Iterable[str], where: str = "") -> None:
    """Check that DeepSpeed, or an object of it, has what this package replaces or calls of it.

    Raises:
        UserMistake: one line that names what is missing.
    """
    missing = []
    for name in names:
        try:
            attrgetter(name)(of)
        except AttributeError:
            missing.append(name)
    if missing:
        raise UserMistake(
            f"DeepSpeed {deepspeed.__version__}{where} has no {', '.join(missing)}: it differs from the "
            f"versions that are allowed; install one of those with `{how_to_install('deepspeed')}`"
        )


class ZeroState(Engine):
    """An engine with what it holds and how that is read and written; ``ZeroEngine`` trains it."""

    _ds: Any
    """DeepSpeed's engine, with its optimizer, the script's optimizer that this one steps, and the JSON's scheduler."""
    _zero: Any
    _scheduler: Any
    _stage: int
    _is_unsharded_fp32: bool
    _parameters: dict[str, Any]
    _twin: nn.Module | None
    """Filled with the full fp32 weights, if the module does not hold them."""

    @contextmanager
    def gathered(self) -> Iterator[Any]:
        if self._twin is None:
            yield self.module
            return
        parameters, buffers = dict(self._twin.named_parameters()), dict(self._twin.named_buffers())
        for name, read in self._weight_readers().items():
            weight = read()
            if name in parameters:
                parameters[name].data = weight.clone()
            elif name in buffers:
                buffers[name].copy_(weight)
        self._twin.train(self.module.training)
        try:
            yield self._twin
        finally:
            for parameter in self._twin.parameters():
                parameter.data = parameter.data.new_empty(0)

    def held_weights(self) -> dict[str, Tensor]:
        if self._stage == 3:  # sends nothing
            return {
                name: self._fp32_slice(tensor) if isinstance(tensor, nn.Parameter) else tensor.detach()
                for name, tensor in self._state_tensors().items()
            }
        if self._twin is None:
            return super().held_weights()
        return {name: read() for name, read in self._weight_readers().items()}

    def _fp32_slice(self, parameter: Any) -> Tensor:
        if not parameter.requires_grad:
            return parameter.ds_tensor.detach().to(parameter.device, torch.float32)  # offloaded weights lie on the CPU
        if self._zero.offload_optimizer:
            return safe_get_local_fp32_param(parameter)
        # DeepSpeed's own function waits for the device, for each parameter.
        group, start, size = self._zero.grad_position[self._zero.get_param_id(parameter)]
        return self._zero.fp32_partitioned_groups_flat[group].detach().narrow(0, start, size)

    def whole_weight(self, name: str, held: Tensor) -> Tensor:
        if self._stage < 3:
            return held
        parameter: Any = self._parameters[name]
        gathered = held.new_empty(torch.distributed.get_world_size() * held.numel())
        torch.distributed.all_gather_into_tensor(gathered, held.contiguous())
        return gathered[: parameter.ds_numel].view(parameter.ds_shape)

    def held_part(self, name: str, whole: Tensor) -> Tensor:
        if self._stage < 3:
            return whole
        parameter: Any = self._parameters[name]
        if tuple(whole.shape) != tuple(parameter.ds_shape):
            raise ValueError(f"the shape {tuple(whole.shape)} is not the model's {tuple(parameter.ds_shape)}")
        return _local_slice(parameter, whole)

    def _weight_readers(self) -> dict[str, Callable[[], Tensor]]:
        """By name, functions that fetch a full fp32 weight or a persistent buffer. A function that need not gather its
        tensor may return the module's own tensor instead of a copy."""
        return {name: partial(_read_weight, tensor, self._stage) for name, tensor in self._state_tensors().items()}

    def _read_state(self) -> dict[str, Any]:
        is_whole = self._is_unsharded_fp32
        return {
            "weights": live_weights(self.module) if is_whole else self._weight_readers(),
            "optimizer": self._read_optimizer(),
            "scaler": self._scaler_state(),
        }

    def _scaler_state(self) -> dict[str, float]:
        scaler = getattr(self._zero, "loss_scaler", None)
        if scaler is None or not self._ds.fp16_enabled():
            return {}
        since_overflow = getattr(scaler, "cur_iter", 0) - getattr(scaler, "last_overflow_iter", -1) - 1
        hysteresis = getattr(scaler, "cur_hysteresis", 1)
        return {"scale": float(scaler.cur_scale), "finite_in_a_row": since_overflow, "hysteresis": hysteresis}

    def _read_optimizer(self) -> dict[str, Any]:
        """Like ``optimizer_state.read_optimizer``, but sharded moments are given as functions that fetch them."""
        if self._stage == 0:
            return read_optimizer(self._optimizer, self._names())
        step, slots = 0, []
        for state in self._optimizer.state.values():
            step = max(step, int(state.get("step", 0)))
            slots = [slot for slot, value in state.items() if slot != "step" and isinstance(value, Tensor)]
        if slots and self._stage in (1, 2):
            # Link the moments again: DeepSpeed links them once, after the first step of the first parameter group,
            # which is too early for the other groups.
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()
        names = self._names()
        moments = {
            slot: {name: partial(safe_get_full_optimizer_state, p, slot) for p, name in names.items()} for slot in slots
        }
        return neutral_state(self._optimizer, step, moments)

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
        applied = state["updates"] - state["skipped_updates"]
        if self._scheduler is not None and applied:
            self._scheduler.step(applied - 1)  # it counts from 0; skipped updates did not advance it

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
            value = weights[name]
            if self._stage == 3 and isinstance(tensor, nn.Parameter):
                local = _local_slice(tensor, value)
                tensor.ds_tensor.data.copy_(local)  # type: ignore[attr-defined]
                if tensor.requires_grad:
                    safe_set_local_fp32_param(tensor, local)
            else:
                tensor.data.copy_(value)
                if self._stage and isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                    safe_set_full_fp32_param(tensor, value.to(tensor.device).float())

    @torch.no_grad()
    def _write_optimizer(self, state: Mapping[str, Any]) -> None:
        """Create the moments as ZeRO does at its first step, then fill them. No collective.

        Raises:
            ValueError: a moment is missing, unexpected or of another shape.
        """
        if self._stage == 0:
            write_optimizer(self._optimizer, self._names(), state)
            return
        names = self._names()
        check_moments(self._optimizer, state, {name: getattr(p, "ds_shape", p.shape) for p, name in names.items()})
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
            for parameter, name in names.items():
                if self._stage == 3:
                    safe_set_local_optimizer_state(parameter, _local_slice(parameter, tensors[name]), slot)
                else:
                    safe_set_full_optimizer_state(parameter, tensors[name], slot)

    @torch.no_grad()
    def _share_weights(self) -> None:
        """Refresh the copies that the forward pass reads from the fp32 weights."""
        if self._stage in (1, 2):
            self._zero.update_lp_params()
        elif self._stage == 3 and (kept_whole := self._zero.persistent_parameters):
            kept_whole[0].partition(kept_whole)  # else all_gather would keep the old gathered weights
            kept_whole[0].all_gather(kept_whole)

    @torch.no_grad()
    def _write_gradients(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Have the optimizer's next step use these gradients, which are full size and equal on every process, without
        reducing, averaging or rounding them."""
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
    def _zero_old_gradients(self) -> None:
        """Forget the gradients of the update that was made, so that a parameter that gets none in the next update gets
        zeros, as on the other backends. ZeRO 3, and ZeRO with its optimizer on the CPU, would use the old ones
        again."""
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

    def _names(self) -> dict[Tensor, str]:
        return {parameter: name for name, parameter in self._parameters.items() if parameter.requires_grad}

    def _state_tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers themselves, not copies, by name."""
        return dict(self.module.state_dict(keep_vars=True))


def _read_weight(tensor: Tensor, stage: int) -> Tensor:
    full = None
    if stage and isinstance(tensor, nn.Parameter) and tensor.requires_grad:
        full = safe_get_full_fp32_param(tensor)
    elif hasattr(tensor, "ds_id"):
        with deepspeed.zero.GatheredParameters([tensor]):  # a frozen parameter
            full = tensor.detach().clone()
    full = (tensor if full is None else full).detach()
    return full.float() if full.dtype in (torch.bfloat16, torch.float16) else full


def _local_slice(parameter: Any, value: Tensor) -> Tensor:
    """This rank's slice of a full tensor at ZeRO 3, padded if the size does not divide by the number of ranks."""
    size = parameter.ds_tensor.numel()
    start = size * torch.distributed.get_rank()
    part = value.flatten()[start : start + size]  # of a memory-mapped file, only this part is read
    local = torch.zeros(size, dtype=torch.float32, device=parameter.ds_tensor.device)
    local[: part.numel()] = part
    return local
