"""What the processes of a job do together, however they were connected: collectives, agreements, waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from tandem.files.exits import CannotGoOn
from tandem.files.reading import printable

from .errors import TrainingStopped, UserMistake, first_line, lacks_memory
from .launchers import torchrun_id

if TYPE_CHECKING:  # `--help` must not import PyTorch
    import torch
    from torch import Tensor

    from .collectives import Communicator
    from .launchers import Launch
    from .watchdog import Watchdog


class Processes:
    """The processes of a job, one of which is this one. A `Backend` connects them, and sets the attributes without a
    value.

    Attributes:
        rank, local_rank: Of this process, in the job and on its machine, from 0.
        world_size: Number of processes in the job.
        is_restart: Whether the launcher started these processes again after some had failed.
        comm: What the collectives go through.
    """

    device: torch.device
    comm: Communicator
    watchdog: Watchdog

    def __init__(self, launch: Launch) -> None:
        self.launch, self.is_restart = launch, launch.is_restart
        self.rank, self.local_rank, self.world_size = launch.rank, launch.local_rank, launch.world_size
        self._before_update: list[Callable[[], None]] = []

    @property
    def is_root(self) -> bool:
        return self.rank == 0

    def torchruns(self) -> list[str]:
        """Identifies each torchrun that started some of these processes (`torchrun_id`). Collective."""
        return sorted({found for found in self.gather_objects(torchrun_id()) if found})

    # Collectives: every process calls them, so never put a call behind a test of the rank.

    @contextmanager
    def _in_collective(self, phase: str) -> Iterator[None]:
        self.watchdog.mark(phase, collective=True)
        yield
        self.watchdog.mark("computing")

    def sum(self, value: Any) -> Any:
        """Sum over the processes: of a tensor (on the device; returns a tensor), or of a dict of numbers and 0-d
        tensors (one transfer for all; returns floats)."""
        with self._in_collective("sum over the processes"):
            if isinstance(value, Mapping):
                return self.comm.sum_scalars(value, self.device)
            return self.comm.sum_tensor(value)

    def mean(self, value: Any) -> Any:
        """``sum`` divided by the number of processes."""
        if isinstance(value, Mapping):
            return {name: total / self.world_size for name, total in self.sum(value).items()}
        return self.sum(value if value.is_floating_point() else value.float()) / self.world_size

    def gather(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Concatenate along dimension 0 in the order of ranks; the sizes of dimension 0 may differ. The gradient is
        the one that a single process with all rows would compute. Where all processes know the ``sizes`` by rank, the
        host need not wait for the device to exchange them."""
        with self._in_collective("gathering over the processes"):
            return self.comm.gather(tensor, sizes)

    def gather_objects(self, value: Any) -> list[Any]:
        """JSON-able values of all processes, by rank, on every process."""
        with self._in_collective("exchanging objects"):
            return self.comm.gather_objects(value, self.device)

    def broadcast_object(self, value: Any) -> Any:
        """The root's JSON-able value, on every process."""
        with self._in_collective("exchanging objects"):
            return self.comm.broadcast_object(value, self.device)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any process."""
        return self.sum({"flag": float(flag)})["flag"] > 0

    def barrier(self) -> None:
        """Return when every process has called this."""
        self.sum({"here": 1.0})

    @contextmanager
    def agreement(self) -> Iterator[None]:
        """For work that may fail on one process alone, such as opening files or building a model. A ValueError, an
        OSError or a lack of memory on any process becomes the same UserMistake on all, and a CannotGoOn the same
        TrainingStopped, so that none waits for one that has left. The work may last longer on one process than
        --timeout_minutes, if it calls ``mark`` now and then. Call no collectives inside."""
        mistake: str | None = None
        kind: type[UserMistake | TrainingStopped] = UserMistake
        try:
            yield
        except CannotGoOn as error:
            mistake, kind = first_line(error), TrainingStopped
        except (ValueError, OSError) as error:
            mistake = first_line(error)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, TrainingStopped) or not lacks_memory(error):  # the first: the job ends already
                raise
            mistake = f"not enough memory: {first_line(error)}"
        self.watchdog.meet()
        if not self.any(mistake is not None):
            return
        for rank, (text, is_mistake) in enumerate(self.gather_objects([mistake, kind is UserMistake])):
            if text is not None:
                kind = UserMistake if is_mistake else TrainingStopped
                raise kind(text if rank == 0 else f"{text} (on rank {rank})")

    def say(self, text: str, *, file: TextIO | None = None) -> None:
        """The root prints a line, which may quote a file, to ``file`` (default: stdout)."""
        if self.is_root:
            print(printable(text), file=file, flush=True)

    def mark(self, phase: str) -> None:
        """This process begins ``phase``. The call shows the watchdog progress; engines and collectives make it too."""
        self.watchdog.mark(phase)

    def working(self, phase: str) -> None:
        """The main thread begins a ``phase`` in which it cannot call ``mark``, such as a function of the user's, or a
        write. It may take as long as it likes while it gets on, using the processor now and then; if it hangs, as on a
        disk that does, the job ends after the timeout."""
        self.watchdog.mark(phase, writes=True)

    @property
    def waited(self) -> Mapping[str, float]:
        """Seconds in which this process waited so far, by what it waited for: "data", and "communication" (on a GPU
        only the waits of the host; the device has its own)."""
        return self.watchdog.waited

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """A ValueError or CannotGoOn inside, on this process alone, ends the job: this process prints the reason, the
        others print which process they lost."""
        self.watchdog.mark(f"waiting for {what}", waits_for_data=True)
        try:
            yield
        except (ValueError, CannotGoOn) as error:
            raise TrainingStopped(f"rank {self.rank}: {first_line(error)}", alone=True) from error
        self.mark("computing")

    def each(self, what: str, items: Iterable[Any]) -> Iterator[Any]:
        """``items``, each fetched inside ``waiting_for(what)``."""
        with self.waiting_for(what):
            iterator = iter(items)
        while True:
            with self.waiting_for(what):
                item = next(iterator, None)
            if item is None:
                return
            yield item

    def before_update(self, wait: Callable[[], None]) -> None:
        """Call ``wait`` once before the next weight update: a checkpoint's copy must be finished by then."""
        self._before_update.append(wait)

    def finish_copies(self) -> None:
        """For engines: weights and moments are about to change."""
        while self._before_update:
            self._before_update.pop()()
