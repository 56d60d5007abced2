"""The benchmark's processes really measure the script and a bare loop: a few updates of a tiny model."""

from __future__ import annotations

import sys

import pytest

from benchmarks.jobs import PYTHON, TORCHRUN, JobFailed, Launcher, measure, run

VAE = (
    "--script train_vae --image_size 16 --num_tokens 8 --emb_dim 8 --num_layers 1 --num_resnet_blocks 0 --hidden_dim 8"
)


@pytest.mark.parametrize(
    "model",
    [
        VAE,
        "--script train_decoder --config configs/decoder/demo.yaml --image_sizes 4 8 --dim 8 --random_crop_sizes 0 4 "
        "--sample_timesteps 1 --num_images_save 1",
    ],
    ids=["train_vae", "train_decoder"],
)
def test_the_script_and_the_bare_loop_take_turns(model: str) -> None:
    check(PYTHON, model, ["script", "same_noise"], 1)


def check(launcher: Launcher, model: str, sides: list[str], processes: int) -> None:
    _, script, *flags = model.split()
    flags += ["--image_folder", "demo:shapes:32", "--batch_size", str(2 * processes)]
    measured = measure(
        launcher, sides, flags, script=script, processes=processes, threads=1, rounds=2, turns=1, updates=1
    )
    assert list(measured) == sides
    for of_side in measured.values():
        assert len(of_side["samples_per_second"]) == 2 and all(rate > 0 for rate in of_side["samples_per_second"])
        assert of_side["memory_bytes"]["updates"] >= of_side["memory_bytes"]["before"] > 0


def test_processes_in_distributed_data_parallel_take_turns_with_the_script() -> None:
    check(TORCHRUN, VAE, ["script", "ddp"], 2)


def test_a_side_that_fails_is_one_line_and_ends_the_others() -> None:
    with pytest.raises(JobFailed, match=r"exit code 1: .*image_size 7 must be"):
        measure(PYTHON, ["script", "fused_adam"], ["--image_size", "7"], rounds=1, turns=1, updates=1)


def test_a_job_that_fails_ends_an_earlier_one_that_waits_for_it() -> None:
    waits = [sys.executable, "-c", "import time; time.sleep(1000)"]
    fails = [sys.executable, "-c", "raise SystemExit('error: no such option')"]
    with pytest.raises(JobFailed, match="exit code 1: error: no such option"):
        run([waits, fails], {}, seconds=60)
