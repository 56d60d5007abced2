"""The recipes of configs/ against the files of their sources: values, and where the source has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import train_vqgan
from tests.scripts import VIDEO_TOKENIZER, VQGAN, Script, metrics

RECIPES = {VQGAN: "imagenet256", VIDEO_TOKENIZER: "ucf101_128"}
# There, images are in [-1, 1], where an absolute error is twice that of [0, 1]: the other weights of the generator are
# half of theirs. Their hinge loss has a factor 1/2, so that the weight of LeCam is twice theirs. With three
# heads, whose losses are added here and of which the mean is taken there, the adversarial weight is a third again.
OPEN_MAGVIT2: dict[str, tuple[Any, str]] = {
    "crop": ("random", "data/base.py, T.RandomCrop; data/ucf101.py, RandomCrop"),
    "crop_area": (None, "the same"),
    "random_flip": (False, "the same: no flips"),
    "learning_rate": (1e-4, "learning_rate of both configurations"),
    "discr_learning_rate": (None, "models/lfqgan.py, configure_optimizers: the same rate"),
    "betas": ((0.5, 0.9), "the same, of both optimizers"),
    "discr_betas": (None, "the same"),
    "max_grad_norm": (0.0, "models/lfqgan.py, training_step: no clipping"),
    "ema_decay": (0.999, "modules/ema.py, LitEma"),
    "perceptual_loss_weight": (1 / 2, "perceptual_weight 1 of both"),
    "penalty_weight": (0.0, "there is none"),
    "discr_start_step": (0, "disc_start"),
    "lecam_weight": (2 * 0.05, "lecam_loss_weight of both"),
    "lecam_decay": (0.999, "modules/losses/vqperceptual.py, LeCAM_EMA"),
    "codebook_size": (2**18, "n_embed of both configurations"),
}
OF_ONE: dict[Script, dict[str, tuple[Any, str]]] = {
    VQGAN: {
        "batch_size": (256, "batch_size 8 x devices 8 x num_nodes 4"),
        "epochs": (270, "max_epochs"),
        "gan_weight": (0.1 / 2, "gen_loss_weight"),
        "commitment_loss_weight": (0.25 / 2, "commit_weight"),
        "entropy_loss_weight": (0.1 / 2, "codebook_weight"),
        "entropy_anneal_steps": (0, "no annealing"),
        "lr_drop_epochs": ((200.0, 250.0), "lr_drop_epoch"),
        "lr_warmup_steps": (0, "scheduler_type None"),
        "lr_cosine": (False, "scheduler_type None"),
    },
    VIDEO_TOKENIZER: {
        "batch_size": (128, "batch_size 2 x devices 8 x num_nodes 8"),
        "epochs": (2000, "max_epochs"),
        "gan_weight": (pytest.approx(0.3 / 2 / 3), "gen_loss_weight"),
        "lr_warmup_steps": (150, "wp: 2 epochs of 9,537 clips"),
        "lr_cosine": (True, "sche_type cos"),
        "weight_decay": (0.0, "models/video_lfqgan.py, configure_optimizers: Adam"),
        "frame_stride": (1, "data/ucf101.py, load_video_from_path_decord: successive frames"),
        "num_frames": (17, "sequence_length"),
    },
}


@pytest.mark.parametrize("script", RECIPES, ids=str)
def test_a_recipe_has_the_schedule_and_the_augmentation_of_its_source(script: Script) -> None:
    args = vars(script.parsed("--config", str(script.configs / f"{RECIPES[script]}.yaml")))
    expected = {flag: value for flag, (value, _) in {**OPEN_MAGVIT2, **OF_ONE[script]}.items()}
    assert {flag: args[flag] for flag in expected} == expected


def test_the_learning_rates_fall_to_a_tenth_after_each_of_the_epochs(tmp_path: Path) -> None:
    args = VQGAN.parsed("--lr_drop_epochs", "200,250")
    drops = [train_vqgan.rate_drop(epoch, args) for epoch in (0, 199.99, 200, 249.99, 250, 270)]
    assert drops == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert train_vqgan.rate_drop(1e6, VQGAN.parsed()) == 1
    # An epoch is 51 images, 6.4 updates of 8: the eighth update is the first after one epoch.
    run = VQGAN.train(tmp_path / "run", "--lr_drop_epochs", "1,9", "--learning_rate", "2e-3", "--max_steps", "9")
    assert [line["lr"] for line in metrics(run)] == pytest.approx([2e-3] * 7 + [2e-4] * 2)
    assert VQGAN.arguments_of(run).lr_drop_epochs == (1, 9)
