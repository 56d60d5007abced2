"""What the tests of the scripts that fill folders share: tiny models, inputs, and folders that the scripts fill."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from safetensors.numpy import load_file

import embed
import encode
from tandem.models import VQGAN, MuLaN, VideoTokenizer
from tests.data.decoding.films import write_video
from tests.scripts import lines

SIZE = 16
RATE, CLIP = 4000, 2000  # half a second
IMAGES = ("a.png", "b.jpg", "cats/1.webp", "cats/2.png", "cats/old/3.jpeg", "d.bmp", "e.png", "z/f.png", "z/g.png")
SOUNDS = {
    "a.wav": 0.5, "b.flac": 0.3, "dogs/1.ogg": 0.5, "dogs/2.wav": 0.8, "dogs/old/3.aiff": 0.5, "long.wav": 5.0,
    "quiet.au": 0.5, "z/long.wav": 1.9, "z/y.wav": 0.5,
}  # fmt: skip
VIDEOS = {
    "a.mp4": 5, "b.mkv": 4, "cats/1.mov": 3, "cats/2.png": 1, "cats/old/3.m4v": 6, "d.bmp": 1, "e.mp4": 20,
    "z/f.mkv": 2, "z/g.mp4": 7,
}  # fmt: skip


def vqgan(seed: int = 0, **options: Any) -> VQGAN:
    torch.manual_seed(seed)
    return VQGAN.from_dict({"image_size": SIZE, "dim": 4, "num_layers": 2, "codebook_size": 512, **options}).eval()


def autoencoder(seed: int = 0, **options: Any) -> VQGAN:
    """A VQGAN without codes, whose channels have had the means 0, 0.1, ... and the deviations 1, 1.5, ..."""
    return with_channels(vqgan(seed, quantizer="kl", scaling_factor=0.5, shift_factor=0.25, **options))


def with_channels(model: Any) -> Any:
    """The model, which has seen such channels."""
    numbers = torch.arange(model.quantizer.dim)
    mean, std = 0.1 * numbers, 1 + 0.5 * numbers
    model.quantizer.channel_stats.copy_(torch.stack([torch.ones_like(mean), mean, mean.square() + std.square()]))
    return model


def mulan(seed: int = 0, **options: Any) -> MuLaN:
    sizes = {"audio_dim": 16, "audio_depth": 1, "text_dim": 16, "text_depth": 1, "heads": 2, "dim_head": 8}
    hearing = {"sample_rate": RATE, "clip_seconds": CLIP / RATE, "n_fft": 128, "hop_length": 64, "n_mels": 16}
    torch.manual_seed(seed)
    return MuLaN.from_dict(
        {**sizes, **hearing, "patch_size": 8, "max_text_tokens": 16, "dim_latent": 8, **options}
    ).eval()


def video_tokenizer(seed: int = 0, **options: Any) -> VideoTokenizer:
    sizes = {"init_dim": 4, "input_kernel": 3, "patch_size": 2, "norm": "rms", "codebook_size": 512}
    layers = "residual,compress_space:8,compress_time:8"
    torch.manual_seed(seed)
    return VideoTokenizer.from_dict({"image_size": SIZE, "layers": layers, **sizes, **options}).eval()


def film_autoencoder(seed: int = 0, **options: Any) -> VideoTokenizer:
    """`video_tokenizer` with 4 channels of latents, like those of `autoencoder`, in place of codes."""
    model = video_tokenizer(seed, quantizer="kl", latent_dim=4, scaling_factor=0.5, shift_factor=0.25, **options)
    return with_channels(model)


def write_image(path: Path, seed: int, height: int = 20, width: int = 24) -> None:
    """Write an image of noise, so that codes differ from place to place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)).save(path)


def write_film(path: Path, seed: int, frames: int, height: int = 20, width: int = 24) -> None:
    """Write frames of noise, 25 per second; a single one as an image."""
    if frames == 1:
        return write_image(path, seed, height, width)
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures = np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), np.uint8)
    write_video(path, frames, pictures=pictures)
    return None


def write_sound(path: Path, seed: int, seconds: float, rate: int = RATE) -> None:
    """Write a tone that glides from one pitch to another in noise, so that no two parts of a sound are alike."""
    path.parent.mkdir(parents=True, exist_ok=True)
    times = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(seed).uniform(-0.2, 0.2, len(times))
    soundfile.write(path, 0.5 * np.sin(2 * np.pi * (100 + 150 * seed + 300 * times) * times) + noise, rate)


def write_images(folder: Path) -> None:
    for seed, name in enumerate(IMAGES):
        write_image(folder / name, seed)


def write_videos(folder: Path) -> None:
    for seed, (name, frames) in enumerate(VIDEOS.items()):
        write_film(folder / name, seed, frames)
    (folder / "notes.txt").write_text("no video")


def write_shapes(folder: Path) -> None:
    """Videos whose codes, with the tokenizer above, have grids of 4 x 4, 4 x 5 and 6 x 4."""
    for seed, (name, frames) in enumerate(VIDEOS.items()):
        write_film(folder / name, seed, frames, *((18, 18), (18, 23), (27, 18))[seed % 3])


def write_sounds(folder: Path) -> None:
    for seed, (name, seconds) in enumerate(SOUNDS.items()):
        write_sound(folder / name, seed, seconds)
    (folder / "notes.txt").write_text("no sound")


@dataclass(frozen=True)
class Script:
    """A script that fills a folder with shards of nine items, four to a shard."""

    name: str
    main: Callable[[list[str]], None]
    source: str  # the flag that names its input
    per_shard: str  # the setting that says how many items a shard has
    shards: str  # start of its shards' file names, and name of the tensor in them
    names: tuple[str, ...]  # names of the inputs, in order
    model: Callable[..., Any]  # makes the model from a seed
    write_inputs: Callable[[Path], None]
    use: Callable[[Path, Path, Path], list[Any]]  # flags that read a folder: model, folder, another folder
    batch_size: int | None = 3  # None: it has no batches
    lengths: tuple[int, ...] = (1,) * 9  # rows of each input
    more: tuple[str, ...] = ()  # further flags

    def __str__(self) -> str:
        return f"{self.name}{self.source}-{self.shards}"

    def flags(self, model: Path, source: Path | str, output: Path, *more: Any) -> list[str]:
        said = ["--model", model, self.source, source, "--output", output, f"--{self.per_shard}", 4]
        sizes = ["--batch_size", self.batch_size] if self.batch_size else []
        return [str(word) for word in (*said, *sizes, "--num_workers", 0, *self.more, *more)]

    def fill(self, model: Path, source: Path | str, output: Path, *more: Any) -> Path:
        self.main(self.flags(model, source, output, *more))
        return output

    def refused(self, capsys: pytest.CaptureFixture[str], *argv: Any) -> str:
        """The one line of an error, which ends the process with code 2."""
        capsys.readouterr()
        with pytest.raises(SystemExit) as raised:
            self.main([str(word) for word in argv])
        assert raised.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{self.name}: error: ")
        return line

    def rows(self, folder: Path) -> dict[str, np.ndarray]:
        """Row or rows by path, read as the documentation of the store's module describes."""
        shards = [load_file(path)[self.shards] for path in sorted(folder.glob(f"{self.shards}-*.safetensors"))]
        found = {}
        for line in lines(folder / "index.jsonl"):
            rows, grid = shards[line["shard"]][line["row"] :], line.get("grid", [])
            rows = rows[: line.get("code_frames", 1) * math.prod(grid)]
            rows = rows.reshape(-1, *grid, *rows.shape[1:]) if grid else rows
            found[line["path"]] = rows if "code_frames" in line else rows[0]
        return found

    def shard_rows(self, *left_out: int) -> list[int]:
        """The rows of the three shards, without those of some inputs."""
        kept = [0 if place in left_out else length for place, length in enumerate(self.lengths)]
        return [sum(kept[first : first + 4]) for first in (0, 4, 8)]

    def bad(self, folder: Path) -> list[dict[str, str]]:
        """What the folder records about inputs that could not be read."""
        bad: list[dict[str, str]] = index(folder)["bad"]
        return bad


TOKENIZE = Script(
    "encode.py", encode.main, "--image_folder", "images_per_shard", "codes", IMAGES, vqgan,
    write_images, lambda model, codes, other: ["--model", model, "--decode", codes, "--output", other],
)  # fmt: skip
LATENTS = replace(
    TOKENIZE, shards="latents", model=autoencoder,
    more=("--latent", "sample", "--with_flip", "--normalize", "channels"),
)  # fmt: skip
TOKENIZE_VIDEOS = Script(
    "encode.py", encode.main, "--video_folder", "videos_per_shard", "codes", tuple(VIDEOS),
    video_tokenizer, write_videos,
    lambda model, codes, other: ["--model", model, "--decode", codes, "--output", other],
    batch_size=None, lengths=tuple(1 + frames // 2 for frames in VIDEOS.values()),
)  # fmt: skip
LATENT_SHAPES = replace(
    TOKENIZE_VIDEOS, shards="latents", model=film_autoencoder, write_inputs=write_shapes,
    more=("--keep_aspect", "--latent", "sample", "--normalize", "channels"),
    lengths=tuple(4 * (4 + seed % 3) * (1 + frames // 2) for seed, frames in enumerate(VIDEOS.values())),
)  # fmt: skip
EMBED = Script(
    "embed.py", embed.main, "--audio", "files_per_shard", "embeddings", tuple(SOUNDS), mulan,
    write_sounds, lambda model, index, other: ["--model", model, "--index", index, "--query", "a dog"],
)  # fmt: skip


def stamps(folder: Path, pattern: str) -> dict[str, tuple[int, int]]:
    """Values by file that change when the file is written again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob(pattern)}


def index(folder: Path) -> Any:
    return json.loads((folder / "index.json").read_text())


def change_index(folder: Path, **changes: Any) -> None:
    (folder / "index.json").write_text(json.dumps({**index(folder), **changes}))


def broken_copy(source: Path, folder: Path, *names: str) -> Path:
    """A copy in which some files cannot be read."""
    shutil.copytree(source, folder)
    for name in names:
        (folder / name).write_bytes(b"no such content")
    return folder


def saved(folder: Path, model: Any, /, **claimed: Any) -> Path:
    """The folder of a model, whose config.json claims something else."""
    model.save_pretrained(folder)
    if claimed:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **claimed}))
    return folder
