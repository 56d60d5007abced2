"""Checksums see every bit, and the check names the tensor and the ranks that differ."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed import TrainingStopped
from distributed.engines.replicas import check_replicas, checksums, digest

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def make(dtype: torch.dtype) -> Tensor:
    return (torch.arange(12).view(3, 4) % 2).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_every_entry_counts(dtype: torch.dtype) -> None:
    before = checksums({"x": make(dtype)})["x"]
    for entry in range(12):
        for bit in range(8 if dtype != torch.bool else 1):
            changed = make(dtype)
            changed.view(-1).view(torch.uint8)[entry * changed.element_size()] ^= 1 << bit
            assert checksums({"x": changed})["x"] != before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_layout_does_not_count(dtype: torch.dtype) -> None:
    tensor = make(dtype)
    assert checksums({"x": tensor.T.contiguous().T}) == checksums({"x": tensor})


def test_nan_zero_dimensions_empty_none_at_all_and_the_sign_of_zero() -> None:
    tensors = {"nan": torch.tensor([torch.nan]), "scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3)}
    assert checksums(tensors) == checksums({name: tensor.clone() for name, tensor in tensors.items()})
    assert checksums({}) == {}
    assert checksums({"x": torch.tensor([0.0])}) != checksums({"x": torch.tensor([-0.0])})


@pytest.mark.parametrize("n", [5, 1024, 1025, 5000])
def test_entries_that_changed_places_count(n: int) -> None:
    tensor = torch.randperm(n).float()
    before = checksums({"x": tensor})
    for one, other in [(0, 1), (0, n - 1), (1, n // 2), (n // 3, 2 * n // 3)]:
        swapped = tensor.clone()
        swapped[[one, other]] = tensor[[other, one]]
        assert checksums({"x": swapped}) != before


@pytest.mark.parametrize("name", ["0.weight", "0.bias", "1.weight", "1.running_mean", "1.num_batches_tracked"])
def test_the_tensor_and_the_ranks_that_differ_are_named(name: str) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    by_rank = [copy.deepcopy(model) for _ in range(4)]

    sent: list[Any] = []

    def gather_objects(own: Any) -> list[Any]:
        sent.append(own)
        sums = [checksums(dict(replica.state_dict())) for replica in by_rank]
        return [digest(of_rank) for of_rank in sums] if isinstance(own, str) else sums

    check_replicas(model, "before training", gather_objects)
    assert len(sent) == 1 and len(sent[0]) == 32, "equal copies exchange a digest, not a number for every tensor"
    for rank in (1, 3):
        by_rank[rank].state_dict()[name].view(-1)[0] += 1
    with pytest.raises(TrainingStopped) as raised:
        check_replicas(model, "before training", gather_objects)
    assert (
        str(raised.value) == f"before training, {name} on rank 1 is not what it is on rank 0 (differing ranks: [1, 3])"
    )
