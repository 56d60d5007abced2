"""The page: one HTML file with its data, its code and the library that draws the curves in it."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.util
import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.io.installed import missing_package
from tandem.training.metrics.directions import COSTS, better_direction
from tandem.training.run_folder.starts import now

from .runs import RunReader

GENERATOR = "report.py of tandem-training"
_GENERATOR_TAG = f'<meta name="generator" content="{GENERATOR}">'
_HEAD_BYTES = 4096  # of a page, which contain `_GENERATOR_TAG`
_FOLDER = Path(__file__).parent / "page"
# Control characters of the Unicode bidirectional algorithm, which affect the text after the name that holds them:
# https://www.unicode.org/reports/tr9/, section 2.
_BIDI = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_ESCAPED_BIDI = re.compile(r"\\u(061c|200[ef]|202[a-e]|206[6-9])")  # in JSON
_SCRIPTS = ("tools.js", "charts.js", "sections.js", "main.js")
_OPTIMISATION_WORDS = ("lr", "learning_rate", "grad_norm", "weight", "temperature", "scale", "skipped_updates", "bias",
                       "bad_samples")  # fmt: skip
_GROUPS = ("Validation", "Validation of the whole split", "Losses", "Other values", "Optimisation", "Costs")
_ALWAYS_ZERO = "Always 0"


def read_uplot() -> dict[str, str]:
    """JavaScript and CSS of uPlot (https://github.com/leeoniya/uPlot), from the package uplot-python. The package is
    not imported. Raises ValueError, in one line, if it is not installed."""
    spec = importlib.util.find_spec("uplot")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        files = {"js": Path(folder, "static", "uPlot.iife.js"), "css": Path(folder, "static", "uPlot.min.css")}
        if all(path.is_file() for path in files.values()):
            return {kind: path.read_text() for kind, path in files.items()}
    raise missing_package("report.py", "uplot-python, which draws the curves", "report")


def page_data(readers: Iterable[RunReader]) -> dict[str, Any]:
    """The present data of a page about some runs."""
    runs = [reader.read() for reader in readers]
    metrics = [name for run in runs for name in run["curves"]]
    not_zero = {name for run in runs for name, curve in run["curves"].items() if not _is_zero(curve)}
    return {
        "created": now(),
        "runs": runs,
        "groups": groups(metrics, {*metrics} - not_zero),
        "directions": {name: direction for name in dict.fromkeys(metrics) if (direction := better_direction(name))},
    }


def _is_zero(curve: Mapping[str, Any]) -> bool:
    """Whether a curve has several values, all 0."""
    return curve["count"] > 1 and not curve["missing"] and curve["low"][0] == curve["high"][0] == 0


def metric_group(metric: str) -> str:
    """The group of a metric by its name, one of `_GROUPS`."""
    first, last = metric.split("/")[0], metric.split("/")[-1]
    if first.startswith("valid") and "/" in metric:
        return "Validation of the whole split" if first == "valid_whole" else "Validation"
    if metric in COSTS:
        return "Costs"
    if any(last == word or last.endswith(f"_{word}") for word in _OPTIMISATION_WORDS):
        return "Optimisation"
    if better_direction(metric) == "low" or last.endswith("_loss") or last in ("kl", "commitment", "entropy"):
        return "Losses"
    return "Other values"


def groups(metrics: Iterable[str], zero_metrics: Container[str]) -> list[dict[str, object]]:
    """[{"name", "metrics", "is_folded"}] of all metrics, in the given order within a group, without empty groups. The
    last group, folded on the page, holds `zero_metrics`, whose values are all 0, such as counts of faults."""
    members: Mapping[str, list[str]] = {name: [] for name in (*_GROUPS, _ALWAYS_ZERO)}
    for metric in dict.fromkeys(metrics):
        members[_ALWAYS_ZERO if metric in zero_metrics else metric_group(metric)].append(metric)
    return [
        {"name": name, "metrics": members[name], "is_folded": name == _ALWAYS_ZERO} for name in members if members[name]
    ]


def script_json(data: Any) -> str:
    """JSON for a <script> of an HTML page, in ASCII: no part of it ends the script or begins a comment. Control
    characters that reverse text become replacement characters."""
    text = _ESCAPED_BIDI.sub(r"\\ufffd", json.dumps(data, allow_nan=False, separators=(",", ":")))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def render_page(data: Mapping[str, Any], *, version: str = "") -> bytes:
    """The page as HTML.

    Args:
        version: Version of the data, for a page that polls its server for newer data; "" for a file.

    Raises:
        ValueError: one line, if the library that draws the curves is not installed.
    """
    uplot = read_uplot()
    scripts = [uplot["js"], *((_FOLDER / name).read_text() for name in _SCRIPTS)]
    assert not any("</script" in script.lower() for script in scripts)
    names = ", ".join(run["name"] for run in data["runs"])
    fields = {
        "generator": _GENERATOR_TAG,
        "policy": _security_policy(scripts, is_live=bool(version)),
        "title": html.escape(_BIDI.sub("\ufffd", names[:200]) + " - training report"),
        "css": uplot["css"] + (_FOLDER / "page.css").read_text(),
        "version": html.escape(version),
        "data": script_json(data),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    template = (_FOLDER / "page.html").read_text()
    text = re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match[1]], template)
    return text.encode("utf-8", errors="replace")  # names of folders may be no UTF-8


def _security_policy(scripts: Sequence[str], *, is_live: bool) -> str:
    """A Content-Security-Policy: the page loads nothing and runs only these scripts, whatever a run folder holds.
    Source: https://www.w3.org/TR/CSP3/, section 8.4 (hashes of inline scripts)."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    sources = " ".join(f"'sha256-{digest}'" for digest in hashes)
    server = "; connect-src 'self'" if is_live else ""
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {sources}{server}"


def is_report(path: Path) -> bool:
    """Whether a file is a page of report.py, which a new one may replace. Raises OSError."""
    with path.open("rb") as file:
        return _GENERATOR_TAG.encode() in file.read(_HEAD_BYTES)
