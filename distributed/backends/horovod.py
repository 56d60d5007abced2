"""The backend for Horovod. Its engine is that of all backends that keep the whole model on each process.

``hvd.DistributedOptimizer`` is not used: it starts with an empty optimizer state, does not show when gradients are
reduced, and fuses tensors in the order of their arrival. The engine's buckets are fused already, so Horovod's own
fusion is switched off, which fixes the order of every sum.
"""

from __future__ import annotations

import argparse
import os
import socket

from tandem.distributed.base import Backend, Connection
from tandem.distributed.errors import UserMistake
from tandem.distributed.launchers import Launch
from tandem.io.installed import HOME, short_path

_INSTALLER = "scripts/install_horovod.sh"


class HorovodBackend(Backend):
    name = "horovod"
    auto_order = 10
    sockets_per_process = 5  # per other process: four of Horovod, one of the watchdog
    package = "horovod"
    install_hint = f"bash {short_path(HOME / _INSTALLER)}"

    @classmethod
    def is_requested(cls, launch: Launch, args: argparse.Namespace) -> bool:
        return launch.launcher == "horovodrun"

    @classmethod
    def configure(cls, args: argparse.Namespace, launch: Launch) -> None:
        if launch.launcher in ("torchrun", "deepspeed") and launch.world_size > 1:
            raise UserMistake(
                f"--distributed_backend horovod, but {launch.launcher} started {launch.world_size} processes, which "
                "Horovod does not see; start the script with horovodrun, or leave the choice to auto"
            )
        if args.reduce_precision == "bf16":
            raise UserMistake("--reduce_precision bf16: Horovod adds no numbers in bf16; use torchrun, or leave it out")

    def connect(self) -> Connection:
        from tandem.distributed.torch_comm import unreachable_own_address

        # horovodrun finds the right network interface, but Horovod 0.28.1 forgets it for the second of its two meshes.
        if int(os.environ.get("HOROVOD_CROSS_SIZE", "1")) > 1 and (address := unreachable_own_address()):
            raise ValueError(
                f"the name of this machine, {socket.gethostname()}, resolves to {address} on it, where the other "
                "machines do not reach it; write the machine's real address into /etc/hosts"
            )
        os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"
        os.environ.setdefault("HOROVOD_CYCLE_TIME", "1")  # ms; Horovod waits this long for tensors to fuse
        # Gloo fails if an answer takes longer than this limit, by default 30 s, as while a job is suspended (SIGSTOP).
        # The limit cannot be changed later. The watchdog ends jobs that make no progress.
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(int(60 * self.options.timeout_minutes) + 60))
        import torch

        if torch.accelerator.is_available():  # without this the host waits for each sum
            os.environ.setdefault("HOROVOD_ENABLE_ASYNC_COMPLETION", "1")
        import horovod.torch as hvd

        from tandem.distributed.devices import gpu_id, local_device, shared_gpu_error
        from tandem.distributed.horovod_comm import HorovodCommunicator

        hvd.init()
        if hvd.size() != self.launch.world_size:
            raise ValueError(
                f"{self.launch.launcher} started {self.launch.world_size} processes, Horovod sees {hvd.size()}; "
                "start the script with horovodrun"
            )
        device = local_device(hvd.local_rank(), self.launch.launcher)
        if device.type == "cuda" and not hvd.nccl_built():
            raise ValueError(
                f"this Horovod was built without NCCL; install CUDA's toolkit, then run {self.install_hint}"
            )
        comm = HorovodCommunicator()
        # NCCL, which starts with the first gradients, would fail if two processes share a GPU.
        if mistake := shared_gpu_error(comm.gather_objects(gpu_id(device))):
            raise UserMistake(mistake)
        return Connection(device, comm, self.launch.is_restart)

    def disconnect(self, gracefully: bool) -> None:
        import horovod.torch as hvd

        if gracefully:
            hvd.shutdown()
