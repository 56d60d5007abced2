"""Small valid inputs of every tool, which the fuzzer makes itself, and the commands that read them."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import shutil
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import yaml
from filling import autoencoder, mulan, video_tokenizer, vqgan, write_images, write_sounds, write_videos
from safetensors.torch import save_file

from tandem.data.sources import index
from tandem.models import DiscreteVAE
from tandem.weights.formats.dalle import save_dalle
from tests.data.conditions import write_rows, write_tars
from tests.data.decoding import test_colours as odd
from tests.data.decoding.films import write_video
from tests.data.decoding.test_sounds import without_length
from tests.data.decoding.test_sounds import written as written_sound
from tests.data.decoding.test_videos import with_matrix
from tests.data.source_table import FILES, KINDS, encoded
from tests.models.reference.autoencoders import written
from tests.models.reference.tokenizers import state_of as public_vqgan
from tests.models.test_clip import write_clip
from tests.models.test_decoder import decoder
from tests.scripts import RUN, SCRIPTS, TOKENIZER, words
from tests.test_public_configs import EXAMPLE, SMALL_UNET, TAMING
from tests.weights.test_dalle2 import laion

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("vae", "vqgan", "mulan", "video", "decoder")
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
        for path in (*MODELS, "vae.pt", "vqgan.pt", "decoder.pth", "run", "sharded", "sd3", "taming.ckpt")
        for command in (["inspect", path], ["export", path, "--to", "model", "out"])
    ]  # fmt: skip
    few = ["--num_workers", "0"]
    images, videos = ["--image_folder", "images", *few], ["--video_folder", "videos", *few]
    return [
        *found,
        Target("convert", ["config", "public.json", "out"], ["public.json"]),
        Target("convert", ["config", "taming.yaml", "out"], ["taming.yaml"]),
        Target("convert", ["average", "run", "out", "--ema_length", "0.1"], ["run"]),
        Target("report", ["run", "--output", "out"], ["run"]),
        Target("convert", ["export", "decoder.pth", "--to", "dalle2", "out.pth"], ["decoder.pth"]),
        Target("encode", ["--model", "vqgan", *images, "--output", "out"], ["images", "vqgan"], 2),
        Target("encode", ["--model", "vae", *images, "--output", "out"], ["vae", "images"]),
        *(Target("encode", ["--model", "vqgan", "--decode", codes, *few, "--output", "out"], [codes, "vqgan"])
          for codes in ("codes", "codes_npy")),
        Target("encode", ["--model", "vqgan", *images, "--images_per_shard", "4", "--output", "codes"],
               ["codes", "vqgan", "images"]),
        Target("encode", ["--model", "autoencoder", *images, "--output", "out"], ["autoencoder", "images"]),
        Target("encode", ["--model", "autoencoder", "--decode", "latents", *few, "--output", "out"],
               ["latents", "autoencoder"]),
        Target("encode", ["--model", "video", *videos, "--output", "out"], ["videos", "video"], 2),
        Target("encode", ["--model", "video", "--video_folder", "videos-manifest/set.jsonl", *few, "--output", "out"],
               ["videos-manifest", "video"], 2),
        *(Target("encode", ["--model", "video", "--decode", films, *few, "--output", "out"], [films, "video"])
          for films in ("films", "shaped_films")),
        Target("encode", ["--model", "video", *videos, "--keep_aspect", "--output", "shaped_films"],
               ["shaped_films", "video", "videos"]),
        Target("embed", ["--model", "mulan", "--audio", "sounds", *few, "--output", "out"], ["sounds", "mulan"], 2),
        Target("encode", ["--model", "vae", "--image_folder", "odd_images", *few, "--output", "out"],
               ["odd_images", "vae"]),
        Target("encode", ["--model", "video", "--video_folder", "odd_videos", *few, "--output", "out"],
               ["odd_videos", "video"]),
        Target("embed", ["--model", "mulan", "--audio", "odd_sounds", *few, "--output", "out"],
               ["odd_sounds", "mulan"]),
        Target("embed", ["--model", "mulan", "--index", "index", "--query", "a dog"], ["index", "mulan"]),
        Target("embed", ["--model", "mulan", "--index", "index", "--query_file", "queries.txt"],
               ["queries.txt", "index", "mulan"]),
        *(Target("embed", ["--model", "mulan", "--audio", f"coded/{path}", *few, "--output", "out"], ["coded", "mulan"],
                 ending=ending) for path, ending in (("", ""), ("list.tsv", ".tsv"))),
        Target("sample", ["--model", "decoder", "--image_embeddings", "rows.npy", "--sample_timesteps", "1", *few,
                          "--batch_size", "2", "--output", "out"], ["rows.npy", "decoder"], 2),
        Target("sample", ["--model", "decoder", "--start_at_unet", "2", "--images", "images", "--sample_timesteps", "1",
                          *few, "--output", "out"], ["images", "decoder"]),
    ]  # fmt: skip


def _trainings() -> list[Target]:
    return [
        *(_of_set(kind, place) for kind in KINDS for place in PLACES),
        *(_of_set(kind, place, "listed", ".index") for kind, place in LISTED),
        _of_training("train_vae", ["vae_tiny.pt"], "--image_folder", "demo:shapes:8", "--init_from", "vae_tiny.pt"),
        _of_training("train_vae", ["config.yaml"], "--config", "config.yaml"),
        Target("train_vae", ["--config", "run/config.yaml", "--output_dir", "run", "--max_steps", "3"], ["run"]),
        _of_training("train_mulan", ["words.json"], "--audio_data", "demo:tones:8", "--tokenizer", "words.json"),
        _of_training("train_decoder", ["rows", "tars"], "--image_folder", "tars", "--image_embeddings", "rows",
                     damaged=2),
        _of_training("train_decoder", ["tiny.json", "tiny.safetensors"], "--image_folder", "demo:shapes:8", "--clip",
                     "tiny.json", "--clip_weights", "tiny.safetensors", damaged=2),
    ]  # fmt: skip


PLACES = {"folder": "", "tars": "", "arrow": "", "parquet": "", "csv": "set.csv", "manifest": "set.jsonl"}
# Sets in the folder "listed", beside each of which its index is kept.
LISTED = [("images", "folder"), ("conditioned", "folder"), ("conditioned", "tars"), ("conditioned", "manifest"),
          ("videos", "folder"), ("sounds", "tars")]  # fmt: skip


def path_of(kind: str, place: str) -> str:
    return f"{kind}-{place}/{PLACES[place]}".rstrip("/")


def _of_set(kind: str, place: str, below: str = ".", ending: str = "") -> Target:
    """Training on a set; of one with a list, the list is damaged."""
    script, path = KINDS[kind].script, Path(below, path_of(kind, place))
    return _of_training(script.name, [below if below != "." else f"{kind}-{place}"], f"--{script.data.flag}", str(path),
                        ending=ending or path.suffix)  # fmt: skip


TARGETS = [*_tools(), *_trainings()]


def write_inputs(folder: Path) -> None:
    """Make all inputs. Takes some seconds."""
    torch.manual_seed(0)
    small = {"image_size": 16, "num_tokens": 16, "codebook_dim": 4, "hidden_dim": 4, "num_layers": 2}
    vae, unets = DiscreteVAE.from_dict(small), decoder()
    models = vae, vqgan(), mulan(), video_tokenizer(), unets
    for name, model in zip(MODELS, models, strict=True):
        model.save_pretrained(folder / name)
    autoencoder().save_pretrained(folder / "autoencoder")
    save_dalle(vae, folder / "vae.pt")
    torch.save(public_vqgan("vqgan"), folder / "vqgan.pt")
    laion(folder / "decoder.pth")
    for case in ("sd3", "taming"):
        written(case, folder)
    _write_sharded(folder / "sharded", vae)
    write_images(folder / "images")
    write_videos(folder / "videos")
    write_sounds(folder / "sounds")
    _write_coded(folder / "coded")
    (folder / "queries.txt").write_text("\ufeffa dog\ntwo \u2028 cats\n")
    _write_odd(folder)
    _write_sets(folder)
    write_clip(folder)
    shutil.copy(TOKENIZER, folder / "words.json")
    of_images = ("encode", "--model", "vqgan", "--image_folder", "images")
    _run(folder, "codes", *of_images, "--images_per_shard", "4")
    _run(folder, "codes_npy", *of_images, "--format", "npy")
    _run(folder, "latents", "encode", "--model", "autoencoder", "--image_folder", "images", "--with_flip", "--scaled")
    _run(folder, "films", "encode", "--model", "video", "--video_folder", "videos")
    _run(folder, "shaped_films", "encode", "--model", "video", "--video_folder", "videos", "--keep_aspect")
    _run(folder, "index", "embed", "--model", "mulan", "--audio", "sounds")
    _train(folder, "train_vae", "run", "--image_folder", "demo:shapes:8", "--ema_power", "0.1", "--max_steps", "2")
    _write_listed(folder)
    shutil.copy(folder / "run" / "config.yaml", folder / "config.yaml")
    shutil.copy(folder / "run" / "vae-final.pt", folder / "vae_tiny.pt")
    unets = [{**SMALL_UNET, "image_embed_dim": 9, "cond_dim": 8, "channels": 3}]
    of_decoder = {**EXAMPLE["decoder"], "unets": unets, "image_sizes": [16], "timesteps": 20}
    public = {"decoder": of_decoder, "train": {"epochs": 1}}
    (folder / "taming.yaml").write_text(yaml.safe_dump(TAMING))
    (folder / "public.json").write_text(json.dumps(public))


def _write_odd(folder: Path) -> None:
    """Images whose tags and profiles say what their samples mean; films that are mirrored, or were not closed; sounds
    that were written into a pipe."""
    for name in ("images", "videos", "sounds"):
        (folder / f"odd_{name}").mkdir()
    inks, colours = odd.coloured("CMYK", (255, 0, 0, 0), (0, 0, 0, 0)), odd.coloured()
    images = {
        "p3.jpg": encoded(colours, "jpg", icc_profile=odd.DISPLAY_P3),
        "p3.png": encoded(colours, "png", icc_profile=odd.DISPLAY_P3),
        "inks.jpg": encoded(inks, "jpg", icc_profile=odd.inks()),
        "empty_alpha.bmp": odd.bmp(odd.MASKS, odd.HIDDEN * 0),
        "comment.png": odd.png(8, 2, odd.ROWS, odd.COMMENTS["compressed"], odd.COMMENTS["international"]),
        **{f"grey{number}.tif": content for number, content in enumerate(odd.GREY.values())},
        **{f"transparent{number}.png": content for number, content in enumerate(odd.TRANSPARENT_RIGHT.values())},
    }
    for name, content in images.items():
        (folder / "odd_images" / name).write_bytes(content)
    film = write_video(folder / "odd_videos" / "mirrored.mp4", 8, audio=True)
    film.write_bytes(with_matrix(film.read_bytes(), -1, 0, 0, 1))
    opening = {"options": {"movflags": "frag_keyframe+empty_moov"}}
    open_ended = write_video(folder / "odd_videos" / "open.mp4", 8, opening=opening)
    open_ended.write_bytes(open_ended.read_bytes()[:-200])
    for number in range(3):
        path = folder / "odd_sounds" / f"{number}.flac"
        written_sound(path, np.random.default_rng(number).uniform(-0.5, 0.5, 9000))
        path.write_bytes(without_length(path.read_bytes()))


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


def _write_coded(folder: Path) -> None:
    """Sounds in streams, captions beside them whose names are in another form, and a list that quotes nothing."""
    folder.mkdir()
    captions = {"a.ogg": '"stop" sign', "b.mp3": '"quiet', "\u00e9.opus": "a bell"}
    for name, caption in captions.items():
        kind = {".opus": ("OGG", "OPUS")}.get(Path(name).suffix, (Path(name).suffix[1:].upper(), None))
        noise = np.random.default_rng(0).uniform(-0.2, 0.2, 24000)
        soundfile.write(folder / name, noise, 48000, format=kind[0], subtype=kind[1])
        (folder / unicodedata.normalize("NFD", Path(name).stem + ".txt")).write_text(caption)
    rows = "".join(f"{name}\t{caption}\n" for name, caption in captions.items())
    (folder / "list.tsv").write_text(f"path\tcaption\n{rows}")


def _write_sets(folder: Path) -> None:
    """Ten samples of every kind in every place, sounds and videos of tables and lists as parts of files; embeddings in
    files of rows, beside tars."""
    parts = {"start_seconds": [0.02] * 10, "end_seconds": [0.08] * 10}
    for kind, place in itertools.product(KINDS, PLACES):
        has_parts = kind in ("sounds", "videos") and place not in ("folder", "tars")
        write: Any = FILES[place]
        records = {number: KINDS[kind].record(number) for number in range(10)}
        write(folder / f"{kind}-{place}", records, **(parts if has_parts else {}))
    write_tars(folder / "tars", shards=2, each=5, but={number: KINDS["images"].record(number) for number in range(10)})
    write_rows(folder / "rows", shards=2, each=5)
    np.save(folder / "rows.npy", np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32))


def _write_listed(folder: Path) -> None:
    """Sets with the index that a start keeps beside each, though they are small and new. That a copy is another set,
    which the index does not belong to, is not seen from now on."""
    listed = folder / "listed"
    for kind, place in LISTED:
        shutil.copytree(folder / f"{kind}-{place}", listed / f"{kind}-{place}")
    index._is_unchanged = lambda path, watched: len([*watched]) >= 0  # it is read all the same
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "_CLOCK_TICK_NS", -1 << 60)
        made = index._build_index
        patch.setattr(index, "_build_index", lambda *arguments: made(*arguments[:-1], 0))  # however short they are
        for number, (kind, place) in enumerate(LISTED):
            script = KINDS[kind].script
            _train(folder, script.name, f"unlisted{number}", f"--{script.data.flag}", f"listed/{path_of(kind, place)}")
    assert len([*listed.rglob(".*.index")]) >= len(LISTED)
