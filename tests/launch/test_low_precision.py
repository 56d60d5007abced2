"""Weights of low precision under DeepSpeed: what a checkpoint holds is the fp32 behind them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import Launcher, run

FLAGS = ["--image_size", "16", "--num_layers", "2", "--num_tokens", "16", "--hidden_dim", "8", "--emb_dim", "8",
         "--num_resnet_blocks", "0", "--num_workers", "0", "--log_every_n_steps", "1", "--save_every_n_steps", "6",
         "--validate_every_n_steps", "0", "--sample_every_n_steps", "0"]  # fmt: skip


@pytest.mark.parametrize("stage", [0, 3])
def test_a_resumed_run_with_bf16_weights_equals_an_uninterrupted_one(stage: int, tmp_path: Path) -> None:
    config = tmp_path / "bf16.json"
    config.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}))
    losses = []
    for name, stops in (("whole", (12,)), ("resumed", (6, 12))):
        for stop in stops:
            flags = [*FLAGS, "--deepspeed_config", str(config), "--max_steps", str(stop)]
            finished = run(Launcher("python"), "train_vae.py", [*flags, "--output_dir", str(tmp_path / name)])
            assert finished.returncode == 0, finished.output
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0] == losses[1]
    state = json.loads((tmp_path / "whole" / "checkpoints" / "step_00000012" / "state.json").read_text())
    assert state["parts"]["engine"]["optimizer"]["step"] == 12
