"""The interface Backend: the processes that train. Engine, in engines/base.py, is one model and its optimizer.

A script uses only these two classes and never asks for a backend's name:

    with distributed.from_args(args) as backend:
        engine = backend.wrap(model, optimizer, name="vae")
        for images in engine.micro_batches(batch):
            loss, reconstruction = engine(images)
            engine.backward(loss)
        update = engine.step()
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import _GeneratorContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from tandem.files.exits import Ended, Failed
from tandem.files.writing import say

from .batch import BatchPlan
from .errors import TrainingStopped, UserMistake, first_line
from .processes import Processes

if TYPE_CHECKING:  # `--help` must not import PyTorch
    from torch import nn
    from torch.optim import Optimizer

    from .engines.base import Engine
    from .launchers import Launch


FILES_OF_A_PROCESS = 256  # without its connections to other processes: data, loaders, trackers, libraries


@dataclass(frozen=True)
class Options:
    """How engines update; arguments and the backend's configuration are merged before anything starts."""

    plan: BatchPlan
    precision: str = "fp32"  # fp32, tf32, bf16 or fp16
    max_grad_norm: float = 0.0  # 0: no clipping
    max_skipped_updates: int = 20
    compile: bool = False
    timeout_minutes: float = 30.0
    check_replicas_every_n_steps: int = 1000  # 0: only before training
    deterministic: bool = False
    reduce_precision: str = "fp32"  # of the gradients that processes exchange: fp32 or bf16


class Backend(Processes, ABC):
    """The processes that train. A context manager: enter to connect, leave to disconnect.

    A new backend is a subclass in one new file or folder in ``backends/``. It defines ``name``, ``launch_order``,
    ``was_launched``, ``connect`` and ``disconnect``; if they apply also ``install_hint`` and ``is_available``, its
    own flags (``add_arguments``, ``flag_said``, ``configure``), and an engine of its own (``engine_class``).
    """

    name: ClassVar[str]
    launch_order: ClassVar[int]
    """``auto`` takes the first backend, in this order, that was launched."""
    install_hint: ClassVar[str] = ""
    flags_of_training: ClassVar[tuple[str, ...]] = ()
    """Names of its flags that have no effect in a script that trains nothing."""
    sockets_per_process: ClassVar[int] = 0
    """Sockets that the root, which has the most, opens for each process of the job."""

    def __init__(self, launch: Launch, options: Options, args: argparse.Namespace) -> None:
        super().__init__(launch)
        self.options = options
        self.norms_are_logged = True
        """Whether somebody reads `Update.grad_norm` of the coming update; otherwise engines may leave it out."""
        self._own_flags = [getattr(args, name) for name in self.flags_of_training]
        self._launched_by = self._launcher_processes()
        self._after_leaving: list[Callable[[], None]] = []

    # What a backend defines.

    @classmethod
    @abstractmethod
    def was_launched(cls, launch: Launch, args: argparse.Namespace) -> bool:
        """Whether the launcher's environment or the arguments ask for this backend."""

    @abstractmethod
    def connect(self) -> None:
        """Set ``device`` and ``comm``; on return every process is connected."""

    @abstractmethod
    def disconnect(self, gracefully: bool) -> None:
        """Disconnect. If not ``gracefully``, an error has happened and a process may be gone, so wait for none."""

    def wait_without_limit(self) -> None:
        """From now on the watchdog alone decides whether a process is waited for, and collectives have no time limit:
        one process may write for hours, and time in which the whole job was frozen does not count."""
        return

    @classmethod
    def is_available(cls) -> bool:
        """Whether the packages that the backend needs can be imported; does not import them."""
        return True

    @classmethod
    def add_arguments(cls, parser: Any) -> None:
        """Add the flags that only this backend has."""
        return

    @classmethod
    def flag_said(cls, args: argparse.Namespace) -> str | None:
        """A flag that the user gave and that only this backend understands, or None. Other backends refuse it."""
        return None

    @classmethod
    def configure(cls, args: argparse.Namespace, launch: Launch) -> None:
        """Set flags in ``args`` from the backend's own configuration, before anything starts.

        Raises:
            UserMistake: the arguments contradict the configuration or the launcher.
        """
        return

    def engine_class(self) -> type[Engine]:
        """The engine that ``wrap`` makes; by default each process holds the whole model."""
        from .engines.replicated import ReplicatedEngine

        return ReplicatedEngine

    def _launcher_processes(self) -> Any:
        """Identifies the processes that started this one: the value changes when one of them ends."""
        return os.getppid()

    # Connecting.

    def __enter__(self) -> Backend:
        from .devices import allow_open_files, use_deterministic_kernels, use_one_thread, use_tf32
        from .signals import Signals, StopRequest
        from .watchdog import Watchdog

        use_tf32(self.options.precision == "tf32")
        if self.options.deterministic or self.options.plan.batch_parts:
            use_deterministic_kernels(compiled=self.options.compile)
        self._signals = Signals(self._is_orphan, is_root=self.is_root, launcher=self.launch.launcher)
        try:
            needed = FILES_OF_A_PROCESS + self.sockets_per_process * self.launch.world_size
            if (too_few := allow_open_files(needed)) and self.local_rank == 0:
                say(f"rank {self.rank} of {self.world_size}: {too_few}")
            self.connect()
            if self.options.plan.batch_parts and self.device.type == "cpu":
                use_one_thread()
            if self.options.compile:
                self._keep_collectives_out_of_graphs()
            self._agree_on_plan()
            self.watchdog = self._signals.watchdog = Watchdog(
                self.comm, self.device, self.launch, self.options.timeout_minutes
            )
            self.wait_without_limit()
            self.stop = StopRequest(self.comm, self._signals.received)
        except UserMistake:  # every process raises it
            self._signals.close()
            raise
        except Exception as error:
            self._signals.close()
            text = f"rank {self.rank} of {self.world_size} could not connect through {self.name}: {first_line(error)}"
            if isinstance(error, ImportError) and self.install_hint:
                text += f"; install it again with `{self.install_hint}`"
            if not isinstance(error, ValueError | ImportError):
                # A port that is in use, a machine that did not come: the next start may be luckier.
                say(f"stopped: {text}")
                raise Failed(text) from error
            if not self.is_root:  # the root prints only its own error, and may not have one
                say(f"error: {text}")
            raise UserMistake(text) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        is_done = error is None or isinstance(error, SystemExit | Ended)
        # All processes raise these errors together, so a graceful disconnect cannot hang.
        is_mistake = isinstance(error, UserMistake)
        is_mutual = is_mistake or (isinstance(error, TrainingStopped) and not error.alone)
        stopped, is_graceful = None, False
        try:
            stopped = self.watchdog.explain(error)
            if stopped is not None and (self.is_root or stopped.alone):
                # Print before cleaning up: launchers kill the other processes of a job that has lost one.
                say(f"stopped: {stopped}")
            # After a mistake nobody is waited for: the others may not have met it, and would not come before the time
            # limit.
            is_graceful = is_mistake or ((is_done or is_mutual) and self._all_are_done())
        finally:
            self.watchdog.stop(None if is_done or is_mutual else error)
            # Before signals have their effect again: launchers send SIGTERM as soon as a process has ended.
            self.watchdog.let_writes_end()
            self._signals.close()
            self.disconnect(is_graceful)
        if stopped is not None:
            if stopped.alone and self.world_size > 1:  # nothing but the launcher would bound the interpreter's exit
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(OSError, ValueError):
                        stream.flush()
                self.watchdog.leave_alone()
            raise Failed(str(stopped)) from error
        for work in self._after_leaving if is_done else ():
            work()

    def _all_are_done(self) -> bool:
        """Wait until no other process needs this one, nor its end would have a launcher cut off another's write. False
        if one was lost, which this one, done too, only says."""
        self.watchdog.let_writes_end()
        try:
            self.stop.drain()
            self.watchdog.meet()
        except (RuntimeError, ConnectionError) as error:
            say(f"{self.watchdog.explain(error) or first_line(error)}, after this process had done its work")
            return False
        return True

    def after_leaving(self, work: Callable[[], None]) -> None:
        """Do ``work`` on this process when it has left the others, if nothing failed: it may take as long as it likes,
        because nobody waits for it, and signals end it."""
        self._after_leaving.append(work)

    def _agree_on_plan(self) -> None:
        plan = self.options.plan
        asked = plan.asked_grad_accum_steps or plan.grad_accum_steps
        options = self.options
        mine = [
            plan.global_batch_size, asked, plan.world_size, plan.batch_parts, options.precision,
            options.reduce_precision, options.compile, *self._own_flags,
        ]  # fmt: skip
        found = self.comm.gather_objects([*mine, plan.grad_accum_steps], self.device)
        # A machine that joins a run with --fresh does not know that the run accumulates more than was asked.
        if (steps := max(each[-1] for each in found)) > plan.grad_accum_steps:
            self.options = replace(
                self.options, plan=replace(plan, grad_accum_steps=steps, asked_grad_accum_steps=asked)
            )
        for rank, (*theirs, _) in enumerate(found):
            if theirs != mine:
                own = "".join(f", {name}" for name in self.flags_of_training)
                raise ValueError(
                    f"batch, accumulation, processes, parts, precision, reduce_precision, compile{own} are "
                    f"{mine} on rank {self.rank}, {theirs} on rank {rank}; "
                    "start all processes with the same flags, and an --output_dir on a disk that all of them see"
                )

    def _keep_collectives_out_of_graphs(self) -> None:
        """Inside a compiled forward pass the watchdog's counters would be constants, so each update would recompile."""
        import torch

        for collective in (self.sum, self.mean, self.gather, self.gather_objects, self.broadcast_object):
            setattr(self, collective.__name__, torch.compiler.disable(collective))

    def wrap(
        self, model: nn.Module, optimizer: Optimizer, *, name: str = "model", max_grad_norm: float | None = None
    ) -> Engine:
        """Spread a model over the processes; return its engine. Never alters weights, moments or step counts.
        ``name`` is distinct for every engine; ``max_grad_norm`` overrides --max_grad_norm."""
        from .devices import choose_kernels_by_time

        if not (self.options.deterministic or self.options.plan.batch_parts):
            choose_kernels_by_time()
        engine = self.engine_class()(self, model, optimizer, name=name, max_grad_norm=max_grad_norm)
        self.wait_without_limit()  # in the groups of the engine too
        return engine

    # What a script may ask for.

    @property
    def grad_accum_steps(self) -> int:
        """Micro-batches per update and process: --grad_accum_steps, or more if the run resumes on fewer processes
        or uses --batch_parts."""
        return self.options.plan.grad_accum_steps

    def describe(self) -> dict[str, Any]:
        """The resolved configuration as JSON values, for the log and starts.jsonl."""
        plan, options = self.options.plan, self.options
        return {
            "backend": self.name, "launcher": self.launch.launcher, "world_size": self.world_size,
            "device": str(self.device), "precision": options.precision, "batch_size": plan.global_batch_size,
            "micro_batch_size": plan.micro_batch_size, "grad_accum_steps": plan.grad_accum_steps,
            "batch_parts": plan.batch_parts,
            "asked_grad_accum_steps": plan.asked_grad_accum_steps or plan.grad_accum_steps,
            "max_grad_norm": options.max_grad_norm,
        }  # fmt: skip

    def summary(self) -> str:
        """``describe`` in one line."""
        precision = self.options.precision
        if precision == "tf32" and self.device.type == "cpu":
            precision = "fp32 (tf32 is for GPUs)"
        where = "one process on" if self.launch.launcher == "python" else f"{self.name} on {self.world_size} x"
        return f"{where} {self.device.type}, {precision}; {self.options.plan.summary()}"

    def autocast(self) -> _GeneratorContextManager[None]:
        """The precision of an engine's forward pass, for calls that bypass it (``engine.module(...)`` while frozen): a
        context, or a decorator of a function."""
        from .engines.arithmetic import autocast

        return autocast(self.options.precision, self.device)

    def stop_requested(self, here: bool = False, now: bool = False) -> bool:
        """Whether a process got a signal of ``signals.SIGNALS``, lost its launcher, or passed ``here``. Collective; the
        answer is the same on all processes. With several processes a request is reported one call late, on GPUs up to
        two; with ``now`` the call waits and reports it at once. Before the first call and the first update a
        signal ends this process at once."""
        self._signals.begin()
        # Stop if the launcher died: another one may start the same run again, in the same folder.
        with self._in_collective("asking whether to stop"):
            answer = self.stop.agreed(here or self._is_orphan(), now)
        if answer and not here:
            self._signals.all_stop()
        return answer

    def about_to_update(self) -> None:
        """For engines: an update is about to change weights and moments, and from now on there is something to save."""
        self._signals.begin()
        self.finish_copies()

    def _is_orphan(self) -> bool:
        return self.launch.launcher != "python" and self._launcher_processes() != self._launched_by
