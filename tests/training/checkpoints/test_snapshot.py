"""A state copied while training goes on."""

import pytest
import torch

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
