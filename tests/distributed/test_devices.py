"""Which GPU is a process's own."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn

from distributed.devices import cpu_threads, local_device, own_threads


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return monkeypatch


@pytest.mark.parametrize(("visible", "launcher", "own"), [(4, "torchrun", 3), (4, "srun", 3), (1, "srun", 0)])
def test_a_process_has_the_gpu_of_its_rank_or_the_one_that_slurm_shows_it(
    visible: int, launcher: str, own: int, gpus: pytest.MonkeyPatch
) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: visible)
    assert local_device(3, launcher) == torch.device("cuda", own)


@pytest.mark.parametrize(("visible", "launcher"), [(1, "torchrun"), (2, "srun")])
def test_more_processes_than_gpus_are_refused(visible: int, launcher: str, gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: visible)
    with pytest.raises(ValueError, match=f"process 4 on a machine with {visible} visible GPU"):
        local_device(3, launcher)


@pytest.mark.parametrize(
    ("said", "others", "expected"),
    [
        ("1", ["itself"], 8),
        ("1", ["itself", "itself", "itself"], 2),
        ("1", ["itself", "here 1", "elsewhere ff"], 8),  # processes with cores of their own, and on another machine
        ("1", ["itself"] * 20, 1),
        (None, ["itself", "itself"], 4),
        ("3", ["itself"] * 2, 3),  # what the user has said
    ],
)
def test_a_process_keeps_its_part_of_the_cores_busy_or_as_many_as_it_was_told(
    said: str | None, others: list[str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert own_threads(lambda here: [here if other == "itself" else other for other in others]) == expected


@pytest.mark.parametrize("fused", [True, False])
def test_adam_gives_the_same_bits_in_any_number_of_threads(fused: bool) -> None:
    n = 300_001  # PyTorch divides among threads what has more than 32768 numbers
    generator = torch.Generator().manual_seed(0)
    start, *grads = torch.randn(4, n, generator=generator)

    def stepped(threads: int) -> Tensor:
        weight = nn.Parameter(start.clone())
        optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.1, fused=fused)
        with cpu_threads(threads):
            for grad in grads:
                weight.grad = grad.clone()
                optimizer.step()
        state = optimizer.state[weight]
        return torch.cat([weight.detach(), state["exp_avg"], state["exp_avg_sq"]])

    before = torch.get_num_threads()
    assert torch.equal(stepped(1), stepped(2)) and torch.equal(stepped(1), stepped(5))
    assert torch.get_num_threads() == before
