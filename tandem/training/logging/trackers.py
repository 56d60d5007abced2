"""Where metrics and pictures go: metrics.jsonl always, Weights & Biases and TensorBoard on request."""

import importlib.util
import json
import math
import os
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image

from tandem.io.installed import missing_package
from tandem.io.reading import error_text, parse_json, read_bytes, read_lines
from tandem.io.writing import create, open_appending, replacing, say, write_atomically
from tandem.training.metrics.directions import EVALUATION_SECONDS

# wandb's own limits are 90 seconds at the start and none at the end, where the models are uploaded.
_WANDB_START_SECONDS, _WANDB_FINISH_SECONDS = 20.0, 1800.0
_LONGEST_ID_BYTES = 1000
_MOST_BINS = 512  # wandb's own limit for a histogram
_EMPTY: Mapping[str, Any] = MappingProxyType({})


class Trackers:
    """metrics.jsonl, and trackers, each of which is switched off at its first error, with a message.

    metrics.jsonl has one object per line, `{"step": ..., ...}`, and can be read while the run goes on. NaN and
    infinities, which JSON does not have, are written as null, and numbers with 12 digits, because further digits of a
    mean depend on the number of processes. Lines that cannot be written now are written with the next one.

    Args:
        report_to: "tensorboard", "wandb", or both, see `TRACKERS`; empty: metrics.jsonl alone.
        config: The run's arguments, which wandb shows beside the curves.
        wandb_names: Arguments "project", "name", "entity" and "tags" of wandb.init, or some of them; the default name
            is that of the folder.
        check: Raises OSError if `folder` is no longer that of the run.
        is_root: Whether this process reads and writes; the others have no lines and no trackers.

    Raises:
        ValueError: on every process, if a named tracker is not installed.
    """

    def __init__(
        self, folder: Path, report_to: Collection[str] = (), config: Mapping[str, Any] = _EMPTY,
        wandb_names: Mapping[str, Any] = _EMPTY, check: Callable[[], None] = lambda: None, *, is_root: bool = True,
    ) -> None:  # fmt: skip
        for name in report_to:
            package = TRACKERS[name].package
            spec = importlib.util.find_spec(package)
            if spec is None or spec.loader is None:  # without a loader it is a plain folder, not a package
                raise missing_package(f"--report_to {name}", package, extra=name)
        self.path, self._check, self._is_root = folder / "metrics.jsonl", check, is_root
        #: Why lines could not be written, in one line; None if all are written.
        self.failure: str | None = None
        self._last: tuple[float, bool] = (-1, False)  # of the last line: its step, and whether it is of an evaluation
        self._size = self.path.stat().st_size if self.path.exists() else 0  # bytes of the lines that are written
        self._pending_lines: list[bytes] = []
        self._trackers: dict[str, Any] = {}
        for name in report_to if is_root else ():
            try:
                self._trackers[name] = TRACKERS[name](folder, config, wandb_names)
            except Exception as error:
                self._switch_off(name, error)

    def cut_back(self, step: int, *, keep_evaluation: bool = True) -> None:
        """Delete the lines after `step`, from which the run goes on (0: a new run), that of its evaluation unless
        `keep_evaluation`, and an incomplete last line. Called before the first `log`."""
        if not self._is_root:
            return
        if self.path.is_symlink():
            raise ValueError(f"{self.path} is a link; put the file itself there, or remove it")
        limit = (step, keep_evaluation)
        self._size, self._last, is_changed = 0, (-1, False), False
        for line in _read_file_lines(self.path):
            if (position := _read_position(line)) <= limit:
                self._size, self._last = self._size + len(line), max(self._last, position)
            else:
                is_changed = True
        if is_changed:
            with replacing(self.path) as temporary, create(temporary) as file:
                file.writelines(line for line in _read_file_lines(self.path) if _read_position(line) <= limit)
        self._call_trackers("cut_back", step)

    def has_line(self, step: int) -> bool:
        """Whether `cut_back` has kept a line of this step, as its last one."""
        return self._last[0] == step

    def evaluation(self, step: int) -> dict[str, Any]:
        """The written line of the evaluation after a step; {} if there is none."""
        if not self._is_root:
            return {}
        start = b'{"step": %d,' % step  # as `log` writes it; of a long file only these few lines are parsed
        lines = (line for line in _read_file_lines(self.path) if line.startswith(start))
        return next((parse_json(line) for line in lines if _read_position(line) == (step, True)), {})

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write a line of numbers by name: of each step at most one of the update, then one of its evaluation."""
        if not self._is_root:
            return
        position = (step, _is_evaluation(metrics))
        assert position > self._last, f"{position} was logged after {self._last}: (step, whether of its evaluation)"
        self._last = position
        values = {name: logged_value(value) for name, value in {"step": step, **metrics}.items()}
        self._pending_lines.append(json.dumps(values, allow_nan=False).encode() + b"\n")
        self.write_lines()
        self._call_trackers("log", step, metrics)

    def log_image(self, step: int, name: str, image: Image.Image) -> None:
        """Log a picture; metrics.jsonl holds none."""
        self._call_trackers("log_image", step, name, image)

    def write_lines(self) -> None:
        """Write the lines that are not written yet."""
        if not self._pending_lines:
            return
        content = b"".join(self._pending_lines)
        try:
            self._check()
            with open_appending(self.path) as file:
                size = file.seek(0, os.SEEK_END)
                if size < self._size:
                    # Truncating to the expected size would pad the file with zero bytes.
                    say(f"{self.path} lost lines while the run goes on: {size} of {self._size} bytes are left")
                    self._size = size
                    if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                        content = b"\n" + content
                file.truncate(self._size)  # remove the remains of the last failed write
                file.write(content)
        except OSError as error:
            failure = f"cannot write {self.path}: {error_text(error)}"
            if self.failure is None:
                say(f"{failure}; its lines are kept for later")
            self.failure = failure
            return
        self._size += len(content)
        self._pending_lines, self.failure = [], None

    def close(self, models: Mapping[str, Path] = _EMPTY) -> None:
        """Log trained models, folders or files by alias, such as "final", and finish writing. Uploads may take long;
        Ctrl-C ends them."""
        self.write_lines()
        try:
            if "wandb" in self._trackers:
                say("wandb ends its run, which may take long; everything is in the run folder already")
            self._call_trackers("close", {alias: path for alias, path in models.items() if path.exists()})
        except KeyboardInterrupt:
            say("wandb was interrupted: its part of the run may be incomplete, the run folder is not")

    def _call_trackers(self, method: str, *args: Any) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                getattr(tracker, method)(*args)
            except Exception as error:
                self._switch_off(name, error)

    def _switch_off(self, name: str, error: Exception) -> None:
        self._trackers.pop(name, None)
        say(f"{name} is switched off, the run goes on: {type(error).__name__}: {error_text(error)}")


def _read_file_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file; none if there is no file. Raises OSError and ValueError if it cannot be read as lines."""
    try:
        yield from read_lines(path)
    except FileNotFoundError:
        pass
    except ValueError as error:
        raise ValueError(f"cannot go on in {path.parent}: {error}; remove it, or start over with --fresh") from None


def logged_value(value: Any) -> Any:
    """A value as metrics.jsonl has it: a float with 12 digits, or None if it is not finite."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.12g}") if math.isfinite(value) else None


def _read_position(line: bytes) -> tuple[float, bool]:
    """The step of a line, and whether it is of the step's evaluation; an infinite step if it is incomplete or
    damaged."""
    try:
        metrics = parse_json(line)
        step = metrics["step"] if line.endswith(b"\n") else math.inf
    except (ValueError, LookupError, TypeError):
        return math.inf, False
    return (step, _is_evaluation(metrics)) if type(step) is int else (math.inf, False)


def _is_evaluation(metrics: Mapping[str, Any]) -> bool:
    """Whether a line is of an evaluation. Earlier versions wrote validations into the line of their update."""
    return EVALUATION_SECONDS in metrics or any(name.startswith("valid/") for name in metrics)


class TensorBoardTracker:
    """Event files under `tensorboard/`, readable without internet."""

    package = "tensorboard"

    def __init__(self, folder: Path, config: Mapping[str, Any], wandb_names: Mapping[str, Any]) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def cut_back(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in _drop_texts(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_image(self, step: int, name: str, image: Image.Image) -> None:
        self._writer.add_image(name, np.asarray(image), step, dataformats="HWC")
        if "counts" in image.info:
            self._writer.add_histogram(f"{name}_histogram", _expand_counts(image), step, max_bins=_MOST_BINS)

    def close(self, models: Mapping[str, Path]) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run. Its id is in the run folder, so that a resumed run continues it.

    Key, server and mode come from wandb's login and environment variables, as do project and entity by default. Without
    a key, or if the server cannot be reached, the run is written to `wandb/`, from where `wandb sync` uploads it.
    """

    package = "wandb"

    def __init__(self, folder: Path, config: Mapping[str, Any], wandb_names: Mapping[str, Any]) -> None:
        import wandb

        id_file = folder / "wandb_id.txt"
        # In a sweep its agent chooses the id, and wandb ignores any other.
        id_of_sweep = os.environ.get("WANDB_RUN_ID", "") if "WANDB_SWEEP_ID" in os.environ else ""
        if id_of_sweep or not id_file.exists():
            write_atomically(id_file, (id_of_sweep or uuid.uuid4().hex[:8]).encode())
        # Without a key wandb.init would ask for one at a prompt.
        has_key = "WANDB_MODE" in os.environ or wandb.login(prompt=False, verify=False)
        options: dict[str, Any] = {
            "id": read_bytes(id_file, _LONGEST_ID_BYTES).decode().strip(),
            "resume": "allow",
            "name": folder.name,
            **{name: value for name, value in wandb_names.items() if value},
            "dir": str(folder),
            "config": dict(config),
            "settings": wandb.Settings(init_timeout=_WANDB_START_SECONDS, finish_timeout=_WANDB_FINISH_SECONDS),
        }
        try:
            self._run = wandb.init(**options, mode=None if has_key else "offline")
        except wandb.errors.Error as error:
            say(f"wandb writes offline: {error_text(error)}")
            # End wandb's service process, which still holds the run that could not start.
            wandb.teardown()
            self._run = wandb.init(**options, mode="offline")
        self._wandb, self._config = wandb, dict(config)
        # wandb's own step may not go back, but a resumed run repeats steps that it logged before it was killed.
        self._run.define_metric("*", step_metric="step")

    def cut_back(self, step: int) -> None:
        pass

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **_drop_texts(metrics)})

    def log_image(self, step: int, name: str, image: Image.Image) -> None:
        values = {"step": step, name: self._wandb.Image(image)}
        if "counts" in image.info:
            values[f"{name}_histogram"] = self._wandb.Histogram(_expand_counts(image), num_bins=_MOST_BINS)
        self._run.log(values)

    def close(self, models: Mapping[str, Path]) -> None:
        for alias, path in models.items():
            # One entry of metadata: wandb allows a hundred, and a script may have more flags.
            artifact = self._wandb.Artifact(f"model-{self._run.id}", type="model", metadata={"config": self._config})
            artifact.add_dir(str(path)) if path.is_dir() else artifact.add_file(str(path))
            self._run.log_artifact(artifact, aliases=[alias])
        self._run.finish()


def _expand_counts(histogram: Image.Image) -> Any:
    """The codes of a `code_histogram`, each as often as it was used: int64 (sum of the counts,)."""
    counts = histogram.info["counts"]
    return np.repeat(np.arange(len(counts)), counts)


def _drop_texts(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics without texts, which are the time of day: these trackers record it themselves."""
    return {name: value for name, value in metrics.items() if not isinstance(value, str)}


#: The trackers by their names in --report_to. The root constructs them with the run folder, the run's configuration and
#: `wandb_names`. `package` is what they import.
TRACKERS: dict[str, Any] = {"tensorboard": TensorBoardTracker, "wandb": WandbTracker}
