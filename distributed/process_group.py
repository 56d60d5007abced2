"""The processes of a job: what they exchange, how they notice that one of them is lost, and how they stop together."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import torch
from torch import Tensor

from tandem.io.exits import CannotGoOn, Ended, Failed
from tandem.io.reading import printable
from tandem.io.writing import say

from .collectives import Communicator
from .errors import TrainingStopped, UserMistake, first_line, is_out_of_memory
from .launchers import Launch, torchrun_id
from .signals import Signals, StopRequest
from .watchdog import Watchdog


class ProcessGroup:
    """The processes of a job, of which this is one. Collectives are called by every process: never put a call behind a
    test of the rank.

    Args:
        device: Of this process; tensors of collectives are on it.
        compiles: Whether models that call collectives are compiled.

    Attributes:
        rank, local_rank: Of this process, in the job and on its machine, from 0.
        world_size: Number of processes in the job.
        is_restart: Whether the launcher started these processes again after some had failed.
        comm: The communicator of the collectives.
        stop: The agreement to stop, whose flag an engine may send along with its gradients.
        heartbeat: `Watchdog.heartbeat`, which reports that this process begins a phase; engines and collectives report
            theirs.
        waited: Seconds that this process has waited so far, by cause (`Watchdog.waited`).
    """

    def __init__(
        self, launch: Launch, device: torch.device, comm: Communicator, signals: Signals, *, timeout_minutes: float,
        is_restart: bool = False, compiles: bool = False,
    ) -> None:  # fmt: skip
        self.rank, self.local_rank, self.world_size = comm.rank, launch.local_rank, comm.world_size
        self.is_restart, self.device, self.comm = is_restart, device, comm
        self.watchdog = signals.watchdog = Watchdog(comm, launch, timeout_minutes)
        self.heartbeat, self.waited = self.watchdog.heartbeat, self.watchdog.waited
        self.stop = StopRequest(comm, signals.received)
        self._signals = signals
        self._before_update: list[Callable[[], None]] = []
        if compiles:  # in a compiled forward pass the watchdog's counters would be constants: each update recompiles
            for collective in (self.sum, self.mean, self.gather, self.gather_objects, self.broadcast_object):
                setattr(self, collective.__name__, torch.compiler.disable(collective))

    @property
    def is_root(self) -> bool:
        return self.rank == 0

    def torchrun_ids(self) -> list[str]:
        """The `torchrun_id` of each torchrun that started some of these processes, sorted. Collective."""
        return sorted({launcher_id for launcher_id in self.gather_objects(torchrun_id()) if launcher_id})

    @contextmanager
    def _in_collective(self, phase: str) -> Iterator[None]:
        self.heartbeat(phase, collective=True)
        yield
        self.heartbeat("computing")

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
        own_reason: str | None = None
        error_type: type[UserMistake | TrainingStopped] = UserMistake
        try:
            yield
        except CannotGoOn as error:
            own_reason, error_type = first_line(error), TrainingStopped
        except (ValueError, OSError) as error:
            own_reason = first_line(error)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, TrainingStopped) or not is_out_of_memory(error):  # TrainingStopped ends the job
                raise
            own_reason = f"not enough memory: {first_line(error)}"
        self.watchdog.barrier()  # which has no time limit: another process may take long, as for a lock
        if not self.sum({"failures": float(own_reason is not None)})["failures"]:
            return
        for rank, (reason, is_mistake) in enumerate(self.gather_objects([own_reason, error_type is UserMistake])):
            if reason is not None:
                error_type = UserMistake if is_mistake else TrainingStopped
                raise error_type(reason if rank == 0 else f"{reason} (on rank {rank})")

    def say(self, text: str, *, file: TextIO | None = None) -> None:
        """Print a line on the root, to ``file`` (default: stdout), with ? in the place of control characters."""
        if self.is_root:
            print(printable(text), file=file, flush=True)

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Context of the phase "waiting for ``what``". A ValueError or CannotGoOn inside, on this process alone, ends
        the job: this process prints the reason, the others print which process they lost."""
        self.heartbeat(f"waiting for {what}", waits_for_data=True)
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

    def iterate(self, what: str, items: Iterable[Any]) -> Iterator[Any]:
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

    def stop_requested(self, by_this_process: bool = False, now: bool = False) -> bool:
        """Whether a process got a signal of ``signals.SIGNALS``, lost its launcher, or passed ``by_this_process``.
        Collective; the answer is the same on all processes. With several processes a request is reported one call late,
        on GPUs up to two; with ``now`` the call waits and reports it at once. Before the first call and the first
        update a signal ends this process at once."""
        self._signals.enable_saving()
        # Stop if the launcher died: another one may start the same run again, in the same folder.
        with self._in_collective("asking whether to stop"):
            answer = self.stop.is_agreed(by_this_process or self._signals.is_orphan(), now)
        if answer and not by_this_process:
            self._signals.announce_stop()
        return answer

    def leave(self, error: BaseException | None, disconnect: Callable[[bool], None]) -> bool:
        """Leave the job: on purpose, or because of this process's ``error``. Print why the run ends, wait for what this
        process writes, and disconnect. Returns whether everything was done.

        Args:
            disconnect: Takes whether to disconnect gracefully, which waits for the others (`Backend.disconnect`).

        Raises:
            Failed: the run has stopped. One of several processes that alone knows the reason does not raise: it exits.
        """
        is_done = error is None or isinstance(error, SystemExit | Ended)
        # Errors that all processes raise.
        is_mistake = isinstance(error, UserMistake)
        is_on_all_ranks = is_mistake or (isinstance(error, TrainingStopped) and not error.on_one_rank)
        stop_error, is_graceful = None, False
        try:
            stop_error = self.watchdog.explain(error)
            if stop_error is not None and (self.is_root or stop_error.on_one_rank):
                # Print before cleaning up: launchers kill the other processes of a job that has lost one.
                say(f"stopped: {stop_error}")
            # No barrier after a UserMistake: should one process raise it alone, the others wait in another collective.
            is_graceful = is_mistake or ((is_done or is_on_all_ranks) and self._all_are_done())
        finally:
            self.watchdog.stop(None if is_done or is_on_all_ranks else error)
            # Signals must not end this process yet: launchers send SIGTERM as soon as another process has ended.
            self.watchdog.wait_for_writes()
            self._signals.close()
            disconnect(is_graceful)
        if stop_error is None:
            return is_done
        if stop_error.on_one_rank and self.world_size > 1:  # or the exit may hang until the launcher kills this process
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            self.watchdog.exit_process()
        raise Failed(str(stop_error)) from error

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

    def about_to_update(self) -> None:
        """An update is about to change weights and moments; from now on there is something to save. For engines."""
        self._signals.enable_saving()
        self.finish_copies()
