"""The backend for DeepSpeed, ZeRO 0 to 3, over NCCL or (DS_ACCELERATOR=cpu) Gloo."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.config.converters import FILE
from tandem.distributed.backends.ddp import DDPBackend
from tandem.distributed.base import Connection, Options
from tandem.distributed.errors import UserMistake
from tandem.distributed.launchers import Launch
from tandem.io.installed import how_to_install

from .config import check_batch_parts, merge_config, read_config

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from tandem.distributed.engines.base import Engine


class DeepSpeedBackend(DDPBackend):
    name = "deepspeed"
    auto_order = 20
    sockets_per_process = 4  # Gloo, once more for a group of DeepSpeed, the rendezvous and the watchdog
    package = "deepspeed"
    install_hint = how_to_install("deepspeed")
    training_flags = ("zero_stage",)

    def __init__(self, launch: Launch, options: Options, args: argparse.Namespace) -> None:
        super().__init__(launch, options, args)
        self.config_path: str | None = args.deepspeed_config
        self.config: dict[str, Any] = read_config(self.config_path) if self.config_path else {}
        # One value per model, if it is a list. If the JSON needs it, `merge_config` has checked that all are the same.
        warmup = getattr(args, "lr_warmup_steps", 0)
        self.warmup_steps: int = warmup[0] if isinstance(warmup, list) else warmup
        self.zero_stage: int = args.zero_stage
        self._requested_stage = self.zero_stage
        if options.plan.batch_parts:
            check_batch_parts(self.config, options.precision, args.deepspeed_config)
        has_low_precision_weights = bool(self.config.get("bf16", {}).get("enabled")) or options.precision == "fp16"
        if self.zero_stage == 0 and has_low_precision_weights:
            # Stage 0 hides the fp32 weights and moments, so they could not be saved. Stage 1 gives the same numbers.
            self.zero_stage = 1
        self.engine_configs: dict[str, dict[str, Any]] = {}  # by engine name, with DeepSpeed's defaults

    @classmethod
    def is_requested(cls, launch: Launch, args: argparse.Namespace) -> bool:
        return launch.launcher == "deepspeed" or cls.flag_in_use(args) is not None

    @classmethod
    def flag_in_use(cls, args: argparse.Namespace) -> str | None:
        if args.deepspeed_config:
            return "--deepspeed_config"
        if args.deepspeed:
            return "--deepspeed"
        # A run's config.yaml holds zero_stage 0 whatever its backend is, so 0 does not ask for DeepSpeed.
        return "--zero_stage" if args.zero_stage else None

    @classmethod
    def add_arguments(cls, parser: Any) -> None:
        # fmt: off
        parser.add_argument("--deepspeed", action="store_true",
            help="use DeepSpeed; the deepspeed launcher passes this flag")
        parser.add_argument("--deepspeed_config", type=FILE, metavar="FILE",
            help="a DeepSpeed JSON; sets flags that neither the command line nor --config sets, and must not "
            "contradict the others")
        parser.add_argument("--zero_stage", type=int, choices=(0, 1, 2, 3), default=0,
            help="DeepSpeed's ZeRO stage; a --deepspeed_config may set it instead")
        # fmt: on

    @classmethod
    def configure(cls, args: argparse.Namespace, launch: Launch) -> None:
        if args.deepspeed_config:
            merge_config(args, read_config(args.deepspeed_config), launch.world_size)

    def connect(self) -> Connection:
        import torch

        accelerator = torch.accelerator.current_accelerator(check_available=True)
        os.environ.setdefault("DS_ACCELERATOR", accelerator.type if accelerator else "cpu")
        import deepspeed

        # DeepSpeed imports this module when it wraps a model. Its decorators would import the compiler for functions of
        # Muon, which no script calls. They read the variable, which is deleted again for --compile and user code.
        is_set = "TORCHDYNAMO_DISABLE" in os.environ
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        import deepspeed.runtime.zero.muon.original_muon

        if not is_set:
            del os.environ["TORCHDYNAMO_DISABLE"]

        from . import engine  # noqa: F401  (imported now, so that an unsuitable version fails first)

        # Not needed: this extension for inference on CPUs would compile for minutes at the first start on a machine.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if self.options.precision == "fp16" and accelerator is None:
            raise UserMistake(
                "fp16 is DeepSpeed's own mode, which needs a GPU; on the CPU use --precision bf16 or fp32, or another "
                "backend such as ddp"
            )
        connection = super().connect()
        deepspeed.init_distributed(dist_backend=torch.distributed.get_default_backend_for_device(connection.device))
        return connection

    def _launcher_pids(self) -> Any:
        # The launcher is this process's parent, the `deepspeed` command the parent's parent. A signal ends the command,
        # which does not pass it on to the launcher.
        parent = os.getppid()
        return (parent, _parent_pid(parent)) if self.launch.launcher == "deepspeed" else parent

    def make_engine(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> Engine:
        from .engine import ZeroEngine

        engine = ZeroEngine(
            self.processes, self.options, model, optimizer, zero_stage=self.zero_stage, config=self.config,
            config_path=self.config_path, warmup_steps=self.warmup_steps, total_updates=self.total_updates, **options,
        )  # fmt: skip
        self.engine_configs[engine.name] = engine.config
        return engine

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "zero_stage": self.zero_stage, "deepspeed": self.engine_configs}

    def summary(self) -> str:
        phrases = [super().summary(), f"ZeRO stage {self.zero_stage}"]
        if self.zero_stage != self._requested_stage:
            phrases[-1] += " (instead of 0, which cannot save the fp32 weights behind weights of low precision)"
        if self.zero_stage == 3 and self.options.compile:
            # Measured on a CPU, 6 blocks of 256: 33 ms per update, and 21 without --compile; at stage 2 it is 5 and 6.
            phrases.append(
                "--compile makes stage 3 slower, because gathering the weights of each layer cuts the compiled graph "
                "there: leave it out, or use stage 2"
            )
        if "optimizer" in self.config:
            phrases.append(f"optimizer {self.config['optimizer'].get('type')} of the JSON instead of the script's")
            if "scheduler" not in self.config:
                phrases[-1] += ", the schedule stays the script's"
        if "scheduler" in self.config:
            phrases.append("learning rate by the scheduler of the JSON instead of the script's schedule")
        return "; ".join(phrases)


def _parent_pid(process: int) -> int | None:
    """The id of a process's parent; None if the system has no /proc."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None
