"""encode.py of images: the codes are the model's and the images are the codes'. What all scripts that fill
folders do is in test_filled_folders.py."""

# ruff: noqa: F811  (fixtures are imported)
from __future__ import annotations

import os
import re
import tarfile
import tracemalloc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import filling
import numpy as np
import pytest
import torch
from filling import IMAGES, SIZE, TOKENIZE, autoencoder, index, saved, vqgan
from filling_fixtures import model, on_one_cpu, source  # noqa: F401
from filling_fixtures import whole as codes  # noqa: F401
from PIL import Image
from safetensors.numpy import load_file
from torch import Tensor

import encode
from tandem.coders import images as coders_of_images
from tandem.config.models.autoencoders import DiscreteVAEConfig
from tandem.data.feed import to_unit_range
from tandem.data.sets import open_images
from tandem.data.stores.codes import StoredCodes, code_dtype
from tandem.data.stores.output import names_sha256
from tandem.data.stores.writer import EncodedShard
from tandem.io.reading import read_bytes, read_json
from tandem.models import DiscreteVAE
from tandem.training.metrics.averages import code_statistics
from tests.processes import python
from tests.scripts import VQGAN, files, lines, refusal


@pytest.fixture(scope="module")
def script() -> filling.Script:
    return TOKENIZE


def vae(seed: int = 0) -> DiscreteVAE:
    torch.manual_seed(seed)
    return DiscreteVAE(DiscreteVAEConfig(SIZE, num_tokens=32, codebook_dim=8, hidden_dim=8, num_layers=2)).eval()


def decoding(model: Path, codes: Path, output: Path, *more: str) -> list[str]:
    return [*map(str, TOKENIZE.use(model, codes, output)), "--batch_size", "3", *more]


def decode(model: Path, codes: Path, output: Path) -> Path:
    encode.main(decoding(model, codes, output))
    return output


def pixels(source: Path, names: Sequence[str], channels: int = 3) -> Tensor:
    images = open_images(str(source), image_size=SIZE, channels=channels)
    by_path = {os.path.relpath(images.describe(i), source): images.load(i)["images"] for i in range(len(images))}
    return to_unit_range(torch.stack([by_path[name] for name in names]))


# Encoding.


def test_codes_are_those_of_a_vqgan(codes, source):
    found = TOKENIZE.rows(codes)
    assert list(found) == list(IMAGES)
    expected = vqgan().encode(pixels(source, IMAGES)).numpy()
    assert len(np.unique(expected)) > 10
    np.testing.assert_array_equal(np.stack(list(found.values())), expected)
    assert {rows.dtype for rows in found.values()} == {np.dtype(np.uint16)}
    assert (index(codes)["coded_images"], index(codes)["images"], index(codes)["num_codes"]) == (9, 9, 512)


def test_the_line_of_an_image_has_its_class_as_for_latents(codes, model, source, tmp_path, capsys):
    by_path = {line["path"]: line["label"] for line in lines(codes / "index.jsonl")}
    assert [by_path[name] for name in IMAGES] == [2, 2, 0, 0, 0, 2, 2, 1, 1], "folders, as test_encode_latents has them"
    classes = ["7", "3", "dog", "0"]
    (tmp_path / "some.csv").write_text(
        "path,cls\n" + "".join(f"{source / name},{each}\n" for name, each in zip(IMAGES, classes, strict=False))
    )
    folder = TOKENIZE.fill(model, tmp_path / "some.csv", tmp_path / "codes")
    assert [line.get("label") for line in lines(folder / "index.jsonl")] == [7, 3, None, 0], "no image is left out"
    said = "labels: 3 different ones, 0 to 7; some images have none, because their class is no number"
    assert said in "".join(capsys.readouterr())


def test_images_of_whose_file_only_the_first_is_read_are_marked_and_counted(model, tmp_path, capsys):
    for name in ("one", "several"):
        pages = [Image.new("RGB", (SIZE, SIZE), colour) for colour in ("red", "blue")]
        (tmp_path / "pages").mkdir(exist_ok=True)
        pages[0].save(tmp_path / "pages" / f"{name}.tiff", save_all=True, append_images=pages[1:] * (name == "several"))
    folder = TOKENIZE.fill(model, tmp_path / "pages", tmp_path / "codes")
    reason = "it holds several pictures, of which the first is read"
    assert [line.get("partial") for line in lines(folder / "index.jsonl")] == [None, reason]
    assert f"read only in part: 1 image, such as several.tiff: {reason}" in "".join(capsys.readouterr())


def test_codes_are_those_of_a_discrete_vae(source, tmp_path):
    vae().save_pretrained(tmp_path / "model")
    found = TOKENIZE.rows(TOKENIZE.fill(tmp_path / "model", source, tmp_path / "codes"))
    expected = vae().get_codebook_indices(pixels(source, IMAGES)).unflatten(1, (4, 4)).numpy()
    np.testing.assert_array_equal(np.stack([found[name] for name in IMAGES]), expected)
    assert found["a.png"].dtype == np.uint8


def test_a_decoder_that_was_trained_alone_decodes_the_codes_of_the_model_that_it_began_with(source, tmp_path, capsys):
    first, flags = tmp_path / "first", ["--max_steps", "1", "--image_size", str(SIZE)]
    VQGAN.train(first, *flags)
    codes = TOKENIZE.fill(first, source, tmp_path / "codes")
    alone = VQGAN.train(tmp_path / "alone", *flags, "--train", "decoder", "--init_from", str(first))
    again = VQGAN.train(tmp_path / "again", *flags, "--train", "decoder", "--init_from", str(alone))
    for run in (alone, again):
        assert len([*decode(run, codes, tmp_path / f"images of {run.name}").rglob("*.png")]) == len(IMAGES)
    other = VQGAN.train(tmp_path / "other", *flags, "--init_from", str(first))
    assert "give the model that made them" in refusal(encode.main, *decoding(other, codes, tmp_path / "refused"))


def test_npy_files_hold_the_same_codes(codes, model, source, tmp_path):
    other = TOKENIZE.fill(model, source, tmp_path, "--format", "npy")
    for path in codes.glob("*.safetensors"):
        np.testing.assert_array_equal(np.load(other / f"{path.stem}.npy"), load_file(path)["codes"])
    assert StoredCodes(other).open_shard(2)(0, 1, ()).shape == (1, 4, 4)


def test_images_in_tars_get_the_codes_of_their_folder(codes, model, source, tmp_path):
    """Members have the folder's relative paths, so that even the bytes are the same, apart from the source's name."""
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        for name in IMAGES:
            tar.add(source / name, name)
    from_tar = TOKENIZE.fill(model, tmp_path / "all.tar", tmp_path / "codes")
    assert files(from_tar) == files(codes)


def test_members_of_several_tars_that_share_a_name_have_the_names_of_their_tars_too(model, source, tmp_path, capsys):
    """Their labels are as before, and so are the names by which a folder of an earlier version is continued."""
    (tmp_path / "broken.png").write_bytes(b"no image")
    for name, cat in (("a", source / "a.png"), ("b", tmp_path / "broken.png")):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            tar.add(source / "b.jpg", "dogs/1.jpg")
            tar.add(cat, "cats/1.png")
    codes = TOKENIZE.fill(model, tmp_path / "*.tar", tmp_path / "codes")
    assert capsys.readouterr().out.count(f"cannot read {tmp_path}/b.tar/cats/1.png: ") == 1
    found = lines(codes / "index.jsonl")
    assert [line["path"] for line in found] == ["a.tar/dogs/1.jpg", "a.tar/cats/1.png", "b.tar/dogs/1.jpg"]
    assert [line["label"] for line in found] == [1, 0, 1]
    assert [bad["path"] for bad in TOKENIZE.bad(codes)] == ["b.tar/cats/1.png"]
    assert index(codes)["names_sha256"] == names_sha256(["dogs/1.jpg", "cats/1.png"] * 2)
    decode(model, codes, tmp_path / "images")
    assert len([*(tmp_path / "images").glob("?.tar/*/1.png")]) == 3


def print_peaks(model: str, folder: Path) -> None:
    """Encode and decode 1000 and 11,000 images, and print the two peaks of memory. The loader and the model are
    replaced by ones that take no time."""

    def encode_batches(load: Any, shards: Any, encode: Any, **options: Any) -> Any:
        codes = torch.zeros(500, 4, 4, dtype=torch.uint8)
        return (EncodedShard([codes[: len(items)]], [{"label": index % 7} for index in items], {}) for items in shards)

    coders_of_images.encode_batches = encode_batches
    coders_of_images.decode_images = lambda *values, **options: None
    for read in (read_bytes, read_json):
        read.__defaults__ = (1 << 20,)  # the longest file, for which memory is reserved
    peaks = {}
    for n in (11_000, 1000, 11_000):  # the first time, modules are imported and Python's tables grow
        tracemalloc.start()
        codes = TOKENIZE.fill(model, f"demo:shapes:{n}", folder / f"{n}", "--images_per_shard", 500)
        decode(model, codes, folder / f"images of {n}")
        peaks[n] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    print("peaks", peaks[1000], peaks[11_000])


def test_a_run_holds_less_than_a_line_of_the_index_for_each_image(model, tmp_path):
    """Each process reads the whole index. In a process of its own: threads of other tests use memory, too."""
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, 'tests/launch'); import test_encode_images;"
        f"test_encode_images.print_peaks({str(model)!r}, Path({str(tmp_path)!r}))"
    )
    result = python(program, PYTHONPATH="tests:.")
    small, large = map(int, re.findall(r"^peaks (\d+) (\d+)$", result.stdout, re.M)[0])
    assert (large - small) / 10_000 < 200, (small, large)
    assert lines(tmp_path / "11000" / "index.jsonl")[-1] == {
        "path": "demo:shapes[10999]", "shard": 21, "row": 499, "label": 10_999 % 7
    }  # fmt: skip


@pytest.mark.parametrize(("num_codes", "dtype"), [(256, "uint8"), (257, "uint16"), (65537, "int32")])
def test_the_dtype_is_the_smallest_that_holds_the_codebook(num_codes, dtype):
    assert code_dtype(num_codes) == dtype


def test_the_report_counts_the_codes_of_all_shards(codes, model, source, capsys):
    TOKENIZE.fill(model, source, codes, "--report")  # with nothing left to do
    counts = np.bincount(np.stack(list(TOKENIZE.rows(codes).values())).ravel(), minlength=512)
    usage = code_statistics(torch.from_numpy(counts))
    said = capsys.readouterr().out
    assert f"{usage['codes_used']} of 512 codes used, perplexity {usage['perplexity']:.4g}" in said
    assert "0 images in" not in said


# Decoding.


FP32 = ("--latent_dtype", "fp32")
DECODED = {
    "codes": (vqgan, ()), "codes, transparent": (partial(vqgan, channels=4), ()), "latents": (autoencoder, FP32),
    "scaled": (autoencoder, (*FP32, "--scaled")), "by channel": (autoencoder, (*FP32, "--normalize", "channels")),
    "moments": (autoencoder, (*FP32, "--latent", "moments", "--scaled", "--with_flip")),
}  # fmt: skip


@pytest.mark.parametrize("case", DECODED)
def test_decoded_images_are_the_reconstructions_to_8_bits(case, source, tmp_path):
    make, flags = DECODED[case]
    model = saved(tmp_path / "model", made := make())
    folder = decode(model, TOKENIZE.fill(model, source, tmp_path / "codes", *flags), tmp_path / "images")
    names = [str(Path(name).with_suffix(".png")) for name in IMAGES]
    assert sorted(files(folder)) == sorted([*names, "settings.json"])
    with torch.no_grad():
        expected = made.decode(made.encode(pixels(source, IMAGES, made.channels)))
    exact = expected.clamp(0, 1).permute(0, 2, 3, 1).numpy() * 255
    found = np.stack([np.asarray(Image.open(folder / name)) for name in names])
    assert found.shape == (9, SIZE, SIZE, made.channels) and len(np.unique(found)) > 20
    # Half a level of rounding; the rest is fp32, as batches of 9 and of 3, and scaling, change the last bits.
    assert np.abs(found - exact).max() <= 0.5 + 1e-3


def test_images_of_five_channels_that_are_not_square_are_decoded_to_arrays(tmp_path):
    (tmp_path / "arrays").mkdir()
    for number in range(5):
        noise = np.random.default_rng(number).integers(0, 1 << 16, (5, 20, 40))
        np.save(tmp_path / "arrays" / f"{number}.npy", noise.astype(np.uint16))
    model, flags = saved(tmp_path / "model", made := vqgan(channels=5)), ("--image_size", "16x32")
    for _ in range(2):  # the second command goes on with the files of the first
        codes = TOKENIZE.fill(model, tmp_path / "arrays", tmp_path / "codes", *flags)
    folder = decode(model, codes, tmp_path / "images")
    images = open_images(str(tmp_path / "arrays"), image_size=(16, 32), channels=5)
    originals = torch.stack([images.load(index)["images"] for index in range(5)])
    with torch.no_grad():
        expected = made.decode(made.encode(originals)).clamp(0, 1)
    found = np.stack([np.load(folder / f"{number}.npy") for number in range(5)])
    assert found.shape == (5, 5, 16, 32)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)  # batches of another size round differently
