"""Which GPU is a process's own, and how many files it may open."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from distributed.devices import allow_open_files, gpu_id, local_device, shared_gpu


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
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


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun", "torchrun"])
def test_a_process_to_which_a_wrapper_shows_one_gpu_has_that_one(launcher: str, gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: 1)
    gpus.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert local_device(3, launcher) == torch.device("cuda", 0)
    gpus.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    gpus.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="process 4 on a machine with 2 visible GPUs"):
        local_device(3, launcher)


def test_two_processes_of_one_gpu_are_named(gpus: pytest.MonkeyPatch) -> None:
    uuids = ["GPU-1", "GPU-2", "GPU-3", "GPU-2"]
    gpus.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device.index]))
    ids = [gpu_id(torch.device("cuda", index)) for index in range(4)]
    said = shared_gpu(ids)
    assert said is not None and said.startswith("ranks 1 and 3 share one GPU, GPU-2; start one process per GPU")
    assert "\n" not in said
    assert shared_gpu(ids[:3]) is None


def test_cpus_and_slices_of_a_gpu_are_not_taken_for_one_gpu(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    ids = [gpu_id(torch.device("cpu"))] * 2
    for visible in ("MIG-1", "MIG-2"):
        gpus.setenv("CUDA_VISIBLE_DEVICES", visible)
        ids.append(gpu_id(torch.device("cuda", 0)))
    assert shared_gpu(ids) is None
    gpus.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())  # an older PyTorch
    assert gpu_id(torch.device("cuda", 0)) is None


ROOT = Path(__file__).resolve().parents[2]
ONE_OF_512 = """
import resource, sys, distributed
from conftest import parsed
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
backend = distributed.from_args(parsed(batch_size=512))
def connect():
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
    raise SystemExit
backend.connect = connect
with backend:
    pass
"""


@pytest.mark.parametrize(
    ("hard", "limit", "said"),
    [
        (4096, "1792 4096", ""),  # 256 and 3 for each process
        (1000, "1000 1000", "-c: rank 8 of 512: a process may open 1000 files and sockets on this machine, and may "
         "need 1792; raise the hard limit (`ulimit -Hn`, or nofile in /etc/security/limits.conf)\n"),
    ],
)  # fmt: skip
def test_the_limit_of_open_files_is_raised_before_512_processes_connect(hard: int, limit: str, said: str) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/distributed",
                   "RANK": "8", "LOCAL_RANK": "0", "WORLD_SIZE": "512"}  # fmt: skip
    command = [sys.executable, "-c", ONE_OF_512, str(hard)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (finished.stdout.strip(), finished.stderr) == (limit, said)


def test_a_limit_that_is_high_enough_stays_as_it_is() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert allow_open_files(10) is None and resource.getrlimit(resource.RLIMIT_NOFILE) == before
