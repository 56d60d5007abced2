"""One process: debugging, one GPU, and the numbers that every other backend is compared with."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..base import Backend, Engine
from ..launchers import Launch

if TYPE_CHECKING:
    import torch
    from torch import nn


class SingleBackend(Backend):
    name = "single"
    launch_order = 90

    @classmethod
    def was_launched(cls, launch: Launch, args: argparse.Namespace) -> bool:
        return launch.launcher == "python"

    def connect(self) -> None:
        from ..collectives import Alone
        from ..devices import local_device

        self.rank, self.local_rank, self.world_size = 0, 0, 1
        self.device = local_device(self.local_rank)
        self.comm = Alone()

    def disconnect(self, gracefully: bool) -> None:
        return None

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        name: str = "model",
        max_grad_norm: float | None = None,
    ) -> Engine:
        from ..engines.replicated import ReplicatedEngine

        return ReplicatedEngine(self, model, optimizer, name=name, max_grad_norm=max_grad_norm)
