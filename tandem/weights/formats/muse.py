"""The VQGanVAE of muse-maskgit-pytorch 0.3.5 as `VQGAN` and `Discriminator`, and back: the same weights by other names.

Its files hold a plain state dict and no arguments. The arguments are inferred from names and shapes, except for the
number of groups of the GroupNorms, which is taken to be 16, the package's default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.io.published import part_with, read_state_dict, refuse_weights_flag, shape_of
from tandem.io.weights import on_cpu, save_pickled
from tandem.models.autoencoders.discriminator import Discriminator, MaskBitDiscriminator
from tandem.models.autoencoders.vqgan import VQGAN

from .description import format_arguments

PACKAGE = "muse-maskgit-pytorch 0.3.5"
_GROUPS = 16  # of every GroupNorm of the public model
_MAX_BITS = 22  # in a code
_CODER_KEY = re.compile(r"enc_dec\.(encoder|decoder)s\.(\d{1,4})\.(.+)")
_PROJECTION_KEY = re.compile(r"quantizer\.project_(in|out)\.(weight|bias)")


def read_public_vqgan(path: Path, weights: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments and weights of the `VQGAN` in a file of ``VQGanVAE.save`` or of its trainer.

    Args:
        weights: Of a file of the trainer's moving average (vae.N.ema.pt): "ema" or "best" (the average), or "online".

    Raises:
        ValueError: one line, if the file is missing, damaged, hostile, no VQGanVAE, or of a VQGanVAE that cannot be
            converted to a `VQGAN`.
    """
    return _convert_weights(_read_state(path, weights))


def read_public_discriminator(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Arguments and weights of the `Discriminator` in such a file; None without one. Errors: `read_public_vqgan`."""
    state = _read_state(path, "best")
    weights = {name.removeprefix("discr."): tensor for name, tensor in state.items() if name.startswith("discr.")}
    if not weights:
        return None
    dim, channels, *_ = shape_of(state, "discr.layers.0.0.weight", 4)
    halvings = sum(re.fullmatch(r"layers\.\d+\.0\.weight", name) is not None for name in weights) - 1
    return {"dim": dim, "channels": channels, "layers": halvings}, weights


def save_public_vqgan(model: VQGAN, path: Path, discriminator: Discriminator | None = None) -> str:
    """Write a state dict that ``VQGanVAE.load`` takes strictly; the file appears whole or not at all.

    Args:
        discriminator: Written too, if a VQGanVAE can have a discriminator of this form.

    Returns:
        A sentence with the constructor call of the VQGanVAE that loads the file, which does not hold the arguments, and
        with the reason if the discriminator is not in it.

    Raises:
        ValueError: one line, if the public package has no such model.
    """
    config, weights = model.config, on_cpu(model.state_dict())
    _check_has_public_form(model)
    # The encoder's last layer and the decoder's first are projections, which belong to the quantizer of a VQGanVAE. So
    # its decoder counts layers from our layer 1.
    last_layer, state = len(model.encoder) - 1, {}
    for name, tensor in weights.items():
        part, index, suffix = name.split(".", 2)
        if (part, index) in (("encoder", str(last_layer)), ("decoder", "0")):
            tensor = tensor[:, :, 0, 0].contiguous() if suffix == "weight" else tensor
            state[f"quantizer.project_{'in' if part == 'encoder' else 'out'}.{suffix}"] = tensor
        else:
            state[f"enc_dec.{part}s.{int(index) - (part == 'decoder')}.{suffix}"] = tensor
    bits = config["codebook_size"].bit_length() - 1
    state["quantizer.mask"] = 2 ** torch.arange(bits - 1, -1, -1)
    arguments = {name: config[name] for name in ("dim", "channels", "codebook_size")}
    arguments |= {"layers": config["num_layers"], "encdec_num_resnet_blocks": tuple(config["num_resnet_blocks"])}
    obstacle = _discriminator_obstacle(config, discriminator)
    if discriminator is None or obstacle:
        arguments["use_vgg_and_gan"] = False
    else:
        arguments["discr_layers"] = discriminator.config["layers"]
        state |= {f"discr.{name}": tensor for name, tensor in on_cpu(discriminator.state_dict()).items()}
    save_pickled(state, path)
    return f"load it into VQGanVAE({format_arguments(arguments)})" + (f"; {obstacle}" if obstacle else "")


def _check_has_public_form(model: VQGAN) -> None:
    config = model.config
    if config["quantizer"] != "lfq":
        raise ValueError(f"{PACKAGE} supports only the quantizer lfq; this model has {config['quantizer']}")
    if config["normalize_input"]:
        raise ValueError(
            f"{PACKAGE} takes images in [0, 1], and this model maps them to [-1, 1]: train with --no-normalize_input"
        )
    if config["dim"] % _GROUPS:
        raise ValueError(
            f"{PACKAGE} needs a --dim that is a multiple of {_GROUPS}; that of this model is {config['dim']}"
        )
    projection = model.encoder[-1]
    if projection.in_channels == projection.out_channels:
        raise ValueError(
            f"this model has a projection of {projection.in_channels} channels to as many bits of a code, which "
            f"{PACKAGE} leaves out where the numbers are equal: train with another --dim or --codebook_size"
        )


def _discriminator_obstacle(config: Mapping[str, Any], discriminator: Discriminator | None) -> str:
    """Why a VQGanVAE of this `VQGAN.config` cannot have this discriminator; "" if it can."""
    if isinstance(discriminator, MaskBitDiscriminator):
        return "its discriminator is left out: a VQGanVAE has none of MaskBit's kind"
    for name in ("dim", "channels"):
        if discriminator is not None and discriminator.config[name] != config[name]:
            difference = f"its {name} is {discriminator.config[name]}, and a VQGanVAE needs {config[name]}"
            return f"its discriminator is left out: {difference}"
    return ""


def _read_state(path: Path, weights: str) -> dict[str, Tensor]:
    """The state dict of a VQGanVAE: as its ``save`` writes it, in {"model": ...} of its trainer, or of an average."""
    average = "online_model." if weights == "online" else "ema_model."
    prefix, state = part_with(read_state_dict(path), "enc_dec.encoders.0.weight", (average,))
    if prefix != average:
        refuse_weights_flag(path, weights)
    return {name: tensor for name, tensor in state.items() if not name.startswith("_vgg.")}


def _convert_weights(state: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    blocks, widths, channels = _infer_levels(state)
    layers = len(blocks)
    bits = _infer_bits(state, widths[-1])
    identity = torch.eye(bits)[:, :, None, None]  # for a file without projections: a code has a bit for each channel
    last_layer = 1 + layers + sum(blocks)
    weights = {f"{layer}.weight": identity for layer in (f"encoder.{last_layer}", "decoder.0")}
    weights |= {f"{layer}.bias": torch.zeros(bits) for layer in (f"encoder.{last_layer}", "decoder.0")}
    for name, tensor in state.items():
        if match := _CODER_KEY.fullmatch(name):
            weights[f"{match[1]}.{int(match[2]) + (match[1] == 'decoder')}.{match[3]}"] = tensor
        elif match := _PROJECTION_KEY.fullmatch(name):
            layer = f"encoder.{last_layer}" if match[1] == "in" else "decoder.0"
            weights[f"{layer}.{match[2]}"] = tensor[:, :, None, None] if tensor.ndim == 2 else tensor
        elif name != "quantizer.mask" and not name.startswith("discr."):
            raise ValueError(f"it holds {name[:80]}, which is no weight of a VQGanVAE of {PACKAGE} with LFQ")
    arguments = {
        "image_size": max(256, 2**layers),  # arbitrary: the file does not hold it, and it changes no weight
        "dim": widths[0], "channels": channels, "num_layers": layers, "num_resnet_blocks": blocks, "quantizer": "lfq",
        "codebook_size": 2**bits, "normalize_input": False,
        "diversity_gamma": 4.0, "inv_temperature": 100.0,  # those of the public package
    }  # fmt: skip
    return arguments, weights


def _infer_levels(state: Mapping[str, Tensor]) -> tuple[list[int], list[int], int]:
    """Residual blocks per level, finest first; channels at full resolution and of each level; channels of images."""
    dim, channels, *kernel = shape_of(state, "enc_dec.encoders.0.weight", 4)
    if kernel != [5, 5]:
        raise ValueError(f"its first convolution is {kernel[0]} x {kernel[1]}; that of a VQGAN is 5 x 5")
    blocks: list[int] = []
    widths, index = [dim], 1
    while True:
        layer, index = f"enc_dec.encoders.{index}", index + 1
        if f"{layer}.0.weight" in state:
            blocks.append(0)
            widths.append(shape_of(state, f"{layer}.0.weight", 4)[0])
        elif f"{layer}.net.0.weight" in state and blocks:
            blocks[-1] += 1
        else:
            break
    doubling = [dim * 2**level for level in range(len(blocks))]
    if not blocks or widths[1:] != doubling:
        raise ValueError(f"its levels have {widths[1:]} channels, and those of a VQGAN double: {doubling}")
    return blocks, widths, channels


def _infer_bits(state: Mapping[str, Tensor], width: int) -> int:
    """Number of bits of a code. ``width``: channels of the encoder's last level."""
    if any(name.startswith("quantizer._codebook") for name in state):
        raise ValueError("its codes are of a vector quantizer; only those of LFQ can be read")
    projection = state.get("quantizer.project_in.weight")
    channels = width if projection is None else len(projection)
    mask = state.get("quantizer.mask")
    if mask is not None and mask.shape != (channels,):
        raise ValueError(f"its codes have {mask.numel()} bits for {channels} channels, so it has several codebooks")
    if not 1 <= channels <= _MAX_BITS:
        raise ValueError(f"its codes have {channels} bits; a VQGAN has at most {_MAX_BITS}")
    return channels
