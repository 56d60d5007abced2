"""Gradients by part of the batch: the same bits on any number of ranks. The ranks are threads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed.collectives import Alone, Communicator
from distributed.engines import parts as parts_module
from distributed.engines.optimizer_state import unfuse
from distributed.engines.parts import GradientParts

OnRanks = Callable[..., list[Any]]
ROOT = Path(__file__).resolve().parents[3]
ONE = torch.tensor(1.0)


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


def summed(comm: Communicator, n_parts: int, n_calls: int = 1) -> list[Tensor]:
    """What ``finish`` leaves on one of ``comm.world_size`` ranks, twice in a row; two loops over the parts."""
    model, here = Weights(), n_parts // comm.world_size
    parts = GradientParts(list(model.parameters()), comm, here)
    results = []
    for _ in range(2):  # a second update must not see anything of the first
        for call in range(n_calls):
            for index in range(here):
                loss = model.loss(gradients_of(comm.rank * here + index, call))
                parts.backward(loss, ONE, index, retain_graph=False)
        parts.finish()
        results.append(torch.cat([parts.by_parameter[p].flatten() for p in model.parameters()]))
        parts.zero_()
    assert all(parameter.grad is None for parameter in model.parameters())
    return results


@pytest.fixture(params=["one bucket", "a bucket per parameter"])
def _buckets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "BUCKET_BYTES", {"one bucket": 2**20, "a bucket per parameter": 1}[request.param])


@pytest.mark.usefixtures("_buckets")
@pytest.mark.parametrize("n_calls", [1, 3])
@pytest.mark.parametrize(
    ("n_parts", "world_size"),
    [(n, world) for n in (1, 2, 4, 6, 8, 9, 12, 24) for world in (2, 3, 4, 6, 8) if n % world == 0],
)
def test_any_number_of_ranks_gives_the_bits_of_one(
    n_parts: int, world_size: int, n_calls: int, on_ranks: OnRanks
) -> None:
    expected = summed(Alone(), n_parts, n_calls)
    for ours in on_ranks(world_size, lambda comm: summed(comm, n_parts, n_calls)):
        assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])


@pytest.mark.parametrize(("n_parts", "world_size"), [(8, 4), (12, 2), (9, 3)])
def test_what_a_process_gathers_at_a_time_is_bounded_and_the_bits_stay(
    n_parts: int, world_size: int, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_module, "GATHERED_BYTES", 500)
    expected = summed(Alone(), n_parts)
    gathered: list[int] = []

    def work(comm: Communicator) -> list[Tensor]:
        all_gather = comm.all_gather

        def counted(tensor: Tensor) -> list[Tensor]:
            found = all_gather(tensor)
            gathered.append(sum(part.nbytes for part in found))
            return found

        comm.all_gather = counted  # type: ignore[method-assign]
        return summed(comm, n_parts)

    for ours in on_ranks(world_size, work):
        assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])
    assert 400 < max(gathered) <= 500


def test_the_numbers_of_these_tests_show_the_order_of_a_sum() -> None:
    for dtype in (torch.float32, torch.float64):
        parts = [gradients_of(part, 0).to(dtype) for part in range(8)]
        assert not torch.equal(sum(parts[1:], start=parts[0]), sum(parts[-2::-1], start=parts[-1]))


@pytest.mark.parametrize("n_parts", [1, 5, 8])
def test_the_sum_is_the_sum(n_parts: int) -> None:
    first, second = summed(Alone(), n_parts, n_calls=2)
    assert torch.equal(first, second)
    terms = torch.stack([gradients_of(part, call) for part in range(n_parts) for call in range(2)]).double().roll(-1, 1)
    assert ((first[:-3].double() - terms.sum(0)).abs() <= 1e-6 * terms.abs().sum(0)).all()
    assert not first[-3:].any()  # the parameter that no loss reaches


def test_a_nan_of_one_rank_is_everybodys(on_ranks: OnRanks) -> None:
    def work(comm: Communicator) -> bool:
        model = Weights()
        parts = GradientParts(list(model.parameters()), comm, 2)
        numbers = gradients_of(comm.rank, 0)
        numbers[5] = torch.nan if comm.rank == 1 else 1.0
        parts.backward(model.loss(numbers), ONE, None, retain_graph=False)
        parts.finish()
        return bool(parts.by_parameter[model.matrix].isnan().sum() == 1)

    assert on_ranks(2, work) == [True, True]


@pytest.mark.parametrize("amsgrad", [False, True])
def test_an_unfused_adam_steps_alike_however_parameters_are_cut(amsgrad: bool) -> None:
    """ZeRO steps slices of a flat buffer. The fused kernel on AVX-512 fails this."""
    n = 4099
    start, grads = torch.randn(n), [torch.randn(n) * torch.rand(n) ** 8 for _ in range(3)]

    def stepped(offset: int, *sizes: int) -> Tensor:
        flat = torch.empty(n + 64)[offset : offset + n].copy_(start)
        parameters = [nn.Parameter(piece) for piece in flat.split([*sizes, n - sum(sizes)])]
        optimizer = torch.optim.Adam(parameters, lr=1e-3, weight_decay=0.1, amsgrad=amsgrad, fused=True)
        unfuse(optimizer)
        for grad in grads:
            for parameter, piece in zip(parameters, grad.split([*sizes, n - sum(sizes)]), strict=True):
                parameter.grad = piece.clone()
            optimizer.step()
        state = [torch.cat([optimizer.state[p][slot] for p in parameters]) for slot in ("exp_avg", "exp_avg_sq")]
        return torch.cat([flat, *state])

    whole = stepped(0)
    for cut in [(7,) * 585, (1, 3, 13, 2000), (15,) * 273]:
        assert torch.equal(stepped(3, *cut), whole)


def test_products_round_alike_at_every_address() -> None:
    """It runs in a process of its own, because MKL reads MKL_CBWR at its first product."""
    script = """
import sys; sys.path[:0] = ["tests/distributed"]
import distributed
from conftest import parsed
backend = distributed.from_args(parsed("--batch_parts", "4", "--distributed_backend", "single"))
import torch
from torch.nn import functional as F
def at(offset, tensor):
    return torch.empty(tensor.numel() + 16)[offset:offset + tensor.numel()].view(tensor.shape).copy_(tensor)
torch.manual_seed(0)
with backend:
    for trial in range(100):
        rows, inner, columns = torch.randint(1, 130, (3,)).tolist()
        rows, columns = 1 if trial % 3 == 0 else rows, 1 if trial % 5 == 0 else columns
        a, weight = torch.randn(rows, inner), torch.randn(columns, inner)
        for offset in (1, 3, 4):
            assert torch.equal(F.linear(at(offset, a), at(offset, weight)), F.linear(a, weight)), (trial, offset)
assert torch.get_num_threads() == 1 and torch.are_deterministic_algorithms_enabled()
"""
    finished = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-2000:]
