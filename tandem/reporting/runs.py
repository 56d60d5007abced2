"""What a page says of a run: everything in its folder but the weights, as JSON values."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.io.reading import read_json_or_empty, read_yaml, words_of
from tandem.io.writing import is_left_behind
from tandem.training.metrics.directions import FAULTS
from tandem.training.run_folder.starts import script_of, starts

from .curves import MetricsFile
from .faults import marks
from .pictures import pictures_in

_PARTS = ("config.yaml", "metrics.jsonl", "starts.jsonl", "samples", "checkpoints")  # any of a run
_MOST_STARTS = 200
_LONGEST_VALUE = 2000  # characters of a setting
_LABELS = {
    "time": "time", "step": "went on from update", "backend": "backend", "launcher": "launcher",
    "world_size": "processes", "device": "device", "precision": "precision", "batch_size": "batch size", "host": "host",
    "platform": "platform", "cpus": "CPUs", "python": "Python", "packages": "packages", "git_commit": "commit",
    "command": "command", "changed": "changed flags", "ended": "ended",
}  # fmt: skip
_NOTHING: tuple[Any, ...] = (None, "", [], {})
_RATES = {
    "gflop_per_sample": "10^9 operations per sample", "tflops_per_second": "10^12 operations per second",
    "mfu": "share of the devices' peak (MFU)",
}  # fmt: skip
_WAITS = {"data_seconds": "data", "communication_seconds": "other processes", "save_seconds": "checkpoints"}


class RunReader:
    """A run folder that is read again and again.

    Args:
        name: What the page calls the run.
        pictures: Updates whose pictures are shown.
        defaults_of: The settings of a script by its file name, as config.yaml has them, if no flag is given; {} if that
            is not known.

    Raises:
        ValueError: one line, if the folder is that of no run.
    """

    def __init__(
        self, path: str | Path, name: str, pictures: int, defaults_of: Callable[[str], Mapping[str, Any]]
    ) -> None:
        self.path, self.name, self._defaults_of = Path(path), name, defaults_of
        if not self.path.exists():
            raise ValueError(f"there is no run folder {path}")
        if not self.path.is_dir():
            raise ValueError(f"{path} is no run folder but a file; give the folder that holds its metrics.jsonl")
        if not any((self.path / part).exists() for part in _PARTS):
            raise ValueError(f"{path} is no run folder: it holds none of {', '.join(_PARTS)}")
        self._metrics = MetricsFile(self.path / "metrics.jsonl")
        self._pictures = pictures

    def read(self) -> dict[str, Any]:
        """What the page says of the run now. What cannot be read is named in "notes"."""
        self._metrics.read()
        config, note = _config(self.path / "config.yaml")
        notes = [*self._metrics.notes(), *note]
        begun = starts(self.path)
        if not begun:
            notes.append("starts.jsonl is missing or cannot be read: machine, versions and resumes are not known")
        if len(begun) > _MOST_STARTS:
            notes.append(f"starts.jsonl: the newest {_MOST_STARTS} of {len(begun)} starts are shown")
        pictures, more = pictures_in(self.path / "samples", self._pictures)
        metrics, script = self._metrics, script_of(self.path)
        defaults = self._defaults_of(script) if script else {}
        chosen = [name for name, value in config.items() if name in defaults and value != defaults[name]]
        curves = {name: curve.as_json() for name, curve in metrics.curves.items()}
        return {
            "name": self.name,
            "path": str(self.path),
            "script": script,
            "status": self._status(metrics.last_step, metrics.last_time),
            "step": metrics.last_step,
            "notes": [*notes, *more],
            "curves": curves,
            "clock": {name: metrics.clock[name].as_json() for name in ("samples", "seconds")},
            "marks": marks(begun, {name: metrics.curves[name].rises() for name in FAULTS if name in metrics.curves}),
            "config": {name: text_of(value) for name, value in config.items()},
            "chosen": chosen,  # of these, what is not the script's default
            "starts": [_start(facts) for facts in begun[-_MOST_STARTS:]],
            "costs": dict(_costs(metrics, curves)),
            "best": _best(self.path / "best" / "best.json"),
            "pictures": pictures,
            "profiles": _names(self.path / "profile"),
        }

    def _status(self, last_step: int, last_time: str) -> str:
        finished = read_json_or_empty(self.path / "model" / "training.json").get("step")
        if type(finished) is int and finished >= last_step:
            return f"finished at update {finished:,}"
        at = f"at update {last_step:,}, {last_time or 'at an unknown time'}" if last_step >= 0 else "before any line"
        if is_left_behind(self.path / ".lock"):
            return f"ended without finishing, {at}"
        return f"not finished: last line {at}" if last_step >= 0 else "not finished: no line yet"


def _config(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The settings in config.yaml by name, and notes."""
    try:
        found = read_yaml(path)
    except FileNotFoundError:
        return {}, ["config.yaml is missing"]
    except (OSError, ValueError) as error:
        return {}, [f"config.yaml cannot be read: {words_of(error)[:300]}"]
    if not isinstance(found, dict):
        return {}, ["config.yaml holds no settings"]
    return {str(name)[:_LONGEST_VALUE]: value for name, value in found.items()}, []


def text_of(value: Any) -> str:
    """A value of YAML or JSON as people write it."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _start(facts: Mapping[str, Any]) -> dict[str, str]:
    """A line of starts.jsonl as words by label, in the order in which the page shows them."""
    told = {label: _words(facts.get(name)) for name, label in _LABELS.items()}
    told["other facts"] = {name: value for name, value in facts.items() if name not in _LABELS}
    return {label: text_of(value) for label, value in told.items() if value not in _NOTHING}


def _words(fact: Any) -> Any:
    """Lists and mappings, such as a command, versions and what changed from one value to another, as text; a command as
    a shell takes it."""
    if isinstance(fact, dict):
        pairs = {name: " -> ".join(map(text_of, value)) if isinstance(value, list) else text_of(value)
                 for name, value in fact.items()}  # fmt: skip
        return ", ".join(f"{name} {value}" for name, value in pairs.items())
    return shlex.join(map(str, fact)) if isinstance(fact, list) else fact


def _costs(metrics: MetricsFile, curves: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """What the run has cost, by label."""
    samples, seconds = (metrics.clock[name].as_json()["high"] for name in ("samples", "seconds"))
    if metrics.last_step >= 0:
        yield "updates", f"{metrics.last_step:,}"
    if samples:
        yield "samples", f"{samples[0]:,}"
    if seconds:
        yield "seconds of all starts", _rounded(seconds[0], 100)
    rate = curves.get("samples_per_second")
    if rate and rate["count"]:
        yield "samples per second, mean of the lines", f"{rate['sum'] / rate['count']:,.4g}"
        yield "samples per second, last line", f"{rate['last'][0]:,.4g}"
    for name, what in _RATES.items():
        if name in curves and curves[name]["count"]:
            yield f"{what}, mean of the lines", f"{curves[name]['sum'] / curves[name]['count']:,.3g}"
    for name, what in _WAITS.items():
        if name in curves and curves[name]["count"]:
            waited = curves[name]["sum"]
            share = f" ({waited / seconds[0]:.1%} of all)" if seconds and seconds[0] else ""
            yield f"seconds waited for {what}", f"{_rounded(waited, 1000)}{share}"
    for name, curve in curves.items():
        if name.startswith("peak_") and curve["high"]:
            yield f"peak {name[5:].replace('_gb', '').replace('_', ' ')}, GB", f"{curve['high'][0]:,.4g}"


def _rounded(seconds: float, whole_from: float) -> str:
    return f"{seconds:,.0f}" if seconds >= whole_from else f"{seconds:.3g}"


def _best(path: Path) -> dict[str, str]:
    return {str(name)[:200]: text_of(value) for name, value in list(read_json_or_empty(path).items())[:20]}


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())[:50] if folder.is_dir() else []
    except OSError:
        return []


def names_of(paths: Sequence[str | Path]) -> list[str]:
    """A different name for each run folder: its last part, with the one above it where two have the same."""
    resolved = [Path(path).absolute() for path in paths]
    names = [path.name or str(path) for path in resolved]
    if len(set(names)) < len(names):
        names = ["/".join(path.parts[-2:]) for path in resolved]
    return [name if names.count(name) == 1 else f"{name} ({n + 1})" for n, name in enumerate(names)]
