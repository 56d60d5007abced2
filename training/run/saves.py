"""What a run writes to go on from and to be used: its checkpoints, the averages beside them, and its models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints.averages import AverageFiles
from ..checkpoints.format import damaged, explained
from ..checkpoints.store import Checkpoints, step_of

if TYPE_CHECKING:
    from ..contracts import Processes, Stateful
    from .folder import RunFolder
    from .progress import Progress


class Saves:
    """The checkpoints and trained models of a run, and what failed of them.

    Args:
        keep: Number of newest checkpoints that are not deleted, at least 1.
        seconds: Gives the wall-clock seconds of all starts of the run.
        say: Prints a line on the root's terminal.
    """

    def __init__(
        self,
        folder: RunFolder,
        keep: int,
        progress: Progress,
        processes: Processes,
        *,
        seconds: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._folder, self._progress, self._processes = folder, progress, processes
        self._seconds, self._say = seconds, say
        self._checkpoints = Checkpoints(
            folder.checkpoints_dir, keep, processes, synced_first=folder.metrics_file, check=folder.check_is_here
        )
        self._averages = AverageFiles(folder.path / "snapshots")
        #: What a checkpoint consists of, by name.
        self.parts: dict[str, Stateful] = {}
        #: Paths of the models that were written.
        self.models: list[str] = []
        self._unwritten: str | None = None
        self._said_failure: str | None = None

    @property
    def longest_seconds(self) -> float:
        """Seconds of the longest write of a checkpoint so far."""
        return self._checkpoints.longest_seconds

    def load_newest(self, say: Callable[[str], None]) -> tuple[Path | None, dict[str, Any], dict[str, Any]]:
        """Load the newest checkpoint that is whole. Collective. Damaged ones, and a folder that a process does not see,
        are reported to `say`.

        Returns:
            Its path, None if none was ever saved; the states of the parts; the processes that wrote it, as
            `Processes.describe` does.

        Raises:
            UserMistake: one line, if all checkpoints are damaged or gone, or a process does not see the folder.
        """
        here, folder, found = self._processes, self._folder, None
        with here.agreement():
            if here.is_root:
                found = self._checkpoints.newest_good(say)
                if found is None and folder.finished_step is not None:
                    raise ValueError(
                        f"{folder.path} holds a model of update {folder.finished_step} and no checkpoint; "
                        "restore one to go on, give another --output_dir, or start over with --fresh"
                    )
        # All processes use the root's answer: one on a machine that does not see the folder must not start afresh.
        latest = here.broadcast_object(str(found) if found else None)
        blind = [rank for rank, sees in enumerate(here.gather_objects(folder.is_seen)) if not sees]
        with here.agreement():
            if blind:
                unseen = (
                    f"rank {blind[0]} does not see {folder.path}; put --output_dir on a disk that all machines see, "
                    "because every process reads the checkpoint there to resume"
                )
                if latest:
                    raise ValueError(f"cannot resume: {unseen}")
                say(unseen)
            if latest:
                return Path(latest), *self._checkpoints.load(Path(latest), expected=self.parts)
        return None, {}, {}

    def restore(self, path: Path, states: Mapping[str, Any]) -> None:
        """Set the parts to the states that were loaded from a checkpoint. Collective.

        Raises:
            ValueError: one line, if a state is not what its part wrote, or is of another update; on all processes.
        """
        for name, state in states.items():
            # Each in its own agreement: the next part may wait for the others in a collective.
            with self._processes.agreement(), explained(path, name):
                self.parts[name].load_state_dict(state)
        if self._progress.step != step_of(path):
            raise damaged(path, f"it holds the state of update {self._progress.step}")

    def cut_back(self, step: int) -> None:
        """Delete the averages of later updates than `step`, at which the run goes on; on the root."""
        self._checkpoints.left += self._averages.cut_back(step)

    def is_requested(self) -> bool:
        """Whether this update is saved, or its save under way. Collective."""
        return self._checkpoints.requested_step == self._progress.step and not self.failure()

    def save(self, *, averages: bool) -> None:
        """Start to write a checkpoint of all parts, and the averages beside it if they are asked for. Collective."""
        self._checkpoints.join()
        self.report_failure()
        self._progress.seconds = round(self._seconds(), 3)
        states = {name: getattr(part, "live_state", part.state_dict)() for name, part in self.parts.items()}
        beside = self._averages.write if averages else None
        self._checkpoints.save(self._progress.step, states, self._processes.describe(), beside)

    def failure(self) -> str | None:
        """Why the newest checkpoint is not on the disk, or None; waits for the write that is under way. Collective."""
        self._checkpoints.wait()
        failure: str | None = self._processes.broadcast_object(self._checkpoints.failure)
        return failure

    def report_failure(self) -> None:
        """Say once that a write failed, or that something could not be deleted; training goes on."""
        self._report_left()
        failure = self._checkpoints.failure
        if failure and failure != self._said_failure:
            self._say(f"{failure}; training goes on, and the next save tries again")
        self._said_failure = failure

    def _report_left(self) -> None:
        while self._checkpoints.left:
            self._say(f"{self._checkpoints.left.pop(0)}; it stays")

    def newest_bytes(self) -> int:
        """The size of the newest checkpoint, on the root; 0 on others."""
        newest = self._checkpoints.latest() if self._processes.is_root else None
        return sum(path.stat().st_size for path in newest.iterdir()) if newest else 0

    def write_model(self, write: Callable[[Path], None], path: Path) -> bool:
        """Write a trained model to `path`, on the root, and return on every process whether that succeeded."""
        failure = None
        if self._processes.is_root:
            try:
                self._folder.check_is_here()
                self._processes.writing(path.name)
                write(path)
            except OSError as error:
                failure = " ".join(str(error).split())
        if self._processes.broadcast_object(failure):
            self._unwritten = failure
            return False
        self.models.append(str(path))
        return True

    def wait(self) -> None:
        """Return when the last checkpoint is on the disk, or could not be written. Collective."""
        self._checkpoints.wait()
        self._report_left()

    def failures(self) -> list[str]:
        """What could not be written of models and of the newest checkpoint, on the root; call it after `wait`."""
        return [failure for failure in (self._unwritten, self._checkpoints.failure) if failure]

    def newest_name(self) -> str:
        """The name of the newest checkpoint, or "none"."""
        newest = self._checkpoints.latest()
        return newest.name if newest else "none"
