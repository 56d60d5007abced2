"""The comparison with the public trainers, as far as it goes without their packages."""

from __future__ import annotations

import dataclasses
import importlib
import sys

import pytest
import torch

from benchmarks import public
from benchmarks.public_loops import unused


def test_a_package_that_is_not_installed_is_a_row_that_names_it_and_its_pip_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = dataclasses.replace(public.COMPARISONS["vae"], package="no-such-trainer==1.2", needs=("no-such-part",))
    monkeypatch.setitem(public.COMPARISONS, "vae", absent)
    (row,) = public.public(["vae"], rounds=1)
    assert row.cells()[:3] == ["train_vae.py", "samples/s", "-"]
    assert row.note.endswith("pip install --no-deps no-such-trainer==1.2 no-such-part")


@pytest.mark.parametrize("name", public.COMPARISONS)
def test_the_script_takes_the_flags_of_its_comparison(name: str) -> None:
    comparison = public.COMPARISONS[name]
    parser = importlib.import_module(comparison.script).build_parser()
    args = parser.parse([*comparison.flags, *public.QUIET, "--precision", "bf16"])
    assert args.valid_fraction == 0


def test_a_module_that_no_update_uses_need_not_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_such_module", "no_such_module.part"):
        monkeypatch.setitem(sys.modules, name, None)
    unused(["no_such_module", "no_such_module.part"])
    base = importlib.import_module("no_such_module.part").Anything
    assert issubclass(type("Model", (base,), {}), torch.nn.Module)
