"""What ranks exchange, in closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.distributed.collectives import Communicator
from tests.processes import Process, Root, on_processes


def part_of(rank: int, sizes: list[int], whole: Tensor) -> Tensor:
    """Rows of one rank, as a leaf."""
    return whole[sum(sizes[:rank]) : sum(sizes[: rank + 1])].clone()


def counted(sizes: list[int]) -> Tensor:
    """Rows that count 0, 1, 2, ..."""
    return torch.arange(sum(sizes) * 2, dtype=torch.float64).view(-1, 2)


@pytest.mark.parametrize("is_told", [False, True], ids=["sizes exchanged", "sizes known"])
@pytest.mark.parametrize("sizes", [[2], [2, 2], [3, 1], [0, 4], [1, 0, 5], [2, 3, 1, 4]], ids=str)
def test_gather_concatenates_by_rank_with_the_gradient_of_one_process(sizes: list[int], is_told: bool) -> None:
    """Rank r's loss is sum(A_r * gathered ** 2), the update's their mean: its gradient is 2 mean(A_r) gathered."""
    world, whole = len(sizes), counted(sizes)
    factors = torch.randn(world, *whole.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def work(process: Process) -> Tensor:
        own = part_of(process.rank, sizes, whole).requires_grad_()
        gathered = process.gather(own, sizes if is_told else None)
        assert torch.equal(gathered, whole)
        assert len(process.comm.calls) == (0 if world == 1 else 1 if is_told else 2)
        (factors[process.rank] * gathered**2).sum().backward()
        assert own.grad is not None
        return own.grad / world  # every engine averages over the processes

    expected = 2 * factors.mean(dim=0) * whole
    torch.testing.assert_close(torch.cat(on_processes(world, work)), expected, rtol=1e-12, atol=0)


# Of 8 bits, 256 + 1 + 1 is 256, and of 11 bits 2048 + 1 + 1 is 2048.
@pytest.mark.parametrize(("dtype", "values", "expected"), [
    (torch.float64, [0.1, 0.2, 0.3], 0.1 + 0.2 + 0.3), (torch.int64, [2**40, 1, 1], 2**40 + 2),
    (torch.bfloat16, [256.0, 1.0, 1.0], 258.0), (torch.float16, [2048.0, 1.0, 1.0], 2050.0),
    (torch.bool, [True, True, False], 2),
], ids=str)  # fmt: skip
def test_sum_of_a_tensor_is_exact_and_leaves_the_argument_alone(
    dtype: torch.dtype, values: list[Any], expected: Any
) -> None:
    def work(process: Process) -> Tensor:
        own = torch.tensor([[values[process.rank]] * 3, [0] * 3], dtype=dtype).T  # not contiguous
        total = process.sum(own)
        assert own.tolist() == [[values[process.rank], 0]] * 3
        return total

    for total in on_processes(3, work):
        assert total.tolist() == [[expected, 0]] * 3
        assert total.dtype == (torch.int64 if dtype == torch.bool else dtype)
    alone = torch.tensor([values[0]], dtype=dtype)
    assert Communicator().sum_tensor(alone).data_ptr() != alone.data_ptr()


def test_objects_of_any_length_arrive_and_bytes_of_the_roots_do_not_grow_with_the_processes() -> None:
    objects = [None, {"path": "bilder/größe.png", "n": [1, 2.5, True]}, "x" * 1000]

    def work(process: Process) -> Any:
        return process.gather_objects(objects[process.rank]), process.broadcast_object(objects[process.rank - 2])

    assert on_processes(3, work) == [(objects, objects[-2])] * 3
    assert Process().gather_objects(objects) == [objects] and Process().broadcast_object(objects) == objects
    assert Process(Root(512)).broadcast_object(objects) == objects


def test_objects_and_numbers_do_not_pass_through_the_device_whose_work_the_host_would_wait_for() -> None:
    def work(process: Process) -> list[Any]:
        process.device = torch.device("meta")  # holds no numbers
        received = [process.gather_objects(process.rank), process.broadcast_object("root"), process.sum({"one": 1})]
        with process.raise_on_all_ranks():
            return received

    assert on_processes(2, work) == [[[0, 1], "root", {"one": 2.0}]] * 2


def test_numbers_of_every_kind_are_summed_in_fp64_in_their_order() -> None:
    def work(process: Process) -> dict[str, float]:
        rounded = torch.tensor(0.1, requires_grad=True)
        values = {"int": 2**53 - 1, "tensor": rounded, "bool": torch.tensor(True), "x": 0.1}
        found: dict[str, float] = process.sum(values)
        return found

    for found in on_processes(2, work):
        assert list(found) == ["int", "tensor", "bool", "x"]
        assert list(found.values()) == [2.0**54 - 2, 2 * float(torch.tensor(0.1)), 2.0, 0.2]
