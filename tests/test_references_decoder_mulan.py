"""train_mulan.py and train_decoder.py against reference/, which shares no code with them: given the same initial
weights, batches and noise, twenty updates have the same losses and gradients, and noise becomes the same pictures."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import data
import train_decoder
import train_mulan
from benchmarks.jobs import one_process
from data.images.scenes import WIDTH
from models.decoder import Sampling
from tests.scripts import DECODER, MULAN, VOCABULARY, Script, metrics, words
from training.noise import Noise
from training.objectives.diffusion import DiffusionDraws, LowresDraws

UPDATES, SEED = 20, 3
# The largest relative differences of a metric. Measured: 2e-6 (MuLan) and 5e-7 (decoder). If every initial weight is
# moved by one ulp, up or down, it is 5.3e-6 and 1.2e-6. So much is rounding, which other instructions of a CPU change.
# Mistakes make more: 8.0 for 7.9 as MuLan's factor of logits 2e-2, a decoder's null vectors that decay 6e-5.
BOUND_OF_MULAN, BOUND_OF_DECODER = 3e-5, 6e-6


@dataclass(frozen=True, eq=False)
class Reference:
    """A file of reference/, and a run of its script that it can follow.

    Args:
        name: Of the case.
        module: Of reference/.
        script: The script, with its tiny model.
        flags: More flags of the run.
        make: (module, settings) -> the model of reference/.
        build: The script's arguments -> its model with the initial weights.
        feed: The script's arguments and a backend -> its feed.
        batch: A batch of the feed -> what the reference takes.
        noise: The script's arguments -> what the reference takes for noise.
        bound: The largest relative difference of a metric over the updates.
    """

    name: str
    module: str
    script: Script
    flags: Mapping[str, Any]
    make: Callable[[Any, Any], nn.Module]
    build: Callable[[argparse.Namespace], nn.Module]
    feed: Callable[[argparse.Namespace, Any], Any]
    batch: Callable[[Mapping[str, Any]], Any]
    noise: Callable[[argparse.Namespace], Callable[[int, int], Any]]
    bound: float

    def __str__(self) -> str:
        return self.name

    @property
    def of_file(self) -> Any:
        return importlib.import_module(f"reference.{self.module}")

    def settings(self, args: argparse.Namespace) -> Any:
        """The reference's settings: the script's arguments of the same names. A list of one value is that value."""

        def value(name: str) -> Any:
            said = getattr(args, name)
            while isinstance(said, (list, tuple)) and len(said) == 1:
                said = said[0]
            return said

        names = [each.name for each in fields(self.of_file.Settings)]
        return self.of_file.Settings(**{name: value(name) for name in names})

    def model(self, args: argparse.Namespace, folder: Path) -> Any:
        """The reference's model with the script's initial weights, which pass through a file."""
        model = self.make(self.of_file, self.settings(args))
        save_file(self.build(args).state_dict(), folder / "initial.safetensors")
        model.load_state_dict(load_file(folder / "initial.safetensors"), strict=True)
        return model

    def updates(self, args: argparse.Namespace, model: Any) -> Iterator[dict[str, float]]:
        """What the reference says of each update, on the batches of the script's feed."""
        with one_process(args.batch_size) as backend:
            feed = self.feed(args, backend)
            batches = [self.batch(feed.start(0)), *(self.batch(feed.next()) for _ in range(UPDATES - 1))]
        yield from self.of_file.train(model, batches, self.noise(args), self.settings(args))


def tokenizer(args: argparse.Namespace) -> data.Tokenizer:
    return data.open_tokenizer(args.tokenizer, args.max_text_tokens)


def noise_of_mulan(args: argparse.Namespace) -> Callable[[int, int], Tensor]:
    noise, size = Noise(args.seed, "patches and masks"), train_mulan.build_model(args, tokenizer(args)).noise_size
    return lambda step, n: noise.uniform(step, range(n), (size,))


def noise_of_decoder(args: argparse.Namespace) -> Callable[[int, int], Sequence[dict[str, Tensor]]]:
    lowres = LowresDraws(args.timesteps, blur_prob=0.0)
    first = DiffusionDraws(args.seed, "unet1", args.timesteps, image_drop=args.image_cond_drop_prob)
    second = DiffusionDraws(args.seed, "unet2", args.timesteps, lowres=lowres)

    def noise(step: int, n: int) -> list[dict[str, Tensor]]:
        shapes = [(3, side, side) for side in args.image_sizes]
        return [draws(step, range(n), n, shape, shape) for draws, shape in zip((first, second), shapes, strict=True)]

    return noise


def of_mulan(name: str, **flags: Any) -> Reference:
    return Reference(
        name, "mulan", MULAN, flags, lambda module, settings: module.MuLaN(len(VOCABULARY), settings),
        lambda args: train_mulan.build_model(args, tokenizer(args)),
        lambda args, backend: data.sound_feed(args, backend, tokenizer(args)),
        lambda batch: {**batch, "lengths": torch.tensor(batch["lengths"])}, noise_of_mulan, BOUND_OF_MULAN,
    )  # fmt: skip


def of_decoder(name: str, **flags: Any) -> Reference:
    def feed(args: argparse.Namespace, backend: Any) -> Any:
        return data.decoder_feed(args, backend, image_size=args.image_sizes[-1])

    def build(args: argparse.Namespace) -> nn.Module:
        with one_process(args.batch_size) as backend:
            return train_decoder.build_model(args, feed(args, backend).first.widths)

    return Reference(
        name, "decoder", DECODER, {"resnet_groups": 8, "lowres_condition": "noise", **flags},
        lambda module, settings: module.Decoder(settings, WIDTH), build, feed, lambda batch: batch, noise_of_decoder,
        BOUND_OF_DECODER,
    )  # fmt: skip


REFERENCES = (
    of_mulan("mulan", max_grad_norm=1.0, weight_decay=0.5),
    # With few levels it matters that the last one is noise alone; with two blocks, which map goes to which block.
    of_decoder("decoder", weight_decay=0.5, timesteps=50, num_resnet_blocks=2),
    of_decoder("decoder, noise", noise_schedule="linear", objective="noise", **{"no-zero_terminal_snr": None}),
)


def largest_differences(ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each metric, relative, over the updates."""
    return {name: max(abs(a[name] / b[name] - 1) for a, b in zip(ours, theirs, strict=True)) for name in ours[0]}


@pytest.mark.parametrize("reference", REFERENCES, ids=str)
def test_twenty_updates_are_those_of_the_reference_to_rounding(reference: Reference, tmp_path: Path) -> None:
    run = reference.script.train(tmp_path / "run", *words({"max_steps": UPDATES, "seed": SEED, **reference.flags}))
    args = reference.script.arguments_of(run)
    model = reference.model(args, tmp_path)
    differences = largest_differences(list(reference.updates(args, model)), metrics(run))
    assert {"loss", "grad_norm"} <= differences.keys()
    assert max(differences.values()) < reference.bound, differences


@pytest.mark.parametrize("reference", [each for each in REFERENCES if each.script is DECODER], ids=str)
def test_ddim_draws_the_pictures_of_the_reference(reference: Reference, tmp_path: Path) -> None:
    """With guidance. Pictures lie in [0, 1]; what rounds differently in one step is multiplied in the next ones."""
    flags = words({**reference.flags, "sample_timesteps": 5, "cond_scale": 2.0})
    args = reference.script.parsed(*reference.script.flags(tmp_path, *flags))
    theirs: Any = reference.build(args).eval()
    for unet in theirs.unets:
        nn.init.normal_(unet.to_out.weight, std=0.1)  # is 0 at the start
    settings = reference.settings(args)
    ours = reference.make(reference.of_file, settings)
    ours.load_state_dict(theirs.state_dict())
    embeddings = torch.randn(3, WIDTH)
    torch.manual_seed(0)
    pictures = reference.of_file.sample(ours, embeddings, settings)
    torch.manual_seed(0)
    expected: list[Tensor] = []
    theirs.sample(
        {"image_embed": embeddings}, lambda index: lambda name, step, shape: torch.randn(3, *shape),
        Sampling("ddim", (5,), (2.0,)), batch=3, on_pictures=expected.append,
    )  # fmt: skip
    for ours_, theirs_ in zip(pictures, expected, strict=True):
        assert theirs_.std() > 0.1
        torch.testing.assert_close((ours_ + 1) / 2, theirs_, rtol=0, atol=1e-4)
