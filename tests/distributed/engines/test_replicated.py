"""The engine of one process against a plain PyTorch loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed import Backend, Engine

Single = Callable[..., Backend]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]

BATCH = 12
OPTIMIZERS: dict[str, MakeOptimizer] = {
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
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}


def assert_same_bits(ours: Any, expected: Any) -> None:
    """The same structure, texts and bits."""
    if isinstance(expected, dict):
        assert ours.keys() == expected.keys()
        for key in expected:
            assert_same_bits(ours[key], expected[key])
    elif isinstance(expected, tuple | list):
        assert len(ours) == len(expected)
        for a, b in zip(ours, expected, strict=True):
            assert_same_bits(a, b)
    elif isinstance(expected, str):
        assert ours == expected
    else:
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def plain_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, updates: range, accumulate: int = 1, max_grad_norm: float = 0.0
) -> tuple[list[float], list[float]]:  # fmt: skip
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


def make_engine(backend: Backend, optimizer: str, seed: int = 0, **wrap: Any) -> Engine:
    model = Model(seed)
    return backend.wrap(model, OPTIMIZERS[optimizer](model.parameters()), **wrap)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.02])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_plain_loop_gives_the_same_bits_and_with_clip_grad_norm_the_same_numbers(
    optimizer: str, accumulate: int, max_grad_norm: float, single: Single
) -> None:
    backend = single(batch_size=BATCH, grad_accum_steps=accumulate, max_grad_norm=max_grad_norm)
    engine, plain = make_engine(backend, optimizer), Model()
    losses, norms = engine_loop(engine, range(6), accumulate)
    expected, expected_norms = plain_loop(
        plain, OPTIMIZERS[optimizer](plain.parameters()), range(6), accumulate, max_grad_norm
    )
    if max_grad_norm:
        assert min(norms) > max_grad_norm  # every gradient was clipped
        assert losses == pytest.approx(expected, rel=1e-5) and norms == pytest.approx(expected_norms, rel=1e-5)
        torch.testing.assert_close(weights(engine.module), weights(plain), rtol=1e-5, atol=1e-6)
    else:
        assert losses == expected
        assert_same_bits(weights(engine.module), weights(plain))
        assert norms == pytest.approx(expected_norms, rel=1e-6)  # the engine's is summed in fp64


def test_a_clipped_update_has_exactly_the_length_that_was_asked_for(single: Single) -> None:
    """SGD with learning rate 1 moves the weights by the clipped gradient itself."""
    backend = single(batch_size=BATCH, max_grad_norm=0.1)
    model = Model()
    engine = backend.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    ((_,), (norm,)) = engine_loop(engine, range(1))
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    assert norm > 0.1 and moved.norm().item() == pytest.approx(0.1, rel=1e-4)


def test_max_grad_norm_of_an_engine_wins_over_the_runs_and_does_nothing_above_the_norm(single: Single) -> None:
    free = make_engine(single(batch_size=BATCH), "fused Adam")
    expected = engine_loop(free, range(3))
    for max_grad_norm in (0.0, 1e6):
        engine = make_engine(single(batch_size=BATCH, max_grad_norm=0.01), "fused Adam", max_grad_norm=max_grad_norm)
        assert engine_loop(engine, range(3)) == expected
        assert_same_bits(weights(engine.module), weights(free.module))


def test_any_number_of_backward_calls_adds_up(single: Single) -> None:
    backend = single(batch_size=BATCH)
    engine, plain = make_engine(backend, "SGD"), Model()
    optimizer = OPTIMIZERS["SGD"](plain.parameters())
    for update in range(3):
        x = batch(update)
        out = engine(x)
        engine.backward(out.square().mean(), retain_graph=True)
        engine.backward(out.abs().mean())
        engine.backward(engine(0.5 * x).mean())
        engine.step()
        optimizer.zero_grad()
        out = plain(x)
        (out.square().mean() + out.abs().mean() + plain(0.5 * x).mean()).backward()
        optimizer.step()
    torch.testing.assert_close(weights(engine.module), weights(plain), rtol=1e-5, atol=1e-7)


def test_losses_weighed_by_items_give_the_mean_over_all_items(single: Single) -> None:
    backend = single(batch_size=BATCH, grad_accum_steps=2)
    engine, plain = make_engine(backend, "SGD"), Model()
    x = batch(0)
    engine.backward(engine(x[:5]).square().mean(), items=5, total=12)
    engine.backward(engine(x[5:]).square().mean(), items=torch.tensor(7), total=torch.tensor(12.0))
    with pytest.raises(ValueError, match="both or neither"):
        engine.backward(engine(x).mean(), items=3)
    engine.step()
    plain(x).square().mean().backward()
    OPTIMIZERS["SGD"](plain.parameters()).step()
    ours, expected = weights(engine.module), weights(plain)
    torch.testing.assert_close(ours.pop("conv.weight"), expected.pop("conv.weight"), rtol=1e-5, atol=1e-7)


def test_a_part_without_items_contributes_nothing_though_its_mean_is_nan(single: Single) -> None:
    backend = single(batch_size=BATCH)
    engine, without_it = make_engine(backend, "SGD"), make_engine(backend, "SGD")
    x = batch(0)
    for each in (engine, without_it):
        each.backward(each(x).square().mean(), items=12, total=12)
    engine.backward(engine(x[:0]).square().mean(), items=0, total=12)
    assert not bool(engine.step().skipped) and not bool(without_it.step().skipped)
    ours, expected = weights(engine.module), weights(without_it.module)
    assert_same_bits(ours["conv.weight"], expected["conv.weight"])


def test_micro_batches_are_consecutive_parts_of_tensors_and_lists(single: Single) -> None:
    engine = make_engine(single(batch_size=6, grad_accum_steps=3), "SGD")
    given: dict[str, Any] = {"x": torch.arange(6), "positions": list("abcdef"), "epoch": 7}
    parts = list(engine.micro_batches(given))
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert [part["positions"] for part in parts] == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert [part["epoch"] for part in parts] == [7, 7, 7]
    for key in ("x", "positions"):
        with pytest.raises(ValueError, match=rf"{key}.* holds 5 samples, this process was to get 6"):
            list(engine.micro_batches({**given, key: given[key][:5]}))


# Low precision.


def test_bf16_runs_the_forward_pass_in_bf16_around_fp32_weights(single: Single) -> None:
    engine = make_engine(single(batch_size=BATCH, precision="bf16"), "fused Adam")
    assert engine(batch(0)).dtype == torch.bfloat16
    losses, _ = engine_loop(engine, range(6))
    assert all(p.dtype == torch.float32 for p in engine.module.parameters())
    full = make_engine(single(batch_size=BATCH), "fused Adam")
    expected, _ = engine_loop(full, range(6))
    assert losses == pytest.approx(expected, rel=0.05) and losses != expected


@pytest.mark.parametrize("optimizer", ["Adam", "fused Adam"])
def test_fp16_overflow_at_the_start_is_skipped_until_the_scale_fits(optimizer: str, single: Single) -> None:
    backend = single(batch_size=BATCH, precision="fp16")
    engine = make_engine(backend, optimizer)
    before, x, skipped = weights(engine.module), batch(0), []
    before.pop("calls")
    for update in range(12):
        # Its gradient with respect to the output is 300 / 24, which 2^16 lifts over the 65504 that fp16 can hold.
        engine.backward(300 * engine(x).float().mean())
        skipped.append(bool(engine.step().skipped))
        if skipped == [True] * (update + 1):
            after = weights(engine.module)
            after.pop("calls")
            assert_same_bits(after, before)
    n = skipped.index(False)
    assert n >= 1 and skipped == [True] * n + [False] * (12 - n)
    assert engine.skipped_updates == n
    state = engine.state_dict()
    assert state["scaler"] == {"scale": 2.0 ** (16 - n), "finite_in_a_row": 12 - n}
    assert state["optimizer"]["step"] == 12 - n and state["updates"] == 12
    second = make_engine(backend, optimizer, seed=99)
    second.load_state_dict(state)
    assert second.skipped_updates == n
    assert_same_bits(second.state_dict(), state)


def test_fp16_scales_the_gradient_and_nothing_that_is_reported(single: Single) -> None:
    half, full = (make_engine(single(batch_size=BATCH, precision=p), "SGD") for p in ("fp16", "fp32"))
    (expected_loss,), (expected_norm,) = engine_loop(full, range(1))
    norm = math.inf
    while not math.isfinite(norm):  # the scale is still too large
        (loss,), (norm,) = engine_loop(half, range(1))
    assert [loss, norm] == pytest.approx([expected_loss, expected_norm], rel=0.01)
    before = weights(Model())["linear.bias"]
    ours, expected = (weights(engine.module)["linear.bias"] - before for engine in (half, full))
    torch.testing.assert_close(ours, expected, rtol=0.01, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["Adam", "fused Adam", "SGD with momentum", "fused SGD with momentum"])
def test_a_non_finite_update_changes_nothing_and_the_next_one_sees_nothing_of_it(
    optimizer: str, single: Single
) -> None:
    backend = single(batch_size=BATCH)
    engine, undisturbed = make_engine(backend, optimizer), make_engine(backend, optimizer)
    for update in range(4):
        x = batch(update)
        if update == 2:
            engine.backward(engine(x).mean() * float("nan"))
            result = engine.step()
            assert bool(result.skipped) and not torch.isfinite(result.grad_norm)
        for each in (engine, undisturbed):
            each.backward(each(x).square().mean())
            assert not bool(each.step().skipped)
    ours, expected = engine.state_dict(), undisturbed.state_dict()
    assert (ours["updates"], ours["skipped_updates"]) == (5, 1)
    ours["weights"].pop("calls"), expected["weights"].pop("calls")
    assert_same_bits((ours["weights"], ours["optimizer"]), (expected["weights"], expected["optimizer"]))


# The learning rate, freezing.


def test_the_learning_rate_is_that_of_every_group_and_the_one_used(single: Single) -> None:
    def make(model: Model) -> torch.optim.Optimizer:
        groups = [{"params": model.conv.parameters(), "lr": 0.3}, {"params": model.linear.parameters(), "lr": 0.2}]
        return torch.optim.SGD(groups, momentum=0.9, fused=True)

    model, plain = Model(), Model()
    engine, optimizer = single(batch_size=BATCH).wrap(model, make(model)), make(plain)
    assert engine.lr == 0.3
    for update in range(4):
        engine.lr = rate = 0.2 / (update + 1)
        for group in optimizer.param_groups:
            group["lr"] = rate
        assert engine.lr == rate
        engine_loop(engine, range(update, update + 1))
        plain_loop(plain, optimizer, range(update, update + 1))
    assert_same_bits(weights(model), weights(plain))


def test_a_frozen_model_passes_gradients_on_and_keeps_none(single: Single) -> None:
    backend = single(batch_size=BATCH)
    model = Model()
    model.linear.bias.requires_grad_(False)
    engine = backend.wrap(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    before, x = weights(model), batch(0).requires_grad_()
    with engine.frozen():
        assert not any(p.requires_grad for p in model.parameters())
        engine.module(x).square().mean().backward()
        for misuse in (lambda: engine(x), lambda: engine.backward(x.sum())):
            with pytest.raises(RuntimeError, match="frozen"):
                misuse()
    assert x.grad is not None and bool(x.grad.any())
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["linear.bias"]
    assert engine.step().grad_norm.item() == 0.0
    before.pop("calls")
    assert_same_bits({name: weights(model)[name] for name in before}, before)
    with pytest.raises(ZeroDivisionError), engine.frozen():
        raise ZeroDivisionError
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["linear.bias"]
    with engine.gathered() as full:  # every process has the model whole
        assert full is model
    engine_loop(engine, range(1))


# State.


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_fresh_engine_with_the_state_goes_on_to_the_same_bits(optimizer: str, single: Single) -> None:
    backend = single(batch_size=BATCH)
    whole, first = make_engine(backend, optimizer), make_engine(backend, optimizer)
    expected = engine_loop(whole, range(6))
    engine_loop(first, range(3))
    state = first.state_dict()
    second = make_engine(backend, optimizer, seed=99)
    kept = copy.deepcopy(state)
    second.load_state_dict(state)
    assert_same_bits(second.state_dict(), kept)
    losses, norms = engine_loop(second, range(3, 6))
    assert_same_bits(state, kept)  # loading does not change it
    assert (losses, norms) == (expected[0][3:], expected[1][3:])
    assert_same_bits(second.state_dict(), whole.state_dict())


def test_the_state_is_neutral_complete_and_a_copy(single: Single) -> None:
    engine = make_engine(single(batch_size=BATCH), "fused Adam")
    assert engine.state_dict()["optimizer"] == {"type": "Adam", "step": 0, "slots": [], "moments": {}}
    engine_loop(engine, range(2))
    state = engine.state_dict()
    assert set(state) == {"weights", "optimizer", "scaler", "updates", "skipped_updates"}
    assert state["optimizer"]["step"] == state["updates"] == 2 and state["scaler"] == {}
    trained = {name: p.shape for name, p in engine.module.named_parameters()}
    assert set(state["optimizer"]["moments"]) == {"exp_avg", "exp_avg_sq"}
    for moments in state["optimizer"]["moments"].values():
        assert {name: tensor.shape for name, tensor in moments.items()} == trained
        assert all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in moments.values())
    assert set(state["weights"]) == {*trained, "calls"}
    kept = copy.deepcopy(state)
    engine_loop(engine, range(2, 4))
    assert_same_bits(state, kept)


def test_parameters_that_the_optimizer_holds_but_nobody_trains_are_no_obstacle(single: Single) -> None:
    backend = single(batch_size=BATCH)

    def make(seed: int) -> Engine:
        model = Model(seed)
        model.conv.requires_grad_(False)
        return backend.wrap(model, torch.optim.Adam(model.parameters(), lr=0.01))

    first, second = make(0), make(99)
    engine_loop(first, range(2))
    second.load_state_dict(first.state_dict())
    assert set(first.state_dict()["optimizer"]["moments"]["exp_avg"]) == {
        "linear.weight", "linear.bias", "unused.weight", "unused.bias"
    }  # fmt: skip
    assert engine_loop(first, range(2, 4)) == engine_loop(second, range(2, 4))


SPOILT: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "of linear.weight is missing": lambda tensors: tensors.pop("linear.weight"),
    "of linear.weight_too belongs to no parameter": lambda tensors: tensors.setdefault(
        "linear.weight_too", torch.zeros(1)
    ),
    r"of linear.weight has shape \(1, 5\), the model has \(2, 5\)": lambda tensors: tensors.update(
        {"linear.weight": tensors["linear.weight"][:1]}
    ),
}


@pytest.mark.parametrize("text", SPOILT)
@pytest.mark.parametrize("part", ["weights", "exp_avg", "exp_avg_sq"])
def test_a_state_that_does_not_fit_is_refused_by_name(part: str, text: str, single: Single) -> None:
    engine = make_engine(single(batch_size=BATCH), "fused Adam")
    engine_loop(engine, range(1))
    state = engine.state_dict()
    SPOILT[text](state["weights"] if part == "weights" else state["optimizer"]["moments"][part])
    what = "weight" if part == "weights" else f"optimizer moment {part}"
    with pytest.raises(ValueError, match=f"^{what} {text}"):
        engine.load_state_dict(state)


@pytest.mark.parametrize("lost", ["all", "exp_avg_sq"])
def test_lost_moments_are_refused(lost: str, single: Single) -> None:
    engine = make_engine(single(batch_size=BATCH), "fused Adam")
    engine_loop(engine, range(1))
    state = engine.state_dict()
    moments = state["optimizer"]["moments"]
    moments.clear() if lost == "all" else moments.pop(lost)
    with pytest.raises(ValueError, match="moment"):
        engine.load_state_dict(state)


@pytest.mark.parametrize(("saved", "now"), [("SGD with momentum", "fused Adam"), ("fused Adam", "SGD with momentum")])
def test_the_state_of_another_optimizer_is_refused(saved: str, now: str, single: Single) -> None:
    backend = single(batch_size=BATCH)
    first, second = make_engine(backend, saved), make_engine(backend, now)
    engine_loop(first, range(1))
    with pytest.raises(ValueError, match="optimizer"):
        second.load_state_dict(first.state_dict())


# Several engines.


def test_two_engines_update_their_own_model_each(single: Single) -> None:
    backend = single(batch_size=BATCH)
    one, two = make_engine(backend, "fused Adam", seed=1, name="one"), make_engine(backend, "SGD", seed=2, name="two")
    before = weights(two.module)
    engine_loop(one, range(2))
    assert_same_bits(weights(two.module), before)
    both = one(batch(5)).mean() + two(batch(5)).mean()
    one.backward(both)
    assert one.step().grad_norm.item() > 0 and two.step().grad_norm.item() > 0
    assert (one.state_dict()["updates"], two.state_dict()["updates"]) == (3, 1)


@pytest.fixture
def _any_kernels() -> Iterator[None]:
    """A backend with --batch_parts asks for deterministic kernels for the rest of the process."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_any_kernels")
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05])
@pytest.mark.parametrize("optimizer", ["Adam", "SGD with momentum", "RMSprop"])
def test_two_parts_are_two_micro_batches_bit_for_bit(optimizer: str, max_grad_norm: float, single: Single) -> None:
    """Only two: more parts are added in another order than micro-batches."""
    results = []
    for values in ({"grad_accum_steps": 2}, {"batch_parts": 2}):
        engine = make_engine(single(max_grad_norm=max_grad_norm, **values), optimizer)
        losses, norms = engine_loop(engine, range(5), accumulate=2)
        results.append((losses, norms, engine.state_dict()["weights"], engine.state_dict()["optimizer"]))
    assert_same_bits(results[1], results[0])


@pytest.mark.usefixtures("_any_kernels")
def test_a_fused_optimizer_steps_unfused_with_parts_and_to_rounding_the_same(single: Single) -> None:
    results = []
    for values in ({}, {"batch_parts": 4}):
        engine = make_engine(single(max_grad_norm=0.05, **values), "fused Adam")
        accumulate = values.get("batch_parts", 1)
        losses, norms = engine_loop(engine, range(5), accumulate=accumulate)
        results.append((losses, norms, dict(engine.module.named_parameters())))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("_any_kernels")
def test_with_parts_a_gradient_reaches_no_other_engine(single: Single) -> None:
    backend = single(batch_parts=2)
    first, second = make_engine(backend, "SGD", name="first"), make_engine(backend, "SGD", seed=1, name="second")
    before = weights(second.module)
    first.backward(first(batch(0)).square().mean() + second(batch(0)).square().mean())
    assert float(first.step().grad_norm) > 0
    assert float(second.step().grad_norm) == 0
    for name, parameter in second.module.named_parameters():
        assert torch.equal(parameter, before[name]), name
