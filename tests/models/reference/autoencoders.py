"""Small autoencoders with taming's body, whose outputs in the packages that have it stand in autoencoders.npz. Of
diffusers it holds shapes and configurations alone: tests/weights/test_diffusers.py computes with diffusers itself.

Weights and images are functions of their names, so that nothing but the outputs has to be stored.
`make_autoencoders.py` makes the file.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.models.reference.unets import numbers, output_in, weights_of

FILE = Path(__file__).with_name("autoencoders.npz")
WEIGHTS = "diffusion_pytorch_model.safetensors"
DIFFUSERS = ("AutoencoderKL", "VQModel")


class Case(NamedTuple):
    package: str
    arguments: dict[str, Any]
    """Of the public class."""
    ours: dict[str, Any]
    """What of them our configuration has to say."""


def of_diffusers(widths: list[int], attended: tuple[int, ...] = (), **others: Any) -> dict[str, Any]:
    attention = ["Attn" if level in attended else "" for level in range(len(widths))]
    return {
        "block_out_channels": widths, "down_block_types": [f"{attn}DownEncoderBlock2D" for attn in attention],
        "up_block_types": [f"{attn}UpDecoderBlock2D" for attn in attention[::-1]], **others,
    }  # fmt: skip


def of_taming(**others: Any) -> dict[str, Any]:
    usual = {"ch": 32, "in_channels": 3, "out_ch": 3, "resolution": 32, "dropout": 0.0, "num_res_blocks": 1}
    return {**usual, "double_z": False, **others}


_NO_ATTENTION = {"body": "taming", "attention_levels": None}
CASES = {
    # Stable Diffusion 1 and 2, and XL but for the scale.
    "sd": Case(
        "AutoencoderKL", of_diffusers([32, 64, 128, 128], layers_per_block=2, norm_num_groups=32, latent_channels=4),
        {**_NO_ATTENTION, "dim": 32, "ch_mult": [1, 2, 4, 4], "num_resnet_blocks": [2], "latent_dim": 4,
         "norm_groups": 32, "scaling_factor": 0.18215, "shift_factor": None, "quantizer": "kl", "quant_conv": True},
    ),
    "sd3": Case(  # and FLUX.1, but for the scale
        "AutoencoderKL",
        of_diffusers([16, 32, 64, 64], layers_per_block=2, norm_num_groups=16, latent_channels=16, use_quant_conv=False,
                     use_post_quant_conv=False, scaling_factor=1.5305, shift_factor=0.0609),
        {**_NO_ATTENTION, "dim": 16, "ch_mult": [1, 2, 4, 4], "num_resnet_blocks": [2], "latent_dim": 16,
         "norm_groups": 16, "scaling_factor": 1.5305, "shift_factor": 0.0609, "quantizer": "kl", "quant_conv": False},
    ),
    "vq": Case(
        "VQModel",
        of_diffusers([32, 64, 64], (2,), layers_per_block=1, norm_num_groups=16, latent_channels=6, vq_embed_dim=4,
                     num_vq_embeddings=40, scaling_factor=0.5),
        {"dim": 32, "ch_mult": [1, 2, 2], "num_resnet_blocks": [1], "attention_levels": [2], "z_channels": 6,
         "codebook_dim": 4, "codebook_size": 40, "norm_groups": 16, "quantizer": "vq", "vq_cosine": False},
    ),
    "taming": Case(
        "taming",
        {"ddconfig": of_taming(ch_mult=[1, 1, 2], attn_resolutions=[8], z_channels=16), "n_embed": 50, "embed_dim": 8},
        {"dim": 32, "ch_mult": [1, 1, 2], "num_resnet_blocks": [1], "attention_levels": [2], "z_channels": 16,
         "codebook_dim": 8, "codebook_size": 50, "norm_groups": 32, "quantizer": "vq", "vq_cosine": False},
    ),
    "ldm": Case(
        "latent-diffusion",
        {"ddconfig": of_taming(ch_mult=[1, 2, 2], attn_resolutions=[16, 8], z_channels=6, double_z=True),
         "embed_dim": 4},
        {"dim": 32, "ch_mult": [1, 2, 2], "num_resnet_blocks": [1], "attention_levels": [1, 2], "z_channels": 6,
         "latent_dim": 4, "norm_groups": 32, "quantizer": "kl", "scaling_factor": None, "shift_factor": None},
    ),
    "llamagen": Case(
        "LlamaGen",
        {"encoder_ch_mult": [1, 1, 2], "decoder_ch_mult": [1, 1, 2], "z_channels": 32, "codebook_size": 60,
         "codebook_embed_dim": 8},
        {"dim": 128, "ch_mult": [1, 1, 2], "num_resnet_blocks": [2], "attention_levels": [2], "z_channels": 32,
         "codebook_dim": 8, "codebook_size": 60, "norm_groups": 32, "quantizer": "vq", "vq_cosine": True},
    ),
    "ibq": Case(
        "IBQ",
        {"ddconfig": of_taming(ch_mult=[1, 1, 2], attn_resolutions=[8], z_channels=16), "n_embed": 50, "embed_dim": 8,
         "use_ema": True},
        {"dim": 32, "ch_mult": [1, 1, 2], "num_resnet_blocks": [1], "attention_levels": [2], "z_channels": 16,
         "codebook_dim": 8, "codebook_size": 50, "norm_groups": 32, "quantizer": "ibq"},
    ),
}  # fmt: skip


def images(case: str) -> Tensor:
    """Two images of 16 x 32 pixels in [0, 1]."""
    return torch.from_numpy(numbers(f"{case}/images", 2, 3, 16, 32)).float() / 2 + 0.5


def state_of(case: str) -> dict[str, Tensor]:
    """A public state dict."""
    return dict(_state_of(case))


@functools.cache
def _state_of(case: str) -> dict[str, Tensor]:
    return weights_of(case, stored(case, "shapes"))


def stored(case: str, name: str) -> Any:
    """Of the public model: "shapes" of its state dict or the "config" of its folder, if it has one."""
    with np.load(FILE) as file:
        return json.loads(bytes(file[f"{case}/{name}"]))


def stored_output(case: str, name: str) -> Tensor:
    """What the public package, unless it is diffusers, has given: "codes", or of continuous latents "latents", and the
    "reconstruction" in [-1, 1] of these."""
    return output_in(FILE, f"{case}/{name}")


def written(case: str, folder: Path) -> Path:
    """The public model of a case as its package writes it: a folder of diffusers, or a file."""
    state, package = state_of(case), CASES[case].package
    if package in DIFFUSERS:
        path = folder / case
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(stored(case, "config")))
        save_file(state, path / WEIGHTS, metadata={"format": "pt"})
        return path
    path = folder / f"{case}.{'pt' if package == 'LlamaGen' else 'ckpt'}"
    torch.save({"model" if package == "LlamaGen" else "state_dict": state}, path)
    return path
