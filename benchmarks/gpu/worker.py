"""One process of `benchmarks.gpu`: a training script that is killed, or watched. It writes a JSON object."""

from __future__ import annotations

import argparse
import collections
import hashlib
import importlib
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from training.run.run import Run

from .. import worker
from ..jobs import reason

KILLED_AFTER, SAVED_AFTER, UPDATES = 11, 8, 20
_FIRST, _COUNTED = 8, 12  # updates between which waits are counted: three times what happens in each fourth update


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "benchmarks.gpu.worker", description="Started by benchmarks.gpu.", allow_abbrev=False
    )  # no abbreviations: the scripts have flags that begin alike
    parser.add_argument("task", choices=("kill", "waits"))
    parser.add_argument("--script", choices=worker.SCRIPTS, required=True)
    parser.add_argument("--result", type=Path, required=True, help="file to write")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder for the run")
    return parser


def kill(options: argparse.Namespace, flags: Sequence[str]) -> dict[str, Any]:
    """Whether a run that was killed and resumed left the same files as one that was not. Each start is a child of this
    process, which has imported PyTorch but not begun to use a GPU."""
    from tests.launch import interrupted_worker

    script = importlib.import_module(options.script)
    whole, killed = options.output_dir / "whole", options.output_dir / "killed"
    log = options.output_dir / "output"
    again = [*flags, "--output_dir", str(killed)]
    first = ["--script", options.script, "--interrupt", f"SIGKILL@{KILLED_AFTER}", *again]
    children: dict[str, tuple[Callable[[], None], int]] = {
        "whole": (lambda: script.main([*flags, "--output_dir", str(whole)]), 0),
        "first": (lambda: interrupted_worker.main(first), -signal.SIGKILL),
        "resumed": (lambda: script.main(again), 0),
    }
    for name, (action, expected) in children.items():
        if (code := _in_a_child(action, log)) != expected:
            why = reason(log.read_text(errors="replace"))
            return {"error": f"the {name} run ended with {code} instead of {expected}: {why}"}
    starts = [json.loads(line)["step"] for line in (killed / "starts.jsonl").read_text().splitlines()]
    differing = different_tensors(whole, killed)
    return {"same_bits": not differing, "starts": starts, "differing": differing}


def different_tensors(one: Path, other: Path) -> list[str]:
    """Names of the files of weights and moments in which two runs differ, in their models and last checkpoints. The
    states of random generators are left out: each process seeds those of Python and NumPy anew, and draws nothing."""
    found = [_digests(run) for run in (one, other)]
    assert found[0], f"{one} holds no weights"
    return sorted(name for name in found[0].keys() | found[1].keys() if found[0].get(name) != found[1].get(name))


def _digests(run: Path) -> dict[str, str]:
    last = max((run / "checkpoints").iterdir(), default=None) if (run / "checkpoints").is_dir() else None
    folders = [*run.glob("model*"), *([last] if last else [])]
    files = [path for folder in folders for path in folder.rglob("*.safetensors")]
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _in_a_child(action: Callable[[], None], log: Path) -> int:
    """Run in a child process, whose output goes to the file `log`; returns its exit code, or minus the number of the
    signal that ended it."""
    sys.stdout.flush(), sys.stderr.flush()
    child = os.fork()
    if not child:
        code = 1
        try:
            sys.stdout = sys.stderr = open(log, "w", encoding="utf-8")  # noqa: SIM115
            os.dup2(sys.stderr.fileno(), 1), os.dup2(sys.stderr.fileno(), 2)
            action()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def waits(options: argparse.Namespace, flags: Sequence[str]) -> dict[str, Any]:
    """How often per update the host waits for the GPU, and where most: PyTorch warns of each such call. What waits for
    an event on purpose, as the count of skipped updates of an earlier update does, is not counted."""
    places: collections.Counter[str] = collections.Counter()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message).lower():
            places[_place(traceback.extract_stack())] += 1

    def watch(run: Run, event: str, _: Any) -> None:
        if event == "update" and run.progress.step == 0:
            worker.decode(run)
        if event == "update" and run.progress.step in (_FIRST, _FIRST + _COUNTED):
            torch.cuda.set_sync_debug_mode("warn" if run.progress.step == _FIRST else "default")

    last = ["--max_steps", str(_FIRST + _COUNTED + 1), "--output_dir", str(options.output_dir / "run")]
    with warnings.catch_warnings(), Run.watched(watch):
        warnings.showwarning = note
        warnings.simplefilter("always")
        importlib.import_module(options.script).main([*flags, *last])
    per_update = {place: count / _COUNTED for place, count in places.most_common()}
    return {"waits_per_update": sum(per_update.values()), "places": per_update}


def _place(stack: traceback.StackSummary) -> str:
    """Where in this repository a call stands: the innermost two lines, outside of PyTorch and of this module."""
    root = str(Path(__file__).resolve().parents[2])
    own = [frame for frame in stack if frame.filename.startswith(root) and frame.filename != __file__]
    own = [frame for frame in own if "site-packages" not in frame.filename]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(own[-2:])) or "outside"


def main(argv: Sequence[str] | None = None) -> None:
    """``argv`` holds the flags above and those of the script."""
    options, flags = build_parser().parse_known_args(argv)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    found = {"kill": kill, "waits": waits}[options.task](options, flags)
    options.result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
