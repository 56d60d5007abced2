"""What the numbers are compared with is what it claims to be."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import CenterCrop, Compose, PILToTensor, Resize

import data.feed
import train_decoder
from benchmarks import gan
from benchmarks.bare import VARIANTS, bare_loop
from benchmarks.bare_decoder import bare_updates
from benchmarks.decoder import first_unet
from benchmarks.gan import GAMES, _bare, _ours
from benchmarks.loading import plain_decode, write_photos
from benchmarks.video_loading import plain_clip, write_videos
from data.files.source import Source
from data.images.scenes import WIDTH
from data.stream import TrainingStream
from data.videos.decoding import ClipDecoder
from models import Decoder, DiscreteVAE
from tests.scripts import DECODER
from training.flags.unets import check_unet_flags, refuse_idle_decoder_flags


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (301, 333), (128, 143), (143, 128), (128, 128), (100, 90)])
def test_plain_decoding_is_torchvisions(size: tuple[int, int], tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    path = tmp_path / "image.jpg"
    Image.fromarray(pixels).save(path)
    transform = Compose([Resize(128), CenterCrop(128), PILToTensor()])
    expected = transform(Image.open(path).convert("RGB"))
    assert torch.equal(plain_decode(str(path), 128), expected)


def test_generated_photos_have_the_size_of_photographs(tmp_path: Path) -> None:
    write_photos(tmp_path, 2)
    files = sorted(tmp_path.iterdir())
    assert [Image.open(file).size for file in files] == [(500, 375)] * 2
    assert all(60_000 < file.stat().st_size < 160_000 for file in files)


def test_a_plain_clip_is_that_of_the_loader_but_for_the_way_of_resizing(tmp_path: Path) -> None:
    """At the start, because each chooses its places in its own way."""
    write_videos(tmp_path, 1, seconds=1, keyframe_every=25)
    (path,) = tmp_path.iterdir()
    decoder = ClipDecoder(128, 17)
    frames = torch.stack([frame for frame, _ in decoder.frames(Source(str(path)))], dim=1)
    assert frames.shape == (3, 25, 128, 128)
    starts: Any = SimpleNamespace(uniform=lambda low, high: 0.2)
    for by_ffmpeg in (False, True):
        clip = plain_clip(str(path), random=starts, by_ffmpeg=by_ffmpeg)
        errors = [(clip.float() - frames[:, n : n + 17].float()).abs().mean() for n in range(9)]
        assert int(torch.stack(errors).argmin()) == 5 and errors[5] < 6  # grey levels


@pytest.mark.parametrize("script", GAMES)
def test_both_loops_make_the_same_updates(script: str) -> None:
    """But for rounding, which Adam may amplify where a gradient is about 0: hence the median."""

    def weights(game: Any) -> Tensor:
        return torch.cat([p.detach().flatten() for m in (game.generator, game.discriminator) for p in m.parameters()])

    start = weights(GAMES[script]())
    after = []
    for make_updates in (_ours, _bare):
        game = GAMES[script]()
        make_updates(game)()
        after.append(weights(game))
    assert (after[0] - start).abs().median() > 3e-4
    assert (after[0] - after[1]).abs().median() < 1e-5


@pytest.mark.parametrize("side", ["ours", "bare"])
def test_a_side_of_two_models_says_its_speed_in_json(
    side: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gan, "_UPDATES", 1)
    gan.main(side, "train_tokenizer.py", "bf16,fp32", "2")
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(each["updates_per_second"]) for each in found] == [2, 2] and all(each["peak_mib"] > 0 for each in found)


def test_the_bare_loop_makes_the_updates_of_train_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the script's random numbers, crops and clipping. Rounding makes 1e-9; leaving out the blur makes 3e-5."""
    batches: list[Any] = []

    def of_each_unet(model: Decoder) -> list[Tensor]:
        return [torch.cat([weight.detach().flatten() for weight in unet.parameters()]) for unet in model.unets]

    class Stream(TrainingStream):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                batches.append(batch)
                yield batch

    monkeypatch.setattr(data.feed, "TrainingStream", Stream)
    said = ["--random_crop_sizes", "0", "8", "--max_grad_norm", "0.1", "--max_steps", "3", "--weight_decay", "0"]
    trained = DECODER.train(tmp_path, *said)
    assert len(batches) == 3
    args = DECODER.arguments_of(tmp_path)
    model = train_decoder.build_model(args, {"image_embed": WIDTH, "text_encodings": None})
    start = of_each_unet(model)
    loop = bare_updates(model, args, batches, VARIANTS["same_noise"])
    for _ in batches:
        next(loop)
    ours = of_each_unet(Decoder.from_pretrained(trained / "model"))
    for before, after, expected in zip(start, ours, of_each_unet(model), strict=True):
        assert (after - before).abs().median() > 3e-4
        assert (after - expected).abs().mean() < 1e-7


def test_one_unet_is_the_first_of_the_demonstration() -> None:
    parser, demo = train_decoder.build_parser(), ["--config", str(train_decoder.DEMO_CONFIG)]
    both = [parser.parse([*demo, *more]) for more in ([], first_unet())]
    for args in both:  # as the script refuses flags
        check_unet_flags(parser, args)
        refuse_idle_decoder_flags(parser, args)
    whole, first = (train_decoder.build_model(args, {"image_embed": WIDTH, "text_encodings": None}) for args in both)
    assert first.config["stages"] == whole.config["stages"][:1]


@contextlib.contextmanager
def connected(exchange: str) -> Iterator[None]:
    """This process alone, as the library that sums gradients asks for it."""
    if exchange == "ddp":
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
        yield
        torch.distributed.destroy_process_group()
    elif exchange == "horovod":
        import horovod.torch as hvd

        hvd.init()
        yield
        hvd.shutdown()
    else:
        yield


@pytest.mark.parametrize("name", VARIANTS)
def test_every_bare_loop_makes_adams_first_step(name: str) -> None:
    model = DiscreteVAE(image_size=8, num_tokens=4, codebook_dim=3, num_layers=1, hidden_dim=5)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with connected(VARIANTS[name].exchange):
        next(bare_loop(model, [images], VARIANTS[name], learning_rate=1e-3))
    moved = torch.cat([(new - old).abs().flatten() for new, old in zip(model.parameters(), before, strict=True)])
    # Adam's first step is the learning rate in the direction of each gradient, whatever its size.
    assert moved.median().item() == pytest.approx(1e-3, rel=1e-3)
    assert moved.max().item() <= 1.001e-3
