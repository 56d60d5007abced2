"""Floating point operations (FLOPs) of the updates of a run, and the peak rate of its devices.

A multiplication and an addition are two operations. Those of matrix products, convolutions and attention are counted,
forward and backward, of frozen networks too, but not those of recomputation that saves memory. So the fraction of the
peak rate is the model FLOPs utilization (MFU) of Chowdhery et al. 2022, "PaLM", appendix B.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from tandem.flops import FlopCounter

if TYPE_CHECKING:
    from tandem.distributed import ProcessGroup

# Pattern of PyTorch's whole name of a device -> 10^12 operations per second without sparsity in (bf16, fp16, tf32,
# fp32); None: the device has no units for that. A slice of a GPU (MIG) has another name. Since Hopper and Ada NVIDIA's
# datasheets state rates of tensor cores with sparsity, which are twice as high.
_PEAKS: dict[str, tuple[float | None, float | None, float | None, float | None]] = {
    # "NVIDIA V100 Tensor Core GPU" and "NVIDIA T4", datasheets
    r"Tesla V100-SXM2-\d+GB": (None, 125, None, 15.7),
    r"Tesla V100-PCIE-\d+GB": (None, 112, None, 14),
    r"Tesla T4": (None, 65, None, 8.1),
    # "NVIDIA A100 Tensor Core GPU", datasheet
    r"(NVIDIA )?A100-(SXM4|PCIE)-\d+GB|NVIDIA A100 80GB PCIe": (312, 312, 156, 19.5),
    # "NVIDIA H100 Tensor Core GPU" and "NVIDIA H200 Tensor Core GPU", datasheets
    r"NVIDIA H100 80GB HBM3|NVIDIA H200": (989, 989, 494, 67),
    r"NVIDIA H100 PCIe": (756, 756, 378, 51),
    r"NVIDIA H100 NVL": (835, 835, 417, 60),
    # "NVIDIA L4 Tensor Core GPU" and "NVIDIA L40S", datasheets
    r"NVIDIA L4": (121, 121, 60, 30.3),
    r"NVIDIA L40S": (362, 362, 183, 91.6),
    # "NVIDIA Ampere GA102 GPU Architecture" and "NVIDIA Ada GPU Architecture", appendices A, with fp32 accumulation
    r"NVIDIA GeForce RTX 3090": (71, 71, 35.6, 35.6),
    r"NVIDIA GeForce RTX 4090": (165.2, 165.2, 82.6, 82.6),
    # "AMD Instinct MI250X" (of one of its two dies, which is a device) and "AMD Instinct MI300X", data sheets
    r"AMD Instinct MI250X(/MI250| / MI250)?": (191.5, 191.5, None, 47.9),
    r"AMD Instinct MI300X( OAM)?": (1307.4, 1307.4, 653.7, 163.4),
}


MAX_KINDS = 32


def peak_flops(name: str | None, precision: str) -> float | None:
    """Peak operations per second of the device with this name of PyTorch, in "bf16", "fp16", "tf32" or "fp32"; None if
    unknown."""
    for pattern, rates in _PEAKS.items():
        if re.fullmatch(pattern, name or ""):
            tera = rates[("bf16", "fp16", "tf32", "fp32").index(precision)]
            return tera and tera * 1e12
    return None


def device_name(device: torch.device) -> str | None:
    """PyTorch's name of a device; None for a CPU, and where PyTorch has none."""
    if device.type == "cpu":
        return None
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(get_name(device)) if get_name else None


def total_peak_flops(processes: ProcessGroup, precision: str) -> float | None:
    """The sum of `peak_flops` of all processes' devices in a precision; None if one is unknown. Collective."""
    peaks = processes.gather_objects(peak_flops(device_name(processes.device), precision))
    return None if None in peaks else sum(peaks)


def measure_matmul_flops(device: torch.device, precision: str) -> float:
    """Operations per second of a product of two square matrices on this device, with the threads of this process: the
    highest rate that is measured within a second, in which the matrices grow."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    max_rate, size, deadline = 0.0, 256, time.monotonic() + 1.0
    while max_rate == 0.0 or time.monotonic() < deadline:
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        product = torch.empty_like(matrix)
        start = time.monotonic()
        torch.mm(matrix, matrix, out=product)
        product[0, 0].item()  # waits for the device
        seconds = time.monotonic() - start
        max_rate = max(max_rate, 2 * size**3 / seconds)
        if seconds < (0.1 if size < 1024 else 0.01):  # a short product is mostly launch and wait
            size *= 2
    return max_rate


class Operations:
    """Counts the operations of this process's updates. All updates of one kind have the same number. The first two are
    counted, and the second count holds, because the first may include the initialisation of a codebook. Later updates
    are not slowed down by counting.

    Kinds after the first `MAX_KINDS`, as of texts whose lengths vary, are not counted.

    Args:
        is_compiled: The first update of each kind is not counted: the compiler may try kernels in it.
        hides_recomputation: Nothing is counted, because a compiled backward pass does not show what it recomputes.
    """

    def __init__(self, *, is_compiled: bool = False, hides_recomputation: bool = False) -> None:
        self._is_compiled, self._is_unknown = is_compiled, hides_recomputation
        self._updates: Counter[Hashable] = Counter()
        self._flops: dict[Hashable, float] = {}
        self._since_line: Counter[Hashable] = Counter()  # updates since the last line of metrics.jsonl

    @contextmanager
    def update(self, kind: Hashable) -> Iterator[None]:
        """Context for an update."""
        is_tracked = kind in self._updates or len(self._updates) < MAX_KINDS
        number = self._updates[kind]
        if not is_tracked or self._is_unknown or number > 1 or (self._is_compiled and number == 0):
            yield
        else:
            with FlopCounter() as counter:
                yield
            self._flops[kind] = counter.flops
        if is_tracked:
            self._updates[kind] += 1
        self._since_line[kind] += 1

    def flops_of(self, kind: Hashable) -> float:
        """Operations of an update; NaN if unknown."""
        return self._flops.get(kind, math.nan)

    def mean_since_line(self) -> float:
        """Mean operations per update since the last line; NaN if those of an update are unknown."""
        total = sum(self.flops_of(kind) * updates for kind, updates in self._since_line.items())
        mean = total / self._since_line.total() if self._since_line else math.nan
        self._since_line.clear()
        return mean
