"""A pretend accelerator: after `install`, PyTorch has a device "pretend", whose memory is the host's and whose kernels
are the CPU's. It reports what a GPU would have waited for, and raises what a GPU would refuse: see docs/devices.md.

PyTorch calls the way in PrivateUse1 (https://docs.pytorch.org/tutorials/advanced/privateuseone.html). The environment:
PRETEND_DEVICES, the number of devices (1); PRETEND_NO_FP64=1, the device refuses fp64, as Apple's does.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed

NAME = "pretend"
ROOT = str(Path(__file__).resolve().parents[2])
_OWN = str(Path(__file__).parent)
_NEITHER_OURS_NOR_TOLD = (str(Path(sys.prefix)), _OWN)  # frames of packages and of this folder
_MEMORY = 80 << 30  # bytes of a device


class Report(NamedTuple):
    """What the device has seen: `kind` is "sync" (the host waits for the device), "staged" (it does, because a copy
    comes from memory that is not pinned), "event" (it waits for an event), "race" (a number is read or changed too
    early), "foreign" (a collective of another device's tensor) or "scalar" (a number of the CPU in an operator);
    `lines` are the project's lines that asked for it, the innermost first."""

    phase: str
    kind: str
    what: str
    lines: tuple[str, ...]


class Device:
    """The library, and what it reports. `phase` names the part of a run, for the reports."""

    def __init__(self, library: Path) -> None:
        torch.utils.rename_privateuse1_backend(NAME)
        spec = importlib.util.spec_from_file_location("_pretend", library)
        assert spec is not None and spec.loader is not None
        self.library: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.library)
        self.library.set_devices(int(os.environ.get("PRETEND_DEVICES", "1")))
        self.phase = "start"
        self.reports = Counter[Report]()
        self.sync_debug_mode = "default"
        self._waits_in_error_mode = list[str]()
        self._is_reporting = threading.local()
        self.library.on_report(self._report)

    def _report(self, kind: str, what: str, size: int) -> str:
        if getattr(self._is_reporting, "now", False):
            return ""
        self._is_reporting.now = True
        try:
            lines = _project_lines(sys._getframe(1))
            if kind == "place?":  # the library asks where a copy began, to name the place in a later report
                return " < ".join(lines)
            self.reports[Report(self.phase, kind, what, lines)] += 1
            if kind in ("sync", "staged") and "synchronize" not in what:
                if self.sync_debug_mode == "warn":
                    warnings.warn(f"called a synchronizing operation: {what}", stacklevel=2)
                elif self.sync_debug_mode == "error":
                    self._waits_in_error_mode.append(f"{what} at {' < '.join(lines)}")
            return ""
        finally:
            self._is_reporting.now = False

    def set_sync_debug_mode(self, mode: str) -> None:
        """As torch.cuda.set_sync_debug_mode; but the waits of the mode "error" raise RuntimeError only when it ends."""
        self.sync_debug_mode, waits = mode, self._waits_in_error_mode
        self._waits_in_error_mode = []
        if waits:
            raise RuntimeError("; ".join(waits))


def _project_lines(frame: Any, limit: int = 4) -> tuple[str, ...]:
    """The innermost lines of the project's code above a frame, "file:line"; of other code if there is none."""
    lines, others = [], []
    while frame is not None and len(lines) < limit:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and not file.startswith(_NEITHER_OURS_NOR_TOLD):
            lines.append(f"{file[len(ROOT) + 1 :]}:{frame.f_lineno}")
        elif not file.startswith(_OWN) and len(others) < limit:
            others.append(f"{file.rpartition('site-packages/')[2]}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(lines or others)


class _Properties(NamedTuple):
    """What torch.cuda.get_device_properties returns, as far as anybody asks."""

    uuid: str
    name: str = "Pretend"
    total_memory: int = _MEMORY
    multi_processor_count: int = 132
    max_threads_per_multi_processor: int = 2048
    warp_size: int = 32
    major: int = 9
    minor: int = 0
    gcnArchName: str = ""
    L2_cache_size: int = 50 << 20


class _Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **of_torch: Any) -> Any:
        if of_torch:
            return torch.Stream.__new__(cls, **of_torch)
        return torch.Stream.__new__(cls, torch.device(NAME, device_index(device)), priority=priority)


class _Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        return torch.Event.__new__(cls, NAME, enable_timing=enable_timing)


_LIBRARY: list[Any] = []


def device_index(device: Any = None) -> int:
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return int(_LIBRARY[0].current_device() if index is None else index)


def module(device: Device) -> Any:
    """torch.pretend: what PyTorch, DeepSpeed and the project ask of torch.cuda."""
    pid, library = os.getpid(), device.library

    def stats(device: Any = None) -> Any:
        return library.stats(device_index(device))

    def current_stream(device: Any = None) -> Any:
        return torch.accelerator.current_stream(torch.device(NAME, device_index(device)))

    @contextlib.contextmanager
    def in_stream(stream: Any) -> Iterator[None]:
        before = None if stream is None else current_stream(stream.device.index)
        if stream is not None:
            torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            if before is not None:
                torch.accelerator.set_stream(before)

    @contextlib.contextmanager
    def on_device(device: Any) -> Iterator[None]:
        before = library.current_device()
        library.set_device(device_index(device))
        try:
            yield
        finally:
            library.set_device(before)

    def seed_all(seed: int) -> None:
        for index in range(library.device_count()):
            library.default_generator(index).manual_seed(seed)

    class Module:
        __name__, __file__ = "torch.pretend", __file__
        Stream, Event = _Stream, _Event
        default_generators = property(
            lambda self: [library.default_generator(i) for i in range(library.device_count())]
        )

    functions = {
        "is_initialized": lambda: True,
        "is_available": lambda: library.device_count() > 0,
        "current_device": library.current_device,
        "device_count": library.device_count,
        "_is_in_bad_fork": lambda: os.getpid() != pid,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda *_: True,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "set_device": lambda device: library.set_device(device_index(device)),
        "manual_seed": seed_all,
        "manual_seed_all": seed_all,
        "seed": lambda: None,
        "get_rng_state": lambda device=None: library.default_generator(device_index(device)).get_state(),
        "set_rng_state": lambda state, device=None: library.default_generator(device_index(device)).set_state(state),
        "synchronize": lambda device=None: torch.accelerator.synchronize(torch.device(NAME, device_index(device))),
        "current_stream": current_stream,
        "default_stream": lambda device=None: _Stream(device),
        "set_stream": torch.accelerator.set_stream,
        "stream": in_stream,
        "device": on_device,
        "device_of": lambda tensor: on_device(tensor.device),
        "max_memory_allocated": lambda device=None: stats(device)["peak"],
        "max_memory_reserved": lambda device=None: stats(device)["peak"],
        "memory_allocated": lambda device=None: stats(device)["current"],
        "memory_reserved": lambda device=None: stats(device)["current"],
        "reset_peak_memory_stats": lambda device=None: library.reset_peak(device_index(device)),
        "memory_stats": lambda device=None: {"allocated_bytes.all.current": stats(device)["current"]},
        "mem_get_info": lambda device=None: (_MEMORY - stats(device)["current"], _MEMORY),
        "empty_cache": lambda: None,
        "get_device_properties": lambda device=None: _Properties(f"GPU-pretend-{device_index(device)}"),
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "Pretend",
        "is_current_stream_capturing": lambda: False,
        "_sleep": lambda cycles: None,
        "set_sync_debug_mode": device.set_sync_debug_mode,
    }
    for name, function in functions.items():
        setattr(Module, name, staticmethod(function))
    return Module()


class _ForDeepSpeed:
    """An import hook: DeepSpeed's accelerator is its own one for CUDA, with the name of this device in it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "deepspeed.accelerator.real_accelerator":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None and spec.origin is not None
        execute, package = spec.loader.exec_module, Path(spec.origin).parent

        def exec_module(deepspeed: Any) -> None:
            execute(deepspeed)
            text = (package / "cuda_accelerator.py").read_text()
            text = text.replace("torch.cuda", "torch.pretend").replace("'cuda", "'pretend")
            text = text.replace("import torch.pretend", "import torch")
            names = {"__name__": f"{deepspeed.__package__}.pretend_accelerator", "__package__": deepspeed.__package__}
            exec(compile(text, "pretend_accelerator", "exec"), names)
            deepspeed.SUPPORTED_ACCELERATOR_LIST.append(NAME)
            deepspeed.ds_accelerator = names["CUDA_Accelerator"]()  # type: ignore[operator]
            deepspeed.ds_accelerator._communication_backend_name = "pccl"

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(library_file: Path) -> Device:
    """Give this process's PyTorch the device; to be called before the project is imported."""
    device = Device(library_file)
    _LIBRARY.append(device.library)
    torch._register_device_module(NAME, module(device))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    sys.meta_path.insert(0, _ForDeepSpeed())  # type: ignore[arg-type]

    groups: list[int] = []

    def pccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
        """A process group with NCCL's contract, over Gloo."""
        groups.append(rank)
        return device.library.pccl(torch.distributed.ProcessGroupGloo(store, rank, size, timeout), len(groups))

    torch.distributed.Backend.register_backend("pccl", pccl, devices=[NAME])
    torch.distributed.Backend.default_device_backend_map[NAME] = "pccl"
    return device
