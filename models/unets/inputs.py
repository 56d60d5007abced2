"""Inputs of the Unet: what does not fit it is refused in one line."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import UnetConfig


def check_maps(
    config: UnetConfig, multiple: int, x: Tensor, time: Tensor, self_cond: Tensor | None,
    lowres_image: Tensor | None, lowres_time: Tensor | None, coordinates: Tensor | None,
) -> None:  # fmt: skip
    """Check the images and the noise levels of a Unet with these arguments, whose sides must be multiples of
    ``multiple``.

    Raises:
        ValueError: one line.
    """
    _check_images("x", x, config.channels)
    for name, side in zip(("height", "width"), x.shape[-2:], strict=True):
        if side < multiple or side % multiple:
            below = max(side // multiple, 1) * multiple
            use = f"use {below} or {below + multiple}"
            raise ValueError(f"{name} {side} must be a multiple of {multiple}, as the levels halve the sides; {use}")
    _check_shape("time", time, (len(x),), "a noise level for each image")
    if self_cond is not None:
        _check_is_known("self_cond", config.self_cond, "self_cond")
        _check_shape("self_cond", self_cond, tuple(x.shape), "an earlier prediction for each image")
    if coordinates is not None:
        _check_is_known("coordinates", config.coordinates, "coordinates")
        _check_shape("coordinates", coordinates, (len(x), 2, *x.shape[-2:]), "two for each pixel")
    for name, given, needed in (
        ("lowres_image", lowres_image, config.lowres_cond),
        ("lowres_time", lowres_time, config.lowres_noise_cond),
    ):
        if given is None and needed:
            raise ValueError(f"this Unet is conditioned on a low-resolution image: give {name}")
        if given is not None:
            _check_is_known(name, needed, "lowres_cond" if name == "lowres_image" else "lowres_noise_cond")
    if lowres_image is not None:
        _check_images("lowres_image", lowres_image, config.channels)
        _check_batch("lowres_image", lowres_image, len(x))
    if lowres_time is not None:
        _check_shape("lowres_time", lowres_time, (len(x),), "a noise level for each image")


def check_conditions(
    config: UnetConfig, batch: int, image_embed: Tensor | None, text_encodings: Tensor | None,
    keep_image: Tensor | None, keep_text: Tensor | None,
) -> None:  # fmt: skip
    """Check the conditions of ``batch`` images.

    Raises:
        ValueError: one line.
    """
    for name, given, keep, switch, width, dims in (
        ("image_embed", image_embed, keep_image, "cond_on_image_embeds", config.image_embed_dim, 2),
        ("text_encodings", text_encodings, keep_text, "cond_on_text_encodings", config.text_embed_dim, 3),
    ):
        is_known = getattr(config, switch)
        mask = "keep_image" if name == "image_embed" else "keep_text"
        if keep is not None:
            _check_shape(mask, keep, (batch,), "True or False for each image")
        if given is not None:
            _check_is_known(name, is_known, switch)
            _check_batch(name, given, batch)
            if given.dim() != dims or given.shape[-1] != width:
                shape = f"(b, {width})" if dims == 2 else f"(b, tokens, {width})"
                raise ValueError(f"{name} has the shape {tuple(given.shape)}: give {shape}")
        elif is_known and keep is None:
            raise ValueError(f"this Unet was built with {switch}: give {name}, or {mask} that is all False")
        elif is_known and not torch.compiler.is_compiling() and bool(keep.any()):  # type: ignore[union-attr]
            raise ValueError(f"{mask} keeps a condition that is not there: give {name}, or {mask} that is all False")


def _check_images(name: str, images: Tensor, channels: int) -> None:
    if images.dim() != 4 or images.shape[1] != channels or not images.is_floating_point():
        found = f"{name} has the shape {tuple(images.shape)} and the type {images.dtype}"
        raise ValueError(f"{found}: give floating-point numbers (b, {channels}, height, width)")


def _check_is_known(name: str, known: bool, switch: str) -> None:
    if not known:
        raise ValueError(f"{name} was given, but the Unet was built without {switch}: leave {name} out")


def _check_batch(name: str, given: Tensor, batch: int) -> None:
    if len(given) != batch:
        raise ValueError(f"{name} is for {len(given)} images, and there are {batch}")


def _check_shape(name: str, given: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    if tuple(given.shape) != shape:
        raise ValueError(f"{name} has the shape {tuple(given.shape)}: give {shape}, {meaning}")
