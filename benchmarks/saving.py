"""How long a save holds up the training loop, against a plain torch.save of the same state."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import train_vae
from tandem import distributed
from tandem.training.checkpoint.store import Checkpoints

from .report import Row, comparison

_WIDTH, _LAYERS, _BATCH_SIZE = 1600, 39, 64  # 99.9 million parameters


def saving(rounds: int) -> Iterator[Row]:
    """Seconds that the training of a model of 100 million parameters with Adam's moments (1.2 GB) waits: in ``save``
    and, if the copy is not finished by then, before the weights change. The first save, which also allocates the memory
    for the copy, is one of the rounds."""
    args = train_vae.build_parser().parse(["--distributed_backend", "single", "--batch_size", str(_BATCH_SIZE)])
    with distributed.from_args(args) as backend, tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder:
        model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))).to(backend.processes.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-6, fused=True)
        engine = backend.wrap(model, optimizer, name="benchmark")
        inputs = torch.randn(_BATCH_SIZE, _WIDTH, device=backend.processes.device)
        callbacks: list[Callable[[], None]] = []
        processes: Any = SimpleNamespace(
            is_root=True, heartbeat=backend.processes.heartbeat, barrier=backend.processes.barrier,
            before_update=callbacks.append,
        )  # fmt: skip
        checkpoints = Checkpoints(Path(folder), keep=1, processes=processes)
        waits, plain_seconds = [], []
        for step in range(rounds):
            engine.backward(engine(inputs).square().mean())
            engine.step()
            parts = {"engine": engine.live_state()}
            waits.append(_time(checkpoints.save, step, parts, {}))
            engine.backward(engine(inputs).square().mean())
            waits[-1] += _time(callbacks.pop())
            engine.step()
            checkpoints.wait()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            plain_seconds.append(_time(torch.save, state, Path(folder) / "plain.pt"))
        if checkpoints.failure:
            raise RuntimeError(checkpoints.failure)
        yield comparison("save, 100 M parameters: loop held up", "seconds", waits, plain_seconds, "over torch.save")


def _time(work: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start
