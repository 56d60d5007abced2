"""Small image tokenizers whose outputs in DALLE-pytorch 1.1.4 and muse-maskgit-pytorch 0.3.5 stand in tokenizers.npz.

Weights and images are functions of their names, so that nothing but the outputs has to be stored. `make_tokenizers.py`
makes the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.models.reference.unets import numbers, output_in, shapes_in, weights_of

FILE = Path(__file__).with_name("tokenizers.npz")

# What releases of DALLE-pytorch before 1.6.0 wrote as hparams: they had no `channels`.
VAE = {
    "image_size": 16, "num_layers": 2, "num_tokens": 12, "codebook_dim": 6, "hidden_dim": 8, "num_resnet_blocks": 1,
}  # fmt: skip
# Arguments of the public VQGanVAE.
VQGAN: dict[str, Any] = {
    "dim": 16, "layers": 2, "codebook_size": 256, "encdec_num_resnet_blocks": (1, 2), "discr_layers": 2,
}  # fmt: skip


def images(case: str) -> Tensor:
    """Two images in [0, 1]; of the VQGAN, 16 x 32 pixels."""
    shape = (2, 3, 16, 16 if case == "vae" else 32)
    return torch.from_numpy(numbers(f"{case}/images", *shape)).float() / 2 + 0.5


def state_of(case: str, shapes: dict[str, list[int]] | None = None) -> dict[str, Tensor]:
    """A public state dict: of "vae", or of "vqgan" with its discriminator."""
    state = weights_of(case, shapes_in(FILE, case) if shapes is None else shapes)
    if "quantizer.mask" in state:
        state["quantizer.mask"] = 2 ** torch.arange(len(state["quantizer.mask"]) - 1, -1, -1)
    return state


def stored_output(case: str, name: str) -> Tensor:
    """Of the public package: "codes", "reconstruction", and of the VQGAN "logits" of its discriminator."""
    return output_in(FILE, f"{case}/{name}")
