"""The training loop of all scripts: what happens around an update, and in which order."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec

import torch
from PIL import Image

from tandem.io.exits import AskedToStop

from .dry_run import run_dry
from .ema import final_weights
from .evaluation import Action, Evaluation

if TYPE_CHECKING:
    from .run import Run

P = ParamSpec("P")
_COLLECTION_INTERVAL = 100  # updates; docs/devices.md says what a collection finds


def collect_synchronously(updates: Callable[P, Iterator[tuple[int, Any]]]) -> Callable[P, Iterator[tuple[int, Any]]]:
    """Decorator of `updates` that makes Python collect garbage after the same updates on all processes. Otherwise each
    process would collect after another update, while all others wait for it. A full collection takes 0.26 s, most of it
    for imported objects: these are frozen after the first update."""

    @wraps(updates)
    def collecting(*args: P.args, **kwargs: P.kwargs) -> Iterator[tuple[int, Any]]:
        was_enabled, is_first = gc.isenabled(), True
        try:
            for step, batch in updates(*args, **kwargs):
                yield step, batch
                if is_first or (step + 1) % _COLLECTION_INTERVAL == 0:
                    gc.collect()
                if is_first:
                    gc.freeze()
                    gc.disable()
                is_first = False
        finally:
            gc.unfreeze()
            if was_enabled:
                gc.enable()

    return collecting


@collect_synchronously
def updates(
    run: Run,
    evaluation: Evaluation,
    *,
    preview: int,
    extra_actions: Sequence[Action] = (),
    update_kind: Callable[[int, Any], Hashable] = lambda step, batch: None,
) -> Iterator[tuple[int, Any]]:
    """Yields the number of each update, from 0, and its batch; the caller makes the update. After each, in this order:
    count the update, write its line of metrics, exit if the run is asked to stop, and do the `actions` that are due.
    The values of all actions that measure are then written as a line of metrics of their own. If the run is asked to
    stop before or during such an action, it stops at once, and its next start repeats all of them. After the last
    update the models are written. Yields nothing if the run is complete.

    Args:
        preview: Number of samples in a picture.
        extra_actions: Further actions that measure on the validation split; left out if there is no such split.
        update_kind: (number of an update, its batch) -> a key that, with the shapes of the batch, determines how many
            operations the update has.

    Raises:
        AskedToStop: after a stop request, for which the run is saved.
        Failed: the last checkpoint or model cannot be written.
    """
    run.notify("start", evaluation)
    if evaluation.best:
        evaluation.best.catch_up(run.progress.step, run.previous_evaluation)
        run.say(evaluation.best.failure)
    if run.is_complete:
        run.close()
        return
    feed = run.feed
    run.say(f"{feed.summary()}; {run.length}")
    run.say(feed.skipped)
    batch = feed.start(run.progress.samples)
    samples = feed.preview(preview)

    def operations_key(step: int, batch: Any) -> Hashable:
        shapes = ((name, tensor.shape) for name, tensor in batch.items() if isinstance(tensor, torch.Tensor))
        return update_kind(step, batch), *shapes

    all_actions = actions(run, evaluation, samples, extra_actions)
    try:
        if run.config.dry_run:
            yield from run_dry(run, all_actions, batch, operations_key)
            return
        run.say(run.first_row_text())
        if run.progress.step and not run.previous_evaluation:  # an earlier start may have ended before its evaluation
            with run.clock.paused():
                _evaluate(run, evaluation, [action for action in _due(run, all_actions) if action.measures])
        while not run.progress.finished:
            run.notify("update", batch)
            step = run.progress.step
            with run.profiler.update(step + 1), run.operations.update(operations_key(step, batch)):
                yield step, batch
            run.advance()
            run.notify("updated", batch)
            _finish_update(run, evaluation, all_actions)
            if not run.progress.finished:
                batch = feed.next()
    except AskedToStop:
        run.save_and_stop()
    run.finish(evaluation)


def actions(run: Run, evaluation: Evaluation, samples: Any, extra_actions: Sequence[Action]) -> list[Action]:
    """The actions of a run, in their order. The save comes first, because a validation may take longer than a scheduler
    waits."""
    config = run.config
    validation = Action("validation", config.validate_every_n_steps, partial(_validate, run, evaluation), measures=True)
    return [
        Action("checkpoint", config.save_every_n_steps, run.save, is_requested=lambda: run.is_save_due),
        *([validation, *extra_actions] if len(run.feed.valid_set) else []),
        Action("pictures", config.sample_every_n_steps, partial(_draw, run, evaluation, samples), measures=True),
    ]


def _finish_update(run: Run, evaluation: Evaluation, all_actions: Sequence[Action]) -> None:
    """Write the line of metrics of the newest update, and do the actions that are due.

    Raises:
        AskedToStop: if the run is asked to stop, instead of the actions or before one that measures.
    """
    run.check_clock()
    due_actions = _due(run, all_actions)
    measuring = [action for action in due_actions if action.measures]
    must_stop = run.stop_requested(now=bool(measuring))
    line = run.line()
    with run.clock.paused():
        if due_actions or must_stop or line:
            run.feed.report_bad_samples(run.say)
        if line:
            run.write_line(line)
            _warn(run, evaluation, line)
        if must_stop:
            raise AskedToStop
        for action in due_actions:
            if not action.measures:
                action.do()
        _evaluate(run, evaluation, measuring)


def _due(run: Run, all_actions: Sequence[Action]) -> list[Action]:
    return [action for action in all_actions if run.progress.due(action.every) or action.is_requested()]


def _evaluate(run: Run, evaluation: Evaluation, measuring: Sequence[Action]) -> None:
    """Do the `measuring` actions after the newest update, then write one line of their values. The next start takes the
    line as the sign that none of them is missing."""
    if not measuring:
        return
    start, values = time.monotonic(), dict[str, Any]()
    for action in measuring:
        values |= action.do() or {}
    run.feed.report_bad_samples(run.say)
    run.write_evaluation(values, time.monotonic() - start)
    _warn(run, evaluation, values)


def _warn(run: Run, evaluation: Evaluation, metrics: Mapping[str, Any]) -> None:
    for warning in evaluation.watch(run.progress.step, metrics):
        run.say(warning)


def _draw(run: Run, evaluation: Evaluation, samples: Any) -> None:
    run.check_stop_request()
    with ExitStack() as stack, torch.no_grad():
        contexts = {"online": evaluation.engine.full_weights, **evaluation.average.averages()}
        models = {name: stack.enter_context(gather()) for name, gather in contexts.items()}
        if run.is_root or evaluation.is_collective_draw:
            sample = evaluation.draw(models, samples, run.progress.step - 1)
            if run.is_root:
                run.log_sample(evaluation.picture_name, sample)


def _validate(run: Run, evaluation: Evaluation) -> dict[str, float]:
    """Validate the trained weights and their averages, and save the best model. Returns all values by name: "valid/..."
    of the same samples each time, and at the end of the run "valid_whole/..." of the whole validation split, if that
    has more samples."""
    start = time.monotonic()
    values = _validate_versions(run, evaluation)
    if best := evaluation.best:
        write = next(iter(evaluation.write.values()))
        with final_weights(evaluation.engine, evaluation.average) as model:
            write_model = partial(run.write_after_heartbeat, "the best model", partial(write, model))
            best.save_if_better(values, run.progress.step, write_model, run.folder.check_is_here)
        run.say(best.failure)
    if run.progress.finished and len(run.feed.valid_part) < len(run.feed.valid_set):
        values |= _validate_versions(run, evaluation, whole=True)
    run.end_validation(start)
    return values


def _validate_versions(run: Run, evaluation: Evaluation, whole: bool = False) -> dict[str, float]:
    """Validate the trained weights and their averages, on the `whole` validation split or the part of every validation.
    Returns the numbers by name, and logs the pictures."""
    values, prefix = dict[str, float](), "valid_whole" if whole else "valid"
    averages = {f"{prefix}/{name}": gather for name, gather in evaluation.average.averages().items()}
    for version, gather in {prefix: evaluation.engine.full_weights, **averages}.items():
        with gather() as model, torch.no_grad():  # one after the other: sharded weights are whole only here
            batches = run.feed.validation(whole, run.check_stop_request)
            for name, value in evaluation.validate(model, batches, run.progress.step - 1).items():
                if isinstance(value, Image.Image):
                    run.log_image(f"{version}/{name}", value)
                else:
                    values[f"{version}/{name}"] = value
    return values
