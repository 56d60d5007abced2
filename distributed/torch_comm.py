"""The communicator over torch.distributed: NCCL on GPUs, Gloo on CPUs. The ddp and deepspeed backends use it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import Handle
from .launchers import DEFAULT_MASTER_PORT, Launch

# Collectives time out later than the watchdog, because only the watchdog's message names the ranks to blame.
GRACE_SECONDS = 60


def init_process_group(launch: Launch, device: torch.device, timeout_minutes: float) -> None:
    """Join the default process group, with rank and address from the launcher."""
    # Adam's first step imports this module. If that happened after the group exists, the module's default arguments
    # would keep the group's threads alive, and a thread that frees a tensor while the interpreter shuts down aborts it.
    import torch.distributed.nn  # noqa: F401

    os.environ.setdefault("MASTER_ADDR", launch.master_address)
    if launch.world_size > 1:
        os.environ.setdefault("MASTER_PORT", str(launch.master_port or DEFAULT_MASTER_PORT))
    # DeepSpeed reads these whatever launcher started the process.
    os.environ.update(RANK=str(launch.rank), LOCAL_RANK=str(launch.local_rank), WORLD_SIZE=str(launch.world_size))
    options: dict[str, Any] = {"timeout": timedelta(minutes=timeout_minutes, seconds=GRACE_SECONDS)}
    if device.type == "cuda":
        options["device_id"] = device
    if launch.world_size == 1 and "MASTER_PORT" not in os.environ:
        # One process needs no port, and two such runs on one machine must not collide on one.
        options["store"] = dist.HashStore()
    else:
        # torchrun keeps its store when it restarts the processes. Each start has its own prefix, so that the new
        # processes do not read what the old ones wrote.
        store, _, _ = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=options["timeout"]))
        options["store"] = dist.PrefixStore(f"start/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    # Initialize Gloo beside NCCL: collectives of small tensors on the CPU then never wait for the GPU.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        rank=launch.rank,
        world_size=launch.world_size,
        **options,
    )


class TorchCommunicator:
    """Collectives of the default process group."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def all_reduce_(self, tensor: Tensor, name: str) -> Handle:
        return dist.all_reduce(tensor, async_op=True)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor.contiguous())
        return parts

    def shift(self, tensor: Tensor, rows: int) -> Tensor:
        if self.world_size == 1:
            return tensor
        arriving = tensor.new_empty((rows, *tensor.shape[1:]))
        transfers = []
        # Both ends know the size: an empty tensor is neither sent nor waited for.
        if tensor.numel():
            transfers.append(dist.P2POp(dist.isend, tensor.contiguous(), (self.rank + 1) % self.world_size))
        if arriving.numel():
            transfers.append(dist.P2POp(dist.irecv, arriving, (self.rank - 1) % self.world_size))
        for transfer in dist.batch_isend_irecv(transfers) if transfers else []:
            transfer.wait()
        return arriving


def leave_process_group(gracefully: bool) -> None:
    """Destroy the process group, but not after an error, because the other processes may be gone."""
    if gracefully and dist.is_initialized():
        dist.destroy_process_group()
