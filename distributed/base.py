"""The interface Backend: the group of processes that train. Engine (engines/base.py) is one model and its optimizer.

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
import importlib.util
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import _GeneratorContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from tandem.io.exits import CannotGoOn, Ended, Failed
from tandem.io.reading import printable
from tandem.io.writing import say

from .batch import BatchPlan
from .errors import TrainingStopped, UserMistake, first_line, lacks_memory
from .launchers import torchrun_id

if TYPE_CHECKING:  # `--help` must not import PyTorch
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from tandem.distributed.engines.base import Engine

    from .collectives import Communicator
    from .launchers import Launch
    from .watchdog import Watchdog


_FILES_PER_PROCESS = 256  # of data, loaders, trackers and libraries; connections to other processes come on top


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


class Backend(ABC):
    """The group of processes that train, of which this is one, and its collectives, on any communication library. A
    context manager: enter to connect, leave to disconnect.

    A new backend is a subclass in one new file or folder in ``backends/``. It defines ``name``, ``launch_order``,
    ``was_launched``, ``connect`` and ``disconnect``; if they apply also ``package`` and ``install_hint``, its own
    flags (``add_arguments``, ``flag_in_use``, ``configure``), and an engine of its own (``engine_class``).

    Attributes:
        rank, local_rank: Of this process, in the job and on its machine, from 0.
        world_size: Number of processes in the job.
        is_restart: Whether the launcher started these processes again after some had failed.
        comm: The communicator of the collectives; like ``device``, ``connect`` sets it.
    """

    device: torch.device
    comm: Communicator
    watchdog: Watchdog

    name: ClassVar[str]
    launch_order: ClassVar[int]
    """``auto`` takes the first backend, in this order, that was launched."""
    package: ClassVar[str] = ""
    """The Python package that it needs besides PyTorch."""
    install_hint: ClassVar[str] = ""
    """The command that installs the package."""
    training_flags: ClassVar[tuple[str, ...]] = ()
    """Names of its flags that have no effect in a script that trains nothing."""
    sockets_per_process: ClassVar[int] = 0
    """Sockets that the root, which has the most, opens for each process of the job."""

    def __init__(self, launch: Launch, options: Options, args: argparse.Namespace) -> None:
        self.launch, self.is_restart, self.options = launch, launch.is_restart, options
        self.rank, self.local_rank, self.world_size = launch.rank, launch.local_rank, launch.world_size
        self._before_update: list[Callable[[], None]] = []
        self._can_compile = False  # not checked yet
        self.norms_are_logged = True
        """Whether `Update.grad_norm` of the coming update is read; otherwise engines may leave it out."""
        self.total_updates: int | None = None
        """Number of updates of the run, if it is set before ``wrap``."""
        self._own_flag_values = [getattr(args, name) for name in self.training_flags]
        self._initial_launcher_pids = self._launcher_pids()
        self._after_leaving: list[Callable[[], None]] = []

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

    def remove_time_limit(self) -> None:
        """From now on collectives wait without a time limit, and only the watchdog ends the job: one process may write
        for hours, and time in which the whole job was frozen does not count."""
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
        """A flag of this backend alone that is set to something else than its default, or None. Other backends refuse
        it."""
        return None

    @classmethod
    def configure(cls, args: argparse.Namespace, launch: Launch) -> None:
        """Set flags in ``args`` from the backend's own configuration, before anything starts.

        Raises:
            UserMistake: the arguments contradict the configuration or the launcher.
        """
        return

    def engine_class(self) -> type[Engine]:
        """The class of the engines that ``wrap`` returns; by default each process holds the whole model."""
        from tandem.distributed.engines.replicated import ReplicatedEngine

        return ReplicatedEngine

    def _launcher_pids(self) -> Any:
        """The ids of the processes that started this one; they change when one of those ends."""
        return os.getppid()

    def __enter__(self) -> Backend:
        from .devices import allow_open_files, use_deterministic_kernels, use_one_thread, use_tf32
        from .signals import Signals, StopRequest
        from .watchdog import Watchdog

        use_tf32(self.options.precision)
        if self.options.deterministic or self.options.plan.batch_parts:
            use_deterministic_kernels(compiled=self.options.compile)
        self._signals = Signals(self._is_orphan, is_root=self.is_root, launcher=self.launch.launcher)
        try:
            file_count = _FILES_PER_PROCESS + self.sockets_per_process * self.launch.world_size
            if (limit_text := allow_open_files(file_count)) and self.local_rank == 0:
                say(f"rank {self.rank} of {self.world_size}: {limit_text}")
            self.connect()
            if self.options.plan.batch_parts and self.device.type == "cpu":
                use_one_thread()
            if self.options.compile:
                self._keep_collectives_out_of_graphs()
            self._agree_on_plan()
            self.watchdog = self._signals.watchdog = Watchdog(self.comm, self.launch, self.options.timeout_minutes)
            self.remove_time_limit()
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
                # The cause may be temporary, as a port in use or a missing machine: the next start may succeed.
                say(f"stopped: {text}")
                raise Failed(text) from error
            if not self.is_root:  # only the root's own error is printed by the caller
                say(f"error: {text}")
            raise UserMistake(text) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        is_done = error is None or isinstance(error, SystemExit | Ended)
        # All processes raise these errors, so a graceful disconnect cannot hang.
        is_mistake = isinstance(error, UserMistake)
        is_on_all_ranks = is_mistake or (isinstance(error, TrainingStopped) and not error.on_one_rank)
        stop_error, is_graceful = None, False
        try:
            stop_error = self.watchdog.explain(error)
            if stop_error is not None and (self.is_root or stop_error.on_one_rank):
                # Print before cleaning up: launchers kill the other processes of a job that has lost one.
                say(f"stopped: {stop_error}")
            # Do not wait after a mistake: a process without it would reach the barrier only after the time limit.
            is_graceful = is_mistake or ((is_done or is_on_all_ranks) and self._all_are_done())
        finally:
            self.watchdog.stop(None if is_done or is_on_all_ranks else error)
            # Before signals end this process again: launchers send SIGTERM as soon as another process has ended.
            self.watchdog.wait_for_writes()
            self._signals.close()
            self.disconnect(is_graceful)
        if stop_error is not None:
            if stop_error.on_one_rank and self.world_size > 1:  # else the exit could hang until the launcher kills it
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(OSError, ValueError):
                        stream.flush()
                self.watchdog.exit_process()
            raise Failed(str(stop_error)) from error
        for task in self._after_leaving if is_done else ():
            task()

    def _all_are_done(self) -> bool:
        """Wait until all processes are done and have written their files: a launcher may kill the others when one ends.
        If one is lost meanwhile, print that and return False."""
        self.watchdog.wait_for_writes()
        try:
            self.stop.drain()
            self.watchdog.barrier()
        except (RuntimeError, ConnectionError) as error:
            say(f"{self.watchdog.explain(error) or first_line(error)}, after this process had done its work")
            return False
        return True

    def after_leaving(self, task: Callable[[], None]) -> None:
        """Call ``task`` on this process after it has disconnected, if nothing failed. It may take any time, because no
        process waits for it; signals end it."""
        self._after_leaving.append(task)

    def _agree_on_plan(self) -> None:
        options, plan = self.options, self.options.plan
        own_settings = [
            plan.global_batch_size, plan.asked_grad_accum_steps, plan.world_size, plan.batch_parts, options.precision,
            options.reduce_precision, options.compile, *self._own_flag_values,
        ]  # fmt: skip
        all_settings = self.comm.gather_objects([*own_settings, plan.grad_accum_steps])
        # A machine that joins a run with --fresh does not know that the run accumulates over more steps than its flag.
        if (steps := max(settings[-1] for settings in all_settings)) > plan.grad_accum_steps:
            self.options = replace(options, plan=replace(plan, grad_accum_steps=steps))
        for rank, (*other_settings, _) in enumerate(all_settings):
            if other_settings != own_settings:
                flag_names = "".join(f", {name}" for name in self.training_flags)
                raise ValueError(
                    f"batch, accumulation, processes, parts, precision, reduce_precision, compile{flag_names} are "
                    f"{own_settings} on rank {self.rank}, {other_settings} on rank {rank}; "
                    "start all processes with the same flags, and an --output_dir on a disk that all of them see"
                )

    def _keep_collectives_out_of_graphs(self) -> None:
        """In a compiled forward pass the watchdog's counters would be constants: each update would compile again."""
        import torch

        for collective in (self.sum, self.mean, self.gather, self.gather_objects, self.broadcast_object):
            setattr(self, collective.__name__, torch.compiler.disable(collective))

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
            with self.raise_on_all_ranks():
                check_compiler(self.device)
            self._can_compile = True
        if not (self.options.deterministic or self.options.plan.batch_parts):
            choose_kernels_by_time()
        engine = self.engine_class()(self, model, optimizer, name=name, max_grad_norm=max_grad_norm)
        self.remove_time_limit()  # of process groups that the engine has made
        return engine

    # Collectives are called by every process: never put a call behind a test of the rank.

    @property
    def is_root(self) -> bool:
        return self.rank == 0

    def torchrun_ids(self) -> list[str]:
        """The `torchrun_id` of each torchrun that started some of these processes, sorted. Collective."""
        return sorted({launcher_id for launcher_id in self.gather_objects(torchrun_id()) if launcher_id})

    @contextmanager
    def _in_collective(self, phase: str) -> Iterator[None]:
        self.watchdog.heartbeat(phase, collective=True)
        yield
        self.watchdog.heartbeat("computing")

    def sum(self, value: Any) -> Any:
        """Sum over the processes: of a tensor (on the device; returns a tensor), or of a dict of numbers and 0-d
        tensors (one sum between the CPUs for all; returns floats)."""
        with self._in_collective("sum over the processes"):
            if isinstance(value, Mapping):
                return self.comm.sum_scalars(value)
            return self.comm.sum_tensor(value)

    def mean(self, value: Any) -> Any:
        """``sum`` divided by the number of processes."""
        if isinstance(value, Mapping):
            return {name: total / self.world_size for name, total in self.sum(value).items()}
        return self.sum(value) / self.world_size

    def gather(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """`Communicator.gather`: concatenate along dimension 0 in the order of ranks; the sizes of dimension 0 may
        differ. Differentiable. If all processes know the ``sizes`` by rank, the host need not wait to exchange them."""
        with self._in_collective("gathering over the processes"):
            return self.comm.gather(tensor, sizes)

    def gather_objects(self, value: Any) -> list[Any]:
        """JSON-able values of all processes, by rank, on every process."""
        with self._in_collective("exchanging objects"):
            return self.comm.gather_objects(value)

    def broadcast_object(self, value: Any) -> Any:
        """The root's JSON-able value, on every process."""
        with self._in_collective("exchanging objects"):
            return self.comm.broadcast_object(value)

    def barrier(self) -> None:
        """Return when every process has called this."""
        self.sum({"here": 1.0})

    @contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """For work that may fail on one process alone, such as opening files or building a model. A ValueError, an
        OSError or a lack of memory on any process becomes the same UserMistake on all, and a CannotGoOn the same
        TrainingStopped, so that none waits for one that has left. The work may last longer on one process than
        --timeout_minutes, if it calls `heartbeat` now and then.

        The end of the context is a collective. Another collective inside, such as a second context of this kind, has to
        come before everything that may fail on one process alone: a process that has failed goes to the end of the
        context at once, and the others would wait for it in their collective.
        """
        mistake: str | None = None
        error_type: type[UserMistake | TrainingStopped] = UserMistake
        try:
            yield
        except CannotGoOn as error:
            mistake, error_type = first_line(error), TrainingStopped
        except (ValueError, OSError) as error:
            mistake = first_line(error)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, TrainingStopped) or not lacks_memory(error):  # TrainingStopped: the job ends already
                raise
            mistake = f"not enough memory: {first_line(error)}"
        self.watchdog.barrier()
        if not self.sum({"mistakes": float(mistake is not None)})["mistakes"]:
            return
        for rank, (text, is_mistake) in enumerate(self.gather_objects([mistake, error_type is UserMistake])):
            if text is not None:
                error_type = UserMistake if is_mistake else TrainingStopped
                raise error_type(text if rank == 0 else f"{text} (on rank {rank})")

    def say(self, text: str, *, file: TextIO | None = None) -> None:
        """Print a line on the root, to ``file`` (default: stdout), with ? in the place of control characters."""
        if self.is_root:
            print(printable(text), file=file, flush=True)

    def heartbeat(self, phase: str, *, is_uninterrupted: bool = False) -> None:
        """Report to the watchdog that this process begins ``phase``; engines and collectives report theirs.

        Args:
            is_uninterrupted: The phase contains no further heartbeat, as a user's function or a write. It may take any
                time while it uses the processor now and then; if it hangs, as on a broken disk, the job ends after the
                timeout.
        """
        self.watchdog.heartbeat(phase, writes=is_uninterrupted)

    @property
    def waited(self) -> Mapping[str, float]:
        """Seconds that this process has waited so far, by cause: "data", and "communication" (on a GPU only the waits
        of the host; the device has its own)."""
        return self.watchdog.waited

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Context of the phase "waiting for ``what``". A ValueError or CannotGoOn inside, on this process alone, ends
        the job: this process prints the reason, the others print which process they lost."""
        self.watchdog.heartbeat(f"waiting for {what}", waits_for_data=True)
        try:
            yield
        except (ValueError, CannotGoOn) as error:
            raise TrainingStopped(f"rank {self.rank}: {first_line(error)}", on_one_rank=True) from error
        self.heartbeat("computing")

    @contextmanager
    def waiting_for_workers(self) -> Iterator[None]:
        """Context in which this process waits for its loader processes, which may hang. A signal that asks to stop ends
        the wait of a single process at once, with AskedToStop: it is between two updates and can save. Of several
        processes, others may be inside an update; then the watchdog ends the job if no data comes within 30 s."""
        interruption = self._signals.interruptible() if self.world_size == 1 else contextlib.nullcontext()
        with self.watchdog.loading(), interruption:
            yield

    def each(self, what: str, items: Iterable[Any]) -> Iterator[Any]:
        """Yield ``items``; each is fetched inside ``waiting_for(what)``."""
        with self.waiting_for(what):
            iterator = iter(items)
        while True:
            with self.waiting_for(what):
                item = next(iterator, None)
            if item is None:
                return
            yield item

    def before_update(self, wait: Callable[[], None]) -> None:
        """Call ``wait`` once before the next update: a checkpoint's copy of the weights must be finished by then."""
        self._before_update.append(wait)

    def finish_copies(self) -> None:
        """Wait for the copies of `before_update`: weights and moments are about to change. For engines."""
        while self._before_update:
            self._before_update.pop()()

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
            "asked_grad_accum_steps": plan.asked_grad_accum_steps, "max_grad_norm": options.max_grad_norm,
        }  # fmt: skip

    def summary(self) -> str:
        """``describe`` in one line."""
        precision = self.options.precision
        if precision == "tf32" and self.device.type == "cpu":
            precision = "fp32 (tf32 is for GPUs)"
        location = "one process on" if self.launch.launcher == "python" else f"{self.name} on {self.world_size} x"
        return f"{location} {self.device.type}, {precision}; {self.options.plan.summary()}"

    def autocast(self) -> _GeneratorContextManager[None]:
        """The precision of an engine's forward pass, for calls that bypass it (``engine.module(...)`` while frozen): a
        context, or a decorator of a function."""
        from tandem.distributed.engines.arithmetic import autocast

        return autocast(self.options.precision, self.device)

    def stop_requested(self, by_this_process: bool = False, now: bool = False) -> bool:
        """Whether a process got a signal of ``signals.SIGNALS``, lost its launcher, or passed ``by_this_process``.
        Collective; the answer is the same on all processes. With several processes a request is reported one call late,
        on GPUs up to two; with ``now`` the call waits and reports it at once. Before the first call and the first
        update a signal ends this process at once."""
        self._signals.enable_saving()
        # Stop if the launcher died: another one may start the same run again, in the same folder.
        with self._in_collective("asking whether to stop"):
            answer = self.stop.is_agreed(by_this_process or self._is_orphan(), now)
        if answer and not by_this_process:
            self._signals.announce_stop()
        return answer

    def about_to_update(self) -> None:
        """An update is about to change weights and moments; from now on there is something to save. For engines."""
        self._signals.enable_saving()
        self.finish_copies()

    def _is_orphan(self) -> bool:
        return self.launch.launcher != "python" and self._launcher_pids() != self._initial_launcher_pids
