"""Gradients by part of the batch: the same bits on any number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tandem.distributed.engines import ordered_sum as ordered_sum_module
from tandem.distributed.engines.ordered_sum import OrderedSum
from tests.processes import Process, on_processes, python


class Weights(nn.Module):
    """Parameters whose gradients are the numbers given to ``loss``. One is 0-d, and one is not part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.scale = nn.Parameter(torch.zeros(7, 31)), nn.Parameter(torch.tensor(0.0))
        self.unused = nn.Parameter(torch.zeros(3))

    def loss(self, numbers: Tensor) -> Tensor:
        return (self.matrix * numbers[1:].view(7, 31)).sum() + self.scale * numbers[0]


def gradients_of(part: int, call: int) -> Tensor:
    """Numbers over 40 powers of two, so that hardly any sum of a few is exact, even in fp64."""
    generator = torch.Generator().manual_seed(100 * part + call)
    exponents = torch.randint(-20, 21, (218,), generator=generator)
    return torch.randn(218, generator=generator) * 2.0**exponents


def added_in_the_order_that_the_module_promises(parts: list[Tensor]) -> Tensor:
    while len(parts) % 2 == 0:
        parts = [one + other for one, other in zip(parts[::2], parts[1::2], strict=True)]
    total, *others = parts
    for other in others:
        total = total + other
    return total


@pytest.mark.parametrize("bucket_bytes", [2**20, 1], ids=["one bucket", "a bucket per parameter"])
@pytest.mark.parametrize("n_calls", [1, 3])
@pytest.mark.parametrize(
    ("n_parts", "world_size"),
    [(n, world) for n in (1, 4, 6, 9, 12, 24) for world in (1, 2, 3, 4, 8) if n % world == 0],
)
def test_parts_are_added_in_one_order_on_any_number_of_ranks(
    n_parts: int, world_size: int, n_calls: int, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered_sum_module, "BUCKET_BYTES", bucket_bytes)
    monkeypatch.setattr(ordered_sum_module, "GATHERED_BYTES", limit := 500 * (1 + n_calls))
    here = n_parts // world_size

    def work(process: Process) -> list[Tensor]:
        model, results = Weights(), []
        parts = OrderedSum(list(model.parameters()), process.comm, here)
        for _ in range(2):  # a second update must not see anything of the first
            for call in range(n_calls):
                for index in range(here):
                    loss = model.loss(gradients_of(process.rank * here + index, call))
                    parts.backward(loss, index, retain_graph=False)
            parts.finish()
            results.append(torch.cat([parts.by_parameter[p].flatten() for p in model.parameters()]))
            parts.zero_()
        assert all(parameter.grad is None for parameter in model.parameters())
        most = max((world_size * sent.nbytes for sent in process.comm.sent), default=0)
        assert most <= limit, "what is gathered at a time"
        return results

    by_part = []
    for part in range(n_parts):
        total = gradients_of(part, 0)
        for call in range(1, n_calls):
            total = total + gradients_of(part, call)
        by_part.append(total)
    expected = added_in_the_order_that_the_module_promises(by_part).roll(-1)
    for first, second in on_processes(world_size, work):
        assert torch.equal(first[:-3], expected) and torch.equal(first, second)
        assert not first[-3:].any()  # the parameter that no loss reaches


def test_the_numbers_of_these_tests_show_the_order_of_a_sum() -> None:
    for dtype in (torch.float32, torch.float64):
        parts = [gradients_of(part, 0).to(dtype) for part in range(8)]
        assert not torch.equal(sum(parts[1:], start=parts[0]), sum(parts[-2::-1], start=parts[-1]))


def test_products_are_asked_to_round_alike_at_every_address_and_in_one_thread() -> None:
    """MKL reads MKL_CBWR at its first product, so that this is a process of its own."""
    script = """
import os
from tests.processes import single
with single(batch_parts=4):
    import torch
    assert os.environ["MKL_CBWR"] == "AUTO,STRICT"
    assert torch.get_num_threads() == 1 and torch.are_deterministic_algorithms_enabled()
"""
    finished = python(script, OMP_NUM_THREADS="2")  # which the backend overrules
    assert finished.returncode == 0, finished.stderr[-2000:]
