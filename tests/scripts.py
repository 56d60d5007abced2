"""The training scripts, tiny: how tests run them in this process, what a run leaves, and how two runs are compared.

A new script is one more entry of `SCRIPTS`: every test of test_every_script.py then runs on it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import importlib
import io
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from tandem import models
from tandem.data.feed import to_unit_range
from tandem.data.sampling.order import split_samples
from tandem.data.sets import open_images
from tandem.training.metrics.directions import COSTS
from tandem.training.run import Run
from tests.models.helpers import assert_same_bits

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = Path(__file__).with_name("words_tokenizer.json")  # a few words, between marks of start and end
VOCABULARY: dict[str, int] = json.loads(TOKENIZER.read_text())["model"]["vocab"]
WORDS = list(VOCABULARY)[3:]  # the first 24 of them name a sound each

# Every update is logged; validation, pictures and checkpoints come after the last update alone.
RUN = {
    "batch_size": 8, "valid_fraction": 0.2, "valid_samples": 0, "num_workers": 0, "ema_decay": 0,
    "log_every_n_steps": 1, "validate_every_n_steps": 0, "sample_every_n_steps": 0, "save_every_n_steps": 0,
}  # fmt: skip
# Of the run that tests look at and that interrupted runs must equal.
EIGHT = {
    "max_steps": 8, "seed": 3, "ema_decay": 0.9, "validate_every_n_steps": 2, "sample_every_n_steps": 4,
    "save_every_n_steps": 2, "keep_n_checkpoints": 9,
}  # fmt: skip


def write_images(folder: Path, count: int) -> Path:
    """A folder of images of noise, 20 x 20 pixels: 00.png, 01.png, ..."""
    folder.mkdir(exist_ok=True)
    noise = np.random.default_rng(0).integers(0, 256, (count, 20, 20, 3), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        Image.fromarray(pixels).save(folder / f"{number:02d}.png")
    return folder


def write_sounds(folder: Path, texts: Sequence[str]) -> Path:
    """A folder of sounds of any rate, length and number of channels, with a text beside each: 00.wav, 00.txt, ..."""
    folder.mkdir(exist_ok=True)
    noise = np.random.default_rng(0)
    for number, text in enumerate(texts):
        rate, channels = (8000, 11025, 44100)[number % 3], 1 + number % 4
        frames = int(rate * (0.1 + 0.05 * number))
        phases = np.arange(frames)[:, None] * (2 * np.pi * 200 * 1.1**number / rate)
        waves = 0.3 * np.sin(phases) + noise.normal(0, 0.02, (frames, channels))
        soundfile.write(folder / f"{number:02d}.wav", waves, rate)
        (folder / f"{number:02d}.txt").write_text(text)
    return folder


def write_videos(folder: Path, count: int) -> Path:
    """A folder of films of noise, 20 x 20 pixels and 6 frames: 00.gif, 01.gif, ..."""
    folder.mkdir(exist_ok=True)
    noise = np.random.default_rng(0).integers(0, 256, (count, 6, 20, 20, 3), dtype=np.uint8)
    for number, frames in enumerate(noise):
        first, *others = (Image.fromarray(pixels) for pixels in frames)
        first.save(folder / f"{number:02d}.gif", save_all=True, append_images=others, duration=40)
    return folder


@dataclass(frozen=True)
class Data:
    """A kind of training data: the flag that names it, its demonstration, and what writes a folder of n files."""

    flag: str
    demonstration: str
    write: Callable[[Path, int], Path]


IMAGES = Data("image_folder", "demo:shapes", write_images)
VIDEOS = Data("video_folder", "demo:moving", write_videos)


def write_captioned(folder: Path, count: int) -> Path:
    """`write_images`, with an embedding beside each: 00.npy, 01.npy, ..."""
    write_images(folder, count)
    for number, row in enumerate(np.random.default_rng(1).normal(size=(count, 6))):
        np.save(folder / f"{number:02d}.npy", row.astype(np.float32))
    return folder


CAPTIONED = Data("image_folder", "demo:shapes", write_captioned)
SOUNDS = Data("audio_data", "demo:tones", lambda folder, n: write_sounds(folder, [f"{w} sound" for w in WORDS[:n]]))


class KilledError(BaseException):
    """Stands in for SIGKILL: nothing catches it, and nothing is written after it."""


def kill(*_: Any) -> None:
    raise KilledError


def at(event: str, step: int, do: Callable[[], object], call: int = 1) -> AbstractContextManager[None]:
    """Call a function where a run has made ``step`` updates and tells an event (`Run.watched`) the first time, or at
    call number ``call``."""
    calls = itertools.count(1)

    def watch(run: Run, told: str, _: Any) -> None:
        if (told, run.progress.step) == (event, step) and next(calls) == call:
            do()

    return Run.watched(watch)


@contextlib.contextmanager
def killed(death: AbstractContextManager[None]) -> Iterator[None]:
    """The process is killed in here, see `kill`."""
    with death, pytest.raises(KilledError):
        yield
    for thread in threading.enumerate():
        if thread.name == "checkpoint":  # would die with its process, and must not write beside the next start
            thread.join()


@dataclass(frozen=True, eq=False)
class Script:
    """A training script, and flags with which an update of it takes milliseconds.

    Args:
        name: Of the module.
        model: The class that loads a run's model/ folder.
        data: What it trains on.
        tiny: Flags of a tiny model.
        all_parts: Flags that put every part of the script's state into a checkpoint within 8 updates.
        samples_per_epoch: With these flags.
        weight: Name of a trained weight in a checkpoint -> its name in the model.
        other_models: Flags and values that make another model; flag -> (its value in `tiny`, another value).
    """

    name: str
    model: Any
    data: Data
    tiny: Mapping[str, Any]
    other_models: Mapping[str, tuple[Any, Any]]
    all_parts: Mapping[str, Any] = field(default_factory=dict)
    samples_per_epoch: int = 51  # 13 of the 64 samples of a demonstration are for validation
    weight: Callable[[str], str] = lambda key: key.partition(": weights/")[2]

    def __str__(self) -> str:
        return self.name

    @property
    def module(self) -> Any:
        return importlib.import_module(self.name)

    @property
    def configs(self) -> Path:
        """The folder of its config files."""
        return ROOT / "configs" / self.name.removeprefix("train_")

    @property
    def eight(self) -> list[str]:
        """Flags of the run of eight updates."""
        return words({**EIGHT, **self.all_parts})

    def flags(self, folder: Path, *more: str, without: Sequence[str] = ()) -> list[str]:
        data = {self.data.flag: f"{self.data.demonstration}:64", "output_dir": folder}
        said = {**RUN, **data, **self.tiny}
        return [*words({flag: said[flag] for flag in said if flag not in without}), *more]

    def start_from(self, source: Path, folder: Path, *more: str) -> Path:
        """Make an update that changes hardly anything, starting from another model; no flag says its shape."""
        data = {self.data.flag: f"{self.data.demonstration}:64", "output_dir": folder, "init_from": source}
        self.main(*words({**RUN, **data, "max_steps": 1, "learning_rate": 1e-30}), *more)
        return folder

    def parsed(self, *flags: str) -> argparse.Namespace:
        parsed: argparse.Namespace = self.module.build_parser().parse(flags)
        return parsed

    def config(self, *flags: str) -> Any:
        """The configuration that `train` gets."""
        parser = self.module.build_parser()
        args = parser.parse(flags)
        return parser.to_config(args, parser.settings(args))

    def arguments_of(self, run: Path) -> argparse.Namespace:
        """Those with which a run was trained."""
        return self.parsed("--config", str(run / "config.yaml"))

    def main(self, *flags: str) -> str:
        """Run the script in this process, on the CPU; returns what it wrote to stderr."""
        said = io.StringIO()
        try:
            with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
                patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
                gc.freeze()  # a run looks for garbage after its first update: not in all that the tests have imported
                self.module.main(flags)
        finally:
            gc.unfreeze()
            sys.stderr.write(said.getvalue())
            # The end of a process ends its loaders. Here, when their iterators are collected as garbage, the queues
            # through which they would be told may be gone already, and PyTorch waits 5 s for each of them.
            for loader in multiprocessing.active_children():
                loader.kill()
                loader.join()
        return said.getvalue()

    def output_of(self, folder: Path, *more: str) -> str:
        """Train the tiny model; returns what the run wrote to stderr."""
        return self.main(*self.flags(folder, *more))

    def train(self, folder: Path, *more: str) -> Path:
        """Train the tiny model; returns the run folder."""
        self.output_of(folder, *more)
        return folder

    def refused(self, folder: Path, *more: str) -> str:
        """The one line of an error, which ends the process with code 2."""
        return self.refused_alone(*self.flags(folder, *more))

    def refused_alone(self, *flags: str) -> str:
        """The one line of an error with these flags alone."""
        with contextlib.redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit) as raised:
            self.main(*flags)
        assert raised.value.code == 2, said.getvalue()
        line = said.getvalue().splitlines()[-1]
        assert line.startswith(f"{self.name}.py: error: ")
        return line

    def in_update(self, step: int, do: Callable[[], object]) -> AbstractContextManager[None]:
        """Call a function at the beginning of update number ``step`` (from 0), whose batch is there."""
        return at("update", step, do)

    def in_validation(self, step: int, do: Callable[[], object]) -> AbstractContextManager[None]:
        """Call a function between the two batches that validate the averaged weights after update ``step`` (from 0);
        two that validate the trained weights come before them."""
        return at("evaluation", step + 1, do, call=4)

    def train_killed(self, step: int, folder: Path, *more: str) -> None:
        """Train until the process is killed in update ``step`` (from 0)."""
        with killed(self.in_update(step, kill)):
            self.train(folder, *more)

    def train_killed_in_validation(self, step: int, folder: Path, *more: str) -> None:
        """Train until the process is killed in a validation; see `in_validation`."""
        with killed(self.in_validation(step, kill)):
            self.train(folder, *more)

    def train_stopped(self, step: int, folder: Path, *more: str) -> None:
        """Train until the process is asked to stop in update ``step`` (from 0), which it completes and saves."""
        self._train_to_a_stop(self.in_update, step, folder, *more)

    def train_stopped_in_validation(self, step: int, folder: Path, *more: str) -> None:
        """Train until the process is asked to stop in a validation; see `in_validation`."""
        rest = at("evaluation", step + 1, lambda: pytest.fail("the rest is left to the next start"), call=5)
        with rest:
            self._train_to_a_stop(self.in_validation, step, folder, *more)
        assert [line["step"] for line in lines(folder / "metrics.jsonl")][-2:] == [step, step + 1], "no evaluation"

    def _train_to_a_stop(self, when: Callable[..., Any], step: int, folder: Path, *more: str) -> None:
        with when(step, lambda: os.kill(os.getpid(), signal.SIGTERM)), pytest.raises(SystemExit) as raised:
            self.train(folder, *more)
        assert raised.value.code == 75
        assert (folder / "checkpoints" / f"step_{step + 1:08d}").is_dir()


VAE = Script(
    "train_vae",
    models.DiscreteVAE,
    IMAGES,
    tiny={
        "image_size": 16, "num_layers": 2, "num_resnet_blocks": 1, "num_tokens": 16, "codebook_dim": 6, "hidden_dim": 8
    },
    all_parts={"num_images_save": 11, "random_flip": None},
    other_models={"num_tokens": (16, 32), "hidden_dim": (8, 4), "codebook_dim": (6, 4), "num_resnet_blocks": (1, 0)},
)  # fmt: skip
VQGAN = Script(
    "train_vqgan",
    models.VQGAN,
    IMAGES,
    tiny={"image_size": 16, "num_layers": 2, "dim": 8, "codebook_size": 64, "discr_layers": 2},
    all_parts={"quantizer": "vq", "codebook_dim": 4, "discr_start_step": 3, "lecam_weight": 0.1},
    other_models={"codebook_size": (64, 128), "dim": (8, 4), "num_resnet_blocks": ("1", "1,1"), "discr_dim": (8, 4)},
)
MULAN = Script(
    "train_mulan",
    models.MuLaN,
    SOUNDS,
    tiny={
        "sample_rate": 8000, "clip_seconds": 0.5, "n_fft": 256, "hop_length": 64, "n_mels": 32, "patch_size": 8,
        "audio_dim": 16, "audio_depth": 2, "text_dim": 16, "text_depth": 2, "heads": 2, "dim_head": 8, "dim_latent": 8,
        "tokenizer": TOKENIZER, "max_text_tokens": 24, "lr_warmup_steps": 4,
    },
    other_models={"dim_latent": (8, 4), "audio_depth": (2, 3), "max_text_tokens": (24, 16)},
)  # fmt: skip
VIDEO_TOKENIZER = Script(
    "train_tokenizer",
    models.VideoTokenizer,
    VIDEOS,
    tiny={
        "image_size": 16, "num_frames": 5, "layers": "compress_space:8,residual,compress_time:8", "init_dim": 4,
        "input_kernel": 3, "codebook_size": 64, "discr_layers": 1, "lr_warmup_steps": 2,
        "learning_rate": 1e-3,
    },
    all_parts={
        "quantizer": "vq", "codebook_dim": 4, "discr_start_step": 3, "lecam_weight": 0.1,
        "image_folder": "demo:shapes:64", "image_every": 3,
    },
    samples_per_epoch=77,  # 51 clips and 26 images
    other_models={
        "codebook_size": (64, 128), "init_dim": (4, 8), "discr_dim": (4, 8),
        "layers": ("compress_space:8,residual,compress_time:8", "compress_space:8,compress_time:8"),
    },
)  # fmt: skip
DECODER = Script(
    "train_decoder",
    models.Decoder,
    CAPTIONED,
    tiny={
        "image_sizes": [8, 16], "dim": [8], "dim_mults": ["1"], "num_resnet_blocks": ["1"], "attn_heads": [2],
        "attn_dim_head": [8], "cross_attn_heads": [2], "cross_attn_dim_head": [8], "resnet_groups": [4],
        "learning_rate": [1e-3], "sample_timesteps": [2], "test_fraction": 0.0,
    },
    all_parts={
        "switches": ["coordinates", "sparse_attn"], "loss_weight": ["min_snr", "none"], "learned_variance": [0, 1],
        "cond_scale": [2.0, 1.0], "num_images_save": 3,
    },
    weight=lambda key: re.sub(r"unet(\d): weights/", lambda m: f"unets.{int(m[1]) - 1}.", key),
    other_models={"timesteps": (1000, 500), "condition_on": ("image", "text")},
)  # fmt: skip
SCRIPTS = {script.name: script for script in (VAE, VQGAN, MULAN, VIDEO_TOKENIZER, DECODER)}


def words(flags: Mapping[str, Any]) -> list[str]:
    """Flags as a command line has them; None: a flag without a value; a list: one with several."""
    values = {
        flag: [] if value is None else value if isinstance(value, list) else [value] for flag, value in flags.items()
    }
    return [word for flag in flags for word in (f"--{flag}", *map(str, values[flag]))]


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON objects."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(run: Path) -> list[dict[str, Any]]:
    """The metrics of each update with a line, those of its evaluation included."""
    by_step: dict[int, dict[str, Any]] = {}
    for line in lines(run / "metrics.jsonl"):
        by_step.setdefault(line["step"], {}).update(line)
    return list(by_step.values())


def without_clocks(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the machine's speed and on the time of day."""
    return [{name: value for name, value in line.items() if name not in COSTS} for line in metrics(run)]


def files(folder: Path) -> dict[str, bytes]:
    """The content of every file in a folder, by its path there; but of the lock, which says since when it is held."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def edit_checkpoint(folder: Path, edit: Callable[[Any], object]) -> None:
    """Change state.json of a checkpoint, as somebody does who also changes the checksums."""
    state = json.loads((folder / "state.json").read_text())
    edit(state["parts"])
    (folder / "state.json").write_text(json.dumps(state))
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
            for path in folder.iterdir() if path.name != "SHA256SUMS"]  # fmt: skip
    (folder / "SHA256SUMS").write_text("".join(sums))


def refusal(main: Callable[..., object], *words: object) -> str:
    """The one line with which a program ends, with code 2."""
    with contextlib.redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit) as raised:
        main([str(word) for word in words])
    (line,) = said.getvalue().splitlines()
    assert raised.value.code == 2
    return line


def checkpoint(run: Path, step: int) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, as "part: name"."""
    folder = run / "checkpoints" / f"step_{step:08d}"
    return {f"{path.stem}: {name}": t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def final_weights(run: Path) -> dict[str, Tensor]:
    """Of the model that a run left."""
    return load_file(run / "model" / "model.safetensors")


def shared_state(run: Path) -> dict[str, Tensor]:
    """Every tensor of a run's model and of its newest checkpoint."""
    newest = checkpoint(run, max(int(path.name.removeprefix("step_")) for path in run.glob("checkpoints/step_*")))
    return {**newest, **final_weights(run)}


def validation_images(args: argparse.Namespace) -> Tensor:
    """The validation split of an image script, float32 in [0, 1], in order."""
    images = open_images(args.image_folder, image_size=args.image_size, channels=args.channels, seed=args.seed)
    valid = split_samples(len(images), args.valid_fraction, 0, args.seed, batch_size=args.batch_size).valid
    return torch.stack([to_unit_range(images.load(valid[i])["images"]) for i in range(len(valid))])


def assert_same_run(ours: Path, expected: Path) -> None:
    """Two runs wrote the same lines, pictures and models, and every tensor of their last checkpoints is equal."""
    assert without_clocks(ours) == without_clocks(expected)
    step = metrics(expected)[-1]["step"]
    assert_same_bits(checkpoint(ours, step), checkpoint(expected, step))
    of_this_start = ("config.yaml", "starts.jsonl", "metrics.jsonl", "checkpoints")
    left, wanted = (
        {k: v for k, v in files(run).items() if not k.startswith(of_this_start)} for run in (ours, expected)
    )
    assert left.keys() == wanted.keys()
    assert [name for name in left if left[name] != wanted[name]] == []
