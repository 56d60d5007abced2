"""Which backend trains: the one asked for, or the one that the launcher and the flags imply."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import distributed
from distributed import UserMistake, backends

Parsed = Callable[..., argparse.Namespace]

STARTED_BY: dict[str, dict[str, str]] = {
    "python": {},
    "torchrun": {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"},
    "deepspeed": {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "CROSS_RANK": "0", "LOCAL_SIZE": "2"},
    "horovodrun": {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"},
    "srun": {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
    "mpirun": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
}


DEEPSPEED_FLAGS = [["--deepspeed"], ["--deepspeed_config", "ds.json"], ["--zero_stage", "2"]]
FSDP_FLAGS = [["--fsdp_offload"], ["--no-fsdp_reshard_after_forward"], ["--distributed_backend", "fsdp"]]
Start = Callable[[str], Any]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Sets what a launcher sets."""
    return lambda launcher: [monkeypatch.setenv(name, value) for name, value in STARTED_BY[launcher].items()]


@pytest.mark.parametrize(
    ("launcher", "chosen"),
    [("python", "single"), *((launcher, "ddp") for launcher in ("torchrun", "srun", "mpirun")),
     ("deepspeed", "deepspeed"), ("horovodrun", "horovod")],
)  # fmt: skip
def test_auto_follows_the_launcher(launcher: str, chosen: str, start: Start, parsed: Parsed) -> None:
    start(launcher)
    # A config.yaml that is read back says these defaults, which ask for nothing.
    of_deepspeed = {"deepspeed": False, "deepspeed_config": None, "zero_stage": 0}
    for said in ({}, {**of_deepspeed, "fsdp_offload": False, "fsdp_reshard_after_forward": True}):
        backend = distributed.from_args(parsed(**said, explicit=frozenset(said)))
        assert backend.name == chosen
        assert (backend.rank, backend.world_size) == ((0, 1) if launcher == "python" else (1, 2))


@pytest.mark.parametrize("launcher", ["python", "torchrun", "srun", "mpirun", "deepspeed"])
@pytest.mark.parametrize("flags", DEEPSPEED_FLAGS)
def test_a_deepspeed_flag_asks_for_deepspeed_whatever_started_it(
    launcher: str, flags: list[str], start: Start, parsed: Parsed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(launcher)
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text("{}")
    backend = distributed.from_args(parsed("--local_rank=1", *flags))  # --local_rank comes from deepspeed's launcher
    assert backend.name == "deepspeed"
    assert backend.local_rank == (1 if launcher in ("torchrun", "deepspeed") else 0)


@pytest.mark.parametrize("launcher", ["python", "torchrun", "srun", "mpirun"])
@pytest.mark.parametrize("flags", FSDP_FLAGS)
def test_a_flag_of_fsdp_asks_for_it(launcher: str, flags: list[str], start: Start, parsed: Parsed) -> None:
    start(launcher)
    assert distributed.from_args(parsed(*flags)).name == "fsdp"


@pytest.mark.parametrize("flags", [*DEEPSPEED_FLAGS, *FSDP_FLAGS[:2]])
@pytest.mark.parametrize("asked", [["--distributed_backend", "ddp"], []], ids=["asked for ddp", "under horovodrun"])
def test_flags_of_one_backend_are_refused_on_another_not_ignored(
    asked: list[str], flags: list[str], start: Start, parsed: Parsed
) -> None:
    start("torchrun" if asked else "horovodrun")
    with pytest.raises(UserMistake, match=rf"{flags[0]}\b.* (ddp|horovod)\b"):
        distributed.from_args(parsed(*asked, *flags))


@pytest.mark.parametrize("flag", ["--distributed_backend", "--distr_backend"])
@pytest.mark.parametrize("spelling", ["ddp", "DDP", "Ddp"])
def test_a_backend_is_asked_for_under_either_flag_in_any_case(flag: str, spelling: str, parsed: Parsed) -> None:
    assert distributed.from_args(parsed(flag, spelling)).name == "ddp"


def test_an_unknown_backend_is_refused_with_the_known_ones(parsed: Parsed, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--distributed_backend", "mpi")
    error = capsys.readouterr().err
    assert all(name in error for name in ("auto", "single", "ddp", "fsdp", "deepspeed", "horovod"))


@pytest.mark.parametrize(
    ("backend", "launcher"),
    [*(("single", each) for each in STARTED_BY if each != "python"), ("horovod", "torchrun"), ("horovod", "deepspeed")],
)
def test_a_backend_that_does_not_see_the_other_processes_is_refused(
    backend: str, launcher: str, start: Start, monkeypatch: pytest.MonkeyPatch, parsed: Parsed
) -> None:
    start(launcher)
    monkeypatch.setattr(backends.all_backends()[backend], "is_available", lambda: True)
    with pytest.raises(UserMistake, match=f"{launcher} started 2 processes.* start the script with"):
        distributed.from_args(parsed("--distributed_backend", backend))


@pytest.mark.parametrize(("launcher", "flags", "expected"), [
    ("horovodrun", [], "Horovod adds no numbers in bf16; use torchrun, or leave it out"),
    ("torchrun", ["--batch_parts", "4"], "--batch_parts gives the same bits .* leave out one of the two"),
])  # fmt: skip
def test_gradients_in_bf16_are_refused_where_they_cannot_be_sent(
    launcher: str, flags: list[str], expected: str, start: Start, parsed: Parsed
) -> None:
    start(launcher)
    with pytest.raises(UserMistake, match=expected):
        distributed.from_args(parsed("--reduce_precision", "bf16", *flags))


@pytest.mark.parametrize("name", ["horovod", "deepspeed"])
def test_an_installation_that_is_broken_says_how_to_repair_it(
    name: str, monkeypatch: pytest.MonkeyPatch, parsed: Parsed
) -> None:
    chosen = backends.all_backends()[name]
    broken = Mock(side_effect=ImportError("libtorch.so: undefined symbol _ZN2at"))
    monkeypatch.setattr(chosen, "is_available", lambda: True)
    monkeypatch.setattr(chosen, "connect", broken)
    hint = re.escape(chosen.install_hint)
    with pytest.raises(UserMistake, match=f"undefined symbol _ZN2at; install it again with `{hint}`"):
        distributed.from_args(parsed("--distributed_backend", name)).__enter__()


def test_single_under_torchrun_with_one_process_is_fine(
    start: Start, monkeypatch: pytest.MonkeyPatch, parsed: Parsed
) -> None:
    start("torchrun")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert distributed.from_args(parsed("--distributed_backend", "single")).world_size == 1


@pytest.mark.parametrize(("name", "hint"), [("deepspeed", "[deepspeed]"), ("horovod", "install_horovod.sh")])
def test_a_backend_that_is_not_installed_says_how_to_install_it(
    name: str, hint: str, monkeypatch: pytest.MonkeyPatch, parsed: Parsed
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == name else find_spec(module))
    assert distributed.available() == {b: b != name for b in ("horovod", "deepspeed", "ddp", "fsdp", "single")}
    with pytest.raises(UserMistake, match=rf"^[^\n]*{re.escape(hint)}[^\n]*single[^\n]*$"):
        distributed.from_args(parsed("--distributed_backend", name))


def test_a_batch_that_does_not_divide_is_refused_before_anything_starts(start: Start, parsed: Parsed) -> None:
    start("torchrun")
    with pytest.raises(UserMistake, match="use --batch_size 6 or 8"):
        distributed.from_args(parsed(batch_size=7))


@pytest.mark.parametrize(("environ", "is_root"), [({}, True), ({"RANK": "1", "WORLD_SIZE": "2"}, False),
                                                  ({"RANK": "x", "WORLD_SIZE": "2"}, True)])  # fmt: skip
def test_who_speaks_before_there_is_a_connection(
    environ: dict[str, str], is_root: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert distributed.launched_as_root() == is_root


PIGEON = """
from ..base import Backend
from .single import SingleBackend


class PigeonBackend(Backend):
    name = "pigeon"
    launch_order = 5
    connect, disconnect = SingleBackend.connect, SingleBackend.disconnect

    @classmethod
    def was_launched(cls, launch, args):
        return bool(args.pigeons)

    @classmethod
    def add_arguments(cls, parser):
        parser.add_argument("--pigeons", type=int, default=0)
"""


@pytest.fixture
def pigeon_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One more file among the backends."""
    (tmp_path / "pigeon.py").write_text(PIGEON)
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(tmp_path)])
    backends.all_backends.cache_clear()
    yield
    backends.all_backends.cache_clear()
    sys.modules.pop("distributed.backends.pigeon", None)


@pytest.mark.usefixtures("pigeon_backend")
def test_a_new_file_is_a_new_backend_with_flags_and_a_place_in_auto(parsed: Parsed) -> None:
    assert distributed.available()["pigeon"]
    assert distributed.from_args(parsed("--distributed_backend", "pigeon")).name == "pigeon"
    assert distributed.from_args(parsed("--pigeons", "3")).name == "pigeon"
    assert distributed.from_args(parsed()).name == "single"
    with distributed.from_args(parsed("--pigeons", "3")) as backend:
        assert backend.sum({"letters": 2}) == {"letters": 2.0}


def test_every_backend_file_holds_one_backend() -> None:
    files = {path.stem for path in Path(backends.__path__[0]).iterdir()} - {"__init__", "__pycache__"}
    assert set(backends.all_backends()) == files


def test_the_layer_imports_nothing_heavy_until_it_connects() -> None:
    code = """
import argparse, sys, distributed
parser = argparse.ArgumentParser(); distributed.add_arguments(parser)
values = dict(batch_size=8, grad_accum_steps=1, precision="fp32", max_grad_norm=0.0, max_skipped_updates=1)
distributed.from_args(argparse.Namespace(**vars(parser.parse_args([])), **values, compile=False))
print(sorted({"torch", "deepspeed", "horovod", "numpy"} & set(sys.modules)))"""
    root = Path(backends.__path__[0]).parents[1]
    finished = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert finished.stdout.strip() == "[]", finished.stderr


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (["optimizer"], "optimizer Adam of the JSON instead of the script's, the schedule stays the script's"),
        (["optimizer", "scheduler"], "instead of the script's; learning rate by the scheduler of the JSON"),
    ],
)
def test_what_the_json_replaces_and_what_it_does_not_is_said(
    sections: list[str], said: str, parsed: Parsed, tmp_path: Path
) -> None:
    parts = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "scheduler": {"type": "WarmupLR"}}
    (tmp_path / "ds.json").write_text(json.dumps({name: parts[name] for name in sections}))
    backend = distributed.from_args(parsed("--deepspeed_config", str(tmp_path / "ds.json")))
    backend.device = torch.device("cpu")
    assert said in backend.summary()


@pytest.mark.parametrize(("stage", "compiles"), [(3, True), (3, False), (2, True)])
def test_a_compiled_model_at_zero_3_is_said_to_be_slower(stage: int, compiles: bool, parsed: Parsed) -> None:
    backend = distributed.from_args(parsed("--zero_stage", str(stage), compile=compiles))
    backend.device = torch.device("cpu")
    assert ("--compile makes stage 3 slower" in backend.summary()) == (stage == 3 and compiles)
