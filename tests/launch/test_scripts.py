"""The five scripts through every launcher, with everything on: what a run leaves is what one process leaves.

With --batch_parts it has the same bits. Without, it agrees to rounding.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forks import fork
from jobs import Jobs, Task
from PIL import Image
from safetensors.torch import load_file

from benchmarks.launching import CHOSEN_ON_FOUR, CHOSEN_ON_TWO, ONE_PROCESS, WHOLE_MATRIX, ZERO_STAGES, Launcher, run
from tandem.models import VQGAN
from tandem.weights.formats.towers import read_text_tower
from tests.models.helpers import write_vgg16
from tests.models.towers import audio_folder, text_folder, vision_folder
from tests.scripts import (
    RUN,
    SCRIPTS,
    VOCABULARY,
    assert_same_bits,
    files,
    metrics,
    shared_state,
    without_clocks,
    words,
)

TWO = Launcher("torchrun", 2)
# Each backend and number of processes has one job; backends that shard have one of either kind.
SAME_BITS = [Launcher("torchrun", 4), Launcher("horovodrun", 2), ZERO_STAGES[1], ZERO_STAGES[3], *CHOSEN_ON_FOUR]
TO_ROUNDING = [TWO, Launcher("horovodrun", 3), ZERO_STAGES[0], ZERO_STAGES[2], *CHOSEN_ON_TWO]
if WHOLE_MATRIX:  # four parts of a batch on three processes, or six samples in two micro-batches on four, cannot be
    everyone = [*SAME_BITS, *TO_ROUNDING]
    SAME_BITS, TO_ROUNDING = ([each for each in everyone if each.processes != n] for n in (3, 4))
N_PHOTOS, BROKEN = 60, (5, 17, 40)
# 12 divides by 1, 2, 3 and 4 processes. An epoch of 51 samples ends within the fifth update.
COMMON = {**RUN, "batch_size": 12, "epochs": 100, "max_steps": 6, "ema_decay": 0.9, "validate_every_n_steps": 3,
          "sample_every_n_steps": 3, "seed": 3}  # fmt: skip
ADVERSARIAL = {"discr_start_step": 2, "lecam_weight": 0.1, "apply_grad_penalty_every": 2, "max_grad_norm": 0.5}
MASKBIT = {"discriminator": "maskbit", "discr_dim": 8}
HIERARCHICAL = {"hierarchical_layers": 1}
OWN_SIZES = ("audio_dim", "audio_depth", "text_dim", "text_depth", "n_fft", "hop_length", "n_mels", "patch_size")
ALIGNED = ("taming-kl", "tokenizer-vq")
TAMING = {"body": "taming", "ch_mult": "1,2,2", "attention_levels": "1", "norm_groups": 4}
VARIANTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "vae": ("train_vae", {"max_grad_norm": 0.05, "random_flip": None, "num_images_save": 11}),
    **{
        f"vqgan-{quantizer}": ("train_vqgan", {**ADVERSARIAL, "quantizer": quantizer, **more})
        for quantizer, more in {
            # With `perceptual_weights`, an untrained VGG16.
            "lfq": {"perceptual": "vgg", "gram_loss_weight": 1}, "vq": {"channels": 4, "image_size": "16x24"},
            "fsq": {"fsq_levels": "4,4,4"}, "bsq": MASKBIT, "ibq": MASKBIT,
        }.items()
    },
    "taming-kl": (
        "train_vqgan",
        {**ADVERSARIAL, **TAMING, "quantizer": "kl", "equivariance_weight": 0.5, "latent_noise": 2,
         "image_size": "16x24"},
    ),
    "taming-vq": (
        "train_vqgan",
        {**ADVERSARIAL, **TAMING, "quantizer": "vq", "codebook_size": 64, "vq_gradient": "rotation"},
    ),
    # With `init_from`, a model of continuous latents.
    "taming-decoder": ("train_vqgan", {**ADVERSARIAL, **TAMING, "quantizer": "kl", "train": "decoder"}),
    # Every third update is one of images, which have nothing for the heads that judge clips.
    **{
        f"tokenizer-{quantizer}": (
            "train_tokenizer",
            {**ADVERSARIAL, "quantizer": quantizer, "image_folder": "demo:shapes:64", "image_every": 3,
             "equivariance_weight": 0.5, "latent_noise": 2, **more},
        )
        for quantizer, more in (
            ("vq", {}), ("lfq", MASKBIT),
            ("kl", {"body": "wan", "ch_mult": "1,1", "time_levels": "0", "num_resnet_blocks": 1, "latent_dim": 4,
                    "clip_frames": "3,5", "residual_resampling": None, "gradient_checkpointing": None}),
        )
    },
    # Dropped conditions, linear attention, a weighted loss, a learned variance, noise on the smaller picture, crops.
    "decoder": (
        "train_decoder",
        {"switches": ["coordinates", "sparse_attn"], "loss_weight": ["min_snr", "none"], "learned_variance": [0, 1],
         "lowres_condition": "noise", "random_crop_sizes": [0, 8], "condition_on": "image,text",
         "cond_scale": [2, 1], "num_images_save": 3},
    ),
    "mulan-softmax": ("train_mulan", {**HIERARCHICAL, "loss": "softmax", "duplicates": "negatives"}),
    "mulan-sigmoid": ("train_mulan", {"loss": "sigmoid", "use_lion": None, "learning_rate": 1e-4}),
    "mulan-musiclm": ("train_mulan", {**HIERARCHICAL, "layout": "musiclm", "win_length": 96, "loss": "sigmoid"}),
    "mulan-dropout": (
        "train_mulan",
        {"attn_dropout": 0.2, "ff_dropout": 0.1, "text_heads": 1, "gradient_checkpointing": None},
    ),
    # With `text_tower`, which the layers below the last and the other tower, an AST, learn beside.
    "mulan-frozen": (
        "train_mulan",
        {**HIERARCHICAL, "freeze_text_tower": None, "gradient_checkpointing": None, "sample_rate": 16000},
    ),
}  # fmt: skip


# What these launchers run, in their order, so that each script is on several of them; `WHOLE_MATRIX` has every pair.
TURNS_OF_BITS = [
    ("vae", "vqgan-lfq", "mulan-softmax", "tokenizer-kl"),
    ("vae", "tokenizer-vq", "mulan-frozen"),
    ("vae", "vqgan-vq", "decoder"),
    ("vae", "tokenizer-kl", "taming-kl"),
    ("vae", "decoder", "tokenizer-kl"),
]
TURNS_OF_ROUNDING = [
    ("vqgan-fsq", "mulan-dropout", "taming-decoder"),
    ("vae", "tokenizer-lfq", "taming-vq"),
    ("vae", "mulan-musiclm", "decoder"),
    ("vqgan-bsq", "tokenizer-vq"),
    ("vqgan-ibq", "mulan-sigmoid"),
]


def chosen(launchers: list[Launcher], turns: list[tuple[str, ...]]) -> dict[Launcher, list[str]]:
    """The variants of each launcher."""
    if WHOLE_MATRIX:
        return {launcher: list(VARIANTS) for launcher in launchers}
    return {launcher: [*turns[place % len(turns)]] for place, launcher in enumerate(launchers)}


BITS = chosen(SAME_BITS, TURNS_OF_BITS)
ROUNDED = chosen(TO_ROUNDING, TURNS_OF_ROUNDING)


def flags(name: str, folder: Path) -> list[str]:
    """Those of a variant, with which any backend and number of processes has to give the same."""
    script, more = VARIANTS[name]
    without = {"mulan-musiclm": ("n_mels",), "mulan-frozen": OWN_SIZES}.get(name, ())
    if name.startswith("taming"):
        without = ("num_layers", "codebook_size")
    if name == "tokenizer-kl":
        without = ("layers", "input_kernel", "codebook_size")
    tiny = {key: value for key, value in SCRIPTS[script].tiny.items() if key not in without}
    data = f"{SCRIPTS[script].data.demonstration}:64"
    if name == "vae":
        data = str(in_one_step(folder / "photos", sixty_photos))
    if name == "mulan-frozen":
        more = {**more, "text_tower": text_tower(folder), "audio_tower": in_one_step(folder / "audio", audio_folder)}
    if name == "vqgan-lfq":
        more = {**more, "perceptual_weights": in_one_step(folder / "vgg16", write_vgg16)}
    if name in ALIGNED:
        more = {**more, "align_with": in_one_step(folder / "vision", vision_folder), "align_cosine_margin": 0}
    if name == "taming-decoder":
        more = {**more, "init_from": in_one_step(folder / "latents", write_latents)}
    return words({**COMMON, SCRIPTS[script].data.flag: data, **tiny, **more})


def of_rounding(name: str) -> list[str]:
    """A code jumps if rounding changes a sign, and Adam makes full steps even from tiny gradients: so adversarial runs
    have a tiny learning rate. They have fewer codes than the batch has vectors: k-means would leave equal codes, and
    rounding would decide which of them is the nearest."""
    rate = {"learning_rate": 1e-7} if name.startswith(("vqgan", "tokenizer", "taming")) else {}
    has_codes = name.startswith(("vqgan", "tokenizer")) and not name.endswith("kl")
    return words({**rate, **({"codebook_size": 64} if has_codes else {})})


def tasks(launcher: Launcher, kind: str, jobs: Jobs, names: Sequence[str] = ()) -> Iterator[Task]:
    """The chosen variants, or those of these names."""
    chosen_here = BITS if kind == "bits" else ROUNDED
    everything = sorted({name for names in chosen_here.values() for name in names})
    for name in names or (everything if launcher == ONE_PROCESS else chosen_here.get(launcher, [])):
        how = ["--batch_parts", "4"]
        if kind == "bits" and launcher.zero_stage == 3:  # without this, it would not shard so small models
            config = jobs.folder / "sharded.json"
            config.write_text(json.dumps({"zero_optimization": {"stage3_param_persistence_threshold": 0}}))
            how += ["--deepspeed_config", str(config)]
        if kind == "rounded":
            how = [*of_rounding(name), "--grad_accum_steps", "1" if launcher == ONE_PROCESS else "2"]
        yield Task(name, VARIANTS[name][0], [*flags(name, jobs.folder), *how])


def sixty_photos(folder: Path) -> None:
    """Single-coloured photos, three of which are broken."""
    for index in range(N_PHOTOS):
        path = folder / f"{index:03d}.png"
        Image.new("RGB", (40, 30), (4 * index, 2 * index, 255 - index)).save(path)
        if index in BROKEN:
            path.write_bytes(path.read_bytes()[:60])


def text_tower(folder: Path) -> Path:
    """A small BERT."""
    sizes = {"vocab_size": len(VOCABULARY), "max_position_embeddings": 24}
    return in_one_step(folder / "text_tower", lambda made: text_folder(made, "bert", **sizes))


def in_one_step(path: Path, write: Callable[[Path], object]) -> Path:
    """Have a folder written and then renamed, because other workers of pytest list jobs at the same time; theirs are
    the same."""
    if not path.exists():
        write(made := Path(tempfile.mkdtemp(dir=path.parent)))
        with contextlib.suppress(OSError):
            os.rename(made, path)
    return path


def write_latents(folder: Path) -> None:
    """A small model of continuous latents."""
    torch.manual_seed(7)
    shape = {"ch_mult": [1, 2, 2], "attention_levels": [1], "num_resnet_blocks": [2]}
    VQGAN.from_dict({**TAMING, **shape, "image_size": 16, "dim": 8, "quantizer": "kl"}).save_pretrained(folder)


def pictures(run_folder: Path) -> dict[str, np.ndarray]:
    return {path.name: np.asarray(Image.open(path)) for path in (run_folder / "samples").glob("*.png")}


@pytest.mark.parametrize("launcher", SAME_BITS, ids=str)
def test_in_parts_models_moments_averages_and_pictures_have_the_bits_of_one_process(
    launcher: Launcher, jobs: Jobs
) -> None:
    for name in BITS[launcher]:
        ours, expected = (jobs.output(who, "bits", name) for who in (launcher, ONE_PROCESS))
        assert_same_bits(shared_state(ours), shared_state(expected))
        drawn, reference = pictures(ours), pictures(expected)
        assert drawn.keys() == reference.keys() and len(reference) >= 2, name
        for file, picture in reference.items():
            np.testing.assert_array_equal(drawn[file], picture, err_msg=f"{name} {file}")
        if name == "vae":
            left, final = (torch.load(of / "vae-final.pt", weights_only=True) for of in (ours, expected))
            assert left["hparams"] == final["hparams"]
            assert_same_bits(left["weights"], final["weights"])


@pytest.mark.parametrize("launcher", SAME_BITS, ids=str)
def test_in_parts_the_log_is_that_of_one_process(launcher: Launcher, jobs: Jobs) -> None:
    for name in BITS[launcher]:
        ours, expected = (without_clocks(jobs.output(who, "bits", name)) for who in (launcher, ONE_PROCESS))
        assert [line["step"] for line in ours] == list(range(1, 7))
        for line, reference in zip(ours, expected, strict=True):
            assert set(line) == set(reference)
            for key in reference:
                # Training logs fp64 means of equal numbers. Validation divides the samples differently, and so sums
                # fp32 numbers in another order.
                tolerance = 1e-5 if key.startswith("valid") else 1e-12
                assert line[key] == pytest.approx(reference[key], rel=tolerance, abs=tolerance), (name, key)


@pytest.mark.parametrize("launcher", TO_ROUNDING, ids=str)
def test_processes_that_accumulate_agree_to_rounding_with_one_that_has_the_whole_batch(
    launcher: Launcher, jobs: Jobs
) -> None:
    for name in ROUNDED[launcher]:
        ours, expected = (metrics(jobs.output(who, "rounded", name)) for who in (launcher, ONE_PROCESS))
        assert [line["step"] for line in ours] == list(range(1, 7))
        for key in expected[-1].keys() & COMPARED:
            both = [(a[key], b[key]) for a, b in zip(ours, expected, strict=True) if key in a]
            differences = [abs(a - b) / max(abs(b), 1e-3) for a, b in both]
            assert_rounding(name, key, differences)


COMPARED = {"loss", "recon_loss", "grad_norm", "discr_loss", "discr_grad_norm", "gan_weight", "perplexity", "bias",
            "temperature", "unet1/loss", "unet2/loss", "valid/loss", "valid/ema/loss"}  # fmt: skip


def assert_rounding(name: str, key: str, differences: list[float]) -> None:
    """Sums of fp32 numbers in another order differ by about 1e-7, which Adam passes on from update to update.

    In an adversarial run, rounding may change the sign of an activation of the discriminator, which shows in that
    update's adaptive weight and norm (observed: 2e-3 in one of 40 updates): one update of each run may differ. The
    gradient of a codebook's entropy is a small difference of large numbers: in fp32 it is off by up to 8e-5 from that
    in fp64, in each of the two runs. The curvature of so small a MuLaN turns rounding differences of later weights into
    larger ones of the norm.
    """
    if name.startswith(("vqgan", "tokenizer", "taming")):
        usual = 4e-4 if key in ("grad_norm", "discr_grad_norm") else 1e-5
        assert sorted(differences)[-2] <= usual and max(differences) <= 2e-2, (name, key, differences)
        return
    assert differences[0] <= 1e-6, (name, key, differences)
    if not (name.startswith("mulan") and key == "grad_norm"):
        assert max(differences) <= 1e-5, (name, key, differences)


@pytest.mark.parametrize("launcher", [ONE_PROCESS, *SAME_BITS], ids=str)
def test_broken_photos_are_named_once_and_counted_alike(launcher: Launcher, jobs: Jobs) -> None:
    last = metrics(jobs.output(launcher, "bits", "vae"))[-1]
    assert last["bad_samples"] == metrics(jobs.output(ONE_PROCESS, "bits", "vae"))[-1]["bad_samples"] > 0
    n_runs = sum(launcher.without_stage == each.without_stage for each in SAME_BITS) or 1  # stages of ZeRO share a job
    said = re.findall(r"cannot read \S*photos\S*(\d{3})\.png", jobs.said(launcher, "bits"))
    assert len(said) == n_runs * last["bad_samples"] and {int(index) for index in said} <= set(BROKEN)


FROZEN = [launcher for launcher in SAME_BITS if "mulan-frozen" in BITS[launcher]]


@pytest.mark.parametrize("launcher", FROZEN, ids=str)
def test_a_frozen_text_tower_stays_as_it_was(launcher: Launcher, jobs: Jobs) -> None:
    """What is learned beside it has the bits of one process, as above."""
    weights = load_file(jobs.output(launcher, "bits", "mulan-frozen") / "model" / "model.safetensors")
    tower = read_text_tower(text_tower(jobs.folder)).weights
    assert_same_bits({name: weights[f"text.encoder.{name}"] for name in tower}, tower)
    assert not torch.equal(weights["text.norms.0.weight"], torch.ones(16))


OF_DECODER = [launcher for launcher in TO_ROUNDING if "taming-decoder" in ROUNDED[launcher]]


@pytest.mark.parametrize("launcher", OF_DECODER, ids=str)
def test_a_frozen_encoder_stays_as_it_was_and_the_decoder_does_not(launcher: Launcher, jobs: Jobs) -> None:
    run_folder = jobs.output(launcher, "rounded", "taming-decoder")
    weights = load_file(run_folder / "model" / "model.safetensors")
    before = load_file(jobs.folder / "latents" / "model.safetensors")
    kept = [name for name in before if not name.startswith("decoder.")]
    assert_same_bits({name: weights[name] for name in kept}, {name: before[name] for name in kept})
    assert not torch.equal(weights["decoder.conv_in.weight"], before["decoder.conv_in.weight"])
    # The discriminator, sharded or not, lies beside the model.
    discriminator, state = (
        load_file(run_folder / "model" / "discriminator" / "model.safetensors"),
        shared_state(run_folder),
    )
    assert_same_bits(discriminator, {name: state[f"discriminator: weights/{name}"] for name in discriminator})


def test_fresh_on_two_processes_renames_the_old_run_once_and_asks_nobody(jobs: Jobs, tmp_path: Path) -> None:
    """The public trainers ask on every process whether to delete the folder, and each of them deletes it."""
    shutil.copytree(jobs.output(ONE_PROCESS, "bits", "vae"), tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    old = files(tmp_path / "run")
    short = [*flags("vae", jobs.folder), "--max_steps", "2", "--output_dir", str(tmp_path / "run"), "--fresh"]
    ranks = fork("train_vae", short, tmp_path / "log", 2)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "run", "run.old-1"]
    assert files(tmp_path / "run.old-1") == old
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2] and not (tmp_path / "run/notes.txt").exists()


def test_operations_of_two_processes_add_up_to_those_of_one(tmp_path: Path) -> None:
    small = {**COMMON, **SCRIPTS["train_vae"].tiny, "image_folder": "demo:shapes:64", "max_steps": 2}
    command = words({**small, "validate_every_n_steps": 0, "sample_every_n_steps": 0})
    for world_size in (1, 2):
        out = str(tmp_path / str(world_size))
        ranks = fork("train_vae", [*command, "--output_dir", out], tmp_path / f"log{world_size}", world_size)
        assert all(rank.returncode == 0 for rank in ranks), ranks[0].output
    one, two = ([line["gflop_per_sample"] for line in metrics(tmp_path / name)] for name in ("1", "2"))
    assert one == two


def test_a_compiled_model_has_the_losses_of_one_that_is_not(tmp_path: Path) -> None:
    """The model is small, because a compiler for C++ is started for every kernel of every process."""
    small = {**COMMON, **SCRIPTS["train_vae"].tiny, "num_layers": 1, "image_folder": "demo:shapes:64"}
    command = words({**small, "validate_every_n_steps": 0, "sample_every_n_steps": 0})
    [whole] = fork("train_vae", [*command, "--output_dir", str(tmp_path / "one")], tmp_path / "log")
    assert whole.returncode == 0, whole.output
    finished = run(TWO, "train_vae.py", [*command, "--compile", "--output_dir", str(tmp_path / "two")])
    assert finished.returncode == 0, finished.output[-4000:]
    losses, expected = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("two", "one"))
    # Fused kernels round differently, by as much as another order of sums does.
    assert len(losses) == 6 and losses == pytest.approx(expected, rel=1e-5)
    flops, expected = ([line.get("gflop_per_sample") for line in metrics(tmp_path / name)] for name in ("two", "one"))
    assert flops == [None, *expected[1:]]  # the first update, in which the compiler works, is not counted
