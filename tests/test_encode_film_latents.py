"""encode.py of videos with a model without codes: latents that are those of the whole clips, however long, and videos
of latents. What all scripts that fill folders do is in test_filled_folders.py, of codes of videos in
test_encode_videos.py."""

# ruff: noqa: F811  (fixtures are imported)
from __future__ import annotations

import errno
import gc
import io
import os
import tempfile
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import filling
import numpy as np
import pytest
import torch
from filling import SIZE, VIDEOS, film_autoencoder, index
from filling_fixtures import model, on_one_cpu, source  # noqa: F401
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from tandem.data.decoding.videos import ClipDecoder
from tandem.data.stores import encoding, shards
from tandem.data.stores.shards import numbers_of, shard_bytes, streamed_shard
from tandem.models import VideoTokenizer
from tandem.models.layers.video.tiles import apply_in_tiles
from tandem.training.noise import Noise
from tests.scripts import files, lines
from tests.test_encode_videos import clip

SCRIPT = replace(filling.LATENT_SHAPES, write_inputs=filling.write_videos, more=("--latent_dtype", "fp32"))


@pytest.fixture(scope="module")
def script() -> filling.Script:
    return SCRIPT


@pytest.fixture(scope="module")
def gaussian(source) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Means and standard deviations (f', 4, 4, 4) of whole films, by the model's own method."""
    moments = {
        name: film_autoencoder().posterior(clip(source / name, n))[0].transpose(0, 1) for name, n in VIDEOS.items()
    }
    return {name: (each[:, :4], each[:, 4:]) for name, each in moments.items()}


def latents(folder: Path) -> dict[str, Tensor]:
    """The latents of each film (f', d, h', w'), read as the documentation of the store's module describes."""
    of_shards = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    assert all(set(of_shard) == {"latents"} for of_shard in of_shards)
    found = {}
    for line in lines(folder / "index.jsonl"):
        rows = of_shards[line["shard"]]["latents"][line["row"] :]
        if grid := line.get("grid"):
            rows = rows[: line["code_frames"] * grid[0] * grid[1]]
            rows = rows.reshape(line["code_frames"], *grid, -1).permute(0, 3, 1, 2)
        found[line["path"]] = rows[: line["code_frames"]]
    return found


def decode(model: Path, folder: Path, output: Path) -> dict[str, bytes]:
    SCRIPT.main([*map(str, SCRIPT.use(model, folder, output)), "--format", "png"])
    return {name: content for name, content in files(output).items() if name.endswith(".png")}


def test_means_are_those_of_the_whole_films_and_so_are_the_frames_that_are_decoded(model, source, gaussian, tmp_path):
    folder = SCRIPT.fill(model, source, tmp_path / "latents")
    found = latents(folder)
    assert list(found) == list(VIDEOS)
    for name, (mean, _) in gaussian.items():
        assert torch.equal(found[name], mean) and mean.std() > 0.1, name
    said = index(folder)
    assert (said["grid"], said["dtype"], said["latent"], said["num_codes"]) == ([4, 4, 4], "float32", "mean", 0)
    assert not any("label" in line for line in lines(folder / "index.jsonl"))
    pictures = decode(model, folder, tmp_path / "videos")
    assert len(pictures) == sum(VIDEOS.values())
    whole = film_autoencoder().decode(gaussian["e.mp4"][0].transpose(0, 1)[None])[0, :, : VIDEOS["e.mp4"]]
    for number, frame in enumerate((whole.clamp(0, 1) * 255).round().byte().permute(1, 2, 3, 0).numpy()):
        np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / f"videos/e.frames/{number:06d}.png")), frame)


def test_tiles_of_films_are_streams_of_their_own_and_mixed(model, source, tmp_path):
    tiles = ("--tile", 8, "--tile_overlap", 4)
    folder, ours = SCRIPT.fill(model, source, tmp_path / "latents", *tiles), film_autoencoder()
    found = latents(folder)
    for name, n in VIDEOS.items():
        how = {"states": {}, "side": 8, "overlap": 4, "scale": Fraction(1, 4)}
        expected = apply_in_tiles(ours.posterior_next, clip(source / name, n), **how)[0, :4]
        assert torch.equal(found[name], expected.transpose(0, 1)), name
    SCRIPT.main([*map(str, SCRIPT.use(model, folder, tmp_path / "videos")), "--format", "png", *map(str, tiles)])
    latent = found["e.mp4"].transpose(0, 1)[None]
    how = {"states": {}, "side": 2, "overlap": 1, "scale": Fraction(4)}
    frames = apply_in_tiles(ours.decode_next, latent, **how)[0, :, : VIDEOS["e.mp4"]]
    for number, frame in enumerate((frames.clamp(0, 1) * 255).round().byte().permute(1, 2, 3, 0).numpy()):
        np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / f"videos/e.frames/{number:06d}.png")), frame)


@pytest.mark.parametrize("shape", [(), ("--keep_aspect",)], ids=str)
def test_a_sample_is_a_function_of_seed_film_and_frame_however_the_film_is_cut(
    shape, model, source, gaussian, tmp_path, monkeypatch
):
    how = ("--latent", "sample", "--seed", 3, "--normalize", "channels", *shape)
    folder = SCRIPT.fill(model, source, tmp_path / "a", *how)
    assert index(folder)["grid"] == ([4] if shape else [4, 4, 4])
    numbers, found = torch.arange(4)[:, None, None], latents(folder)
    for film, (name, (mean, deviation)) in enumerate(gaussian.items()):
        noise = Noise(3, "latents of films").normal(film, range(len(mean)), (4, 4, 4))
        torch.testing.assert_close(found[name], (mean + deviation * noise - 0.1 * numbers) / (1 + 0.5 * numbers))
    monkeypatch.setattr(encoding, "PIECE_FRAMES", 3)
    assert files(SCRIPT.fill(model, source, tmp_path / "b", *how, "--num_workers", "3")) == files(folder)


@pytest.mark.parametrize("normalize", ["none", "scale", "channels"])
def test_moments_are_normalised_and_decoding_undoes_it(normalize, model, source, gaussian, tmp_path):
    how = ("--latent", "moments", "--normalize", normalize)
    found = latents(SCRIPT.fill(model, source, tmp_path / "moments", *how))
    numbers = torch.arange(4)[:, None, None]
    shift, scale = {"none": (0.0, 1.0), "scale": (0.25, 0.5), "channels": (0.1 * numbers, 1 / (1 + 0.5 * numbers))}[
        normalize
    ]
    for name, (mean, deviation) in gaussian.items():
        torch.testing.assert_close(found[name], torch.cat([(mean - shift) * scale, deviation * scale], 1))
    pictures = decode(model, tmp_path / "moments", tmp_path / "videos")
    expected = decode(model, SCRIPT.fill(model, source, tmp_path / "mean"), tmp_path / "others")
    assert pictures.keys() == expected.keys()
    for name, content in pictures.items():
        one, other = (np.asarray(Image.open(io.BytesIO(each))).astype(int) for each in (content, expected[name]))
        assert np.abs(one - other).max() <= 1, name  # a rounding of fp32 may change that to 8 bits


def test_what_each_channel_is_like_is_that_of_all_films_though_they_are_read_in_parts(
    model, source, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(shards, "_BLOCK_NUMBERS", 150)
    found = latents(SCRIPT.fill(model, source, tmp_path))
    numbers = torch.cat([*found.values()]).double().transpose(0, 1).flatten(1)
    facts = [(each.mean(), each.std(correction=0), each.min(), each.max()) for each in numbers]
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("channel")] == [
        f"channel {n}: mean {mean:.4g}, deviation {deviation:.4g}, {low:.4g} to {high:.4g}"
        for n, (mean, deviation, low, high) in enumerate(facts)
    ]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("n", [0, 3])
def test_a_streamed_shard_has_the_bytes_that_safetensors_writes(dtype, n):
    rows = torch.arange(n * 10).reshape(n, 2, 5).to(getattr(torch, dtype))
    about = {"notes": [{"path": f'a "b" \\ é {number}'} for number in range(n)], "bad": [[4, "no \udce9 film"]]}
    parts = [numbers_of(row) for row in rows]
    assert b"".join(streamed_shard("latents", rows[:0], lambda: parts, **about)) == shard_bytes(
        {"latents": rows}, **about
    )


def held() -> int:
    """Bytes of Python's objects and NumPy's arrays, and of tensors, that are alive."""
    gc.collect()
    tensors = {each.untyped_storage().data_ptr(): each.nbytes for each in gc.get_objects() if type(each) is Tensor}
    return tracemalloc.get_traced_memory()[0] + sum(tensors.values())


def test_what_is_held_at_the_end_of_a_film_does_not_grow_with_its_length(model, tmp_path, monkeypatch):
    """The model is replaced by one that takes no time. The latents of 2000 frames take a megabyte; the places of their
    pieces on the disk, and the names of files, are what may grow."""
    (tmp_path / "films").mkdir()
    filling.write_film(tmp_path / "films" / "a.mp4", 0, 3)
    n_frames, n_seen, at_end = 0, 0, dict[tuple[str, int], int]()

    def step(name: str, n: int, result: Tensor) -> Tensor:
        nonlocal n_seen
        n_seen += n
        if n_seen >= n_frames:
            at_end[name, n_frames] = held()
        return result

    def frames(self: Any, source: Any, multiple: Any) -> Any:
        yield from ((torch.zeros(3, SIZE, SIZE, dtype=torch.uint8), 25.0) for _ in range(n_frames))

    def posterior_next(self: Any, frames: Tensor, state: Any) -> Tensor:
        n = frames.shape[2]
        return step("encode", n, torch.ones(1, 8, (n_seen + n + 1) // 2 - (n_seen + 1) // 2, 4, 4))

    def decode_next(self: Any, codes: Tensor, state: Any) -> Tensor:
        n = 2 * codes.shape[2] - (n_seen == 0)
        return step("decode", n, torch.zeros(1, 3, n, SIZE, SIZE))

    monkeypatch.setattr(ClipDecoder, "frames", frames)
    monkeypatch.setattr(VideoTokenizer, "posterior_next", posterior_next)
    monkeypatch.setattr(VideoTokenizer, "decode_next", decode_next)
    monkeypatch.setattr(shards, "_BLOCK_NUMBERS", 1 << 12)
    tracemalloc.start()
    try:
        for n_frames in (201, 201, 2001):  # the first time, modules are imported
            n_seen = 0
            folder = SCRIPT.fill(model, tmp_path / "films", tmp_path / f"{n_frames}", "--latent", "moments", "--fresh")
            n_seen = 0
            SCRIPT.main([*map(str, SCRIPT.use(model, folder, tmp_path / f"{n_frames} films")), "--fresh"])
    finally:
        tracemalloc.stop()
    assert index(folder)["shards"][0]["rows"] == 1001
    for name in ("encode", "decode"):
        assert at_end[name, 2001] - at_end[name, 201] < 100_000, at_end


def test_a_disk_that_is_full_before_the_shard_is_written_is_one_line(model, source, tmp_path, monkeypatch, capsys):
    class Full(io.BytesIO):
        def write(self, content: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: Full())
    said = SCRIPT.refused(capsys, *SCRIPT.flags(model, source, tmp_path))
    assert f"latents-00000.safetensors: {os.strerror(errno.ENOSPC)}" in said
