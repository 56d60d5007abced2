"""Which GPU is a process's own."""

from __future__ import annotations

import pytest
import torch

from distributed.devices import local_device


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
