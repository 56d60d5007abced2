"""What a run costs besides its losses: time, waits, memory; and the operations of an update."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..contracts import Processes

COSTS = (
    "samples_per_second", "seconds", "time", "data_seconds", "communication_seconds", "save_seconds",
    "peak_host_memory_gb", "peak_device_memory_gb",
)  # fmt: skip
"""The metrics that differ between two runs with the same numbers."""

# Dense peaks in TFLOP/s: fp16 and bf16, TF32, fp32. Source: NVIDIA's data sheets of the products, which give most of
# them with sparsity, that is doubled.
_PEAKS = {
    "H200 NVL": (835.5, 417.5, 60.0), "H200": (989.5, 494.5, 67.0),
    "H100 80GB HBM3": (989.5, 494.5, 67.0), "H100 PCIe": (756.5, 378.0, 51.0),
    "A100": (312.0, 156.0, 19.5), "L40S": (362.0, 183.0, 91.6), "L4": (121.0, 60.0, 30.3), "A10": (125.0, 62.5, 31.2),
}  # fmt: skip


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Operations per second that a device can do at most in this precision; None if that is not known."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    found = [peaks for name, peaks in _PEAKS.items() if contains(words, name.split())]
    if not found:
        return None
    return 1e12 * found[0][{"bf16": 0, "fp16": 0, "tf32": 1, "fp32": 2}[precision]]


def contains(words: list[str], name: list[str]) -> bool:
    """Whether a name stands in a text, both as words."""
    return any(words[start : start + len(name)] == name for start in range(len(words)))


@contextlib.contextmanager
def counted(operations: list[int]) -> Iterator[None]:
    """Context that appends how many floating-point operations products, convolutions and attention took inside, by the
    formulas of `torch.utils.flop_counter`. It may change how PyTorch rounds, so a run that is kept does without."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    class Counter(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if formula := flop_registry.get(func._overloadpacket):
                self.total += formula(*args, **(kwargs or {}), out_val=out)
            return out

    with Counter() as counter:
        yield
    operations.append(counter.total)


class Costs:
    """What was waited for since the last line of metrics, outside evaluations."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._before = dict(processes.waited)
        self._saving = 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context for what is not training: its waits are not counted."""
        waited = self._waited()
        yield
        self._before = {name: seconds - waited[name] for name, seconds in self._processes.waited.items()}

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Context for a save, which training waits for."""
        began = time.monotonic()
        yield
        self._saving += time.monotonic() - began

    def waits(self) -> dict[str, float]:
        """Seconds of this process since the last call, by metric."""
        waits = {**self._waited(), "save": self._saving}
        if self._processes.device.type == "cuda":
            del waits["communication"]  # the host waits for all kernels, and those wait for other processes
        self._before, self._saving = dict(self._processes.waited), 0.0
        return {f"{name}_seconds": seconds for name, seconds in waits.items()}

    def memory(self) -> dict[str, float]:
        """The most memory in GB that this process had since it started: of the host, and of its GPU."""
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        peaks = {"peak_host_memory_gb": host}
        if self._processes.device.type == "cuda":
            peaks["peak_device_memory_gb"] = torch.cuda.max_memory_allocated(self._processes.device)
        return {name: round(number / 1e9, 3) for name, number in peaks.items()}

    def _waited(self) -> dict[str, float]:
        return {name: seconds - self._before[name] for name, seconds in self._processes.waited.items()}


def without_costs(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics without what differs between two runs with the same numbers."""
    return {name: value for name, value in line.items() if name not in COSTS}
