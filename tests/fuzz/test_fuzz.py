"""A short part of the fuzzer; `make fuzz` goes on for minutes."""

from __future__ import annotations

from pathlib import Path

import fuzz
import pytest
import torch
from fuzz_inputs import TARGETS, Target, write_inputs

CASES = range(1, 41)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
        write_inputs(folder)
    return folder


FIRST = {target.script: target for target in reversed(TARGETS)}.values()  # of each script


@pytest.mark.parametrize(
    "target", [pytest.param(each, marks=() if each in FIRST else pytest.mark.long) for each in TARGETS], ids=str
)
def test_undamaged_inputs_are_read(target: Target, inputs: Path, tmp_path: Path) -> None:
    result = fuzz.run_case(0, 1, inputs, tmp_path / "case", target)
    assert (result.code, result.fault) == (0, None), result.said


@pytest.mark.long  # `make fuzz` makes such cases every night
def test_no_case_of_a_short_part_has_a_fault(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, faults = fuzz.fuzz(0, CASES, 60, inputs)
    assert not faults, capsys.readouterr().out
