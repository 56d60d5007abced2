"""Patterns match what they should, and the faults can be put into today's code. Whether the tests find them,
`make faults` says."""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from functools import cache
from pathlib import Path
from types import CodeType

import pytest
import torch
from faults import HERE, PARTS, ROOT, Fault, NoResult, load, run_pytest
from patterns import locate, replace_match


def test_every_fault_changes_one_place_of_todays_code_and_brings_no_name_of_its_own() -> None:
    """A name that has been given up would make every test fail, whatever the fault is: of a variable or function, of an
    attribute that no tensor has, of an argument."""
    faults, wrong = load(), []
    assert {path.stem for path in HERE.glob("*.yaml")} == set(PARTS)
    assert Counter(fault.fault for fault in faults).most_common(1)[0][1] == 1
    for fault in faults:
        try:
            file, text = fault.change(ROOT)
        except NoResult as error:
            wrong.append(str(error))
            continue
        names = _names(compile(text, file, "exec"))
        wrong += [f"{fault.fault}: {name} is a new name" for name in names - _names_in(file)]
        wrong += [f"{fault.fault}: there is no {name}" for name in fault.tests if not (ROOT / name).is_file()]
    assert wrong == []


@cache
def _names_in(file: Path) -> set[str]:
    return _names(compile(file.read_text(), file, "exec")) | set(dir(builtins)) | set(dir(torch.Tensor))


def _names(code: CodeType) -> set[str]:
    """Of variables, attributes and arguments."""
    names = {*code.co_names, *code.co_varnames, *code.co_cellvars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
        elif isinstance(constant, tuple):  # among them keywords of calls
            names |= {each for each in constant if isinstance(each, str)}
    return names


CODE = """\
class Model:  # stays
    def mean(self, x, n):
        # does not stay
        if n:
            return (x.sum() / n, x - x)
        return self.log(x, step=1, at="end")

    def rows(self):  # stays
        for row in self.all():
            self.add(row)
            self.log(row)
        self.log(1)

    def all(self, x):
        y = x + 1
        self.add(x)
        return y
"""
IN_LOOP = "self.add(row)\n            self.log(row)", "self.log(row)\n            self.add(row)"


@pytest.mark.parametrize(
    ("find", "put", "old", "new"),
    [
        ("_1.sum() / _2", "_2 / _1.sum()", "x.sum() / n", "n / x.sum()"),
        ("_1 - _1", "-_1", "x - x", "-x"),
        ("_1._2(_, **_, at=_3)", "_1._2(_3)", 'self.log(x, step=1, at="end")', 'self.log("end")'),
        ("_(*_1, step=_2, **_)", "_2", 'self.log(x, step=1, at="end")', "1"),
        ("self._1(1)", "raise SystemExit(self)", "self.log(1)", "raise SystemExit(self)"),
        ("_1 = _2\n*_3\nreturn _1", "*_3\nreturn _2", "y = x + 1\n        self.add(x)", "self.add(x)"),
        ("for _1 in _2:\n    _3\n    *_4", "for _1 in _2:\n    *_4\n    _3", *IN_LOOP),
    ],
)
def test_a_pattern_matches_at_any_depth_and_wildcards_are_filled_in(find: str, put: str, old: str, new: str) -> None:
    assert CODE.count(old) == 1
    changed, expected = replace_match(CODE, ["Model"], find, put), CODE.replace(old, new)
    if "return" in find:
        expected = expected.replace("return y", "return x + 1")
    assert ast.unparse(ast.parse(changed)) == ast.unparse(ast.parse(expected))


def test_lines_of_other_functions_stay_as_they_are() -> None:
    changed = replace_match(CODE, ["Model", "mean"], "_ / _1", "_1")
    assert changed == CODE.replace("x.sum() / n", "n").replace("        # does not stay\n", "").replace('"', "'")


@pytest.mark.parametrize(
    ("find", "count"),
    [
        ("_1 / _1", 0),
        ("self.log(*_)", 2),  # without keywords
        ("self._(*_, **_)", 6),
        ("self.log(row)\nself.add(row)", 0),  # in another order
        ("self.add(row)\nself.log(1)", 0),  # not in one block
        ("self.log(x, at='end')", 0),
        ("step", 0),  # no expression
    ],
)
def test_a_pattern_that_matches_nothing_or_several_places_is_refused_with_the_faults_name(
    find: str, count: int, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(CODE)
    with pytest.raises(NoResult, match=f"^what is wrong: in model.Model, .* {count} times"):
        Fault("part", "what is wrong", "model.Model", find, "1", ()).change(tmp_path)


def test_a_path_is_that_of_a_module_and_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "__init__.py").touch()
    (tmp_path / "a" / "b.py").touch()
    assert locate("a.b.C.d", tmp_path) == (tmp_path / "a" / "b.py", ["C", "d"])
    assert locate("a.C", tmp_path) == (tmp_path / "a" / "__init__.py", ["C"])
    with pytest.raises(NoResult, match=r"what is wrong: .*b\.C"):
        Fault("part", "what is wrong", "b.C", "1", "2", ()).change(tmp_path)


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
