"""Small Unets whose outputs in DALLE2-pytorch 1.15.6 stand in unets.npz: their arguments, weights and inputs.

Weights and inputs are functions of their names, so that nothing but the outputs has to be stored. `make_unets.py` makes
the file.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

FILE = Path(__file__).with_name("unets.npz")
SIDE = 16
TIMESTEPS = 50  # of the decoder whose other tensors are stored too
STRIDE, LONG_STRIDE = 2, 333

BASE: dict[str, Any] = {
    "dim": 8, "dim_mults": [1, 2, 3], "cond_dim": 12, "image_embed_dim": 10, "num_resnet_blocks": 1, "resnet_groups": 4,
    "attn_heads": 3, "attn_dim_head": 8,
}  # fmt: skip
TEXT = {"cond_on_text_encodings": True, "text_embed_dim": 7, "max_text_len": 9}


class Case(NamedTuple):
    arguments: dict[str, Any]
    """Of a unet in the public configuration, besides BASE."""
    decoder: dict[str, Any]
    """Of the decoder in the public configuration."""
    is_second: bool = False
    """It is the second of two unets, so it has a low-resolution image and no image embedding."""


CASES = {
    "default": Case({"resnet_groups": 8}, {"learned_variance": True}),
    "self_attn": Case({"self_attn": [False, True, True], "num_resnet_blocks": [1, 0, 2]}, {}),
    "text": Case(TEXT, {}),
    "lowres": Case({}, {"use_noise_for_lowres_cond": True}, is_second=True),
    "memory_efficient": Case({"memory_efficient": True, "resnet_groups": 2}, {}, is_second=True),
    "sparse_attn": Case({"sparse_attn": True, "self_attn": [False, False, True]}, {}),
    "laion": Case(  # as LAION's base decoder, but for widths
        {**TEXT, "memory_efficient": True, "sparse_attn": True, "self_attn": [False, True, True],
         "num_resnet_blocks": 2}, {"learned_variance": True}
    ),
    "plain": Case({"init_cross_embed": False}, {}),
    "unconditional": Case({"dim_mults": [1, 2]}, {"unconditional": True}),
    "one level": Case({"dim_mults": [1]}, {}),
}  # fmt: skip


# The unets of decoders as they were published or are by default; of these the names and shapes are stored.
PUBLISHED: dict[str, list[dict[str, Any]]] = {
    "LAION v1.0.2": [
        {"dim": 320, "cond_dim": 512, "image_embed_dim": 768, "text_embed_dim": 768, "cond_on_text_encodings": True,
         "channels": 3, "dim_mults": [1, 2, 3, 4], "num_resnet_blocks": 4, "attn_heads": 8, "attn_dim_head": 64,
         "sparse_attn": True, "memory_efficient": True, "self_attn": [False, True, True, True]},
    ],
    "the example of the public package": [
        {"dim": 128, "image_embed_dim": 768, "cond_dim": 64, "channels": 3, "dim_mults": [1, 2, 4, 8],
         "attn_dim_head": 32, "attn_heads": 16},
    ],
    "two unets of its README": [
        {"dim": 32, "image_embed_dim": 512, "text_embed_dim": 512, "cond_dim": 128, "channels": 3,
         "dim_mults": [1, 2, 4, 8], "cond_on_text_encodings": True},
        {"dim": 32, "image_embed_dim": 512, "cond_dim": 128, "channels": 3, "dim_mults": [1, 2, 4, 8, 16]},
    ],
    "its test of an upsampler": [
        {"dim": 16, "image_embed_dim": 768, "cond_dim": 16, "channels": 3, "dim_mults": [1, 2, 4, 8],
         "attn_dim_head": 16, "attn_heads": 4, "self_attn": [False, True, True, True]}
    ] * 2,
}  # fmt: skip


def published_config(name: str) -> dict[str, Any]:
    unets = PUBLISHED[name]
    return {"unets": unets, "image_sizes": [64, 256][: len(unets)], "timesteps": TIMESTEPS, "learned_variance": True}


def shapes_in(file: Path, name: str) -> dict[str, list[int]]:
    """The stored shapes of a public state dict."""
    with np.load(file) as stored:
        shapes: dict[str, list[int]] = json.loads(bytes(stored[f"{name}/shapes"]))
        return shapes


def output_in(file: Path, name: str) -> Tensor:
    """What a public package has given."""
    with np.load(file) as stored:
        return torch.from_numpy(stored[name])


def numbers(name: str, *shape: int) -> np.ndarray[Any, Any]:
    """Uniform fp64 numbers in [-1, 1) that depend on the name alone (SplitMix64, Steele, Lea and Flood 2014)."""
    count = math.prod(shape)
    with np.errstate(over="ignore"):
        x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64(zlib.crc32(name.encode()) << 32)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return ((x >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1).reshape(shape)


def weights_of(case: str, shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    """Weights by public name: gains near 1, small biases, and matrices that keep the variance of what they multiply."""
    weights = {}
    for name, shape in shapes.items():
        drawn = numbers(f"{case}/{name}", *shape)
        if name.endswith(".g") or (name.endswith("weight") and len(shape) == 1):
            drawn = 1 + 0.3 * drawn
        elif name.endswith("bias"):
            drawn = 0.1 * drawn
        elif name.endswith("weight"):
            drawn = drawn * math.sqrt(3 / math.prod(shape[1:]))
        weights[name] = torch.from_numpy(drawn).float()
    return weights


def inputs_of(case: str) -> dict[str, Tensor]:
    """Inputs of our Unet for two images, conditions included."""
    arguments, decoder, is_second = CASES[case]

    def some(name: str, *shape: int) -> Tensor:
        return torch.from_numpy(numbers(f"{case}/{name}", 2, *shape)).float()

    image = (3, SIDE, SIDE)
    inputs = {"x": some("x", *image), "time": torch.tensor([3, 977])}
    if not is_second and not decoder.get("unconditional"):
        inputs["image_embed"] = some("image_embed", BASE["image_embed_dim"])
    if arguments.get("cond_on_text_encodings"):
        inputs["text_encodings"] = some("text_encodings", 6, TEXT["text_embed_dim"])
        inputs["text_encodings"][0, 2] = inputs["text_encodings"][1, 4:] = 0  # a gap, and an end
    if is_second:
        inputs["lowres_image"] = some("lowres_image", *image)
    if decoder.get("use_noise_for_lowres_cond"):
        inputs["lowres_time"] = torch.tensor([10, 500])
    return inputs


def public_config(case: str) -> dict[str, Any]:
    """The configuration of the decoder in the public form; the first of two unets is as small as may be."""
    arguments, decoder, is_second = CASES[case]
    unets = [{**BASE, **arguments}]
    if is_second:
        unets.insert(0, {**BASE, "dim_mults": [1]})
    sizes = [SIDE // 2, SIDE][-len(unets) :]
    return {"unets": unets, "image_sizes": sizes, "timesteps": TIMESTEPS, "learned_variance": False, **decoder}


class Stored(NamedTuple):
    shapes: dict[str, list[int]]
    """Of the public state dict of the unet."""
    kept: Tensor
    """The public output."""
    null: Tensor
    """Every `STRIDE`-th row and column of the public output with all conditions dropped."""


def stored(case: str) -> Stored:
    """What the public package has given."""
    with np.load(FILE) as file:
        shapes = json.loads(bytes(file["shapes"]))[case]
        return Stored(shapes, *(torch.from_numpy(file[f"{case}/{name}"]) for name in ("kept", "null")))


def published_shapes(name: str) -> dict[str, list[int]]:
    """Of the public state dict of a decoder of PUBLISHED."""
    with np.load(FILE) as file:
        shapes: dict[str, list[int]] = json.loads(bytes(file["shapes"]))[name]
        return shapes


def stored_decoder() -> tuple[dict[str, list[int]], dict[str, Tensor]]:
    """Shapes of the public state dict of the decoder of the case "lowres", and its tensors that belong to no unet: of
    long ones every `LONG_STRIDE`-th number."""
    with np.load(FILE) as file:
        others = {name: file[name] for name in file.files if name.startswith(("noise_schedulers.", "lowres_conds."))}
        shapes = json.loads(bytes(file["shapes"]))["decoder"]
    return shapes, {name: torch.from_numpy(values) for name, values in others.items()}
