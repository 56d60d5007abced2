"""Where metrics and pictures go: metrics.jsonl always, Weights & Biases and TensorBoard on request."""

import importlib.util
import json
import math
import os
import sys
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from ..files import write_atomically

# Without these wandb waits 90 seconds for its server at the start, and for ever at the end.
_WANDB_START_SECONDS, _WANDB_FINISH_SECONDS = 20.0, 120.0


class Tracker(Protocol):
    """Takes the values of a run. Call `cut_back` once before the first `log`, and `log` at most once per step."""

    @property
    def failure(self) -> str | None:
        """What could not be written so far and must be, in one line."""

    def cut_back(self, step: int) -> None:
        """Forget what was logged after `step`: the run continues from there (0: it starts)."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take numbers by name."""

    def log_image(self, step: int, name: str, image: Image.Image) -> None:
        """Take a picture."""

    def close(self) -> None:
        """Finish writing."""


class JsonlTracker:
    """metrics.jsonl: one object per line, `{"step": ..., ...}`, readable while the run goes on.

    NaN and infinities, which JSON does not have, are written as null. Lines that the disk does not take are kept and
    written with a later one.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        #: Why lines are waiting, in one line; None while all is well.
        self.failure: str | None = None
        self._last_step = -1
        self._size = self.path.stat().st_size if self.path.exists() else 0
        self._waiting: list[bytes] = []

    def cut_back(self, step: int) -> None:
        """Drop the lines after `step` and a torn last line."""
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        kept = [line for line in lines if _step_of(line) <= step]
        if kept != lines:
            write_atomically(self.path, b"".join(kept))
        self._size = sum(map(len, kept))
        self._last_step = max((json.loads(line)["step"] for line in kept), default=-1)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        assert step > self._last_step, f"step {step} was logged after {self._last_step}: one line per step"
        self._last_step = step
        values = {name: _json_value(value) for name, value in {"step": step, **metrics}.items()}
        self._waiting.append(json.dumps(values, allow_nan=False).encode() + b"\n")
        self._write()

    def _write(self) -> None:
        content = b"".join(self._waiting)
        try:
            with open(self.path, "ab") as file:
                file.truncate(self._size)  # a line that was written in part before the disk was full
                file.write(content)
        except OSError as error:
            if self.failure is None:
                _say(f"cannot write {self.path}: {error.strerror or error}; its lines are kept for later")
            self.failure = f"cannot write {self.path}: {error.strerror or error}"
            return
        self._size += len(content)
        self._waiting, self.failure = [], None

    def log_image(self, step: int, name: str, image: Image.Image) -> None:
        pass

    def close(self) -> None:
        if self._waiting:
            self._write()


def _step_of(line: bytes) -> float:
    """The step of a line; infinite where the line is torn."""
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def _json_value(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoardTracker:
    """Event files under `tensorboard/`, readable without internet."""

    failure = None

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def cut_back(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_image(self, step: int, name: str, image: Image.Image) -> None:
        import numpy as np

        self._writer.add_image(name, np.asarray(image), step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run, whose id is kept in the run folder, so that a resumed run continues it.

    Key, project, server and mode come from wandb's own login and environment variables. Without a key, or where the
    server cannot be reached, the run is written offline under `wandb/`, for `wandb sync`.
    """

    failure = None

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        id_file = folder / "wandb_id.txt"
        if not id_file.exists():
            write_atomically(id_file, uuid.uuid4().hex[:8].encode())
        # Asked here, because wandb.init would ask for a key at a prompt.
        has_key = "WANDB_MODE" in os.environ or wandb.login(prompt=False, verify=False)
        options: dict[str, Any] = {
            "id": id_file.read_text().strip(),
            "resume": "allow",
            "name": folder.name,
            "dir": str(folder),
            "config": dict(config),
            "settings": wandb.Settings(init_timeout=_WANDB_START_SECONDS, finish_timeout=_WANDB_FINISH_SECONDS),
        }
        try:
            self._run = wandb.init(**options, mode=None if has_key else "offline")
        except wandb.errors.Error as error:
            _say(f"wandb writes offline: {error}")
            # Its service process still holds the run that could not start.
            wandb.teardown()
            self._run = wandb.init(**options, mode="offline")
        self._image = wandb.Image
        # With an axis of its own a resumed run may log steps again that it had logged before it was killed.
        self._run.define_metric("*", step_metric="step")

    def cut_back(self, step: int) -> None:
        pass

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **metrics})

    def log_image(self, step: int, name: str, image: Image.Image) -> None:
        self._run.log({"step": step, name: self._image(image)})

    def close(self) -> None:
        self._run.finish()


class NullTracker:
    """Off the root."""

    failure = None

    def cut_back(self, step: int) -> None:
        pass

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        pass

    def log_image(self, step: int, name: str, image: Image.Image) -> None:
        pass

    def close(self) -> None:
        pass


def _say(text: str) -> None:
    print(" ".join(text.split()), file=sys.stderr, flush=True)


class Expendable:
    """A tracker that the run can do without: at its first error it says so once and is switched off."""

    failure = None

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self._name = name
        self._tracker: Tracker = NullTracker()
        self._try(lambda: setattr(self, "_tracker", make()))

    def cut_back(self, step: int) -> None:
        self._try(lambda: self._tracker.cut_back(step))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._try(lambda: self._tracker.log(step, metrics))

    def log_image(self, step: int, name: str, image: Image.Image) -> None:
        self._try(lambda: self._tracker.log_image(step, name, image))

    def close(self) -> None:
        self._try(lambda: self._tracker.close())

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._tracker = NullTracker()
            _say(f"{self._name} is switched off, the run goes on: {type(error).__name__}: {error}")


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    @property
    def failure(self) -> str | None:
        return next((tracker.failure for tracker in self._trackers if tracker.failure), None)

    def cut_back(self, step: int) -> None:
        for tracker in self._trackers:
            tracker.cut_back(step)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def log_image(self, step: int, name: str, image: Image.Image) -> None:
        for tracker in self._trackers:
            tracker.log_image(step, name, image)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def make_trackers(report_to: Collection[str], folder: Path, config: Mapping[str, Any], is_root: bool) -> Tracker:
    """metrics.jsonl and the trackers named in `report_to` on the root, nothing elsewhere.

    Args:
        report_to: "tensorboard", "wandb", or both; empty: metrics.jsonl alone.
        folder: The run folder.
        config: The run's arguments, shown beside the curves.
        is_root: Whether this process writes.

    Raises:
        ValueError: on every process, if a named tracker is not installed.
    """
    for name in report_to:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"--report_to {name}: {name} is not installed; run `pip install {name}` or leave it out")
    if not is_root:
        return NullTracker()
    makers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoardTracker(folder),
        "wandb": lambda: WandbTracker(folder, config),
    }
    return Trackers([JsonlTracker(folder), *(Expendable(name, makers[name]) for name in report_to)])
