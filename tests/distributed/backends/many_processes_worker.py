"""What DeepSpeed exchanges in an update and in a checkpoint, seen by rank 0 of so many processes that are not there.

    python tests/distributed/backends/many_processes_worker.py

prints a line of JSON per stage and number of processes. PyTorch's "fake" process group communicates with nobody.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tandem import distributed
from tandem.distributed import torch_comm, watchdog
from tandem.distributed.backends.deepspeed import config
from tandem.distributed.collectives import Communicator
from tandem.training.ema import make_ema
from tests.processes import Root, parsed

KINDS = {"all_reduce": "sums", "all_gather_into_tensor": "gathers", "reduce_scatter_tensor": "scattered sums"}
UNEXPECTED = (
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "barrier",
    "all_to_all_single",
    "all_gather_object",
)
counts: Counter[str] = Counter()


def count_calls_of(name: str) -> None:
    function, kind = getattr(dist, name), KINDS.get(name, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        counts[kind] += 1
        counts[f"bytes of {kind}"] += max((t.numel() * t.element_size() for t in tensors), default=0)
        return function(*args, **kwargs)

    setattr(dist, name, call)


def join(launch: Any, *_: Any) -> bool:
    dist.init_process_group("fake", rank=0, world_size=launch.world_size, store=FakeStore())
    return False


def fetch(state: Mapping[str, Any]) -> None:
    """As a save does."""
    for value in state.values():
        if isinstance(value, Mapping):
            fetch(value)
        elif callable(value):
            value()


def measure(processes: int, stage: int, bucket: int) -> dict[str, Any]:
    config.BUCKET_ELEMENTS = bucket
    os.environ["WORLD_SIZE"] = str(processes)
    backend = distributed.from_args(parsed(distributed_backend="deepspeed", zero_stage=stage, batch_size=processes))
    with backend:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 64))
        engine = backend.wrap(model, torch.optim.Adam(model.parameters()))
        averages = make_ema(engine, 0.0, [0.05, 0.1])
        for _ in range(3):  # in the first two, ZeRO 3 looks at the order of the modules
            counts.clear()
            engine.backward(engine(torch.ones(1, 64)).square().mean())
            engine.step()
        found: dict[str, Any] = {"processes": processes, "stage": stage, "update": dict(counts)}
        for phase, act in {
            "averages": averages.update,
            "checkpoint": lambda: fetch(engine.live_state()),
            "checkpoint of averages": lambda: fetch(averages.state_dict()),
        }.items():
            counts.clear()
            act()
            found[phase] = dict(counts)
        print(json.dumps(found), flush=True)
        os._exit(0)  # there is nobody from whom to take leave


def main() -> None:
    os.environ.update(RANK="0", LOCAL_RANK="0", DS_ACCELERATOR="cpu")
    for name in (*KINDS, *UNEXPECTED):
        count_calls_of(name)
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  (forked, all cases share the imports)

    torch_comm.init_process_group = join
    # Tandem's own calls are counted by another test.
    torch_comm.TorchCommunicator = lambda: Root(dist.get_world_size())  # type: ignore[assignment, misc]
    make = watchdog.Watchdog.__init__
    watchdog.Watchdog.__init__ = lambda dog, comm, *others: make(dog, Communicator(), *others)  # type: ignore[method-assign]
    whole = [(processes, stage, config.BUCKET_ELEMENTS) for stage in range(4) for processes in (8, 512)]
    for case in (*whole, (8, 0, 5000), (8, 2, 5000)):
        child = os.fork()
        if child == 0:
            measure(*case)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
