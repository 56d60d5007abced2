"""P1 on the real script: the losses of every launcher and ZeRO stage are those of one process."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from launching import Launcher, run

MODEL = ["--image_size", "32", "--num_layers", "2", "--num_tokens", "64", "--hidden_dim", "16", "--emb_dim", "16",
         "--num_resnet_blocks", "1", "--image_folder", "demo:shapes:64", "--batch_size", "8", "--max_steps", "20",
         "--epochs", "100", "--num_workers", "0", "--log_every_n_steps", "1", "--save_every_n_steps", "0",
         "--sample_every_n_steps", "0", "--validate_every_n_steps", "10", "--ema_decay", "0.9"]  # fmt: skip
PLAIN: tuple[str, ...] = ()
ACCUMULATION = ("--grad_accum_steps", "2")
CLIPPING = ("--max_grad_norm", "0.1")
RUNS = [
    (Launcher("torchrun", 2), PLAIN),
    (Launcher("torchrun", 2), ACCUMULATION),
    (Launcher("torchrun", 4), CLIPPING),
    (Launcher("horovodrun", 2), CLIPPING),
    (Launcher("horovodrun", 4), PLAIN),
    (Launcher("deepspeed", 2, zero_stage=0), ACCUMULATION),
    (Launcher("deepspeed", 2, zero_stage=1), CLIPPING),
    (Launcher("deepspeed", 2, zero_stage=2), PLAIN),
    (Launcher("deepspeed", 2, zero_stage=3), ACCUMULATION),
    (Launcher("deepspeed", 4, zero_stage=3), CLIPPING),
]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("parity")

    @cache
    def train(launcher: Launcher, flags: tuple[str, ...]) -> list[dict[str, float]]:
        output = folder / f"{launcher}{''.join(flags)}"
        finished = run(launcher, "train_vae.py", [*MODEL, *flags, "--output_dir", str(output)])
        assert finished.returncode == 0, finished.output[-4000:]
        return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]

    return train


def relative(ours: list[dict[str, float]], reference: list[dict[str, float]], key: str) -> list[float]:
    pairs = [(a[key], b[key]) for a, b in zip(ours, reference, strict=True) if key in b]
    return [abs(a - b) / abs(b) for a, b in pairs]


@pytest.mark.parametrize(
    ("launcher", "flags"), RUNS, ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value)
)
def test_losses_equal_those_of_one_process(launcher: Launcher, flags: tuple[str, ...], trained: Any) -> None:
    ours, reference = trained(launcher, flags), trained(Launcher("python"), flags)
    assert [line["step"] for line in ours] == list(range(1, 21))
    losses = relative(ours, reference, "loss")
    # A sum of fp32 numbers in another order: about 1e-7; Adam passes that on from update to update.
    assert losses[0] <= 1e-6
    assert max(losses) <= 1e-5
    assert max(relative(ours, reference, "grad_norm")) <= 1e-5
    # Validation comes on all processes, in parts of other sizes; PSNR is a mean over images of 10 log10 of small sums.
    for key in ("valid/loss", "valid/ema/loss", "valid/psnr"):
        assert max(relative(ours, reference, key)) <= 1e-4, key


@pytest.mark.parametrize("flags", [ACCUMULATION], ids=" ".join)
def test_accumulation_changes_no_number(flags: tuple[str, ...], trained: Any) -> None:
    losses = relative(trained(Launcher("python"), flags), trained(Launcher("python"), PLAIN), "loss")
    assert max(losses) <= 1e-5


def test_a_compiled_model_has_the_losses_of_one_that_is_not(trained: Any) -> None:
    ours, reference = trained(Launcher("torchrun", 2), ("--compile",)), trained(Launcher("python"), PLAIN)
    losses = relative(ours, reference, "loss")
    # Fused kernels round otherwise: as another order of sums does.
    assert losses[0] <= 1e-6
    assert max(losses) <= 1e-5
