"""Gradients in buckets against plain sums over ranks and backward calls; the ranks are threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distributed.collectives import Alone, Communicator
from distributed.engines import reducer as reducer_module
from distributed.engines.parts import GradientParts
from distributed.engines.reducer import GradientReducer

OnRanks = Callable[..., list[Any]]


def filled_by_position(module: nn.Module) -> nn.Module:
    """The same fp64 weights on every rank; ranks are threads and would share one random generator."""
    module.double()
    for parameter in module.parameters():
        parameter.data.copy_(torch.linspace(-0.8, 0.9, parameter.numel()).view_as(parameter))
    return module


class Model(nn.Module):
    """Linear maps of odd sizes; one that no loss reaches, one 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(3, 5), nn.Linear(7, 2), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(0.7))
        filled_by_position(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh() * self.scale)


def loss_of(model: nn.Module, rank: int, call: int) -> Tensor:
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * call + rank))
    return model(x).square().mean()


def plain_sum(world_size: int, n_calls: int) -> list[Tensor]:
    """Sum over ranks and calls of the gradients of each parameter; zero where there is none."""
    model = Model()
    parameters = list(model.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for rank, call in itertools.product(range(world_size), range(n_calls)):
        gradients = torch.autograd.grad(
            loss_of(model, rank, call), parameters, allow_unused=True, materialize_grads=True
        )
        torch._foreach_add_(total, gradients)
    return total


@pytest.fixture(params=["one bucket", "a bucket per parameter", "a few buckets"])
def _buckets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"one bucket": 2**20, "a bucket per parameter": 1, "a few buckets": 200}
    monkeypatch.setattr(reducer_module, "BUCKET_BYTES", sizes[request.param])


@pytest.mark.usefixtures("_buckets")
@pytest.mark.parametrize(
    "armed", [[], [True], [False], [False, True], [True, True], [True, False], [False, False, False],
              [True, False, True], [False, True, True, False]], ids=str
)  # fmt: skip
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_backward_calls_announced_or_not_add_up(world_size: int, armed: list[bool], on_ranks: OnRanks) -> None:
    def work(comm: Communicator) -> list[list[Tensor]]:
        model, updates = Model(), []
        reducer = GradientReducer(list(model.parameters()), comm, "toy")
        for _ in range(2):  # a second update must not see anything of the first
            for call, is_last in enumerate(armed):
                reducer.before_backward(is_last)
                loss_of(model, comm.rank, call).backward()
            reducer.finish()
            updates.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            reducer.zero_()
        assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
        return updates

    ranks = [work(Alone())] if world_size == 1 else on_ranks(world_size, work)
    for update in itertools.chain(*ranks):
        torch.testing.assert_close(update, plain_sum(world_size, len(armed)), rtol=1e-12, atol=1e-15)


def test_full_buckets_leave_during_the_announced_pass_and_none_during_others(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reducer_module, "BUCKET_BYTES", 1)

    def work(comm: Any) -> tuple[int, int, list[str]]:
        model = filled_by_position(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)))
        reducer = GradientReducer(list(model.parameters()), comm, "toy")
        reducer.before_backward(is_last=False)
        loss_of(model, comm.rank, 0).backward()
        unannounced = len(comm.calls)
        reducer.before_backward(is_last=True)
        loss_of(model, comm.rank, 1).backward()
        announced = len(comm.calls)
        reducer.finish()
        return unannounced, announced, comm.calls

    assert on_ranks(2, work) == [(0, 4, [f"toy.gradients.{i}" for i in range(4)])] * 2


def test_a_parameter_without_gradient_holds_nobody_up(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets leave in one order on all ranks, though rank 1 uses another part of the model."""
    monkeypatch.setattr(reducer_module, "BUCKET_BYTES", 1)

    def work(comm: Any) -> tuple[list[str], list[Tensor]]:
        model = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(3)])
        reducer = GradientReducer(list(model.parameters()), comm, "toy")
        reducer.before_backward(is_last=True)
        model[2 * comm.rank](torch.ones(1, 2)).sum().backward()
        reducer.finish()
        return comm.calls, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for calls, gradients in on_ranks(2, work):
        assert calls == ["toy.gradients.0", "toy.gradients.1", "toy.gradients.2"]
        assert [gradient.tolist() for gradient in gradients] == [[[1, 1], [1, 1]], [[0, 0], [0, 0]], [[1, 1], [1, 1]]]


def test_gradients_keep_the_strides_of_their_parameters_and_stay_in_their_bucket() -> None:
    conv = nn.Conv2d(3, 4, 3)
    model = nn.Sequential(conv, nn.ConvTranspose2d(4, 2, 3)).to(memory_format=torch.channels_last)
    model.register_parameter("sliced", nn.Parameter(torch.zeros(4, 6)[:, ::2]))  # not dense: no stride to keep
    reducer = GradientReducer(list(model.parameters()), Alone(), "toy")
    for _ in range(2):
        reducer.before_backward(is_last=True)
        model(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)).sum().backward()
        reducer.finish()
    (flat,) = reducer.gradients
    first, last = flat.data_ptr(), flat.data_ptr() + flat.numel() * flat.element_size()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert first <= parameter.grad.data_ptr() < last, name
        if name != "sliced":
            assert parameter.grad.stride() == parameter.stride(), name
    assert conv.weight.stride() != torch.empty(4, 3, 3, 3).stride()  # it is channels_last indeed


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_is_sent_may_be_rounded_and_alone_nothing_is_sent(world_size: int, on_ranks: OnRanks) -> None:
    def work(comm: Any) -> list[Tensor]:
        model = Model().float()
        reducer = GradientReducer(list(model.parameters()), comm, "toy", sent_as=torch.bfloat16)
        for _ in range(2):
            reducer.zero_()
            reducer.before_backward(is_last=True)
            model(torch.ones(4, 3) * (comm.rank + 1)).square().mean().backward()
            own = [gradient.clone() for gradient in reducer.gradients]
            reducer.finish()
        if comm.world_size > 1:
            assert set(comm.dtypes) == {torch.bfloat16}
        return [own[0], reducer.gradients[0]]

    if world_size == 1:
        own, total = work(Alone())
        assert torch.equal(own, total)
        return
    ranks = on_ranks(world_size, work)
    exact = sum(own for own, _ in ranks)
    for _, total in ranks:
        assert torch.equal(total, ranks[0][1]) and total.dtype == torch.float32
        # bf16 has 8 bits: each of the numbers, and each sum of two of them, is rounded by 2^-9 at most.
        bound = 2 * world_size * 2**-9 * sum(own.abs() for own, _ in ranks)
        assert (total - exact).abs().le(bound).all() and not torch.equal(total, exact)


@pytest.mark.parametrize(("numbers", "sizes"), [
    (2**18, [2**18]),  # 1 MiB
    (3 * 2**18, [2**18] * 3),
    (8 * 2**18, [2**18, *[2 * 2**18] * 3, 2**18]),
    (1000 * 2**18, [25 * 2**18] * 40),
])  # fmt: skip
def test_buckets_are_an_eighth_quarters_and_an_eighth_of_the_model_but_one_to_twenty_five_mebibytes(
    numbers: int, sizes: list[int]
) -> None:
    """The last one, too, because nothing is computed while it is sent."""
    parameters = [nn.Parameter(torch.empty(2**18, device="meta")) for _ in range(numbers // 2**18)]
    reducer = GradientReducer(parameters, Alone(), "toy")
    assert [bucket.numel() for bucket in reducer.gradients] == sizes


def test_buckets_hold_one_dtype_each_and_no_more_than_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer_module, "BUCKET_BYTES", 64)
    sizes: list[tuple[int, torch.dtype]] = [
        (4, torch.float32), (5, torch.float32), (1, torch.float32), (3, torch.float64), (2, torch.float32),
        (30, torch.float32), (1, torch.float32),
    ]  # fmt: skip
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in sizes]
    buckets = GradientReducer(parameters, Alone(), "toy").gradients
    # In reverse, each in units of 16 bytes; 30 x 4 bytes are more than a bucket and travel alone.
    assert [(len(b), b.dtype) for b in buckets] == [
        (4, torch.float32), (32, torch.float32), (4, torch.float32), (4, torch.float64), (4 + 8 + 4, torch.float32)
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_each_gradient_begins_at_a_multiple_of_16_bytes(dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((4, 5), (3,), (), (7, 3), (1,))]
    reducer, parts = GradientReducer(parameters, Alone(), "toy"), GradientParts(parameters, Alone(), 3)
    gradients = [*(p.grad for p in parameters), *itertools.chain.from_iterable(parts._views.values())]
    assert len(gradients) == 5 + 5 * 3
    for gradient in gradients:
        assert gradient is not None and gradient.data_ptr() % 16 == 0
        gradient.fill_(1)
    n = sum(parameter.numel() for parameter in parameters)
    assert [int(flat.sum()) for flat in (*reducer.gradients, *parts.gradients)] == [n, n]  # what lies between stays 0


def test_a_gradient_computed_twice_in_one_pass_raises_instead_of_being_lost(on_ranks: OnRanks) -> None:
    def work(comm: Communicator) -> None:
        shared = nn.Linear(3, 3)
        reducer = GradientReducer(list(shared.parameters()), comm, "toy")
        x = torch.randn(2, 3, requires_grad=True)
        for _ in range(2):
            x = checkpoint(shared, x, use_reentrant=True)
        reducer.before_backward(is_last=True)
        x.sum().backward()

    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        on_ranks(2, work)


def test_non_reentrant_checkpointing_adds_up(on_ranks: OnRanks) -> None:
    def gradient(comm: Communicator) -> Tensor:
        shared, x = nn.Linear(3, 3), torch.ones(2, 3, dtype=torch.float64)
        filled_by_position(shared)
        reducer = GradientReducer(list(shared.parameters()), comm, "toy")
        reducer.before_backward(is_last=True)
        checkpoint(shared, checkpoint(shared, x, use_reentrant=False), use_reentrant=False).sum().backward()
        reducer.finish()
        assert shared.weight.grad is not None
        return shared.weight.grad

    alone = gradient(Alone())
    for summed in on_ranks(2, gradient):
        torch.testing.assert_close(summed, 2 * alone, rtol=1e-12, atol=0)
