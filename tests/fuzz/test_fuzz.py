"""The fuzzer: a short part of it, and that it sees each kind of failure. `make fuzz` runs it for minutes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import fuzz
import pytest
import torch
from fuzz_inputs import TARGETS, Target, write_inputs

import convert

CASES = range(1, 41)
INSPECT = Target("convert", ["inspect", "vae"], ["vae"])


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
        write_inputs(folder)
    return folder


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_undamaged_inputs_are_read(target: Target, inputs: Path, tmp_path: Path) -> None:
    result = fuzz.run_case(0, 1, inputs, tmp_path / "case", target)
    assert (result.code, result.fault) == (0, None), result.said


def test_no_case_of_a_short_part_has_a_fault(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, faults = fuzz.fuzz(0, CASES, 60, inputs)
    assert not faults, capsys.readouterr().out


def test_a_case_is_the_same_again(inputs: Path, tmp_path: Path) -> None:
    one, two, other = (fuzz.run_case(5, n, inputs, tmp_path / name) for n, name in ((2, "1"), (2, "2"), (4, "3")))
    one, two = (result._replace(said="") for result in (one, two))  # which may hold a speed
    assert one == two and one.damages and (one.target, one.damages) != (other.target, other.damages)


# What a command may not do. None of them is undone: each happens in a process of its own.
FAULTS: dict[str, str] = {
    "raise RuntimeError('oh')": "a traceback", "os.abort()": "ended by signal 6", "sys.exit(2)": "without its line",
    f"bytearray({2 * fuzz.MEMORY_BYTES})": "a traceback", "print('\\x1b[31m', file=sys.stderr)": "control characters",
    "Path('new').touch()": "has written work/new", "Path('../outside/secret').write_text('')": "written outside/secret",
    "Path('vae/config.json').unlink()": "has deleted work/vae/config.json", "while True: pass": "does not end",
    "os.mkfifo('pipe'), open('pipe').read()": "does not end",
}  # fmt: skip


@pytest.mark.parametrize("does", FAULTS)
def test_every_kind_of_fault_is_seen(does: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "main", lambda _: exec(does, {"os": os, "sys": sys, "Path": Path}))
    if FAULTS[does] == "does not end":  # others have as long as they need on a busy machine
        monkeypatch.setattr(fuzz, "CPU_SECONDS", 1)
        monkeypatch.setattr(fuzz, "WALL_SECONDS", 3)
    result = fuzz.run_case(0, 1, inputs, tmp_path / "case", INSPECT)
    assert result.fault is not None and FAULTS[does] in result.fault, result
