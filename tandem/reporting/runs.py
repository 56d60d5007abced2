"""The data of a run for the page of report.py: everything in its folder but the weights, as JSON values."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tandem.io.reading import counted, error_text, read_json_or_empty, read_yaml
from tandem.io.renamed import rename_settings
from tandem.io.writing import is_stale_lock
from tandem.training.metrics.directions import FAULTS
from tandem.training.run_folder.starts import describe_placement, script_of, starts

from .curves import MetricsFile
from .pictures import read_pictures

# A run folder has at least one of these.
_RUN_FILES = ("config.yaml", "metrics.jsonl", "starts.jsonl", "samples", "checkpoints")
_MOST_STARTS = 200
_LONGEST_VALUE = 2000  # characters of a setting
_FACT_LABELS = {
    "time": "time", "step": "went on from update", "backend": "backend", "launcher": "launcher",
    "world_size": "processes", "device": "device", "precision": "precision", "batch_size": "batch size", "host": "host",
    "platform": "platform", "cpus": "CPUs", "python": "Python", "packages": "packages", "git_commit": "commit",
    "command": "command", "changed": "changed flags", "ended": "ended",
}  # fmt: skip
_EMPTY_VALUES: tuple[Any, ...] = (None, "", [], {})
_RATE_LABELS = {
    "gflop_per_sample": "10^9 operations per sample", "tflops_per_second": "10^12 operations per second",
    "mfu": "share of the devices' peak (MFU)",
}  # fmt: skip
_WAIT_LABELS = {"data_seconds": "data", "communication_seconds": "other processes", "save_seconds": "checkpoints"}
# Name of a metric that counts faults -> kind of mark, noun for what is counted, and the action of the run.
_FAULT_LABELS = {"skipped_updates": ("skipped", "update", "skipped"), "bad_samples": ("bad", "bad sample", "replaced")}


class RunReader:
    """Reads a run folder, again at each call of `read`.

    Args:
        name: Name of the run on the page.
        pictures: Number of updates whose pictures are shown.
        defaults_of: File name of a script -> its default settings, as config.yaml has them; {} for an unknown script.

    Raises:
        ValueError: one line, if the folder is no run folder.
    """

    def __init__(
        self, path: str | Path, name: str, pictures: int, defaults_of: Callable[[str], Mapping[str, Any]]
    ) -> None:
        self.path, self.name, self._defaults_of = Path(path), name, defaults_of
        if not self.path.exists():
            raise ValueError(f"there is no run folder {path}")
        if not self.path.is_dir():
            raise ValueError(f"{path} is no run folder but a file; give the folder that holds its metrics.jsonl")
        if not any((self.path / file).exists() for file in _RUN_FILES):
            raise ValueError(f"{path} is no run folder: it holds none of {', '.join(_RUN_FILES)}")
        self._metrics = MetricsFile(self.path / "metrics.jsonl")
        self._pictures = pictures

    def read(self) -> dict[str, Any]:
        """The present data of the run. Files that cannot be read are named in "notes"."""
        self._metrics.read()
        config, config_notes = _read_config(self.path / "config.yaml")
        notes = [*self._metrics.notes(), *config_notes]
        history = starts(self.path)
        if not history:
            notes.append("starts.jsonl is missing or cannot be read: machine, versions and resumes are not known")
        if len(history) > _MOST_STARTS:
            notes.append(f"starts.jsonl: the newest {_MOST_STARTS} of {len(history)} starts are shown")
        pictures, picture_notes = read_pictures(self.path / "samples", self._pictures)
        metrics, script = self._metrics, script_of(self.path)
        defaults = self._defaults_of(script) if script else {}
        changed = [name for name, value in config.items() if name in defaults and value != defaults[name]]
        curves = {name: curve.as_json() for name, curve in metrics.curves.items()}
        return {
            "name": self.name,
            "path": str(self.path),
            "script": script,
            "status": self._status(metrics.last_step, metrics.last_time),
            "step": metrics.last_step,
            "notes": [*notes, *picture_notes],
            "curves": curves,
            "clock": {name: metrics.clock[name].as_json() for name in ("samples", "seconds")},
            "marks": marks(history, {name: metrics.curves[name].rises() for name in FAULTS if name in metrics.curves}),
            "config": {name: format_value(value) for name, value in config.items()},
            "chosen": changed,  # names of settings that are not the script's defaults
            "starts": [_describe_start(facts) for facts in history[-_MOST_STARTS:]],
            "costs": dict(_cost_lines(metrics, curves)),
            "best": _read_best(self.path / "best" / "best.json"),
            "pictures": pictures,
            "profiles": _list_names(self.path / "profile"),
        }

    def _status(self, last_step: int, last_time: str) -> str:
        final_step = read_json_or_empty(self.path / "model" / "training.json").get("step")
        if type(final_step) is int and final_step >= last_step:
            return f"finished at update {final_step:,}"
        has_ended = is_stale_lock(self.path / ".lock")
        if last_step < 0 and has_ended:
            return "ended without finishing, before any line of metrics"
        if last_step < 0:
            return "not finished: no line of metrics yet"
        state = "ended without finishing," if has_ended else "not finished: last line of metrics"
        return f"{state} at update {last_step:,}, {last_time or 'at an unknown time'}"


def _read_config(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The settings in config.yaml by name, and notes."""
    try:
        config = read_yaml(path)
        config = rename_settings(config) if isinstance(config, dict) else config
    except FileNotFoundError:
        return {}, ["config.yaml is missing"]
    except (OSError, ValueError) as error:
        return {}, [f"config.yaml cannot be read: {error_text(error)[:300]}"]
    if not isinstance(config, dict):
        return {}, ["config.yaml holds no settings"]
    return {str(name)[:_LONGEST_VALUE]: value for name, value in config.items()}, []


def format_value(value: Any) -> str:
    """A value of YAML or JSON as text for people."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _describe_start(facts: Mapping[str, Any]) -> dict[str, str]:
    """A line of starts.jsonl as texts by label, in the order of the page."""
    facts_by_label = {label: _format_fact(facts.get(name)) for name, label in _FACT_LABELS.items()}
    facts_by_label["other facts"] = {name: value for name, value in facts.items() if name not in _FACT_LABELS}
    return {label: format_value(value) for label, value in facts_by_label.items() if value not in _EMPTY_VALUES}


def _format_fact(fact: Any) -> Any:
    """Mappings, such as versions and changed flags, as text; a list, which is a command, as text for a shell."""
    if isinstance(fact, dict):
        pairs = {name: " -> ".join(map(format_value, value)) if isinstance(value, list) else format_value(value)
                 for name, value in fact.items()}  # fmt: skip
        return ", ".join(f"{name} {value}" for name, value in pairs.items())
    return shlex.join(map(str, fact)) if isinstance(fact, list) else fact


def marks(history: Sequence[Mapping[str, Any]], rises: Mapping[str, Sequence[Sequence[float]]]) -> list[dict[str, Any]]:
    """Faults and resumes as marks in the curves, {"step", "kind", "text"}, in the order of updates.

    Kinds: "killed" (the updates after the last save were lost), "resumed" (from a save that was made because the run
    was asked to stop), "extended", "skipped" and "bad". The text of a resume names a change of machine or processes.

    Args:
        history: The lines of starts.jsonl.
        rises: Name of a metric that counts faults -> its increases, [first update, last update, increase].
    """
    events = [*_resume_marks(history)]
    for name, intervals in rises.items():
        kind, noun, action = _FAULT_LABELS[name]
        for first, last, count in intervals:
            updates = f"update {last:,.0f}" if first == last else f"updates {first:,.0f} to {last:,.0f}"
            text = f"{counted(int(count), noun)} {action}, counted at {updates}"
            events.append({"step": last, "kind": kind, "text": text})
    return sorted(events, key=lambda event: event["step"])


def _resume_marks(history: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for previous, start in pairwise(history):
        step, changed_flags = start.get("step"), start.get("changed")
        if type(step) is not int or step < 0:
            continue
        is_other_length = isinstance(changed_flags, dict) and not {"max_steps", "epochs"}.isdisjoint(changed_flags)
        end_text = str(previous.get("ended"))
        if end_text.startswith("finished"):
            kind, cause = "extended", "had finished"
        elif end_text.startswith("asked to stop"):
            kind, cause = "resumed", "was asked to stop"
        else:
            lost_updates_text = "it had saved nothing" if step == 0 else "the updates after that were lost"
            kind, cause = "killed", f"was killed or failed, and {lost_updates_text}"
        old_machine, machine = describe_placement(previous), describe_placement(start)
        move = f"; from {old_machine} to {machine}" if old_machine != machine else f", on {machine}" if machine else ""
        with_length = " with another length" if is_other_length else ""
        text = f"started again from update {step:,}{with_length}: the previous start {cause}{move}"
        yield {"step": step, "kind": kind, "text": text}


def _cost_lines(metrics: MetricsFile, curves: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """The costs of the run, by label. "high" and "last" of a curve are [value, update], or None."""
    samples, seconds = (metrics.clock[name].as_json()["high"] for name in ("samples", "seconds"))
    if metrics.last_step >= 0:
        yield "updates", f"{metrics.last_step:,}"
    if samples:
        yield "samples", f"{samples[0]:,}"
    if seconds:
        yield "seconds of all starts", _format_seconds(seconds[0], 100)
    rate = curves.get("samples_per_second")
    if rate and rate["count"]:
        yield "samples per second, mean of the lines of metrics", f"{rate['sum'] / rate['count']:,.4g}"
        yield "samples per second, last line of metrics", f"{rate['last'][0]:,.4g}"
    for name, label in _RATE_LABELS.items():
        if name in curves and curves[name]["count"]:
            yield f"{label}, mean of the lines of metrics", f"{curves[name]['sum'] / curves[name]['count']:,.3g}"
    for name, label in _WAIT_LABELS.items():
        if name in curves and curves[name]["count"]:
            wait = curves[name]["sum"]
            share = f" ({wait / seconds[0]:.1%} of all)" if seconds and seconds[0] else ""
            yield f"seconds waited for {label}", f"{_format_seconds(wait, 1000)}{share}"
    for name, curve in curves.items():
        if name.startswith("peak_") and curve["high"]:
            yield f"peak {name[5:].replace('_gb', '').replace('_', ' ')}, GB", f"{curve['high'][0]:,.4g}"


def _format_seconds(seconds: float, whole_from: float) -> str:
    return f"{seconds:,.0f}" if seconds >= whole_from else f"{seconds:.3g}"


def _read_best(path: Path) -> dict[str, str]:
    return {str(name)[:200]: format_value(value) for name, value in list(read_json_or_empty(path).items())[:20]}


def _list_names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())[:50] if folder.is_dir() else []
    except OSError:
        return []


def distinct_names(paths: Sequence[str | Path]) -> list[str]:
    """A name for each run folder, all different: its last part; if two are equal, the last two parts, then a number."""
    resolved = [Path(path).absolute() for path in paths]
    names = [path.name or str(path) for path in resolved]
    if len(set(names)) < len(names):
        names = ["/".join(path.parts[-2:]) for path in resolved]
    return [name if names.count(name) == 1 else f"{name} ({n + 1})" for n, name in enumerate(names)]
