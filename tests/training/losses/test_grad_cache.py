"""An update with cached embeddings against the whole batch in one graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.distributed import Backend
from tandem.flops import FlopCounter
from tandem.io.exits import Failed
from tandem.training.losses.contrastive import KINDS, Contrastive, ContrastiveResult
from tandem.training.losses.grad_cache import grad_cache_losses
from tests.processes import on_backends, single
from tests.training.losses.test_contrastive import by_the_formula

pytestmark = pytest.mark.usefixtures("no_gpu")

BATCH, HEADS, DIM = 12, 2, 4


class Output(NamedTuple):
    audio: Tensor
    text: Tensor
    scale: Tensor
    bias: Tensor


class Towers(nn.Module):
    """Two towers whose inputs the noise masks, and what reaches their temperature."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.audio = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, HEADS * DIM))
        self.text = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, HEADS * DIM))
        self.logit_scale, self.bias = nn.Parameter(torch.tensor([0.3, 1.2])), nn.Parameter(torch.tensor([-1.0, -3.0]))
        self.to(dtype)
        self.arrived: list[list[float]] = []
        self.calls = 0

    def forward(self, sounds: Tensor, words: Tensor, noise: Tensor) -> Output:
        self.calls += 1
        audio, text = self.audio(sounds * (noise > 0.25)), self.text(words)
        scale = self.logit_scale.exp()
        if scale.requires_grad:
            scale.register_hook(lambda gradient: self.arrived.append(gradient.tolist()))
        audio, text = (
            F.normalize(x.unflatten(-1, (HEADS, DIM)).to(self.logit_scale.dtype), dim=-1) for x in (audio, text)
        )
        return Output(audio, text, scale, self.bias)


def make_batch(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    sounds, words, noise = (torch.rand(BATCH, width, generator=generator).to(dtype) for width in (7, 5, 7))
    return {"sounds": sounds, "words": words, "noise": noise, "caption_ids": torch.arange(BATCH) // 2 * 2}


def inputs(micro: Any) -> dict[str, Tensor]:
    return {name: micro[name] for name in ("sounds", "words", "noise")}


def in_one_graph(kind: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the whole batch and its gradients by autograd."""
    model, batch = Towers(dtype), make_batch(dtype)
    loss = by_the_formula(kind, *model(**inputs(batch)), batch["caption_ids"])
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True, allow_unused=True)
    return loss.detach(), dict(zip(names, gradients, strict=True))


@pytest.fixture(params=[{"grad_accum_steps": n} for n in (1, 2, 4, 12)] + [{"batch_parts": 4}], ids=str)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """With so many micro-batches."""
    monkeypatch.setenv("MKL_CBWR", "AUTO,STRICT")  # --batch_parts would leave it behind
    with single(batch_size=BATCH, **request.param) as backend:
        yield backend
    torch.use_deterministic_algorithms(False)


def backward(engine: Any, processes: Any, contrastive: Contrastive, batch: dict[str, Tensor]) -> ContrastiveResult:
    """The backward passes of an update, as the script makes them."""
    for loss, result in grad_cache_losses(engine, processes, contrastive, batch, inputs):  # noqa: B007
        engine.backward(loss, items=1, total=1)
    return result


def update(backend: Backend, model: Towers, kind: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """The result, and the gradients as the optimizer got them: the momentum of a first step."""
    engine = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    contrastive = Contrastive(kind, backend.processes, **options)
    for _ in range(9):  # fp16: its loss scale begins too high, and halves with each update that is skipped
        result = backward(engine, backend.processes, contrastive, make_batch(dtype))
        if not bool(engine.step().skipped):
            break
    return result, engine.state_dict()["optimizer"]["moments"]["momentum_buffer"]


@pytest.mark.parametrize("whole", [False, True], ids=["shared", "whole"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_all_gradients_are_those_of_one_graph(kind: str, whole: bool, backend: Backend) -> None:
    model = Towers()
    result, gradients = update(backend, model, kind, is_replicated=whole)
    loss, wanted = in_one_graph(kind)
    torch.testing.assert_close(result.loss, loss, rtol=1e-12, atol=0)
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        # A bias of the last layer, or of a softmax, has a gradient of 0 but for rounding.
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-14, msg=lambda m, n=name: f"{n}: {m}")
    # A rule in the model that looks at the gradient of its temperature sees the total, or 0.
    torch.testing.assert_close(gradients["logit_scale"], wanted["logit_scale"], rtol=1e-12, atol=0)
    parts = backend.grad_accum_steps
    assert model.arrived == [result.scale_gradient.tolist(), *[[0.0, 0.0]] * (parts - 1)]
    assert 0.0 not in model.arrived[0]
    # Where bits must be the same, even a single micro-batch is embedded without a graph first.
    assert model.calls == (1 if parts == 1 and not whole else 2 * parts)


def test_what_is_embedded_twice_is_counted_once() -> None:
    flops = []
    for n in (1, 4):
        with single(batch_size=BATCH, grad_accum_steps=n) as backend:
            model = Towers()
            engine = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=1e-3))
            with FlopCounter() as counter:
                backward(engine, backend.processes, Contrastive(KINDS[0], backend.processes), make_batch())
            flops.append(counter.flops)
    assert flops[0] == flops[1] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_have_the_gradients_of_one_graph(kind: str) -> None:
    """Those of temperature and bias, which are totals over the batch, too."""
    of_ranks = [Towers(), Towers()]

    def work(backend: Backend) -> dict[str, Tensor]:
        process = backend.processes
        mine = slice(process.rank * BATCH // 2, (process.rank + 1) * BATCH // 2)
        batch = {name: rows[mine] for name, rows in make_batch().items()}
        model = of_ranks[process.rank]
        engine = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), name="model")
        backward(engine, process, Contrastive(kind, process), batch)
        engine.step()
        return dict(engine.state_dict()["optimizer"]["moments"]["momentum_buffer"])

    _, wanted = in_one_graph(kind)
    for gradients in on_backends(2, work, batch_size=BATCH):
        for name, gradient in wanted.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.05), ("fp16", 0.01)])
def test_low_precision_and_its_loss_scale_leave_the_gradients_as_they_are(
    precision: str, tolerance: float, kind: str, accumulation: int
) -> None:
    """Within what 8 and 11 bits leave of the towers' products."""
    with single(batch_size=BATCH, precision=precision, grad_accum_steps=accumulation) as backend:
        result, gradients = update(backend, Towers(torch.float32), kind, torch.float32)
    loss, wanted = in_one_graph(kind)
    torch.testing.assert_close(result.loss, loss.float(), rtol=tolerance, atol=0)
    for name, gradient in wanted.items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(gradients[name].double(), gradient, rtol=0, atol=tolerance * max(largest, 0.02))


def test_a_loss_that_is_not_finite_skips_the_update_and_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    model, batch = Towers(), make_batch()
    batch["sounds"][7] = torch.nan
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(Failed), single(batch_size=BATCH, grad_accum_steps=4, max_skipped_updates=1) as backend:
        engine = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        backward(engine, backend.processes, Contrastive("decoupled", backend.processes), batch)
        engine.step()
    assert "the loss is nan" in capfd.readouterr().err
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
