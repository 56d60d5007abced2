"""Write docs/tested.md, what the tests of faults and of equal numbers show: python scripts/tested.py

A row is the name of a test, and the cases in which it runs, where their text is short.
"""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from benchmarks import launching  # noqa: E402

PAGE = ROOT / "docs" / "tested.md"
#: The files below tests/, by the headings of the page.
FILES = {
    "Processes that are lost, stopped or stalled": ["launch/test_faults.py"],
    "Machines and network": ["lab/test_faults.py", "lab/test_slurm.py"],
    "Saves and the disk": ["training/checkpoint/test_faults.py", "training/test_run.py"],
    "A resume under other conditions": ["launch/test_moved.py", "launch/test_exact_data.py"],
    "The same numbers on every backend": ["launch/test_scripts.py", "launch/test_contracts.py"],
    "Files of strangers": ["weights/test_hostile_files.py", "io/test_writing.py"],
}
_HEAD = """# What the tests show

`python scripts/tested.py` writes this page from the names of the tests. What this means for a user is in
[reliability.md](reliability.md) and [same_numbers.md](same_numbers.md).
"""


def _cases(test: ast.FunctionDef, constants: dict[str, Any]) -> Iterator[str]:
    """The values of each single parameter of a test."""
    for decorator in test.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.parametrize":
            with contextlib.suppress(NameError):  # the values use other names than `constants`: no cases are shown
                name, values = (eval(ast.unparse(argument), constants) for argument in decorator.args[:2])
                texts = [str(value) for value in values]
                if isinstance(name, str) and "," not in name and all(0 < len(text) < 30 for text in texts):
                    yield ", ".join(texts)


def _table(path: Path) -> Iterator[str]:
    """The lines of one file of tests. Its constants are evaluated as far as they need only benchmarks.launching."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = {**vars(launching), "WHOLE_MATRIX": False}  # the cases of `make test`, not those of `make test-all`
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            with contextlib.suppress(NameError):
                exec(ast.unparse(statement), constants)
    yield from (f"`{path.relative_to(ROOT).as_posix()}`", "", "| test | cases |", "|---|---|")
    for test in tree.body:
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
            cases = "; ".join(_cases(test, constants))
            yield f"| {test.name.removeprefix('test_').replace('_', ' ')} |{f' {cases}' if cases else ''} |"
    yield ""


def page() -> str:
    """The page as today's tests make it."""
    lines = [_HEAD]
    for heading, names in FILES.items():
        lines += [f"## {heading}", ""]
        for name in names:
            lines += _table(ROOT / "tests" / name)
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
