"""The faults can be put into today's files. Whether the tests find them, `make faults` says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.faults.faults import HERE, PARTS, ROOT, SCRIPTS, Fault, NoResult, load, run_pytest

FAULTS = load()


def test_there_are_a_hundred_and_no_two_have_one_name() -> None:
    assert len(FAULTS) >= 100 and {path.stem for path in HERE.glob("*.yaml")} == set(PARTS)
    assert Counter(fault.fault for fault in FAULTS).most_common(1)[0][1] == 1


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.fault)
def test_its_text_stands_once_in_a_file_which_can_be_compiled_with_it(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text()
    changed = fault.changed(text)
    assert changed != text
    compile(changed, fault.file, "exec")
    assert set(fault.scripts.split()) <= set(SCRIPTS)
    assert all((ROOT / name).exists() for name in fault.tests.split())


def test_a_text_that_is_not_there_or_there_twice_is_named() -> None:
    fault = Fault("part", "what is wrong", "file.py", find="x = 1", put="x = 2")
    assert fault.changed("x = 1\n") == "x = 2\n"
    for text in ("", "x = 1\nx = 1\n"):
        with pytest.raises(NoResult, match="file"):
            fault.changed(text)


def test_lines_are_found_at_any_depth_and_keep_it() -> None:
    fault = Fault("part", "swapped", "file.py", find="if a:\n    b()\nc()", put="c()\nif a:\n    b()")
    assert fault.changed("def f():\n    if a:\n        b()\n    c()\n") == "def f():\n    c()\n    if a:\n        b()\n"
    with pytest.raises(NoResult, match="0 times"):
        fault.changed("    if a:\n    b()\n    c()\n")


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        ("def test_it(): pass", []),
        ("def test_it(): raise KeyError", ["test_own.py::test_it"]),
        ("import no_such_module", ["test_own.py"]),
    ],
)
def test_a_test_that_fails_and_a_file_that_cannot_be_collected_have_found_a_fault(
    text: str, failed: list[str], tmp_path: Path
) -> None:
    (tmp_path / "test_own.py").write_text(text)
    assert run_pytest(tmp_path, ["test_own.py"], 600).failed == failed


@pytest.mark.parametrize("arguments", [["test_own.py"], ["no_such_file.py"], ["--no_such_flag"]])
def test_where_pytest_is_killed_or_called_wrongly_there_is_no_result(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_it(): import os; os.kill(os.getpid(), 9)")
    with pytest.raises(NoResult, match="ended with"):
        run_pytest(tmp_path, arguments, 600)
