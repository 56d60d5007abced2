"""The backend of a single process: for debugging, for one GPU, and the reference for the numbers of all others."""

from __future__ import annotations

import argparse

from tandem.distributed.base import Backend, Connection, Options
from tandem.distributed.errors import UserMistake
from tandem.distributed.launchers import Launch


class SingleBackend(Backend):
    name = "single"
    auto_order = 90

    def __init__(self, launch: Launch, options: Options, args: argparse.Namespace) -> None:
        super().__init__(Launch("python", is_restart=launch.is_restart), options, args)

    @classmethod
    def is_requested(cls, launch: Launch, args: argparse.Namespace) -> bool:
        return launch.launcher == "python"

    @classmethod
    def configure(cls, args: argparse.Namespace, launch: Launch) -> None:
        if launch.world_size > 1:  # each process would train alone, and overwrite the others' files
            raise UserMistake(
                f"--distributed_backend single, but {launch.launcher} started {launch.world_size} processes; "
                "start the script with python, or leave the choice to auto"
            )

    def connect(self) -> Connection:
        from tandem.distributed.collectives import Communicator
        from tandem.distributed.devices import local_device

        return Connection(local_device(self.launch.local_rank), Communicator(), self.launch.is_restart)

    def disconnect(self, gracefully: bool) -> None:
        return None
