"""DeepSpeed on one process: a JSON's optimizer and scheduler win, and the engine tells the rate it really uses.

tests/launch compares the engine with those of the other backends, on several processes and every ZeRO stage.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.timeout(900)  # only ends a hang: the worker's imports are slow on a loaded machine

WORKER = Path(__file__).with_name("deepspeed_worker.py")
SCRIPT_RATE = 0.125
WARMUP_RATES = [0.01, 0.01, 0.0325, 0.055, 0.0775, 0.1]  # 0.01 + 0.09 min(n / 4, 1) after n updates, from the second on
Measured = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the worker left what it measured."""
    path = tmp_path_factory.mktemp("deepspeed")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, WORKER, "--folder", path]
    (path / "errors").write_text(subprocess.run(command, env=environment, capture_output=True, text=True).stderr)
    return path


def measured(folder: Path, name: str) -> Measured:
    path = folder / f"{name}.json"
    assert path.exists(), (folder / "errors").read_text()[-4000:]
    return dict(json.loads(path.read_text()))


def reference(make: Any, rates: list[float] | None = None) -> tuple[list[float], list[float]]:
    """Losses and final weights of the worker's model and batches in plain PyTorch, with these rates of the updates."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    optimizer, losses = make(model.parameters()), []
    for update in range(6):
        loss = model(torch.randn(8, 3, generator=torch.Generator().manual_seed(update))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups if rates else ():
            group["lr"] = rates[update]
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


# By case of the worker: the same optimizer in plain PyTorch, its rate, and its type in the JSON.
OPTIMIZERS: dict[str, tuple[Any, float, str]] = {
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1), 0.05, "AdamW"),
    "adam without decay": (lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.0), 0.05, "Adam"),
    "auto lr": (lambda p: torch.optim.AdamW(p, lr=SCRIPT_RATE, weight_decay=0.0), SCRIPT_RATE, "AdamW"),
    **{f"sgd zero{stage}": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 0.1, "SGD") for stage in range(4)},
}
AUTO = ["auto zero0", "auto zero3"]
SCHEDULERS = ["scheduler zero0", "scheduler zero2", "scheduler alone"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_of_the_json_steps_the_model_at_its_own_rate(name: str, folder: Path) -> None:
    make, rate, type_ = OPTIMIZERS[name]
    losses, weights = reference(make)
    ours = measured(folder, name)
    assert ours["loss"] == pytest.approx(losses, rel=1e-5)
    assert ours["weights"] == pytest.approx(weights, rel=1e-5, abs=1e-6)
    assert ours["learning_rate"] == rate  # of the arguments, so that the script's schedule starts there
    assert ours["lr"] == [rate] * 6
    assert f"optimizer {type_} of the JSON" in ours["summary"]
    assert ours["resolved"]["optimizer"]["type"] == type_


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_scheduler_of_the_json_sets_the_rate_that_moves_the_weights_and_the_script_cannot(
    name: str, folder: Path
) -> None:
    ours = measured(folder, name)
    assert ours["lr"] == pytest.approx(WARMUP_RATES)
    assert "scheduler of the JSON" in ours["summary"]
    assert ("optimizer SGD of the JSON" in ours["summary"]) == (name != "scheduler alone")
    # Plain SGD moves the weights by rate x gradient.
    rates = [moved / norm for moved, norm in zip(ours["moved"], ours["grad_norm"], strict=True)]
    assert rates == pytest.approx(ours["lr"], rel=1e-4)


@pytest.mark.parametrize("name", AUTO)
def test_auto_is_what_the_flags_say_of_optimizer_and_scheduler(name: str, folder: Path) -> None:
    """Biases do not decay, the warm-up of 2 updates begins at 0, and the run of 6 ends at 0. DeepSpeed's schedulers
    are an update late."""

    def of_script(parameters: Iterator[torch.nn.Parameter]) -> torch.optim.Optimizer:
        groups = {2: 0.3, 1: 0.0}
        every = list(parameters)
        return torch.optim.AdamW(
            [{"params": [p for p in every if p.ndim == n], "weight_decay": decay} for n, decay in groups.items()],
            lr=SCRIPT_RATE, betas=(0.7, 0.8), eps=1e-3,
        )  # fmt: skip

    rates = [SCRIPT_RATE * share for share in (0, 0, 1 / 2, 1, 3 / 4, 1 / 2)]
    losses, weights = reference(of_script, rates)
    ours = measured(folder, name)
    assert ours["lr"] == pytest.approx(rates)
    assert ours["loss"] == pytest.approx(losses, rel=1e-5)
    assert ours["weights"] == pytest.approx(weights, rel=1e-5, abs=1e-6)
    schedule = {"warmup_min_lr": 0.0, "warmup_max_lr": SCRIPT_RATE, "warmup_num_steps": 2, "total_num_steps": 6}
    assert ours["resolved"]["scheduler"]["params"] == {"warmup_type": "linear", **schedule}


OFFLOADED = ["offload zero2", "offload zero3"]
LOW_PRECISION = ["bf16 zero0", "bf16 zero3"]  # a state holds the fp32 weights from which those of the model are rounded


@pytest.mark.parametrize("name", [*OPTIMIZERS, *AUTO, *SCHEDULERS, *OFFLOADED, *LOW_PRECISION])
def test_a_reloaded_engine_goes_on_and_an_average_finds_the_weights_wherever_deepspeed_keeps_them(
    name: str, folder: Path
) -> None:
    ours = measured(folder, name)
    assert ours["continued"] == {key: ours[key][len(ours[key]) // 2 :] for key in ours["continued"]}
    assert ours["averaged"], "the first update is the whole of an average with a power as profile"
    assert '"auto"' not in json.dumps(ours["resolved"]) and ours["resolved"]["gradient_clipping"] == 0.0


@pytest.mark.parametrize("name", OFFLOADED)
def test_an_optimizer_on_the_cpu_has_the_cores_that_the_launcher_withholds(name: str, folder: Path) -> None:
    """The worker has one thread, as under torchrun."""
    ours, plain = measured(folder, name), measured(folder, "scheduler alone")
    losses, weights = reference(lambda p: torch.optim.SGD(p, lr=SCRIPT_RATE))
    assert ours["loss"] == pytest.approx(losses, rel=1e-5)
    assert ours["weights"] == pytest.approx(weights, rel=1e-5, abs=1e-6)
    assert ours["threads"] == [len(os.sched_getaffinity(0))] * 6 and ours["threads_outside"] == 1
    assert plain["threads"] == [1] * 6


def test_a_version_with_other_names_inside_ends_in_one_line_that_names_them(folder: Path) -> None:
    said = str(json.loads((folder / "renamed.json").read_text()))
    assert "\n" not in said
    assert all(fact in said for fact in ("ZeRO 2 ", "engine._backward_prologue", "optimizer.update_lp_params"))


def test_zero_3_gives_gathered_weights_back_and_gathers_no_further_ahead_than_a_bucket(folder: Path) -> None:
    """Six layers of 272 numbers, buckets of 300: whole are the layer that computes and two buckets at most."""
    ours = measured(folder, "released")
    assert ours["most_gathered"] <= 2 * 300 + 272
    assert ours["loss"] == pytest.approx(ours["expected"], rel=1e-5)


TENSORS, BYTES = 6, 82_944  # of the worker's model


def in_words(counts: dict[str, int]) -> Iterator[str]:
    for kind, number in counts.items():
        if not kind.startswith("bytes"):
            each, of_tensor = (number // TENSORS, " per tensor") if number >= TENSORS else (number, "")
            times = round(counts[f"bytes of {kind}"] / BYTES)
            weights = f", {times} x the weights" if times else ""
            yield f"{each} {kind if each > 1 else kind.removesuffix('s')}{of_tensor}{weights}"


def test_what_deepspeed_exchanges_does_not_grow_with_the_processes_but_for_its_padding() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, WORKER.with_name("many_processes_worker.py")]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]
    cases = [*((s, n) for s in range(4) for n in (8, 512)), (0, 8), (2, 8)]
    assert [(case["stage"], case["processes"]) for case in found] == cases, finished.stderr
    # Buckets of 5000 numbers. At ZeRO 0 a bucket is sent as soon as it holds more; at ZeRO 2 the largest gradient, of
    # 8192, makes it larger, and the norm is a sum too.
    assert [case["update"]["sums"] for case in found[-2:]] == [3, 1 + 4]
    found = found[:-2]
    rows = []
    for few, many in zip(found[0::2], found[1::2], strict=True):
        for phase in ("update", "checkpoint"):
            for kind, number in many[phase].items():
                padding = 512 * 4 * (TENSORS if few["stage"] == 3 else 2) * (3 if phase == "checkpoint" else 1)
                grown = number - few[phase][kind]
                assert 0 <= grown <= (padding if kind.startswith("bytes") else 0), (few, many)
        assert few["averages"] == many["averages"] == {}, "an average is made of what a process holds"
        gathered = many["checkpoint of averages"].get("gathers", 0)
        assert gathered == (2 * TENSORS if few["stage"] == 3 else 0), "a gather per tensor of both averages"
        update, checkpoint = ("; ".join(in_words(few[phase])) for phase in ("update", "checkpoint"))
        rows.append(f"| `--zero_stage {few['stage']}` | {update} | {checkpoint or 'none'} |")
    text = (WORKER.parents[3] / "docs" / "clusters.md").read_text()
    assert [row for row in rows if row not in text] == [], rows
