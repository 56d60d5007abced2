"""The fuzzer: a short part of it, and that it sees each kind of failure. `make fuzz` runs it for minutes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import fuzz
import pytest
import torch
from fuzz_inputs import TARGETS, Target, write_inputs

import convert

CASES = range(1, 41)  # one in fifty runs the command line, and none of these does
INSPECT = Target("convert", ["inspect", "vae"], ["vae"])


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
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
    assert one == two and one.damages and (one.target, one.damages) != (other.target, other.damages)


# What a command may not do. None of them is undone: each happens in a process of its own.


def end_by_a_signal(_: object) -> None:
    os.abort()


def need_memory(_: object) -> None:
    try:
        bytearray(2 * fuzz.MEMORY_BYTES)
    except MemoryError:
        print("convert.py: error: cannot read it: MemoryError", file=sys.stderr)
        sys.exit(2)


def say_nothing(_: object) -> None:
    sys.exit(2)


def say_it_in_colour(_: object) -> None:
    print("convert.py: error: \x1b[31mred", file=sys.stderr)
    sys.exit(2)


def end_by_another_code(_: object) -> None:
    print("convert.py: error: what?", file=sys.stderr)
    sys.exit(3)


def write_elsewhere(_: object) -> None:
    Path("new").touch()


def write_over_what_it_reads(_: object) -> None:
    Path("vae/config.json").write_text("{}")


def write_outside(_: object) -> None:
    Path("../outside/secret").write_text("mine")


def delete(_: object) -> None:
    Path("vae/config.json").unlink()


def raise_error(_: object) -> None:
    raise RuntimeError("oh")


def compute_without_end(_: object) -> None:
    while True:
        pass


def wait_without_end(_: object) -> None:
    os.mkfifo("pipe")
    Path("pipe").read_bytes()


FAULTS: dict[Callable[[object], None], str] = {
    raise_error: "a traceback", end_by_a_signal: "ended by signal 6", need_memory: "more than 1024 MiB of memory",
    say_nothing: "exit code 2 without its line", say_it_in_colour: "control characters",
    end_by_another_code: "exit code 3 without its line", write_elsewhere: "has written work/new",
    write_over_what_it_reads: "has written work/vae/config.json", write_outside: "has written outside/secret",
    delete: "has deleted work/vae/config.json", compute_without_end: "does not end", wait_without_end: "does not end",
}  # fmt: skip


@pytest.mark.parametrize("main", FAULTS, ids=lambda main: main.__name__)
def test_every_kind_of_fault_is_seen(
    main: Callable[[object], None], inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "main", main)
    monkeypatch.setattr(fuzz, "CPU_SECONDS", 1)
    if main is wait_without_end:
        monkeypatch.setattr(fuzz, "WALL_SECONDS", 1)
    result = fuzz.run_case(0, 1, inputs, tmp_path / "case", INSPECT)
    assert result.fault is not None and FAULTS[main] in result.fault, result
