"""What models and training ask of an accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on a device. The copy to an accelerator comes from pinned memory: from other memory the host
    would wait for what the device has still to do."""
    is_on_host = torch.device(device).type == "cpu"
    return tensor if is_on_host else tensor.pin_memory().to(device, non_blocking=True)


@contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """A context without autocast, in which convolutions on a GPU do not round to TF32: for networks whose numbers are
    published in fp32."""
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
