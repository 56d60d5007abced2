"""What processes exchange in an update, a line of metrics and a checkpoint, and how it grows with their number: one
process counts, which takes itself for the root of 512."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.feed import Feed
from distributed import watchdog
from distributed.backends.ddp import DDPBackend
from distributed.collectives import Alone
from tests.processes import Root
from tests.scripts import ROOT, RUN, SCRIPTS, KilledError, Script, kill, words
from training.run.metrics import Metrics
from training.run.run import Run

BATCH = 512  # over all processes
UPDATES = 6  # a critic learns from update 4 on
FEW, MANY = 8, 512


class CountingRoot(Root):
    """`counts`: the number of calls, and the bytes that the root receives, by kind, for each phase of each update."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.phase = "start"
        self.counts: dict[str, Counter[str]] = {}

    def all_reduce_(self, tensor: Tensor, name: str) -> Alone:
        kind = "gradients" if ".gradients." in name else "sums"
        self.count(kind, tensor.numel() * tensor.element_size())
        return Alone()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self.count("gathers", self.world_size * tensor.numel() * tensor.element_size())
        return super().all_gather(tensor)

    def shift(self, tensor: Tensor, rows: int) -> Tensor:
        self.count("shifts", tensor.numel() * tensor.element_size())
        return tensor

    def count(self, kind: str, received: int = 0) -> None:
        self.counts.setdefault(self.phase, Counter()).update({kind: 1, f"bytes of {kind}": received})

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        yield
        self.phase = before


def counted(
    script: Script, world_size: int, folder: Path, monkeypatch: pytest.MonkeyPatch, **flags: Any
) -> CountingRoot:
    """Train with so many processes, of which only the root is there, and count what it exchanges."""
    root, made = CountingRoot(world_size), 0

    def connect(backend: DDPBackend) -> None:
        backend.device, backend.comm = torch.device("cpu"), root

    class Watchdog(watchdog.Watchdog):
        def __init__(self, comm: CountingRoot, *others: Any) -> None:
            super().__init__(Alone(), *others)

        def meet(self) -> None:
            root.count("meetings")

    def within(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with root.during(f"{phase} {made}"):
                return function(*args, **kwargs)

        return call

    count_update = Run.advance

    def advance(run: Run) -> None:
        nonlocal made
        made += 1
        root.phase = f"update {made}"
        count_update(run)

    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world_size}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(DDPBackend, "connect", connect)
    monkeypatch.setattr(DDPBackend, "disconnect", lambda backend, gracefully: None)
    monkeypatch.setattr(watchdog, "Watchdog", Watchdog)
    monkeypatch.setattr(Run, "advance", advance)
    monkeypatch.setattr(Run, "line", within("line", Run.line))
    monkeypatch.setattr(Run, "save", within("checkpoint", Run.save))
    monkeypatch.setattr(Feed, "report_bad_samples", within("line", Feed.report_bad_samples))
    monkeypatch.setattr(Metrics, "log_codes", within("line", Metrics.log_codes))
    tiny = {**RUN, **script.tiny, **script.all_parts, "ema_decay": 0.9, "batch_size": BATCH, "max_steps": 99}
    asked = {**tiny, script.data.flag: f"{script.data.demonstration}:{4 * BATCH}", "save_every_n_steps": 2, **flags}
    with script.in_update(UPDATES, kill), pytest.raises(KilledError):
        script.main(*words({**asked, "output_dir": folder}))
    return root


def growth(few: int, many: int, unit: str = "") -> str:
    """What grows from `few` to `many` in a straight line with the number of processes, in words."""
    per_process, rest = divmod(many - few, MANY - FEW)
    assert rest == 0, f"{few} with {FEW} processes and {many} with {MANY} are on no line through whole numbers"
    constant = few - FEW * per_process
    grown = [f"{per_process:,}{unit} per process"] if per_process else []
    return " ".join([*grown, *(["+" if constant > 0 else "-"] if grown and constant else []),
                     *([f"{abs(constant):,}{unit}"] if constant or not grown else [])])  # fmt: skip


def cell(phase: str, few: CountingRoot, many: CountingRoot) -> str:
    """The cell of the table in docs/clusters.md: the most of each kind that a phase of an update has."""
    of_few, of_many = (
        functools.reduce(Counter.__or__, (counts for name, counts in root.counts.items() if name.startswith(phase)))
        for root in (few, many)
    )
    said = []
    for kind in ("sums", "gathers", "shifts", "meetings"):
        if of_many[kind]:
            number = growth(of_few[kind], of_many[kind])
            noun = kind.removesuffix("s") if number == "1" else kind
            received = growth(of_few[f"bytes of {kind}"], of_many[f"bytes of {kind}"], " B")
            said.append(f"{number} {noun}" + (f": {received}" if kind != "shifts" else ""))
    return "; ".join(said) or "nothing"


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in SCRIPTS),
    ("train_mulan", {"loss": "sigmoid"}),
    ("train_vae", {"batch_parts": MANY}),
]


@pytest.mark.parametrize(("name", "flags"), VARIANTS, ids=lambda part: part if isinstance(part, str) else None)
def test_what_an_update_a_line_and_a_checkpoint_exchange_is_what_the_table_says(
    name: str, flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (
        counted(SCRIPTS[name], processes, tmp_path / str(processes), monkeypatch, **flags) for processes in (FEW, MANY)
    )
    command = " ".join([f"{name}.py", *words(flags)])
    cells = [f"`{command}`", *(cell(phase, few, many) for phase in ("update", "line", "checkpoint"))]
    row = f"| {' | '.join(cells)} |"
    assert row in (ROOT / "docs" / "clusters.md").read_text(), row
    # No object of a process goes to all others, but for the start and for what a checkpoint keeps of each.
    gathered = [name for name, counts in many.counts.items() if counts["gathers"] and name.split()[0] == "line"]
    assert not gathered and not any("meetings" in many.counts[phase] for phase in many.counts if phase != "start")
    # A start (here with the first update): the same calls, and with each process a few numbers and a sample of the
    # preview, of which here all processes have one to show, and of a real job the first ones.
    of_few, of_many = few.counts["start"], many.counts["start"]
    for kind in ("gathers", "sums", "bytes of sums", "meetings"):
        assert of_few[kind] == of_many[kind], kind
    if name == "train_vae" and not flags:  # whose samples have 768 bytes
        assert of_many["bytes of gathers"] - of_few["bytes of gathers"] <= (MANY - FEW) * (768 + 100)
