"""Small MuLaNs whose outputs in musiclm-pytorch 0.2.8 stand in musiclm.npz: their arguments, weights and inputs.

Weights and inputs are functions of their names, so that nothing but constants and outputs has to be stored.
`make_musiclm.py` makes the file.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.models.reference.unets import numbers, output_in, shapes_in, weights_of

FILE = Path(__file__).with_name("musiclm.npz")


class Case(NamedTuple):
    """Arguments of the public classes. What is not said is the default there: n_fft 128, win 24, hop 12, patch 16."""

    audio: dict[str, Any]
    text: dict[str, Any]
    mulan: dict[str, Any]
    samples: int
    """Of a clip."""


_HEADS = {"heads": 2, "dim_head": 8}
CASES = {
    "plain": Case(
        {"dim": 16, "depth": 2, **_HEADS}, {"dim": 12, "depth": 2, "num_tokens": 40, "max_seq_len": 10, **_HEADS},
        {"dim_latent": 6}, samples=1000,
    ),
    "layers": Case(
        {"dim": 20, "depth": 4, **_HEADS, "heads": 3, "patch_size": 8, "spec_n_fft": 62, "spec_win_length": 40,
         "spec_hop_length": 31},
        {"dim": 16, "depth": 3, **_HEADS, "heads": 3, "num_tokens": 30, "max_seq_len": 9},
        {"dim_latent": 10, "hierarchical_contrastive_loss": True, "decoupled_contrastive_learning": False},
        samples=1500,
    ),
    "sigmoid": Case(
        {"dim": 12, "depth": 3, **_HEADS, "patch_size": 4}, {"dim": 16, "depth": 5, **_HEADS, "num_tokens": 25},
        {"dim_latent": 4, "hierarchical_contrastive_loss": True, "hierarchical_contrastive_loss_layers": 1,
         "sigmoid_contrastive_loss": True},
        samples=300,
    ),
}  # fmt: skip
# Of the file: the window, the table of the time stretch, numbers of layers.
CONSTANTS = ("window", "phase_advance", "indices")
PAIRS = 3


def state_of(case: str, shapes: dict[str, list[int]] | None = None) -> dict[str, Tensor]:
    """A public state dict without its constants."""
    shapes = shapes_in(FILE, case) if shapes is None else shapes
    state = weights_of(case, {name: shape for name, shape in shapes.items() if not name.endswith(CONSTANTS)})
    for name, weight in state.items():
        if name.endswith(("gamma", "_scale")):
            weight.mul_(0.3).add_(1)
        elif name.endswith("temperatures"):
            weight.mul_(0.3).add_(math.log(10))
    return state


def sounds(case: str) -> Tensor:
    """(b, samples), the last of them silent from the middle on."""
    waveforms = torch.from_numpy(numbers(f"{case}/sounds", PAIRS, CASES[case].samples)).float() / 4
    waveforms[-1, CASES[case].samples // 2 :] = 0
    return waveforms


def tokens(case: str) -> Tensor:
    """int64 (b, 8), with the padding 0 at the end of a text, within one, and instead of one."""
    found = numbers(f"{case}/tokens", PAIRS, 8) / 2 + 0.5
    texts = 1 + torch.from_numpy(found * (CASES[case].text["num_tokens"] - 1)).long()
    texts[0, 5:] = texts[1, 2] = texts[2] = 0
    return texts


def stored_constants(case: str) -> dict[str, Tensor]:
    """What the public package saves beside the weights."""
    start = f"{case}/constant/"
    with np.load(FILE) as file:
        return {name.removeprefix(start): torch.from_numpy(file[name]) for name in file if name.startswith(start)}


def stored_output(case: str, name: str) -> Tensor:
    """Of the public package: "audio", "text" (b, d), "similarities" (b, b), "loss"; and with a hierarchical loss "audio
    layers", "text layers" (layers, b, d), the lowest layer first."""
    return output_in(FILE, f"{case}/{name}")
