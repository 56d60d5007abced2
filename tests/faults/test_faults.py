"""The seeded faults can be put into today's code. Whether the tests find them, `make faults` says."""

from __future__ import annotations

import builtins
from collections import Counter
from functools import cache
from pathlib import Path
from types import CodeType

import torch
from faults import HERE, PARTS, ROOT, NoResult, load


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
