"""Reads and writes ZeRO's state in the form that all backends share: full fp32 weights and moments by parameter name.

Weights and moments of ZeRO 1-2 live in flat fp32 partitions, those of ZeRO 3 in one padded slice per parameter and
rank. Every function here is a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

from ...engines.optimizer_state import check_moments, check_names, neutral_state, read_optimizer, write_optimizer
from ...errors import UserMistake

# What this package uses of DeepSpeed's inside, which another version may name differently.
_OF_CLASSES = (
    "DeepSpeedEngine._broadcast_model", "zero.Init._convert_to_deepspeed_param", "zero.Init._zero_init_param",
)  # fmt: skip
_OF_ENGINE = (
    "_backward_prologue", "_config", "_running_engine_step", "allreduce_gradients", "basic_optimizer",
    "enable_backward_allreduce", "get_global_grad_norm",
)  # fmt: skip
_OF_ZERO = {
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
_OF_ZERO[2] = _OF_ZERO[1]


def check_classes() -> None:
    """Check that DeepSpeed's classes have what this package replaces or calls of them while a model is wrapped.

    Raises:
        UserMistake: one line that names what is missing.
    """
    _refuse([name for name in _OF_CLASSES if not _has(deepspeed, name)])


def check_inside(engine: Any, optimizer: Any, stage: int) -> None:
    """Check that DeepSpeed's engine and ZeRO's optimizer have what this package uses of them.

    Raises:
        UserMistake: one line that names what is missing.
    """
    missing = [f"engine.{name}" for name in _OF_ENGINE if not hasattr(engine, name)]
    missing += [f"optimizer.{name}" for name in _OF_ZERO[stage] if not hasattr(optimizer, name)]
    _refuse(missing, f" at ZeRO {stage}")


def _has(of: Any, name: str) -> bool:
    try:
        attrgetter(name)(of)
    except AttributeError:
        return False
    return True


def _refuse(missing: list[str], where: str = "") -> None:
    if missing:
        raise UserMistake(
            f"DeepSpeed {deepspeed.__version__}{where} has no {', '.join(missing)}: it differs from the "
            f"versions that are allowed; install one of those with `{how_to_install('deepspeed')}`"
        )


def weight_readers(module: nn.Module, stage: int) -> dict[str, Callable[[], Tensor]]:
    """By name, functions that fetch a full fp32 weight or a persistent buffer. A function that need not gather its
    tensor may return the module's own tensor instead of a copy."""
    return {name: partial(_read_weight, tensor, stage) for name, tensor in _state_tensors(module).items()}


def _read_weight(tensor: Tensor, stage: int) -> Tensor:
    full = None
    if stage and isinstance(tensor, nn.Parameter) and tensor.requires_grad:
        full = safe_get_full_fp32_param(tensor)
    elif hasattr(tensor, "ds_id"):
        with deepspeed.zero.GatheredParameters([tensor]):  # a frozen parameter
            full = tensor.detach().clone()
    full = (tensor if full is None else full).detach()
    return full.float() if full.dtype in (torch.bfloat16, torch.float16) else full


def held_weights(module: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """At ZeRO 3, the slices of the fp32 weights that this process holds, and the persistent buffers, by name. Sends
    nothing."""
    return {
        name: _fp32_slice(tensor, optimizer) if isinstance(tensor, nn.Parameter) else tensor.detach()
        for name, tensor in _state_tensors(module).items()
    }


def _fp32_slice(parameter: Any, optimizer: Any) -> Tensor:
    if not parameter.requires_grad:
        return parameter.ds_tensor.detach().to(parameter.device, torch.float32)  # offloaded weights lie on the CPU
    if optimizer.offload_optimizer:
        return safe_get_local_fp32_param(parameter)
    # DeepSpeed's own function waits for the device, for each parameter.
    group, start, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    return optimizer.fp32_partitioned_groups_flat[group].detach().narrow(0, start, size)


def whole_weight(parameter: Any, held: Tensor) -> Tensor:
    """The whole tensor, shaped as a parameter of ZeRO 3, of which every process holds a slice like the parameter's."""
    gathered = held.new_empty(torch.distributed.get_world_size() * held.numel())
    torch.distributed.all_gather_into_tensor(gathered, held.contiguous())
    return gathered[: parameter.ds_numel].view(parameter.ds_shape)


def held_part(parameter: Any, whole: Tensor) -> Tensor:
    """This process's slice of a whole tensor at ZeRO 3. Raises ValueError if it is shaped unlike the parameter."""
    if tuple(whole.shape) != tuple(parameter.ds_shape):
        raise ValueError(f"the shape {tuple(whole.shape)} is not the model's {tuple(parameter.ds_shape)}")
    return _local_slice(parameter, whole)


@torch.no_grad()
def write_weights(module: nn.Module, optimizer: Any, stage: int, weights: Mapping[str, Tensor]) -> None:
    """Set the fp32 weights that this process holds; ``share_weights`` then refreshes the copies of the forward pass.
    No collective, unlike the other functions.

    Raises:
        ValueError: a weight is missing, unexpected or of another shape.
    """
    tensors = _state_tensors(module)
    # ZeRO 3 leaves empty tensors in the module; their attribute ds_shape holds the full shape.
    check_names("weight", weights, {name: getattr(t, "ds_shape", t.shape) for name, t in tensors.items()})
    for name, tensor in tensors.items():
        value = weights[name]
        if stage == 3 and isinstance(tensor, nn.Parameter):
            local = _local_slice(tensor, value)
            tensor.ds_tensor.data.copy_(local)  # type: ignore[attr-defined]
            if tensor.requires_grad:
                safe_set_local_fp32_param(tensor, local)
        else:
            tensor.data.copy_(value)
            if stage and isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                safe_set_full_fp32_param(tensor, value.to(tensor.device).float())


@torch.no_grad()
def share_weights(optimizer: Any, stage: int) -> None:
    """Refresh the copies that the forward pass reads from the fp32 weights."""
    if stage in (1, 2):
        optimizer.update_lp_params()
    elif stage == 3 and (kept_whole := optimizer.persistent_parameters):
        kept_whole[0].partition(kept_whole)  # else all_gather would keep the old gathered weights
        kept_whole[0].all_gather(kept_whole)


def read_zero_optimizer(basic: torch.optim.Optimizer, optimizer: Any, module: nn.Module, stage: int) -> dict[str, Any]:
    """Like ``optimizer_state.read_optimizer``, but sharded moments are given as functions that fetch them."""
    if stage == 0:
        return read_optimizer(basic, _names(module))
    step, slots = 0, []
    for state in basic.state.values():
        step = max(step, int(state.get("step", 0)))
        slots = [slot for slot, value in state.items() if slot != "step" and isinstance(value, Tensor)]
    if slots and stage in (1, 2):
        # Link the moments again: DeepSpeed links them once, after the first step of the first parameter group, which is
        # too early for the other groups.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    names = _names(module)
    moments = {
        slot: {name: partial(safe_get_full_optimizer_state, p, slot) for p, name in names.items()} for slot in slots
    }
    return neutral_state(basic, step, moments)


@torch.no_grad()
def write_zero_optimizer(
    basic: torch.optim.Optimizer, optimizer: Any, module: nn.Module, stage: int, state: Mapping[str, Any]
) -> None:
    """Create the moments as ZeRO does at its first step, then fill them. No collective.

    Raises:
        ValueError: a moment is missing, unexpected or of another shape.
    """
    if stage == 0:
        write_optimizer(basic, _names(module), state)
        return
    names = _names(module)
    check_moments(basic, state, {name: getattr(p, "ds_shape", p.shape) for p, name in names.items()})
    basic.state.clear()
    if stage in (1, 2):
        optimizer._hp_optimizer_states_linked = False  # clear() dropped the linked tensors, so link again
    if not state["moments"]:
        return
    for flat, group in _flat_partitions(basic, optimizer, stage):
        on_device = group.get("fused") or group.get("capturable")
        step = torch.tensor(float(state["step"]), device=flat.device if on_device else torch.device("cpu"))
        slots = {slot: torch.zeros_like(flat) for slot in state["moments"]}
        basic.state[flat] = {"step": step, **slots} if state["step"] else slots  # SGD has no step count
    if stage in (1, 2):
        optimizer._lazy_init_hp_params_optimizer_state()
    for slot, tensors in state["moments"].items():
        for parameter, name in names.items():
            if stage == 3:
                safe_set_local_optimizer_state(parameter, _local_slice(parameter, tensors[name]), slot)
            else:
                safe_set_full_optimizer_state(parameter, tensors[name], slot)


@torch.no_grad()
def write_gradients(optimizer: Any, stage: int, gradients: Mapping[nn.Parameter, Tensor]) -> None:
    """Have the optimizer's next step use these gradients, which are full size and equal on every process, without
    reducing, averaging or rounding them."""
    if stage == 0:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
    elif stage == 3:
        for i, group in enumerate(optimizer.fp16_groups):
            optimizer.averaged_gradients[i] = [_local_slice(p, gradients[p]) for p in group]
    else:
        for i, group in enumerate(optimizer.bit16_groups):
            flat = torch.zeros_like(optimizer.single_partition_of_fp32_groups[i])
            for mapping, gradient in [(p._hp_mapping, gradients[p]) for p in group if p._hp_mapping is not None]:
                source, target = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
                flat.narrow(0, target.start, target.numel).copy_(
                    gradient.flatten().narrow(0, source.start, source.numel)
                )
            optimizer.averaged_gradients[i] = [flat]


@torch.no_grad()
def zero_old_gradients(basic: torch.optim.Optimizer, optimizer: Any, stage: int) -> None:
    """Forget the gradients of the update that was made, so that a parameter that gets none in the next update gets
    zeros, as on the other backends. ZeRO 3, and ZeRO with its optimizer on the CPU, would use the old ones again."""
    if stage == 3:
        optimizer.grad_partitions_flat_buffer.zero_()
    for flat, _ in _flat_partitions(basic, optimizer, stage):
        if flat.grad is not None:
            flat.grad.zero_()


def _flat_partitions(basic: torch.optim.Optimizer, optimizer: Any, stage: int) -> list[tuple[Tensor, dict[str, Any]]]:
    """This rank's flat fp32 tensors, which the basic optimizer steps, with their parameter groups."""
    if stage < 3:
        return [(flat, group) for group in basic.param_groups for flat in group["params"]]
    # ZeRO 3 puts its flat tensors into the parameter groups only during a step.
    groups = optimizer.sub_group_to_group_id
    return [(flat, basic.param_groups[groups[i]]) for i, flat in enumerate(optimizer.fp32_partitioned_groups_flat)]


def _local_slice(parameter: Any, value: Tensor) -> Tensor:
    """This rank's slice of a full tensor at ZeRO 3, padded if the size does not divide by the number of ranks."""
    size = parameter.ds_tensor.numel()
    start = size * torch.distributed.get_rank()
    part = value.flatten()[start : start + size]  # of a memory-mapped file, only this part is read
    local = torch.zeros(size, dtype=torch.float32, device=parameter.ds_tensor.device)
    local[: part.numel()] = part
    return local


def _names(module: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in module.named_parameters() if parameter.requires_grad}


def _state_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers themselves, not copies, by name."""
    return dict(module.state_dict(keep_vars=True))
