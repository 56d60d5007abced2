"""starts.jsonl of a run folder: a line on each start of the run."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from tandem import __version__
from tandem.io.installed import HOME
from tandem.io.reading import LONGEST_FILE_BYTES, parse_json, read_bytes
from tandem.io.writing import write_atomically

_PACKAGES = (
    "torch", "torchvision", "torchaudio", "deepspeed", "horovod", "numpy", "pillow", "safetensors",
    "PyYAML",
)  # fmt: skip

_STARTS = "starts.jsonl"  # an object for each start of the run


def add_start(output_dir: Path, details: Mapping[str, Any]) -> None:
    """Add a line to starts.jsonl: the time, `environment` and `details` (JSON), and "ended": null. Raises OSError."""
    _write(output_dir, [*starts(output_dir), {"time": now(), **environment(), **details, "ended": None}])


def end_start(output_dir: Path, ending: str, step: int) -> None:
    """Write into the last line how this start ended, such as "finished", and after which update. Raises OSError."""
    *earlier, last = starts(output_dir) or [{}]
    _write(output_dir, [*earlier, {**last, "ended": f"{ending} at update {step}"}])


def _write(output_dir: Path, lines: list[dict[str, Any]]) -> None:
    write_atomically(output_dir / _STARTS, "".join(json.dumps(line) + "\n" for line in lines).encode())


def starts(output_dir: str | Path) -> list[dict[str, Any]]:
    """The lines of starts.jsonl in a run folder, oldest first, without damaged ones."""
    try:
        lines = read_bytes(Path(output_dir) / _STARTS, LONGEST_FILE_BYTES).splitlines()
    except (OSError, ValueError):
        return []
    entries: list[Any] = []
    for line in lines:
        with contextlib.suppress(ValueError):
            entries.append(parse_json(line))
    return [start for start in entries if isinstance(start, dict)]


def last_start(output_dir: str | Path) -> dict[str, Any]:
    """The last line of `starts`; empty if there is none."""
    return next(reversed(starts(output_dir)), {})


def script_of(output_dir: str | Path) -> str | None:
    """File name of the script whose run is in this folder; None if it is not known."""
    name = last_start(output_dir).get("script")
    return name if isinstance(name, str) and re.fullmatch(r"train_\w+\.py", name) else None


def describe_placement(start: Mapping[str, Any]) -> str:
    """Backend, processes and device of a start, such as "ddp on 2 x cpu" or "one process on cpu"; empty if unknown. The
    text is cut to 200 characters, because a damaged file may hold longer values."""
    if not start.get("backend"):
        return ""
    stage = f", ZeRO {start['zero_stage']}" if "zero_stage" in start else ""
    device = str(start.get("device")).split(":")[0]
    if start["backend"] == "single":
        return f"one process on {device}"[:200]
    return f"{start['backend']} on {start.get('world_size')} x {device}{stage}"[:200]


def now() -> str:
    """The time of day in UTC, such as 2026-01-31T12:00:00+00:00."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def environment() -> dict[str, Any]:
    """Versions, commit and host of this run, as JSON values. No environment variables, because they may hold keys."""
    versions = {"tandem-training": __version__}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "packages": versions,
        "git_commit": _git_commit(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
    }


def _git_commit() -> str | None:
    """The commit of this checkout, with "-dirty" if files differ from it; None if it is no git checkout. A repository
    around it, or that of GIT_DIR, is another project's."""
    if not (HOME / ".git").exists():
        return None
    command = ["git", "-C", str(HOME), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
