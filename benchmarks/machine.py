"""Describes the machine on which the benchmarks run."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> int:
    """GPUs that PyTorch can use."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def facts() -> dict[str, Any]:
    """Hardware and versions as JSON values. The load average (1, 5, 15 minutes) shows how busy the machine was."""
    versions = {str(package.name).lower(): package.version for package in metadata.distributions()}
    packages = ("torch", "deepspeed", "horovod", "pillow", "numpy")
    has_gpu = gpus() > 0
    gpu_module: Any = torch.get_device_module() if has_gpu else None
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cpu": proc_value("cpuinfo", "model name") or platform.processor(),
        "cores": cores(),
        "gpus": [gpu_module.get_device_name(index) for index in range(gpus())],
        "gpu_memory_mib": gpu_module.get_device_properties(0).total_memory // 2**20 if has_gpu else None,
        "cuda": torch.version.cuda if has_gpu else None,
        "cudnn": torch.backends.cudnn.version() if has_gpu else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: versions.get(name) for name in packages},
        "load_average_before": list(os.getloadavg()),
    }


def headline(facts: dict[str, Any]) -> str:
    """`facts` in one line, once "load_average_after" and "seconds" are known."""
    load = ", ".join(f"{value:.1f}" for value in facts["load_average_after"])
    gpus = ", ".join(facts["gpus"]) or "none"
    if facts["cuda"]:
        gpus += f" ({facts['gpu_memory_mib']} MiB, CUDA {facts['cuda']}, cuDNN {facts['cudnn']})"
    hardware = f"{facts['cpu']}, {facts['cores']} cores, GPUs: {gpus}"
    return f"{hardware}; torch {facts['packages']['torch']}; {facts['seconds']:.0f} s, load average {load}"


def proc_value(file: str, key: str) -> str | None:
    """The first value of a key in a file of /proc, such as "VmRSS" in "self/status"; None if there is none."""
    path = Path("/proc", file)
    pairs = (line.partition(":") for line in (path.read_text().splitlines() if path.exists() else []))
    return next((value.strip() for name, _, value in pairs if name.strip() == key), None)
