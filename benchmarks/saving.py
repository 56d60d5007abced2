"""How long a save holds up the training loop, against a plain torch.save of the same state."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import distributed
from training.checkpoints.store import Checkpoints

from .jobs import one_process
from .report import Goal, Row

_GOAL = Goal("ratio", "<", 0.1)
_WIDTH, _LAYERS = 1600, 39  # 99.9 million parameters
_BATCH_SIZE = 64


def saving(rounds: int) -> Iterator[Row]:
    """Seconds that the training of a model of 100 million parameters with Adam's moments (1.2 GB) waits: in ``save``
    and, if the copy is not finished by then, before the next update. The first save, which also allocates the memory
    for the copy, is one of the rounds."""
    with one_process(_BATCH_SIZE) as backend, tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder:
        training = _Training(backend)
        held, plain, beside, normal = [], [], [], []
        checkpoints = Checkpoints(Path(folder), keep=1, processes=training)
        for step in range(1, rounds + 1):
            plain.append(training.plain_save(Path(folder) / "plain.pt"))
            training.update()
            normal.append(training.update())
            began = time.perf_counter()
            checkpoints.save(step, {"engine": training.engine.live_state()}, {})
            in_save = time.perf_counter() - began
            beside.append(training.update())
            held.append(in_save + training.waited)
            checkpoints.wait()
            if checkpoints.failure:
                raise RuntimeError(checkpoints.failure)
        yield Row("save, 100 M parameters: loop held up", "seconds", held, plain, _GOAL, "over torch.save")
        note = "over an update without; the wait included"
        yield Row("update during the write", "seconds", beside, normal, note=note)


class _Training:
    """A model and its updates; also the ``processes`` that `Checkpoints` needs."""

    is_root = True

    def __init__(self, backend: distributed.Backend) -> None:
        torch.manual_seed(0)
        layers = itertools.chain.from_iterable((nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(_LAYERS))
        self._model = nn.Sequential(*layers).to(backend.device)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-4, fused=True)
        self._backend = backend
        self._inputs: Tensor = torch.randn(_BATCH_SIZE, _WIDTH, device=backend.device)
        self.engine = backend.wrap(self._model, self._optimizer, name="benchmark")
        self.waited = 0.0
        self.mark, self.barrier = backend.mark, backend.barrier
        self.update()

    def before_update(self, wait: Any) -> None:
        """Register ``wait`` as a training run does, and time it."""

        def timed() -> None:
            began = time.perf_counter()
            wait()
            self.waited = time.perf_counter() - began

        self._backend.before_update(timed)

    def update(self) -> float:
        """Seconds of one update."""
        self.waited = 0.0
        began = time.perf_counter()
        self.engine.backward(self.engine(self._inputs).square().mean())
        self.engine.step()
        self._synchronize()
        return time.perf_counter() - began

    def plain_save(self, path: Path) -> float:
        """Seconds of a plain ``torch.save`` of model and optimizer."""
        self._synchronize()
        began = time.perf_counter()
        torch.save({"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}, path)
        return time.perf_counter() - began

    def _synchronize(self) -> None:
        if self._backend.device.type == "cuda":
            torch.cuda.synchronize()
