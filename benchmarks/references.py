"""What the scripts are measured against: the loops of reference/, on the batches of a script's loader."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from tandem.data.tokenizers import open_tokenizer
from tandem.training.noise import Noise

# Sides of a comparison: the file as it stands, and its only model in what people use for several processes.
REFERENCE, DDP, DDP_SAME_NOISE, HOROVOD = "reference", "ddp", "ddp-same-noise", "horovod"
DESCRIPTIONS = {
    REFERENCE: "the reference",
    DDP: "the reference in DistributedDataParallel",
    DDP_SAME_NOISE: "the same, with the noise of train_vae.py",
    HOROVOD: "the reference with Horovod's DistributedOptimizer",
}
_DTYPES = {"bf16": torch.bfloat16}


@dataclass(frozen=True)
class Reference:
    """A file of reference/, and how a script's arguments and batches are those of its `train`.

    Args:
        name: Of the file.
        models: (the module, its settings, the script's arguments, a batch) -> the models that `train` takes, in order.
        batch: A batch of the script's loader -> one of `train`.
        flags: Flags with which the script trains the same.
    """

    name: str
    models: Callable[[Any, Any, argparse.Namespace, Mapping[str, Any]], Sequence[nn.Module]]
    batch: Callable[[Mapping[str, Any]], Any]
    flags: tuple[str, ...] = ()

    @property
    def module(self) -> Any:
        return importlib.import_module(f"reference.{self.name}")

    def settings(self, args: argparse.Namespace) -> Any:
        """The script's arguments of the same names. A tuple of one value is that value, and so is a list, which has one
        for each Unet, of equal ones."""

        def value(name: str) -> Any:
            said = getattr(args, name)
            said = said[0] if isinstance(said, list) and said.count(said[0]) == len(said) else said
            return said[0] if isinstance(said, tuple) and len(said) == 1 else said

        names = [each.name for each in fields(self.module.Settings)]
        return self.module.Settings(**{name: value(name) for name in names if getattr(args, name) is not None})

    def updates(
        self, args: argparse.Namespace, batches: Sequence[Mapping[str, Any]], device: torch.device, side: str
    ) -> Iterator[None]:
        """One update per ``next``, for ever, on these batches in turn. As one would write it, precision "bf16" is
        autocast around an update."""
        settings = replace(self.settings(args), max_steps=10**9)
        models = [model.to(device) for model in self.models(self.module, settings, args, batches[0])]
        if args.compile:
            for part in (part for model in models for part in model.children()):
                part.compile()
        if side in (DDP, DDP_SAME_NOISE):
            models = [nn.parallel.DistributedDataParallel(model) for model in models]

        def taken(batch: Mapping[str, Any]) -> Any:
            found = self.batch(batch)
            if torch.is_tensor(found):
                return found.to(device, non_blocking=True)
            return {name: value.to(device) if torch.is_tensor(value) else value for name, value in found.items()}

        noise = [lambda step, n: self.module.noise_of(settings, n, device)] if hasattr(self.module, "noise_of") else []
        if side == DDP_SAME_NOISE:
            noise = [_keyed_noise(args.seed, self.module.noise_of(settings, 1, device).shape[1:], device)]
        with _optimizers_of_horovod() if side == HOROVOD else contextlib.nullcontext():
            loop = self.module.train(*models, map(taken, itertools.cycle(batches)), *noise, settings)
            while True:
                dtype = _DTYPES.get(args.precision)
                with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                    next(loop)
                yield


def _keyed_noise(seed: int, shape: Sequence[int], device: torch.device) -> Callable[[int, int], torch.Tensor]:
    """What train_vae.py draws: the same on any number of processes."""
    noise, rank = Noise(seed, "gumbel"), torch.distributed.get_rank()
    return lambda step, n: noise.gumbel(step, range(rank * n, (rank + 1) * n), shape, device)


@contextlib.contextmanager
def _optimizers_of_horovod() -> Iterator[None]:
    """Adam, which a loop makes by itself, is wrapped as Horovod's documentation has it."""
    import horovod.torch as hvd

    adam: Any = torch.optim.Adam

    def wrapped(parameters: Any, **options: Any) -> Any:
        return hvd.DistributedOptimizer(adam(parameters, **options))

    torch.optim.Adam = wrapped  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.optim.Adam = adam  # type: ignore[misc]


def _made(*classes: str) -> Callable[..., list[nn.Module]]:
    """Models of these classes, which take the settings alone."""
    return lambda module, settings, args, batch: [getattr(module, name)(settings) for name in classes]


def _mulan(module: Any, settings: Any, args: argparse.Namespace, batch: Mapping[str, Any]) -> list[nn.Module]:
    return [module.MuLaN(open_tokenizer(args.tokenizer, args.max_text_tokens).vocab_size, settings)]


def _decoder(module: Any, settings: Any, args: argparse.Namespace, batch: Mapping[str, Any]) -> list[nn.Module]:
    return [module.Decoder(settings, batch["image_embed"].shape[1])]


REFERENCES = {
    "train_vae": Reference("vae", _made("DiscreteVAE"), lambda batch: batch["images"]),
    "train_vqgan": Reference("vqgan", _made("VQGAN", "Discriminator", "VQGAN"), lambda batch: batch["images"]),
    "train_mulan": Reference("mulan", _mulan, lambda batch: {**batch, "lengths": torch.as_tensor(batch["lengths"])}),
    "train_tokenizer": Reference(
        "tokenizer", _made("VideoTokenizer", "VideoDiscriminator"), lambda batch: batch["videos"],
        ("--layers", "residual,compress_space,residual,compress_space,residual,compress_time,residual"),
    ),
    "train_decoder": Reference(
        "decoder", _decoder, lambda batch: batch, ("--resnet_groups", "8", "--lowres_condition", "noise"),
    ),
}  # fmt: skip
