"""The memory that copies of a state take, on the host of an accelerator."""

import gc
import random
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.distributed import UserMistake
from tandem.training.checkpoint.snapshot import Snapshot, pack_chunks
from tandem.training.checkpoint.store import Checkpoints
from tests.processes import on_processes, python


def rounded(size: int) -> int:
    """Bytes that PyTorch takes for a piece of pinned memory."""
    return 1 << (size - 1).bit_length()


def odd_sizes(largest: int, count: int) -> dict[str, int]:
    draw = random.Random(0)
    return {f"tensor {number}": 4 * draw.randint(1, largest // 4) for number in range(count)}


@pytest.mark.parametrize("sizes", [odd_sizes(10_000, 300), odd_sizes(40_000_000, 300), odd_sizes(500_000_000, 100)])
def test_pieces_are_powers_of_two_with_hardly_more_room_than_blocks_of_odd_sizes_take(sizes: dict[str, int]) -> None:
    found = list(pack_chunks(sizes))
    assert sorted(key for _, keys in found for key in keys) == sorted(sizes)
    for size, keys in found:
        assert size == rounded(size) and sum(sizes[key] + 63 for key in keys) <= size + 63 * len(keys)
    assert sum(size for size, _ in found) <= 1.1 * sum(sizes.values()) < sum(map(rounded, sizes.values()))


def test_blocks_without_bytes_and_no_blocks_at_all_take_no_memory() -> None:
    assert [*pack_chunks({})] == [] and sum(size for size, _ in pack_chunks({"empty": 0, "one": 1})) == 64


def test_a_snapshot_ends_with_its_last_user_without_a_search_for_garbage() -> None:
    """It holds as much memory as a state, and garbage is looked for seldom."""
    gc.collect()
    gc.disable()
    try:
        snapshot = Snapshot({"model": {"weight": torch.ones(3), "fetched": lambda: torch.ones(3), "step": 1}})
        snapshot.finish()
        alive = weakref.ref(snapshot)
        del snapshot
        assert alive() is None
    finally:
        gc.enable()


PROGRAM = """
import random
import torch
from safetensors.torch import load_file
from tests.pretend import library
from tests.pretend.device import install

device, pinned = install(library.built()), []
device.library.on_report(lambda kind, what, size: (pinned.append(size) if kind == "pin" else None, "")[1])

from pathlib import Path
from tests.processes import Process
from tandem.training.checkpoint.store import Checkpoints

draw = random.Random(0)
def state():
    weights = {str(n): torch.full((draw.randint(1, 20_000),), n, device="pretend") for n in range(300)}
    weights["half"] = torch.full((3, 5), 7, dtype=torch.bfloat16, device="pretend")
    weights["empty"] = torch.zeros(0, 3, device="pretend")
    buffer = torch.zeros(1001, device="pretend")
    fetched = {str(n): lambda n=n: buffer.fill_(n) for n in range(100)}
    return {"engine": {"weights": weights, "fetched": fetched, "on_cpu": torch.arange(3)}}

state, total = state(), 0
for tensors in state["engine"]["weights"], {n: f() for n, f in state["engine"]["fetched"].items()}:
    total += sum(tensor.nbytes for tensor in tensors.values())
checkpoints = Checkpoints(Path(FOLDER), 9, Process())
checkpoints.prepare(state)
taken = sum(1 << (size - 1).bit_length() for size in pinned)
assert taken <= 1.1 * total, (taken, total, len(pinned))
number = len(pinned)
for step in (1, 2):
    checkpoints.save(step, state, {})
    for tensor in state["engine"]["weights"].values():
        tensor.add_(1)  # the next update
    checkpoints.wait()
    assert checkpoints.failure is None
assert len(pinned) == number, "a save has taken more"
for step in (1, 2):
    saved = load_file(checkpoints.folder / f"step_0000000{step}" / "engine.safetensors")
    assert len(saved) == 403 and saved["on_cpu"].tolist() == [0, 1, 2] and saved["weights/empty"].shape == (0, 3)
    assert all(bool((saved[f"weights/{n}"] == n + step - 1).all()) for n in range(300))
    assert all(bool((saved[f"fetched/{n}"] == n).all()) for n in range(100))
    assert saved["weights/half"].tolist() == [[6.0 + step] * 5] * 3
late = {str(n): torch.ones(10_000, device="pretend") for n in range(300)}
state["engine"]["moments"] = late  # those of a model whose training begins later
del pinned[:]
checkpoints.save(3, state, {})
checkpoints.wait()
assert sum(1 << (size - 1).bit_length() for size in pinned) <= 1.1 * 300 * 40_000, len(pinned)
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="the pretend device is built by g++")
def test_saves_pin_hardly_more_than_they_hold_once_and_hold_the_state_of_their_update(tmp_path: Path) -> None:
    result = python(PROGRAM.replace("FOLDER", repr(str(tmp_path / "checkpoints"))))
    assert result.returncode == 0, result.stderr


def test_of_a_machine_that_cannot_pin_the_memory_all_processes_print_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty

    def without_pinned(*size: int, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'")
        return empty(*size, **more)

    monkeypatch.setattr("tandem.training.checkpoint.snapshot.has_pinned_memory", lambda device: True)
    monkeypatch.setattr(torch, "empty", without_pinned)
    state = {"model": {"weight": torch.zeros(25_000_000)}}
    for error in on_processes(2, lambda process: Checkpoints(tmp_path, 1, process).prepare(state), catches=UserMistake):
        assert str(error).startswith("not enough memory: saves copy the state of the run to 0.1 GB of pinned")
        assert str(error).endswith("CUDA error: out of memory")
