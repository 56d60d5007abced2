"""Networks whose numbers are published in fp32 compute in it, whatever the precision around them is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """A context without autocast, in which convolutions on a GPU do not round to TF32."""
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
