"""Which GPU is a process's own, and how many files it may open."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed import Backend, devices
from distributed.devices import allow_open_files, cpu_threads, gpu_id, local_device, own_threads, shared_gpu, use_tf32


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name in ("CUDA_VISIBLE_DEVICES", "TANDEM_SHARE_GPU"):
        monkeypatch.delenv(name, raising=False)
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


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_processes_share_gpus_where_the_environment_says_so(launcher: str, gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: 2)
    gpus.setenv("TANDEM_SHARE_GPU", "1")
    assert [local_device(rank, launcher).index for rank in range(4)] == [0, 1, 0, 1]
    gpus.setenv("TANDEM_SHARE_GPU", "0")
    with pytest.raises(ValueError, match="process 4 on a machine with 2 visible GPUs"):
        local_device(3, launcher)


@pytest.fixture
def tf32() -> Iterator[None]:
    """The settings that PyTorch begins with, and after the test again."""
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize(("precision", "said"), [("fp32", ", fp32;"), ("tf32", ", fp32 (tf32 is for GPUs);")])
def test_gpus_round_to_tf32_where_that_was_asked_for_and_nowhere_else(
    precision: str, said: str, single: Callable[..., Backend]
) -> None:
    use_tf32(precision != "tf32")
    backend = single(precision=precision)
    assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == (precision == "tf32")
    assert said in backend.summary()


@pytest.mark.parametrize(
    ("flags", "chosen"), [({}, True), ({"deterministic": True}, False), ({"batch_parts": 2}, False)]
)
def test_training_chooses_kernels_by_time_unless_the_same_bits_were_asked_for(
    flags: dict[str, Any], chosen: bool, single: Callable[..., Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(devices, "use_deterministic_kernels", lambda compiled: None)
    monkeypatch.setattr(devices, "use_one_thread", lambda: None)
    backend = single(**flags)
    assert not torch.backends.cudnn.benchmark  # a tool that trains nothing
    model = torch.nn.Linear(2, 2)
    backend.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert torch.backends.cudnn.benchmark == chosen


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
