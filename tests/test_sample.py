"""sample.py, with decoders and a CLIP that have random weights."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import sample
from tandem.models.features.clip import Clip
from tests.launch.filling import saved
from tests.models.test_clip import DIM, TEXT_DIM, write_clip
from tests.models.test_decoder import decoder
from tests.scripts import files, refusal

CLIP = {"image_embed_dim": DIM, "image_embed_scale": 100.0}
FIRST: dict[str, dict[str, Any]] = {
    "image": {"image_embed_dim": 30},
    "text": {"image_embed_dim": None, "text_embed_dim": 32, "max_text_len": 12, "condition_on": ("text",)},
    "none": {"image_embed_dim": None, "condition_on": ()},
    "clip": CLIP,
    "both": {**CLIP, "text_embed_dim": TEXT_DIM, "condition_on": ("image", "text")},
}  # fmt: skip
RING = ["--prompts", "a red ring in the centre"]


def write_inputs(folder: Path) -> None:
    """A folder of models, guides, embeddings, pictures, and a tiny CLIP."""
    folder.mkdir()
    for name, first in FIRST.items():
        decoder(**first).save_pretrained(folder / name)
    decoder(1, **FIRST["image"]).save_pretrained(folder / "guide")
    decoder(image_sizes=[8], **FIRST["image"]).save_pretrained(folder / "short")
    saved(folder / "huge", decoder(**FIRST["image"]), image_sizes=[2**20, 2**21])
    random = np.random.default_rng(0)
    for name, shape in (("rows", (2, 30)), ("narrow", (2, 7)), ("texts", (2, 9, 32)), ("long", (2, 13, 32))):
        np.save(folder / f"{name}.npy", random.normal(size=shape).astype(np.float32))
    for name, size, value in (("small", 8, 90), ("large", 16, 200), ("photos", 16, 0), ("masks", 16, 0)):
        (folder / name).mkdir()
        for number in range(2):
            pixels = np.full((size, size, 3), value - 60 * number * (name == "large"), np.uint8)
            if name == "photos":
                pixels = random.integers(0, 256, (size, size, 3), np.uint8)
            if name == "masks":
                pixels[: size // 2] = 255
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    write_clip(folder)


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_inputs(folder := tmp_path_factory.mktemp("inputs") / "folder")
    return folder


@pytest.fixture(scope="module")
def clip(at: Path) -> list[str]:
    """Flags of a tiny CLIP."""
    return ["--clip", str(at / "tiny.json"), "--clip_weights", str(at / "tiny.safetensors")]


def asked(folder: Path, *flags: str | Path) -> list[str]:
    return [*map(str, flags), "--output", str(folder), "--sample_timesteps", "2", "--num_workers", "0"]


def drawn(folder: Path, *flags: str | Path) -> dict[str, bytes]:
    sample.main(asked(folder, *flags))
    return {name: content for name, content in files(folder).items() if name.endswith((".png", ".jsonl"))}


def labels(pictures: dict[str, bytes]) -> list[str]:
    return [json.loads(line)["for"] for line in pictures["index.jsonl"].decode().splitlines()]


def test_pictures_are_the_same_however_often_and_for_whom_they_are_drawn(at: Path, tmp_path: Path) -> None:
    flags = ["--model", at / "image", "--count", "3", "--batch_size", "2"]
    prompts = ["a red circle on the left", "a small blue star top right"]
    both = drawn(tmp_path / "both", *flags, "--prompts", *prompts)
    assert labels(both) == [prompt for prompt in prompts for _ in range(3)]
    assert len({both[f"0000{n}.png"] for n in range(6)}) == 6, "no two pictures are equal"
    first = drawn(tmp_path / "first", *flags, "--prompts", prompts[0])
    assert [first[name] == both[name] for name in ("00000.png", "00001.png", "00002.png")] == [True] * 3
    (tmp_path / "both" / "00003.png").unlink()
    (tmp_path / "both" / "00004.png").write_bytes(b"half")
    assert drawn(tmp_path / "both", *flags, "--prompts", *prompts) == both, "the same command completes the folder"


def test_prompts_of_a_file_are_its_lines_whatever_editors_and_web_pages_put_into_them(at: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffa red circle on\u2028the left\r\n\r\n\ufeffa blue star top right\r\n".encode())
    flags = ["--model", at / "image", "--prompt_file", file, "--prompts", "\ufeffa red ring in the centre"]
    said = labels(drawn(tmp_path / "drawn", *flags))
    assert said == ["a red ring in the centre", "a red circle on the left", "a blue star top right"]
    file.write_bytes("a red circle".encode("utf-16"))
    for path, words in ((file, "it is UTF-16 text; save it as UTF-8"), ("/proc/self/mem", "Input/output error")):
        flags[3] = path
        assert f"--prompt_file {path}: {words}" in refusal(sample.main, *asked(tmp_path / "none", *flags))


def test_conditions_that_are_not_finite_draw_no_black_pictures(at: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "nan.npy", np.full((1, 30), np.nan, np.float32))
    flags = ["--model", at / "image", "--image_embeddings", tmp_path / "nan.npy"]
    assert "makes values that are not finite" in refusal(sample.main, *asked(tmp_path / "none", *flags))
    assert not [*(tmp_path / "none").glob("*.png")]


def test_pictures_are_enlarged_and_filled_in(at: Path, tmp_path: Path) -> None:
    model = ["--model", at / "image"]
    enlarged = drawn(tmp_path / "enlarged", *model, "--start_at_unet", "2", "--images", at / "small")
    assert len(enlarged) == 3 and Image.open(tmp_path / "enlarged" / "00000.png").size == (16, 16)
    rows = ["--image_embeddings", at / "rows.npy"]
    drawn(tmp_path / "filled", *model, *rows, "--images", at / "large", "--masks", at / "masks")
    pixels = np.asarray(Image.open(tmp_path / "filled" / "00001.png")).astype(int)
    assert np.abs(pixels[:8] - 140).max() <= 1 and np.abs(pixels[8:] - 140).mean() > 5


def test_a_mask_is_that_of_the_image_of_its_name_and_a_broken_image_is_named(at: Path, tmp_path: Path) -> None:
    """Names that have nothing in common are paired in their order."""
    flags = ["--model", at / "image", "--image_embeddings", at / "rows.npy", "--images"]
    for folder in ("masks", "others"):
        shutil.copytree(at / "masks", tmp_path / folder)
    for number, path in enumerate(sorted((tmp_path / "others").iterdir())):
        path.rename(path.with_name(f"mask{number}.png"))
    by_name, by_order = (
        drawn(tmp_path / f"of {masks}", *flags, at / "large", "--masks", tmp_path / masks)
        for masks in ("masks", "others")
    )
    assert by_name == by_order
    last = max((tmp_path / "masks").iterdir())
    last.rename(last.with_name("other.png"))
    said = refusal(sample.main, *asked(tmp_path / "refused", *flags, at / "large", "--masks", tmp_path / "masks"))
    assert f"{last.name} of --images has no mask of the same name" in said
    broken = shutil.copytree(at / "large", tmp_path / "broken")
    (broken / last.name).write_bytes(b"")
    said = refusal(sample.main, *asked(tmp_path / "refused", *flags, broken, "--masks", at / "masks"))
    assert f"cannot read {broken / last.name}: " in said


def test_clip_gives_embeddings_of_images_and_encodings_of_texts(at: Path, clip: list[str], tmp_path: Path) -> None:
    """Each picture is the one that is drawn for the same embeddings in a file."""
    network = Clip.from_file(clip[1], clip[3])
    pixels = [np.asarray(Image.open(at / "photos" / f"{n}.png")) for n in range(2)]
    np.save(at / "seen.npy", network.embed_images(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)).numpy())
    texts = ["a red ring", "two blue stars"]
    of_text, encodings = network.embed_text(network.tokenize(texts))
    np.save(at / "said.npy", of_text.numpy())
    np.save(at / "encoded.npy", encodings.numpy())
    images, seen, encoded = ["--images", at / "photos"], ["--image_embeddings", at / "seen.npy"], at / "encoded.npy"
    for model, by_clip, by_file in (
        ("clip", images, seen),
        ("clip", ["--prompts", *texts], ["--image_embeddings", at / "said.npy"]),  # there is no prior
        ("both", [*images, "--prompts", *texts], [*seen, "--text_embeddings", encoded]),
    ):
        common = ["--model", at / model, "--batch_size", "3"]
        found = drawn(tmp_path / f"{model}{len(by_clip)}", *common, *by_clip, *clip)
        same = drawn(tmp_path / f"{model}{len(by_clip)} of files", *common, *by_file)
        first, second = (_pixels(found, name) for name in ("00000.png", "00001.png"))
        assert np.abs(first - _pixels(same, "00000.png")).max() <= 1 and np.abs(first - second).max() > 3
        assert np.abs(second - _pixels(same, "00001.png")).max() <= 1  # kernels round by batch
        assert labels(found) == (texts if "--prompts" in by_clip else ["0.png", "1.png"])


def test_prompts_are_encoded_by_the_published_clip_that_the_model_was_trained_with(
    at: Path, clip: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pictures are those of the same CLIP of files, of which a model does not say where they are."""
    network = Clip.from_file(clip[1], clip[3])
    asked_for = list[tuple[str, str]]()

    def from_file(name: str, weights: str, *_: Any) -> Clip:
        asked_for.append((name, weights))
        return network

    said, sha = ["a red ring"], network.origin["sha256"]
    for name, weights in (("ViT-B-32", "laion2b_s34b_b79k"), ("tiny.json", "tiny.safetensors")):
        origin = {"name": name, "weights": weights, "sha256": sha}
        decoder(**CLIP, clip=origin).save_pretrained(tmp_path / name)
    by_hand = drawn(tmp_path / "by hand", "--model", tmp_path / "tiny.json", "--prompts", *said, *clip)
    monkeypatch.setattr(Clip, "from_file", from_file)
    found = drawn(tmp_path / "found", "--model", tmp_path / "ViT-B-32", "--prompts", *said)
    assert found == by_hand and asked_for == [("ViT-B-32", "laion2b_s34b_b79k")]
    rows = ["--image_embeddings", at / "wide.npy"]
    np.save(at / "wide.npy", np.ones((1, DIM), np.float32))
    drawn(tmp_path / "stored", "--model", tmp_path / "ViT-B-32", *rows)
    assert len(asked_for) == 1, "stored embeddings need no CLIP"


@pytest.mark.parametrize(
    "clip", ["ViT-B-32", {"name": "ViT-B-32"}, {"name": 1, "weights": "w", "sha256": "0"}], ids=str
)
def test_what_a_stranger_says_of_a_clip_is_checked(clip: Any, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", decoder(**FIRST["image"]), clip=clip)
    assert "name, sha256, weights of a CLIP" in refusal(sample.main, *asked(tmp_path / "out", "--model", folder, *RING))


def _pixels(pictures: dict[str, bytes], name: str) -> Any:
    return np.asarray(Image.open(io.BytesIO(pictures[name]))).astype(int)


def test_a_folder_is_not_continued_with_other_inputs(at: Path, tmp_path: Path) -> None:
    """Of each input another content under the same name."""
    rows, pictures, guide = tmp_path / "rows.npy", tmp_path / "images", tmp_path / "guide"
    pictures.mkdir()

    def write_pictures(version: int) -> None:
        for number in range(2):
            Image.fromarray(np.full((16, 16, 3), 200 * version, np.uint8)).save(pictures / f"{number}.png")

    inputs: dict[str, tuple[list[Any], Callable[[int], Any]]] = {
        "image_embeddings": ([], lambda version: np.save(rows, np.full((2, 30), version, np.float32))),
        "images": (["--images", pictures, "--masks", at / "masks"], write_pictures),
        "guide_with": (["--cond_scale", "2", "--guide_with", guide],
                       lambda version: decoder(version, **FIRST["image"]).save_pretrained(guide)),
    }  # fmt: skip
    for _, write in inputs.values():
        write(1)
    for name, (said, write) in inputs.items():
        flags = [tmp_path / f"of {name}", "--model", at / "image", "--image_embeddings", rows, *said]
        assert drawn(*flags) == drawn(*flags)
        write(0)
        assert f"{name}_sha256 was " in refusal(sample.main, *asked(*flags))
        write(1)
