"""tokenize_images.py from the command line to the files it leaves; tiny models, one process."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file
from torch import Tensor

import data
import tokenize_images
import training.files
from data.stores.codes import code_dtype, read_codes
from data.stores.pngs import png_names
from models import VQGAN, DiscreteVAE
from training.measures.averages import code_statistics

SIZE = 16
NAMES = ["a.png", "b.jpg", "cats/1.webp", "cats/2.png", "cats/old/3.jpeg", "d.bmp", "e.png", "z/f.png", "z/g.png"]
write_atomically = training.files.write_atomically


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the code under test catches it."""


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device whose numbers the tests know."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here survives a power cut anyway."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise, so that codes differ from place to place."""
    folder = tmp_path_factory.mktemp("photos")
    for seed, name in enumerate(NAMES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(seed).integers(0, 256, (20, 24, 3), np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return folder


def vqgan(seed: int = 0, **options: Any) -> VQGAN:
    torch.manual_seed(seed)
    return VQGAN(**{"image_size": SIZE, "dim": 4, "num_layers": 2, "codebook_size": 512, **options}).eval()


def vae(seed: int = 0) -> DiscreteVAE:
    torch.manual_seed(seed)
    return DiscreteVAE(image_size=SIZE, num_tokens=32, codebook_dim=8, hidden_dim=8, num_layers=2).eval()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    vqgan().save_pretrained(folder)
    return folder


def flags(model: Path, photos: Path, output: Path, *more: str) -> list[str]:
    said = ["--model", model, "--image_folder", photos, "--output", output]
    return [*map(str, said), "--images_per_shard", "4", "--batch_size", "3", "--num_workers", "0", *more]


def encode(model: Path, photos: Path, output: Path, *more: str) -> Path:
    tokenize_images.main(flags(model, photos, output, *more))
    return output


def decode(model: Path, codes: Path, output: Path, *more: str) -> Path:
    said = ["--model", model, "--decode", codes, "--output", output]
    tokenize_images.main([*map(str, said), "--batch_size", "3", *more])
    return output


def refused(capsys: pytest.CaptureFixture[str], run: Callable[..., Any], *arguments: Any) -> str:
    """The one line of an error, which ends the process with code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as raised:
        run(*arguments)
    assert raised.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tokenize_images.py: error: ")
    return line


def files(folder: Path) -> dict[str, bytes]:
    """All but the lock, which names the process."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def stamps(folder: Path, pattern: str) -> dict[str, tuple[int, int]]:
    """What tells a file from one that was written again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob(pattern)}


def index(folder: Path) -> Any:
    return json.loads((folder / "index.json").read_text())


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]


def all_codes(folder: Path) -> dict[str, np.ndarray]:
    """Codes by path, read as README.md says it."""
    shards = [load_file(path)["codes"] for path in sorted(folder.glob("*.safetensors"))]
    return {line["path"]: shards[line["shard"]][line["row"]] for line in lines(folder)}


def pixels(photos: Path, names: list[str], channels: int = 3) -> Tensor:
    images = data.open_images(str(photos), image_size=SIZE, channels=channels)
    by_path = {os.path.relpath(images.describe(i), photos): images.load(i) for i in range(len(images))}
    return data.to_unit_range(torch.stack([by_path[name] for name in names]))


def broken_copy(photos: Path, folder: Path, *names: str) -> Path:
    shutil.copytree(photos, folder)
    for name in names:
        (folder / name).write_bytes(b"no picture")
    return folder


# Encoding.


def test_codes_are_those_of_a_vqgan(model: Path, photos: Path, tmp_path: Path) -> None:
    found = all_codes(encode(model, photos, tmp_path / "codes"))
    assert list(found) == NAMES
    expected = vqgan().encode(pixels(photos, NAMES)).numpy()
    assert len(np.unique(expected)) > 10
    np.testing.assert_array_equal(np.stack(list(found.values())), expected)
    assert {codes.dtype for codes in found.values()} == {np.dtype(np.uint16)}


def test_codes_are_those_of_a_discrete_vae(photos: Path, tmp_path: Path) -> None:
    vae().save_pretrained(tmp_path / "model")
    found = all_codes(encode(tmp_path / "model", photos, tmp_path / "codes"))
    expected = vae().get_codebook_indices(pixels(photos, NAMES)).unflatten(1, (4, 4)).numpy()
    np.testing.assert_array_equal(np.stack([found[name] for name in NAMES]), expected)
    assert found["a.png"].dtype == np.uint8


def test_a_vqgan_encodes_another_image_size(model: Path, photos: Path, tmp_path: Path) -> None:
    found = all_codes(encode(model, photos, tmp_path / "codes", "--image_size", "20"))
    assert {codes.shape for codes in found.values()} == {(5, 5)}
    assert index(tmp_path / "codes")["grid"] == [5, 5]


def test_shards_and_index_say_the_same(model: Path, photos: Path, tmp_path: Path) -> None:
    folder = encode(model, photos, tmp_path / "codes")
    said = index(folder)
    assert [shard["rows"] for shard in said["shards"]] == [4, 4, 1]
    assert said["coded_images"] == said["images"] == 9 and said["bad"] == []
    assert [(line["shard"], line["row"]) for line in lines(folder)] == [(i // 4, i % 4) for i in range(9)]
    assert (said["num_codes"], said["batch_size"], said["cpu_threads"]) == (512, 3, 1)


def test_npy_files_hold_the_same_codes(model: Path, photos: Path, tmp_path: Path) -> None:
    one, other = encode(model, photos, tmp_path / "a"), encode(model, photos, tmp_path / "b", "--format", "npy")
    for path in one.glob("*.safetensors"):
        np.testing.assert_array_equal(np.load(other / f"{path.stem}.npy"), load_file(path)["codes"])
    assert read_codes(other).load(2).shape == (1, 4, 4)


def test_the_demonstration_is_encoded_without_a_folder(model: Path, tmp_path: Path) -> None:
    folder = encode(model, Path("demo:shapes:5"), tmp_path / "codes")
    assert [line["path"] for line in lines(folder)] == [f"demo:shapes[{i}]" for i in range(5)]
    assert len(files(decode(model, folder, tmp_path / "images"))) == 5 + 1


@pytest.mark.parametrize(
    ("num_codes", "dtype"),
    [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "int32"), (2**31, "int32")],
)
def test_the_dtype_is_the_smallest_that_holds_the_codebook(num_codes: int, dtype: str) -> None:
    assert code_dtype(num_codes) == dtype
    assert np.iinfo(dtype).max >= num_codes - 1


def test_loader_workers_change_nothing(model: Path, photos: Path, tmp_path: Path) -> None:
    one, other = encode(model, photos, tmp_path / "a"), encode(model, photos, tmp_path / "b", "--num_workers", "2")
    assert files(one) == files(other)


def test_every_forward_has_one_shape_and_one_image_per_place(
    model: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are chosen by shape: with another one the last bit of a latent, and with it a code, may differ."""
    seen: list[Tensor] = []
    encode_images = VQGAN.encode
    monkeypatch.setattr(VQGAN, "encode", lambda self, images: (seen.append(images), encode_images(self, images))[1])
    encode(model, broken_copy(photos, tmp_path / "photos", "b.jpg"), tmp_path / "codes")
    batches = [images for images in seen if len(images) > 1]  # the first, of one image, asks for the grid
    assert {tuple(images.shape) for images in batches} == {(3, 3, SIZE, SIZE)}
    assert len(batches) == 2 + 2 + 1
    expected = pixels(photos, NAMES)
    assert torch.equal(batches[0][[0, 2]], expected[[0, 2]]) and not batches[0][1].any()


def test_the_number_of_threads_is_as_said_and_1_by_default(
    model: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    for name, more in (("a", []), ("b", ["--cpu_threads", "3"])):
        encode(model, photos, tmp_path / name, *more)
    assert asked == [1, 3]
    assert [index(tmp_path / name)["cpu_threads"] for name in "ab"] == [1, 3]


def test_bf16_computes_in_bf16(model: Path, photos: Path, tmp_path: Path) -> None:
    found = all_codes(encode(model, photos, tmp_path / "codes", "--precision", "bf16"))
    exact = all_codes(encode(model, photos, tmp_path / "exact"))
    with torch.autocast("cpu", torch.bfloat16):
        expected = vqgan().encode(pixels(photos, NAMES)).numpy()
    np.testing.assert_array_equal(np.stack(list(found.values())), expected)
    assert any((found[name] != exact[name]).any() for name in NAMES)


def test_the_report_counts_the_codes_of_all_shards(
    model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encode(model, photos, tmp_path / "codes")
    encode(model, photos, tmp_path / "codes", "--report")  # with nothing left to do
    counts = np.bincount(np.stack(list(all_codes(tmp_path / "codes").values())).ravel(), minlength=512)
    usage = code_statistics(torch.from_numpy(counts))
    said = capsys.readouterr().out
    assert f"{usage['codes_used']} of 512 codes used, perplexity {usage['perplexity']:.4g}" in said


# Files that cannot be read.


def test_a_bad_file_is_left_out_and_named_and_changes_no_other_code(
    model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = encode(model, broken_copy(photos, tmp_path / "photos", "b.jpg"), tmp_path / "codes")
    assert capsys.readouterr().out.count("b.jpg") == 1
    found, whole = all_codes(folder), all_codes(encode(model, photos, tmp_path / "whole"))
    assert list(found) == [name for name in NAMES if name != "b.jpg"]
    for name, codes in found.items():
        np.testing.assert_array_equal(codes, whole[name])
    (bad,) = index(folder)["bad"]
    assert bad["path"] == "b.jpg" and "content" in bad["reason"]
    assert [shard["rows"] for shard in index(folder)["shards"]] == [3, 4, 1]


def test_a_shard_without_a_readable_image_is_empty(model: Path, photos: Path, tmp_path: Path) -> None:
    folder = encode(model, broken_copy(photos, tmp_path / "photos", NAMES[-1]), tmp_path / "codes")
    assert load_file(folder / "codes-00002.safetensors")["codes"].shape == (0, 4, 4)
    assert len(files(decode(model, folder, tmp_path / "images"))) == 8 + 1


def test_a_bad_file_with_a_name_that_is_no_text_is_reported(
    model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken_copy(photos, tmp_path / "photos")
    (tmp_path / "photos" / os.fsdecode(b"\xff.png")).write_bytes(b"")
    folder = encode(model, tmp_path / "photos", tmp_path / "codes")
    assert r"\udcff.png: the file is empty" in capsys.readouterr().out
    assert os.fsencode(index(folder)["bad"][0]["path"]) == b"\xff.png"


def test_on_bad_sample_error_stops(
    model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = broken_copy(photos, tmp_path / "photos", "e.png")
    assert "e.png" in refused(capsys, encode, model, broken, tmp_path / "codes", "--on_bad_sample", "error")
    assert "e.png" in refused(capsys, encode, model, broken, tmp_path / "codes", "--on_bad_sample", "error")
    encode(model, broken, tmp_path / "codes", "--on_bad_sample", "skip")  # goes on where that one stopped
    assert len(lines(tmp_path / "codes")) == 8


def test_too_many_bad_files_stop(model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = broken_copy(photos, tmp_path / "photos", "b.jpg", "e.png")
    assert "2 of 9 samples could not be read" in refused(capsys, encode, model, broken, tmp_path / "codes")
    assert not (tmp_path / "codes" / "index.json").exists()


# Going on.


def test_killed_at_any_write_and_started_again_gives_the_same_files(
    model: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = files(encode(model, photos, tmp_path / "whole"))
    n_writes = 1 + 2 * 3 + 2  # settings; three shards with their records; two index files
    for fatal in range(n_writes):
        folder, written = tmp_path / str(fatal), []

        def write_or_die(path: Path, content: bytes, fatal: int = fatal, written: list[Path] = written) -> None:
            if len(written) == fatal:
                path.with_name(f".{path.name}.tmp").write_bytes(content[: len(content) // 2])
                raise Killed
            written.append(path)
            write_atomically(path, content)

        monkeypatch.setattr(training.files, "write_atomically", write_or_die)
        with pytest.raises(Killed):
            encode(model, photos, folder)
        monkeypatch.setattr(training.files, "write_atomically", write_atomically)
        before = stamps(folder, "*.safetensors")
        finished = {path.with_suffix(".safetensors").name for path in folder.glob("codes-*.json")}
        assert len(finished) == min(3, max(0, fatal - 1) // 2)
        encode(model, photos, folder)
        after = stamps(folder, "*.safetensors")
        assert {name for name in before if before[name] == after[name]} == finished
        assert files(folder) == expected
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_finished_folder_is_not_computed_again(
    model: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = files(encode(model, photos, tmp_path / "codes"))
    before = stamps(tmp_path / "codes", "codes-*")
    monkeypatch.setattr(data.images.folder.ImageFolder, "load", None)
    encode(model, photos, tmp_path / "codes")
    assert stamps(tmp_path / "codes", "codes-*") == before and files(tmp_path / "codes") == expected


@pytest.mark.parametrize("damage", ["shard", "record", "missing shard"])
def test_a_damaged_shard_is_computed_again(damage: str, model: Path, photos: Path, tmp_path: Path) -> None:
    expected = files(encode(model, photos, tmp_path / "codes"))
    shard, record = tmp_path / "codes" / "codes-00001.safetensors", tmp_path / "codes" / "codes-00001.json"
    if damage == "shard":
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    elif damage == "record":
        record.write_text('{"rows": 4')
    else:
        shard.unlink()
    assert files(tmp_path / "codes") != expected
    encode(model, photos, tmp_path / "codes")
    assert files(tmp_path / "codes") == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_shard_under_way_and_exits_with_75(
    number: signal.Signals, model: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = files(encode(model, photos, tmp_path / "whole"))

    def write_and_signal(path: Path, content: bytes) -> None:
        if path.name == "codes-00000.safetensors":
            os.kill(os.getpid(), number)
        write_atomically(path, content)

    monkeypatch.setattr(training.files, "write_atomically", write_and_signal)
    with pytest.raises(SystemExit) as raised:
        encode(model, photos, tmp_path / "codes")
    assert raised.value.code == 75
    assert sorted(files(tmp_path / "codes")) == ["codes-00000.json", "codes-00000.safetensors", "settings.json"]
    assert files(encode(model, photos, tmp_path / "codes")) == expected


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--image_size", "20"], "image_size was 16 and is now 20"),
        (["--images_per_shard", "5"], "images_per_shard was 4 and is now 5"),
        (["--batch_size", "4"], "batch_size was 3 and is now 4"),
        (["--precision", "bf16"], 'precision was "fp32" and is now "bf16"'),
        (["--format", "npy"], "format was"),
        (["--cpu_threads", "2"], "cpu_threads was 1 and is now 2"),
    ],
)
def test_other_flags_are_refused_by_name(
    more: list[str],
    named: str,
    model: Path,
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    before = files(encode(model, photos, tmp_path / "codes"))
    assert named in refused(capsys, encode, model, photos, tmp_path / "codes", *more)
    assert files(tmp_path / "codes") == before


def test_another_model_or_listing_is_refused(
    model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encode(model, photos, tmp_path / "codes")
    vqgan(seed=1).save_pretrained(tmp_path / "model")
    said = refused(capsys, encode, tmp_path / "model", photos, tmp_path / "codes")
    assert "weights_sha256 was" in said and "names_sha256" not in said
    moved = shutil.copytree(photos, tmp_path / "photos")
    encode(model, moved, tmp_path / "codes")  # the same listing elsewhere
    (moved / "d.bmp").rename(moved / "c.bmp")
    assert "names_sha256 was" in refused(capsys, encode, model, moved, tmp_path / "codes")


def test_fresh_moves_the_old_codes_aside(
    model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(encode(model, photos, tmp_path / "codes"))
    encode(model, photos, tmp_path / "codes", "--fresh", "--images_per_shard", "5")
    assert files(tmp_path / "codes.old-1") == before
    assert len(index(tmp_path / "codes")["shards"]) == 2
    assert "codes.old-1" in capsys.readouterr().out


@pytest.mark.parametrize("fresh", [[], ["--fresh"]])
def test_a_folder_of_something_else_is_left_alone(
    fresh: list[str], model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = shutil.copytree(photos, tmp_path / "photos")
    before = files(mine)
    assert "a.png" in refused(capsys, encode, model, photos, mine, *fresh)
    codes = encode(model, photos, tmp_path / "codes")
    assert "a.png" in refused(capsys, decode, model, codes, mine, *fresh)
    assert "settings" in refused(capsys, decode, model, codes, codes)
    assert files(mine) == before


# Decoding.


@pytest.mark.parametrize("channels", [3, 4])
def test_decoded_images_are_the_reconstructions_to_8_bits(channels: int, photos: Path, tmp_path: Path) -> None:
    made = vqgan(channels=channels)
    made.save_pretrained(tmp_path / "model")
    codes = encode(tmp_path / "model", photos, tmp_path / "codes")
    folder = decode(tmp_path / "model", codes, tmp_path / "images")
    names = [str(Path(name).with_suffix(".png")) for name in NAMES]
    assert sorted(files(folder)) == sorted([*names, "settings.json"])
    with torch.no_grad():
        expected = made.decode(made.encode(pixels(photos, NAMES, channels)))
    exact = expected.clamp(0, 1).permute(0, 2, 3, 1).numpy() * 255
    found = np.stack([np.asarray(Image.open(folder / name)) for name in names])
    assert found.shape == (9, SIZE, SIZE, channels) and len(np.unique(found)) > 20
    # Half a level of rounding; the rest is fp32, as batches of 9 and of 3 need not agree in the last bit.
    assert np.abs(found - exact).max() <= 0.5 + 1e-3


def test_a_discrete_vae_decodes_its_codes(photos: Path, tmp_path: Path) -> None:
    vae().save_pretrained(tmp_path / "model")
    codes = encode(tmp_path / "model", photos, tmp_path / "codes")
    folder = decode(tmp_path / "model", codes, tmp_path / "images")
    with torch.no_grad():
        expected = vae().decode(vae().get_codebook_indices(pixels(photos, ["d.bmp"])))
    found = np.asarray(Image.open(folder / "d.png"))
    assert np.abs(found - expected[0].clamp(0, 1).permute(1, 2, 0).numpy() * 255).max() <= 0.5 + 1e-3


def test_decoding_goes_on_with_the_images_that_are_missing_or_cut_short(
    model: Path, photos: Path, tmp_path: Path
) -> None:
    codes = encode(model, photos, tmp_path / "codes")
    folder = decode(model, codes, tmp_path / "images")
    expected, before = files(folder), stamps(folder, "*.png")
    (folder / "b.png").unlink()
    (folder / "e.png").write_bytes(expected["e.png"][:-5])
    decode(model, codes, folder)
    after = stamps(folder, "*.png")
    assert files(folder) == expected
    assert {name for name in before if before[name] != after[name]} == {"b.png", "e.png"}


def test_images_of_one_stem_do_not_meet() -> None:
    assert png_names(["a.jpg", "b.webp", "a.webp", "x/a.png"]) == ["a.jpg.png", "b.png", "a.webp.png", "x/a.png"]
    # a.jpg and a.webp would become a.jpg.png, which is taken
    assert png_names(["a.jpg", "a.webp", "a.jpg.bmp"]) == ["a.jpg.png", "a.webp.png", "a.jpg.bmp.png"]


def test_codes_of_another_model_are_not_decoded(
    model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = encode(model, photos, tmp_path / "codes")
    vqgan(seed=1).save_pretrained(tmp_path / "model")
    assert "the model that made them" in refused(capsys, decode, tmp_path / "model", codes, tmp_path / "images")


def with_line(folder: Path, **changes: Any) -> None:
    """Change the first line of an index, and the checksum with it."""
    first, *rest = lines(folder)
    text = "".join(json.dumps(line) + "\n" for line in [{**first, **changes}, *rest])
    (folder / "index.jsonl").write_text(text)
    with_index(folder, lines_sha256=data.stores.codes.hashlib.sha256(text.encode()).hexdigest())


def with_index(folder: Path, **changes: Any) -> None:
    (folder / "index.json").write_text(json.dumps({**index(folder), **changes}))


def with_shard(folder: Path, codes: np.ndarray) -> None:
    """Other content of the first shard, with the checksum to it."""
    path = folder / "codes-00000.safetensors"
    save_file({"codes": codes}, path)
    sha256 = data.stores.codes.sha256_of([path])
    with_index(folder, shards=[{**index(folder)["shards"][0], "sha256": sha256}, *index(folder)["shards"][1:]])


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no index": (lambda folder: (folder / "index.json").unlink(), "did not finish"),
    "no folder": (shutil.rmtree, "no such folder"),
    "half an index": (lambda folder: (folder / "index.json").write_text('{"shards": ['), "cannot read the index"),
    "an empty index": (lambda folder: (folder / "index.json").write_text("[]"), "cannot read the index"),
    "other lines": (lambda folder: (folder / "index.jsonl").write_text(""), "checksum of index.jsonl"),
    "a path that leaves": (lambda folder: with_line(folder, path="../a.png"), "'../a.png'"),
    "an absolute path": (lambda folder: with_line(folder, path="/tmp/a.png"), "'/tmp/a.png'"),
    "a row twice": (lambda folder: with_line(folder, row=1), "not in order"),
    "a shard that is not there": (lambda folder: with_line(folder, shard=7), "cannot read the index"),
    "a shard elsewhere": (lambda folder: with_index(folder, shards=[{"file": "../x"}] * 3), "'../x'"),
    "a changed shard": (lambda folder: (folder / "codes-00000.safetensors").write_bytes(b""), "checksum"),
    "no shard": (lambda folder: (folder / "codes-00001.safetensors").unlink(), "codes-00001.safetensors: No such"),
    "codes outside the codebook": (lambda folder: with_shard(folder, np.full((4, 4, 4), 512, np.uint16)), "outside"),
    "negative codes": (lambda folder: with_shard(folder, np.full((4, 4, 4), -1, np.int32)), "outside [0, 512)"),
    "codes of another shape": (lambda folder: with_shard(folder, np.zeros((4, 4), np.uint16)), "not codes (4, 4, 4)"),
    "fractional codes": (lambda folder: with_shard(folder, np.zeros((4, 4, 4), np.float32)), "float32"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_codes_are_refused_in_one_line(
    damage: str, model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = encode(model, photos, tmp_path / "codes")
    change, expected = DAMAGES[damage]
    change(codes)
    assert expected in refused(capsys, decode, model, codes, tmp_path / "images")
    assert not list(tmp_path.glob("*.png"))


# Mistakes.


def another_model(tmp: Path) -> Path:
    vqgan().save_pretrained(tmp / "m")
    config = json.loads((tmp / "m" / "config.json").read_text())
    (tmp / "m" / "config.json").write_text(json.dumps({**config, "model": "Discriminator"}))
    return tmp / "m"


def a_file(tmp: Path) -> Path:
    (tmp / "file").write_text("")
    return tmp / "file"


def discrete_vae(tmp: Path) -> Path:
    vae().save_pretrained(tmp / "m")
    return tmp / "m"


MISTAKES: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "no model": (lambda tmp: {"--model": tmp / "nowhere"}, "nowhere"),
    "another kind of model": (lambda tmp: {"--model": another_model(tmp)}, "a DiscreteVAE or a VQGAN"),
    "no folder": (lambda tmp: {"--image_folder": tmp / "nowhere"}, "nowhere"),
    "no images": (lambda tmp: {"--image_folder": tmp}, "no image in"),
    "no such demonstration": (lambda tmp: {"--image_folder": "demo:cats"}, "demo:cats"),
    "output below a file": (lambda tmp: {"--output": a_file(tmp) / "x"}, "cannot write the folder"),
    "output is a file": (lambda tmp: {"--output": a_file(tmp)}, "cannot write the folder"),
    "image size that does not divide": (lambda tmp: {"--image_size": 18}, "--image_size 18 does not fit the model"),
    "image size of a vae": (lambda tmp: {"--image_size": 32, "--model": discrete_vae(tmp)}, "takes 16 alone"),
    "image size 0": (lambda tmp: {"--image_size": 0}, "--image_size"),
    "two sources": (lambda tmp: {"--decode": tmp}, "not allowed with"),
    "unknown flag": (lambda tmp: {"--image_sise": 16}, "did you mean --image_size?"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gives_one_line(
    mistake: str, model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, expected = MISTAKES[mistake]
    said = {"--model": model, "--image_folder": photos, "--output": tmp_path / "codes", **make(tmp_path)}
    argv = [str(word) for pair in said.items() for word in pair]
    assert expected in refused(capsys, tokenize_images.main, argv)
    assert not (tmp_path / "codes").exists()


def test_channels_that_no_image_has_are_refused(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vqgan(channels=1).save_pretrained(tmp_path / "model")
    assert "not 1" in refused(capsys, encode, tmp_path / "model", photos, tmp_path / "codes")


def test_flags_of_encoding_are_refused_beside_decode(
    model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = encode(model, photos, tmp_path / "codes")
    assert "--report is for encoding" in refused(capsys, decode, model, codes, tmp_path / "images", "--report")


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(
    model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(path: Path, content: bytes) -> None:
        if path.name == "codes-00001.safetensors":
            raise OSError(28, "No space left on device")
        write_atomically(path, content)

    monkeypatch.setattr(training.files, "write_atomically", no_space)
    assert "No space left on device" in refused(capsys, encode, model, photos, tmp_path / "codes")
    monkeypatch.setattr(training.files, "write_atomically", write_atomically)
    assert files(encode(model, photos, tmp_path / "codes")) == files(encode(model, photos, tmp_path / "whole"))
