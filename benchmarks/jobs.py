"""Starts worker.py through the real launchers, and reads its results."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .launching import AS_A_USER, CHOSEN_ON_TWO, ONE_PROCESS, ROOT, ZERO_STAGES, Job, JobFailed, Launcher, finish_all
from .machine import cores
from .references import HOROVOD, REFERENCES, SCRIPT

_TIMEOUT_SECONDS = 600
# Switch off all work other than the updates, so that every update does the same; logging keeps its defaults.
_SCRIPT_FLAGS = ("--valid_fraction", "0", "--num_workers", "0", "--validate_every_n_steps", "0",
                 "--sample_every_n_steps", "0", "--save_every_n_steps", "0")  # fmt: skip
_IMAGES = ("--image_folder", "demo:shapes:64")
TOKENIZER = ("--tokenizer", str(ROOT / "tests" / "words_tokenizer.json"))  # that of CLIP is in a package
_DATA = {"train_mulan": ("--audio_data", "demo:tones:64", *TOKENIZER),
         "train_tokenizer": ("--video_folder", "demo:moving:64")}  # fmt: skip


# Thresholds of glibc's malloc, in bytes. By default it may keep much of the freed memory, which is then resident but
# not in use.
GIVE_MEMORY_BACK = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}


TORCHRUN, HOROVODRUN = Launcher("torchrun"), Launcher("horovodrun")
# Each launcher with its own backend, and torchrun with each of the other backends; for any number of processes.
LAUNCHERS = (TORCHRUN, *CHOSEN_ON_TWO, *ZERO_STAGES, HOROVODRUN)


def label(launcher: Launcher) -> str:
    """The launcher in the tables, such as "deepspeed, ZeRO 3 x 2"."""
    stage = "" if launcher.zero_stage is None else f", ZeRO {launcher.zero_stage}"
    return f"{launcher.name}{stage}{f', {launcher.backend.upper()}' if launcher.backend else ''} x {launcher.processes}"


def measure(
    launcher: Launcher, sides: Sequence[str], script_flags: Sequence[str], *, script: str = "train_vae",
    threads: int | None = None, rounds: int, turns: int, updates: int, warmup: int = 2,
    environment: Mapping[str, str] | None = None, seconds: float = _TIMEOUT_SECONDS,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Side -> its results, as ``worker.Side.write`` writes them. Each side is a job of its own.

    Args:
        launcher: Starts the script.
        sides: "script" and names in ``references.DESCRIPTIONS``.
        script: Name in ``references.REFERENCES``, whose flags it is started with.
        script_flags: Flags of the script.
        threads: CPU threads per process; by default OMP_NUM_THREADS, or the cores divided by the number of processes.
        rounds: Number of rounds; each gives one number per side.
        turns: Number of turns of each side in a round.
        updates: Number of updates of a side in one turn.
        warmup: Number of updates of each side that are not measured.
        environment: Environment variables to set in addition to those of this process.
        seconds: Limit of the whole.

    Raises:
        JobFailed: a job failed or took longer.
    """
    threads = threads or int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, cores() // launcher.processes)
    with tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder:
        flags = [
            f"--script={script}", f"--folder={folder}", f"--sides={','.join(sides)}",
            f"--rounds={rounds}", f"--turns={turns}", f"--updates={updates}", f"--warmup={warmup}",
            *_DATA.get(script, _IMAGES), *_SCRIPT_FLAGS, *script_flags, *REFERENCES[script].flags,
            f"--output_dir={folder}/run", *launcher.flags,
        ]  # fmt: skip
        commands = [
            _launcher_of(side, launcher).command("benchmarks.worker", [f"--side={side}", *flags]) for side in sides
        ]
        run(commands, {"OMP_NUM_THREADS": str(threads), **(environment or {})}, seconds)
        return {side: json.loads((Path(folder) / f"{side}.json").read_text()) for side in sides}


def _launcher_of(side: str, launcher: Launcher) -> Launcher:
    """The launcher of a side: that of the script, or the usual one of its reference."""
    if side == SCRIPT:
        return launcher.bare  # the script gets the flags of the launcher
    others = HOROVODRUN if side == HOROVOD else ONE_PROCESS if launcher.processes == 1 else TORCHRUN
    return replace(others, processes=launcher.processes)


def run(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str], seconds: float = _TIMEOUT_SECONDS,
    expected: int = 0,
) -> None:  # fmt: skip
    """Run jobs side by side, and kill all their processes before returning.

    Args:
        environment: Environment variables to set in addition to those of this process.
        seconds: Limit.
        expected: Exit code of each; minus the number of a signal.

    Raises:
        JobFailed: one of them ended otherwise, or took longer.
    """
    jobs = [Job(command, "", None, **{**AS_A_USER, **environment}) for command in commands]
    for finished in finish_all(jobs, seconds):
        if finished.returncode not in (None, expected):  # None: it was killed, because another one had failed
            print(finished.output[-3000:], file=sys.stderr)
            raise JobFailed(f"exit code {finished.returncode}: {reason(finished.output)}")


def reason(output: str) -> str:
    """The last error in the output of a failed job, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # Errors of a script, errors of Python, any line. Launchers print more lines after an error.
    for pattern in (r"(\S+: )?(error|stopped): ", r"(\w+\.)*[A-Z]\w*: ", ""):
        if matches := [line for line in lines if re.match(pattern, line)]:
            return matches[-1][:300]
    return "it printed nothing"
