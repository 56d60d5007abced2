"""A user's own dataset (--dataset) as a source: found, made, asked; what its code raises is shown as it is, once."""

from __future__ import annotations

import argparse
import pickle
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.data.bad_samples import UserCodeError
from tandem.data.sources.user_dataset import DatasetSpec, UserDatasetSource
from tests.data.helpers import one_line
from tests.data.source_table import IMAGES, training
from tests.processes import on_processes

N = 12
DRAWING = """
import random, numpy, torch
class Draws:
    fingerprint = "mine"
    def __init__(self, args):
        self.n, args.n = args.n, 0
    def __len__(self):
        return self.n
    def __getitem__(self, index):
        return index, random.random(), numpy.random.rand(), float(torch.rand(()))
class Many:
    make = Draws
"""
PICTURES = """
import numpy; BAD = range(32)
class Pictures:
    def __init__(self, args):
        self.bad = BAD
    def __len__(self):
        return 32
    def __getitem__(self, index):
        if index in self.bad:
            raise KeyError(f"no number\\n{index}")
        return numpy.full((3, 16, 16), index, "uint8")
def broken(args):
    return Pictures(args).nothing
"""


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`named(code)`: the name of a new module of the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    made: list[str] = []

    def write(code: str, name: str = "") -> str:
        name = name or f"own_{random.SystemRandom().randrange(1 << 40)}"
        (tmp_path / f"{name}.py").write_text(code)
        made.append(name)
        return name

    yield write
    for name in made:
        sys.modules.pop(name, None)


def opened(spec: str, **args: Any) -> UserDatasetSource:
    return UserDatasetSource(DatasetSpec(spec, argparse.Namespace(**{"seed": 0, "n": N, **args})))


def test_the_function_gets_a_copy_of_the_arguments_and_its_items_are_records(named):
    module = named(DRAWING)
    source = opened(f"{module}:Draws")
    assert len(source) == N and source.record(3)["item"][0] == 3
    assert source.describe(3) == f"{module}:Draws[3]" and source.name(3) == "000000003"
    assert (source.shards, source.skipped, [*source.examples("image")]) == (None, "", [*range(N)])
    args = argparse.Namespace(seed=0, n=N)
    assert UserDatasetSource(DatasetSpec(f"{module}:Many.make", args)).fingerprint == source.fingerprint and args.n == N


def test_draws_differ_by_sample_and_seed_in_training_also_by_epoch_and_disturb_nobody(named):
    module = named(DRAWING)
    source = opened(f"{module}:Draws")
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    assert source.record(1) == source.record(1, 5) == pickle.loads(pickle.dumps(source)).record(1)
    assert source.record(1, 2, True) == source.record(1, 2, True)
    alike = [source.record(2), source.record(1, 2, True), source.record(1, 3, True), source.record(1)]
    alike += [opened(f"{module}:Draws", seed=1).record(1)]
    for draw in (1, 2, 3):
        assert len({record["item"][draw] for record in alike}) == len(alike)
    assert state == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("mine/a.py", "", "expected MODULE:FUNCTION"), ("tandem", None, "tandem is a name of this project"),
        ("mine_n", None, "there is no module mine_n: it has to be in the current folder"),
        ("mine_p.inner", None, "importing mine_p.inner failed: ModuleNotFoundError: No module named 'mine_p'"),
        ("mine_c", "import not_there_at_all", "importing mine_c failed: ModuleNotFoundError: No module named"),
        ("mine_e", "x = (", "importing mine_e failed: SyntaxError: '(' was never closed (mine_e.py, line 1)"),
        ("mine_f", "make = 3", "the function failed: TypeError: 'int' object is not callable"),
        ("mine_g", "def mak(args):\n    pass", "mine_g.py has no function make"),
        ("mine_z", "def make(args):\n    raise SystemExit('no')", "the function failed: SystemExit: no (mine_z.py"),
        ("mine_i", "def make(args):\n    return iter([1])", "has not both __len__ and __getitem__"),
        ("mine_l", "class make(list):\n    def __init__(self, args): ...\n    def __len__(self):\n        return 1 / 0",
         "len() of what the function returned failed: ZeroDivisionError: division by zero (mine_l.py, line 4)"),
        ("mine_j", "def make(args):\n    return []", "what the function returned is empty"),
    ],
)  # fmt: skip
def test_what_cannot_be_found_or_made_is_one_line(name, code, said, named):
    if code:
        named(code, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        line = one_line(opened, f"{name}:make")
    assert line.startswith(f"--dataset {name}:make: ") and said in line, line


def test_an_error_of_an_item_is_one_line_that_says_where_and_keeps_its_traceback(named):
    module = named(PICTURES)
    with pytest.raises(UserCodeError) as raised:
        opened(f"{module}:Pictures").record(4)
    error = pickle.loads(pickle.dumps(raised.value))  # as loader processes send it
    assert str(error) == f"KeyError: 'no number\\n4' ({module}.py, line 10)"
    assert error.traceback.startswith("Traceback (most") and 'raise KeyError(f"no number\\n{index}")' in error.traceback


@pytest.mark.parametrize(("world_size", "workers"), [(2, 0), (1, 2)])
def test_the_root_shows_the_traceback_of_the_first_bad_item_and_no_other(world_size, workers, named, capsys):
    module = named(PICTURES.replace("range(32)", "[4, 9]"))
    flags = {"dataset": f"{module}:Pictures", "num_workers": workers, "valid_fraction": 0}

    def train(process: Any) -> list[str]:
        feed, said = IMAGES.feed(process, **flags), list[str]()
        training(feed, 10)
        for _ in range(2):
            feed.report_bad_samples(said.append)
        return said

    for said in on_processes(world_size, train):
        assert len(said) == 2 and all("KeyError: 'no number" in line for line in said)
    shown = capsys.readouterr().err
    assert shown.count("Traceback (most recent call last)") == 1 and f'{module}.py", line 10' in shown


@pytest.mark.parametrize("batch", [0, 1])
def test_the_process_that_an_error_ends_shows_its_traceback_even_if_it_is_not_the_root(batch, named, capsys):
    whole = {"dataset": f"{named(PICTURES.replace('range(32)', '[]'))}:Pictures", "valid_fraction": 0}
    _, seen = on_processes(2, lambda process: training(IMAGES.feed(process, **whole), batch + 1))
    module = named(PICTURES.replace("range(32)", str(seen[batch]["ids"][:1])))
    flags = {**whole, "dataset": f"{module}:Pictures", "on_bad_sample": "error"}
    ends = (ValueError, RuntimeError)
    errors = on_processes(2, lambda process: training(IMAGES.feed(process, **flags), batch + 1), catches=ends)
    assert "KeyError: 'no number" in str(errors[1])
    assert capsys.readouterr().err.count("Traceback (most recent call last)") == 1
    errors = on_processes(2, lambda process: IMAGES.feed(process, dataset=f"{module}:broken"), catches=ends)
    assert len(errors) == 2 and capsys.readouterr().err.count("Traceback (most recent call last)") == 1


def test_the_traceback_of_a_dataset_that_cannot_be_opened_or_read_at_all_is_shown_before_the_line(named, capsys):
    module = named(PICTURES)
    said = one_line(IMAGES.feed, dataset=f"{module}:broken")
    assert "the function failed: AttributeError: 'Pictures' object has no attribute 'nothing'" in said
    assert capsys.readouterr().err.count(f'{module}.py", line 13') == 1
    for more, words in (({}, "none of 24 images"), ({"on_bad_sample": "error"}, "--on_bad_sample replace")):
        feed = IMAGES.feed(dataset=f"{module}:Pictures", num_workers=1, **more)
        assert words in one_line(feed.start, 0)
        assert capsys.readouterr().err.count("Traceback") == 1
