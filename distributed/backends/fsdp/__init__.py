"""The backend for PyTorch's fully sharded data parallel (FSDP2), over NCCL or Gloo, under the launchers of ddp.

It is used only with one of its own flags, or with --distributed_backend fsdp.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tandem.distributed.backends.ddp import DDPBackend
from tandem.distributed.base import Options
from tandem.distributed.launchers import Launch

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from tandem.distributed.engines.base import Engine


class FSDPBackend(DDPBackend):
    name = "fsdp"
    auto_order = 25  # before ddp, which uses the same launchers
    training_flags = ("fsdp_reshard_after_forward", "fsdp_offload")

    def __init__(self, launch: Launch, options: Options, args: argparse.Namespace) -> None:
        super().__init__(launch, options, args)
        self.reshard_after_forward: bool = args.fsdp_reshard_after_forward
        self.offload: bool = args.fsdp_offload
        self.blocks: dict[str, list[str]] = {}  # by engine: names of the blocks that are sharded one by one

    @classmethod
    def is_requested(cls, launch: Launch, args: argparse.Namespace) -> bool:
        return cls.flag_in_use(args) is not None

    @classmethod
    def flag_in_use(cls, args: argparse.Namespace) -> str | None:
        # A run's config.yaml holds these flags whatever its backend is, so their defaults do not ask for FSDP.
        if args.fsdp_offload:
            return "--fsdp_offload"
        return None if args.fsdp_reshard_after_forward else "--no-fsdp_reshard_after_forward"

    @classmethod
    def add_arguments(cls, parser: Any) -> None:
        # fmt: off
        parser.add_argument("--fsdp_reshard_after_forward", action=argparse.BooleanOptionalAction, default=True,
            help="FSDP: free a block's gathered weights after its forward pass and gather them again for its backward "
            "pass; without it, less is sent and more memory is taken")
        parser.add_argument("--fsdp_offload", action="store_true",
            help="FSDP: keep weights, gradients and moments in the memory of the CPU, and update them there")
        # fmt: on

    def make_engine(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> Engine:
        from .engine import FSDPEngine

        engine = FSDPEngine(
            self.processes, self.options, model, optimizer, offload=self.offload,
            reshard_after_forward=self.reshard_after_forward, **options,
        )  # fmt: skip
        self.blocks[engine.name] = engine.blocks
        return engine

    def summary(self) -> str:
        offload_text = " and offloaded to the CPU" if self.offload else ""
        return f"{super().summary()}; the model is sharded{offload_text}"

    def describe(self) -> dict[str, Any]:
        fsdp_settings = {
            "reshard_after_forward": self.reshard_after_forward, "offload": self.offload, "blocks": self.blocks,
        }  # fmt: skip
        return {**super().describe(), "fsdp": fsdp_settings}
