"""Small valid inputs of every tool, which the fuzzer makes itself, and the commands that read them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from filling import mulan, video_tokenizer, vqgan, write_images, write_sounds, write_videos
from PIL import Image
from safetensors.torch import save_file

from data.records import index
from models import DiscreteVAE
from tests.data.records.tables import save_to_disk, table, write_arrow
from tests.models.files.test_dalle2 import laion
from tests.models.reference.autoencoders import written
from tests.models.reference.tokenizers import state_of as public_vqgan
from tests.models.test_clip import write_clip
from tests.models.test_decoder import decoder
from tests.scripts import RUN, SCRIPTS, SOUNDS, TOKENIZER, words
from tests.test_decoder_config import SMALL_UNET, changed

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("vae", "vqgan", "mulan", "video", "decoder")  # of models
ONE_UPDATE = words({**RUN, "batch_size": 4, "max_steps": 1, "valid_fraction": 0.2})


@dataclass(frozen=True)
class Target:
    """A command and the input that is damaged before it runs.

    Args:
        script: Without .py.
        flags: Relative to the folder of the case, which has copies of `inputs`; what it writes goes to "out".
        inputs: Of the folder of inputs; the first ones are damaged.
        damaged: How many of them.
        ending: Of the files that are damaged.
    """

    script: str
    flags: Sequence[str]
    inputs: Sequence[str]
    damaged: int = 1
    ending: str = ""

    def __str__(self) -> str:
        return f"{self.script}.py {' '.join(self.flags)}"


def _of_training(name: str, inputs: Sequence[str], *flags: str, damaged: int = 1, ending: str = "") -> Target:
    tiny = words(SCRIPTS[name].tiny)
    return Target(name, [*tiny, *ONE_UPDATE, "--output_dir", "out", *flags], inputs, damaged, ending)


def _tools() -> list[Target]:
    found = [
        Target("convert", command, [path])
        for path in (*KINDS, "vae.pt", "vqgan.pt", "decoder.pth", "run", "sharded", "sd3", "taming.ckpt")
        for command in (["inspect", path], ["export", path, "--to", "model", "out"])
    ]  # fmt: skip
    few = ["--num_workers", "0"]
    images, videos = ["--image_folder", "images", *few], ["--video_folder", "videos", *few]
    return [
        *found,
        Target("convert", ["config", "public.json", "out"], ["public.json"]),
        Target("convert", ["average", "run", "out", "--ema_length", "0.1"], ["run"]),
        Target("report", ["run", "--output", "out"], ["run"]),
        Target("convert", ["export", "decoder.pth", "--to", "dalle2", "out.pth"], ["decoder.pth"]),
        Target("encode", ["--model", "vqgan", *images, "--output", "out"], ["images", "vqgan"], 2),
        Target("encode", ["--model", "vae", *images, "--output", "out"], ["vae", "images"]),
        *(Target("encode", ["--model", "vqgan", "--decode", codes, *few, "--output", "out"], [codes, "vqgan"])
          for codes in ("codes", "codes_npy")),
        Target("encode", ["--model", "vqgan", *images, "--images_per_shard", "4", "--output", "codes"],
               ["codes", "vqgan", "images"]),
        Target("encode", ["--model", "video", *videos, "--output", "out"], ["videos", "video"], 2),
        Target("encode", ["--model", "video", "--video_folder", "videos.jsonl", *few, "--output", "out"],
               ["videos.jsonl", "videos", "video"], 2),
        Target("encode", ["--model", "video", "--decode", "films", *few, "--output", "out"],
               ["films", "video"]),
        Target("embed", ["--model", "mulan", "--audio", "sounds", *few, "--output", "out"], ["sounds", "mulan"], 2),
        Target("embed", ["--model", "mulan", "--index", "index", "--query", "a dog"], ["index", "mulan"]),
        Target("sample", ["--model", "decoder", "--image_embeddings", "rows.npy", "--sample_timesteps", "1", *few,
                          "--batch_size", "2", "--output", "out"], ["rows.npy", "decoder"], 2),
        Target("sample", ["--model", "decoder", "--start_at_unet", "2", "--images", "images", "--sample_timesteps", "1",
                          *few, "--output", "out"], ["images", "decoder"]),
    ]  # fmt: skip


def _trainings() -> list[Target]:
    vae = ["--image_folder", "images"]
    return [
        _of_training("train_vae", ["images"], *vae),
        _of_training("train_vae", ["vae_tiny.pt"], "--image_folder", "demo:shapes:8", "--init_from", "vae_tiny.pt"),
        _of_training("train_vae", ["config.yaml"], "--config", "config.yaml"),
        Target("train_vae", ["--config", "run/config.yaml", "--output_dir", "run", "--max_steps", "3"], ["run"]),
        _of_training("train_tokenizer", ["videos"], "--video_folder", "videos"),
        _of_training("train_tokenizer", ["videos.jsonl", "videos"], "--video_folder", "videos.jsonl"),
        _of_training("train_mulan", ["captioned"], "--audio_data", "captioned"),
        _of_training("train_mulan", ["sounds.csv", "sounds"], "--audio_data", "sounds.csv"),
        _of_training("train_mulan", ["captioned.tar"], "--audio_data", "captioned.tar"),
        _of_training("train_mulan", ["words.json"], "--audio_data", "demo:tones:8", "--tokenizer", "words.json"),
        _of_training("train_decoder", ["pairs"], "--image_folder", "pairs"),
        _of_training("train_decoder", ["00000.tar"], "--image_folder", "00000.tar"),
        _of_training("train_decoder", ["rows_00000.npy", "00000.tar"], "--image_folder", "00000.tar",
                     "--image_embeddings", "rows_00000.npy", damaged=2),
        _of_training("train_decoder", ["tiny.json", "tiny.safetensors"], "--image_folder", "demo:shapes:8", "--clip",
                     "tiny.json", "--clip_weights", "tiny.safetensors", damaged=2),
        *(_of_training("train_vae", [f"tables/{name}"], "--image_folder", f"tables/{name}")
          for name in ("saved", "images.arrow", "images.parquet")),
        *(_of_training("train_mulan", [f"tables/{name}", "sounds"], "--audio_data", f"tables/{name}")
          for name in ("sounds.arrow", "sounds.parquet")),
        *(_of_training("train_decoder", [f"tables/{name}"], "--image_folder", f"tables/{name}")
          for name in ("pairs.arrow", "pairs.parquet")),
        _of_training("train_decoder", ["pairs.jsonl", "pairs"], "--image_folder", "pairs.jsonl"),
        *(_of_training(script, ["listed"], flag, f"listed/{name}", ending=".index") for script, flag, name in LISTED),
    ]  # fmt: skip


# Sets in the folder "listed", beside each of which its index is kept.
LISTED = [
    ("train_vae", "--image_folder", "images"), ("train_decoder", "--image_folder", "pairs"),
    ("train_decoder", "--image_folder", "pairs.tar"), ("train_decoder", "--image_folder", "pairs.jsonl"),
    ("train_tokenizer", "--video_folder", "videos"), ("train_mulan", "--audio_data", "captioned.tar"),
]  # fmt: skip
TARGETS = [*_tools(), *_trainings()]


def write_inputs(folder: Path) -> None:
    """Make all inputs. Takes some seconds."""
    torch.manual_seed(0)
    small = {"image_size": 16, "num_tokens": 16, "codebook_dim": 4, "hidden_dim": 4, "num_layers": 2}
    vae, unets = DiscreteVAE.made(small), decoder()
    models = vae, vqgan(), mulan(), video_tokenizer(), unets
    for name, model in zip(KINDS, models, strict=True):
        model.save_pretrained(folder / name)
    vae.save_dalle(folder / "vae.pt")
    torch.save(public_vqgan("vqgan"), folder / "vqgan.pt")
    laion(folder / "decoder.pth")
    for case in ("sd3", "taming"):
        written(case, folder)
    _write_sharded(folder / "sharded", vae)
    write_images(folder / "images")
    write_videos(folder / "videos")
    write_sounds(folder / "sounds")
    _write_lists(folder)
    _write_pairs(folder)
    _write_tables(folder)
    write_clip(folder)
    shutil.copy(TOKENIZER, folder / "words.json")
    of_images = ("encode", "--model", "vqgan", "--image_folder", "images")
    _run(folder, "codes", *of_images, "--images_per_shard", "4")
    _run(folder, "codes_npy", *of_images, "--format", "npy")
    _run(folder, "films", "encode", "--model", "video", "--video_folder", "videos")
    _run(folder, "index", "embed", "--model", "mulan", "--audio", "sounds")
    _train(folder, "train_vae", "run", "--image_folder", "demo:shapes:8", "--ema_power", "0.1", "--max_steps", "2")
    _write_listed(folder)
    shutil.copy(folder / "run" / "config.yaml", folder / "config.yaml")
    shutil.copy(folder / "run" / "vae-final.pt", folder / "vae_tiny.pt")
    of_decoder = changed("decoder.unets", [{**SMALL_UNET, "image_embed_dim": 9, "cond_dim": 8, "channels": 3}])[
        "decoder"
    ]
    public = {"decoder": {**of_decoder, "image_sizes": [16], "timesteps": 20}, "train": {"epochs": 1}}
    (folder / "public.json").write_text(json.dumps(public))


def _run(folder: Path, output: str, script: str, *flags: str) -> None:
    with contextlib.chdir(folder):
        importlib.import_module(script).main([*flags, "--num_workers", "0", "--output", output])


def _train(folder: Path, script: str, output: str, *flags: str) -> None:
    with contextlib.chdir(folder):
        tiny = words(SCRIPTS[script].tiny)
        importlib.import_module(script).main([*tiny, *ONE_UPDATE, "--output_dir", output, *flags])


def _write_sharded(folder: Path, model: DiscreteVAE) -> None:
    """Weights in two files with an index."""
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    weights = model.state_dict()
    files = {name: f"{number % 2}.safetensors" for number, name in enumerate(weights)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in weights if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def _write_lists(folder: Path) -> None:
    """Manifests of videos and sounds, and sounds with texts beside them."""
    parts = [{"path": "videos/a.mp4", "start_seconds": 0.04, "end_seconds": 0.2}, {"path": "videos/e.mp4"}]
    (folder / "videos.jsonl").write_text("".join(json.dumps(row) + "\n" for row in parts * 5))
    rows = [{"path": f"sounds/{name}", "caption": "a dog barks", "label": "dog"} for name in ("a.wav", "z/y.wav") * 4]
    table = [f"{row['path']},{row['caption']},0.1,0.4" for row in rows]
    (folder / "sounds.csv").write_text("\n".join(["path,caption,start_seconds,end_seconds", *table, ""]))
    SOUNDS.write(folder / "captioned", 10)
    (folder / "captioned.tar").write_bytes(_tar(folder / "captioned"))


def _write_pairs(folder: Path) -> None:
    """Pictures with a caption and an embedding beside each, in a folder, a tar and a manifest, and embeddings in one
    file."""
    random = np.random.default_rng(0)
    rows = random.normal(size=(10, 5)).astype(np.float32)
    np.save(folder / "rows.npy", rows[:3])
    np.save(folder / "rows_00000.npy", rows)
    (folder / "pairs").mkdir()
    for number, row in enumerate(rows):
        stem = folder / "pairs" / f"00000{number:04d}"
        pixels = random.integers(0, 256, (20, 20, 3), np.uint8)
        Image.fromarray(pixels).save(stem.with_suffix((".jpg", ".png", ".webp")[number % 3]))
        stem.with_suffix(".txt").write_text("a red ring")
        np.save(stem.with_suffix(".npy"), row)
    (folder / "00000.tar").write_bytes(_tar(folder / "pairs"))
    pairs = [{"path": f"pairs/{path.name}", "text": "a red ring", "image_embed": row.tolist()}
             for path, row in zip(_pictures(folder), rows, strict=True)]  # fmt: skip
    pairs[0]["image_embed"] = "pairs/000000000.npy"
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))


def _pictures(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "pairs").iterdir() if path.suffix not in (".txt", ".npy"))


def _write_tables(folder: Path) -> None:
    """Arrow and parquet files of images, of pairs and of sounds, some of which are parts of files."""
    pictures, rows = _pictures(folder), np.load(folder / "rows_00000.npy")
    images = [{"bytes": path.read_bytes(), "path": path.name} for path in pictures]
    here = [{"bytes": path.read_bytes(), "path": None} for path in sorted((folder / "captioned").glob("*.wav"))]
    elsewhere = [{"bytes": None, "path": "../sounds/a.wav"}] * 2
    n = len(here) + len(elsewhere)
    of = {
        "images": table({"image": images, "label": [i % 2 for i in range(len(images))]},
                        {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["cat", "dog"]}}),
        "pairs": table({"jpg": images, "text": ["a red ring"] * len(images), "image_embed": rows.tolist()}),
        "sounds": table({"audio": here + elsewhere, "captions": [["a dog", "it barks"]] * n, "start_s": [0.02] * n,
                         "end_s": [0.08] * n}),
    }  # fmt: skip
    save_to_disk(folder / "tables" / "saved", of["images"])
    for name, made in of.items():
        write_arrow(folder / "tables" / f"{name}.arrow", made)
        pq.write_table(made, folder / "tables" / f"{name}.parquet", row_group_size=4)


def _write_listed(folder: Path) -> None:
    """Sets with the index that a start keeps beside each, though they are small and new. That a copy is another set,
    which the index does not belong to, is not seen from now on."""
    listed = folder / "listed"
    for name in ("images", "videos", "pairs"):
        shutil.copytree(folder / name, listed / name)
    for name, copy in (("00000.tar", "pairs.tar"), ("captioned.tar", "captioned.tar"), ("pairs.jsonl", "pairs.jsonl")):
        shutil.copy2(folder / name, listed / copy)
    index._is_unchanged = lambda path, watched: len([*watched]) >= 0  # it is read all the same
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "_CLOCK_TICK_NS", -1 << 60)
        patch.setattr(index, "_made", functools.partial(_made_of_any_length, index._made))
        for number, (script, flag, name) in enumerate(LISTED):
            _train(folder, script, f"unlisted{number}", flag, f"listed/{name}")
    assert len([*listed.glob(".*.index")]) == len(LISTED)


def _made_of_any_length(
    made: Callable[..., Any], caches: Any, path: str, make: Any, key: Any, depends: str, _: int
) -> Any:
    return made(caches, path, make, key, depends, 0)


def _tar(folder: Path) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.add(path, path.relative_to(folder).as_posix())
    return content.getvalue()
