"""Own datasets (--dataset) that cannot be trained on."""

from __future__ import annotations

import os
import signal
import time
from argparse import Namespace

import torch


def listing(args: Namespace) -> list[torch.Tensor]:
    """On the last rank it never returns."""
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    rank = int(os.environ.get("HOROVOD_RANK", rank))
    if rank == int(os.environ.get("HOROVOD_SIZE", world_size)) - 1:
        print("listing for ever", flush=True)
        time.sleep(1e6)
    return [torch.zeros(3, 16, 16)] * 100


class _Waiting(list[torch.Tensor]):
    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        print("reading for ever", flush=True)
        time.sleep(1e6)
        return torch.zeros(3, 16, 16)


def reading(args: Namespace) -> list[torch.Tensor]:
    """A run that goes on never gets its first batch."""
    is_new = not os.path.exists(os.path.join(args.output_dir, "checkpoints"))
    return (list if is_new else _Waiting)([torch.zeros(3, 16, 16)] * 100)


class _Killed(list[torch.Tensor]):
    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(3, 16, 16)


def killed(args: Namespace) -> list[torch.Tensor]:
    """Its loader processes are killed, as by a system without memory."""
    return _Killed([torch.zeros(3, 16, 16)] * 100)
