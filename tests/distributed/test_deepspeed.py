"""DeepSpeed itself, on one process: a JSON's optimizer and scheduler win, and the engine tells the rate it really uses.

What the engine shares with the other backends is in tests/launch, on several processes and every ZeRO stage.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

WORKER = Path(__file__).with_name("deepspeed_worker.py")
SCRIPT_RATE = 0.125
WARMUP_RATES = [0.01, 0.01, 0.0325, 0.055, 0.0775, 0.1]  # 0.01 + 0.09 min(n / 4, 1) after n updates, from the second on
Measured = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the worker left what it measured."""
    path = tmp_path_factory.mktemp("deepspeed")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, WORKER, "--folder", path], env=environment, capture_output=True, text=True, timeout=240
    )
    (path / "errors").write_text(finished.stderr)
    return path


def measured(folder: Path, name: str) -> Measured:
    path = folder / f"{name}.json"
    assert path.exists(), (folder / "errors").read_text()[-4000:]
    return dict(json.loads(path.read_text()))


def reference(make: Any) -> tuple[list[float], list[float]]:
    """Losses and final weights of the worker's model and batches in plain PyTorch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    optimizer, losses = make(model.parameters()), []
    for update in range(6):
        loss = model(torch.randn(8, 3, generator=torch.Generator().manual_seed(update))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    "adam without decay": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.0),
    "auto lr": lambda p: torch.optim.AdamW(p, lr=SCRIPT_RATE, weight_decay=0.0),
    **dict.fromkeys(
        [f"sgd zero{stage}" for stage in range(4)], lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_of_the_json_steps_the_model(name: str, folder: Path) -> None:
    losses, weights = reference(OPTIMIZERS[name])
    ours = measured(folder, name)
    assert ours["loss"] == pytest.approx(losses, rel=1e-5)
    assert ours["weights"] == pytest.approx(weights, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_rate_of_the_json_is_the_scripts_from_then_on(name: str, folder: Path) -> None:
    ours = measured(folder, name)
    rate = {"adamw": 0.05, "adam without decay": 0.05, "auto lr": SCRIPT_RATE}.get(name, 0.1)
    assert ours["learning_rate"] == rate  # of the arguments, so that the script's schedule starts there
    assert ours["lr"] == [rate] * 6


@pytest.mark.parametrize("name", [*OPTIMIZERS, "scheduler zero0"])
def test_the_script_says_that_the_jsons_optimizer_is_used(name: str, folder: Path) -> None:
    ours = measured(folder, name)
    used = {"adamw": "AdamW", "adam without decay": "Adam", "auto lr": "AdamW"}.get(name, "SGD")
    assert f"optimizer {used} of the JSON" in ours["summary"]
    assert ours["resolved"]["optimizer"]["type"] == used


@pytest.mark.parametrize("name", ["scheduler zero0", "scheduler zero2", "scheduler alone"])
def test_the_scheduler_of_the_json_sets_the_rate_and_the_script_cannot(name: str, folder: Path) -> None:
    ours = measured(folder, name)
    assert ours["lr"] == pytest.approx(WARMUP_RATES)
    assert "scheduler of the JSON" in ours["summary"]


@pytest.mark.parametrize("name", ["scheduler zero0", "scheduler zero2", "scheduler alone"])
def test_the_rate_that_the_engine_tells_is_the_one_that_moves_the_weights(name: str, folder: Path) -> None:
    """Plain SGD moves the weights by rate x gradient."""
    ours = measured(folder, name)
    rates = [moved / norm for moved, norm in zip(ours["moved"], ours["grad_norm"], strict=True)]
    assert rates == pytest.approx(ours["lr"], rel=1e-4)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "scheduler zero0", "scheduler zero2", "scheduler alone"])
def test_a_reloaded_engine_goes_on_with_moments_and_rate(name: str, folder: Path) -> None:
    ours = measured(folder, name)
    continued = ours["continued"]
    assert {key: continued[key] for key in ("loss", "lr", "grad_norm", "moved")} == {
        key: ours[key][3:] for key in ("loss", "lr", "grad_norm", "moved")
    }


def test_the_resolved_configuration_holds_deepspeeds_own_defaults_and_no_auto(folder: Path) -> None:
    for name in (*OPTIMIZERS, "scheduler zero0", "scheduler zero2", "scheduler alone"):
        resolved = measured(folder, name)["resolved"]
        assert '"auto"' not in json.dumps(resolved)
        assert len(resolved["zero_optimization"]) > 10
        assert resolved["gradient_clipping"] == 0.0
    assert measured(folder, "adamw")["resolved"]["optimizer"]["params"]["adam_w_mode"] is True
    assert measured(folder, "auto lr")["resolved"]["optimizer"]["params"]["lr"] == SCRIPT_RATE
