"""The progress of a run, its display on the terminal, and lines about a run and its processes."""

import contextlib
import math
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from tandem.config.shared import ENDLESS
from tandem.io.installed import command_of
from tandem.io.reading import counted, printable
from tandem.training.run_folder.starts import describe_placement

from .table import MetricsTable, format_time_left

_WIDTH = 100  # characters of a line of metrics, where the terminal has as many


def run_length(
    epochs: float, max_steps: int | None, samples_per_epoch: int, batch_size: int, max_minutes: float | None = None
) -> tuple[int, str, str]:
    """Updates of the whole run: those of `epochs`, but at most `max_steps`, and at least 1; the flag that sets them,
    `--epochs` or `--max_steps`; and a text of the updates with the flags that bound them."""
    epoch_steps, flag = max(1, math.ceil(round(epochs * samples_per_epoch) / batch_size)), "--epochs"
    reason, steps = f"--epochs {epochs:g}", epoch_steps
    if max_steps is not None and max_steps < epoch_steps:
        flag, steps = "--max_steps", max_steps
        alternative = f"; --epochs {epochs:g} would make {epoch_steps}" if epochs < ENDLESS else ""
        reason = f"--max_steps {max_steps}{alternative}"
    elif max_steps is not None and max_steps > epoch_steps:
        reason += f", which ends the run before --max_steps {max_steps}"
    minutes = f" or {counted(max_minutes, 'minute')} (--max_minutes), whichever comes first" if max_minutes else ""
    return steps, flag, f"{counted(steps, 'update')} ({reason}){minutes}"


class Progress:
    """Number of samples seen, from which step and epoch follow. `batch_size` is samples per update over all processes,
    `samples_per_epoch` the size of the training split, `total_steps` the updates of the run, which schedules use."""

    def __init__(self, batch_size: int, samples_per_epoch: int, total_steps: int) -> None:
        self.batch_size = batch_size
        self.samples_per_epoch = samples_per_epoch
        self.total_steps = total_steps
        #: Updates after which the run ends: fewer than `total_steps` if its time is over before.
        self.last_step = total_steps
        self.samples = 0
        #: Wall-clock seconds of all starts of the run; `Run.save` sets it.
        self.seconds = 0.0
        #: Whether the checkpoint from which the run resumes was made at the end of the run.
        self.was_finished = False
        #: Metrics of the checkpoint's update that are not in metrics.jsonl yet. Only checkpoints of earlier versions
        #: hold them: those logged an update after its evaluation, and a run could end in between.
        self.unlogged_line: dict[str, Any] = {}

    @property
    def step(self) -> int:
        """Completed updates."""
        return self.samples // self.batch_size

    @property
    def epoch(self) -> float:
        """Passes over the training split, a fractional number."""
        return self.samples / self.samples_per_epoch

    @property
    def finished(self) -> bool:
        """Whether the run has reached its length."""
        return self.step >= self.last_step

    def advance(self) -> None:
        """Count one update."""
        self.samples += self.batch_size

    def due(self, every_n_steps: int, *, ahead: int = 0) -> bool:
        """Whether something that happens every n updates (0: only at the end) happens after update `step + ahead`,
        where `step` is the newest; ahead=1: after the one that is being made."""
        step = self.step + ahead
        return step >= self.last_step or (every_n_steps > 0 and step > 0 and step % every_n_steps == 0)

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values."""
        names = ("samples", "batch_size", "samples_per_epoch", "seconds", "finished")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.

        Raises:
            ValueError: the batch size differs, because steps are counted in batches, or the size of the training split,
                because the order of samples depends on it; or the samples seen are no whole number of updates.
        """
        if state["batch_size"] != self.batch_size:
            raise ValueError(
                f"the checkpoint was trained with --batch_size {state['batch_size']}, now it is {self.batch_size}, so "
                "the count of its updates cannot go on: use the old value, or start over with --fresh"
            )
        if state["samples_per_epoch"] != self.samples_per_epoch:
            raise ValueError(
                f"the checkpoint was trained on {state['samples_per_epoch']} samples per epoch, now there are "
                f"{self.samples_per_epoch}, so their order cannot be continued: restore the data, --valid_fraction and "
                "--seed, or start over with --fresh"
            )
        samples = state["samples"]
        if type(samples) is not int or samples < 0 or samples % self.batch_size:
            raise ValueError(
                f"the checkpoint says that {str(samples)[:40]} samples were seen, which is no whole number of updates "
                f"of {self.batch_size}; restore an older one, or start over with --fresh"
            )
        self.samples = samples
        seconds = state.get("seconds")
        self.seconds = float(seconds) if isinstance(seconds, int | float) and 0 <= seconds < math.inf else 0.0
        # Checkpoints of earlier versions lack "finished". They have an "unfinished_line", perhaps an empty one, if the
        # evaluation of their update had not run yet, as in the last checkpoint of a run: the next start makes it.
        self.unlogged_line = dict(state.get("unfinished_line") or {})
        self.was_finished = bool(state.get("finished")) or state.get("unfinished_line") is not None


class ProgressDisplay:
    """Shows metrics and short messages: on a terminal above a tqdm bar, elsewhere as plain lines. Only the root prints.
    Errors of a closed terminal or pipe are ignored, so that the run can still save.

    Args:
        columns: See `MetricsTable`.
        max_seconds_left: Seconds after which the run ends in any case. The number of its updates, which it may then not
            reach, is not shown. None: it ends with the last update.
    """

    def __init__(
        self, progress: Progress, is_root: bool, stream: TextIO | None = None, columns: Sequence[str] = (),
        max_seconds_left: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        self._max_seconds_left = max_seconds_left
        self._progress, self._is_root, self._stream = progress, is_root, stream or sys.stderr
        self._first_step, self._start_seconds = progress.step, time.monotonic()
        # get_terminal_size returns 80 for a terminal that reports no width. tqdm alone would draw no bar there.
        self._terminal_width = shutil.get_terminal_size().columns
        is_timed = max_seconds_left is not None
        count = "{n_fmt}" if is_timed else "{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt}"
        self._bar = tqdm(
            total=progress.total_steps,
            initial=progress.step,
            bar_format=f"{count} updates, {{elapsed}} passed{{postfix}}",
            leave=False,  # the last lines of a run stay last
            ncols=self._terminal_width,
            file=self._stream,
            disable=None if is_root else True,  # None: where there is no terminal
        )
        width = _WIDTH if self._bar.disable else min(_WIDTH, self._terminal_width)
        self._table = MetricsTable(progress.total_steps, columns, width, shows_total=not is_timed)

    def update(self) -> None:
        """Show that an update was counted."""
        with contextlib.suppress(OSError):
            if not self._bar.disable and (seconds_left := self._seconds_left()) is not None:
                self._bar.set_postfix_str(f"{format_time_left(seconds_left)} left", refresh=False)
            self._bar.update(self._progress.step - self._bar.n)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Print those of the newest update's metrics that `MetricsTable` shows."""
        if self._is_root:
            for line in self._table.lines(self._progress.step, metrics, self._seconds_left()):
                self._print(printable(line))

    def _seconds_left(self) -> float | None:
        """Seconds until the end of the run, by the rate of this start; None before its first update."""
        progress = self._progress
        if (n_updates := progress.step - self._first_step) < 1:
            return None
        seconds = (time.monotonic() - self._start_seconds) / n_updates * (progress.last_step - progress.step)
        return max(0.0, min(seconds, self._max_seconds_left() if self._max_seconds_left else math.inf))

    def say(self, text: str, *, whole: bool = False) -> None:
        """Print a message, with ? for control characters. On a terminal it is wrapped between words, unless it is to
        stay `whole`, as a command that people copy."""
        text = printable(text)
        if not (self._bar.disable or whole):
            text = textwrap.fill(
                text, self._terminal_width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )
        self._print(text)

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):
            if not self._bar.disable:
                self._bar.write(text, file=self._stream)
            elif self._is_root:
                print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        with contextlib.suppress(OSError):
            self._bar.close()


def format_duration(seconds: float) -> str:
    """`8 s`, `3 min 20 s`, `5 h 02 min`."""
    rounded = max(0, round(seconds))
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"


def describe_part(part: Any) -> str:
    """An engine's number of parameters, and the codebook of its model if it has one; empty for other parts."""
    count = getattr(part, "num_parameters", None)
    if count is None:
        return ""
    codebook = getattr(part.module, "codebook_summary", "")
    return f"{part.name}: {count:,} parameters{f' ({codebook})' if codebook else ''}"


def closing_lines(
    folder: Path, models: Sequence[str], picture: Path | None, next_command: Sequence[str]
) -> Iterator[str]:
    """Lines on the outputs of a finished run, and the commands that show it and use its model."""
    yield f"model: {', '.join(models)}"
    if picture:
        yield f"picture: {picture}"
    yield f"report: {shlex.join([*command_of('report.py'), str(folder)])}"
    if next_command:
        script, *flags = next_command
        yield f"next: {shlex.join([*command_of(script), '--model', models[0], *flags])}"


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line on each difference between the processes that wrote a checkpoint and those of now (`Backend.describe`)."""
    lines = []
    writer, reader = describe_placement(before), describe_placement(now)
    if writer != reader:
        note = "sums are added in another order, so that values differ from the seventh digit on, and more later"
        if now.get("batch_parts") and all(before.get(key) == now[key] for key in ("batch_parts", "device")):
            note = f"its --batch_parts {now['batch_parts']} are added in the same order, which gives the same bits"
        lines.append(
            f"it was written by {writer} and goes on with {reader}: the same samples in the same order; {note}"
        )
    if before.get("precision") != now.get("precision"):
        lines.append(
            f"it was trained in {before.get('precision')} and goes on in {now.get('precision')}: weights and moments "
            "are fp32 in both, the losses will differ by the precision's rounding"
        )
    return lines
