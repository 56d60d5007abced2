"""The object Run of a training script: folder, clock, logs and checkpoints of a run, and how it resumes and ends.

The processes start in `tandem.launch`; the loop over the updates is in loop.py.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from PIL import Image

from tandem.config.autoencoder_training import DISCRIMINATOR, discriminator_training
from tandem.config.public_names import batch_arithmetic
from tandem.devices import has_pinned_memory
from tandem.io.exits import AskedToStop, Failed
from tandem.io.reading import counted, error_text
from tandem.training.checkpoint.ema_files import EMAFiles
from tandem.training.checkpoint.format import damage_error
from tandem.training.checkpoint.listing import step_of
from tandem.training.checkpoint.models import MODELS, ModelDescriptions
from tandem.training.checkpoint.store import Checkpoints, Stateful
from tandem.training.logging.clock import Clock
from tandem.training.logging.metrics import Metrics
from tandem.training.logging.operations import Operations, total_peak_flops
from tandem.training.logging.profiling import Profiler
from tandem.training.logging.progress import (
    Progress,
    ProgressDisplay,
    closing_lines,
    describe_changes,
    describe_part,
    format_duration,
    run_length,
)
from tandem.training.logging.trackers import Trackers
from tandem.training.metrics.directions import EVALUATION_SECONDS
from tandem.training.run_folder.dry_run_folder import folder_beside
from tandem.training.run_folder.folder import RunFolder, check_output_outside_samples, format_setting
from tandem.training.run_folder.starts import end_start, last_start
from tandem.training.visuals.images import Sample, to_png

from .ema import final_weights

if TYPE_CHECKING:
    from tandem.config.shared import RunFlags
    from tandem.data.feed import TrainingData
    from tandem.distributed import Backend

    from .evaluation import Evaluation

_MAX_VALIDATION_SHARE = 0.1  # of the time
_DISTANCE_FLAGS = ("fid_weights", "fvd_weights")  # of Fréchet distances
_SAMPLE_FOLDER_FLAGS = ("image_folder", "video_folder", "audio_data", "valid_folder")  # flags of the scripts


class Run:
    """What a training script uses besides model, data and loss. Every process calls every method, except those that say
    "on the root". Tests and benchmarks interrupt and measure runs by `watched` alone.

    Args:
        config: The flags of the run.
        models: The trained models by the names of their parts of a checkpoint (`ModelDescriptions`).

    Raises:
        UserMistake: one line, if the folder cannot be used.
    """

    _watchers: ClassVar[list[Callable[[Run, str, Any], object]]] = []

    def __init__(
        self,
        config: RunFlags,
        backend: Backend,
        feed: TrainingData,
        *,
        models: Mapping[str, Any],
    ) -> None:
        self.config, self.backend, self.feed = config, backend, feed
        self.processes = processes = backend.processes
        self._model_descriptions = ModelDescriptions(models)
        if config.dry_run:
            config.output_dir, config.report_to = folder_beside(config.output_dir, processes), ()
        with processes.raise_on_all_ranks():  # symbolic links may differ between machines
            check_output_outside_samples(
                config.output_dir, {flag: getattr(config, flag, None) for flag in _SAMPLE_FOLDER_FLAGS}
            )
            n_drawn = getattr(config, "n_evaluation_samples", None)
            n_measured, remedy = n_drawn, "--n_evaluation_samples"
            if n_drawn is None:
                n_measured, remedy = len(feed.valid_part), "--valid_fraction or --valid_samples"
            if n_measured == 1 and (flag := next((f for f in _DISTANCE_FLAGS if getattr(config, f, None)), None)):
                raise ValueError(f"--{flag} compares at least 2 validation samples, and there is 1: raise {remedy}")
        # A launcher that restarts the processes passes the same arguments, but the run must then go on.
        self.folder = RunFolder(config.output_dir, processes, fresh=config.fresh and not processes.is_restart)
        with processes.raise_on_all_ranks():
            if processes.is_root:
                self.folder.check_script(config.invocation.script)
            wandb_names = {name: getattr(config, f"wandb_{name}") for name in ("project", "name", "entity", "tags")}
            self.tracker = Trackers(
                self.folder.path,
                config.report_to,
                config.invocation.settings,
                wandb_names,
                self.folder.check_is_here,
                is_root=self.is_root,
            )
        size = feed.samples_per_epoch
        backend.total_updates, self._length_flag, self.length = run_length(
            config.epochs, config.max_steps, size, config.batch_size, config.max_minutes
        )
        self.progress = Progress(config.batch_size, size, backend.total_updates)
        self.checkpoints = Checkpoints(
            self.folder.checkpoints_dir, config.keep_n_checkpoints, processes,
            sync_first=self.folder.metrics_file, check=self.folder.check_is_here,
        )  # fmt: skip
        self._averages = EMAFiles(self.folder.path / "snapshots")
        self._models: list[str] = []  # paths of the models that were written
        self._write_failure: str | None = None  # why a model could not be written, on the root
        limits = (config.save_before_minutes, config.save_every_minutes, config.max_minutes)
        self.clock, self._is_late = Clock(processes, *limits), False
        self._has_reported_validations = False
        #: Whether a checkpoint is due by --save_every_minutes; `check_clock` sets it.
        self.is_save_due, self._next_clock_step = False, 0
        #: Values of the evaluation after the checkpoint's update, if an earlier start has made it.
        self.previous_evaluation: dict[str, Any] = {}
        steps = config.profile_steps if self.is_root and not config.dry_run else None
        self.profiler = Profiler(steps, self.folder.path / "profile", lambda text: self.say(text))
        # Without a validation split, the histograms of codes are of training batches.
        histogram_interval = None if len(feed.valid_set) else config.validate_every_n_steps
        # A compiled backward pass does not show which operations it recomputes, so they cannot be left out.
        hides_recomputation = config.compile and getattr(config, "gradient_checkpointing", False)
        self.operations = Operations(is_compiled=config.compile, hides_recomputation=hides_recomputation)
        self._metrics = Metrics(
            config.log_every_n_steps, self.progress, processes, backend.grad_accum_steps, self.clock, self.operations,
            histogram_interval,
        )  # fmt: skip
        #: Operations per second that the devices of all processes could make; None: that is not known.
        self.peak = total_peak_flops(processes, backend.options.precision)
        self.add, self.log, self.log_codes = self._metrics.add, self._metrics.log, self._metrics.log_codes

    @classmethod
    @contextmanager
    def watched(cls, watch: Callable[[Run, str, Any], object]) -> Iterator[None]:
        """Context in which the loop calls `watch` with the run, the name of an event and its subject:

            "start"       the `Evaluation`, before the first batch is loaded
            "update"      the batch of update `progress.step` (from 0), which is about to be made
            "updated"     the same batch, when that update is made and counted, before anything that follows it
            "evaluation"  None, between the steps of validations and pictures, before the check for a stop request

        Every process calls it, so that it may contain collectives of `processes`. It may replace `feed.batches`, the
        loader's batches for the updates that follow. An error that it raises ends the run like an error of the script.
        A dry run has no events of updates.
        """
        cls._watchers.append(watch)
        try:
            yield
        finally:
            cls._watchers.remove(watch)

    def notify(self, event: str, subject: Any = None) -> None:
        """Call the functions of `watched` with an event of the loop."""
        for watch in self._watchers:
            watch(self, event, subject)

    @property
    def is_line_due(self) -> bool:
        """Whether a line of metrics follows the update that is being made."""
        return self._metrics.is_line_due

    @property
    def is_root(self) -> bool:
        return self.processes.is_root

    @property
    def are_codes_due(self) -> bool:
        """Whether `log_codes` needs the codes of the update that is being made."""
        return self._metrics.are_codes_due

    def resume(self, columns: Sequence[str], /, **parts: Stateful) -> None:
        """Register the parts of a checkpoint, once, and restore them from the newest checkpoint if there is any. Then
        print a summary of the run, and from then on the metrics `columns` (`MetricsTable`).

        Raises:
            UserMistake: all checkpoints are damaged, or the newest does not fit the arguments.
        """
        own_parts: dict[str, Stateful] = {
            MODELS: self._model_descriptions,
            "progress": self.progress,
            "bad_samples": self.feed.bad_samples,
        }
        self._parts = {**own_parts, **parts}
        messages: list[str | None] = []
        latest, meta = self._restore(messages.append)
        if self.is_root and not latest and last_start(self.folder.path):
            messages.append("an earlier start of this run left no checkpoint, so the run begins at its first update")
        self._resumed_step = self.progress.step
        changed_flags = self._record_start()
        seconds_left = (lambda: self.clock.max_run_seconds - self.clock.seconds) if self.config.max_minutes else None
        self.display = ProgressDisplay(self.progress, self.is_root, columns=columns, max_seconds_left=seconds_left)
        if self.progress.unlogged_line and not self.tracker.has_line(self.progress.step):
            # A checkpoint of an earlier version, which wrote an update's line after the validation.
            self._log({**self.progress.unlogged_line, "bad_samples": self.feed.bad_samples.count})
        messages.append(self.config.invocation.config_note)
        messages.append(self.backend.summary())
        messages.append(batch_arithmetic(self.config, self.processes.world_size))
        messages.append(", ".join(filter(None, map(describe_part, parts.values()))))
        if self.folder.moved_to:
            messages.append(f"starting over; the run that was there is now {self.folder.moved_to}")
        if latest:
            messages.append(f"resumed from {latest}")
            messages += describe_changes(meta, self.backend.describe())
            for name, (old, new) in changed_flags.items():
                messages.append(f"--{name} was {format_setting(old)} and is now {format_setting(new)}")
        if self.is_complete:
            flag = "--max_minutes" if self.progress.last_step < self.progress.total_steps else self._length_flag
            messages.append(
                f"this run is finished, its model is in {self.folder.model_dir}; give a larger {flag} to extend it"
            )
        for line in messages:
            self.say(line)
        self.clock.begin(self.progress.seconds, self.progress.samples)

    def _restore(self, warn: Callable[[str], object]) -> tuple[Path | None, Mapping[str, Any]]:
        """Restore the parts, and the evaluation after their update, from the newest checkpoint. `warn` takes texts
        about damaged checkpoints. Return the checkpoint's path and meta (`read_checkpoint`). Collective."""
        processes, invocation = self.processes, self.config.invocation
        with processes.raise_on_all_ranks():  # before the parts are compared, which depend on some of the flags
            if processes.is_root and self.checkpoints.latest():
                self.folder.check_config(invocation.settings, invocation.fixed_on_resume, invocation.explicit)
        latest, states, meta = self.checkpoints.load_newest(self.folder, self._parts, warn)
        if latest:
            self.checkpoints.restore(latest, states, self._parts)
            with processes.raise_on_all_ranks():
                if self.progress.step != step_of(latest):
                    raise damage_error(latest, f"it holds the state of update {self.progress.step}")
        if self.progress.step and self.progress.seconds >= self.clock.max_run_seconds:
            # The time of --max_minutes is over. If the checkpoint was made at the end of the run, the run ends here.
            # After any other checkpoint it makes one more update, with a line of metrics and a checkpoint.
            is_end = self.progress.was_finished or self.folder.finished_step == self.progress.step
            self._end_at(self.progress.step + (0 if is_end else 1))
        with processes.raise_on_all_ranks():
            self.previous_evaluation = self._read_evaluation()
        self.previous_evaluation = processes.broadcast_object(self.previous_evaluation)
        return latest, meta

    def _record_start(self) -> dict[str, list[Any]]:
        """On the root, write this start and its flags into the folder, and remove what a killed start made after the
        checkpoint. Return the changed flags, [old, new] by name. Collective."""
        invocation, changed_flags = self.config.invocation, dict[str, list[Any]]()
        with self.processes.raise_on_all_ranks():
            if self.is_root and not self.is_complete:  # a finished run keeps the record of how it was trained
                start = {"script": invocation.script, "step": self.progress.step, **self.backend.describe()}
                start["data_fingerprint"] = self.feed.first_samples.fingerprint
                changed_flags = self.folder.begin(invocation.settings, start)
                self.checkpoints.undeleted += self._averages.cut_back(self.progress.step)
            self.tracker.cut_back(self.progress.step, keep_evaluation=bool(self.previous_evaluation))
        return changed_flags

    def _read_evaluation(self) -> dict[str, Any]:
        """On the root, the logged evaluation after the checkpoint's update, if an earlier start has made it; else {}.
        Also {} if the evaluation met bad samples, which the checkpoint does not record because it was saved before: the
        evaluation is then repeated, unless the final model has been written since."""
        line = self.tracker.evaluation(self.progress.step)
        is_finished = self.folder.finished_step == self.progress.step  # the model is written after the evaluation
        has_same_bad_samples = line.get("bad_samples") == self.feed.bad_samples.count
        return line if is_finished or has_same_bad_samples else {}

    @property
    def is_complete(self) -> bool:
        """Whether the run is trained to its end and its model written."""
        return self.progress.finished and self.folder.finished_step == self.progress.step

    def say(self, text: str | None) -> None:
        """Print one line on the root's terminal, unless it is None or empty."""
        if text:
            self.display.say(text)

    def line(self) -> dict[str, Any]:
        """The values that `add` and `log` recorded for the newest update, the number of skipped updates and the waits;
        empty if no line is due. Collective."""
        if not self.progress.due(self.config.log_every_n_steps):
            return {}
        return self._metrics.line(sum(getattr(part, "skipped_updates", 0) for part in self._parts.values()))

    def first_row_text(self) -> str | None:
        """A line that names the update after which the first row of metrics is printed; None if no update is left."""
        if self.progress.finished:
            return None
        every = self.config.log_every_n_steps
        step = min((self.progress.step // every + 1) * every, self.progress.last_step)
        compiles = ", and the first update compiles the model" if self.config.compile else ""
        return f"training; the first row of metrics comes after update {step} (--log_every_n_steps {every}){compiles}"

    def advance(self) -> None:
        """Count a completed update. The first one has made the optimizers' moments: allocate pinned memory for the
        copies of checkpoints. Collective."""
        if self.progress.step == self._resumed_step and has_pinned_memory(self.processes.device):
            self.checkpoints.prepare(self._live_states())
        self.progress.advance()
        self.display.update()
        for name, picture in self._metrics.pictures():
            self.log_image(name, picture)

    def stop_requested(self, now: bool) -> bool:
        """Whether all processes stop after this update: a signal reached one of them, or `--save_before_minutes` are
        nearly over by the root's clock. With several processes a request is reported one call late, on GPUs up to two,
        unless the answer is needed `now`. Collective."""
        self._is_late = self.clock.is_late(self.checkpoints.longest_seconds) and self.is_root
        return self.processes.stop_requested(self._is_late, now)

    def check_stop_request(self) -> None:
        """Raise AskedToStop if the run is asked to stop. All processes call it between the same steps of an evaluation.
        Collective."""
        self.notify("evaluation")
        if self.stop_requested(now=True):
            raise AskedToStop

    def write_line(self, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of the newest update to metrics.jsonl, the other trackers and the display."""
        times = self.clock.times(self.progress.samples)
        speed: dict[str, float] = {}
        if "gflop_per_sample" in metrics:
            flops = 1e9 * metrics["gflop_per_sample"] * times["samples_per_second"]
            speed["tflops_per_second"] = float(f"{flops / 1e12:.5g}")
            speed |= {"mfu": float(f"{flops / self.peak:.5g}")} if self.peak else {}
        self._log({**metrics, "bad_samples": self.feed.bad_samples.count, **speed, **times})

    def write_evaluation(self, values: Mapping[str, Any], seconds: float) -> None:
        """Write the values of validations and pictures after the newest update, which took `seconds`, as a line of its
        own."""
        faults = {"bad_samples": self.feed.bad_samples.count}
        self._log({**values, **faults, EVALUATION_SECONDS: round(seconds, 3), **self.clock.timestamp()})

    def _log(self, metrics: Mapping[str, Any]) -> None:
        progress = self.progress
        line = {"step": progress.step, "samples": progress.samples, "epoch": round(progress.epoch, 6), **metrics}
        self.tracker.log(progress.step, line)
        self.display.log(line)
        self._report_saves(at_end=progress.finished)

    def log_image(self, name: str, image: Image.Image) -> None:
        """Log a picture to the trackers."""
        self.tracker.log_image(self.progress.step, name, image)

    def log_sample(self, name: str, sample: Image.Image | Sample) -> None:
        """Write a picture and its further files to samples/, and log the picture by name to the trackers. On the
        root."""
        sample = sample if isinstance(sample, Sample) else Sample(sample)
        try:
            for ending, content in {"png": to_png(sample.picture), **sample.files}.items():
                self.folder.write_sample(self.progress.step, content, ending)
        except OSError as error:
            self.say(f"cannot write the picture of update {self.progress.step}: {error_text(error)}")
        self.log_image(name, sample.picture)

    def check_clock(self) -> None:
        """Find out by the root's clock whether a save is due and whether the run ends with the next update. Collective
        after some updates, the same on all processes."""
        self.is_save_due = False
        step = self.progress.step
        if step >= self._next_clock_step:
            clock_state = self.clock.check_limits(step - self._resumed_step)
            self.is_save_due, is_over, updates = self.processes.broadcast_object(clock_state)
            self._next_clock_step = step + updates
            minutes = self.config.max_minutes
            if minutes is not None and is_over and self._end_at(step + 1):
                self.say(f"the {counted(minutes, 'minute')} of --max_minutes are over: the next update is the last")

    def _end_at(self, step: int) -> bool:
        """Let the run end after at most `step` updates. Return whether this shortens it."""
        is_earlier = step < self.progress.last_step
        self.progress.last_step = min(step, self.progress.last_step)
        return is_earlier

    def save(self) -> None:
        """Start to write a checkpoint of all parts, unless this update was saved before. A save that is due by
        --save_every_n_steps, and the last one, also write the files of averages. Collective."""
        step = self.progress.step
        if self.checkpoints.requested_step == step and not self.checkpoints.save_failure():
            return
        with self.clock.saving():
            self.checkpoints.join()
            self._report_saves(at_end=self.progress.finished)
            self.progress.seconds = round(self.clock.seconds, 3)
            # Saves by --save_every_minutes and of a run that stops write no averages, so that these files do not depend
            # on the speed of the run and on its stops.
            write_averages = self._averages.write if self.progress.due(self.config.save_every_n_steps) else None
            self.checkpoints.save(step, self._live_states(), self.backend.describe(), write_averages)

    def _live_states(self) -> dict[str, Any]:
        """The states of all parts; see `Stateful`. Collective."""
        return {name: getattr(part, "live_state", part.state_dict)() for name, part in self._parts.items()}

    def _report_saves(self, *, at_end: bool = False) -> None:
        for line in self.checkpoints.messages(at_end=at_end):
            self.say(line)

    def end_validation(self, start: float) -> None:
        """Record the end of a validation that began at `start` (`time.monotonic`). Print once that one took more than a
        tenth of the time since the one before; the last one does not count, because it may have more samples."""
        share = self.clock.end_validation(start)
        if not self.progress.finished and share > _MAX_VALIDATION_SHARE and not self._has_reported_validations:
            self._has_reported_validations = True
            self.say(
                f"validations take {share:.0%} of the time (--valid_samples {len(self.feed.valid_part)}, "
                f"--validate_every_n_steps {self.config.validate_every_n_steps}): lower the first or raise the second"
            )

    def save_and_stop(self) -> NoReturn:
        """Save a checkpoint of this update, because the run was asked to stop. A dry run saves nothing.

        Raises:
            AskedToStop: it is saved.
            Failed: it cannot be written.
            UserMistake: on all processes, if the deadline ended an evaluation in a start that did nothing else: every
                further start would end there, too.
        """
        step = self.progress.step
        if self.config.dry_run:
            raise AskedToStop
        with self.processes.raise_on_all_ranks():
            if self._is_late and step == self._resumed_step:
                raise ValueError(
                    f"the evaluation of update {step} alone takes longer than --save_before_minutes "
                    f"{self.config.save_before_minutes:g} allows: raise that, or lower --valid_samples"
                )
        self.save()
        if not self.checkpoints.save_failure():
            command_hint = "without --fresh" if self.config.fresh else "again"
            limit = f"--save_before_minutes {self.config.save_before_minutes:g}" if self._is_late else ""
            self.say(f"{limit or 'asked to stop'}: saved update {step}; run the same command {command_hint} to go on")
            self._record_end(f"asked to stop{limit and ' by '}{limit}")
        self.close()
        raise AskedToStop

    def finish(self, evaluation: Evaluation) -> None:
        """Write the final models, on the root, and `close`. Raises Failed if one cannot be written; the next start
        tries again."""
        with final_weights(evaluation.engine, evaluation.average) as model:
            for name, write in evaluation.write.items():
                self._write_model(partial(write, model), self.folder.path / name)
                self._models.append(str(self.folder.path / name))
        if evaluation.discriminator:
            training = discriminator_training(self.config, self.progress.step)
            with evaluation.discriminator.full_weights() as discriminator:
                write = partial(discriminator.save_pretrained, training=training)
                self._write_model(write, Path(self._models[0], DISCRIMINATOR))
        self.close(evaluation.next_command)

    def _write_model(self, write: Callable[[Path], None], path: Path) -> None:
        """Call `write(path)` on the root. Raises Failed if that is not possible. Collective."""
        if self.is_root:
            try:
                self.folder.check_is_here()
                self.write_after_heartbeat(path.name, write, path)
            except OSError as error:
                self._write_failure = " ".join(str(error).split())
        if self.processes.broadcast_object(self._write_failure):
            self.close()  # raises Failed

    def write_after_heartbeat(self, label: str, write: Callable[[Path], None], path: Path) -> None:
        """Send a heartbeat, then call `write(path)`, which may take long and sends none itself. On the root."""
        self.processes.heartbeat(f"writing {label}", is_uninterrupted=True)
        write(path)

    def close(self, next_command: Sequence[str] = ()) -> None:
        """Wait until everything is on the disk, and print the run's outputs and how to use its model (see
        `Evaluation.next_command`). Raises Failed if the last writes failed."""
        self.checkpoints.wait()
        self._report_saves(at_end=True)
        self.profiler.close()
        self.tracker.write_lines()
        failures = [self._write_failure, self.checkpoints.failure, self.tracker.failure]
        failure: str | None = self.processes.broadcast_object("; ".join(filter(None, failures)) or None)
        if failure:
            newest = self.checkpoints.latest()
            newest_name = newest.name if newest else "none"
            remedy = "free space on that disk" if os.strerror(errno.ENOSPC) in failure else "remove the cause"
            self.say(f"{failure}; {remedy}, and run the same command again (newest checkpoint: {newest_name})")
        elif self._models:
            with self.processes.raise_on_all_ranks():
                if self.is_root:
                    self.folder.mark_finished(self.progress.step)
            self._record_end("finished")
            self.say(f"finished: {counted(self.progress.step, 'update')} in {format_duration(self.clock.seconds)}")
            picture = max(self.folder.samples_dir.glob("step_*.png"), default=None)
            for line in closing_lines(self.folder.path, self._models, picture, next_command):
                self.display.say(line, whole=True)
        self.display.close()
        # "final" is the last: wandb returns the newest artifact to somebody who asks for the name without an alias.
        models = {"best": self.folder.path / "best", "final": Path(self._models[0])} if self._models else {}
        # After all else, because an upload may take longer than other processes or a scheduler wait.
        self.backend.after_leaving(lambda: self.tracker.close(models))
        if failure:
            raise Failed

    def _record_end(self, ending: str) -> None:
        """Write `ending` into starts.jsonl, on the root; errors are ignored."""
        if self.is_root:
            with suppress(OSError):
                self.folder.check_is_here()
                end_start(self.folder.path, ending, self.progress.step)
