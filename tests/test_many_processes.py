"""What processes exchange in an update, a line of metrics and a checkpoint, and how it grows with their number: one
process counts, which takes itself for the root of 512."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tandem.distributed.collectives import Communicator
from tandem.training.run import Run
from tests.processes import Root, ThreadBackend
from tests.scripts import ROOT, RUN, SCRIPTS, KilledError, Script, kill, words

BATCH = 512  # over all processes
UPDATES = 5  # a critic learns from update 4 on, and is punished in update 5
FEW, MANY = 64, 512
Counts = Counter[str]  # of calls, and of the bytes that the root receives, by kind


class CountingRoot(Root):
    """`counts`: of the start with the first update, which sets codebooks up, and of each later one with what follows
    it."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.counts: list[Counts] = [Counter()]

    def all_reduce_(self, tensor: Tensor, name: str) -> Communicator:
        kind = "gradients" if ".gradients." in name else "sums"
        self.count(kind, tensor.numel() * tensor.element_size())
        return Communicator()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self.count("gathers", self.world_size * tensor.numel() * tensor.element_size())
        return super().all_gather(tensor)

    def count(self, kind: str, received: int = 0) -> None:
        self.counts[-1].update({kind: 1, f"bytes of {kind}": received})

    def watch(self, run: Run, event: str, _: Any) -> None:
        if event == "update" and run.progress.step:
            self.counts.append(Counter())
            if run.progress.step == UPDATES:
                kill()


def counted(script: Script, world_size: int, folder: Path, **flags: Any) -> list[Counts]:
    """Train with so many processes, of which only the root is there, and count what it exchanges."""
    root = CountingRoot(world_size)
    tiny = {**RUN, **script.tiny, **script.all_parts, "ema_decay": 0.9, "batch_size": BATCH, "max_steps": 99}
    asked = {**tiny, script.data.flag: f"{script.data.demonstration}:{4 * BATCH}", "output_dir": folder, **flags}
    args = script.parsed(*words(asked))
    backend = ThreadBackend(root, **vars(args))
    backend.processes.watchdog.barrier = lambda: root.count("meetings")  # type: ignore[method-assign]
    gc.freeze()  # as in `Script.main`; the run's end unfreezes
    with Run.watched(root.watch), pytest.raises(KilledError):
        script.module.train(script.config(*words(asked)), backend)
    return root.counts


def more(counts: Counts, than: Counts) -> Counts:
    assert than <= counts
    return counts - than


def parts(script: Script, world_size: int, folder: Path, **flags: Any) -> dict[str, Counts]:
    """What a start exchanges, and the most of each kind that an update, a line and a checkpoint do."""
    plain, lines, saves = (
        counted(script, world_size, folder / name, **flags, log_every_n_steps=line, save_every_n_steps=save)
        for name, line, save in (("plain", 1000, 0), ("lines", 1, 0), ("saves", 1, 1))
    )
    most = functools.partial(functools.reduce, Counter.__or__)
    return {
        "start": plain[0], "update": most(plain[1:]),
        "line": most(map(more, lines[1:], plain[1:])), "checkpoint": most(map(more, saves[1:], lines[1:])),
    }  # fmt: skip


def growth(few: int, many: int, unit: str = "") -> str:
    """What grows from `few` to `many` in a straight line with the number of processes, in words."""
    per_process, rest = divmod(many - few, MANY - FEW)
    assert rest == 0, f"{few} with {FEW} processes and {many} with {MANY} are on no line through whole numbers"
    constant = few - FEW * per_process
    grown = [f"{per_process:,}{unit} per process"] if per_process else []
    return " ".join([*grown, *(["+" if constant > 0 else "-"] if grown and constant else []),
                     *([f"{abs(constant):,}{unit}"] if constant or not grown else [])])  # fmt: skip


def cell(few: Counts, many: Counts) -> str:
    """A cell of the table in docs/clusters.md."""
    said = []
    for kind in ("sums", "gathers", "meetings"):
        if many[kind]:
            number = growth(few[kind], many[kind])
            noun = kind.removesuffix("s") if number == "1" else kind
            received = growth(few[f"bytes of {kind}"], many[f"bytes of {kind}"], " B")
            said.append(f"{number} {noun}: {received}")
    return "; ".join(said) or "nothing"


VARIANTS: list[Any] = [
    *((name, {}) for name in SCRIPTS),
    pytest.param("train_mulan", {"loss": "sigmoid"}, marks=pytest.mark.long),  # a minute
    ("train_vae", {"batch_parts": MANY}),
]


@pytest.mark.parametrize(("name", "flags"), VARIANTS, ids=lambda part: part if isinstance(part, str) else None)
def test_what_an_update_a_line_and_a_checkpoint_exchange_is_what_the_table_says(
    name: str, flags: dict[str, Any], tmp_path: Path
) -> None:
    few, many = (parts(SCRIPTS[name], world_size, tmp_path / str(world_size), **flags) for world_size in (FEW, MANY))
    command = " ".join([f"{name}.py", *words(flags)])
    cells = [f"`{command}`", *(cell(few[part], many[part]) for part in ("update", "line", "checkpoint"))]
    row = f"| {' | '.join(cells)} |"
    assert row in (ROOT / "docs" / "clusters.md").read_text(), row
    # No object of a process goes to all others, but for the start.
    assert not many["line"]["gathers"] and not many["checkpoint"]
    assert not any(many[part]["meetings"] for part in many if part != "start")
    # A start: the same calls, and with each process a few numbers and a sample of the preview, of which here all
    # processes have one to show, and of a real job the first ones.
    of_few, of_many = few["start"], many["start"]
    for kind in ("gathers", "sums", "bytes of sums", "meetings"):
        assert of_few[kind] == of_many[kind], kind
    if name == "train_vae" and not flags:  # whose samples have 768 bytes
        assert of_many["bytes of gathers"] - of_few["bytes of gathers"] <= (MANY - FEW) * (768 + 100)
