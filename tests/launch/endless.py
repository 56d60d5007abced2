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


class _Stuck(list[torch.Tensor]):
    process, count = 0, 0

    def __init__(self, args: Namespace) -> None:
        super().__init__([torch.zeros(3, 16, 16)] * 100)
        self.args, self.metrics = args, os.path.join(args.output_dir, "metrics.jsonl")

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        if os.getpid() != self.process:
            self.process, self.count = os.getpid(), 0
        if os.path.exists(self.metrics) and os.path.getsize(self.metrics):
            print(f"reading for ever after {self.count // self.args.batch_size} batches", flush=True)
            time.sleep(1e6)
        self.count += 1
        return super().__getitem__(index)


def stuck(args: Namespace) -> list[torch.Tensor]:
    """After the first update its only loader process never returns, having said how many batches it has loaded."""
    return _Stuck(args)


class _Killed(list[torch.Tensor]):
    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(3, 16, 16)


def killed(args: Namespace) -> list[torch.Tensor]:
    """Its loader processes are killed, as by a system without memory."""
    return _Killed([torch.zeros(3, 16, 16)] * 100)
