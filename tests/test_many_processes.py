"""What processes exchange in an update, and how it grows with their number: one process counts, which takes itself for
the root of 512."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import watchdog
from distributed.backends.ddp import DDPBackend
from distributed.collectives import Alone
from tests.processes import Root
from tests.scripts import ROOT, RUN, SCRIPTS, KilledError, Script, kill, words

BATCH = 512  # over all processes
UPDATES = 6  # a critic learns from update 4 on
FEW, MANY = 8, 512


class CountingRoot(Root):
    """`counts`: the number of calls, and the bytes that the root receives, by kind, of the start and of each update."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.counts: list[Counter[str]] = [Counter()]

    def all_reduce_(self, tensor: Tensor, name: str) -> Alone:
        self.count("gradients" if ".gradients." in name else "sums", tensor.numel() * tensor.element_size())
        return Alone()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self.count("gathers", self.world_size * tensor.numel() * tensor.element_size())
        return super().all_gather(tensor)

    def shift(self, tensor: Tensor, rows: int) -> Tensor:
        self.count("shifts", tensor.numel() * tensor.element_size())
        return tensor

    def count(self, kind: str, received: int) -> None:
        self.counts[-1].update({kind: 1, f"bytes of {kind}": received})

    def begin_update(self) -> None:
        self.counts.append(Counter())


def counted(
    script: Script, world_size: int, folder: Path, monkeypatch: pytest.MonkeyPatch, **flags: Any
) -> CountingRoot:
    """Train with so many processes, of which only the root is there, and count what it exchanges."""
    root = CountingRoot(world_size)

    def connect(backend: DDPBackend) -> None:
        backend.device, backend.comm = torch.device("cpu"), root

    class Watchdog(watchdog.Watchdog):
        def __init__(self, comm: CountingRoot, *others: Any) -> None:
            super().__init__(Alone(), *others)

    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world_size}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(DDPBackend, "connect", connect)
    monkeypatch.setattr(DDPBackend, "disconnect", lambda backend, gracefully: None)
    monkeypatch.setattr(watchdog, "Watchdog", Watchdog)
    tiny = {**RUN, **script.tiny, **script.all_parts, "ema_decay": 0.9, "batch_size": BATCH, "max_steps": 99}
    asked = {**tiny, script.data.flag: f"{script.data.demonstration}:{4 * BATCH}", "log_every_n_steps": 99, **flags}
    with contextlib.ExitStack() as stack:
        for step in range(1, UPDATES):
            stack.enter_context(script.in_update(step, root.begin_update))
        stack.enter_context(script.in_update(UPDATES, kill))
        stack.enter_context(pytest.raises(KilledError))
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


def cell(few: CountingRoot, many: CountingRoot) -> str:
    """The cell of the table in docs/clusters.md: the most of each kind that an update has."""
    of_few, of_many = (functools.reduce(Counter.__or__, root.counts[1:]) for root in (few, many))
    said = []
    for kind in ("sums", "gathers", "shifts"):
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
def test_what_an_update_exchanges_is_what_the_table_says(
    name: str, flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (
        counted(SCRIPTS[name], processes, tmp_path / str(processes), monkeypatch, **flags) for processes in (FEW, MANY)
    )
    command = " ".join([f"{name}.py", *words(flags)])
    row = f"| `{command}` | {cell(few, many)} |"
    assert row in (ROOT / "docs" / "clusters.md").read_text(), row
    # A start, here with the first update, has the same calls.
    for kind in ("gathers", "sums", "bytes of sums"):
        assert few.counts[0][kind] == many.counts[0][kind], kind
