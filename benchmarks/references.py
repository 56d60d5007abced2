"""The references of the benchmarks: the loops of reference/, on the batches of a script's loader."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest import mock

import torch
from torch import nn

from tandem.data.tokenizers import open_tokenizer
from tandem.training.noise import Noise

# Sides of a comparison: the script; the file of reference/ as it stands; and, for several processes, its only model in
# the usual wrappers.
SCRIPT, REFERENCE, DDP, DDP_SAME_NOISE, HOROVOD = "script", "reference", "ddp", "ddp-same-noise", "horovod"
DESCRIPTIONS = {
    REFERENCE: "the reference",
    DDP: "the reference in DistributedDataParallel",
    DDP_SAME_NOISE: "the same, with the noise of train_vae.py",
    HOROVOD: "the reference with Horovod's DistributedOptimizer",
}


@dataclass(frozen=True)
class Reference:
    """A file of reference/, and the translation of a script's arguments and batches to those of its `train`.

    Args:
        name: Stem of the file.
        models: (the module, its settings, the script's arguments, a batch) -> the models that `train` takes, in order.
        batch: A batch of the script's loader -> one of `train`.
        flags: Flags with which the script trains the same model.
    """

    name: str
    models: Callable[[Any, Any, argparse.Namespace, Mapping[str, Any]], Sequence[nn.Module]]
    batch: Callable[[Mapping[str, Any]], Any]
    flags: tuple[str, ...] = ()

    @property
    def module(self) -> Any:
        return importlib.import_module(f"reference.{self.name}")

    def settings(self, args: argparse.Namespace) -> Any:
        """The script's arguments of the same names. A list of equal values, one for each Unet, and a tuple of one value
        become that value."""

        def setting(name: str) -> Any:
            value = getattr(args, name)
            value = value[0] if isinstance(value, list) and value.count(value[0]) == len(value) else value
            return value[0] if isinstance(value, tuple) and len(value) == 1 else value

        names = [field.name for field in fields(self.module.Settings)]
        return self.module.Settings(**{name: setting(name) for name in names if getattr(args, name) is not None})

    def updates(
        self, args: argparse.Namespace, batches: Sequence[Mapping[str, Any]], device: torch.device, side: str
    ) -> Iterator[None]:
        """Endless updates, one per ``next``, on these batches in turn; for precision "bf16" under autocast."""
        settings = replace(self.settings(args), max_steps=10**9)
        models = [model.to(device) for model in self.models(self.module, settings, args, batches[0])]
        if args.compile:
            for part in (part for model in models for part in model.children()):
                part.compile()
        if side in (DDP, DDP_SAME_NOISE):
            models = [nn.parallel.DistributedDataParallel(model) for model in models]

        def load(batch: Mapping[str, Any]) -> Any:
            inputs = self.batch(batch)
            if torch.is_tensor(inputs):
                return inputs.to(device, non_blocking=True)
            return {name: value.to(device) if torch.is_tensor(value) else value for name, value in inputs.items()}

        draw_noise: Any = getattr(self.module, "draw_noise", None)
        noise = [lambda step, n: draw_noise(settings, n, device)] if draw_noise else []
        if side == DDP_SAME_NOISE:
            noise = [_keyed_noise(args.seed, draw_noise(settings, 1, device).shape[1:], device)]
        with _horovod_optimizers() if side == HOROVOD else contextlib.nullcontext():
            loop = self.module.train(*models, map(load, itertools.cycle(batches)), *noise, settings)
            while True:
                with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
                    next(loop)
                yield


def _keyed_noise(seed: int, shape: Sequence[int], device: torch.device) -> Callable[[int, int], torch.Tensor]:
    """The noise of train_vae.py: the same on any number of processes."""
    noise, rank = Noise(seed, "gumbel"), torch.distributed.get_rank()
    return lambda step, n: noise.gumbel(step, range(rank * n, (rank + 1) * n), shape, device)


def _horovod_optimizers() -> contextlib.AbstractContextManager[Any]:
    """A context in which torch.optim.Adam, which a loop constructs, is Horovod's DistributedOptimizer of it."""
    import horovod.torch as hvd

    adam: Any = torch.optim.Adam

    def wrapped(parameters: Any, **options: Any) -> Any:
        return hvd.DistributedOptimizer(adam(parameters, **options))

    return mock.patch.object(torch.optim, "Adam", wrapped)


def _constructor(*classes: str) -> Callable[..., list[nn.Module]]:
    """The constructor of models of these classes, which take the settings alone."""
    return lambda module, settings, args, batch: [getattr(module, name)(settings) for name in classes]


def _mulan(module: Any, settings: Any, args: argparse.Namespace, batch: Mapping[str, Any]) -> list[nn.Module]:
    return [module.MuLaN(open_tokenizer(args.tokenizer, args.max_text_tokens).vocab_size, settings)]


def _decoder(module: Any, settings: Any, args: argparse.Namespace, batch: Mapping[str, Any]) -> list[nn.Module]:
    return [module.Decoder(settings, batch["image_embed"].shape[1])]


REFERENCES = {
    "train_vae": Reference("vae", _constructor("DiscreteVAE"), lambda batch: batch["images"]),
    "train_vqgan": Reference("vqgan", _constructor("VQGAN", "Discriminator", "VQGAN"), lambda batch: batch["images"]),
    "train_mulan": Reference("mulan", _mulan, lambda batch: {**batch, "lengths": torch.as_tensor(batch["lengths"])}),
    "train_tokenizer": Reference(
        "tokenizer", _constructor("VideoTokenizer", "VideoDiscriminator"), lambda batch: batch["videos"],
        ("--layers", "residual,compress_space,residual,compress_space,residual,compress_time,residual"),
    ),
    "train_decoder": Reference(
        "decoder", _decoder, lambda batch: batch, ("--resnet_groups", "8", "--lowres_condition", "noise"),
    ),
}  # fmt: skip
