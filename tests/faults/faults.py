"""Seeded faults, such as a tired expert would write, and whether the tests find them: `make faults`.

    python tests/faults/faults.py [--only PART_OR_WORDS] [--results FILE] [--diff]

Each YAML file in this folder is one of `PARTS`, a list of faults. A fault changes one place of the code:

    - fault: what is wrong, in a sentence
      in: data.order.Permutation       the function, class or module that is changed
      find: _1 * (_2 + 1)              the place, a pattern as in patterns.py; it matches once
      put: _1 * _2                     what takes its place
      tests: tests/data/test_order.py  the files of tests that are to find it, the quickest first

A pattern names as little of this code as it can, so that it need not change when something is renamed or formatted:
names of Python, PyTorch and NumPy, strings, numbers, and wildcards for everything else. `--diff` shows what the faults
change in today's code.

The tracked files are copied to a temporary folder. For each fault this is copied and changed, and the fault's tests run
there, one file after the other, until a test fails. A test that hangs with the fault has found it. Where pytest ends
without naming a test, such as killed for memory, there is no result. At the end, all tests that have found something
run without a fault: those that fail are named, and have found nothing.

Every result is a JSON line in FILE, so that a second start goes on with the faults that have no result for this tree.
The exit code is 1 if a fault was missed or has no result, or if a test fails without a fault.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import difflib
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import patterns  # beside this file; nothing of `tests` is imported, which the forks would take for that of their copy
import psutil
import pytest
import torch  # noqa: F401  (pytest runs in forks, which then need not import it: most of a short run's time)
import yaml

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
PARTS = ("models", "losses", "metrics", "data", "checkpoints", "flags", "tools", "distributed")
MARK = "TANDEM_FAULT"  # in the environment of all processes of a fault
HANG_SECONDS = 1800  # of one test; it only ends what hangs, on a busy machine too
_OF_THE_TREE = {".py", ".yaml", ".toml", ".json", ".sh", ".js", ".html", ".css", ".npz"}
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - (.*))?$", re.MULTILINE)


class NoResult(Exception):
    """Nobody knows whether the tests find a fault; the text says why."""


@dataclass(frozen=True)
class Fault:
    part: str
    fault: str
    where: str
    find: str
    put: str
    tests: tuple[str, ...]

    @property
    def key(self) -> str:
        """Changes with what is changed and with the tests."""
        return _digest(repr(self).encode())

    def change(self, root: Path) -> tuple[Path, str]:
        """The file below `root` that the fault is in, and its text with the fault.

        Raises:
            NoResult: the pattern does not match exactly once.
        """
        try:
            file, names = patterns.locate(self.where, root)
            return file, patterns.replace_match(file.read_text(), names, self.find, self.put)
        except (OSError, ValueError) as error:
            raise NoResult(f"{self.fault}: in {self.where}, {error}") from None

    def diff(self, root: Path) -> str:
        """The change, without comments and as Python itself formats code."""
        file, changed = self.change(root)
        before, after = (ast.unparse(ast.parse(text)).splitlines() for text in (file.read_text(), changed))
        lines = difflib.unified_diff(before, after, n=1, lineterm="")
        return "\n".join([f"{self.part}: {self.fault}", f"  {self.where}", *list(lines)[3:]])


class Run(NamedTuple):
    """The tests that failed in a run of pytest, why the first one did, and whether one hung."""

    failed: list[str]
    reason: str = ""
    hangs: bool = False


def load() -> list[Fault]:
    """The faults of all parts, those that need launches last."""
    return [
        Fault(part, entry["fault"], entry["in"], entry["find"], entry["put"], tuple(entry["tests"].split()))
        for part in PARTS
        for entry in yaml.safe_load((HERE / f"{part}.yaml").read_text())
    ]


def tracked() -> list[str]:
    """The files of the working tree that git knows."""
    output = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    names = output.decode().split("\0")
    return [name for name in names if name and ((ROOT / name).is_file() or (ROOT / name).is_symlink())]


def tree() -> str:
    """A digest of all code and tests but these."""
    names = [n for n in tracked() if Path(n).suffix in _OF_THE_TREE and not n.startswith("tests/faults/")]
    return _digest(b"".join(name.encode() + b"\0" + (ROOT / name).read_bytes() for name in names))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def copy_tracked(folder: Path) -> None:
    """Copy the tracked files, and compile them, so that none of the copies of the folder has to."""
    for name in tracked():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    compileall.compile_dir(folder, quiet=2)


@contextlib.contextmanager
def copied(sound: Path) -> Iterator[Path]:
    """A copy of a folder. Compiled files fit it, because the times of changes are copied too."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        shutil.copytree(sound, folder, symlinks=True, dirs_exist_ok=True)
        yield Path(folder)


def examine(fault: Fault, sound: Path, hang_seconds: float) -> dict[str, Any]:
    """Run a fault's tests. Returns its result."""
    began, run = time.monotonic(), Run([])
    with copied(sound) as folder:
        file, text = fault.change(folder)
        file.write_text(text)
        for test in fault.tests:
            run = run_pytest(folder, ["-x", test], hang_seconds)
            if run.failed:
                break
    return {
        "part": fault.part, "fault": fault.fault, "by": next(iter(run.failed), None), "why": run.reason,
        "hangs": run.hangs, "seconds": round(time.monotonic() - began, 1), "key": fault.key,
    }  # fmt: skip


def run_pytest(folder: Path, arguments: Sequence[str], hang_seconds: float) -> Run:
    """Run tests in a fork of this process.

    Raises:
        NoResult: pytest failed without naming a test, or hung where its own limit of a test did not end it.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        options = (folder, [*arguments, "-o", f"timeout={hang_seconds:.0f}"], file.fileno())
        process = multiprocessing.get_context("fork").Process(target=_run_pytest, args=options)
        process.start()
        process.join(8 * hang_seconds)
        if process.is_alive():
            _end([*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)])
        _end(each for each in psutil.process_iter() if _mark_of(each) == str(folder))  # whose parents are gone
        process.join()
        file.seek(0)
        output = file.read()
    if process.exitcode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return Run([])
    failures = _FAILED.findall(output)
    # A file that cannot be collected interrupts it.
    if process.exitcode not in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED) or not failures:
        raise NoResult(f"pytest {' '.join(arguments)} ended with {process.exitcode}: {output[-300:]}")
    return Run([test for test, _ in failures], failures[0][1][:300], "from pytest-timeout" in output)


def _run_pytest(folder: Path, arguments: Sequence[str], output: int) -> None:
    os.chdir(folder)
    os.environ |= {MARK: str(folder), "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115  (a test's are files)
    sys.argv = ["pytest", *arguments]
    code = pytest.main(["-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", *arguments])
    _end(psutil.Process().children(recursive=True))  # what a test has left would be waited for
    sys.stdout.flush()
    os._exit(code)


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK)
    except psutil.Error:
        return None


def _end(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """How many faults of each part were found, and which ones by a hang."""
    rows = {part: [each for each in results if each["part"] == part] for part in PARTS}
    lines = [
        f"{part:14}{sum(bool(each['by']) for each in row):4} of {len(row)}"
        for part, row in {**rows, "in all": results}.items()
        if row
    ]
    return "\n".join(lines + [f"found by a hang: {each['part']}: {each['fault']}" for each in results if each["hangs"]])


def main() -> int:
    parser = argparse.ArgumentParser(description="How many seeded faults the tests find.")
    add = parser.add_argument
    add("--only", default="", metavar="PART_OR_WORDS", help="a part, or words of a fault")
    add("--diff", action="store_true", help="show what the faults change, and run nothing")
    add("--results", type=Path, default=ROOT / "runs" / "faults.jsonl", metavar="FILE", help="a JSON line per fault")
    add("--hang", type=float, default=HANG_SECONDS, metavar="SECONDS", help="after which a test is taken to hang")
    args = parser.parse_args()
    faults = [fault for fault in load() if args.only in (fault.part, "") or args.only in fault.fault]
    if args.diff:
        try:
            print("\n\n".join(fault.diff(ROOT) for fault in faults))
        except NoResult as error:
            sys.exit(str(error))
        return 0
    args.results.parent.mkdir(parents=True, exist_ok=True)
    own_tree, failures = tree(), []
    lines = args.results.read_text().splitlines() if args.results.exists() else []
    results = {line["key"]: line for line in map(json.loads, lines) if line["tree"] == own_tree}
    with tempfile.TemporaryDirectory(prefix="sound-") as folder, args.results.open("a") as file:
        copy_tracked(sound := Path(folder))
        for fault in faults:
            if fault.key in results:
                continue
            try:
                result = examine(fault, sound, args.hang)
            except NoResult as error:
                failures.append(f"no result: {fault.part}: {error}")
                continue
            results[fault.key] = result
            print(json.dumps({**result, "tree": own_tree}), file=file, flush=True)
            outcome = f"found by {result['by']}" if result["by"] else "missed"
            print(f"{fault.part}: {fault.fault}: {outcome} ({result['seconds']:.0f} s)", flush=True)
        examined = [results[fault.key] for fault in faults if fault.key in results]
        if tests := sorted({each["by"] for each in examined} - {None}):
            failed = run_pytest(sound, tests, args.hang).failed
            failures += [f"fails without a fault, so it has found nothing: {test}" for test in failed]
    print(table(examined))
    failures += [f"missed: {each['part']}: {each['fault']}" for each in examined if not each["by"]]
    for line in failures:
        print(line, file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
