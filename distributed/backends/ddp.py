"""The backend for PyTorch over NCCL or Gloo, under torchrun, srun, mpirun, or whatever sets RANK and WORLD_SIZE."""

from __future__ import annotations

import argparse

from tandem.distributed.base import Backend, Connection
from tandem.distributed.launchers import Launch


class DDPBackend(Backend):
    name = "ddp"
    auto_order = 30
    sockets_per_process = 3  # Gloo, the rendezvous and the watchdog

    @classmethod
    def is_requested(cls, launch: Launch, args: argparse.Namespace) -> bool:
        return launch.launcher in ("torchrun", "srun", "mpirun")

    def connect(self) -> Connection:
        from tandem.distributed.devices import local_device
        from tandem.distributed.torch_comm import TorchCommunicator, init_process_group

        device = local_device(self.launch.local_rank, self.launch.launcher)
        is_restart = init_process_group(self.launch, device, self.options.timeout_minutes)
        return Connection(device, TorchCommunicator(), is_restart)

    def remove_time_limit(self) -> None:
        from tandem.distributed.torch_comm import remove_time_limit

        remove_time_limit()

    def disconnect(self, gracefully: bool) -> None:
        from tandem.distributed.torch_comm import leave_process_group

        leave_process_group(gracefully)
