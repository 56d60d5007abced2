"""Which GPU is a process's own, and how many files it may open."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from tandem.devices import full_precision
from tandem.distributed import Backend, devices
from tandem.distributed.devices import (
    allow_open_files,
    available_threads,
    check_compiler,
    gpu_id,
    local_device,
    shared_gpu_error,
    use_tf32,
)
from tests.processes import python


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    for name in ("CUDA_VISIBLE_DEVICES", "TANDEM_SHARE_GPU"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


# SLURM may show a process its own GPU alone, and so may who sets CUDA_VISIBLE_DEVICES.
@pytest.mark.parametrize(("launcher", "count", "environ", "own"), [
    ("torchrun", 4, {}, 3), ("srun", 4, {}, 3), ("srun", 1, {}, 0), ("torchrun", 1, {}, None), ("srun", 2, {}, None),
    *((launcher, 1, {"CUDA_VISIBLE_DEVICES": "3"}, 0) for launcher in ("mpirun", "horovodrun", "torchrun")),
    ("torchrun", 2, {"CUDA_VISIBLE_DEVICES": "2,3"}, None), ("torchrun", 2, {"TANDEM_SHARE_GPU": "1"}, 1),
    ("srun", 3, {"TANDEM_SHARE_GPU": "1"}, 0), ("srun", 2, {"TANDEM_SHARE_GPU": "0"}, None),
], ids=str)  # fmt: skip
def test_the_gpu_of_the_fourth_process_of_a_machine(
    launcher: str, count: int, environ: dict[str, str], own: int | None, gpus: pytest.MonkeyPatch
) -> None:
    gpus.setattr(torch.accelerator, "device_count", lambda: count)
    for name, value in environ.items():
        gpus.setenv(name, value)
    if own is not None:
        assert local_device(3, launcher) == torch.device("cuda", own)
    else:  # more processes than GPUs
        with pytest.raises(ValueError, match=f"process 4 .* {count} visible GPU"):
            local_device(3, launcher)


@pytest.fixture
def tf32() -> Iterator[None]:
    """The settings that PyTorch begins with, and after the test again."""
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize(
    ("precision", "matrices", "convolutions", "summary"),
    [("fp32", False, False, ", fp32;"), ("tf32", True, True, ", fp32 (tf32 is for GPUs);"),
     ("bf16", False, True, ", bf16;"), ("fp16", False, True, ", fp16;")],
)  # fmt: skip
def test_gpus_round_fp32_to_tf32_where_that_was_asked_for_and_in_convolutions_beside_lower_precision(
    precision: str, matrices: bool, convolutions: bool, summary: str, single: Callable[..., Backend]
) -> None:
    use_tf32("fp32" if precision == "tf32" else "tf32")
    backend = single(precision=precision)
    allowed = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    assert allowed == (matrices, convolutions) and summary in backend.summary()


@pytest.mark.usefixtures("tf32")
def test_networks_whose_numbers_are_published_compute_in_fp32() -> None:
    use_tf32("bf16")
    image = torch.ones(1, 1, 3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ZeroDivisionError), full_precision("cpu"):
        assert not torch.backends.cudnn.allow_tf32
        assert torch.nn.functional.conv2d(image, image).dtype == torch.float32
        raise ZeroDivisionError
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(
    ("flags", "chosen"), [({}, True), ({"deterministic": True}, False), ({"batch_parts": 2}, False)]
)
def test_training_chooses_kernels_by_time_unless_the_same_bits_were_asked_for(
    flags: dict[str, Any], chosen: bool, single: Callable[..., Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(devices, "use_deterministic_kernels", deterministic := Mock())
    monkeypatch.setattr(devices, "use_one_thread", lambda: None)
    backend = single(**flags)
    assert deterministic.called == (not chosen)
    assert not torch.backends.cudnn.benchmark  # a tool that trains nothing
    model = torch.nn.Linear(2, 2)
    backend.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert torch.backends.cudnn.benchmark == chosen


def test_two_processes_of_one_gpu_are_named_but_not_of_cpus_or_of_slices(gpus: pytest.MonkeyPatch) -> None:
    uuids = ["GPU-1", "GPU-2", "GPU-3", "GPU-2"]
    gpus.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device.index]))
    ids = [gpu_id(torch.device("cuda", index)) for index in range(4)]
    said = shared_gpu_error([None, *ids])
    assert said is not None and said.startswith("ranks 2 and 4 share one GPU, GPU-2;") and "\n" not in said
    assert shared_gpu_error(ids[:3]) is shared_gpu_error([gpu_id(torch.device("cpu"))] * 2) is None
    slices = []
    for visible in ("MIG-1", "MIG-2"):
        gpus.setenv("CUDA_VISIBLE_DEVICES", visible)
        slices.append(gpu_id(torch.device("cuda", 0)))
    assert shared_gpu_error(slices) is None
    gpus.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())  # an older PyTorch
    assert gpu_id(torch.device("cuda", 0)) is None


# The third has processes with cores of their own beside it and on another machine; the last is what the user has said.
@pytest.mark.parametrize(("said", "others", "expected"), [
    ("1", ["itself"], 8), ("1", ["itself"] * 3, 2), ("1", ["itself", "here 1", "elsewhere ff"], 8),
    ("1", ["itself"] * 20, 1), (None, ["itself"] * 2, 4), ("3", ["itself"] * 2, 3),
])  # fmt: skip
def test_a_process_keeps_its_part_of_the_cores_busy_or_as_many_as_it_was_told(
    said: str | None, others: list[str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert available_threads(lambda here: [here if other == "itself" else other for other in others]) == expected


ONE_OF_512 = """
import resource, sys, distributed
from tandem.io.exits import Failed
from tests.processes import parsed
for hard in (4096, 1000):
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    backend = distributed.from_args(parsed(batch_size=512))
    def connect():
        print(*resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
        raise OSError("that is all")
    backend.connect = connect
    try:
        with backend:
            pass
    except Failed:
        pass
"""


def test_the_limit_of_open_files_is_raised_before_512_processes_connect() -> None:
    finished = python(ONE_OF_512, RANK="8", LOCAL_RANK="0", WORLD_SIZE="512")
    assert finished.stdout.split("\n") == ["1792 4096", "1000 1000", ""], finished.stderr  # 256 and 3 for each process
    (said,) = (line for line in finished.stderr.splitlines() if "that is all" not in line)
    assert all(fact in said for fact in ("rank 8 of 512", " 1000 files", " 1792;", "ulimit -Hn"))


def test_a_limit_that_is_high_enough_stays_as_it_is() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert allow_open_files(10) is None and resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_a_compiler_that_fails_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise BackendCompilerFailed(fails, OSError("no space left"), None)

    monkeypatch.setattr(torch.nn.Sigmoid, "compile", lambda self: setattr(self, "forward", fails))
    with pytest.raises(ValueError, match=r"cannot compile here \(OSError: no space left\): install"):
        check_compiler(torch.device("cpu"))
