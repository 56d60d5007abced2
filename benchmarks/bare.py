"""The reference: what one would write for train_vae.py's model in plain PyTorch, without this repository's layers."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models import DiscreteVAE
from training.noise import Noise

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Variant:
    """A way to write the loop.

    Args:
        description: Name in the table.
        fused: Adam in one kernel, as the scripts have it; otherwise PyTorch's default.
        same_noise: Noise drawn as in the script, instead of by PyTorch's generator.
        channels_last: Memory format of model and images.
        exchange: How several processes sum their gradients: "ddp" (PyTorch's DistributedDataParallel), "horovod"
            (Horovod's own optimizer), each as it comes; "": not at all.
    """

    description: str
    fused: bool = True
    same_noise: bool = False
    channels_last: bool = False
    exchange: str = ""


VARIANTS = {
    "fused_adam": Variant("bare loop, fused Adam"),
    "same_noise": Variant("bare loop, fused Adam, the script's noise", same_noise=True),
    "default_adam": Variant("bare loop, default Adam", fused=False),
    "channels_last": Variant("bare loop, fused Adam, channels last", channels_last=True),
    "ddp": Variant("DistributedDataParallel", exchange="ddp"),
    "ddp_same_noise": Variant("DistributedDataParallel, the script's noise", same_noise=True, exchange="ddp"),
    "horovod": Variant("Horovod's DistributedOptimizer", exchange="horovod"),
    "horovod_same_noise": Variant(
        "Horovod's DistributedOptimizer, the script's noise", same_noise=True, exchange="horovod"
    ),
}


def bare_vae(
    args: argparse.Namespace, batches: Sequence[Mapping[str, Any]], variant: Variant, device: torch.device
) -> Iterator[None]:
    """`bare_loop` with the model that the arguments of train_vae.py describe, on batches of its loader."""
    import train_vae

    return bare_loop(
        train_vae.build_model(args).to(device), [batch["images"] for batch in batches], variant,
        learning_rate=args.learning_rate, precision=args.precision, compile_model=args.compile,
    )  # fmt: skip


def bare_loop(
    model: DiscreteVAE,
    images: Sequence[Tensor],
    variant: Variant,
    *,
    learning_rate: float = 1e-3,
    precision: str = "fp32",
    compile_model: bool = False,
) -> Iterator[None]:
    """One update per ``next``, for ever; ``images`` are uint8 batches (b, c, h, w), used in turn."""
    device = next(model.parameters()).device
    memory_format = torch.channels_last if variant.channels_last else torch.contiguous_format
    model.to(memory_format=memory_format)
    if compile_model:
        model.compile()
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, fused=True if variant.fused else None)
    forward: Any = model
    if variant.exchange == "ddp":
        forward = torch.nn.parallel.DistributedDataParallel(model)
    elif variant.exchange == "horovod":
        import horovod.torch as hvd

        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    gumbel = _script_noise(model, device) if variant.same_noise else _torch_noise(model, device)
    for step, batch in enumerate(itertools.cycle(images)):
        x = batch.to(device, non_blocking=True).float().div_(255).contiguous(memory_format=memory_format)
        with torch.autocast(device.type, dtype=DTYPES.get(precision), enabled=precision in DTYPES):
            loss = forward(x, noise=gumbel(step, len(x)), temperature=1.0).loss
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield


def _torch_noise(model: DiscreteVAE, device: torch.device) -> Callable[[int, int], Tensor]:
    """Noise as torch.nn.functional.gumbel_softmax draws it."""
    return lambda step, n: -torch.empty(n, *model.noise_shape, device=device).exponential_().log()


def _script_noise(model: DiscreteVAE, device: torch.device) -> Callable[[int, int], Tensor]:
    noise = Noise(0, "gumbel")
    return lambda step, n: noise.gumbel(step, range(n), model.noise_shape, device)
