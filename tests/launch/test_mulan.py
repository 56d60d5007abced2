"""What train_mulan.py guarantees: every pair is compared with the pairs of all processes and micro-batches."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jobs import Jobs, Task
from launching import CHOSEN, ONE_PROCESS, ZERO_STAGES, Launcher
from run_outputs import CLOCKS, lines, unequal
from safetensors.torch import load_file

LAUNCHERS = [Launcher("torchrun", 4), Launcher("horovodrun", 2), *ZERO_STAGES, *CHOSEN]
MODEL = ["--audio_data", "demo:tones:64", "--sample_rate", "8000", "--clip_seconds", "0.5", "--n_fft", "256",
         "--hop_length", "64", "--n_mels", "32", "--audio_dim", "16", "--audio_depth", "2", "--text_dim", "16",
         "--text_depth", "2", "--heads", "2", "--dim_head", "8", "--dim_latent", "8", "--patch_size", "8",
         "--max_text_tokens", "24", "--batch_size", "8", "--epochs", "1000", "--lr_warmup_steps", "4",
         "--valid_fraction", "0.2", "--num_workers", "0", "--log_every_n_steps", "1", "--save_every_n_steps", "0",
         "--sample_every_n_steps", "0", "--validate_every_n_steps", "6", "--ema_decay", "0.9"]  # fmt: skip
SAME_BITS = ["--max_steps", "12", "--batch_parts", "4"]
VARIANTS = {
    "decoupled": [],
    "softmax": ["--loss", "softmax", "--hierarchical_layers", "1", "--duplicates", "negatives"],
    "sigmoid": ["--loss", "sigmoid", "--use_lion", "--learning_rate", "1e-4"],
    "musiclm": ["--layout", "musiclm", "--win_length", "96", "--loss", "sigmoid", "--hierarchical_layers", "1"],
    "dropout": ["--attn_dropout", "0.2", "--ff_dropout", "0.1", "--text_heads", "1", "--gradient_checkpointing"],
    # With `text_tower`, which the layers below the last and the other tower learn beside.
    "frozen": ["--freeze_text_tower", "--hierarchical_layers", "1", "--ff_dropout", "0.1"],
}
# The losses have every engine, with toy towers, in test_contrastive.py. Here each engine has at least one with either
# kind of rounding, and Lion as well as AdamW.
OF_LAUNCHER = {
    LAUNCHERS[0]: {"rounded": ["decoupled", "sigmoid", "musiclm"], "bits": ["softmax", "dropout", "frozen"]},
    LAUNCHERS[1]: {"rounded": ["softmax"], "bits": ["decoupled", "sigmoid", "dropout"]},
    ZERO_STAGES[0]: {"rounded": ["decoupled"], "bits": ["sigmoid", "dropout"]},
    ZERO_STAGES[1]: {"rounded": ["sigmoid"], "bits": ["softmax", "dropout"]},
    ZERO_STAGES[2]: {"rounded": ["softmax"], "bits": ["sigmoid", "dropout"]},
    ZERO_STAGES[3]: {
        "rounded": ["decoupled", "sigmoid"], "bits": ["decoupled", "sigmoid", "musiclm", "dropout", "frozen"],
    },
    **{
        launcher: {"rounded": ["decoupled"], "bits": ["softmax", "decoupled", "musiclm", "dropout", "frozen"]}
        if launcher.processes == 2
        else {"rounded": ["sigmoid"], "bits": ["sigmoid", "dropout"]}
        for launcher in CHOSEN
    },
    ONE_PROCESS: {"rounded": ["decoupled", "softmax", "sigmoid", "musiclm"], "bits": list(VARIANTS)},
}  # fmt: skip


def model_of(variant: str) -> list[str]:
    """Its flags; the model of --layout musiclm has no bands."""
    at = MODEL.index("--n_mels")
    return MODEL[:at] + MODEL[at + 2 :] if variant == "musiclm" else MODEL


def text_tower(folder: Path) -> Path:
    """A small text tower of CLIP in the folder, with the names of open_clip."""
    draws, dim = torch.Generator().manual_seed(0), 16
    shapes = {"token_embedding.weight": (49408, dim), "positional_embedding": (24, dim)}
    norms = ["ln_final"]
    for layer in ("transformer.resblocks.0", "transformer.resblocks.1"):
        norms += [f"{layer}.ln_1", f"{layer}.ln_2"]
        shapes |= {f"{layer}.attn.in_proj_weight": (3 * dim, dim), f"{layer}.attn.in_proj_bias": (3 * dim,)}
        for part, sides in (("attn.out_proj", (dim, dim)), ("mlp.c_fc", (24, dim)), ("mlp.c_proj", (dim, 24))):
            shapes |= {f"{layer}.{part}.weight": sides, f"{layer}.{part}.bias": sides[:1]}
    shapes |= {f"{norm}.{end}": (dim,) for norm in norms for end in ("weight", "bias")}
    weights = {name: torch.randn(shape, generator=draws) / 4 for name, shape in shapes.items()}
    path = folder / "text_tower.pt"
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            torch.save(weights, file)
        os.replace(file.name, path)  # whole at once, because other jobs are listed at the same time
    return path


def tasks(launcher: Launcher, kind: str, jobs: Jobs) -> Iterator[Task]:
    rounded = ["--max_steps", "12", "--grad_accum_steps", "1" if launcher == ONE_PROCESS else "2"]
    for variant in OF_LAUNCHER[launcher][kind] if launcher in OF_LAUNCHER else []:
        how = rounded if kind == "rounded" else SAME_BITS
        more = ["--text_tower", str(text_tower(jobs.folder))] if variant == "frozen" else []
        yield Task(f"mulan-{variant}", "train_mulan", [*model_of(variant), *how, *VARIANTS[variant], *more])


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=str)
def test_twelve_updates_match_one_process(launcher: Launcher, jobs: Jobs) -> None:
    """The runs use accumulation, clipping, a schedule, an average of the weights, and AdamW or Lion."""
    for variant in OF_LAUNCHER[launcher]["rounded"]:
        ours = lines(jobs.output(launcher, "rounded", f"mulan-{variant}"))
        expected = lines(jobs.output(ONE_PROCESS, "rounded", f"mulan-{variant}"))
        assert [line["step"] for line in ours] == list(range(1, 13))
        for line, reference in zip(ours, expected, strict=True):
            # Rounding alone gives about 1e-7.
            tolerance = 1e-6 if line["step"] == 1 else 1e-5
            for key in ("loss", "temperature", "bias", "valid/loss", "valid/ema/loss"):
                if key in reference:
                    assert line[key] == pytest.approx(reference[key], rel=tolerance), (variant, key, line["step"])
            for key in ("audio_variance", "text_variance"):  # 1 - |mean|^2: the cancellation makes the error absolute
                assert line[key] == pytest.approx(reference[key], abs=tolerance), (variant, key, line["step"])
        # Only the first update has the same weights. In later ones, rounding differences of the weights, times the high
        # curvature of such a small model, change the gradient norm more.
        assert ours[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=1e-6), variant


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=str)
def test_with_batch_parts_twelve_updates_have_the_bits_of_one_process(launcher: Launcher, jobs: Jobs) -> None:
    for variant in OF_LAUNCHER[launcher]["bits"]:
        ours, expected = (jobs.output(who, "bits", f"mulan-{variant}") for who in (launcher, ONE_PROCESS))
        assert unequal(ours, expected) == [], variant
        for line, reference in zip(lines(ours), lines(expected), strict=True):
            trained_keys = {key for key in reference if not key.startswith("valid")} - CLOCKS
            assert {key: line[key] for key in trained_keys} == {key: reference[key] for key in trained_keys}


@pytest.mark.parametrize("launcher", [one for one in LAUNCHERS if "frozen" in OF_LAUNCHER[one]["bits"]], ids=str)
def test_a_frozen_text_tower_stays_as_it_was(launcher: Launcher, jobs: Jobs) -> None:
    """What is learned beside it has the bits of one process, as above."""
    weights = load_file(jobs.output(launcher, "bits", "mulan-frozen") / "model" / "model.safetensors")
    tower = torch.load(text_tower(jobs.folder), weights_only=True)
    assert torch.equal(weights["text.tokens.weight"], tower["token_embedding.weight"])
    for layer in range(2):
        name = f"transformer.resblocks.{layer}"
        assert torch.equal(weights[f"text.layers.{layer}.to_qkv.weight"], tower[f"{name}.attn.in_proj_weight"])
        assert torch.equal(weights[f"text.layers.{layer}.norm2.bias"], tower[f"{name}.ln_2.bias"])
    assert not torch.equal(weights["text.norms.0.weight"], torch.ones(16))
