"""The optimizer's state by parameter name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from distributed.engines.optimizer_state import read_optimizer


class Reads(TorchDispatchMode):
    """Counts the numbers that are read from tensors: each makes the host wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_the_step_count_is_read_once_however_many_parameters_there_are() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    with Reads() as reads:
        state = read_optimizer(optimizer, {parameter: name for name, parameter in model.named_parameters()})
    assert state["step"] == 3 and len(state["moments"]["exp_avg"]) == 8
    assert reads.count == 1
