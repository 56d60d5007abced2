"""A hundred faults, such as a tired expert would write, and how many of them the tests find: `make faults`.

    python tests/faults/faults.py [--only PART_OR_WORDS] [--results FILE] [--jobs N] [--fresh]

Each YAML file in this folder is one of `PARTS`, a list of faults. A fault replaces one text of one file:

    - fault: what is wrong, in a sentence
      file: models/vqgan.py
      find: the text that is replaced; it stands once in the file
      put: the text that takes its place
      scripts: vae vqgan               the training scripts that it concerns; left out: all; "": none
      tests: tests/test_compile.py     more tests that could notice, launches among them; left out: none

Texts of several lines are indented as their first line is, wherever that stands in the file.

The tracked files are copied to a temporary folder. For each fault this is copied and changed, and there the tests that
could notice run, the nearest first, until one fails. A test that hangs with the fault has found it. Where pytest ends
without naming a test, such as killed for memory, there is no result. At the end, all tests that have found something
run without a fault: those that fail are named, have found nothing and are left out.

Every result is a JSON line in FILE, so that a second start goes on with the faults that have no result for this tree.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch  # noqa: F401  (pytest runs in forks, which then need not import it: most of a short run's time)
import yaml

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
EVERY_SCRIPT = "tests/test_every_script.py"
PARTS = ("models", "objectives", "measures", "data", "checkpoints", "flags", "tools", "distributed")
SCRIPTS = ("vae", "vqgan", "mulan", "tokenizer", "decoder")
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
    file: str
    find: str
    put: str
    scripts: str = " ".join(SCRIPTS)
    tests: str = ""

    @property
    def key(self) -> str:
        """Changes with what is changed and with what could notice."""
        return _digest(json.dumps(asdict(self)).encode())

    def changed(self, text: str) -> str:
        """The text of the file with the fault.

        Raises:
            NoResult: the text to replace is not there exactly once.
        """
        first, *others = self.find.splitlines()
        start = r"^(?P<indent> *)" if others else r"(?P<indent>)"
        lines = "".join(rf"\n(?P=indent){re.escape(line)}" if line else r"\n" for line in others)
        found = list(re.finditer(f"{start}{re.escape(first)}{lines}", text, re.MULTILINE))
        if len(found) != 1:
            raise NoResult(f"its text stands {len(found)} times in {self.file}")
        begin, end = found[0].span()
        line = text[text.rfind("\n", 0, begin) + 1 :]
        indent = " " * (len(line) - len(line.lstrip(" ")))
        put = self.put.replace("\n", f"\n{indent}")
        return f"{text[:begin]}{found[0]['indent']}{put}{text[end:]}"

    def stages(self) -> list[list[str]]:
        """Arguments of pytest, one run after the other: the tests beside the file and those that are named, those of
        the folder, launches that are named, and those of the scripts."""
        path = Path(self.file)
        folder = Path("tests") / path.parent
        beside = [str(each) for each in sorted(folder.glob(f"test_{path.stem}*.py"))]
        named = self.tests.split()
        launches = [each for each in named if each.startswith("tests/launch/")]
        near = [*beside, *(each for each in named if each not in (*launches, *beside))]
        others = sorted(map(str, folder.glob("test_*.py"))) if path.parent != Path() else []
        scripts = self.scripts.split()
        of_each = [str(each) for name in scripts for each in sorted(Path("tests").glob(f"test_train_{name}*.py"))]
        of_all = [EVERY_SCRIPT, "-k", " or ".join(f"train_{name}" for name in scripts)] if scripts else []
        stages = [near, [each for each in others if each not in near], launches, of_each, of_all]
        return [stage for stage in stages if stage]


class Run(NamedTuple):
    """What pytest said: the tests that failed, why the first one did, and whether one hung."""

    failed: list[str]
    why: str = ""
    hangs: bool = False


def load() -> list[Fault]:
    """The faults of all parts, of those that need launches last."""
    return [Fault(part, **entry) for part in PARTS for entry in yaml.safe_load((HERE / f"{part}.yaml").read_text())]


def tracked() -> list[str]:
    """The files of the working tree that git knows."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    return [name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]


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
        shutil.copy2(ROOT / name, target)
    compileall.compile_dir(folder, quiet=2)


@contextlib.contextmanager
def copied(sound: Path) -> Iterator[Path]:
    """A copy of a folder. Compiled files fit it, because the times of changes are copied too."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        shutil.copytree(sound, folder, dirs_exist_ok=True)
        yield Path(folder)


def examine(fault: Fault, sound: Path, left_out: Collection[str], hang_seconds: float) -> dict[str, Any]:
    """Run the tests that could notice a fault. Returns its result."""
    began, used, found = time.monotonic(), _processor_seconds(), Run([])
    with copied(sound) as folder:
        changed = folder / fault.file
        changed.write_text(fault.changed(changed.read_text()))
        os.chdir(folder)  # where `stages` looks for tests
        try:
            for stage in fault.stages():
                found = run_pytest(folder, ["-x", *(f"--deselect={test}" for test in left_out), *stage], hang_seconds)
                if found.failed:
                    break
        finally:
            os.chdir(ROOT)
    return {
        "part": fault.part, "fault": fault.fault, "by": next(iter(found.failed), None), "why": found.why,
        "hangs": found.hangs, "seconds": round(time.monotonic() - began, 1),
        "processor_seconds": round(_processor_seconds() - used, 1), "key": fault.key,
    }  # fmt: skip


def run_pytest(folder: Path, arguments: Sequence[str], hang_seconds: float) -> Run:
    """Run tests in a fork of this process.

    Raises:
        NoResult: pytest failed without naming a test, or hung where its own limit of a test did not end it.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        given = (folder, [*arguments, "-o", f"timeout={hang_seconds:.0f}"], file.fileno())
        process = multiprocessing.get_context("fork").Process(target=_run_pytest, args=given)
        process.start()
        process.join(8 * hang_seconds)
        if process.is_alive():
            _end([*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)])
        _end(each for each in psutil.process_iter() if _mark_of(each) == str(folder))  # whose parents are gone
        process.join()
        file.seek(0)
        said = file.read()
    if process.exitcode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return Run([])
    found = _FAILED.findall(said)
    # A file that cannot be collected interrupts it.
    if process.exitcode not in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED) or not found:
        raise NoResult(f"pytest {' '.join(arguments)} ended with {process.exitcode}: {said[-300:]}")
    return Run([test for test, _ in found], found[0][1][:300], "from pytest-timeout" in said)


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


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Results:
    """The lines of a file that are of this tree: one for each fault, and those that say which tests pass without."""

    def __init__(self, path: Path) -> None:
        self._path, self._tree = path, tree()
        self.of_faults: dict[str, dict[str, Any]] = {}
        self.passes: set[str] = set()
        self.fails: set[str] = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in map(json.loads, path.read_text().splitlines() if path.exists() else []):
            if line["tree"] == self._tree:
                self._take(line)

    def add(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({**line, "tree": self._tree}) + "\n")
        self._take(line)

    def _take(self, line: Mapping[str, Any]) -> None:
        if "key" in line:
            self.of_faults[line["key"]] = dict(line)
            return
        self.passes |= set(line["passes"])
        self.fails |= set(line["fails"])
        self.of_faults = {key: each for key, each in self.of_faults.items() if each["by"] not in self.fails}

    def check(self, sound: Path, hang_seconds: float) -> None:
        """Run the tests that have found something without a fault. Faults that were found by tests that fail then have
        no result any more."""
        tests = {each["by"] for each in self.of_faults.values()} - {None} - self.passes
        if tests:
            with copied(sound) as folder:
                failed = set(run_pytest(folder, sorted(tests), hang_seconds).failed)
            self.add({"passes": sorted(tests - failed), "fails": sorted(tests & failed)})

    def table(self, faults: Sequence[Fault]) -> str:
        of = [self.of_faults[fault.key] for fault in faults if fault.key in self.of_faults]
        rows = {part: [each for each in of if each["part"] == part] for part in dict.fromkeys(f.part for f in faults)}
        lines = []
        for part, row in {**rows, "in all": of}.items():
            lines.append(f"{part:14}{sum(bool(each['by']) for each in row):4} of {len(row)}")
        lines += [f"fails without a fault, so it has found nothing: {test}" for test in sorted(self.fails)]
        lines += [f"found by a hang: {each['part']}: {each['fault']}" for each in of if each["hangs"]]
        lines += [f"missed: {each['part']}: {each['fault']}" for each in of if not each["by"]]
        return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="How many seeded faults the tests find.")
    add = parser.add_argument
    add("--only", default="", metavar="PART_OR_WORDS", help="a part, or words of a fault")
    add("--results", type=Path, default=ROOT / "runs" / "faults.jsonl", metavar="FILE", help="a JSON line per fault")
    add("--jobs", type=int, default=1, metavar="N", help="faults that are examined at a time")
    add("--hang", type=float, default=HANG_SECONDS, metavar="SECONDS", help="after which a test is taken to hang")
    add("--fresh", action="store_true", help="forget the results that there are")
    args = parser.parse_args()
    if args.fresh:
        args.results.unlink(missing_ok=True)
    results = Results(args.results)
    faults = [fault for fault in load() if args.only in (fault.part, "") or args.only in fault.fault]
    wrong: dict[str, str] = {}

    def left() -> list[Fault]:
        return [fault for fault in faults if fault.key not in {*results.of_faults, *wrong}]

    with tempfile.TemporaryDirectory(prefix="sound-") as folder:
        sound = Path(folder)
        copy_tracked(sound)
        while True:
            with ProcessPoolExecutor(args.jobs) as pool:
                futures = {pool.submit(examine, fault, sound, results.fails, args.hang): fault for fault in left()}
                for future in as_completed(futures):
                    try:
                        result = future.result()
                    except NoResult as error:
                        wrong[futures[future].key] = f"no result: {futures[future].fault}: {error}"
                        continue
                    results.add(result)
                    said = f"found by {result['by']}" if result["by"] else "missed"
                    print(f"{result['part']}: {result['fault']}: {said} ({result['seconds']:.0f} s)", flush=True)
            results.check(sound, args.hang)
            if not left():
                break
    print(results.table(faults))
    if wrong:
        sys.exit("\n".join(wrong.values()))


if __name__ == "__main__":
    main()
