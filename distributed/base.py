"""The contract Backend (the processes), beside Engine (one model and its optimizer) in engine_base.py.

A script speaks to these two alone and never asks for a backend's name:

    with distributed.from_args(args) as backend:
        engine = backend.wrap(model, optimizer, name="vae")
        for images in engine.micro_batches(batch):
            loss, reconstruction = engine(images)
            engine.backward(loss)
        update = engine.step()
"""

from __future__ import annotations

import argparse
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from .engines.base import Engine
from .errors import TrainingStopped, UserMistake
from .options import Options

if TYPE_CHECKING:  # `--help` must not import PyTorch
    import torch
    from torch import Tensor, nn

    from .collectives import Communicator
    from .launchers import Launch
    from .stop import StopRequest
    from .watchdog import Watchdog


Item = TypeVar("Item")


class Backend(ABC):
    """The processes. A context manager: enter to connect, leave to disconnect."""

    name: ClassVar[str]
    launch_order: ClassVar[int]
    """``auto`` asks the backends in this order whether they were launched."""
    install_hint: ClassVar[str] = ""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    comm: Communicator
    options: Options
    watchdog: Watchdog
    _stop: StopRequest

    def __init__(self, launch: Launch, options: Options, args: argparse.Namespace) -> None:
        self.launch, self.options = launch, options
        self._before_update: list[Callable[[], None]] = []
        self._parent = os.getppid()
        self.rank, self.local_rank, self.world_size = launch.rank, launch.local_rank, launch.world_size

    @classmethod
    def is_available(cls) -> bool:
        """Whether what it needs can be imported; decided without importing it."""
        return True

    @classmethod
    @abstractmethod
    def was_launched(cls, launch: Launch, args: argparse.Namespace) -> bool:
        """Whether the launcher's environment or the arguments ask for this backend."""

    @classmethod
    def flag_said(cls, args: argparse.Namespace) -> str | None:
        """A flag in ``args`` that means something to this backend alone, if one was given."""
        return None

    @classmethod
    def add_arguments(cls, parser: Any) -> None:
        """Flags of this backend alone."""
        return

    @classmethod
    def configure(cls, args: argparse.Namespace, launch: Launch) -> None:
        """Fill ``args`` from a configuration of the backend's own, before anything starts.

        Raises:
            UserMistake: the two disagree.
        """
        return

    @property
    def is_root(self) -> bool:
        return self.rank == 0

    @property
    def grad_accum_steps(self) -> int:
        """Micro-batches per update and process, as they really are: more than asked for, where a run goes on with fewer
        processes."""
        return self.options.plan.grad_accum_steps

    @property
    def is_restart(self) -> bool:
        """Whether the launcher itself started these processes again after some had failed."""
        return self.launch.is_restart

    def __enter__(self) -> Backend:
        from .devices import use_deterministic_kernels, use_one_thread
        from .stop import StopRequest
        from .watchdog import Watchdog

        if self.options.deterministic or self.options.plan.batch_parts:
            use_deterministic_kernels(compiled=self.options.compile)
        try:
            self.connect()
            if self.options.plan.batch_parts and self.device.type == "cpu":
                use_one_thread()
            if self.options.compile:
                self._keep_collectives_out_of_graphs()
            self._agree_on_plan()
            self.watchdog = Watchdog(self)
            self._stop = StopRequest(self.comm)
            self._stop.install()
        except UserMistake:  # of all processes alike
            raise
        except Exception as error:
            text = f"rank {self.rank} of {self.world_size} could not connect through {self.name}: {_first_line(error)}"
            if isinstance(error, ImportError) and self.install_hint:
                text += f"; install it again with `{self.install_hint}`"
            if not self.is_root:  # the root may be fine, and waiting: this process has to speak
                print(f"{os.path.basename(sys.argv[0])}: error: {text}", file=sys.stderr, flush=True)
            raise UserMistake(text) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        together = error is None or isinstance(error, SystemExit)
        # Raised on every process alike, so that nobody waits for this one.
        is_mutual = isinstance(error, UserMistake) or (isinstance(error, TrainingStopped) and not error.alone)
        try:
            if together:
                self._stop.drain()
                self.barrier()  # nobody leaves while another still needs it
            stopped = self.watchdog.explain(error)
            if stopped is not None and (self.is_root or stopped.alone):
                # Before anything that takes time: launchers end what is left of a job that lost a process.
                print(f"{os.path.basename(sys.argv[0])}: stopped: {stopped}", file=sys.stderr, flush=True)
        finally:
            self._stop.restore()
            self.watchdog.stop()
            self.disconnect(gracefully=together or is_mutual)
        if stopped is not None:
            raise SystemExit(1) from None

    def _agree_on_plan(self) -> None:
        from . import collectives

        plan = self.options.plan
        mine = [plan.global_batch_size, plan.grad_accum_steps, plan.world_size, plan.batch_parts]
        for rank, theirs in enumerate(collectives.gather_objects(mine, self.comm, self.device)):
            if theirs != mine:
                raise ValueError(
                    f"batch, accumulation, processes, parts are {mine} on rank {self.rank}, {theirs} on rank {rank}; "
                    "start all processes with the same flags, and an --output_dir on a disk that all of them see"
                )

    @abstractmethod
    def connect(self) -> None:
        """Set ``device`` and ``comm``; on return every process is there."""

    @abstractmethod
    def disconnect(self, gracefully: bool) -> None:
        """Leave. After an error another process may be gone: wait for nobody."""

    @abstractmethod
    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        name: str = "model",
        max_grad_norm: float | None = None,
    ) -> Engine:
        """Spread a model. Never alters weights, moments or step counts. ``name`` is distinct for every engine;
        ``max_grad_norm`` overrides the run's."""

    def describe(self) -> dict[str, Any]:
        """The resolved configuration, for the log and environment.json. JSON values."""
        plan = self.options.plan
        return {
            "backend": self.name,
            "launcher": self.launch.launcher,
            "world_size": self.world_size,
            "device": str(self.device),
            "precision": self.options.precision,
            "batch_size": plan.global_batch_size,
            "micro_batch_size": plan.micro_batch_size,
            "grad_accum_steps": plan.grad_accum_steps,
            "batch_parts": plan.batch_parts,
            "asked_grad_accum_steps": plan.asked_grad_accum_steps or plan.grad_accum_steps,
            "max_grad_norm": self.options.max_grad_norm,
        }

    def summary(self) -> str:
        """``describe`` in one line."""
        plan = self.options.plan
        text = (
            f"{self.name} on {self.world_size} x {self.device.type}, {self.options.precision}; batch "
            f"{plan.global_batch_size} = {plan.micro_batch_size} x {plan.grad_accum_steps} accumulation x "
            f"{self.world_size} processes"
        )
        if plan.batch_parts:
            text += f"; in {plan.batch_parts} parts, with the same bits on any number of processes"
        elif plan.asked_grad_accum_steps:
            text += (
                f" (--grad_accum_steps {plan.asked_grad_accum_steps}, but there are fewer processes than before: more "
                "accumulation, so that none holds more samples at a time)"
            )
        return text

    def _keep_collectives_out_of_graphs(self) -> None:
        """A model that calls them in its forward would have the counters of the watchdog compiled in with them, as
        constants, and be compiled again at every update."""
        import torch

        for collective in (self.sum, self.mean, self.gather, self.gather_objects, self.shift):
            setattr(self, collective.__name__, torch.compiler.disable(collective))

    # Collectives: every process calls them; the rank test lives inside.

    def sum(self, value: Any) -> Any:
        """Sum over the processes: of a tensor (on the device; returns a tensor), or of a dict of numbers and 0-d
        tensors (one transfer for all; returns floats)."""
        from . import collectives

        self.watchdog.mark("sum over the processes", collective=True)
        if isinstance(value, Mapping):
            result: Any = collectives.sum_scalars(value, self.comm, self.device)
        else:
            result = collectives.sum_tensor(value, self.comm)
        self.watchdog.mark("computing")
        return result

    def mean(self, value: Any) -> Any:
        """``sum`` divided by the number of processes."""
        if isinstance(value, Mapping):
            return {name: total / self.world_size for name, total in self.sum(value).items()}
        return self.sum(value.float() if not value.is_floating_point() else value) / self.world_size

    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenation along dimension 0 by rank, sizes may differ; its gradient is that of one process."""
        from . import collectives

        self.watchdog.mark("gathering over the processes", collective=True)
        result = collectives.gather(tensor, self.comm)
        self.watchdog.mark("computing")
        return result

    def shift(self, tensor: Tensor, rows: int) -> Tensor:
        """Around the ring: ``tensor`` goes to the next rank, the previous rank's comes, of ``rows`` rows (shapes may
        differ in dimension 0). No gradient."""
        self.watchdog.mark("passing on around the ring", collective=True)
        result = self.comm.shift(tensor.detach(), rows)
        self.watchdog.mark("computing")
        return result

    def gather_objects(self, value: Any) -> list[Any]:
        """JSON-able values of all processes, by rank, on every process."""
        from . import collectives

        self.watchdog.mark("exchanging objects", collective=True)
        result = collectives.gather_objects(value, self.comm, self.device)
        self.watchdog.mark("computing")
        return result

    def broadcast_object(self, value: Any) -> Any:
        """The root's JSON-able value, on every process."""
        return self.gather_objects(value if self.is_root else None)[0]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any process."""
        return self.sum({"flag": float(flag)})["flag"] > 0

    def barrier(self) -> None:
        """Return when every process is here."""
        self.sum({"here": 1.0})

    def stop_requested(self, here: bool = False) -> bool:
        """Whether SIGTERM, SIGINT or SIGUSR1 reached any process, or any of them said so itself (``here``); called
        once per update, and true on all processes after the same one."""
        return self._stop.agreed(here or self._is_orphan)

    @property
    def _is_orphan(self) -> bool:
        """Whether the launcher is gone, which would start the same run again beside this one."""
        return self.launch.launcher != "python" and os.getppid() != self._parent

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of an engine's forward, for calls that go past it (``engine.module(...)`` while frozen)."""
        from .engines.precision import autocast

        return autocast(self.options.precision, self.device)

    def before_update(self, wait: Callable[[], None]) -> None:
        """Have ``wait`` called once, before any engine next changes weights or moments."""
        self._before_update.append(wait)

    def about_to_update(self) -> None:
        """For engines: weights and moments are about to change."""
        while self._before_update:
            self._before_update.pop()()

    def mark(self, phase: str) -> None:
        """This process begins ``phase``: a sign of life for the watchdog, which engines and collectives give too."""
        self.watchdog.mark(phase)

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """A ValueError inside, on this process alone, ends the job: it says why, the others say whom they lost."""
        self.mark(f"waiting for {what}")
        try:
            yield
        except ValueError as error:
            raise TrainingStopped(f"rank {self.rank}: {_first_line(error)}", alone=True) from error
        self.mark("computing")

    def each(self, what: str, items: Iterable[Item]) -> Iterator[Item]:
        """``items``, each fetched inside ``waiting_for(what)``."""
        iterator = iter(items)
        while True:
            with self.waiting_for(what):
                item = next(iterator, None)
            if item is None:
                return
            yield item

    @contextmanager
    def agreement(self) -> Iterator[None]:
        """Work that may fail on one process alone, such as opening files. A ValueError or OSError on any of them
        becomes the same UserMistake on all, so that none waits for one that has left. No collectives inside."""
        mistake: str | None = None
        try:
            yield
        except (ValueError, OSError) as error:
            mistake = _first_line(error)
        for rank, text in enumerate(self.gather_objects(mistake)):
            if text is not None:
                raise UserMistake(text if rank == 0 else f"{text} (on rank {rank})")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
