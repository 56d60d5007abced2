"""Low-precision weights under DeepSpeed: a checkpoint holds the fp32 master weights from which they are rounded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forks import fork

from tests.scripts import VAE, metrics, words

FLAGS = [*words(VAE.tiny), "--num_workers", "0", "--log_every_n_steps", "1", "--save_every_n_steps", "6",
         "--validate_every_n_steps", "0", "--sample_every_n_steps", "0"]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of 12 updates by name and ZeRO stage: "whole" at once, "resumed" in two parts of 6."""
    folder = tmp_path_factory.mktemp("bf16")
    tasks = []
    for stage in (0, 3):
        config = folder / f"{stage}.json"
        config.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}))
        for name, stop in (("whole", 12), ("resumed", 6), ("resumed", 12)):
            flags = [*FLAGS, "--deepspeed_config", str(config), "--max_steps", str(stop)]
            tasks.append({"do": "train_vae", "flags": flags, "output": str(folder / f"{name}-{stage}")})
    path = folder / "tasks.json"
    path.write_text(json.dumps(tasks))
    [finished] = fork("job_worker", [str(path)], folder / "log")
    assert finished.returncode == 0, finished.output
    return folder


@pytest.mark.parametrize("stage", [0, 3])
def test_a_resumed_run_with_bf16_weights_equals_an_uninterrupted_one(stage: int, trained: Path) -> None:
    whole, resumed = ([line["loss"] for line in metrics(trained / f"{name}-{stage}")] for name in ("whole", "resumed"))
    assert whole == resumed and len(whole) == 12
    for name in ("whole", "resumed"):
        state = json.loads((trained / f"{name}-{stage}" / "checkpoints/step_00000012/state.json").read_text())
        assert state["parts"]["engine"]["optimizer"]["step"] == 12
