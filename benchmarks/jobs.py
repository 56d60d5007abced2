"""Start worker.py through the real launchers and read what it measured."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import distributed

from .machine import cores

ROOT = Path(__file__).resolve().parents[1]
_TIMEOUT_SECONDS = 600
_WORKER = "benchmarks.worker"
# Switch off all work other than the updates, so that every update does the same; logging keeps its defaults.
_SCRIPT_FLAGS = ("--image_folder", "demo:shapes:64", "--valid_fraction", "0", "--num_workers", "0",
                 "--validate_every_n_steps", "0", "--sample_every_n_steps", "0",
                 "--save_every_n_steps", "0")  # fmt: skip


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

    def command(self, processes: int) -> list[str]:
        """Command line up to the flags of the worker.

        Raises:
            JobFailed: the backend or the launcher is not installed.
        """
        if not distributed.available()[self.backend]:
            raise JobFailed(f"{self.backend} is not installed")
        if self.tool is None:
            return [sys.executable, "-m", _WORKER]
        path = Path(sys.executable).parent / self.tool
        if not path.exists():
            raise JobFailed(f"{self.tool} is not installed beside {sys.executable}")
        n, port = str(processes), str(_free_port())
        return {
            "torchrun": [str(path), "--nproc_per_node", n, "--master_port", port, "-m", _WORKER],
            "deepspeed": [str(path), "--num_gpus", n, "--master_port", port, "--module", _WORKER],
            "horovodrun": [str(path), "-np", n, sys.executable, "-m", _WORKER],
        }[self.tool]


PYTHON = Launcher("python", "single", None)
LAUNCHERS = (
    Launcher("torchrun", "ddp", "torchrun"),
    *(Launcher(f"deepspeed, ZeRO {n}", "deepspeed", "deepspeed", ("--zero_stage", str(n))) for n in range(4)),
    Launcher("horovodrun", "horovod", "horovodrun"),
)


def one_process(batch_size: int) -> distributed.Backend:
    """A backend of this process alone, with the scripts' defaults."""
    parser = argparse.ArgumentParser()
    distributed.add_arguments(parser)
    parser.set_defaults(batch_size=batch_size, grad_accum_steps=1, precision="fp32", max_grad_norm=0.0)
    parser.set_defaults(max_skipped_updates=20, compile=False)
    return distributed.from_args(parser.parse_args(["--distributed_backend", "single"]))


def measure(
    launcher: Launcher, sides: Sequence[str], script_flags: Sequence[str], *, script: str = "train_vae",
    processes: int = 1, threads: int | None = None, rounds: int, turns: int, updates: int,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The result of ``worker.Contest``.

    Args:
        sides: "script" and names in ``bare.VARIANTS``.
        script: Name in ``worker.BARE_LOOPS``.
        script_flags: Flags of the script.
        threads: CPU threads per process; by default OMP_NUM_THREADS, or the cores divided by the number of processes.
        rounds: Number of rounds; each gives one number per side.
        turns: Number of turns of each side in a round.
        updates: Number of updates of a side in one turn.
        environment: Environment variables to set in addition to those of this process.

    Raises:
        JobFailed: the launcher is not installed, or the job failed or took longer than ten minutes.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder:
        result = Path(folder) / "result.json"
        counts = {"--rounds": rounds, "--turns": turns, "--updates": updates}
        command = [
            *launcher.command(processes),
            *("--script", script, "--result", str(result), "--sides", ",".join(sides)),
            *(word for flag, count in counts.items() for word in (flag, str(count))),
            *(*_SCRIPT_FLAGS, *script_flags, *launcher.flags, "--output_dir", str(Path(folder) / "run")),
        ]
        threads = threads or int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, cores() // processes)
        _run(command, {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", **(environment or {})})
        if not result.exists():
            raise JobFailed(f"{launcher.name} ended without a result")
        return json.loads(result.read_text())


def _run(command: Sequence[str], environment: dict[str, str]) -> None:
    """Run a job in a session of its own, and kill all processes of the session before returning."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise JobFailed(f"took longer than {_TIMEOUT_SECONDS} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        print(output[-3000:], file=sys.stderr)
        raise JobFailed(f"exit code {process.returncode}, see the output above")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
