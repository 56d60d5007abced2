"""Which backend trains: the one asked for, or the one that the launcher and the flags imply."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tandem import distributed
from tandem.distributed import Backend, UserMistake, backends
from tests.data.helpers import one_line
from tests.processes import parsed

STARTED_BY: dict[str, dict[str, str]] = {
    "python": {},
    "torchrun": {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"},
    "deepspeed": {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "CROSS_RANK": "0", "LOCAL_SIZE": "2"},
    "horovodrun": {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"},
    "srun": {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
    "mpirun": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
}
NAMES = set(backends.all_backends())
OF_DEEPSPEED = ["--deepspeed", "--deepspeed_config ds.json", "--zero_stage 2"]
OF_FSDP = ["--fsdp_offload", "--no-fsdp_reshard_after_forward"]
Start = Callable[[str], None]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """Sets what a launcher sets; the folder holds a JSON."""
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text("{}")

    def set_variables(launcher: str) -> None:
        for name, value in STARTED_BY[launcher].items():
            monkeypatch.setenv(name, value)

    return set_variables


def chosen(flags: str = "", **values: Any) -> Backend:
    return distributed.from_args(parsed(*flags.split(), **values))


CHOICES = [
    ("python", "", "single"), ("deepspeed", "", "deepspeed"), ("horovodrun", "", "horovod"),
    *((launcher, "", "ddp") for launcher in ("torchrun", "srun", "mpirun")),
    # --local_rank comes from deepspeed's launcher.
    *((launcher, f"--local_rank=1 {flags}", "deepspeed")
      for launcher in STARTED_BY if launcher != "horovodrun" for flags in OF_DEEPSPEED),
    *((launcher, flags, "fsdp")
      for launcher in ("python", "torchrun", "srun", "mpirun") for flags in (*OF_FSDP, "--distributed_backend fsdp")),
    *(("python", f"--{flag} {name}", "ddp")
      for flag in ("distributed_backend", "distr_backend") for name in ("ddp", "DDP", "Ddp")),
]  # fmt: skip


@pytest.mark.parametrize(("launcher", "flags", "name"), CHOICES)
def test_the_backend_is_the_one_asked_for_or_implied_by_flags_or_the_launchers(
    launcher: str, flags: str, name: str, start: Start
) -> None:
    start(launcher)
    backend = chosen(flags)
    assert backend.name == name
    assert (backend.launch.rank, backend.launch.world_size) == ((0, 1) if launcher == "python" else (1, 2))
    assert backend.launch.local_rank == (1 if launcher in ("torchrun", "deepspeed") else 0)
    if not flags:  # a config.yaml that is read back says these defaults, which ask for nothing
        said = {"deepspeed": False, "deepspeed_config": None, "zero_stage": 0, "fsdp_offload": False,
                "fsdp_reshard_after_forward": True}  # fmt: skip
        assert chosen(**said, explicit=frozenset(said)).name == name


SAID_TO_HOROVOD = [("horovodrun", flags) for flags in (*OF_DEEPSPEED, *OF_FSDP)]
SAID_TO_DDP = [("torchrun", f"--distributed_backend ddp {flags}") for flags in (*OF_DEEPSPEED, *OF_FSDP)]


@pytest.mark.parametrize(
    ("launcher", "flags", "said"),
    [
        # Flags of one backend are refused on another, not ignored.
        *((launcher, flags, rf"{flags.split('ddp ')[-1].split()[0]}\b.* (ddp|horovod)\b")
          for launcher, flags in (*SAID_TO_HOROVOD, *SAID_TO_DDP)),
        # A backend that does not see the other processes.
        *((launcher, "--distributed_backend single", f"{launcher} started 2 processes")
          for launcher in STARTED_BY if launcher != "python"),
        *((launcher, "--distributed_backend horovod", f"{launcher} started 2 processes")
          for launcher in ("torchrun", "deepspeed")),
        # Gradients in bf16 where they cannot be sent.
        ("horovodrun", "--reduce_precision bf16", "Horovod adds no numbers in bf16"),
        ("torchrun", "--reduce_precision bf16 --batch_parts 4", "--batch_parts .* --reduce_precision bf16"),
        # Before anything starts.
        ("torchrun", "", "use --batch_size 6 or 8"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused_in_one_line(
    launcher: str, flags: str, said: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(launcher)
    monkeypatch.setattr(backends.all_backends()["horovod"], "is_available", lambda: True)
    assert re.search(said, one_line(chosen, flags, batch_size=12 if flags else 7, kind=UserMistake))


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--distributed_backend", "mpi", ("auto", *NAMES)),
        *(("--timeout_minutes", value, ("above 0", "1e6")) for value in ("0", "1e7", "nan")),
        ("--check_replicas_every_n_steps", "-1", ("'-1'",)),
        ("--batch_parts", "1.5", ("'1.5'",)),
    ],
)
def test_a_value_that_a_flag_cannot_have_is_refused_with_those_that_it_can(
    flag: str, value: str, said: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(flag, value)
    error = capsys.readouterr().err
    assert all(words in error for words in (flag, *said))


def test_single_under_torchrun_with_one_process_is_fine(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start("torchrun")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert chosen("--distributed_backend single").launch.world_size == 1


@pytest.mark.parametrize(("name", "hint"), [("deepspeed", "[deepspeed]"), ("horovod", "install_horovod.sh")])
@pytest.mark.parametrize("is_broken", [True, False])
def test_a_backend_that_is_not_installed_or_broken_says_how_to_install_it(
    is_broken: bool, name: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls, find_spec = backends.all_backends()[name], importlib.util.find_spec
    if is_broken:
        monkeypatch.setattr(cls, "is_available", lambda: True)
        monkeypatch.setattr(cls, "connect", Mock(side_effect=ImportError("libtorch.so: undefined symbol _ZN2at")))
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == name else find_spec(module))
        assert distributed.available() == {b: b != name for b in NAMES}
    said = one_line(lambda: chosen(f"--distributed_backend {name}").__enter__(), kind=UserMistake)
    assert hint in said and ("_ZN2at" if is_broken else "single") in said


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
    auto_order = 5
    connect, disconnect = SingleBackend.connect, SingleBackend.disconnect

    @classmethod
    def is_requested(cls, launch, args):
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
    sys.modules.pop("tandem.distributed.backends.pigeon", None)


@pytest.mark.usefixtures("pigeon_backend")
def test_a_new_file_is_a_new_backend_with_flags_and_a_place_in_auto() -> None:
    assert set(distributed.available()) == {*NAMES, "pigeon"}
    assert [chosen(flags).name for flags in ("--distributed_backend pigeon", "")] == ["pigeon", "single"]
    with chosen("--pigeons 3") as backend:
        assert backend.name == "pigeon" and backend.processes.sum({"letters": 2}) == {"letters": 2.0}
