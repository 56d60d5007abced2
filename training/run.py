"""A run: its folder, clock, trackers and checkpoints, opened together and kept in step."""

import argparse
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn, Protocol

from PIL import Image

from .checkpoint import Checkpoints
from .progress import Progress, progress_display, total_samples_from
from .run_folder import RunFolder
from .stopwatch import Stopwatch
from .tracking import make_trackers

ASKED_TO_STOP = 75  # EX_TEMPFAIL of sysexits.h: run the same command again


class Processes(Protocol):
    """What a run asks of the processes that train it."""

    @property
    def is_root(self) -> bool: ...
    def agreement(self) -> AbstractContextManager[None]: ...
    def barrier(self) -> None: ...
    def broadcast_object(self, value: Any) -> Any: ...
    def describe(self) -> dict[str, Any]: ...
    def summary(self) -> str: ...


class Stateful(Protocol):
    """A part of a checkpoint. Both methods are called on every process."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Run:
    """Everything about a run that is not its model, data or loss. Every process calls every method.

    Args:
        args: The shared arguments (`add_run_arguments`).
        settings: Every argument by flag name, for config.yaml.
        processes: Who trains.
        model_arguments: Names of settings that a resumed run may not change.
        samples_per_epoch: Size of the training split.

    Raises:
        ValueError: one line, where the folder cannot be used.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        settings: Mapping[str, Any],
        processes: Processes,
        *,
        model_arguments: Collection[str],
        samples_per_epoch: int,
    ) -> None:
        self._settings, self._processes, self._model_arguments = settings, processes, model_arguments
        self.folder = RunFolder(args.output_dir, processes.is_root, args.fresh, processes.broadcast_object)
        self.tracker = make_trackers(args.report_to, self.folder.path, settings, processes.is_root)
        total_samples = total_samples_from(
            epochs=args.epochs,
            max_steps=args.max_steps,
            samples_per_epoch=samples_per_epoch,
            batch_size=args.batch_size,
        )
        self.progress = Progress(args.batch_size, samples_per_epoch, total_samples)
        self._checkpoints = Checkpoints(
            self.folder.checkpoints_dir, args.keep_n_checkpoints, processes.is_root, processes.barrier
        )
        self._parts: dict[str, Stateful] = {}

    def resume(self, **parts: Stateful) -> None:
        """Name the parts of a checkpoint, once, and restore them from the newest one if there is any. Then say what
        this run is and where it stands.

        Raises:
            UserMistake: the checkpoint is damaged or does not fit the arguments.
        """
        self._parts = {"progress": self.progress, **parts}
        states: dict[str, Any] = {}
        with self._processes.agreement():
            found = self._checkpoints.latest() if self._processes.is_root else None
        # The root's answer counts: a machine that does not see its folder must not start afresh.
        latest = self._processes.broadcast_object(str(found) if found else None)
        with self._processes.agreement():
            if latest:
                states, _ = self._checkpoints.load(Path(latest), expected=self._parts)
        # From here on mistakes are the same on every process: what follows is collective itself.
        with self._processes.agreement():
            if latest:
                self.folder.check_config(self._settings, self._model_arguments)
            for name, state in states.items():
                self._parts[name].load_state_dict(state)
            if not self.is_complete:  # else they tell how it was trained
                self.folder.write_config(self._settings)
                self.folder.write_environment(self._processes.describe())
        self.tracker.cut_back(self.progress.step)
        self.display = progress_display(self.progress, self._processes.is_root)
        self.say(self._processes.summary())
        if self.folder.moved_to:
            self.say(f"starting over; the run that was there is now {self.folder.moved_to}")
        if latest:
            self.say(f"resumed from {latest}")
        if self.is_complete:
            self.say(
                f"this run is finished, its model is in {self.folder.model_dir}; "
                "give a larger --epochs or --max_steps to extend it"
            )
        self._logged_samples = self.progress.samples
        self.stopwatch = Stopwatch()

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to do: trained to the end, and the model written."""
        is_written = self.folder.finished and self.folder.finished_step == self.progress.step
        return self.progress.finished and is_written

    def say(self, text: str) -> None:
        """One line on the root's terminal."""
        self.display.say(text)

    def advance(self) -> None:
        """An update was completed."""
        self.progress.advance()
        self.display.update()

    def due(self, every_n_steps: int) -> bool:
        """Whether something that happens every n updates (0: only at the end) happens after this one."""
        return self.progress.every(every_n_steps) or self.progress.finished

    def log(self, metrics: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl, the other trackers and the display."""
        clock = self.progress
        rate = (clock.samples - self._logged_samples) / max(self.stopwatch.lap(), 1e-9)
        self._logged_samples = clock.samples
        line = {
            "step": clock.step,
            "samples": clock.samples,
            "epoch": round(clock.epoch, 6),
            **metrics,
            "samples_per_second": round(rate, 3),
            "seconds": round(self.stopwatch.seconds, 3),
        }
        self.tracker.log(clock.step, line)
        self.display.log(line)

    def log_image(self, name: str, image: Image.Image) -> None:
        """A picture for the trackers."""
        self.tracker.log_image(self.progress.step, name, image)

    def save(self) -> None:
        """A checkpoint of every part."""
        states = {name: part.state_dict() for name, part in self._parts.items()}
        with self._processes.agreement():
            self._checkpoints.save(self.progress.step, states, self._processes.describe())

    def save_and_exit(self) -> NoReturn:
        """The run was asked to stop: leave a checkpoint of this very update and exit with code 75."""
        self.save()
        self.say(f"asked to stop: saved update {self.progress.step}; run the same command again to go on")
        self.close()
        raise SystemExit(ASKED_TO_STOP)

    def finish(self) -> None:
        """The trained model is in model/: the run is complete."""
        with self._processes.agreement():
            self.folder.mark_finished(self.progress.step)

    def close(self) -> None:
        """Everything is on the disk when this returns."""
        self._checkpoints.wait()
        self.tracker.close()
        self.display.close()
