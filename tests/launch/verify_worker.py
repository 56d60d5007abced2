"""verify.py on a machine that is called MACHINE, where rank 0 may compute a wrong gradient: at update WRONG_UPDATE."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import torch
from torch import Tensor

import verify
from tandem.training.run import Run


def flip_a_bit(tensor: Tensor, index: int = 0) -> Tensor:
    """The same fp32 numbers but for the lowest bit of one."""
    bits = tensor.detach().clone().view(torch.int32)
    bits.view(-1)[index] ^= 1
    return bits.view(torch.float32)


def watch(run: Run, event: str, subject: Any) -> None:
    if event == "start" and run.is_root and "WRONG_UPDATE" in os.environ:
        weight = next(subject.engine.module.parameters())
        wrong = int(os.environ["WRONG_UPDATE"]) - 1
        weight.register_hook(lambda grad: flip_a_bit(grad) if run.progress.step == wrong else grad)


if __name__ == "__main__":
    socket.gethostname = lambda: os.environ["MACHINE"]
    with Run.watched(watch):
        verify.main(sys.argv[1:])
