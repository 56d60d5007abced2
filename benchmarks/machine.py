"""Describes the machine on which the benchmarks run."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "deepspeed", "horovod", "pillow", "numpy")


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> int:
    """GPUs that PyTorch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def facts() -> dict[str, Any]:
    """Hardware and versions as JSON values. The load average (1, 5, 15 minutes) shows how busy the machine was."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cpu": _cpu_name(),
        "cores": cores(),
        "gpus": _gpu_names(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "load_average_before": list(os.getloadavg()),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _gpu_names() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(gpus())]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
