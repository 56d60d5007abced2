"""A state copied while training goes on."""

import threading

import pytest
import torch

from training.checkpoints import snapshot as snapshot_module
from training.checkpoints.snapshot import Snapshot


def taken(parts: dict, **options) -> Snapshot:
    snapshot = Snapshot(parts, **options)
    snapshot.finish()
    return snapshot


@pytest.mark.parametrize("is_finished", [True, False])
def test_values_are_copied_at_once_and_tensors_when_finished(is_finished):
    weight, rates = torch.zeros(3), [1.0]
    snapshot = Snapshot({"model": {"weight": weight, "settings": {"rates": rates}}})
    if is_finished:
        snapshot.finish()
    weight.add_(1)
    rates[0] = 2.0
    if not is_finished:
        snapshot.finish()
    assert snapshot.tensors["model"]["weight"].tolist() == [0 if is_finished else 1] * 3
    assert snapshot.values == {"model": {"settings": {"rates": [1.0]}}}


def test_wait_returns_when_the_copies_are_there():
    snapshot = Snapshot({"model": {"weight": torch.ones(2)}})
    timer = threading.Timer(0.1, snapshot.finish)
    timer.start()
    snapshot.wait()
    assert snapshot.tensors["model"]["weight"].tolist() == [1, 1]
    timer.join()


def test_a_copy_that_fails_lets_the_training_go_on():
    snapshot = Snapshot({"model": {"weight": torch.ones(2)}})
    snapshot._to_copy = [("no such part", "weight", torch.ones(2))]
    with pytest.raises(KeyError):
        snapshot.finish()
    snapshot.wait()


def test_memory_of_an_older_snapshot_is_taken_over_where_it_fits():
    first = taken({"model": {"same": torch.zeros(4), "other": torch.zeros(4), "gone": torch.zeros(1)}})
    addresses = {name: tensor.data_ptr() for name, tensor in first.tensors["model"].items()}
    parts = {"model": {"same": torch.ones(4), "other": torch.ones(5), "half": torch.ones(4).half()}}
    second = taken(parts, reuse=first)
    assert second.tensors["model"]["same"].data_ptr() == addresses["same"]
    assert second.tensors["model"]["same"].tolist() == [1, 1, 1, 1]
    assert second.tensors["model"]["other"].tolist() == [1] * 5
    assert second.tensors["model"].keys() == parts["model"].keys()


def test_many_tensors_share_few_pieces_of_memory_whose_sizes_are_powers_of_two(monkeypatch):
    """Each piece of pinned memory is rounded up to such a size."""
    monkeypatch.setattr(snapshot_module, "_SLAB_BYTES", 1 << 12)
    sizes = [0, 1, 5, 17, 700, 800, 1100, 1, 64, 333]  # 1100 numbers need more than one piece of the usual size
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
    tensors = {f"{size} {dtype} {i}": torch.arange(size).to(dtype) for i, size in enumerate(sizes) for dtype in dtypes}
    fetched = {f"fetched {name}": (lambda t=tensor: t) for name, tensor in tensors.items()}
    first = taken({"model": {**tensors, **fetched}})
    slabs = first._memory.slabs
    assert {len(slab) for slab in slabs} == {1 << 12, 1 << 13, 1 << 14}
    assert sum(map(len, slabs)) <= 1.25 * sum(tensor.nbytes for tensor in first.tensors["model"].values())
    again = taken({"model": {**tensors, **fetched}}, reuse=first)
    assert [slab.data_ptr() for slab in again._memory.slabs] == [slab.data_ptr() for slab in slabs]
    for name, tensor in again.tensors["model"].items():
        assert tensor.data_ptr() % 64 == 0 and torch.equal(tensor, tensors[name.removeprefix("fetched ")])


def test_what_a_function_returns_may_change_at_once():
    """A function may return the model's own tensor, or memory that the next function uses again."""
    buffer = torch.zeros(3)
    parts = {"model": {str(i): (lambda i=i: buffer.fill_(i)) for i in range(3)}}
    snapshot = Snapshot(parts)
    buffer.fill_(-1)
    snapshot.finish()
    assert [tensor.tolist() for tensor in snapshot.tensors["model"].values()] == [[i] * 3 for i in range(3)]


def test_sharded_tensors_are_fetched_one_by_one_in_order_on_every_process():
    order: list[str] = []

    def fetch(name: str) -> torch.Tensor:
        order.append(name)
        return torch.ones(2)

    parts = {"model": {"b": lambda: fetch("b"), "a": {"c": lambda: fetch("c")}}}
    assert set(taken(parts).tensors["model"]) == {"b", "a/c"}
    assert taken(parts, keep=False).tensors == {"model": {}}
    assert order == ["b", "c"] * 2
