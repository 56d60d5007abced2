"""The weights, moments and gradients that ZeRO holds, in the form that all backends share: full fp32 tensors by name.

Those of ZeRO 1-2 live in flat fp32 partitions, those of ZeRO 3 in one padded slice per parameter and rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

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

from tandem.distributed.engines.optimizer_state import (
    check_moments,
    check_names,
    live_weights,
    portable_state,
    read_optimizer,
    write_optimizer,
)


class ZeroState:
    """Reads and writes the state of an engine of DeepSpeed. The methods that read are collective.

    Args:
        ds: The engine of ``deepspeed.initialize``.
        zero: The optimizer of ``deepspeed.initialize``.
        scheduler: The scheduler of ``deepspeed.initialize``, or None.
        names: The names of the trained parameters.
        stage: The ZeRO stage.
        lacks_weights: Whether the module does not hold the full fp32 weights.
    """

    def __init__(
        self, ds: Any, zero: Any, scheduler: Any, module: nn.Module, names: Mapping[Any, str], stage: int,
        lacks_weights: bool,
    ) -> None:  # fmt: skip
        self._ds, self._zero, self._scheduler, self._module = ds, zero, scheduler, module
        self._names, self._stage, self._lacks_weights = names, stage, lacks_weights
        self._optimizer = ds.basic_optimizer
        self._parameters = {name: t for name, t in self._tensors().items() if isinstance(t, nn.Parameter)}

    def local_shards(self) -> dict[str, Tensor]:
        """See `Engine.local_shards`."""
        return {name: self._local_shard(tensor) for name, tensor in self._tensors().items()}

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
        """See `Engine.unshard`."""
        if self._stage < 3 or name not in self._parameters:
            return local
        parameter: Any = self._parameters[name]
        flat = local.new_empty(torch.distributed.get_world_size() * local.numel())
        torch.distributed.all_gather_into_tensor(flat, local.contiguous())
        return flat[: parameter.ds_numel].view(parameter.ds_shape)

    def shard(self, name: str, full: Tensor) -> Tensor:
        """See `Engine.shard`."""
        if self._stage < 3 or name not in self._parameters:
            return full
        parameter: Any = self._parameters[name]
        if tuple(full.shape) != tuple(parameter.ds_shape):
            raise ValueError(f"the shape {tuple(full.shape)} is not the model's {tuple(parameter.ds_shape)}")
        return _local_slice(parameter, full)

    def read(self) -> dict[str, Any]:
        """See `Engine._read_state`."""
        weights = live_weights(self._module)
        if self._lacks_weights:  # functions, because reading an offloaded weight copies it to the device
            weights = {name: partial(self._read_weight, name, tensor) for name, tensor in self._tensors().items()}
        return {"weights": weights, "optimizer": self._read_optimizer(), "scaler": self._scaler_state()}

    def _read_weight(self, name: str, tensor: Tensor) -> Tensor:
        """A whole weight or buffer, in fp32."""
        return self.unshard(name, self._local_shard(tensor))

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

    def write(self, state: Mapping[str, Any]) -> None:
        """See `Engine._write_state`. No collective."""
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
        """Set the fp32 weights that this process holds; `share_weights` then refreshes the copies of the forward
        pass. No collective.

        Raises:
            ValueError: a weight is missing, unexpected or of another shape.
        """
        tensors = self._tensors()
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
    def share_weights(self) -> None:
        """Refresh the copies that the forward pass reads from the fp32 weights. Collective."""
        if self._stage in (1, 2):
            self._zero.update_lp_params()
        elif self._stage == 3 and (persistent := self._zero.persistent_parameters):
            persistent[0].partition(persistent)  # else all_gather would keep the old gathered weights
            persistent[0].all_gather(persistent)

    @torch.no_grad()
    def set_gradients(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
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
    def clear_gradients(self) -> None:
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

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers themselves, not copies, by name."""
        return dict(self._module.state_dict(keep_vars=True))


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
