"""Contrastive updates on every backend and ZeRO stage against one process that holds the whole batch in one graph."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import contrastive as worker
import pytest
import torch
from jobs import Jobs, Task
from torch import Tensor

from benchmarks.launching import CHOSEN, CHOSEN_ON_TWO, ONE_PROCESS, ZERO_STAGES, Launcher
from tests.training.objectives.test_contrastive import by_the_formula

KINDS = ["softmax", "decoupled", "sigmoid"]
TWO, FOUR = Launcher("torchrun", 2), Launcher("torchrun", 4)
LAUNCHERS = [
    TWO,
    Launcher("horovodrun", 3),
    *ZERO_STAGES,
    Launcher("deepspeed", 3, zero_stage=3),
    *CHOSEN_ON_TWO,
]
IN_PARTS = [FOUR, Launcher("horovodrun", 2), *ZERO_STAGES, *CHOSEN]
# Of each job, whose ZeRO stages need not measure again what does not depend on them; with the kind of the job.
ONCE = {launcher: "rounded" for launcher in [ONE_PROCESS, *LAUNCHERS] if launcher not in ZERO_STAGES[1:]}
ONCE[FOUR] = "bits"


def tasks(launcher: Launcher, kind: str, jobs: Jobs) -> Iterator[Task]:
    flags = worker.FLAGS
    if launcher.name == "deepspeed":  # small tensors whole and larger ones sharded, as in a model of useful size
        config = jobs.folder / f"contrastive-{launcher}-{kind}.json"
        config.write_text(json.dumps({"zero_optimization": {"stage3_param_persistence_threshold": 20}}))
        flags = [*flags, "--deepspeed_config", str(config)]
    if kind == "bits" and launcher in [ONE_PROCESS, *IN_PARTS]:
        yield Task("contrastive", "contrastive.measure", [*flags, "--batch_parts", "4"])
    elif kind == "rounded" and launcher in [ONE_PROCESS, *LAUNCHERS]:
        yield Task("contrastive", "contrastive.measure", flags)
    if ONCE.get(launcher) == kind:
        yield Task("contrastive-once", "contrastive.measure_once", flags)


def measured(jobs: Jobs, launcher: Launcher, kind: str, name: str = "contrastive") -> dict[str, Any]:
    return dict(json.loads((jobs.output(launcher, kind, name) / "result.json").read_text()))


def measured_once(jobs: Jobs, launcher: Launcher) -> dict[str, Any]:
    return measured(jobs, launcher, ONCE[launcher], "contrastive-once")


@cache
def one_graph(kind: str) -> dict[str, Tensor]:
    """The loss and the gradients of all parameters, in fp64."""
    model, batch = worker.Towers(torch.float64), worker.global_batch(torch.float64)
    loss = by_the_formula(kind, *model(batch["sounds"], batch["words"]), batch["caption_ids"])
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True, allow_unused=True)
    return {"loss": loss.detach(), **dict(zip(names, gradients, strict=True))}


def assert_close(got: dict[str, Any], wanted: dict[str, Tensor], tolerance: float) -> None:
    """Assert equality up to ``tolerance`` times the largest number of each tensor."""
    assert set(wanted) <= set(got)
    for name, tensor in wanted.items():
        difference = (torch.tensor(got[name], dtype=torch.float64) - tensor).abs().max()
        # A softmax does not depend on a bias: the gradient of the bias is 0 except for rounding.
        scale = max(float(tensor.abs().max()), 1e-3)
        assert float(difference) <= tolerance * scale, f"{name}: {float(difference)}, scale {scale}"


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("launcher", [ONE_PROCESS, *LAUNCHERS], ids=str)
def test_loss_and_gradients_of_towers_temperature_and_bias_are_those_of_one_process(
    launcher: Launcher, kind: str, accumulation: int, jobs: Jobs
) -> None:
    got = measured(jobs, launcher, "rounded")[f"accumulation {accumulation}"][kind]
    # DeepSpeed computes in fp32: products of a few dozen numbers, each good to 6e-8.
    assert_close(got, one_graph(kind), tolerance=2e-6 if launcher.name == "deepspeed" else 1e-11)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("launcher", IN_PARTS, ids=str)
def test_in_parts_the_gradients_have_the_bits_of_one_process(launcher: Launcher, kind: str, jobs: Jobs) -> None:
    ours, reference = (measured(jobs, who, "bits")["parts"][kind] for who in (launcher, ONE_PROCESS))
    assert_close(reference, one_graph(kind), tolerance=2e-6)  # fp32
    assert ours == reference


@pytest.mark.parametrize(
    ("launcher", "kind"), [*((who, "rounded") for who in LAUNCHERS), *((who, "bits") for who in IN_PARTS)], ids=str
)
def test_weights_loaded_into_an_engine_after_updates_are_those_that_its_next_forward_sees(
    launcher: Launcher, kind: str, jobs: Jobs
) -> None:
    """A regression test: ZeRO 3 once kept the old values of small weights, which it does not shard."""
    for found in measured(jobs, launcher, kind).values():
        assert found["softmax again"] == found["softmax"]


@pytest.mark.parametrize("how", ["ragged", "ragged, around a ring"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("launcher", ONCE, ids=str)
def test_ragged_batches_have_the_loss_and_gradients_of_one_process(
    launcher: Launcher, kind: str, how: str, jobs: Jobs
) -> None:
    got = measured_once(jobs, launcher)[how][kind]
    *leaves, captions = worker.ragged_pairs()
    leaves = [tensor.requires_grad_() for tensor in leaves]
    loss = by_the_formula(kind, *leaves, captions)
    gradients = torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True)
    names = ("audio_gradient", "text_gradient", "scale_gradient", "bias_gradient")
    wanted = {"loss": loss, **dict(zip(names, gradients, strict=True))}
    for name, leaf in zip(("spread_audio", "spread_text"), leaves[:2], strict=True):
        wanted[name] = leaf[:, 0].var(dim=0, correction=0).sum()
    assert_close(got, {name: tensor.detach() for name, tensor in wanted.items()}, tolerance=1e-12)
    assert got["agree"]
