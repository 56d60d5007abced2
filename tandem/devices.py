"""Differences between accelerators: fp64, pinned memory and the measurement of time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

Label = TypeVar("Label")


def has_fp64(device: torch.device | str) -> bool:
    """Whether a device computes in fp64. Apple's MPS and some of Intel's XPUs do not."""
    kind = torch.device(device).type
    # torch.compile traces this function: for the first two kinds, it does not meet the cache of `_has_fp64`.
    return kind in ("cpu", "cuda") or _has_fp64(kind)


@lru_cache
def _has_fp64(kind: str) -> bool:
    try:
        (torch.ones(1, device=kind).to(torch.float64) + 1).sqrt()
    except (TypeError, RuntimeError):
        return False
    return True


def sum_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums within an update: fp64, so that their order does not change the rounded result; fp32 on a
    device without fp64."""
    return torch.float64 if has_fp64(device) else torch.float32


def fp64_device(device: torch.device | str) -> torch.device:
    """The device for sums that need fp64: the device itself, or the host if it has no fp64."""
    return torch.device(device if has_fp64(device) else "cpu")


def double(tensor: Tensor) -> Tensor:
    """A tensor in fp64, on its `fp64_device`. In two steps, because a single copy may convert before it leaves the
    device."""
    return tensor.to(fp64_device(tensor.device)).double()


def to_numbers(tensors: Sequence[Tensor]) -> list[float | int]:
    """The values of 0-d tensors of one device. The host waits for the device once."""
    if tensors and has_fp64(tensors[0].device):
        return list(torch.stack([tensor.double() for tensor in tensors]).tolist())
    return [tensor.item() for tensor in tensors]  # fp32 would round counts above 2^24


def has_pinned_memory(device: torch.device | str) -> bool:
    """Whether copies between host and device overlap with computing if the host's memory is pinned. MPS has the host's
    own memory, and PyTorch pins none for it."""
    return torch.device(device).type not in ("cpu", "mps")


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor on a device. A copy from the host to an accelerator comes from pinned memory: from other memory the host
    would wait for the device's queued work."""
    if tensor.device.type == "cpu" and has_pinned_memory(device):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def start_copy_to_host(tensor: Tensor) -> tuple[Tensor, torch.Event]:
    """A tensor in pinned memory to which an accelerator copies, and the event after which it may be read."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    event = torch.Event(tensor.device)
    event.record()
    return copy, event


def on_host(results: Iterable[tuple[Label, Tensor]]) -> Iterator[tuple[Label, Tensor]]:
    """Tensors of a device as tensors of the host, in their order, each with its label. The host waits for a copy to
    pinned memory only when the next tensor is under way, so that the device always has something to do."""
    pending: tuple[Label, Tensor, torch.Event] | None = None
    for label, tensor in results:
        if not has_pinned_memory(tensor.device):
            yield label, tensor.cpu()
            continue
        copy, event = start_copy_to_host(tensor)
        if pending:
            yield _finish_copy(*pending)
        pending = label, copy, event
    if pending:
        yield _finish_copy(*pending)


def _finish_copy(label: Label, copy: Tensor, event: torch.Event) -> tuple[Label, Tensor]:
    event.synchronize()
    return label, copy


def moment(device: torch.device) -> torch.Event | float:
    """The time at which a device has done its work so far, for `seconds_between`. An accelerator records it without a
    wait of the host; for one without pinned memory the host waits."""
    if has_pinned_memory(device):
        event = torch.Event(device, enable_timing=True)
        event.record()
        return event
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def seconds_between(first: Any, last: Any) -> float:
    """Seconds between two of a device's `moment`s, the last of which has passed."""
    return first.elapsed_time(last) / 1000 if isinstance(first, torch.Event) else last - first


@contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """A context without autocast, in which convolutions on a GPU do not round to TF32: for networks whose numbers are
    published in fp32."""
    previous = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = previous
