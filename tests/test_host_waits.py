"""No script reads a number from its device within an update: the host runs ahead, so that the device always has work.

What a backend reads itself, a GPU has ready an update later: tests/gpu/test_gpu.py refuses every wait of it there.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.scripts import ROOT, SCRIPTS, KilledError, kill, words

WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2"}
INDEXING = {"aten::index.Tensor", "aten::index_put_"}  # wait where a mask says which numbers
TO_PYTHON = ("tolist", "numpy")  # ask no operator
AWAY = __file__, str(ROOT / ".venv")
# On a CPU alone, texts are checked; samples are read there, noise and places of crops are drawn.
ON_THE_HOST = ("data", "distributed", "models/resizing.py", "models/text_transformer.py", "training/noise.py")
NO_WAITS_ON_A_GPU = tuple(str(ROOT / name) for name in ON_THE_HOST)


class Watch(TorchDispatchMode):
    """Notes which lines of the project make the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: set[str] = set()

    def note(self) -> None:
        ours = [each for each in traceback.extract_stack() if Path(each.filename).parent.is_relative_to(ROOT)]
        place = next(each for each in reversed(ours) if not each.filename.startswith(AWAY))
        if not place.filename.startswith(NO_WAITS_ON_A_GPU):
            self.waits.add(f"{place.filename}:{place.lineno}: {place.line}")

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = function.name()
        masks = args[1] if name in INDEXING else ()
        if name in WAITING or any(mask is not None and mask.dtype == torch.bool for mask in masks):
            self.note()
        return function(*args, **(kwargs or {}))


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in SCRIPTS),
    ("train_vqgan", {"gan_weight": 0.1, "lecam_weight": 0.1, "grad_accum_steps": 2}),
    ("train_mulan", {"loss": "sigmoid", "grad_accum_steps": 2}),
    (
        "train_decoder",
        {"switches": ["coordinates", "sparse_attn"], "learned_variance": [0, 1], "random_crop_sizes": [0, 8]},
    ),
]


@pytest.mark.parametrize(("name", "flags"), VARIANTS, ids=lambda part: part if isinstance(part, str) else None)
def test_the_host_waits_for_nothing_within_an_update(
    name: str, flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, watch = SCRIPTS[name], Watch()
    more = words({**flags, "log_every_n_steps": 1000, "max_steps": 1000})

    def begin() -> None:
        watch.__enter__()
        for method in TO_PYTHON:
            original = getattr(torch.Tensor, method)
            monkeypatch.setattr(torch.Tensor, method, lambda tensor, of=original: (watch.note(), of(tensor))[1])

    with script.in_update(1, begin), script.in_update(2, kill), pytest.raises(KilledError):
        script.train(tmp_path / "run", *more)
    watch.__exit__(None, None, None)
    assert watch.waits == set()
