"""Checksums see every bit, and the check names the tensor and the ranks that differ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tandem.distributed import Backend, TrainingStopped
from tandem.distributed.engines.replicas import check_replicas, checksums
from tests.processes import Process, on_backends, on_processes

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def checksum(tensor: Tensor) -> int:
    return checksums({"x": tensor})["x"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_every_entry_counts_and_the_layout_in_memory_does_not(dtype: torch.dtype) -> None:
    tensor = (torch.arange(12).view(3, 4) % 2).to(dtype)
    before = checksum(tensor)
    assert checksum(tensor.T.contiguous().T) == before
    for byte in range(12 * tensor.element_size()):
        for bit in range(8 if dtype != torch.bool else 1):
            changed = tensor.clone()
            changed.view(-1).view(torch.uint8)[byte] ^= 1 << bit
            assert checksum(changed) != before


def test_nan_zero_dimensions_empty_none_at_all_and_the_sign_of_zero() -> None:
    for tensor in (torch.tensor([torch.nan]), torch.tensor(1.5), torch.zeros(0, 3)):
        assert checksum(tensor) == checksum(tensor.clone())
    assert checksums({}) == {}
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


@pytest.mark.parametrize("n", [5, 1024, 1025, 5000])
def test_entries_that_changed_places_count(n: int) -> None:
    tensor = torch.randperm(n).float()
    for one, other in [(0, 1), (0, n - 1), (1, n // 2), (n // 3, 2 * n // 3), (1, min(3 * 1024, n - 1))]:
        swapped = tensor.clone()
        swapped[[one, other]] = tensor[[other, one]]
        assert checksum(swapped) != checksum(tensor)


@pytest.mark.parametrize("name", ["0.weight", "0.bias", "1.weight", "1.running_mean", "1.num_batches_tracked"])
def test_the_tensor_and_the_ranks_that_differ_are_named_and_equal_copies_exchange_a_few_bytes(name: str) -> None:
    def work(process: Process) -> str:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        for tensor in model.state_dict().values():
            tensor.fill_(1)
        check_replicas(model, "before training", process.gather_objects)
        assert sum(sent.nbytes for sent in process.comm.sent) < 60
        if process.rank in (1, 3):
            model.state_dict()[name].view(-1)[0] += 1
        with pytest.raises(TrainingStopped) as raised:
            check_replicas(model, "after update 7", process.gather_objects)
        return str(raised.value)

    for said in on_processes(4, work):
        assert said.startswith(f"after update 7, {name} on rank 1 ") and "[1, 3]" in said


def test_copies_are_compared_as_often_as_was_asked() -> None:
    def work(backend: Backend) -> str:
        model = nn.Linear(2, 2)
        nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
        engine = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for update in range(1, 7):
            if update == 3:
                model.bias.data += backend.processes.rank
            try:
                engine.step()
            except TrainingStopped as stopped:
                return f"{update}: {stopped}"
        return "never"

    for every, update in ((2, 4), (3, 3), (5, 5)):
        for said in on_backends(2, work, check_replicas_every_n_steps=every):
            assert said.startswith(f"{update}: ") and "bias" in said
    assert on_backends(2, work, check_replicas_every_n_steps=0) == ["never"] * 2
