"""Write docs/tested.md, what the tests of faults and of equal numbers show, by their names: python scripts/tested.py"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tested.md"
#: The files below tests/, by the headings of the page.
FILES = {
    "Processes that are lost, stopped or stalled": ["launch/test_faults.py"],
    "Machines and network": ["lab/test_faults.py", "lab/test_slurm.py"],
    "Saves and the disk": ["training/checkpoint/test_faults.py", "training/test_run.py"],
    "A resume under other conditions": ["launch/test_moved.py", "launch/test_exact_data.py"],
    "The same numbers on every backend": ["launch/test_scripts.py", "launch/test_contracts.py"],
    "Receipts": ["test_verify.py", "launch/test_verify.py"],
    "Files of strangers": ["weights/test_hostile_files.py", "io/test_writing.py"],
}
_HEAD = """# What the tests show

`python scripts/tested.py` writes this page from the names of the tests. What this means for a user is in
[reliability.md](reliability.md) and [same_numbers.md](same_numbers.md).
"""


def _list(path: Path) -> Iterator[str]:
    """The lines about one file of tests."""
    yield from (f"`{path.relative_to(ROOT).as_posix()}`", "")
    for test in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
            yield f"- {test.name.removeprefix('test_').replace('_', ' ')}"
    yield ""


def page() -> str:
    """The page as today's tests make it."""
    lines = [_HEAD]
    for heading, names in FILES.items():
        lines += [f"## {heading}", ""]
        for name in names:
            lines += _list(ROOT / "tests" / name)
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
