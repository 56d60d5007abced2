"""The scripts against the one-file implementations of reference/, which share no code with them: given the same initial
weights, batches and noise, twenty updates have the same losses and gradients.

A new reference is one more entry of `REFERENCES`.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import train_decoder
import train_mulan
import train_tokenizer
import train_vae
import train_vqgan
from benchmarks import references
from tandem.config.models.decoder import Sampling
from tandem.data.feed import to_unit_range
from tandem.data.sets import decoder_data, image_data, sound_data, video_data, widths_of
from tandem.data.tokenizers import Tokenizer, open_tokenizer
from tandem.models.diffusion.decoder import LOWRES_TIMESTEPS
from tandem.training.losses.diffusion import DiffusionDraws, LowresDraws
from tandem.training.noise import Noise
from tests.processes import single
from tests.scripts import (
    DECODER,
    MULAN,
    ROOT,
    VAE,
    VIDEO_TOKENIZER,
    VQGAN,
    Script,
    final_weights,
    metrics,
    words,
)

UPDATES = 20
WIDTH = 30  # of the demonstration's embeddings of images
# With this seed no latent of the quantizing models comes closer to 0 than 1.8e-5, so that rounding flips none of their
# signs. A flipped one is another reconstruction: 3e-3 of the loss, 6e-2 of a gradient.
SEED = 3

# The initial weights times 1 +- 2^-23, drawn six times, change the losses of a reference within 20 updates by up to
# 2e-7 and norms by 4e-7 (VAE), by 3e-6 and 6e-5 (VQGAN), by 3e-4 and 2e-3 (video tokenizer); those of a discriminator
# by 5e-7 and 3e-6. But a ReLU whose input is about 0 may open for one of two orders of a sum alone: with AVX2, it made
# 3e-3 of a norm and 6e-5 of a loss of the VQGAN. The bounds leave room for some of these.
RELAXED = {"loss": 1e-5, "grad_norm": 1e-3}
ADVERSARIAL = {"loss": 1e-3, "grad_norm": 2e-2, "discr_loss": 1e-4, "discr_grad_norm": 1e-2}
# Every weight moved by one ulp, up or down: 6.2e-6 (MuLan) and 1.5e-6 (decoder). A mistake makes more: 7.9 for 8 as the
# factor of MuLan's logits 2e-2, a decoder's null vectors that decay 6e-5.
OF_MULAN, OF_DECODER = {"others": 3e-5}, {"others": 6e-6}


@dataclass(frozen=True, eq=False)
class Reference:
    """A file of reference/, and a run of its script that it can follow.

    Args:
        name: Of the case.
        script: The script, with its tiny model; its reference is that of the benchmarks.
        flags: More flags of the run.
        build: The script's arguments -> its models with their initial weights, in the same order.
        feed: The script's arguments and a backend -> its feed.
        bounds: The largest relative difference of each metric over the updates. "others": of each that is not named.
        noise: The script's arguments -> what the reference takes for noise; empty if it takes none.
        kept: Which of the models the run writes to model/; None: none of them.
        discriminator: What the run takes in place of the script's `build_discriminator`.
    """

    name: str
    script: Script
    flags: Mapping[str, Any]
    build: Callable[[argparse.Namespace], Sequence[nn.Module]]
    feed: Callable[[argparse.Namespace, Any], Any]
    bounds: Mapping[str, float]
    noise: Callable[[argparse.Namespace], Sequence[Callable[[int, int], Any]]] = lambda args: ()
    kept: int | None = 0
    discriminator: Callable[[argparse.Namespace], nn.Module] | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def reference(self) -> references.Reference:
        return references.REFERENCES[self.script.name]

    def models(self, args: argparse.Namespace, folder: Path) -> list[Any]:
        """The reference's models with the script's initial weights, which pass through a file."""
        of = self.reference
        models = list(of.models(of.module, of.settings(args), args, {"image_embed": torch.empty(1, WIDTH)}))
        for number, (ours, theirs) in enumerate(zip(models, self.build(args), strict=True)):
            save_file(theirs.state_dict(), folder / f"initial{number}.safetensors")
            ours.load_state_dict(load_file(folder / f"initial{number}.safetensors"), strict=True)
        return models

    def updates(self, args: argparse.Namespace, models: Sequence[Any]) -> Iterator[dict[str, float]]:
        """What the reference says of each update, on the batches of the script's feed."""
        of = self.reference
        with single(batch_size=args.batch_size) as backend:
            feed = self.feed(args, backend.processes)
            batches = [of.batch(feed.start(0)), *(of.batch(feed.next()) for _ in range(UPDATES - 1))]
        for said in of.module.train(*models, batches, *self.noise(args), of.settings(args)):
            yield {name: float(value) for name, value in said.items()}


def gumbel(args: argparse.Namespace) -> list[Callable[[int, int], Tensor]]:
    shape = train_vae.build_model(args).noise_shape
    return [lambda step, n: Noise(args.seed, "gumbel").gumbel(step, range(n), shape)]


def of_vae(name: str, **flags: Any) -> Reference:
    return Reference(
        name, VAE, flags, lambda args: [train_vae.build_model(args)], image_data, RELAXED, gumbel
    )  # fmt: skip


def images_or_clips(feed: Callable[[argparse.Namespace, Any], Any], args: argparse.Namespace) -> Tensor:
    """The first batch of a feed, in [0, 1]."""
    with single(batch_size=args.batch_size) as backend:
        batch = feed(args, backend.processes).start(0)
    return to_unit_range(batch["videos" if "videos" in batch else "images"])


@torch.no_grad()
def bend(heads: Sequence[Any], logits: Sequence[Tensor]) -> None:
    """Scale and shift the heads of a discriminator, so that these logits get the mean 1/2 and the deviation 1.

    Fresh ones lie between -1 and 1, where the hinge loss is linear: nothing would show that it bends there, and the
    last biases would have gradients of 0 but for rounding, of each of which Adam makes a whole step."""
    for head, given in zip(heads, logits, strict=True):
        last = head.to_logits[-1]
        last.weight /= given.std()
        last.bias.sub_(given.mean()).div_(given.std()).add_(0.5)


def discriminator_of_vqgan(args: argparse.Namespace) -> nn.Module:
    discriminator = BUILD_DISCRIMINATOR["train_vqgan"](args)
    bend([discriminator], [discriminator(images_or_clips(image_data, args))])
    return discriminator


def models_of_vqgan(args: argparse.Namespace) -> list[nn.Module]:
    generator = train_vqgan.build_model(args)
    return [generator, discriminator_of_vqgan(args), copy.deepcopy(generator)]


def discriminator_of_tokenizer(args: argparse.Namespace) -> nn.Module:
    discriminator = BUILD_DISCRIMINATOR["train_tokenizer"](args)
    clips = images_or_clips(video_data, args)
    logits = discriminator(clips, torch.zeros(len(clips), dtype=torch.int64))
    bend([discriminator.frame_head, *discriminator.clip_heads], logits)
    return discriminator


def models_of_tokenizer(args: argparse.Namespace) -> list[nn.Module]:
    return [train_tokenizer.build_model(args), discriminator_of_tokenizer(args)]


BUILD_DISCRIMINATOR: dict[str, Any] = {m.__name__: m.build_discriminator for m in (train_vqgan, train_tokenizer)}


def tokenizer(args: argparse.Namespace) -> Tokenizer:
    return open_tokenizer(args.tokenizer, args.max_text_tokens)


def noise_of_mulan(args: argparse.Namespace) -> list[Callable[[int, int], Tensor]]:
    noise, size = Noise(args.seed, "patches and masks"), train_mulan.build_model(args, tokenizer(args)).noise_size
    return [lambda step, n: noise.uniform(step, range(n), (size,))]


def noise_of_decoder(args: argparse.Namespace) -> list[Callable[[int, int], Any]]:
    lowres = LowresDraws(LOWRES_TIMESTEPS, blur_prob=0.0)
    first = DiffusionDraws(args.seed, "unet1", args.timesteps, image_drop=args.image_cond_drop_prob)
    second = DiffusionDraws(args.seed, "unet2", args.timesteps, lowres=lowres)

    def noise(step: int, n: int) -> list[dict[str, Tensor]]:
        shapes = [(3, side, side) for side in args.image_sizes]
        return [draws(step, range(n), n, shape) for draws, shape in zip((first, second), shapes, strict=True)]

    return [noise]


def of_mulan(name: str, **flags: Any) -> Reference:
    return Reference(
        name, MULAN, flags, lambda args: [train_mulan.build_model(args, tokenizer(args))],
        lambda args, processes: sound_data(args, processes, tokenizer(args)), OF_MULAN, noise_of_mulan, kept=None,
    )  # fmt: skip


def of_decoder(name: str, **flags: Any) -> Reference:
    def feed(args: argparse.Namespace, processes: Any) -> Any:
        return decoder_data(args, processes, image_size=args.image_sizes[-1])

    def build(args: argparse.Namespace) -> list[nn.Module]:
        with single(batch_size=args.batch_size) as backend:
            return [train_decoder.build_model(args, widths_of(feed(args, backend.processes).first_samples))]

    # Biases before a norm have a gradient of 0 but for rounding, which Adam follows: weights are not compared.
    return Reference(
        name, DECODER, {"dim_mults": "1,2", "resnet_groups": 8, "lowres_condition": "noise", **flags}, build, feed,
        OF_DECODER, noise_of_decoder, kept=None,
    )  # fmt: skip


REFERENCES = (
    of_vae("vae", starting_temp=0.7, kl_loss_weight=0.01, max_grad_norm=0.05),
    of_vae("vae, straight through", starting_temp=1.5, straight_through=None, smooth_l1_loss=None),
    Reference(
        "vqgan", VQGAN,
        {"image_size": 32, "num_layers": 3, "codebook_size": 16, "discr_start_step": 3, "lecam_weight": 0.3,
         "ema_decay": 0.9, "lr_warmup_steps": 4, "max_grad_norm": 1.0, "penalty_weight": 1e-3},
        models_of_vqgan, image_data, ADVERSARIAL, kept=2, discriminator=discriminator_of_vqgan,
    ),
    Reference(
        "tokenizer", VIDEO_TOKENIZER,
        {"layers": "compress_space,residual,compress_space,residual,compress_time,residual", "batch_size": 4,
         "codebook_size": 16, "penalty_weight": 0.1,
         "weight_decay": 1.0},  # in the few updates, what decays has to show
        models_of_tokenizer, video_data, ADVERSARIAL,
        lambda args: [lambda step, n: Noise(args.seed, "frame").uniform(step, range(n), ())],
        discriminator=discriminator_of_tokenizer,
    ),
    of_mulan("mulan", max_grad_norm=1.0, weight_decay=0.5),
    # With few levels it matters that the last one is noise alone; with two blocks, which map goes to which block.
    of_decoder("decoder", weight_decay=0.5, timesteps=50, num_resnet_blocks=2),
    of_decoder("decoder, linear", noise_schedule="linear"),
)  # fmt: skip


def largest_differences(ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each metric that both have, relative to theirs; but to its median where it is smaller: a loss may cross 0."""
    found = {}
    for name in (name for name in ours[-1] if name in theirs[-1]):
        a, b = (np.array([line[name] for line in lines if name in line]) for lines in (ours, theirs))
        found[name] = float((abs(a - b) / np.maximum(abs(b), np.median(abs(b)))).max())
    return found


def kernels(state: Mapping[str, Tensor]) -> Tensor:
    """All weights but vectors, of which those before a norm have no effect and are moved by rounding alone."""
    return torch.cat([state[name].flatten() for name in sorted(state) if state[name].dim() > 1])


# Second cases of a script.
NIGHTLY = ("vae, straight through", "decoder, linear")
CASES = [pytest.param(case, marks=pytest.mark.long if case.name in NIGHTLY else ()) for case in REFERENCES]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_twenty_updates_of_a_script_are_those_of_its_reference(
    case: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.discriminator is not None:
        # Of a script's own file, --init_from takes the generator alone: no flag gives a discriminator its weights.
        monkeypatch.setattr(case.script.module, "build_discriminator", case.discriminator)
    flags = {"max_steps": UPDATES, "seed": SEED, **case.flags}
    theirs = metrics(run := case.script.train(tmp_path / "run", *words(flags)))
    args = case.script.config("--config", str(run / "config.yaml"))
    models = case.models(args, tmp_path)
    start = None if case.kept is None else kernels(models[case.kept].state_dict())
    ours = list(case.updates(args, models))
    assert len(ours) == UPDATES and set(ours[0]) <= set(ours[-1]) <= set(theirs[-1])
    differences = largest_differences(ours, theirs)
    others = case.bounds.get("others", 1e-12)
    assert {name: value for name, value in differences.items() if value > case.bounds.get(name, others)} == {}
    assert {"loss", "grad_norm"} <= differences.keys()
    if case.kept is not None and start is not None:
        mine, trained = kernels(models[case.kept].state_dict()), kernels(final_weights(run))
        assert (mine - trained).norm() < 1e-2 * (trained - start).norm()


@pytest.mark.parametrize("case", {case.script: case for case in REFERENCES}.values(), ids=str)
def test_a_reference_is_a_program_of_its_own(
    case: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It imports nothing of this project, learns from a folder, and writes weights and, but for MuLan, a picture."""
    folder = case.script.data.write(tmp_path / "data", 20)
    if case.script is MULAN:
        rows = [f"{path.stem}.wav,{path.read_text()}\n" for path in sorted(folder.glob("*.txt"))]
        (folder / "manifest.csv").write_text("path,caption\n" + "".join(rows))
    module = case.reference.module
    known = {each.name for each in fields(module.Settings)}
    tiny = {name: value for name, value in case.script.tiny.items() if name in known}
    flags = words({**tiny, "batch_size": 4, "max_steps": 12})
    numbers = [number for word in flags for number in (word.split(",") if re.fullmatch(r"[\d,]+", word) else [word])]
    monkeypatch.setattr(sys, "argv", ["reference", str(folder), *numbers])
    monkeypatch.chdir(tmp_path)
    module.main()
    assert "loss" in capsys.readouterr().out
    (weights,), pictures = tmp_path.glob("*.safetensors"), list(tmp_path.glob("*.png"))
    assert load_file(weights) and len(pictures) == (case.script is not MULAN)
    assert all(Image.open(picture).size[0] >= 16 for picture in pictures)
    imported = re.findall(r"^(?:from|import) (\w+)", Path(module.__file__).read_text(), re.MULTILINE)
    assert not [name for name in imported if (ROOT / name).exists() or (ROOT / f"{name}.py").exists()]


@pytest.mark.parametrize("case", [each for each in REFERENCES if each.script is DECODER], ids=str)
def test_ddim_draws_the_pictures_of_the_reference(case: Reference, tmp_path: Path) -> None:
    """With guidance. Pictures lie in [0, 1]; what rounds differently in one step is multiplied in the next ones."""
    flags = words({**case.flags, "sample_timesteps": 5, "cond_scale": 2.0})
    args = case.script.config(*case.script.flags(tmp_path, *flags))
    (theirs,) = case.build(args)
    theirs.eval()
    for unet in theirs.unets:
        nn.init.normal_(unet.to_out.weight, std=0.1)  # is 0 at the start
    of = case.reference
    settings = of.settings(args)
    (ours,) = of.models(of.module, settings, args, {"image_embed": torch.empty(1, WIDTH)})
    ours.load_state_dict(theirs.state_dict())
    embeddings = torch.randn(3, WIDTH)
    torch.manual_seed(0)
    pictures = of.module.sample(ours, embeddings, settings)
    torch.manual_seed(0)
    expected: list[Tensor] = []
    theirs.sample(
        {"image_embed": embeddings}, lambda index: lambda name, step, shape: torch.randn(3, *shape),
        Sampling("ddim", [5], cond_scale=[2.0]), batch=3, on_pictures=expected.append,
    )  # fmt: skip
    for ours_, theirs_ in zip(pictures, expected, strict=True):
        assert theirs_.std() > 0.1
        torch.testing.assert_close((ours_ + 1) / 2, theirs_, rtol=0, atol=1e-4)
