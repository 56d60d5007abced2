"""What a script guarantees that trains several models side by side, with random numbers in every loss, and that draws
pictures over all processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from jobs import Jobs, Task
from launching import CHOSEN, ONE_PROCESS, ZERO_STAGES, Launcher
from run_outputs import CLOCKS, lines, unequal

TWO, FOUR = Launcher("torchrun", 2), Launcher("torchrun", 4)
LAUNCHERS = [FOUR, Launcher("horovodrun", 2), *ZERO_STAGES, *CHOSEN]
SHARED = ["--image_folder", "demo:shapes:64", "--image_sizes", "8", "16", "--dim", "8", "--dim_mults", "1,2",
          "--num_resnet_blocks", "1", "--attn_heads", "2", "--attn_dim_head", "8", "--cross_attn_heads", "2",
          "--cross_attn_dim_head", "8", "--resnet_groups", "4", "--batch_size", "8", "--epochs", "100",
          "--num_workers", "0", "--log_every_n_steps", "1", "--save_every_n_steps", "0", "--sample_every_n_steps", "0",
          "--validate_every_n_steps", "0", "--ema_decay", "0.9", "--learning_rate", "1e-3", "--test_fraction", "0",
          "--condition_on", "image,text", "--sample_timesteps", "2", "--cond_scale", "2", "1",
          "--num_images_save", "5"]  # fmt: skip
# Everything at once: dropped conditions, self-conditioning, a learned weight, a learned variance, noise on the smaller
# picture, crops.
SAME_BITS = ["--max_steps", "12", "--batch_parts", "4", "--switches", "self_cond", "none", "--loss_weight", "learned",
             "none", "--learned_variance", "0", "1", "--lowres_condition", "noise", "--random_crop_sizes", "0", "8",
             "--n_evaluation_samples", "18"]  # fmt: skip


def tasks(launcher: Launcher, kind: str, jobs: Jobs) -> Iterator[Task]:
    if kind == "bits" and launcher in [ONE_PROCESS, *LAUNCHERS]:
        yield Task("decoder", "train_decoder", [*SHARED, *SAME_BITS])
    elif kind == "rounded" and launcher in [ONE_PROCESS, TWO]:
        accumulation = ["--grad_accum_steps", "1" if launcher == ONE_PROCESS else "2"]
        yield Task("decoder", "train_decoder", [*SHARED, "--max_steps", "4", *accumulation])


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=str)
def test_both_unets_have_the_bits_of_one_process(launcher: Launcher, jobs: Jobs) -> None:
    ours, expected = (jobs.output(who, "bits", "decoder") for who in (launcher, ONE_PROCESS))
    assert unequal(ours, expected) == []


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=str)
def test_pictures_are_those_of_one_process(launcher: Launcher, jobs: Jobs) -> None:
    ours, expected = (jobs.output(who, "bits", "decoder") / "samples" for who in (launcher, ONE_PROCESS))
    (name,) = (path.name for path in expected.iterdir())
    assert (ours / name).read_bytes() == (expected / name).read_bytes()


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=str)
def test_the_log_is_that_of_one_process(launcher: Launcher, jobs: Jobs) -> None:
    ours, expected = (lines(jobs.output(who, "bits", "decoder")) for who in (launcher, ONE_PROCESS))
    assert [line["step"] for line in ours] == list(range(1, 13))
    for line, reference in zip(ours, expected, strict=True):
        assert set(line) == set(reference)
        for key in set(reference) - CLOCKS:
            # Training logs fp64 means of equal numbers. Validation divides the samples differently, and so sums fp32
            # numbers in another order; what is read from drawn pictures is counted.
            is_validation = key.startswith("valid") and not key.endswith(("shape", "colour", "place"))
            tolerance = 1e-5 if is_validation else 1e-12
            assert line[key] == pytest.approx(reference[key], rel=tolerance, abs=tolerance), key


def test_without_equal_bits_the_first_updates_agree_to_rounding(jobs: Jobs) -> None:
    """Two processes that accumulate agree with one process that has the whole batch at once."""
    ours, expected = (lines(jobs.output(who, "rounded", "decoder")) for who in (TWO, ONE_PROCESS))
    assert len(ours) == 4
    for line, reference in zip(ours, expected, strict=True):
        for key in ("loss", "grad_norm", "unet1/loss", "unet2/loss"):
            # Sums in another order differ by about 1e-7; Adam amplifies that a little from update to update.
            tolerance = 1e-6 if line["step"] == 1 else 1e-5
            assert line[key] == pytest.approx(reference[key], rel=tolerance), (key, line["step"])
