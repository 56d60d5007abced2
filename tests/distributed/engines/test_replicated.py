"""The engine of one process against a plain PyTorch loop."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tandem.distributed import Backend
from tandem.distributed.engines.base import Engine
from tests.processes import ThreadBackend

BATCH = 12
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "fused AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "fused SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
}


class Model(nn.Module):
    """A channels-last convolution, a buffer, and a layer that no loss reaches."""

    calls: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.linear, self.unused = nn.Conv2d(3, 5, 3, padding=1), nn.Linear(5, 2), nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(self.conv(x).tanh().mean(dim=(2, 3)))


def batch(update: int) -> Tensor:
    images = torch.randn(BATCH, 3, 4, 4, generator=torch.Generator().manual_seed(update))
    return images.to(memory_format=torch.channels_last)


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies, without the buffer that counts calls."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items() if name != "calls"}


def bits(state: Any) -> str:
    """Every name, dtype and number in a state, to compare; floats in their shortest exact form."""
    return json.dumps(state, sort_keys=True, default=lambda tensor: [str(tensor.dtype), tensor.tolist()])


def plain_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, updates: range, accumulate: int = 1, max_grad_norm: float = 0.0
) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for update in updates:
        optimizer.zero_grad(set_to_none=False)
        total = 0.0
        for part in batch(update).chunk(accumulate):
            loss = model(part).square().mean()
            (loss / accumulate).backward()
            total += loss.item() / accumulate
        for parameter in model.parameters():  # no gradient counts as zero, on every backend
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf")).item())
        optimizer.step()
        losses.append(total)
    return losses, norms


def engine_loop(engine: Engine, updates: range, accumulate: int = 1) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for update in updates:
        total = 0.0
        for part in engine.micro_batches({"x": batch(update)}):
            loss = engine(part["x"]).square().mean()
            engine.backward(loss)
            total += loss.item() / accumulate
        norms.append(engine.step().grad_norm.item())
        losses.append(total)
    return losses, norms


@pytest.fixture
def make(single: Callable[..., Backend]) -> Callable[..., Engine]:
    """``make("SGD", seed=1, name="two", precision="bf16")``: an engine on a backend of one process; ``own`` is its
    own limit of the gradients' norm."""

    def make_engine(
        optimizer: str | Callable[[Any], torch.optim.Optimizer], seed: int = 0, name: str = "model",
        own: float | None = None, **options: Any,
    ) -> Engine:  # fmt: skip
        model = Model(seed)
        chosen = OPTIMIZERS[optimizer](model.parameters()) if isinstance(optimizer, str) else optimizer(model)
        return single(batch_size=BATCH, **options).wrap(model, chosen, name=name, max_grad_norm=own)

    return make_engine


Make = Callable[..., Engine]


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.02])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_plain_loop_gives_the_same_bits_and_with_clip_grad_norm_the_same_numbers(
    optimizer: str, accumulate: int, max_grad_norm: float, make: Make
) -> None:
    engine, plain = make(optimizer, grad_accum_steps=accumulate, max_grad_norm=max_grad_norm), Model()
    losses, norms = engine_loop(engine, range(6), accumulate)
    reference = OPTIMIZERS[optimizer](plain.parameters())
    expected, expected_norms = plain_loop(plain, reference, range(6), accumulate, max_grad_norm)
    if max_grad_norm:
        assert min(norms) > max_grad_norm  # every gradient was clipped
        assert losses == pytest.approx(expected, rel=1e-5) and norms == pytest.approx(expected_norms, rel=1e-5)
        torch.testing.assert_close(weights(engine.module), weights(plain), rtol=1e-5, atol=1e-6)
    else:
        assert losses == expected
        assert bits(engine.module.state_dict()) == bits(plain.state_dict())
        assert norms == pytest.approx(expected_norms, rel=1e-6)  # the engine's is summed in fp64


@pytest.mark.parametrize("own", [0.0, 1e6])
def test_max_grad_norm_of_an_engine_wins_over_the_runs_and_does_nothing_above_the_norm(own: float, make: Make) -> None:
    free, engine = make("fused Adam"), make("fused Adam", max_grad_norm=0.01, own=own)
    assert engine_loop(engine, range(3)) == engine_loop(free, range(3))
    assert bits(weights(engine.module)) == bits(weights(free.module))


def test_losses_weighed_by_items_give_the_mean_over_all_items_and_a_part_without_items_nothing(make: Make) -> None:
    engine, plain = make("SGD", grad_accum_steps=2), Model()
    x = batch(0)
    engine.backward(engine(x[:5]).square().mean(), items=5, total=12)
    engine.backward(engine(x[5:]).square().mean(), items=torch.tensor(7), total=torch.tensor(12.0))
    engine.backward(engine(x[:0]).square().mean(), items=0, total=12)  # its mean is NaN
    with pytest.raises(ValueError, match="both or neither"):
        engine.backward(engine(x).mean(), items=3)
    assert not bool(engine.step().skipped)
    plain_loop(plain, OPTIMIZERS["SGD"](plain.parameters()), range(1))
    torch.testing.assert_close(weights(engine.module), weights(plain), rtol=1e-5, atol=1e-7)


def test_micro_batches_are_consecutive_parts_of_tensors_and_lists(make: Make) -> None:
    engine = make("SGD", grad_accum_steps=3)
    given: dict[str, Any] = {"x": torch.arange(12), "positions": list("abcdefghijkl"), "epoch": 7}
    parts = [{**part, "x": part["x"].tolist()} for part in engine.micro_batches(given)]
    assert parts == [
        {"x": [*range(start, start + 4)], "positions": [*"abcdefghijkl"[start : start + 4]], "epoch": 7}
        for start in (0, 4, 8)
    ]
    for key in ("x", "positions"):
        with pytest.raises(ValueError, match=rf"{key}.* 5 .* 12"):
            list(engine.micro_batches({**given, key: given[key][:5]}))


# Low precision.


@pytest.mark.parametrize("optimizer", ["Adam", "fused Adam"])
def test_fp16_overflow_at_the_start_is_skipped_until_the_scale_fits(optimizer: str, make: Make) -> None:
    engine = make(optimizer, precision="fp16")
    before, x, skipped = weights(engine.module), batch(0), []
    for update in range(12):
        # Its gradient with respect to the output is 300 / 24, which 2^16 lifts over the 65504 that fp16 can hold.
        engine.backward(300 * engine(x).float().mean())
        skipped.append(bool(engine.step().skipped))
        if skipped == [True] * (update + 1):
            assert bits(weights(engine.module)) == bits(before)
    n = skipped.index(False)
    assert n >= 1 and skipped == [True] * n + [False] * (12 - n)
    state = engine.state_dict()
    assert state["scaler"] == {"scale": 2.0 ** (16 - n), "finite_in_a_row": 12 - n}
    assert (state["optimizer"]["step"], state["updates"], engine.skipped_updates) == (12 - n, 12, n)
    second = make(optimizer, seed=99, precision="fp16")
    second.load_state_dict(state)
    assert second.skipped_updates == n and bits(second.state_dict()) == bits(state)


def test_fp16_scales_the_gradient_and_nothing_that_is_reported(make: Make) -> None:
    half, full = (make("SGD", precision=precision, max_grad_norm=0.02) for precision in ("fp16", "fp32"))
    (expected_loss,), (expected_norm,) = engine_loop(full, range(1))
    norm = math.inf
    while not math.isfinite(norm):  # the scale is still too large
        (loss,), (norm,) = engine_loop(half, range(1))
    assert [loss, norm] == pytest.approx([expected_loss, expected_norm], rel=0.01)
    before = weights(Model())["linear.bias"]
    ours, expected = (weights(engine.module)["linear.bias"] - before for engine in (half, full))
    torch.testing.assert_close(ours, expected, rtol=0.01, atol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_fp16_scales_a_backward_alike_however_many_share_the_update(accumulate: int, make: Make) -> None:
    engine, arriving = make("SGD", precision="fp16", grad_accum_steps=accumulate), []
    out = engine(next(iter(engine.micro_batches({"images": batch(0)})))["images"])
    out.register_hook(lambda gradient: arriving.append(gradient.flatten()[0].item()))
    engine.backward(out.float().sum() / 16)
    assert arriving == [2.0**16 / 16]


@pytest.mark.parametrize("is_logged", [True, False])
@pytest.mark.parametrize("optimizer", ["Adam", "fused Adam", "SGD with momentum", "fused SGD with momentum"])
def test_a_non_finite_update_changes_nothing_and_the_next_one_sees_nothing_of_it(
    optimizer: str, is_logged: bool, make: Make
) -> None:
    """Also where no norm is taken."""
    engine, undisturbed = make(optimizer), make(optimizer)
    for update in range(4):
        x = batch(update)
        if update == 2:
            engine.backward(engine(x).mean() * float("nan"))
            result = engine.step(with_norm=is_logged)
            assert bool(result.skipped) and not torch.isfinite(result.grad_norm)
        for each in (engine, undisturbed):
            each.backward(each(x).square().mean())
            result = each.step(with_norm=is_logged or each is undisturbed)
            assert not bool(result.skipped) and bool(result.grad_norm.isfinite()) == (is_logged or each is undisturbed)
    ours, expected = engine.state_dict(), undisturbed.state_dict()
    assert (ours["updates"], ours["skipped_updates"]) == (5, 1)
    assert bits(weights(engine.module)) == bits(weights(undisturbed.module))
    assert bits(ours["optimizer"]) == bits(expected["optimizer"])


# What an update waits for.


def test_copies_of_the_state_are_finished_before_an_update_or_a_load_changes_it() -> None:
    backend, model = ThreadBackend(), nn.Linear(1, 1)
    engine = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0))
    state, seen = engine.state_dict(), []
    for change in (engine.step, lambda: engine.load_state_dict(state)):
        engine.backward(engine(torch.ones(1, 1)).sum())
        before = bits(model.state_dict())
        for _ in range(2):
            backend.processes.before_update(lambda before=before: seen.append(bits(model.state_dict()) == before))
        change()
        assert bits(model.state_dict()) != before
        engine.step()
    assert seen == [True] * 4, "each once"


# The learning rate, freezing.


def test_the_learning_rate_is_that_of_every_group_and_the_one_used(make: Make) -> None:
    def grouped(model: Model) -> torch.optim.Optimizer:
        groups = [{"params": model.conv.parameters(), "lr": 0.3}, {"params": model.linear.parameters(), "lr": 0.2}]
        return torch.optim.SGD(groups, momentum=0.9, fused=True)

    engine, plain = make(grouped), Model()
    optimizer = grouped(plain)
    assert engine.lr == 0.3
    for update in range(4):
        engine.lr = rate = 0.2 / (update + 1)
        for group in optimizer.param_groups:
            group["lr"] = rate
        assert engine.lr == rate
        engine_loop(engine, range(update, update + 1))
        plain_loop(plain, optimizer, range(update, update + 1))
    assert bits(weights(engine.module)) == bits(weights(plain))


def test_a_frozen_model_passes_gradients_on_and_keeps_none(make: Make) -> None:
    def without_a_bias(model: Model) -> torch.optim.Optimizer:
        model.linear.bias.requires_grad_(False)
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    engine = make(without_a_bias)
    model, x = engine.module, batch(0).requires_grad_()
    before = bits(weights(model))
    frozen = lambda: [name for name, p in model.named_parameters() if not p.requires_grad]  # noqa: E731
    with pytest.raises(ZeroDivisionError), engine.frozen():
        assert len(frozen()) == len(list(model.parameters()))
        model(x).square().mean().backward()
        for misuse in (lambda: engine(x), lambda: engine.backward(x.sum())):
            with pytest.raises(RuntimeError, match="frozen"):
                misuse()
        raise ZeroDivisionError
    assert x.grad is not None and bool(x.grad.any()) and frozen() == ["linear.bias"]
    assert engine.step().grad_norm.item() == 0.0 and bits(weights(model)) == before
    with engine.full_weights() as full:  # every process has the model whole
        assert full is model
    engine_loop(engine, range(1))


# State.


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_fresh_engine_with_the_state_goes_on_to_the_same_bits(optimizer: str, make: Make) -> None:
    whole, first = make(optimizer), make(optimizer)
    expected = engine_loop(whole, range(6))
    engine_loop(first, range(3))
    state = first.state_dict()
    assert set(state) == {"weights", "optimizer", "scaler", "updates", "skipped_updates"} and state["updates"] == 3
    kept, second = bits(state), make(optimizer, seed=99)
    second.load_state_dict(state)
    assert bits(second.state_dict()) == kept
    losses, norms = engine_loop(second, range(3, 6))
    assert bits(state) == kept  # loading does not change it, and it is a copy
    assert (losses, norms) == (expected[0][3:], expected[1][3:])
    assert bits(second.state_dict()) == bits(whole.state_dict())


def test_parameters_that_the_optimizer_holds_but_nobody_trains_are_no_obstacle(make: Make) -> None:
    def of_all(model: Model) -> torch.optim.Optimizer:
        model.conv.requires_grad_(False)
        return torch.optim.Adam(model.parameters(), lr=0.01)

    first, second = make(of_all), make(of_all, seed=99)
    engine_loop(first, range(2))
    second.load_state_dict(first.state_dict())
    trained = {"linear.weight", "linear.bias", "unused.weight", "unused.bias"}
    assert set(first.state_dict()["optimizer"]["moments"]["exp_avg"]) == trained
    assert engine_loop(first, range(2, 4)) == engine_loop(second, range(2, 4))


@pytest.mark.parametrize(("text", "spoil"), [
    ("linear.weight is missing", lambda tensors: tensors.pop("linear.weight")),
    ("linear.weight2 ", lambda tensors: tensors.update({"linear.weight2": torch.ones(1)})),
    (r"linear.weight .*\(1, 5\).*\(2, 5\)", lambda tensors: tensors.update({"linear.weight": torch.ones(1, 5)})),
])  # fmt: skip
@pytest.mark.parametrize("part", ["weights", "exp_avg", "exp_avg_sq"])
def test_a_state_that_does_not_fit_is_refused_by_name(part: str, text: str, spoil: Any, make: Make) -> None:
    engine = make("fused Adam")
    engine_loop(engine, range(1))
    state = engine.state_dict()
    spoil(state["weights"] if part == "weights" else state["optimizer"]["moments"][part])
    with pytest.raises(ValueError, match=f"{part.removesuffix('s')} of {text}"):
        engine.load_state_dict(state)


def test_lost_moments_and_those_of_another_optimizer_are_refused(make: Make) -> None:
    first = make("fused Adam")
    engine_loop(first, range(1))
    state = first.state_dict()
    with pytest.raises(ValueError, match="optimizer"):
        make("SGD with momentum").load_state_dict(state)
    for slot in ("exp_avg_sq", "exp_avg"):
        state["optimizer"]["moments"].pop(slot)
        with pytest.raises(ValueError, match="moment"):
            make("fused Adam").load_state_dict(state)


# Several engines, and --batch_parts.


@pytest.fixture
def _any_kernels() -> Iterator[None]:
    """A backend with --batch_parts asks for deterministic kernels for the rest of the process."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_any_kernels")
@pytest.mark.parametrize("options", [{}, {"batch_parts": 2}], ids=str)
def test_two_engines_update_their_own_model_each(options: dict[str, int], make: Make) -> None:
    one, two = make("fused Adam", seed=1, name="one", **options), make("SGD", seed=2, name="two", **options)
    before = bits(weights(two.module))
    engine_loop(one, range(2))
    assert bits(weights(two.module)) == before
    one.backward(one(batch(5)).mean() + two(batch(5)).mean())
    assert one.step().grad_norm.item() > 0
    assert (two.step().grad_norm.item() == 0) == bool(options)  # with parts no gradient reaches another engine
    assert (bits(weights(two.module)) == before) == bool(options)


@pytest.mark.usefixtures("_any_kernels")
def test_a_fused_optimizer_steps_unfused_with_parts_and_to_rounding_the_same(make: Make) -> None:
    results, optimizers = [], []

    def fused(model: nn.Module) -> torch.optim.Optimizer:
        optimizers.append(OPTIMIZERS["fused Adam"](model.parameters()))
        return optimizers[-1]

    for parts in (0, 4):
        engine = make(fused, max_grad_norm=0.05, batch_parts=parts)
        results.append((*engine_loop(engine, range(5), accumulate=parts or 1), weights(engine.module)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-7)
    # On some makes of CPU both give the same bits.
    assert [optimizer.param_groups[0]["fused"] for optimizer in optimizers] == [True, False]
