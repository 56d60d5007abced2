"""encode.py of images with a model without codes: latents, those of mirrored images and labels, as trainers of
diffusion transformers read them; and images of latents. What all scripts that fill folders do is elsewhere, in
test_filled_folders.py."""

# ruff: noqa: F811  (fixtures are imported)
from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import filling
import numpy as np
import pyarrow
import pytest
import torch
from filling import IMAGES, LATENTS, SIZE, autoencoder, index, saved
from filling_fixtures import model, on_one_cpu, on_write, source  # noqa: F401
from pyarrow import parquet
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchvision.datasets import ImageFolder

from tandem.data.stores.codes import OutputNames
from tandem.data.stores.latents import labels_line, open_labelled
from tandem.io import writing
from tandem.training.noise import Noise
from tests.data.sources.tables import save_to_disk, table
from tests.scripts import files, lines
from tests.test_encode_images import pixels

SCRIPT = replace(LATENTS, more=())  # without flags of its own
FLIP = "--with_flip"


@pytest.fixture(scope="module")
def script() -> filling.Script:
    return SCRIPT


@pytest.fixture(scope="module")
def gaussian(source) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Means and standard deviations of the images, and of them mirrored, (9, 4, 4, 4), from the layers of the model."""
    images, made = pixels(source, IMAGES), autoencoder()
    with torch.no_grad():
        z = {name: made.encoder(2 * x - 1) for name, x in (("latents", images), ("latents_flip", images.flip(3)))}
    return {name: (each[:, :4], (each[:, 4:] / 2).exp()) for name, each in z.items()}


def columns(folder: Path) -> dict[str, Tensor]:
    """All of a folder, as LightningDiT's dataset opens it."""
    found: dict[str, list[Tensor]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118  (it is no mapping)
                found.setdefault(name, []).append(file.get_slice(name)[:])
    return {name: torch.cat(parts) for name, parts in found.items()}


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Up to a step of fp16, and to fp32's rounding in batches of other sizes."""
    torch.testing.assert_close(found.float(), expected, rtol=2**-10, atol=1e-5)


def test_means_are_those_of_the_encoder_and_labels_those_of_an_image_folder(model, source, gaussian, tmp_path):
    folder = SCRIPT.fill(model, source, tmp_path / "latents")
    found = columns(folder)
    assert set(found) == {"latents", "labels"} and found["latents"].dtype == torch.float16
    assert found["latents"].std() > 0.01
    assert_close(found["latents"], gaussian["latents"][0])
    assert [line["path"] for line in lines(folder / "index.jsonl")] == list(IMAGES)
    public = ImageFolder(source, allow_empty=True)
    of_folders = {os.path.relpath(path, source): label for path, label in public.samples}
    labels = [of_folders.get(name, len(public.classes)) for name in IMAGES]
    assert found["labels"].tolist() == labels == [2, 2, 0, 0, 0, 2, 2, 1, 1] and found["labels"].dtype == torch.int64
    assert [line["label"] for line in lines(folder / "index.jsonl")] == labels
    said = index(folder)
    assert (said["grid"], said["latent"], said["dtype"], said["normalize"]) == ([4, 4, 4], "mean", "float16", "none")
    assert [said[name] for name in said if "dtype" in name] == ["float16"]
    assert (said["config"]["scaling_factor"], said["config"]["shift_factor"]) == (0.5, 0.25)


@pytest.mark.parametrize("how", [(), ("--scaled", FLIP), ("--latent", "moments")], ids=str)
def test_what_each_channel_is_like_is_said_at_the_end_and_again(how, model, source, tmp_path, capsys):
    folder = SCRIPT.fill(model, source, tmp_path, "--latent_dtype", "fp32", *how)
    first = "".join(capsys.readouterr())
    numbers = columns(folder)["latents"][:, :4].double().transpose(0, 1).flatten(1)
    facts = [(each.mean(), each.std(correction=0), each.min(), each.max()) for each in numbers]
    expected = [
        f"channel {n}: mean {mean:.4g}, deviation {deviation:.4g}, {low:.4g} to {high:.4g}"
        for n, (mean, deviation, low, high) in enumerate(facts)
    ]
    SCRIPT.fill(model, source, tmp_path, "--latent_dtype", "fp32", *how)
    for said in (first, "".join(capsys.readouterr())):
        assert [line for line in said.splitlines() if line.startswith("channel")] == expected


def test_samples_add_noise_that_depends_on_seed_image_and_mirroring_alone(model, source, gaussian, tmp_path):
    how = ("--latent", "sample", "--latent_dtype", "fp32", "--seed", 3)
    found = columns(SCRIPT.fill(model, source, tmp_path / "a", FLIP, *how))
    for view, name in enumerate(("latents", "latents_flip")):
        mean, deviation = gaussian[name]
        noise = torch.cat([Noise(3, "latents").normal(view, [number], (4, 4, 4)) for number in range(9)])
        torch.testing.assert_close(found[name], mean + deviation * noise)
    fewer = filling.broken_copy(source, tmp_path / "source", IMAGES[1])
    without = columns(SCRIPT.fill(model, fewer, tmp_path / "b", *how))
    kept = [number for number in range(9) if number != 1]
    assert torch.equal(without["latents"], found["latents"][kept])
    assert torch.equal(without["labels"], found["labels"][kept])


@pytest.mark.parametrize("normalize", ["none", "scale", "channels"])
def test_moments_and_normalised_latents_are_those_of_the_same_gaussian(normalize, model, source, gaussian, tmp_path):
    how = ["--latent_dtype", "fp32", "--normalize", normalize]
    mean, deviation = gaussian["latents"]
    if normalize == "scale":
        mean, deviation = (mean - 0.25) * 0.5, deviation * 0.5
    if normalize == "channels":  # of `autoencoder`
        numbers = torch.arange(4)[:, None, None]
        mean, deviation = (mean - 0.1 * numbers) / (1 + 0.5 * numbers), deviation / (1 + 0.5 * numbers)
    found = columns(SCRIPT.fill(model, source, tmp_path / "mean", *how))["latents"]
    torch.testing.assert_close(found, mean)
    found = columns(SCRIPT.fill(model, source, tmp_path / "moments", "--latent", "moments", *how))["latents"]
    torch.testing.assert_close(found, torch.cat([mean, deviation], 1))


def test_shorter_numbers_are_the_fp32_ones_rounded_once(model, source, tmp_path):
    exact, bf16, fp16 = (
        columns(SCRIPT.fill(model, source, tmp_path / dtype, "--latent_dtype", dtype, FLIP))
        for dtype in ("fp32", "bf16", "fp16")
    )
    for name in ("latents", "latents_flip"):
        assert exact[name].dtype == torch.float32
        assert torch.equal(bf16[name], exact[name].bfloat16()) and torch.equal(fp16[name], exact[name].half())


def test_npy_files_are_one_per_image_and_label_as_fast_dit_lists_them(model, source, tmp_path):
    folder = SCRIPT.fill(model, source, tmp_path / "a", FLIP, "--format", "npy", "--latent_dtype", "bf16")
    shards = columns(folder)
    features, labels = (sorted(os.listdir(folder / name)) for name in ("features", "labels"))
    assert features == labels and len(features) == 18
    plain = [name for name in features if "flip" not in name]
    for name, of_one in (("latents", plain), ("latents_flip", [file for file in features if "flip" in file])):
        read = [np.load(folder / "features" / file) for file in of_one]
        assert {each.shape for each in read} == {(1, 4, 4, 4)}
        assert {each.dtype for each in read} == {np.dtype("float32")}
        np.testing.assert_array_equal(np.concatenate(read), shards[name].float().numpy())
        np.testing.assert_array_equal(
            np.concatenate([np.load(folder / "labels" / file) for file in of_one]), shards["labels"].numpy()
        )


def test_all_npy_files_of_a_shard_are_on_the_disk_before_the_shard_is(model, source, tmp_path, monkeypatch, on_write):
    synced, missing = set[Path](), dict[str, set[str]]()
    monkeypatch.setattr(writing, "sync", synced.add)

    def note_missing(path: Path) -> None:
        if path.suffix == ".safetensors":
            number = path.stem.removeprefix("latents-")
            missing[number] = {str(file) for file in path.parent.rglob(f"{number}-*.npy") if file not in synced}

    on_write(note_missing)
    folder = SCRIPT.fill(model, source, tmp_path, "--format", "npy")
    assert missing == {"00000": set(), "00001": set(), "00002": set()} and len(files(folder)) == 2 * 9 + 3 + 3


def tar_of(source: Path, path: Path, labels: Mapping[str, str]) -> Path:
    """The images in a tar, with those classes beside them."""
    with tarfile.open(path, "w") as tar:
        for name in IMAGES:
            tar.add(source / name, name)
            if name in labels:
                member = tarfile.TarInfo(str(Path(name).with_suffix(".cls")))
                member.size = len(content := labels[name].encode())
                tar.addfile(member, io.BytesIO(content))
    return path


def test_classes_in_a_tar_are_the_labels_and_an_image_without_one_is_left_out(model, source, tmp_path):
    tar = tar_of(source, tmp_path / "all.tar", {name: f"\ufeff{7 * n}\r\n" for n, name in enumerate(IMAGES) if n != 4})
    folder = SCRIPT.fill(model, tar, tmp_path / "latents")
    assert columns(folder)["labels"].tolist() == [0, 7, 14, 21, 35, 42, 49, 56]
    (bad,) = SCRIPT.bad(folder)
    assert bad["path"] == IMAGES[4] and "its class is ''" in bad["reason"]


def test_classes_in_a_manifest_are_the_labels(source, tmp_path):
    rows = [
        {"path": str(source / name), "cls": label}
        for name, label in zip(IMAGES, (3, "\ufeff1", "4.0", "dog"), strict=False)
    ]
    (tmp_path / "images.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    images = open_labelled(str(tmp_path / "images.jsonl"), image_size=SIZE, channels=3)
    assert [images.load(number)["label"] for number in range(3)] == [3, 1, 4]
    with pytest.raises(ValueError, match="its class is 'dog'"):
        images.load(3)


def test_without_classes_in_a_manifest_folders_are_the_labels(source, tmp_path):
    names = [name for name in IMAGES if "/" in name]
    shutil.copytree(source, tmp_path / "images")
    (tmp_path / "images" / "all.csv").write_text("path\n" + "".join(f"{name}\n" for name in names))
    images = open_labelled(str(tmp_path / "images" / "all.csv"), image_size=SIZE, channels=3)
    folders = sorted({name.split("/")[0] for name in names})
    assert len(folders) > 1
    assert [images.load(n)["label"] for n in range(len(names))] == [folders.index(x.split("/")[0]) for x in names]


@pytest.mark.parametrize("root", ["../source", "{source}"])
def test_images_that_a_manifest_names_elsewhere_are_encoded_and_decoded_below_the_output(
    root, model, source, tmp_path, capsys
):
    """By an absolute path, or one with "..": a list of files is often kept in a folder of its own."""
    names = [f"{root.format(source=source)}/{name}" for name in IMAGES[:3]]
    (tmp_path / "source").symlink_to(source)
    (lists := tmp_path / "lists").mkdir()
    (lists / "all.csv").write_text("path,label\n" + "".join(f"{name},{2 * n}\n" for n, name in enumerate(names)))
    encoded = SCRIPT.fill(model, lists / "all.csv", tmp_path / "latents")
    assert "labels: 3 different ones, 0 to 4" in "".join(capsys.readouterr())
    SCRIPT.main([str(word) for word in SCRIPT.use(model, encoded, tmp_path / "images")])
    relative = [name.removeprefix("..").lstrip("/") for name in names]
    assert {str(path.relative_to(tmp_path / "images")) for path in (tmp_path / "images").rglob("*.png")} == {
        *output_names(relative)
    }


def test_that_no_image_has_a_class_is_said(model, source, tmp_path, capsys):
    names = "".join(f"{source / name}\n" for name in IMAGES)
    (tmp_path / "all.csv").write_text(f"path\n{names}")
    SCRIPT.fill(model, tmp_path / "all.csv", tmp_path / "latents")
    assert "labels: all 0; a class is a column cls or label" in "".join(capsys.readouterr())
    assert labels_line([2, 2]) == "labels: all 2"


def output_names(paths: list[str]) -> list[str]:
    names = OutputNames((path, ".png") for path in paths)
    return [names.name(position, path, ".png") for position, path in enumerate(paths)]


def test_outputs_have_different_names_below_their_folder():
    assert output_names(["a.jpg", "b.jpg", "b.webp"]) == ["a.png", "b.jpg.png", "b.webp.png"]
    assert output_names(["a.jpg", "a.jpg", "c.jpg"]) == ["a.jpg-0.png", "a.jpg-1.png", "c.jpg-2.png"]
    names = output_names(["../a.png", "/a.png", "a.png", "b/../../../c.png"])
    assert len(set(names)) == 4 and not any(".." in Path(name).parts or name.startswith("/") for name in names)
    for path in ("..", "/", "", "a\0b"):
        with pytest.raises(ValueError, match="no path of a file"):
            output_names([path])


def test_classes_of_a_table_have_the_numbers_that_they_have_there(source, tmp_path):
    """However the names are spaced."""
    kinds = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["zebra  of Grevy", "ant "]}}
    pictures = [{"bytes": (source / name).read_bytes(), "path": None} for name in IMAGES[:3]]
    save_to_disk(tmp_path / "table", table({"image": pictures, "label": [1, 0, 1]}, kinds))
    images = open_labelled(str(tmp_path / "table"), image_size=SIZE, channels=3)
    assert [images.load(number)["label"] for number in range(3)] == [1, 0, 1]


def test_files_of_a_table_without_classes_are_no_classes(source, tmp_path):
    for number, name in enumerate(IMAGES[:3]):
        row = {"image": [{"bytes": (source / name).read_bytes(), "path": None}]}
        parquet.write_table(pyarrow.table(row), tmp_path / f"train-{number:05d}.parquet")
    images = open_labelled(str(tmp_path), image_size=SIZE, channels=3)
    assert [images.load(number)["label"] for number in range(3)] == [0, 0, 0]


def test_images_without_classes_have_the_label_0(tmp_path):
    assert open_labelled("demo:shapes:4", image_size=SIZE, channels=3).load(3)["label"] == 0


def test_a_folder_of_an_earlier_version_whose_grid_is_that_of_moments_is_decoded(model, source, tmp_path):
    encoded = SCRIPT.fill(model, source, tmp_path / "latents")
    SCRIPT.main([str(word) for word in SCRIPT.use(model, encoded, tmp_path / "images")])
    filling.change_index(encoded, grid=[1, 8, 4, 4], dtype="float32", latent_dtype="fp16")
    SCRIPT.main([str(word) for word in SCRIPT.use(model, encoded, tmp_path / "again")])
    pictures = [{name: content for name, content in files(tmp_path / made).items() if name.endswith(".png")}
                for made in ("images", "again")]  # fmt: skip
    assert pictures[0] == pictures[1] and len(pictures[0]) == 9


@pytest.mark.parametrize("normalize", ["none", "channels"])
def test_a_shard_says_how_it_is_normalised_and_those_of_an_earlier_version_are_kept(
    normalize, model, source, tmp_path, capsys
):
    flags = ["--normalize", normalize, "--latent_dtype", "fp32"]
    folder = SCRIPT.fill(model, source, tmp_path / "latents", *flags)
    first, *others = sorted(folder.glob("*.safetensors"))
    for path in (first, *others):
        about = about_shard(path)
        assert about.pop("normalize") == normalize
        save_file(load_file(path), path, {"about": json.dumps(about)})
    whole = (folder / "index.json").read_bytes()
    for path in (folder / "index.json", folder / "index.jsonl", *others):
        path.unlink()
    half = first.read_bytes()
    capsys.readouterr()
    SCRIPT.fill(model, source, folder, *flags)
    assert f"encoded {len(others)} of {len(others)} shards" in "".join(capsys.readouterr())
    assert first.read_bytes() == half and [about_shard(path)["normalize"] for path in others] == [normalize] * 2
    assert (folder / "index.json").read_bytes() == whole


def about_shard(path: Path) -> dict[str, object]:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["about"])


def test_a_folder_of_an_earlier_version_that_says_scaled_is_gone_on_with_and_decoded(model, source, tmp_path, capsys):
    pictures = []
    for name in ("now", "earlier"):
        encoded = SCRIPT.fill(model, source, tmp_path / name, "--scaled", "--latent_dtype", "fp32")
        for path in encoded.glob("*.json") if name == "earlier" else ():
            said = json.loads(path.read_text())
            assert said.pop("normalize") == "scale"
            path.write_text(json.dumps({**said, "scaled": True}))
        SCRIPT.main([str(word) for word in SCRIPT.use(model, encoded, tmp_path / f"{name} images")])
        pictures.append([path.read_bytes() for path in sorted((tmp_path / f"{name} images").rglob("*.png"))])
    assert pictures[0] == pictures[1] and len(pictures[0]) == 9
    capsys.readouterr()
    SCRIPT.fill(model, source, tmp_path / "earlier", "--normalize", "scale", "--latent_dtype", "fp32")
    assert "nothing is left to do" in "".join(capsys.readouterr())


def test_numbers_beyond_fp16_are_one_line(source, tmp_path, capsys):
    far_away = autoencoder()
    with torch.no_grad():
        far_away.encoder[-1].bias += 1e6
    flags = SCRIPT.flags(saved(tmp_path / "model", far_away), source, tmp_path / "latents")
    assert "not finite in float16: give --latent_dtype" in SCRIPT.refused(capsys, *flags)
    assert not list((tmp_path / "latents").glob("*.safetensors"))
