"""What ranks exchange, in closed form; the ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed.collectives import (
    Alone,
    Communicator,
    broadcast_object,
    gather,
    gather_objects,
    sum_scalars,
    sum_tensor,
)

OnRanks = Callable[..., list[Any]]
CPU = torch.device("cpu")


def part_of(rank: int, sizes: list[int], width: int = 2) -> Tensor:
    """Rows of one rank; over all ranks together they count 0, 1, 2, ..."""
    whole = torch.arange(sum(sizes) * width, dtype=torch.float64).view(-1, width)
    return whole[sum(sizes[:rank]) : sum(sizes[: rank + 1])].clone().requires_grad_()


@pytest.mark.parametrize("sizes", [[2, 2], [3, 1], [0, 4], [1, 0, 5], [2, 3, 1, 4]], ids=str)
def test_gather_concatenates_by_rank_with_the_gradient_of_one_process(sizes: list[int], on_ranks: OnRanks) -> None:
    """Rank r's loss is sum(A_r * gathered ** 2), the update's their mean: its gradient is 2 mean(A_r) gathered."""
    world = len(sizes)
    factors = torch.randn(world, sum(sizes), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = torch.arange(sum(sizes) * 2, dtype=torch.float64).view(-1, 2)

    def work(comm: Communicator) -> Tensor:
        own = part_of(comm.rank, sizes)
        gathered = gather(own, comm)
        assert torch.equal(gathered, whole)
        (factors[comm.rank] * gathered**2).sum().backward()
        assert own.grad is not None
        return own.grad / world  # every engine averages over the processes

    expected = 2 * factors.mean(dim=0) * whole
    torch.testing.assert_close(torch.cat(on_ranks(world, work)), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("sizes", [[2, 2], [0, 4], [1, 0, 5]], ids=str)
def test_with_sizes_that_are_known_only_the_rows_are_exchanged(sizes: list[int], on_ranks: OnRanks) -> None:
    def work(comm: Any) -> tuple[Tensor, Tensor, int, int]:
        own = part_of(comm.rank, sizes)
        asked = gather(own, comm)
        calls = len(comm.calls)
        told = gather(own, comm, sizes)
        return asked, told, calls, len(comm.calls) - calls

    for asked, told, calls_asked, calls_told in on_ranks(len(sizes), work):
        assert torch.equal(asked, told)
        assert calls_told == calls_asked - 1


def test_contrastive_gradient_through_two_gathers_equals_one_process(on_ranks: OnRanks) -> None:
    """Softmax over the global batch: both towers are gathered, every row meets every other."""
    sizes, generator = [3, 1, 4], torch.Generator().manual_seed(1)
    rows = torch.randn(8, 5, dtype=torch.float64, generator=generator)
    weight = torch.randn(5, 3, dtype=torch.float64, generator=generator)

    def loss_of(a: Tensor, b: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(a @ b.T, torch.arange(8))

    def work(comm: Communicator) -> Tensor:
        w, own = weight.clone().requires_grad_(), rows[sum(sizes[: comm.rank]) : sum(sizes[: comm.rank + 1])]
        loss_of(gather(own @ w, comm), gather(own.flip(-1) @ w, comm)).backward()
        assert w.grad is not None
        return w.grad

    w = weight.clone().requires_grad_()
    loss_of(rows @ w, rows.flip(-1) @ w).backward()
    averaged = torch.stack(on_ranks(3, work)).mean(dim=0)
    torch.testing.assert_close(averaged, w.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("sizes", [[2], [2, 2], [3, 0, 1], [1, 0, 5, 2]], ids=str)
def test_what_is_shifted_comes_from_the_previous_rank_and_is_home_after_one_round(
    sizes: list[int], on_ranks: OnRanks
) -> None:
    world = len(sizes)

    def work(comm: Communicator) -> Tensor:
        visiting = part_of(comm.rank, sizes).detach()
        for step in range(1, world + 1):
            came_from = (comm.rank - step) % world
            visiting = comm.shift(visiting, sizes[came_from])
            assert torch.equal(visiting, part_of(came_from, sizes))
        return visiting

    assert torch.equal(torch.cat(on_ranks(world, work)), torch.arange(sum(sizes) * 2.0).view(-1, 2).double())
    alone = part_of(0, [3])
    assert Alone().shift(alone, 3) is alone and gather(alone, Alone()) is alone


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        (torch.float32, [0.5, 0.25, 8.0], 8.75),
        (torch.float64, [0.1, 0.2, 0.3], 0.1 + 0.2 + 0.3),
        (torch.int64, [2**40, 1, 1], 2**40 + 2),
        (torch.bfloat16, [256.0, 1.0, 1.0], 258.0),  # of 8 bits: 256 + 1 is 256, and 256 + 1 + 1 too
        (torch.float16, [2048.0, 1.0, 1.0], 2050.0),  # of 11 bits
        (torch.bool, [True, True, False], 2),
    ],
    ids=str,
)
def test_sum_of_a_tensor_is_exact_and_leaves_the_argument_alone(
    dtype: torch.dtype, values: list[Any], expected: Any, on_ranks: OnRanks
) -> None:
    def work(comm: Communicator) -> Tensor:
        own = torch.tensor([[values[comm.rank]] * 3, [0] * 3], dtype=dtype).T  # not contiguous
        total = sum_tensor(own, comm)
        assert own.tolist() == [[values[comm.rank], 0]] * 3
        return total

    for total in on_ranks(3, work):
        assert total.tolist() == [[expected, 0]] * 3
        assert total.dtype == (torch.int64 if dtype == torch.bool else dtype)


def test_scalars_of_all_kinds_travel_together_in_fp64(on_ranks: OnRanks) -> None:
    def work(comm: Any) -> Any:
        values = {"int": 2**40 + comm.rank, "float": 0.1, "tensor": torch.tensor(1.5), "flag": comm.rank == 1}
        return sum_scalars(values, comm, CPU), comm.calls

    for totals, calls in on_ranks(3, work):
        assert totals == {"int": 3 * 2**40 + 3, "float": 0.1 + 0.1 + 0.1, "tensor": 4.5, "flag": 1.0}
        assert len(calls) == 1
    assert sum_scalars({}, Alone(), CPU) == {}


def test_objects_of_any_length_arrive_by_rank(on_ranks: OnRanks) -> None:
    objects = [None, {"path": "bilder/größe.png", "n": [1, 2.5, True]}, "x" * 1000]
    assert on_ranks(3, lambda comm: gather_objects(objects[comm.rank], comm, CPU)) == [objects] * 3


def test_the_root_sends_an_object_whose_bytes_do_not_grow_with_the_processes(on_ranks: OnRanks) -> None:
    value = {"path": "bilder/größe.png", "n": [1, 2.5, None]}

    def work(comm: Any) -> Any:
        return broadcast_object(value if comm.rank == 0 else "not the root's", comm, CPU), comm.calls

    assert on_ranks(3, work) == [(value, ["sum_scalars", "sum_of_bytes"])] * 3
    assert broadcast_object(value, Alone(), CPU) == value


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("sizes", [[3, 0, 0, 0], [0, 0, 5, 0], [0, 1, 0, 0, 1, 0], [0, 0, 0]], ids=str)
def test_rows_that_few_processes_have_arrive_bit_for_bit_without_padding_those_of_the_others(
    sizes: list[int], dtype: torch.dtype, on_ranks: OnRanks
) -> None:
    """As the samples of a preview, of which the first processes have one each."""
    bits = torch.randint(0, 256, (sum(sizes) * 3 * dtype.itemsize,), dtype=torch.uint8)
    whole = (bits % 2 if dtype == torch.bool else bits).view(dtype).view(-1, 3)  # NaN and -0 among them

    def work(comm: Any) -> Any:
        own = whole[sum(sizes[: comm.rank]) : sum(sizes[: comm.rank + 1])]
        return gather(own, comm).view(torch.uint8), comm.calls

    for rows, calls in on_ranks(len(sizes), work):
        assert torch.equal(rows, whole.view(torch.uint8))
        assert calls == ["all_gather", *(["sum_of_bytes"] if sum(sizes) else [])]
