"""What a page says of a run: everything in its folder but the weights, as JSON values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.files.reading import read_json_or_empty, read_yaml
from tandem.files.writing import is_left_behind

from ..run.starts import script_of, starts
from .curves import MetricsFile
from .faults import marks
from .pictures import Pictures

_PARTS = ("config.yaml", "metrics.jsonl", "starts.jsonl", "samples", "checkpoints")  # any of a run
_MOST_STARTS = 200
_LONGEST_VALUE = 2000  # characters of a setting
_WAITS = {"data_seconds": "data", "communication_seconds": "other processes", "save_seconds": "checkpoints"}


class RunReader:
    """A run folder that is read again and again.

    Args:
        name: What the page calls the run.
        pictures: Updates whose pictures are shown.

    Raises:
        ValueError: one line, if the folder is that of no run.
    """

    def __init__(self, path: str | Path, name: str, pictures: int) -> None:
        self.path, self.name = Path(path), name
        if not self.path.exists():
            raise ValueError(f"there is no run folder {path}")
        if not self.path.is_dir():
            raise ValueError(f"{path} is no run folder but a file; give the folder that holds its metrics.jsonl")
        if not any((self.path / part).exists() for part in _PARTS):
            raise ValueError(f"{path} is no run folder: it holds none of {', '.join(_PARTS)}")
        self._metrics = MetricsFile(self.path / "metrics.jsonl")
        self._pictures = Pictures(self.path / "samples", pictures)

    def read(self) -> dict[str, Any]:
        """What the page says of the run now. What cannot be read is named in "notes"."""
        self._metrics.read()
        notes = self._metrics.notes()
        config, note = _config(self.path / "config.yaml")
        notes += note
        begun = starts(self.path)
        if not begun:
            notes.append("starts.jsonl is missing or cannot be read: machine, versions and resumes are not known")
        if len(begun) > _MOST_STARTS:
            notes.append(f"starts.jsonl: the newest {_MOST_STARTS} of {len(begun)} starts are shown")
        pictures, more = self._pictures.as_json()
        metrics = self._metrics
        curves = {name: curve.as_json() for name, curve in metrics.curves.items()}
        return {
            "name": self.name,
            "path": str(self.path),
            "script": script_of(self.path),
            "status": self._status(metrics.last_step, metrics.last_time),
            "step": metrics.last_step,
            "notes": [*notes, *more],
            "curves": curves,
            "clock": {name: curve.as_json() for name, curve in metrics.clock.items()},
            "marks": marks(begun, config, {name: rises.found for name, rises in metrics.rises.items()}),
            "config": {name: text_of(value) for name, value in config.items()},
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
        return {}, [f"config.yaml cannot be read: {str(getattr(error, 'strerror', None) or error)[:300]}"]
    if not isinstance(found, dict):
        return {}, ["config.yaml holds no settings"]
    return {str(name)[:_LONGEST_VALUE]: value for name, value in found.items()}, []


def text_of(value: Any) -> str:
    """A value of YAML or JSON as people write it."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, float) and not math.isfinite(value):
        text = str(value)
    else:
        try:
            text = json.dumps(value, ensure_ascii=False, default=str)
        except (TypeError, ValueError, RecursionError):
            text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _start(facts: Mapping[str, Any]) -> dict[str, str]:
    """A line of starts.jsonl as words by label, in the order in which the page shows them."""
    command, packages = facts.get("command"), facts.get("packages")
    changed = facts.get("changed")
    told = {
        "time": facts.get("time"),
        "went on from update": facts.get("step"),
        "backend": facts.get("backend"),
        "launcher": facts.get("launcher"),
        "processes": facts.get("world_size"),
        "device": facts.get("device"),
        "precision": facts.get("precision"),
        "batch size": facts.get("batch_size"),
        "host": facts.get("host"),
        "platform": facts.get("platform"),
        "CPUs": facts.get("cpus"),
        "Python": facts.get("python"),
        "packages": _pairs(packages) if isinstance(packages, dict) else packages,
        "commit": facts.get("git_commit"),
        "command": " ".join(map(str, command)) if isinstance(command, list) else command,
        "changed flags": _changes(changed) if isinstance(changed, dict) else changed,
        "ended": facts.get("ended"),
    }
    known = {"step", "world_size", "batch_size", "cpus", "python", "git_commit", "changed", *told}
    others = {name: value for name, value in facts.items() if name not in known and value not in (None, [], {})}
    told["other facts"] = others or None
    return {label: text_of(value) for label, value in told.items() if value not in (None, "", [], {})}


def _pairs(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {text_of(value)}" for name, value in facts.items())


def _changes(changed: Mapping[str, Any]) -> str:
    return ", ".join(
        f"--{name} {text_of(pair[0])} -> {text_of(pair[1])}" if isinstance(pair, list) and len(pair) == 2
        else f"--{name}: {text_of(pair)}"
        for name, pair in changed.items()
    )  # fmt: skip


def _costs(metrics: MetricsFile, curves: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """What the run has cost, by label."""
    seconds = metrics.clock["seconds"].as_json()
    total = seconds["high"][0] if seconds["high"] else None
    samples = metrics.clock["samples"].as_json()
    if metrics.last_step >= 0:
        yield "updates", f"{metrics.last_step:,}"
    if samples["high"]:
        yield "samples", f"{samples['high'][0]:,}"
    if total is not None:
        yield "seconds of all starts", f"{total:,.0f}" if total >= 100 else f"{total:.3g}"
    rate = curves.get("samples_per_second")
    if rate and rate["count"]:
        yield "samples per second, mean of the lines", f"{rate['sum'] / rate['count']:,.4g}"
        yield "samples per second, last line", f"{rate['last'][0]:,.4g}"
    for name, what in _WAITS.items():
        if name in curves and curves[name]["count"]:
            waited = curves[name]["sum"]
            share = f" ({waited / total:.1%} of all)" if total else ""
            yield f"seconds waited for {what}", f"{waited:,.3g}{share}" if waited < 1000 else f"{waited:,.0f}{share}"
    for name, curve in curves.items():
        if name.startswith("peak_") and curve["high"]:
            yield f"peak {name[5:].replace('_gb', '').replace('_', ' ')}, GB", f"{curve['high'][0]:,.4g}"


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
