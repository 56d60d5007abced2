"""A toy training in which something goes wrong, mostly on rank 1; ``--fault`` says what:

nan            its gradient is NaN in every update after the first two, although its loss is finite
lost_in_meeting, lost_unnoticed, lost_at_end
               it is killed while the others wait: in a meeting; in a collective that does not report it, as NCCL's
               may not; for the last time, all work being done
frozen         the whole job is stopped for longer than --timeout_minutes while a rank waits for the other
slow_write, stuck_write
               rank 0 writes a checkpoint for longer than --timeout_minutes, or on a disk that hangs
stands_in_write
               it stands still while rank 0 writes a checkpoint for longer than --timeout_minutes
fails_in_write, ends_in_write
               an error on rank 0, or on all, while rank 0 writes a checkpoint for some seconds
slow_listing, stuck_listing
               it lists its samples for longer than --timeout_minutes, or on a disk that hangs
mistake        it raises a UserMistake, which all ranks raise together in scripts, while rank 0 waits for it
load           the state that it loads lacks a weight
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tandem.training.checkpoint.format
from tandem import distributed
from tandem.data.feed import TrainingData
from tandem.data.sets import open_images
from tandem.distributed import Backend, ProcessGroup, TrainingStopped, UserMistake, torch_comm
from tandem.io.exits import exit_codes
from tandem.training.checkpoint.store import Checkpoints
from tests.processes import parsed

PAUSE_SECONDS = 0.2


class NaNBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * torch.nan


class Model(nn.Sequential):
    spoil = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self[0](x)
        return self[1](NaNBackward.apply(hidden) if self.spoil else hidden)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def work_for(seconds: float) -> None:
    """Use the processor now and then, as a slow disk has a process do."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(PAUSE_SECONDS)


def lose(processes: ProcessGroup, fault: str) -> None:
    if fault == "lost_in_meeting":
        with processes.raise_on_all_ranks():
            if processes.rank == 1:
                die()
    if processes.rank == 1:
        die()
    if fault == "lost_unnoticed":
        processes.heartbeat("reducing gradients", update=3, collective=True)
        threading.Event().wait()


def freeze(processes: ProcessGroup, seconds: float) -> None:
    """Stop all ranks while the others wait for rank 1, and have them go on."""
    pids = processes.gather_objects(os.getpid())
    if processes.rank == 1:
        if os.fork() == 0:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):  # the others must go on if one has ended
                        os.kill(pid, number)
                time.sleep(seconds)
            os._exit(0)
        before = now = time.monotonic()
        while now - before < seconds:  # until this process was stopped, however late; the others have waited then
            before, now = now, time.monotonic()
            time.sleep(PAUSE_SECONDS)
    processes.barrier()
    print(
        f"rank {processes.rank} goes on\n", end="", flush=True
    )  # in one write: the other rank prints at the same time


def write(processes: ProcessGroup, fault: str, folder: Path, seconds: float) -> None:
    save_file = tandem.training.checkpoint.format.save_file

    def save_slowly(*args: Any) -> None:
        if fault == "stuck_write":
            threading.Event().wait()
        work_for(seconds)
        save_file(*args)

    tandem.training.checkpoint.format.save_file = save_slowly
    checkpoints = Checkpoints(folder, 1, processes)
    checkpoints.save(1, {"part": {"weight": torch.ones(3)}}, {})
    if fault == "stands_in_write":
        processes.heartbeat("standing", collective=processes.is_root)
        threading.Event().wait()
    if fault == "ends_in_write":
        raise TrainingStopped("enough")
    if fault == "fails_in_write" and processes.is_root:
        raise KeyError("x")
    checkpoints.wait()


def list_samples(processes: ProcessGroup, fault: str, seconds: float) -> None:
    def open_samples() -> Any:
        if processes.rank == 1 and fault == "stuck_listing":
            threading.Event().wait()
        work_for(seconds if processes.rank == 1 else 0)
        return open_images("demo:shapes:100", image_size=8)

    args = argparse.Namespace(
        batch_size=12, valid_fraction=0.0, valid_samples=0, validate_every_n_steps=0, seed=0, num_workers=0,
        on_bad_sample="replace", valid_folder=None, shuffle="samples", split_seed=None,
    )  # fmt: skip
    TrainingData(open_samples, args, processes, noun="image", source="samples")


def load(engine: Any, backend: Backend) -> None:
    engine.backward(engine(torch.ones(2, 3)).square().mean())
    engine.step()
    state = engine.state_dict()
    if backend.processes.rank == 1:
        del state["weights"]["1.weight"]
    try:
        with backend.processes.raise_on_all_ranks():
            engine.load_state_dict(state)
    except UserMistake as mistake:
        print(f"{mistake}\n", end="", flush=True)
        sys.exit(2)


def train(backend: Backend, fault: str) -> None:
    torch.manual_seed(0)
    model = Model(nn.Linear(3, 5, bias=False), nn.Linear(5, 2))
    engine = backend.wrap(model, torch.optim.Adam(model.parameters(), fused=True), name="toy")
    if fault == "load":
        load(engine, backend)
    for update in range(20):
        model.spoil = fault == "nan" and update >= 2 and backend.processes.rank == 1
        engine.backward(engine(torch.ones(2, 3)).square().mean())
        engine.step()


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", required=True)
    parser.add_argument("--folder", type=Path, help="for a checkpoint")
    own, flags = parser.parse_known_args(argv)
    args = parsed(*flags, max_skipped_updates=3, **vars(own))
    torch_comm.GRACE_SECONDS = 0  # a collective's own limit, if it has one, is not later than the watchdog's
    longer = 60 * args.timeout_minutes + 4
    with exit_codes(parser.error, ()), distributed.from_args(args) as backend:
        if args.fault == "mistake":
            if backend.processes.rank == 1:
                raise UserMistake("no such folder")
            backend.processes.barrier()
        elif args.fault.startswith("lost"):
            lose(backend.processes, args.fault)
        elif args.fault == "frozen":
            freeze(backend.processes, longer)
        elif args.fault.endswith("listing"):
            list_samples(backend.processes, args.fault, longer)
        elif args.fault.endswith("write"):
            seconds = 5 if args.fault in ("fails_in_write", "ends_in_write") else longer
            write(backend.processes, args.fault, args.folder, seconds)
        else:
            train(backend, args.fault)


if __name__ == "__main__":
    main(sys.argv[1:])
