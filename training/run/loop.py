"""The order of everything that happens around an update, once for all scripts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from ..ema import Average
from . import ASKED_TO_STOP
from .rehearsal import rehearse

if TYPE_CHECKING:
    from ..contracts import Feed
    from ..pictures.images import Sample
    from .best import BestModel
    from .run import Run


class EvaluationStopped(Exception):
    """All processes are asked to stop within an evaluation, which the next start makes."""


@dataclass(frozen=True)
class Evaluation:
    """How one model of a run is validated, drawn and written. A run has one Evaluation for each such model.

    `validate` and `draw` run without gradients.

    Args:
        validate: (model, step) -> values by name, numbers for the log and pictures for the trackers. Called on every
            process, for the trained weights ("valid/psnr") and for their averages ("valid/ema/psnr"). `step` is the
            number of the newest update, from 0, as the loop yields it.
        draw: ({"online": model, "ema": average}, samples of `Feed.preview`, step) -> the picture for samples/, alone or
            with further files (`Sample`). The averages have the names that `average.averages` gives them; there may be
            none. Called on the root alone, where it must not contain collectives; see `drawn_together`.
        write: Path in the run folder -> function of (model, path) that writes the model there at the end of the run.
            The first one also writes best/. The model is the average if there is one.
        best: Keeps the model of the best validation, if the script wants it.
        name: Distinguishes the metrics and pictures of several models; "" for one.
        picture_name: What the trackers call the picture.
        use: A command that uses the model in the first path of `write`, for the last line of the run: the script and
            its flags besides --model; empty: none.
        also_every_n_steps: Call `validate` after these updates too (0: only at the end), besides those of
            --validate_every_n_steps; it may then do more.
        watch: (completed updates, line of metrics) -> warnings to print, each in one line. Called on every process for
            every line, which holds the same reduced values everywhere, those of `validate` among them.
        drawn_together: Call `draw` on every process, so that it may share its work between them and contain
            collectives. Only the root's picture is written.
    """

    engine: Any
    average: Average
    validate: Callable[[Any, int], Mapping[str, Any]]
    draw: Callable[[Mapping[str, Any], Any, int], Image.Image | Sample]
    write: Mapping[str, Callable[[Any, Path], Any]] = field(default_factory=dict)
    best: BestModel | None = None
    name: str = ""
    picture_name: str = "reconstructions"
    use: Sequence[str] = ()
    also_every_n_steps: int = 0
    watch: Callable[[int, Mapping[str, Any]], Sequence[str]] = lambda step, line: ()
    drawn_together: bool = False

    def __post_init__(self) -> None:
        assert self.write or not self.best, "best/ is written by the first function of `write`"


def kept_model(models: Mapping[str, Any]) -> Any:
    """Choose from the models that `Evaluation.draw` gets the one that the run keeps: the first average if there is
    any."""
    return next((model for name, model in models.items() if name != "online"), models["online"])


def updates(run: Run, feed: Feed, evaluations: Sequence[Evaluation], preview: int) -> Iterator[tuple[int, Any]]:
    """Yields the number of each update, from 0, and its batch; the caller makes the update. In between, always in this
    order: count the update, save and exit if the run is asked to stop, save, validate, draw, report bad samples, write
    the line of metrics; without a validation or a picture, the line comes before the save. A stop is asked for within
    an evaluation too: the save before it knows that it is to be made. After the last update the models are written.
    Yields nothing if the run is complete.

    Raises:
        SystemExit: with code 75 after a stop request; with code 1 if the last checkpoint or model cannot be written.
    """
    run.tell("start", evaluations)
    for evaluation in evaluations:
        if evaluation.best:
            evaluation.best.catch_up(run.progress.step, run.evaluated_before.get(evaluation.best.metric))
            run.warn(evaluation.best.failure)
    if run.is_complete:
        run.close()
        return
    run.say(f"{feed.summary()}; {run.progress.total_steps} updates")
    if skipped := feed.skipped():
        run.say(skipped)
    batch = feed.start(run.progress.samples)
    shown = feed.preview(preview)

    def ask(now: bool) -> None:
        run.tell("evaluation")
        if run.stop_requested(now):
            raise EvaluationStopped

    feed.ask = ask
    if run.args.dry_run:
        try:
            yield from rehearse(
                run,
                feed,
                evaluations,
                batch,
                partial(_validate, run, feed),
                partial(_draw, run, feed, evaluations, shown),
            )
        except EvaluationStopped:
            sys.exit(ASKED_TO_STOP)
        return
    if run.progress.unfinished_line is not None:  # the run ended between this update and its evaluation
        with run.paused():
            _evaluate_or_exit(run, feed, evaluations, shown)
    while not run.progress.finished:
        run.tell("update", batch)
        with run.an_update():
            yield run.progress.step, batch
        run.advance()
        run.tell("updated", batch)
        is_evaluation_due = _validation_is_due(run, feed, evaluations) or run.due(run.args.sample_every_n_steps)
        stop = run.stop_requested(now=is_evaluation_due)  # a stop request should not wait for an evaluation
        line = run.line()
        with run.paused():
            if is_evaluation_due or stop:
                feed.report_bad_samples(run.say)
            if is_evaluation_due:
                run.leave_evaluation(line)
            else:
                _write_line(run, feed, evaluations, line)
            # Before the evaluation, which may take longer than a scheduler waits: the next start makes it then.
            if stop:
                run.save_and_exit()
            if run.due(run.args.save_every_n_steps):
                run.save()
            if is_evaluation_due:
                _evaluate_or_exit(run, feed, evaluations, shown)
        if not run.progress.finished:
            batch = feed.next()
    for evaluation in evaluations:
        with evaluation.average.kept(evaluation.engine.gathered)() as kept:
            for path, write in evaluation.write.items():
                run.finish(partial(write, kept), run.folder.path / path)
    run.close(evaluations[0].use)


def _validation_is_due(run: Run, feed: Feed, evaluations: Sequence[Evaluation]) -> bool:
    every = [run.args.validate_every_n_steps, *(evaluation.also_every_n_steps for evaluation in evaluations)]
    return len(feed.valid_set) > 0 and any(map(run.due, every))


def _evaluate_or_exit(run: Run, feed: Feed, evaluations: Sequence[Evaluation], shown: Any) -> None:
    try:
        _evaluate(run, feed, evaluations, shown)
    except EvaluationStopped:
        run.check_deadline()
        run.save_and_exit()


def _evaluate(run: Run, feed: Feed, evaluations: Sequence[Evaluation], shown: Any) -> None:
    """Validation and pictures, each if it is due after the newest update, and then the line of metrics: where there is
    the line, nothing is left to do."""
    line = dict(run.progress.unfinished_line or {})
    if _validation_is_due(run, feed, evaluations):
        with run.stopwatch.validating():
            for evaluation in evaluations:
                line |= _validate(run, feed, evaluation)
        if not run.progress.finished and (share := run.stopwatch.costly_validation()):
            run.say(
                f"warning: validation takes {share:.0%} of the time; lower --valid_samples (it sees "
                f"{len(feed.validated)} of {len(feed.valid_set)}) or raise --validate_every_n_steps"
            )
    if run.due(run.args.sample_every_n_steps):
        _draw(run, feed, evaluations, shown)
    _write_line(run, feed, evaluations, line)
    run.progress.unfinished_line = None


def _write_line(run: Run, feed: Feed, evaluations: Sequence[Evaluation], line: Mapping[str, Any]) -> None:
    if line or run.due(run.args.save_every_n_steps):
        feed.report_bad_samples(run.say)
    if line:
        run.write_line({**line, **feed.bad_samples.counts})
        for evaluation in evaluations:
            for warning in evaluation.watch(run.progress.step, line):
                run.warn(warning)


def _draw(run: Run, feed: Feed, evaluations: Sequence[Evaluation], shown: Any) -> None:
    for evaluation in evaluations:
        feed.ask(True)
        with ExitStack() as stack, torch.no_grad():
            gathered = {"online": evaluation.engine.gathered, **evaluation.average.averages()}
            models = {name: stack.enter_context(whole()) for name, whole in gathered.items()}
            if run.is_root or evaluation.drawn_together:
                picture = evaluation.draw(models, shown, run.progress.step - 1)
                if run.is_root:
                    run.log_sample(evaluation.picture_name, picture, evaluation.name)


def _validate(run: Run, feed: Feed, evaluation: Evaluation) -> dict[str, float]:
    """Validate the trained weights and their averages, and keep the best model. Returns all values by name: "valid/..."
    of the same samples each time, so that they can be compared, and at the end of the run "valid_whole/..." of the
    whole validation split, if that has more."""
    values = _values(run, evaluation, "valid")
    if best := evaluation.best:
        (write, *_) = evaluation.write.values()
        with evaluation.average.kept(evaluation.engine.gathered)() as kept:
            step, whole = run.progress.step, partial(run.writing, "the best model", partial(write, kept))
            best.save_if_better(values[best.metric], step, whole, run.folder.check_is_here)
        run.warn(best.failure)
    if run.progress.finished and len(feed.validated) < len(feed.valid_set):
        with feed.whole_validation():
            values |= _values(run, evaluation, "valid_whole")
    return values


def _values(run: Run, evaluation: Evaluation, prefix: str) -> dict[str, float]:
    """Validate the trained weights and their averages. Returns the numbers by name, and logs the pictures."""
    values: dict[str, float] = {}
    valid = "/".join(filter(None, [prefix, evaluation.name]))
    averages = {f"{valid}/{name}": gathered for name, gathered in evaluation.average.averages().items()}
    for prefix, gathered in {valid: evaluation.engine.gathered, **averages}.items():
        with gathered() as model, torch.no_grad():  # one after the other: sharded weights are whole only here
            for name, value in evaluation.validate(model, run.progress.step - 1).items():
                if isinstance(value, Image.Image):
                    run.log_image(f"{prefix}/{name}", value)
                else:
                    values[f"{prefix}/{name}"] = value
    return values
