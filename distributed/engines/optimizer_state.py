"""Optimizer state by parameter name: the same layout whichever backend holds the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def read_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[Any, str]) -> dict[str, Any]:
    """``{"type", "step", "slots", "moments": {slot: {parameter name: tensor}}}`` of an optimizer, with its own tensors,
    before or after its first step.

    Raises:
        ValueError: the optimizer keeps something that is neither a step count nor shaped like its parameter.
    """
    steps: list[Any] = []
    moments: dict[str, dict[str, Tensor]] = {}
    for parameter, slots in optimizer.state.items():
        if parameter not in names:
            continue  # a frozen parameter
        for slot, value in slots.items():
            if slot == "step":
                steps.append(value)
            elif isinstance(value, Tensor) and value.shape == parameter.shape:
                moments.setdefault(slot, {})[names[parameter]] = value.detach()
            elif value is not None:
                raise ValueError(f"{type(optimizer).__name__} keeps {slot!r}, which cannot be saved by parameter name")
    # All parameters have the same count. Reading each would wait for the device each time.
    return portable_state(optimizer, int(steps[0]) if steps else 0, moments)


@torch.no_grad()
def write_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[Any, str], state: Mapping[str, Any]) -> None:
    """Restore a state of `read_optimizer`; moments get the strides and devices of their parameters. Raises ValueError,
    see `check_moments`."""
    check_moments(optimizer, state, {name: parameter.shape for parameter, name in names.items()})
    optimizer.state.clear()
    if not state["moments"]:
        return
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for parameter in [parameter for parameter in group["params"] if parameter in names]:
            slots: dict[str, Any] = {
                slot: torch.empty_like(parameter, memory_format=torch.preserve_format).copy_(tensors[names[parameter]])
                for slot, tensors in state["moments"].items()
            }
            device = parameter.device if on_device else torch.device("cpu")
            if state["step"]:  # SGD has no step count
                slots["step"] = torch.tensor(float(state["step"]), dtype=torch.float32, device=device)
            optimizer.state[parameter] = slots


def unfuse(optimizer: torch.optim.Optimizer) -> None:
    """Switch the optimizer's fused kernel off.

    On CPUs the fused kernel rounds the last elements of a tensor, which do not fill a vector register, differently from
    the others (measured for Adam with PyTorch 2.15 and AVX-512: a quarter of exp_avg_sq differs if all parameters are
    that short; a fused multiply-add would explain it), and ZeRO's partitions decide which elements come last. Without
    the fused kernel all elements are rounded alike (measured too).
    """
    for group in optimizer.param_groups:
        if group.get("fused"):
            group["fused"] = False
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def live_weights(module: nn.Module) -> dict[str, Any]:
    """Weights and persistent buffers by name, not copied. In the place of one that is not trained stands a function
    that returns it, as a sign that the caller has to copy it immediately, and not in a thread: the next forward pass
    may change it (running statistics, codebooks)."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return {name: tensor.detach() if name in trained else tensor.detach for name, tensor in module.state_dict().items()}


def copy_to_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a state, with copies on the CPU of its tensors and of the tensors that its functions return."""
    copies: dict[str, Any] = {}
    for key, value in state.items():
        leaf = value() if callable(value) else value
        if isinstance(leaf, Mapping):
            copies[key] = copy_to_cpu(leaf)
        else:
            copies[key] = leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf
    return copies


def portable_state(optimizer: torch.optim.Optimizer, step: int, moments: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The state of an optimizer in the form of `read_optimizer`. ``slots`` lists the names of the moments, by which
    `check_moments` notices that one is missing."""
    return {"type": optimizer_kind(optimizer), "step": step, "slots": sorted(moments), "moments": moments}


def optimizer_kind(optimizer: torch.optim.Optimizer) -> str:
    """The saved name of an optimizer's type: "Adam" for all variants of Adam, which have the same two moments."""
    name = type(optimizer).__name__
    return "Adam" if name in ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam") else name


def check_moments(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the first difference, unless the state is of this type of optimizer and each of its
    slots holds exactly the names and shapes of ``shapes``."""
    saved, own = state["type"], optimizer_kind(optimizer)
    if saved != own:
        raise ValueError(
            f"the saved optimizer is {saved}, this run's is {own}: its moments mean something else; use the old one, "
            "or start over with --fresh"
        )
    if mismatched := sorted(set(state["slots"]) ^ set(state["moments"])):
        raise ValueError(f"optimizer moment {mismatched[0]} is missing in the saved state, or in its list of moments")
    for slot, tensors in state["moments"].items():
        check_names(f"optimizer moment {slot}", tensors, shapes)


def check_names(label: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the first difference, unless ``tensors`` has exactly the names and shapes of
    ``shapes``."""
    if missing := sorted(set(shapes) - set(tensors)):
        raise ValueError(f"{label} of {missing[0]} is missing ({len(missing)} in all)")
    if unexpected := sorted(set(tensors) - set(shapes)):
        raise ValueError(f"{label} of {unexpected[0]} belongs to no parameter of this model ({len(unexpected)} in all)")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != tuple(shapes[name]):
            raise ValueError(f"{label} of {name} has shape {tuple(tensor.shape)}, the model has {tuple(shapes[name])}")
