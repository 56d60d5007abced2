"""Feed damaged files to every tool, and look for what none may do with a stranger's file.

    python tests/fuzz/fuzz.py --minutes 20                              # make fuzz
    python tests/fuzz/fuzz.py --seed 7 --only 1234                      # case 1234 of seed 7 again, and keep its folder

A case copies small valid inputs, damages one or some files, and runs a command on them in a forked process with little
memory. A command must end by itself, with exit code 0, or with code 2 and
one line (or with code 1 if it says that it was stopped). These are failures: a traceback or a signal, no end within a
time in which a hundred such commands would end, a need for much memory, and a file outside of its output folder that
is new or has changed. Ends with exit code 1 if there was a failure, and says how to repeat it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "launch")]

from fuzz_damages import HUGE, damage  # noqa: E402
from fuzz_inputs import TARGETS, Target, write_inputs  # noqa: E402

MEMORY_BYTES = 1 << 30  # beyond what the process has before
CPU_SECONDS, WALL_SECONDS = 60, 300  # a command takes less than a second
_TEXTS_OF_NO_MEMORY = re.compile("MemoryError|can't allocate|bad_alloc|out of memory")


class Result(NamedTuple):
    """What became of a case; `fault` is None if nothing is wrong."""

    number: int
    target: Target
    damages: list[str]
    code: int
    said: str
    fault: str | None


def run_case(seed: int, number: int, inputs: Path, folder: Path, target: Target | None = None) -> Result:
    """Run a case in a new folder. Only the seed and the number determine what is done; of a given target nothing is
    damaged."""
    rng = random.Random(f"{seed}/{number}")
    is_damaged, target = target is None, target or rng.choice(TARGETS)
    work = folder / "work"
    work.mkdir(parents=True)
    (folder / "outside").mkdir()
    (folder / "outside" / "secret").write_text("secret")
    for name in target.inputs:
        copy = work / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (inputs / name).is_dir() else shutil.copy)(inputs / name, copy)
    with contextlib.chdir(work):
        damages = [damage(rng, path) for path in _chosen(rng, target)] if is_damaged else []
        for name in target.inputs if is_damaged else ():
            if rng.randrange(2):
                _sum_again(Path(name))
    before = _state(folder)
    code, said = _in_a_fork(target, work)
    fault = _fault(target, code, said) or _changes(before, _state(folder), target)
    return Result(number, target, damages, code, said, fault)


def _chosen(rng: random.Random, target: Target) -> list[Path]:
    """One file, sometimes several, of those that are to be damaged."""
    files = [
        path
        for name in target.inputs[: target.damaged]
        for path in ([Path(name)] if Path(name).is_file() else sorted(Path(name).rglob("*")))
        if path.is_file()
        and path.name.endswith(target.ending)
        and path.name not in (".lock", "words.json" if "words.json" not in target.inputs else "")
    ]
    return rng.sample(files, min(len(files), rng.choice([1, 1, 1, 1, 2])))


def _in_a_fork(target: Target, work: Path) -> tuple[int, str]:
    """Exit code (negative: a signal) and stderr of the command, run by a copy of this process."""
    log = work.parent / "log"
    child = os.fork()
    if child == 0:
        code = 70
        try:
            code = _become_command(target, work, log)
        finally:
            os._exit(code)
    return _wait(child), log.read_text(errors="replace")


def _become_command(target: Target, work: Path, log: Path) -> int:
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(work)
    os.environ |= {"HOME": str(work), "XDG_CACHE_HOME": str(work / "cache")}
    faulthandler.enable()
    in_use = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    # Of data and not of all addresses: a file may be mapped whatever its length, which takes no memory.
    resource.setrlimit(resource.RLIMIT_DATA, (in_use + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_FSIZE, (HUGE, HUGE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.argv[0] = f"{target.script}.py"
    try:
        importlib.import_module(target.script).main(list(target.flags))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stderr.flush()
    return code


def _wait(child: int) -> int:
    deadline = time.monotonic() + WALL_SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGALRM


def _fault(target: Target, code: int, said: str) -> str | None:
    """What a command has done wrong, by its exit code and stderr."""
    # After its reason, a process may still have to finish a checkpoint that it was writing.
    lines = [line for line in said.splitlines() if not line.endswith("waiting until the checkpoint is on the disk")]
    last = lines[-1] if lines else ""
    if code in (-signal.SIGALRM, -signal.SIGXCPU, -signal.SIGKILL):
        return f"it does not end: it had {CPU_SECONDS} s of computation, or {WALL_SECONDS} s in all"
    if code < 0:
        return f"it was ended by signal {-code}"
    if "Traceback (most recent call last)" in said or "panicked at" in said:
        return "a traceback"
    if _TEXTS_OF_NO_MEMORY.search(said):
        return f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"
    if not all(line.isprintable() for line in said.replace("\r", "\n").replace("\t", " ").splitlines()):
        return "it prints control characters"
    checks = target.script == "convert" and target.flags[0] == "inspect"
    if code == 0 or (code == 1 and (f"{target.script}.py: stopped: " in last or checks)):
        return None
    if code == 2 and last.startswith(f"{target.script}.py: error: "):
        return None
    return f"exit code {code} without its line"


def _state(folder: Path) -> dict[str, str]:
    """What is in a folder: of each file its content, of each link its target."""
    found = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        elif path.is_file():
            is_huge = path.stat().st_size >= HUGE
            found[name] = "huge" if is_huge else hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "folder" if path.is_dir() else "pipe"
    return found


def _changes(before: dict[str, str], after: dict[str, str], target: Target) -> str | None:
    """The first change outside of what a command may write: its output, and indexes of tars."""
    flags = list(target.flags)
    out = next((flags[flags.index(flag) + 1] for flag in ("--output", "--output_dir") if flag in flags), "out")
    index = "index" if target.script == "embed" and "--index" in flags else out  # codes are written into the index
    allowed = ("log", f"work/{out}", f"work/{index}", "work/out.pth", "work/cache")
    for name in sorted(before.keys() | after.keys()):
        is_allowed = any(name == each or name.startswith((f"{each}/", f"{each}.old-")) for each in allowed)
        if before.get(name) != after.get(name) and not is_allowed and not name.endswith(".index"):
            return f"it {'has written' if name in after else 'has deleted'} {name}"
    return None


def _sum_again(path: Path) -> None:
    """Write the checksums of a folder anew, so that its readers get to what is damaged."""

    def digest(file: Path, is_shard: bool = False) -> str:
        if not file.is_file() or file.is_symlink() or file.stat().st_size >= HUGE:
            return "0" * 64
        content = file.read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little") if is_shard else 0  # of a shard, what follows the header
        return hashlib.sha256(content[begin:]).hexdigest()

    for sums in path.rglob("SHA256SUMS"):
        if sums.is_file() and not sums.is_symlink():
            files = sorted(file for file in sums.parent.iterdir() if file.name != sums.name)
            sums.write_text("".join(f"{digest(file)}  {file.name}\n" for file in files))
    for index in path.rglob("index.json"):
        with contextlib.suppress(OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
            if index.is_symlink() or not index.is_file() or index.stat().st_size >= HUGE:
                continue
            content = json.loads(index.read_text())
            content["lines_sha256"] = digest(index.parent / "index.jsonl")
            for entry in content["shards"]:
                entry["sha256"] = digest(index.parent / entry["file"], is_shard=True)
            index.write_text(json.dumps(content))


def report(result: Result, seed: int) -> str:
    damages = "; ".join(result.damages)
    again = f"python tests/fuzz/fuzz.py --seed {seed} --only {result.number}"
    return f"case {result.number}: {result.fault}\n  {result.target}\n  {damages}\n  again: {again}\n" + "".join(
        f"    {line[:200]}\n" for line in result.said.splitlines()[-12:]
    )


def fuzz(seed: int, numbers: Sequence[int] | range, minutes: float, inputs: Path) -> tuple[int, list[Result]]:
    """Run cases until the time is over; returns how many were run, and those with a fault."""
    began, faults, done, outcomes = time.monotonic(), [], 0, Counter[str]()
    for number in numbers:
        if time.monotonic() - began > minutes * 60:
            break
        with tempfile.TemporaryDirectory(prefix="fuzz-case-") as folder:
            result = run_case(seed, number, inputs, Path(folder) / "case")
        done += 1
        outcomes[f"{result.target.script} {result.code}"] += 1
        if done % 500 == 0:
            print(f"{done} cases, {len(faults)} faults", flush=True)
        if result.fault is not None:
            faults.append(result)
            print(report(result, seed), flush=True)
    print(f"{done} cases of seed {seed}, {len(faults)} faults; exit codes: "
          + ", ".join(f"{name}: {count}" for name, count in sorted(outcomes.items())), flush=True)  # fmt: skip
    return done, faults


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Feed damaged files to every tool.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=1, help="number of the first case")
    parser.add_argument("--only", type=int, help="run this case alone, keep its folder and print what it says")
    args = parser.parse_args(argv)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        inputs = Path(folder)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
            write_inputs(inputs)
        if args.only is not None:
            kept = Path(tempfile.mkdtemp(prefix=f"fuzz-{args.seed}-{args.only}-"))
            result = run_case(args.seed, args.only, inputs, kept / "case")
            print(report(result, args.seed), f"exit code {result.code}; its folder is {kept}")
            return int(result.fault is not None)
        _, faults = fuzz(args.seed, range(args.first, 1 << 60), args.minutes, inputs)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
