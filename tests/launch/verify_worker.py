"""verify.py on a machine of the name MACHINE, which computes a wrong gradient in update WRONG_UPDATE, if any."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import verify
from tandem.training.run import Run


def flip_a_bit(tensor: Tensor, index: int, bit: int = 0) -> Tensor:
    """The same fp32 numbers but for one bit, by default the lowest, of one."""
    bits = tensor.detach().clone().view(torch.int32)
    bits.view(-1)[index] ^= 1 << bit
    return bits.view(torch.float32)


def wrong_gradient(update: int) -> Callable[[Run, str, Any], None]:
    """A function for `Run.watched` that changes a bit of a gradient of the root in an update: of its largest element,
    and not the lowest bit, which the sum of a moment might round away."""

    def watch(run: Run, event: str, subject: Any) -> None:
        if event == "start" and run.is_root:
            weight = next(iter(subject.engine.module.parameters()))
            weight.register_hook(
                lambda grad: flip_a_bit(grad, int(grad.abs().argmax()), 9) if run.progress.step == update - 1 else grad
            )

    return watch


if __name__ == "__main__":
    socket.gethostname = lambda: os.environ["MACHINE"]
    with Run.watched(wrong_gradient(int(os.environ.get("WRONG_UPDATE", 0)))):
        verify.main(sys.argv[1:])
