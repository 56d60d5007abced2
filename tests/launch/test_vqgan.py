"""The promises on train_vqgan.py: two models, two optimizers, statistics of the whole batch.

Each launcher runs ``vqgan_worker.py`` once, which trains with every quantizer.
"""

from __future__ import annotations

import os
import signal
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from launching import Launcher, finish, run, start, worker_pids
from run_outputs import CLOCKS, cut_back, lines, unequal, wait_for_update
from vqgan_worker import QUANTIZERS

ONE_PROCESS = Launcher("python")
LAUNCHERS = [
    Launcher("torchrun", 4),
    Launcher("horovodrun", 2),
    Launcher("deepspeed", 2, zero_stage=0),
    Launcher("deepspeed", 2, zero_stage=1),
    Launcher("deepspeed", 2, zero_stage=2),
    Launcher("deepspeed", 2, zero_stage=3),
]
MODEL = ["--image_folder", "demo:shapes:64", "--image_size", "16", "--num_layers", "2", "--dim", "8",
         "--discr_layers", "2", "--codebook_size", "256", "--codebook_dim", "4", "--batch_size", "8", "--epochs", "100",
         "--num_workers", "0", "--log_every_n_steps", "1", "--save_every_n_steps", "0", "--sample_every_n_steps", "0",
         "--validate_every_n_steps", "0", "--ema_decay", "0.9", "--lecam_weight", "0.1"]  # fmt: skip
TWENTY = ["--max_steps", "20", "--discr_start_step", "6"]
SAME_BITS = ["--batch_parts", "4", "--max_grad_norm", "0.5"]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("vqgan")

    def output(launcher: Launcher, flags: tuple[str, ...]) -> Path:
        return folder / f"{launcher}{''.join(flags)}"

    @cache
    def job(name: str, processes: int, flags: tuple[str, ...]) -> str:
        together = [one for one in [ONE_PROCESS, *LAUNCHERS] if (one.name, one.processes) == (name, processes)]
        together = together or [Launcher(name, processes)]
        said = [*MODEL, *TWENTY, *flags, "--outputs", *(str(output(one, flags)) for one in together)]
        if name == "deepspeed":
            said += ["--zero_stages", *(str(one.zero_stage) for one in together)]
        finished = run(Launcher(name, processes), "tests/launch/vqgan_worker.py", said)
        return finished.output[-4000:] if finished.returncode else ""

    def train(launcher: Launcher, *flags: str) -> Path:
        error = job(launcher.name, launcher.processes, flags)
        assert not error, error
        return output(launcher, flags)

    return train


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=str)
def test_twenty_updates_have_the_bits_of_one_process(launcher: Launcher, trained: Any) -> None:
    """Both models, both optimizers' moments, codebook, LeCam and average, before and after the discriminator starts."""
    for quantizer in QUANTIZERS:
        ours, expected = (trained(who, *SAME_BITS) / quantizer for who in (launcher, ONE_PROCESS))
        assert unequal(ours, expected) == [], quantizer


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=str)
def test_the_log_of_twenty_updates_is_that_of_one_process(launcher: Launcher, trained: Any) -> None:
    for quantizer in QUANTIZERS:
        ours, expected = (lines(trained(who, *SAME_BITS) / quantizer) for who in (launcher, ONE_PROCESS))
        assert [line["step"] for line in ours] == list(range(1, 21))
        for line, reference in zip(ours, expected, strict=True):
            assert set(line) == set(reference)
            for key in set(reference) - CLOCKS:
                # fp64 means of equal numbers; validation is cut otherwise, and sums fp32 in another order.
                tolerance = 1e-5 if key.startswith("valid") else 1e-12
                assert line[key] == pytest.approx(reference[key], rel=tolerance, abs=tolerance), (quantizer, key)


def test_without_equal_bits_the_first_updates_agree_to_rounding(trained: Any) -> None:
    """Two processes that accumulate, and one with the whole batch at once. A code changes by a jump where rounding tips
    a sign, and Adam makes whole steps of tiny gradients: so at a small rate, and up to the third update with the
    discriminator. (At the default rate: with --batch_parts alone.)"""
    # Fewer codes than the batch has vectors: k-means would leave twins otherwise, and which one wins is rounding.
    small = ("--learning_rate", "1e-6", "--codebook_size", "64", "--fsq_levels", "4,4,4")
    for quantizer in QUANTIZERS:
        ours = lines(trained(Launcher("torchrun", 2), *small, "--grad_accum_steps", "2") / quantizer)
        expected = lines(trained(ONE_PROCESS, *small) / quantizer)
        for line, reference in list(zip(ours, expected, strict=True))[:9]:
            for key in ("loss", "recon_loss", "grad_norm", "discr_loss", "discr_grad_norm", "perplexity"):
                if key in reference:
                    # 1e-6 and less is seen; 1e-4 leaves room for a sign that tips.
                    assert line[key] == pytest.approx(reference[key], rel=1e-4), (quantizer, key, line["step"])


def test_a_run_that_is_killed_and_moved_has_the_bits_of_one_that_was_left_alone(tmp_path: Path, trained: Any) -> None:
    """SIGKILL at one rank, then SIGTERM at one rank, then to the end: each time on another backend."""
    folder = tmp_path / "moved"
    flags = [*MODEL, *TWENTY, *SAME_BITS, "--quantizer", "vq", "--output_dir", str(folder), "--save_every_n_steps", "3",
             "--keep_n_checkpoints", "100000"]  # fmt: skip

    began = time.time()
    job = start(Launcher("torchrun", 2), "train_vqgan.py", [*flags, "--max_steps", "100000"])
    wait_for_update(folder, 8, began)
    os.kill(worker_pids(job, "train_vqgan.py")[1], signal.SIGKILL)
    killed = finish(job, 120)
    assert killed.returncode != 0

    cut_back(folder, 9)
    began = time.time()
    job = start(Launcher("deepspeed", 2, zero_stage=3), "train_vqgan.py", [*flags, "--max_steps", "100000"])
    wait_for_update(folder, 10, began)
    os.kill(worker_pids(job, "train_vqgan.py")[1], signal.SIGTERM)
    stopped = finish(job, 120)
    assert "asked to stop: saved update" in stopped.output, stopped.output[-3000:]
    assert "it was written by ddp on 2" in stopped.output

    cut_back(folder, 15)
    finished = run(Launcher("horovodrun", 2), "train_vqgan.py", flags)
    assert finished.returncode == 0, finished.output[-4000:]
    assert unequal(folder, trained(ONE_PROCESS, *SAME_BITS) / "vq") == []
