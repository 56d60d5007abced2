"""The reference for train_decoder.py: the same Unets and losses in a plain loop, as one would write it for them."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision.transforms.functional import gaussian_blur

from models import Decoder
from models.resizing import cropped, resized
from training.flags.unets import of_unet
from training.noise import Noise
from training.objectives.diffusion import DiffusionDraws, LowresDraws

from .bare import DTYPES, Variant

_Draw = Callable[[int, Tensor], dict[str, Tensor]]  # (step, pictures) -> random numbers of an update of one Unet


def bare_decoder(
    args: argparse.Namespace, batches: Sequence[Mapping[str, Any]], variant: Variant, device: torch.device
) -> Iterator[None]:
    """`bare_updates` of the decoder that the arguments of train_decoder.py describe, without gradient checkpointing."""
    import train_decoder

    plain = argparse.Namespace(**{**vars(args), "gradient_checkpointing": False})
    widths = {"image_embed": batches[0]["image_embed"].shape[1], "text_encodings": None}
    return bare_updates(train_decoder.build_model(plain, widths).to(device), args, batches, variant)


def bare_updates(
    decoder: Decoder, args: argparse.Namespace, batches: Sequence[Mapping[str, Any]], variant: Variant
) -> Iterator[None]:
    """One update of every Unet per ``next``, for ever. Of the flags about the method it knows what
    configs/decoder/demo.yaml uses: objective v, blurred smaller pictures, crops, dropped conditions, an average.

    Args:
        batches: Of train_decoder.py's loader: "images" uint8 (b, 3, h, w) and "image_embed" (b, d), used in turn.
    """
    memory_format = torch.channels_last if variant.channels_last else torch.contiguous_format
    decoder.train().to(memory_format=memory_format)
    average = AveragedModel(decoder.unets, multi_avg_fn=get_ema_multi_avg_fn(args.ema_decay or 0.999))
    sides = range(len(decoder.unets))
    if args.compile:
        for index in sides:
            decoder.unet(index).compile()
    device, dtype = decoder.device.type, DTYPES.get(args.precision)
    scalers = [torch.amp.GradScaler(device, enabled=args.precision == "fp16") for _ in sides]
    optimizers = [_optimizer(args, decoder, index, variant) for index in sides]
    sources = [(_script_noise if variant.same_noise else _torch_noise)(args, decoder, index) for index in sides]
    for step, batch in enumerate(itertools.cycle(batches)):
        on_device = {name: batch[name].to(decoder.device, non_blocking=True) for name in ("images", "image_embed")}
        for index, (optimizer, draw, scaler) in enumerate(zip(optimizers, sources, scalers, strict=True)):
            unet = decoder.unet(index)
            images = on_device["images"].float() / 127.5 - 1
            x0 = resized(images, decoder.image_sizes[index])
            draws = draw(step, x0)
            if index:
                small = resized(images, decoder.image_sizes[index - 1])
                blurred = gaussian_blur(small, [3, 3], [args.blur_sigma[0]] * 2)
                small = torch.where(draws["is_blurred"][:, None, None, None], blurred, small)
                given = {"lowres_image": resized(small, decoder.image_sizes[index])}
            else:
                given = {"image_embed": on_device["image_embed"], "keep_image": draws["keep_image"]}
            if side := of_unet(args, "random_crop_sizes", index):
                x0 = cropped(x0, draws["places"], side)
                given["lowres_image"] = cropped(given["lowres_image"], draws["places"], side)
            schedule, noise = decoder.schedule(index), draws["noise"]
            alpha, sigma = (
                table.float()[draws["times"], None, None, None] for table in (schedule.alpha, schedule.sigma)
            )
            x = (alpha * x0 + sigma * noise).contiguous(memory_format=memory_format)
            with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
                prediction = unet(x, draws["times"], **given)
            loss = F.mse_loss(prediction, alpha * noise - sigma * x0)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if args.max_grad_norm:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(unet.parameters(), args.max_grad_norm)
            scaler.step(optimizer)
            scaler.update()
        if args.ema_decay:
            average.update_parameters(decoder.unets)
        yield


def _optimizer(args: argparse.Namespace, decoder: Decoder, index: int, variant: Variant) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        decoder.unet(index).parameters(), lr=of_unet(args, "learning_rate", index), betas=args.betas,
        weight_decay=of_unet(args, "weight_decay", index), fused=True if variant.fused else None,
    )  # fmt: skip


def _torch_noise(args: argparse.Namespace, decoder: Decoder, index: int) -> _Draw:
    """Random numbers of PyTorch's generator of the device."""
    side = of_unet(args, "random_crop_sizes", index)

    def draw(step: int, x0: Tensor) -> dict[str, Tensor]:
        b, like = len(x0), {"device": x0.device}
        shape = (b, x0.shape[1], side, side) if side else x0.shape
        return {
            "times": torch.randint(args.timesteps, (b,), **like), "noise": torch.randn(shape, **like),
            "keep_image": torch.rand(b, **like) >= args.image_cond_drop_prob,
            "is_blurred": torch.rand(b, **like) < args.blur_prob, "places": torch.rand(b, 2),
        }  # fmt: skip

    return draw


def _script_noise(args: argparse.Namespace, decoder: Decoder, index: int) -> _Draw:
    """The random numbers that train_decoder.py draws."""
    side, name = of_unet(args, "random_crop_sizes", index), f"unet{index + 1}"
    crops = Noise(args.seed, f"{name}/crop")
    draws = DiffusionDraws(
        args.seed, name, args.timesteps, device=decoder.device, stratified=args.stratified_times,
        image_drop=None if index else args.image_cond_drop_prob,
        lowres=LowresDraws(0, args.blur_prob, (args.blur_sigma[0], args.blur_sigma[-1])) if index else None,
    )  # fmt: skip

    def draw(step: int, x0: Tensor) -> dict[str, Tensor]:
        shape = (x0.shape[1], side, side) if side else x0.shape[1:]
        places = {"places": crops.uniform(step, range(len(x0)), (2,))} if side else {}
        drawn = {**draws(step, range(len(x0)), len(x0), shape), **places}
        return {**drawn, "is_blurred": drawn["blur_sigma"] > 0} if index else drawn

    return draw
