"""The device of a process, and settings of PyTorch and of the machine: precision, threads, kernels, open files."""

from __future__ import annotations

import contextlib
import inspect
import os
import platform
import resource
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from torch.optim import Adam, Optimizer

from tandem.flops import FlopCounter

from .errors import first_line


def local_device(local_rank: int, launcher: str = "python") -> torch.device:
    """The GPU of process ``local_rank`` of this machine, or the CPU if there is no GPU. A process may see its own GPU
    alone: by ``--gpus-per-task 1`` if ``launcher`` is srun, or by a wrapper that sets CUDA_VISIBLE_DEVICES.

    Raises:
        ValueError: more processes than GPUs on this machine, unless `gpus_are_shared`.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if gpus_are_shared():
        local_rank %= count
    if count == 1 and (launcher == "srun" or os.environ.get("CUDA_VISIBLE_DEVICES")):
        local_rank = 0  # if several processes see the same GPU, `shared_gpu_error` reports that
    if local_rank >= count:
        cpu_hint = ", or set CUDA_VISIBLE_DEVICES= to train on the CPU" if accelerator.type == "cuda" else ""
        raise ValueError(
            f"process {local_rank + 1} on a machine with {count} visible GPU{'s' * (count > 1)}; "
            f"start one process per GPU{cpu_hint}"
        )
    device = torch.device(accelerator.type, local_rank)
    torch.accelerator.set_device_index(device)
    return device


@cache
def processor_name(device: torch.device) -> str:
    """The kind of a GPU, or of the CPU and its widest vector instructions: it decides how operations round."""
    if device.type != "cpu":
        get_name = getattr(torch.get_device_module(device), "get_device_name", None)
        return str(get_name(device)) if get_name else device.type
    model = ""
    with contextlib.suppress(OSError):  # not Linux
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")
    return f"{model or platform.processor()}, {torch.backends.cpu.get_cpu_capability()}"


def gpus_are_shared() -> bool:
    """Whether TANDEM_SHARE_GPU=1 is in the environment, for tests on a machine with a single GPU: several processes
    then train on it. They communicate through Gloo, because NCCL refuses two processes on one GPU."""
    return os.environ.get("TANDEM_SHARE_GPU") == "1"


def gpu_id(device: torch.device) -> str | None:
    """An id that no other GPU on any machine has; None for a CPU, and where PyTorch knows no id."""
    if device.type == "cpu":
        return None
    get_properties = getattr(torch.get_device_module(device), "get_device_properties", lambda _: None)
    if not (uuid := getattr(get_properties(device), "uuid", None)):
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return f"{uuid} {visible}" if visible.startswith("MIG-") else str(uuid)  # MIG slices of a GPU may share its UUID


def shared_gpu_error(gpu_ids: Sequence[str | None]) -> str | None:
    """One line with the ranks of two processes on the same GPU, which NCCL refuses; None if each has its own."""
    ranks: dict[str, int] = {}
    for rank, gpu in enumerate(gpu_ids):
        if gpu is not None and ranks.setdefault(gpu, rank) != rank:
            return (
                f"ranks {ranks[gpu]} and {rank} share one GPU, {gpu}; start one process per GPU, and let all processes "
                "of a machine see the same list in CUDA_VISIBLE_DEVICES, or each one only its own GPU"
            )
    return None


def allow_open_files(needed: int) -> str | None:
    """Raise this process's limit of open files and sockets to ``needed``, if it is lower. Returns one line if the
    machine does not allow that many; the limit is then the highest that it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit == needed:
        return None
    return (
        f"a process may open {hard} files and sockets on this machine, and may need {needed}; raise the hard limit "
        "(`ulimit -Hn`, or nofile in /etc/security/limits.conf)"
    )


def use_tf32(precision: str) -> None:
    """Set which fp32 operations a GPU may round to TF32, which has 10 of the 23 bits of the mantissa: with "fp32" none,
    with "tf32" matrix products and convolutions. With "bf16" and "fp16", as by PyTorch's default, only convolutions
    that autocast leaves in fp32, such as those of a gradient penalty; products such as distances to codes stay fp32."""
    # Not by the newer fp32_precision: torch.compile reads these names, and PyTorch 2.15 raises if both are used.
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


def use_one_thread() -> None:
    """Let PyTorch compute in one CPU thread: the rounding of a sum depends on the number of threads, and launchers set
    different numbers (torchrun sets OMP_NUM_THREADS=1, others set nothing)."""
    torch.set_num_threads(1)


def skip_compiler_import() -> None:
    """Let optimizers make updates without importing torch._dynamo, the front end of torch.compile, which takes over a
    second and 70 MiB in each process. They import it only to tell it what not to compile. To be called before any
    optimizer is made, and not for a run that compiles.
    """
    methods = Optimizer.add_param_group, Optimizer.zero_grad, Optimizer.state_dict, Optimizer.load_state_dict
    for function in (*methods, FlopCounter.__torch_dispatch__):
        wrapped: Any = inspect.unwrap(function)
        wrapped.__dynamo_disable = wrapped  # what its wrapper, torch._compile._disable_dynamo, calls
    adam_step = inspect.unwrap(Adam.step)  # of AdamW, too; its wrapper imports torch._dynamo in any case

    @wraps(adam_step)
    def step(optimizer: Adam, closure: Any = None) -> Any:
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return adam_step(optimizer, closure)

    Adam.step = step  # type: ignore[assignment, method-assign]


def available_threads(gather_objects: Callable[[Any], list[Any]]) -> int:
    """How many CPU threads this process may use: OMP_NUM_THREADS if it is more than 1 (torchrun sets 1 by default),
    else its share of the cores that it has in common with other processes. Collective."""
    if hasattr(os, "sched_getaffinity"):
        cores = os.sched_getaffinity(0)
    else:  # macOS ties no process to cores
        cores = set(range(os.cpu_count() or 1))
    machine_and_cores = f"{socket.gethostname()} {sum(1 << core for core in cores):x}"
    share = len(cores) // gather_objects(machine_and_cores).count(machine_and_cores)
    return max(share, 1) if os.environ.get("OMP_NUM_THREADS", "1") == "1" else torch.get_num_threads()


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Context in which PyTorch, and extensions that use OpenMP, compute in this many CPU threads; None: no change."""
    if count is None:
        yield
        return
    previous_count = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous_count)


def choose_kernels_by_time() -> None:
    """Let cuDNN time all its kernels for each new shape of a convolution, and use the fastest. Kernels may round
    differently, so processes may compute different bits; tools that do not train leave it off."""
    torch.backends.cudnn.benchmark = True


def check_compiler(device: torch.device) -> None:
    """Compile a small module. Raises ValueError, in one line, if that fails: PyTorch's own error has a hundred
    lines."""
    module = torch.nn.Sigmoid()
    module.compile()
    try:
        module(torch.zeros(8, device=device))
    except Exception as error:
        cause = getattr(error, "inner_exception", None)  # the outer error's first line names only Inductor
        reason = f"{type(cause).__name__}: {first_line(cause)}" if cause else first_line(error)
        requirements = "a C compiler and Triton" if device.type == "cuda" else "g++"
        raise ValueError(
            f"--compile: PyTorch cannot compile here ({reason}): install {requirements} and Python's headers "
            "(apt-get install g++ python3-dev), or leave out --compile"
        ) from None


def use_deterministic_kernels(compiled: bool = False) -> None:
    """Let every operation give the same bits each time, or raise (PyTorch's notes on reproducibility); with
    ``compiled`` also those that torch.compile generates."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    if compiled:
        torch.use_deterministic_algorithms(True)
    else:  # the same, but does not import Inductor, which takes seconds
        torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # slow, for debugging
    torch.backends.cudnn.benchmark = False
