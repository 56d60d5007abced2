"""The training loop of all scripts: what happens around an update, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from tandem.io.exits import AskedToStop

from .dry_run import run_dry
from .ema import final_weights
from .evaluation import Action, Evaluation
from .garbage import synchronized_collection

if TYPE_CHECKING:
    from .run import Run


def updates(
    run: Run,
    *evaluations: Evaluation,
    preview: int,
    extra_actions: Sequence[Action] = (),
    kind: Callable[[int, Any], Hashable] = lambda step, batch: None,
) -> Iterator[tuple[int, Any]]:
    """Yields the number of each update, from 0, and its batch; the caller makes the update. In between, always in this
    order: count the update, exit if the run is asked to stop, and do the `actions` that are due. The line of metrics is
    written before them, or after those that measure. If the run is asked to stop before or during a validation or a
    picture, it stops at once, and its next start makes up for that. The actions of `extra_actions` need the validation
    split, and are left out without one. After the last update the models are written. Yields nothing if the run is
    complete.

    `kind` is (number of an update, its batch) -> a key that, with the shapes of the batch, determines how many
    operations the update has.

    Raises:
        AskedToStop: after a stop request, for which the run is saved.
        Failed: the last checkpoint or model cannot be written.
    """
    with synchronized_collection() as collect:
        is_first = True
        for step, batch in _updates(run, evaluations, preview, extra_actions, kind):
            yield step, batch
            if is_first:
                run.prepare_saves()
            is_first = False
            collect(step + 1)


def _updates(
    run: Run,
    evaluations: Sequence[Evaluation],
    preview: int,
    extra_actions: Sequence[Action],
    kind: Callable[[int, Any], Hashable],
) -> Iterator[tuple[int, Any]]:
    """`updates` without `synchronized_collection`."""
    run.notify("start", evaluations)
    for evaluation in evaluations:
        if evaluation.best:
            evaluation.best.catch_up(run.progress.step, run.previous_evaluation)
            run.warn(evaluation.best.failure)
    if run.is_complete:
        run.close()
        return
    feed = run.feed
    run.say(f"{feed.summary()}; {run.length}")
    run.warn(feed.skipped)
    batch = feed.start(run.progress.samples)
    samples = feed.preview(preview)

    def check_stop_request() -> None:
        run.notify("evaluation")
        if run.stop_requested(now=True):
            raise AskedToStop

    def update_kind(step: int, batch: Any) -> Hashable:
        shapes = ((name, tensor.shape) for name, tensor in batch.items() if isinstance(tensor, torch.Tensor))
        return kind(step, batch), *shapes

    feed.check_stop_request = check_stop_request
    all_actions = actions(run, evaluations, samples, extra_actions)
    try:
        if run.args.dry_run:
            yield from run_dry(run, all_actions, batch, update_kind)
            return
        if run.progress.unfinished_line is not None:  # the run ended between this update and its evaluation
            with run.clock.paused():
                _run_actions(run, evaluations, [action for action in _due(run, all_actions) if action.measures])
        while not run.progress.finished:
            run.notify("update", batch)
            step = run.progress.step
            with run.profiler.update(step + 1), run.operations.update(update_kind(step, batch)):
                yield step, batch
            run.advance()
            run.notify("updated", batch)
            run.check_clock()
            due_actions = _due(run, all_actions)
            is_measuring = any(action.measures for action in due_actions)
            stop = run.stop_requested(now=is_measuring)
            line = run.line()
            with run.clock.paused():
                if due_actions or stop or line:
                    feed.report_bad_samples(run.say)
                if is_measuring:
                    run.postpone_evaluation(line)
                else:
                    _write_line(run, evaluations, line)
                if stop:
                    raise AskedToStop
                _run_actions(run, evaluations, due_actions)
            if not run.progress.finished:
                batch = feed.next()
    except AskedToStop:
        run.save_and_stop()
    run.finish(evaluations)


def actions(run: Run, evaluations: Sequence[Evaluation], samples: Any, extra_actions: Sequence[Action]) -> list[Action]:
    """The actions of a run, in this order. The save comes first, because a validation may take longer than a scheduler
    waits."""
    args = run.args
    validation = Action(
        "validation", args.validate_every_n_steps, partial(_validate_all, run, evaluations), measures=True
    )
    return [
        Action("checkpoint", args.save_every_n_steps, run.save, is_requested=lambda: run.is_save_due),
        *([validation, *extra_actions] if len(run.feed.valid_set) else []),
        Action("pictures", args.sample_every_n_steps, partial(_draw, run, evaluations, samples), measures=True),
    ]


def _due(run: Run, all_actions: Sequence[Action]) -> list[Action]:
    return [action for action in all_actions if run.due(action.every) or action.is_requested()]


def _run_actions(run: Run, evaluations: Sequence[Evaluation], due_actions: Sequence[Action]) -> None:
    """Do what is due after the newest update, then write the line that waits for it: a written line means that all is
    done."""
    line = dict(run.progress.unfinished_line or {})
    for action in due_actions:
        line |= action.do() or {}
    if run.progress.unfinished_line is not None:
        run.feed.report_bad_samples(run.say)
        _write_line(run, evaluations, line)
        run.progress.unfinished_line = None


def _write_line(run: Run, evaluations: Sequence[Evaluation], line: Mapping[str, Any]) -> None:
    if line:
        run.write_line({**line, "bad_samples": run.feed.bad_samples.count})
        for evaluation in evaluations:
            for warning in evaluation.watch(run.progress.step, line):
                run.warn(warning)


def _draw(run: Run, evaluations: Sequence[Evaluation], samples: Any) -> None:
    for evaluation in evaluations:
        run.feed.check_stop_request()
        with ExitStack() as stack, torch.no_grad():
            contexts = {"online": evaluation.engine.full_weights, **evaluation.average.averages()}
            models = {name: stack.enter_context(gather()) for name, gather in contexts.items()}
            if run.is_root or evaluation.is_collective_draw:
                sample = evaluation.draw(models, samples, run.progress.step - 1)
                if run.is_root:
                    run.log_sample(evaluation.picture_name, sample, evaluation.name)


def _validate_all(run: Run, evaluations: Sequence[Evaluation]) -> dict[str, float]:
    with run.clock.validating() as share:
        values = {name: value for evaluation in evaluations for name, value in _validate(run, evaluation).items()}
    if not run.progress.finished:  # at the end, advice comes too late, and a validation may have more samples
        run.report_validation_share(share())
    return values


def _validate(run: Run, evaluation: Evaluation) -> dict[str, float]:
    """Validate the trained weights and their averages, and keep the best model. Returns all values by name: "valid/..."
    of the same samples each time, so that they can be compared, and at the end of the run "valid_whole/..." of the
    whole validation split, if that has more."""
    values = _validate_versions(run, evaluation, "valid")
    if best := evaluation.best:
        (write, *_) = evaluation.write.values()
        with final_weights(evaluation.engine, evaluation.average) as model:
            step, write_model = run.progress.step, partial(run.writing, "the best model", partial(write, model))
            best.save_if_better(values, step, write_model, run.folder.check_is_here)
        run.warn(best.failure)
    if run.progress.finished and len(run.feed.validated) < len(run.feed.valid_set):
        run.feed.sees_whole_split = True
        values |= _validate_versions(run, evaluation, "valid_whole")
        run.feed.sees_whole_split = False
    return values


def _validate_versions(run: Run, evaluation: Evaluation, prefix: str) -> dict[str, float]:
    """Validate the trained weights and their averages. Returns the numbers by name, and logs the pictures."""
    values: dict[str, float] = {}
    base = "/".join(filter(None, [prefix, evaluation.name]))
    averages = {f"{base}/{name}": gather for name, gather in evaluation.average.averages().items()}
    for prefix, gather in {base: evaluation.engine.full_weights, **averages}.items():
        with gather() as model, torch.no_grad():  # one after the other: sharded weights are whole only here
            for name, value in evaluation.validate(model, run.progress.step - 1).items():
                if isinstance(value, Image.Image):
                    run.log_image(f"{prefix}/{name}", value)
                else:
                    values[f"{prefix}/{name}"] = value
    return values
