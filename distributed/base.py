"""The interface Backend: how processes are connected, and how a model is spread over them. A ProcessGroup
(process_group.py) stands for the connected processes, an Engine (engines/base.py) for one model and its optimizer.

A script uses only these three classes and never asks for a backend's name:

    with distributed.from_args(args) as backend:
        with backend.processes.raise_on_all_ranks():
            model = DiscreteVAE(config).to(backend.processes.device)
        engine = backend.wrap(model, optimizer, name="vae")
        for micro_batch in engine.micro_batches(batch):
            engine.backward(engine(micro_batch["images"]).recon_loss)
        update = engine.step()
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import _GeneratorContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tandem.io.exits import Failed
from tandem.io.writing import say

from .batch import BatchPlan
from .errors import UserMistake, first_line

if TYPE_CHECKING:  # `--help` must not import PyTorch
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from tandem.distributed.engines.base import Engine

    from .collectives import Communicator
    from .launchers import Launch
    from .process_group import ProcessGroup


_FILES_PER_PROCESS = 256  # open files of data, loaders, trackers and libraries, besides the sockets to other processes


@dataclass(frozen=True)
class Options:
    """How engines update, from the arguments and the backend's own configuration."""

    plan: BatchPlan
    precision: str = "fp32"  # fp32, tf32, bf16 or fp16
    max_grad_norm: float = 0.0  # 0: no clipping
    max_skipped_updates: int = 20
    compile: bool = False
    timeout_minutes: float = 30.0
    check_replicas_every_n_steps: int = 1000  # 0: only before training
    deterministic: bool = False
    reduce_precision: str = "fp32"  # of the gradients that processes exchange: fp32 or bf16


def import_torch() -> None:
    """Import PyTorch with the garbage collector off, and let later collections skip what was imported: collections
    would take a fifth of the time of the import."""
    if "torch" not in sys.modules and gc.isenabled():
        gc.disable()
        try:
            import torch  # noqa: F401
        finally:
            gc.freeze()
            gc.enable()


class Connection(NamedTuple):
    """The outcome of `Backend.connect`."""

    device: torch.device
    comm: Communicator
    is_restart: bool
    """Whether the launcher started these processes again after some had failed."""


class Backend(ABC):
    """How the processes of a job are connected, and how a model is spread over them. A context manager: enter to
    connect, leave to disconnect.

    A new backend is a subclass in one new file or folder in ``backends/``. It defines ``name``, ``auto_order``,
    ``is_requested``, ``connect`` and ``disconnect``; if they apply also ``package`` and ``install_hint``, its own
    flags (``add_arguments``, ``flag_in_use``, ``configure``), and an engine of its own (``make_engine``).
    """

    processes: ProcessGroup
    """The connected processes, once this context is entered."""

    name: ClassVar[str]
    auto_order: ClassVar[int]
    """``--distributed_backend auto`` takes the requested backend with the lowest number."""
    package: ClassVar[str] = ""
    """The Python package that it needs besides PyTorch."""
    install_hint: ClassVar[str] = ""
    """The command that installs the package."""
    training_flags: ClassVar[tuple[str, ...]] = ()
    """Names of its flags that have no effect in a script that trains nothing."""
    sockets_per_process: ClassVar[int] = 0
    """Sockets that the root, which has the most, opens for each process of the job."""

    def __init__(self, launch: Launch, options: Options, args: argparse.Namespace) -> None:
        self.launch, self.options = launch, options
        self._can_compile = False  # not checked yet
        self.total_updates: int | None = None
        """Number of updates of the run, if it is set before ``wrap``."""
        self._training_flag_values = [getattr(args, name) for name in self.training_flags]
        self._initial_launcher_pids = self._launcher_pids()
        self._after_leaving: list[Callable[[], None]] = []

    @classmethod
    @abstractmethod
    def is_requested(cls, launch: Launch, args: argparse.Namespace) -> bool:
        """Whether the launcher or the arguments ask for this backend."""

    @abstractmethod
    def connect(self) -> Connection:
        """Connect this process with the others; on return every process is connected."""

    @abstractmethod
    def disconnect(self, gracefully: bool) -> None:
        """Disconnect. If not ``gracefully``, an error has happened and a process may be gone, so wait for none."""

    def remove_time_limit(self) -> None:
        """From now on collectives wait without a time limit, and only the watchdog ends a job that hangs: one process
        may write for hours, and the watchdog does not count time in which the whole job was suspended."""
        return

    @classmethod
    def is_available(cls) -> bool:
        """Whether ``package`` is installed; does not import it."""
        return not cls.package or importlib.util.find_spec(cls.package) is not None

    @classmethod
    def add_arguments(cls, parser: Any) -> None:
        """Add the flags that only this backend has."""
        return

    @classmethod
    def flag_in_use(cls, args: argparse.Namespace) -> str | None:
        """A flag that only this backend has and that is not at its default, or None. A run that uses another backend
        refuses it."""
        return None

    @classmethod
    def configure(cls, args: argparse.Namespace, launch: Launch) -> None:
        """Set flags in ``args`` from the backend's own configuration, before anything starts.

        Raises:
            UserMistake: the arguments contradict the configuration or the launcher.
        """
        return

    def make_engine(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> Engine:
        """The engine that ``wrap`` returns; by default each process holds the whole model. ``options`` are the ``name``
        and the ``max_grad_norm`` of ``wrap``."""
        from tandem.distributed.engines.replicated import ReplicatedEngine

        return ReplicatedEngine(self.processes, self.options, model, optimizer, **options)

    def _launcher_pids(self) -> Any:
        """The ids of the processes that started this one; they change when one of those ends."""
        return os.getppid()

    def __enter__(self) -> Backend:
        import_torch()
        from .devices import allow_open_files, skip_compiler_import, use_deterministic_kernels, use_one_thread, use_tf32
        from .process_group import ProcessGroup
        from .signals import Signals

        launch, options = self.launch, self.options
        use_tf32(options.precision)
        if not options.compile:
            skip_compiler_import()
        # --batch_parts promises the same bits on any number of processes.
        if options.deterministic or options.plan.batch_parts:
            use_deterministic_kernels(compiled=options.compile)
        signals = Signals(self._is_orphan, is_root=launch.is_root, launcher=launch.launcher)
        try:
            file_count = _FILES_PER_PROCESS + self.sockets_per_process * launch.world_size
            if (limit_text := allow_open_files(file_count)) and launch.local_rank == 0:
                say(f"rank {launch.rank} of {launch.world_size}: {limit_text}")
            connection = self.connect()
            if not isinstance(connection, Connection):
                raise TypeError(f"{type(self).__name__}.connect() returned {connection!r}, not a Connection")
            device, comm, is_restart = connection
            if options.plan.batch_parts and device.type == "cpu":
                use_one_thread()
            self._agree_on_plan(comm)
            self.processes = ProcessGroup(
                launch, device, comm, signals, timeout_minutes=options.timeout_minutes, is_restart=is_restart,
                compiles=options.compile,
            )  # fmt: skip
            self.remove_time_limit()
        except Exception as error:
            signals.close()
            if isinstance(error, UserMistake):  # `connect` raises it on every process
                raise
            text = f"rank {launch.rank} of {launch.world_size} could not connect through {self.name}: "
            text += first_line(error)
            if isinstance(error, ImportError) and self.install_hint:
                text += f"; install it again with `{self.install_hint}`"
            if not isinstance(error, ValueError | ImportError):
                # The cause may be temporary, as a port in use or a missing machine: the next start may succeed.
                say(f"stopped: {text}")
                raise Failed(text) from error
            if not launch.is_root:  # only the root's own error is printed by the caller
                say(f"error: {text}")
            raise UserMistake(text) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if self.processes.leave(error, self.disconnect):
            for task in self._after_leaving:
                task()

    def after_leaving(self, task: Callable[[], None]) -> None:
        """Call ``task`` on this process after it has disconnected, if nothing failed. It may take any time, because no
        process waits for it; signals end it."""
        self._after_leaving.append(task)

    def _agree_on_plan(self, comm: Communicator) -> None:
        options, plan = self.options, self.options.plan
        own_settings = [
            plan.global_batch_size, plan.asked_grad_accum_steps, plan.world_size, plan.batch_parts, options.precision,
            options.reduce_precision, options.compile, *self._training_flag_values,
        ]  # fmt: skip
        all_settings = comm.gather_objects([*own_settings, plan.grad_accum_steps])
        # After a restart by the launcher, a machine that took part before ignores --fresh and plans from the run's last
        # start. A new machine does not know of the restart and plans with --grad_accum_steps alone. So all take the
        # largest number.
        if (steps := max(settings[-1] for settings in all_settings)) > plan.grad_accum_steps:
            self.options = replace(options, plan=replace(plan, grad_accum_steps=steps))
        for rank, (*other_settings, _) in enumerate(all_settings):
            if other_settings != own_settings:
                flag_names = "".join(f", {name}" for name in self.training_flags)
                raise ValueError(
                    f"batch, accumulation, processes, parts, precision, reduce_precision, compile{flag_names} are "
                    f"{own_settings} on rank {comm.rank}, {other_settings} on rank {rank}; "
                    "start all processes with the same flags, and an --output_dir on a disk that all of them see"
                )

    def wrap(
        self, model: nn.Module, optimizer: Optimizer, *, name: str = "model", max_grad_norm: float | None = None
    ) -> Engine:
        """Spread a model over the processes and return its engine. Weights, moments and step counts stay as they are.
        Collective.

        Args:
            name: Distinct for every engine.
            max_grad_norm: Instead of --max_grad_norm.

        Raises:
            UserMistake: --compile is set, and a machine cannot compile.
        """
        from .devices import check_compiler, choose_kernels_by_time

        if self.options.compile and not self._can_compile:
            with self.processes.raise_on_all_ranks():
                check_compiler(self.processes.device)
            self._can_compile = True
        if not (self.options.deterministic or self.options.plan.batch_parts):
            choose_kernels_by_time()
        engine = self.make_engine(model, optimizer, name=name, max_grad_norm=max_grad_norm)
        self.remove_time_limit()  # of process groups that the engine has made
        return engine

    @property
    def grad_accum_steps(self) -> int:
        """Micro-batches per update and process: --grad_accum_steps, or more if the run resumes on fewer processes
        or uses --batch_parts."""
        return self.options.plan.grad_accum_steps

    def describe(self) -> dict[str, Any]:
        """The resolved configuration as JSON values, for the log and starts.jsonl."""
        import torch

        from .devices import processor_name

        plan, options, device = self.options.plan, self.options, self.processes.device
        return {
            "backend": self.name, "launcher": self.launch.launcher, "world_size": self.processes.world_size,
            "device": str(device), "processor": processor_name(device), "cpu_threads": torch.get_num_threads(),
            "precision": options.precision, "batch_size": plan.global_batch_size,
            "micro_batch_size": plan.micro_batch_size, "grad_accum_steps": plan.grad_accum_steps,
            "batch_parts": plan.batch_parts,
            "asked_grad_accum_steps": plan.asked_grad_accum_steps, "max_grad_norm": options.max_grad_norm,
        }  # fmt: skip

    def summary(self) -> str:
        """``describe`` in one line."""
        precision, processes = self.options.precision, self.processes
        if precision == "tf32" and processes.device.type == "cpu":
            precision = "fp32 (tf32 is for GPUs)"
        location = "one process on" if self.launch.launcher == "python" else f"{self.name} on {processes.world_size} x"
        return f"{location} {processes.device.type}, {precision}; {self.options.plan.summary()}"

    def autocast(self) -> _GeneratorContextManager[None]:
        """The precision of an engine's forward pass, for calls that bypass it (``engine.module(...)`` while frozen): a
        context, or a decorator of a function."""
        from tandem.distributed.engines.arithmetic import autocast

        return autocast(self.options.precision, self.processes.device)

    def _is_orphan(self) -> bool:
        return self.launch.launcher != "python" and self._launcher_pids() != self._initial_launcher_pids
