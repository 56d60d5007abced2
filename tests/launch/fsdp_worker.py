"""Measures what FSDP sends and holds, on toy models.

    python tests/launch/fsdp_worker.py FOLDER PRECISION [flags of the distributed layer]

Every process writes FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.nn
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tandem import distributed
from tandem.distributed import Backend
from tests.processes import parsed


class Block(nn.Module):
    """A residual layer; its weights have rows that no number of processes divides."""

    def __init__(self, width: int, activation: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.activation = activation
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(x)))


class Tower(nn.Module):
    """Three blocks, a projection, and a scale without dimensions."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


class Sent(TorchDispatchMode):
    """Counts gathers and scattered sums, by the type of their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for name in ("allgather", "reduce_scatter"):
            if operation.namespace == "c10d" and name in operation.name():
                self.calls[f"{name} {args[0].dtype}".replace("torch.", "")] += 1
        return operation(*args, **(kwargs or {}))


def held(optimizer: torch.optim.Optimizer) -> int:
    """Numbers that the optimizer of this process keeps for each moment."""
    return sum(tensor.numel() for group in optimizer.param_groups for tensor in group["params"])


def measure(backend: Backend) -> dict[str, Any]:
    model = Tower()
    total = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    engine = backend.wrap(model, optimizer, name="tower")
    losses, dtypes = [], []
    x = torch.randn(8, 7, generator=torch.Generator().manual_seed(1))
    rows = 8 // backend.processes.world_size
    own = x[backend.processes.rank * rows : (backend.processes.rank + 1) * rows]
    for _ in range(3):
        with Sent() as sent:
            for part in engine.micro_batches({"x": own}):
                out = engine(part["x"])
                dtypes.append(str(out.dtype))
                engine.backward(out.float().square().mean())
                losses.append(backend.processes.mean({"loss": out.detach().float().square().mean()})["loss"])
            engine.step()
    with engine.full_weights() as whole:
        evaluated = whole(x).square().mean().item()
        types = sorted({str(parameter.dtype) for parameter in whole.parameters()})
    # A pass between the gradient and the update gathers weights that the update makes old.
    engine.backward(engine(own).float().square().mean())
    with torch.no_grad():
        before = engine(own).float()
    engine.lr = 1.0
    engine.step()
    with torch.no_grad():
        moved = (engine(own).float() - before).abs().max().item()
    # That pass has left whole weights of the projection. They are frozen for two passes, of which the first one frees
    # them, then thawed and trained.
    with engine.frozen(), backend.autocast():
        for _ in range(2):
            engine.module(own.requires_grad_()).float().sum().backward()
    before_update = engine.state_dict()["weights"]
    engine.backward(engine(own.detach()).float().square().mean())
    norm = float(engine.step().grad_norm)
    after_update = engine.state_dict()["weights"]
    untrained = [name for name in before_update if torch.equal(before_update[name], after_update[name])]
    return {
        "untrained": untrained, "norms": [norm, penalised(backend, own)], "total": total, "held": held(optimizer),
        "losses": losses, "evaluated": evaluated, "whole": types,
        "sent": sent.calls, "dtypes": sorted(set(dtypes)), "moved": moved,
        "blocks": backend.describe().get("fsdp", {}).get("blocks", {}),
    }  # fmt: skip


def penalised(backend: Backend, x: Tensor) -> float:
    """The norm of the gradient of a penalty on a gradient, where no output of the model lies on the way back."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(7, torch.relu), Block(7, torch.relu), nn.Linear(7, 1))
    engine = backend.wrap(model, torch.optim.Adam(model.parameters(), lr=1e-2, fused=True), name="penalised")
    x = x.detach().requires_grad_()
    with engine.twice_differentiable():
        (gradient,) = torch.autograd.grad(engine(x).float().sum(), x, create_graph=True)
    engine.backward(gradient.square().mean())
    return float(engine.step().grad_norm)


def main(argv: Sequence[str]) -> None:
    folder, precision, *flags = argv
    with distributed.from_args(parsed(*flags, precision=precision, batch_size=8, max_skipped_updates=3)) as backend:
        found = measure(backend)
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"{backend.processes.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
