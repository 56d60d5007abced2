"""The benchmark's process really measures the script: a few updates of a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "model",
    [
        "--script train_vae --image_size 16 --num_tokens 8 --emb_dim 8 --num_layers 1 --num_resnet_blocks 0 "
        "--hidden_dim 8",
        "--script train_decoder --config configs/decoder/demo.yaml --image_sizes 4 8 --dim 8 --random_crop_sizes 0 4 "
        "--sample_timesteps 1 --num_images_save 1",
    ],
    ids=["train_vae", "train_decoder"],
)
def test_the_script_and_the_bare_loop_take_turns(model: str, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = (
        f"-m benchmarks.worker --result {result} --sides script,same_noise --rounds 2 --turns 1 --updates 1 --warmup 1 "
        "--image_folder demo:shapes:32 --valid_fraction 0 --num_workers 0 --validate_every_n_steps 0 "
        f"--sample_every_n_steps 0 --save_every_n_steps 0 --batch_size 2 --output_dir {tmp_path / 'run'} {model}"
    )
    subprocess.run([sys.executable, *command.split()], cwd=ROOT, check=True, capture_output=True, timeout=120)
    measured = json.loads(result.read_text())
    for side in ("script", "same_noise"):
        assert len(measured["samples_per_second"][side]) == 2
        assert all(rate > 0 for rate in measured["samples_per_second"][side])
    assert measured["memory_bytes"]["updates"] >= measured["memory_bytes"]["before"] > 0
