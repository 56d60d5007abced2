"""Start worker.py through the real launchers and read what it measured."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import distributed

from .machine import cores
from .references import HOROVOD, REFERENCES
from .slow_network import SlowNetwork

ROOT = Path(__file__).resolve().parents[1]
_TIMEOUT_SECONDS = 600
_WORKER = "benchmarks.worker"
# Switch off all work other than the updates, so that every update does the same; logging keeps its defaults.
_SCRIPT_FLAGS = ("--valid_fraction", "0", "--num_workers", "0", "--validate_every_n_steps", "0",
                 "--sample_every_n_steps", "0", "--save_every_n_steps", "0")  # fmt: skip
_IMAGES = ("--image_folder", "demo:shapes:64")
TOKENIZER = ("--tokenizer", str(ROOT / "tests" / "words_tokenizer.json"))  # that of CLIP is in a package
_DATA = {"train_mulan": ("--audio_data", "demo:tones:64", *TOKENIZER),
         "train_tokenizer": ("--video_folder", "demo:moving:64")}  # fmt: skip


# Fixes glibc malloc's thresholds, in bytes: otherwise the C library may keep much of the freed memory, and resident
# memory would not show how much is in use.
GIVE_MEMORY_BACK = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}


class JobFailed(RuntimeError):
    """A job gave no result; the text says why in one line."""


@dataclass(frozen=True)
class Launcher:
    """A way to start the script.

    Args:
        name: Name in the table.
        backend: Name in ``distributed.available()``.
        tool: Program beside this Python, or None to start Python itself.
        flags: Flags of the script that this way of starting it needs.
    """

    name: str
    backend: str
    tool: str | None
    flags: tuple[str, ...] = ()

    def commands(self, processes: int, flags: Sequence[str], network: SlowNetwork | None = None) -> list[list[str]]:
        """Command lines that start a job of workers with these flags: one, or on a network one for each machine.

        Raises:
            JobFailed: the backend or the launcher is not installed.
        """
        if not distributed.available()[self.backend]:
            raise JobFailed(f"{self.backend} is not installed")
        if self.tool is None:
            return [[sys.executable, "-m", _WORKER, *flags]]
        path = Path(sys.executable).parent / self.tool
        if not path.exists():
            raise JobFailed(f"{self.tool} is not installed beside {sys.executable}")
        n, port = str(processes), free_port()
        if network is not None:
            return network.commands(self.tool, processes, port, ["-m", _WORKER, *flags])
        start = {
            "torchrun": [str(path), "--nproc_per_node", n, "--master_port", str(port), "-m"],
            "deepspeed": [str(path), "--num_gpus", n, "--master_port", str(port), "--module"],
            "horovodrun": [str(path), "-np", n, sys.executable, "-m"],
        }[self.tool]
        return [[*start, _WORKER, *flags]]


PYTHON = Launcher("python", "single", None)
TORCHRUN = Launcher("torchrun", "ddp", "torchrun")
HOROVODRUN = Launcher("horovodrun", "horovod", "horovodrun")
FSDP = Launcher("torchrun, FSDP", "fsdp", "torchrun", ("--distributed_backend", "fsdp"))
ZERO = tuple(Launcher(f"deepspeed, ZeRO {n}", "deepspeed", "deepspeed", ("--zero_stage", str(n))) for n in range(4))
LAUNCHERS = (TORCHRUN, FSDP, *ZERO, HOROVODRUN)


def one_process(batch_size: int, precision: str = "fp32") -> distributed.Backend:
    """A backend of this process alone, with the scripts' defaults."""
    parser = argparse.ArgumentParser()
    distributed.add_arguments(parser)
    parser.set_defaults(batch_size=batch_size, grad_accum_steps=1, precision=precision, max_grad_norm=0.0)
    parser.set_defaults(max_skipped_updates=20, compile=False)
    return distributed.from_args(parser.parse_args(["--distributed_backend", "single"]))


def measure(
    launcher: Launcher, sides: Sequence[str], script_flags: Sequence[str], *, script: str = "train_vae",
    processes: int = 1, threads: int | None = None, rounds: int, turns: int, updates: int, warmup: int = 2,
    environment: Mapping[str, str] | None = None, network: SlowNetwork | None = None,
    seconds: float = _TIMEOUT_SECONDS,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """What ``worker.Side.write`` writes, by side. Each side is a job of its own.

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
        network: The machines that the processes are shared out over; None: this one.
        seconds: Limit of the whole.

    Raises:
        JobFailed: a launcher is not installed, or a job failed or took longer.
    """
    threads = threads or int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, cores() // processes)
    counts = {"--rounds": rounds, "--turns": turns, "--updates": updates, "--warmup": warmup}
    with tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder:
        flags = [
            *("--script", script, "--folder", folder, "--sides", ",".join(sides)),
            *(word for flag, count in counts.items() for word in (flag, str(count))),
            *(*_DATA.get(script, _IMAGES), *_SCRIPT_FLAGS, *script_flags, *launcher.flags),
            *(*REFERENCES[script].flags, "--output_dir", str(Path(folder) / "run")),
        ]
        started = [
            _launcher_of(side, launcher, processes).commands(processes, ["--side", side, *flags], network)
            for side in sides
        ]
        commands = [command for of_side in started for command in of_side]
        run(commands, {"OMP_NUM_THREADS": str(threads), **(environment or {})}, seconds)
        results = {side: Path(folder) / f"{side}.json" for side in sides}
        if absent := [side for side, path in results.items() if not path.exists()]:
            raise JobFailed(f"{absent[0]} ended without a result")
        return {side: json.loads(path.read_text()) for side, path in results.items()}


def _launcher_of(side: str, launcher: Launcher, processes: int) -> Launcher:
    """How people start this side."""
    if side == "script":
        return launcher
    if side == HOROVOD:
        return HOROVODRUN
    return PYTHON if processes == 1 else TORCHRUN


def run(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str], seconds: float = _TIMEOUT_SECONDS
) -> list[str]:
    """Run jobs side by side, each in a session of its own, and kill all processes of the sessions before returning.
    Returns what each wrote.

    Args:
        environment: Environment variables to set in addition to those of this process.
        seconds: Limit.

    Raises:
        JobFailed: one of them failed, or took longer.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
    jobs: list[tuple[subprocess.Popen[str], Any]] = []
    try:
        for command in commands:
            output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (closed below)
            jobs.append((subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                text=True, start_new_session=True,
            ), output))  # fmt: skip
        deadline = time.monotonic() + seconds
        while None in [process.poll() for process, _ in jobs]:  # asks all of them: one may have failed
            _raise_failure(jobs)  # the others wait for one that failed
            if time.monotonic() > deadline:
                raise JobFailed(f"took longer than {seconds:.0f} s")
            time.sleep(0.1)
        _raise_failure(jobs)
        return [_written(output) for _, output in jobs]
    finally:
        for process, output in jobs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            output.close()


def _raise_failure(jobs: Sequence[tuple[subprocess.Popen[str], Any]]) -> None:
    for process, output in jobs:
        if process.returncode:
            text = _written(output)
            print(text[-3000:], file=sys.stderr)
            raise JobFailed(f"exit code {process.returncode}: {reason(text)}")


def _written(output: Any) -> str:
    output.seek(0)
    return str(output.read())


def reason(output: str) -> str:
    """The line of a failed job's output that says most: its last error, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # Of a script, of Python, of anything: launchers say more after it.
    for pattern in (r"(\S+: )?(error|stopped): ", r"(\w+\.)*[A-Z]\w*: ", ""):
        if found := [line for line in lines if re.match(pattern, line)]:
            return found[-1][:300]
    return "it said nothing"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
