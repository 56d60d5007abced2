"""Gradients in buckets against plain sums over ranks and backward calls."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tandem.distributed.collectives import Communicator
from tandem.distributed.engines import reducer as reducer_module
from tandem.distributed.engines.reducer import GradientReducer
from tests.processes import Process, Root, on_processes


class Model(nn.Module):
    """Linear maps of odd sizes; one that no loss reaches, one 0-d parameter. The same fp64 weights on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(3, 5), nn.Linear(7, 2), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.double()
        for parameter in self.parameters():
            parameter.data.copy_(torch.linspace(-0.8, 0.9, parameter.numel()).view_as(parameter))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh() * self.scale)


def loss_of(model: nn.Module, rank: int, call: int) -> Tensor:
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * call + rank))
    return model(x).square().mean()


def reducer_of(model: nn.Module, process: Process, **options: torch.dtype) -> GradientReducer:
    return GradientReducer(list(model.parameters()), process.comm, "toy", **options)


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.fixture(params=[2**20, 200, 1], ids=["one bucket", "a few buckets", "a bucket per parameter"])
def _buckets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer_module, "BUCKET_BYTES", request.param)


@pytest.fixture
def _a_bucket_per_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer_module, "BUCKET_BYTES", 1)


@pytest.mark.usefixtures("_buckets")
@pytest.mark.parametrize(
    "announced", [[], [True], [False], [False, True], [True, True], [True, False], [True, False, True],
                  [False, True, True, False]], ids=str
)  # fmt: skip
@pytest.mark.parametrize("world_size", [1, 3])
def test_any_backward_calls_announced_or_not_add_up(world_size: int, announced: list[bool]) -> None:
    def work(process: Process) -> list[list[Tensor]]:
        model, updates = Model(), []
        reducer = reducer_of(model, process)
        for _ in range(2):  # a second update must not see anything of the first
            for call, is_last in enumerate(announced):
                reducer.before_backward(is_last)
                loss_of(model, process.rank, call).backward()
            reducer.finish()
            updates.append(gradients_of(model))
            reducer.zero_()
        assert not any(gradient.any() for gradient in gradients_of(model))
        return updates

    model = Model()
    parameters = list(model.parameters())
    expected = [torch.zeros_like(p) for p in parameters]  # also where there is no gradient
    for rank, call in itertools.product(range(world_size), range(len(announced))):
        loss = loss_of(model, rank, call)
        torch._foreach_add_(expected, torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))
    for update in itertools.chain(*on_processes(world_size, work)):
        torch.testing.assert_close(update, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.usefixtures("_a_bucket_per_parameter")
def test_buckets_leave_in_one_order_during_the_last_micro_batch_as_soon_as_they_are_full() -> None:
    """Rank 1 uses another part of the model, and a parameter without a gradient holds nobody up for ever."""

    def work(process: Process) -> tuple[list[int], list[str], list[Tensor]]:
        model = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(3)])
        reducer = GradientReducer(list(model.parameters()), process.comm, "toy", micro_batches=2)
        sent = []
        for micro_batch in range(2):
            loss = model[2 * process.rank](torch.ones(1, 2)).sum()
            reducer.backward(loss, micro_batch, retain_graph=False)
            sent.append(len(process.comm.calls))
        reducer.finish()
        return sent, process.comm.calls, gradients_of(model)

    calls, total = [f"toy.gradients.{number}" for number in range(3)], torch.full((2, 2), 2.0)
    for rank, found in enumerate(on_processes(2, work)):
        # The last layer's gradient comes first. Rank 0 has none of it, so what it has cannot leave.
        assert found[:2] == ([0, rank], calls)
        torch.testing.assert_close(found[2], [total, torch.zeros(2, 2), total])


def test_gradients_keep_the_strides_of_their_parameters_and_stay_in_their_bucket() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 2, 3)).to(memory_format=torch.channels_last)
    model.register_parameter("sliced", nn.Parameter(torch.zeros(4, 6)[:, ::2]))  # not dense: no stride to keep
    assert model[0].weight.stride() != torch.empty(4, 3, 3, 3).stride()
    reducer = reducer_of(model, Process())
    for _ in range(2):
        reducer.before_backward(is_last=True)
        model(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)).sum().backward()
        reducer.finish()
    (flat,) = reducer.gradients
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert 0 <= parameter.grad.data_ptr() - flat.data_ptr() < flat.nbytes, name
        assert name == "sliced" or parameter.grad.stride() == parameter.stride(), name


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_update_calls_nothing_beside_its_backward_pass_but_one_copy_per_bucket(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many parameters there are: no zeros are written, and none is added to on its own."""
    monkeypatch.setattr(reducer_module, "SMALLEST_BUCKET_BYTES", 1)

    class Calls(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.of_operator: Counter[str] = Counter()

        def __torch_dispatch__(
            self, operator: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            self.of_operator[str(operator)] += 1
            return operator(*args, **(kwargs or {}))

    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    plain, ours = Calls(), Calls()
    loss = model(torch.ones(2, 8)).sum()
    with plain:
        loss.backward()
    model.zero_grad()
    reducer = GradientReducer(list(model.parameters()), Root(world_size), "toy")
    reducer.zero_()
    loss = model(torch.ones(2, 8)).sum()
    with ours:
        reducer.backward(loss, 0, retain_graph=False)
        reducer.finish()
        reducer.zero_()
    assert 1 < len(reducer.buckets) < 10
    assert ours.of_operator - plain.of_operator == Counter({"aten._foreach_copy_.default": len(reducer.buckets)})


@pytest.mark.parametrize(("numbers", "sizes"), [
    (2**18, [2**18]),  # 1 MiB
    (3 * 2**18, [2**18] * 3),
    (8 * 2**18, [2**18, *[3 * 2**18] * 2, 2**18]),
    (1000 * 2**18, [25 * 2**18] * 40),
])  # fmt: skip
def test_buckets_are_an_eighth_twice_three_eighths_and_an_eighth_of_the_model_but_one_to_twenty_five_mebibytes(
    numbers: int, sizes: list[int]
) -> None:
    """The last one, too, because nothing is computed while it is sent."""
    parameters = [nn.Parameter(torch.empty(2**18, device="meta")) for _ in range(numbers // 2**18)]
    reducer = GradientReducer(parameters, Communicator(), "toy")
    assert [bucket.numel() for bucket in reducer.gradients] == sizes


def test_buckets_hold_one_dtype_each_and_no_more_than_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer_module, "BUCKET_BYTES", 64)
    half, full = torch.float32, torch.float64
    sizes = [(4, half), (5, half), (1, half), (3, full), (2, half), (30, half), (1, half)]
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in sizes]
    buckets = GradientReducer(parameters, Communicator(), "toy").gradients
    # In reverse, each in units of 16 bytes; 30 x 4 bytes are more than a bucket and travel alone.
    expected = [(4, half), (32, half), (4, half), (4, full), (4 + 8 + 4, half)]
    assert [(len(bucket), bucket.dtype) for bucket in buckets] == expected


def test_a_layer_that_is_recomputed_twice_adds_up_and_with_reentrant_checkpoints_raises() -> None:
    def gradient(process: Process, *, use_reentrant: bool) -> Tensor:
        layer, x = Model().first, torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
        reducer = reducer_of(layer, process)
        reducer.before_backward(is_last=True)
        for _ in range(2):
            x = checkpoint(lambda x: layer(x)[:, :3], x, use_reentrant=use_reentrant)
        x.sum().backward()
        reducer.finish()
        return reducer.gradients[0]

    with pytest.raises(RuntimeError, match="use_reentrant=False"):  # a gradient would be lost
        on_processes(2, lambda process: gradient(process, use_reentrant=True))
    alone = gradient(Process(), use_reentrant=False)
    for total in on_processes(2, lambda process: gradient(process, use_reentrant=False)):
        torch.testing.assert_close(total, 2 * alone, rtol=1e-12, atol=0)
