"""What a run costs besides its losses: time, waits, memory and, on devices whose peak is known, their utilisation."""

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
    "peak_host_memory_gb", "peak_device_memory_gb", "flop_utilisation",
)  # fmt: skip
"""The metrics that differ between two runs with the same numbers."""

# Dense peaks in TFLOP/s: fp16 and bf16, TF32, fp32. Source: NVIDIA's data sheets of the products, which give most of
# them with sparsity, that is doubled.
_PEAKS = {
    "H200 NVL": (835.5, 417.5, 60.0), "H200": (989.5, 494.5, 67.0),
    "H100 80GB HBM3": (989.5, 494.5, 67.0), "H100 PCIe": (756.5, 378.0, 51.0),
    "A100": (312.0, 156.0, 19.5), "L40S": (362.0, 183.0, 91.6), "L4": (121.0, 60.0, 30.3), "A10": (125.0, 62.5, 31.2),
}  # fmt: skip


_COUNTED_EVERY = 1000  # updates: an adversary may begin in the middle of a run


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


class _Whole:
    """Stands in for what divides the count by modules, whose hooks do not allow torch.autograd.grad (PyTorch 2.15)."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class Costs:
    """What was waited for since the last line of metrics, outside evaluations, and how far the device is used."""

    def __init__(self, processes: Processes, *, precision: str, compiled: bool) -> None:
        self._processes = processes
        self._before = dict(processes.waited)
        self._saving = 0.0
        # A compiled model would not be compiled under the counter.
        self._peak = None if compiled else peak_flops(processes.device, precision)
        self._flops: int | None = None  # of this process, for an update

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

    @contextlib.contextmanager
    def counting(self, step: int) -> Iterator[None]:
        """Context for update number `step`, from 0: the operations of the first one and of every 1000th are counted, if
        the device's peak is known. The counter changes no result."""
        is_counted = self._flops is None or step % _COUNTED_EVERY == 0
        if self._peak is None or not is_counted or not self._processes.is_root:
            yield
            return
        from torch.utils.flop_counter import FlopCounterMode

        counter = FlopCounterMode(display=False)
        counter.mod_tracker = _Whole()  # type: ignore[assignment]
        with counter:
            yield
        self._flops = counter.get_total_flops()

    def waits(self) -> dict[str, float]:
        """Seconds of this process since the last call, by metric."""
        waits = {**self._waited(), "save": self._saving}
        if self._processes.device.type == "cuda":
            del waits["communication"]  # the host waits for all kernels, and those wait for other processes
        self._before, self._saving = dict(self._processes.waited), 0.0
        return {f"{name}_seconds": seconds for name, seconds in waits.items()}

    def utilisation(self, updates_per_second: float) -> dict[str, float]:
        """The fraction of the device's peak that forward and backward passes reach; empty if it is not known."""
        if not self._flops or not self._peak:
            return {}
        return {"flop_utilisation": round(self._flops * updates_per_second / self._peak, 4)}

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
