"""evaluate.py against independent computations, for any number of processes; mistakes, and commands that are stopped
or repeated."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lpips
import numpy as np
import pytest
import torch
from filling import (
    IMAGES,
    SIZE,
    autoencoder,
    film_autoencoder,
    saved,
    video_tokenizer,
    vqgan,
    write_images,
    write_videos,
)
from forks import fork
from PIL import Image, ImageOps
from safetensors.torch import load_file, save
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch import Tensor
from torch.nn import functional as F
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from torch_fidelity.metric_isc import isc_features_to_metric

import evaluate
import tandem.io.published
import tandem.models.features.i3d
import tandem.training.metrics.fid
from benchmarks.inception import random_inception
from benchmarks.launching import ONE_PROCESS, WHOLE_MATRIX, Launcher, run
from tandem.data.sampling.order import split_samples
from tandem.data.sets import open_videos
from tandem.distributed import ProcessGroup
from tandem.measuring import autoencoders
from tandem.models.features.lpips import PerceptualLoss
from tandem.training.metrics.fid import FrechetStatistics, frechet_distance
from tandem.training.metrics.latents import between_neighbours
from tandem.training.metrics.reconstruction import psnr
from tests.data.helpers import write_tar
from tests.models.test_perceptual import part, published
from tests.scripts import MULAN, VIDEO_TOKENIZER, VQGAN, Script, metrics, refusal
from tests.scripts import write_images as write_noise

MODELS = ("a", "b")


@pytest.fixture(scope="module", autouse=True)
def on_one_cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setenv("TORCH_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models, of images and of videos."""
    folder = tmp_path_factory.mktemp("inputs")
    for seed, name in enumerate(MODELS):
        saved(folder / name, vqgan(seed))
    saved(folder / "films", video_tokenizer())
    saved(folder / "kl", autoencoder())
    saved(folder / "film_kl", film_autoencoder())
    write_images(folder / "photos")
    write_videos(folder / "clips")
    return folder


def report_of(*flags: Any, output: Path) -> dict[str, Any]:
    evaluate.main([*map(str, flags), "--output", f"{output}.json", "--num_workers", "0", "--batch_size", "4"])
    found: dict[str, Any] = json.loads(Path(f"{output}.json").read_text())
    return found


def without_speed(report: dict[str, Any]) -> dict[str, Any]:
    for of_model in report["models"].values():
        assert of_model.pop("samples_per_second") > 0
    return report


def values(report: dict[str, Any], model: Path) -> dict[str, Any]:
    found: dict[str, Any] = report["models"][str(model)]
    return found


class TinyInception:
    """What is asked of Inception, with 8 numbers for an image."""

    dim, seen = 8, 0

    def __init__(self, weights: Any, device: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self._project = torch.randn(3 * SIZE**2, self.dim, generator=generator) / SIZE
        self._head = torch.randn(self.dim, 1008, generator=generator)

    def __call__(self, images: Tensor) -> Tensor:
        TinyInception.seen += len(images)
        return images.flatten(1) @ self._project

    def logits(self, features: Tensor) -> Tensor:
        return features @ self._head


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags that ask for rFID by a tiny network."""
    monkeypatch.setattr(tandem.training.metrics.fid, "Inception", TinyInception)
    monkeypatch.setattr(tandem.io.published, "load_published_weights", lambda *given: {})
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    (tmp_path / "tiny.pth").write_bytes(b"weights")
    return ["--fid_weights", str(tmp_path / "tiny.pth")]


# Independent computations.


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of weights of the published shapes, random with a fixed seed: nobody may fetch the published ones here."""
    folder = tmp_path_factory.mktemp("judges")
    torch.save(random_inception(), folder / "inception.pth")
    torch.manual_seed(0)
    torch.save(published(PerceptualLoss("lpips")), folder / "lpips.pth")
    return {"--fid_weights": folder / "inception.pth", "--lpips_weights": folder / "lpips.pth"}


@pytest.fixture(scope="module")
def compared(at: Path, judges: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a command that compares two models by everything that there is; in a process of its own, because
    tests before this one may have changed how this process computes."""
    folder = tmp_path_factory.mktemp("compared")
    words = [*command(at, judges, "--latents"), "--output", folder / "values", "--num_workers", 0, "--batch_size", 4]
    finished = run(ONE_PROCESS, "evaluate.py", [*map(str, words)])
    assert finished.returncode == 0, finished.output
    return folder


def command(at: Path, judges: dict[str, Path], *more: str) -> list[Any]:
    flags = [word for flag in judges.items() for word in flag]
    models = [at / name for name in (*MODELS, *(["kl"] if "--latents" in more else []))]
    return ["--compare", *models, "--image_folder", at / "photos", *flags, *more]


def prepared(path: Path) -> Tensor:
    """As papers do it, by Pillow alone: the centre of a picture whose shorter side is resized."""
    with Image.open(path) as picture:
        square = ImageOps.fit(picture.convert("RGB"), (SIZE, SIZE), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.asarray(square).copy()).permute(2, 0, 1).float() / 255


@torch.no_grad()
def test_values_are_those_of_scikit_image_torch_fidelity_and_lpips(
    at: Path, compared: Path, judges: dict[str, Path]
) -> None:
    found = values(json.loads((compared / "values.json").read_text()), at / "b")
    model, images = vqgan(1), torch.stack([prepared(at / "photos" / name) for name in IMAGES])
    codes = model.encode(images)
    made = model.decode(codes).clamp(0, 1)

    pairs = [(x.double().numpy(), y.double().numpy()) for x, y in zip(images, made, strict=True)]
    psnrs = [peak_signal_noise_ratio(x, y, data_range=1) for x, y in pairs]
    assert found["psnr"] == pytest.approx(np.mean(psnrs), rel=1e-6)
    how = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    ssims = [structural_similarity(x, y, data_range=1, channel_axis=0, **how) for x, y in pairs]
    assert found["ssim"] == pytest.approx(np.mean(ssims), abs=1e-6)

    counts = np.bincount(codes.flatten().numpy(), minlength=512)
    shares = counts[counts > 0] / counts.sum()
    assert (found["codes_used"], found["num_codes"]) == (len(shares), 512)
    assert found["perplexity"] == pytest.approx(np.exp(-(shares * np.log(shares)).sum()))

    with torch.device("meta"):
        package = lpips.LPIPS(net="vgg", pnet_rand=True, pretrained=False, verbose=False)
    ours = torch.load(judges["--lpips_weights"])
    trunk = {name: ours[f"features.{name.split('.', 2)[2]}"] for name in package.state_dict() if "slice" in name}
    package.load_state_dict({**trunk, **part(ours, "lin")}, strict=False, assign=True)
    assert found["lpips"] == pytest.approx(package(made, images, normalize=True).mean().item(), rel=1e-5)

    layers, weights = ["2048", "logits_unbiased"], str(judges["--fid_weights"])
    extractor = FeatureExtractorInceptionV3("inception", layers, feature_extractor_weights_path=weights)
    (real, _), (fake, logits) = (extractor((each * 255).round().byte()) for each in (images, made))
    score = isc_features_to_metric(logits, splits=1, shuffle=False)["inception_score_mean"]
    assert found["inception_score"] == pytest.approx(score, rel=1e-6)
    # Of fewer images than numbers, tr (A B)^1/2 is the sum of the singular values of x y^T, centred.
    x, y = ((each - each.mean(0)).double() / len(each[:-1]) ** 0.5 for each in (real, fake))
    means = (real.double().mean(0) - fake.double().mean(0)).square().sum()
    expected = means + x.square().sum() + y.square().sum() - 2 * torch.linalg.svdvals(x @ y.T).sum()
    assert expected > 0.1 and found["rfid"] == pytest.approx(expected.item(), rel=1e-4)


@torch.no_grad()
def test_the_interpolated_fid_is_that_of_points_between_neighbours(
    at: Path, compared: Path, judges: dict[str, Path]
) -> None:
    """All images but one are among the ten nearest: of those, the drawn one is known by the points alone."""
    found = values(json.loads((compared / "values.json").read_text()), at / "kl")
    model, images = autoencoder(), torch.stack([prepared(at / "photos" / name) for name in IMAGES])
    latents = model.encode(images)
    flat, points = latents.flatten(1).double(), between_neighbours(latents, range(len(latents))).flatten(1).double()
    for row, point in enumerate(points):
        halves = []
        for other in [*range(row), *range(row + 1, len(flat))]:
            angle = torch.acos(F.cosine_similarity(flat[row], flat[other], dim=0))
            halves.append((flat[row] + flat[other]) * torch.sin(angle / 2) / torch.sin(angle))
        assert min((point - half).abs().max() for half in halves) < 1e-4
    extractor = FeatureExtractorInceptionV3(
        "inception", ["2048"], feature_extractor_weights_path=str(judges["--fid_weights"])
    )
    made = model.decode(points.float().view_as(latents)).clamp(0, 1)
    real, fake = (extractor((each * 255).round().byte())[0] for each in (images, made))
    x, y = ((each - each.mean(0)).double() / len(each[:-1]) ** 0.5 for each in (real, fake))
    means = (real.double().mean(0) - fake.double().mean(0)).square().sum()
    expected = means + x.square().sum() + y.square().sum() - 2 * torch.linalg.svdvals(x @ y.T).sum()
    assert found["ifid"] == pytest.approx(expected.item(), rel=1e-3) and found["ifid"] != found["rfid"]
    assert len(found["channel_means"]) == latents.shape[1] and "ifid" not in values(
        json.loads((compared / "values.json").read_text()), at / "a"
    )


def test_several_processes_find_the_bits_of_one(
    at: Path, compared: Path, judges: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))  # where nothing is kept of the originals
    output = tmp_path / "values"
    words = [*command(at, judges, "--latents"), "--output", output, "--num_workers", 1, "--batch_size", 4]
    finished = run(Launcher("torchrun", 4 if WHOLE_MATRIX else 2), "evaluate.py", [*map(str, words)])
    assert finished.returncode == 0, finished.output
    assert finished.output.count("rFID") == 1, finished.output
    one, several = (without_speed(json.loads((of / "values.json").read_text())) for of in (compared, tmp_path))
    assert several == one
    assert (tmp_path / "values.png").read_bytes() == (compared / "values.png").read_bytes()


@pytest.mark.parametrize(
    ("what", "code", "line"),
    [
        ("mistake", 2, "evaluate.py: error: a mistake of one process (on rank 1)"),
        ("SIGTERM", 75, "asked to stop, with nothing written; the same command starts over"),
    ],
    ids=["a mistake", "a signal"],
)
def test_what_one_process_meets_ends_both_with_one_line(
    what: str, code: int, line: str, at: Path, tmp_path: Path
) -> None:
    flags = ["--model", at / "a", "--image_folder", "demo:shapes:4000", "--batch_size", 4, "--num_workers", 0]
    words = [what, *flags, "--output", tmp_path / "values"]
    ranks = fork("evaluation_worker", [*map(str, words)], tmp_path / "log", 2)
    assert [rank.returncode for rank in ranks] == [code, code], ranks[0].output
    assert ranks[0].output.count(line) == 1, ranks[0].output
    assert {*os.listdir(tmp_path)} == {"log"}


@torch.no_grad()
def test_a_video_tokenizer_is_measured_on_images(at: Path, tmp_path: Path) -> None:
    report = report_of("--model", at / "films", "--image_folder", at / "photos", output=tmp_path / "images")
    images, model = torch.stack([prepared(at / "photos" / name) for name in IMAGES]), video_tokenizer()
    expected = psnr(images, model.decode(model.encode(images))).mean().item()
    assert values(report, at / "films")["psnr"] == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_a_video_model_without_codes_is_measured_on_images_and_videos(at: Path, tmp_path: Path) -> None:
    model, images = film_autoencoder(), torch.stack([prepared(at / "photos" / name) for name in IMAGES])
    flags = ("--model", at / "film_kl", at / "films")
    report = report_of(*flags, "--image_folder", at / "photos", "--latents", output=tmp_path / "images")
    latents, found = model.encode(images), values(report, at / "film_kl")
    assert found["psnr"] == pytest.approx(psnr(images, model.decode(latents)).mean().item(), rel=1e-5)
    assert found["channel_means"] == pytest.approx(latents.mean((0, 2, 3)).tolist(), rel=1e-4)
    report = report_of(*flags, "--video_folder", at / "clips", "--num_frames", 3, output=tmp_path / "videos")
    found = values(report, at / "film_kl")
    assert {"psnr", "ssim", "dpsnr", "flicker"} < found.keys() and not {"codes_used", "perplexity"} & found.keys()
    assert "codes_used" in values(report, at / "films")


@torch.no_grad()
def test_rfvd_is_the_distance_of_the_features_of_clips_with_the_epsilon_that_table_and_file_say(
    at: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Statistics of originals that were kept with another epsilon are not used."""
    project = torch.randn(3 * 3 * SIZE**2, 400, generator=torch.Generator().manual_seed(0)) / SIZE

    def features(videos: Tensor, eps: float = 1e-3) -> Tensor:
        return videos.flatten(1) @ project / (1 + eps) ** 0.5

    monkeypatch.setattr(
        tandem.models.features.i3d, "i3d_features", lambda weights, frames, device, eps: partial(features, eps=eps)
    )
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    (tmp_path / "i3d.pt").write_bytes(b"weights")
    said = ["--model", at / "films", "--video_folder", at / "clips", "--num_frames", 3]
    said += ["--fvd_weights", tmp_path / "i3d.pt"]
    usual, other = (report_of(*said, *more, output=tmp_path / "values") for more in ([], ["--fvd_eps", "1"]))
    assert (usual["fvd_eps"], other["fvd_eps"]) == (1e-3, 1) and usual["prepared"].startswith(
        "3 frames from the middle"
    )
    table = capsys.readouterr().out
    assert "\n--fvd_eps 0.001 " in table and "\n--fvd_eps 1 " in table
    distances = [values(report, at / "films")["rfvd"] for report in (usual, other)]
    assert distances[1] == pytest.approx(distances[0] * 1.001 / 2, rel=1e-3)

    samples = open_videos(str(at / "clips"), image_size=SIZE, num_frames=3)
    clips = torch.stack([samples.load(index)["videos"] for index in range(len(samples))]).float() / 255
    model, gaussians = video_tokenizer(), []
    for each in (clips, model.decode(model.encode(clips))):
        statistics = FrechetStatistics(400)
        statistics.add(features(each))
        gaussians.append(statistics.result())
    assert distances[0] == pytest.approx(frechet_distance(*gaussians), rel=1e-4)
    assert "inception_score" not in values(usual, at / "films")


# What a run did not train on.

# The script of a run, its flags, and how many samples it holds out.
HELD_OUT: dict[str, tuple[Script, list[str], int]] = {
    "a share of the images": (VQGAN, ["--image_folder", "images", "--valid_fraction", "0.3", "--split_seed", "5"], 12),
    "another folder": (VQGAN, ["--image_folder", "images", "--valid_folder", "others", "--valid_fraction", "0"], 9),
    "whole tars": (VQGAN, ["--image_folder", "tars", "--shuffle", "shards", "--valid_fraction", "0.3"], 16),
    "drawn images": (VQGAN, ["--image_folder", "demo:shapes:40", "--seed", "3"], 8),
    "videos": (VIDEO_TOKENIZER, ["--video_folder", "films", "--image_folder", "images", "--fps", "20"], 8),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    images = sorted(write_noise(folder / "images", 40).iterdir())
    write_noise(folder / "others", 9)
    VIDEO_TOKENIZER.data.write(folder / "films", 20)
    for number in range(5):
        files = images[8 * number : 8 * number + 8]
        write_tar(folder / "tars" / f"{number}.tar", {path.stem: {"png": path.read_bytes()} for path in files})
    return folder


@pytest.mark.parametrize("case", HELD_OUT)
def test_the_samples_that_a_run_held_out_are_measured_as_it_validates_them(
    case: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, flags, count = HELD_OUT[case]
    monkeypatch.chdir(data)
    run = script.train(tmp_path / "run", *flags, "--max_steps", "1")
    found = report_of("--model", run, "--held_out_of", run, output=tmp_path / "values")
    assert (found["samples"], found["held_out_of"]) == (count, str(run))
    assert values(found, run)["psnr"] == pytest.approx(metrics(run)[-1]["valid/psnr"], rel=1e-5)
    assert "trained on" not in capsys.readouterr().out.replace(f"that {run} did not train on", "")


def test_a_line_and_the_file_say_how_many_of_the_samples_a_model_was_trained_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(data)
    first, second = (
        VQGAN.train(tmp_path / str(seed), "--image_folder", "images", "--split_seed", str(seed), "--max_steps", "1")
        for seed in (0, 1)
    )

    def counted(*said: Any) -> dict[str, int | None]:
        report = report_of("--model", first / "model", second, *said, output=tmp_path / "values")
        printed = capsys.readouterr().out
        counts = {name: found.get("trained_on") for name, found in report["models"].items()}
        for name, count in counts.items():
            assert (f"{name} was trained on {count} of these {report['samples']} samples" in printed) == bool(count)
            none = f"{name} was trained on none of these {report['samples']} samples: its data is {data / 'images'}"
            assert (none in printed) == (count == 0 and "--held_out_of" not in said)
        return counts

    of_first, of_second = str(first / "model"), str(second)
    assert counted("--image_folder", data / "images") == {of_first: 32, of_second: 32}
    assert counted("--image_folder", data / "others") == {of_first: 0, of_second: 0}
    splits = [split_samples(40, 0.2, 0, seed, 8).valid for seed in (0, 1)]
    held_out = [{split[place] for place in range(8)} for split in splits]
    assert counted("--held_out_of", first) == {of_first: 0, of_second: len(held_out[0] - held_out[1])}


def test_where_the_data_of_a_run_cannot_be_compared_a_line_says_why(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(data / "images", tmp_path / "images")
    monkeypatch.chdir(tmp_path)
    of_files = VQGAN.train(tmp_path / "files", "--image_folder", "images", "--max_steps", "1")
    drawn = VQGAN.train(tmp_path / "drawn", "--image_folder", "demo:shapes:40", "--max_steps", "1")

    def printed(model: Path, *said: Any) -> tuple[str, Any]:
        report = report_of("--model", model, *said, output=tmp_path / "values")
        return capsys.readouterr().out, report["models"][str(model)].get("trained_on")

    said, count = printed(drawn, "--image_folder", "demo:shapes:20")
    assert (
        f"it is unknown on how many of these 20 samples {drawn} was trained: demo:shapes:20 and the run's data" in said
    )
    assert count is None
    assert "the split has changed" not in printed(of_files, "--held_out_of", of_files)[0]
    (tmp_path / "images" / "added.png").write_bytes(next((data / "others").iterdir()).read_bytes())
    for measured in (["--held_out_of", of_files], ["--image_folder", "images"]):
        said, count = printed(of_files, *measured)
        assert said.count(f"files in the data of {of_files} were added") == 1
    assert "the split has changed" not in printed(of_files, "--image_folder", data / "others")[0], "no file is shared"
    monkeypatch.chdir(data)
    assert f"its data is {data / 'images'}" in printed(of_files, "--image_folder", data / "others")[0]
    for file in sorted((tmp_path / "images").iterdir())[3:]:
        file.unlink()
    monkeypatch.chdir(tmp_path)
    said, count = printed(of_files, "--image_folder", "images")
    assert f"it is unknown on how many of these 3 samples {of_files} was trained: " in said and count is None


# What is said and shown.


@torch.no_grad()
def test_the_table_and_the_picture_show_where_models_differ(
    at: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(*command(at, {}), output=tmp_path / "values")
    said = capsys.readouterr().out.splitlines()
    heading, a, b = (line.split() for line in said[1:4])
    assert heading == ["--resize", "ours", "PSNR", "SSIM", "codes", "used", "perplexity", "samples/s"]
    assert (a[0], b[0]) == (str(at / "a"), str(at / "b"))
    assert a[1] == f"{values(report, at / 'a')['psnr']:.2f}" and a[4:6] == ["of", "512"]
    assert said[-1].endswith("their weights are not given: LPIPS (--lpips_weights), rFID and IS (--fid_weights)")

    images = torch.stack([prepared(at / "photos" / name) for name in IMAGES])
    made = [model.decode(model.encode(images)).clamp(0, 1) for model in (vqgan(0), vqgan(1))]
    psnrs = [-10 * (images - each).square().mean((1, 2, 3)).log10() for each in made]
    order = (psnrs[0] - psnrs[1]).abs().argsort(descending=True)[:6].tolist()
    assert [line.split(":")[0].strip() for line in said[-7:-1]] == [IMAGES[place] for place in order]
    picture = np.asarray(Image.open(tmp_path / "values.png"))
    place = order[0]
    shown = (images[place].permute(1, 2, 0) * 255).round().byte().repeat_interleave(8, 0).repeat_interleave(8, 1)
    corners = np.lib.stride_tricks.sliding_window_view(picture[2, :, 0], 128)
    left = int((corners == shown[0, :, 0].numpy()).all(1).argmax())
    np.testing.assert_array_equal(picture[2:130, left : left + 128], shown.numpy())


def test_one_model_shows_what_it_makes_worst_and_one_without_codes_has_no_columns_of_them(
    at: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = values(report_of("--model", at / "kl", "--image_folder", at / "photos", output=tmp_path / "v"), at / "kl")
    assert not {"codes_used", "perplexity"} & found.keys() and found["psnr"] > 0
    said = capsys.readouterr().out.splitlines()
    assert said[1].split() == ["--resize", "ours", "PSNR", "SSIM", "samples/s"]
    near = [float(line.split()[-1]) for line in said[-7:-1]]
    assert near == sorted(near)


# Commands that are repeated or stopped.


def test_statistics_of_originals_are_kept_for_the_same_pixels_and_weights_alone(
    at: Path, tiny: list[str], tmp_path: Path
) -> None:
    photos = shutil.copytree(at / "photos", tmp_path / "photos")
    flags = ["--model", at / "a", "--image_folder", photos, *tiny]

    def seen(*how: str) -> tuple[int, dict[str, Any]]:
        TinyInception.seen = 0
        report = report_of(*flags, *how, output=tmp_path / "values")
        return TinyInception.seen, without_speed(report)

    n = len(IMAGES)
    first = seen()
    assert first[0] == 2 * n
    assert seen() == (n, first[1])
    (kept,) = (tmp_path / "home" / "hub" / "statistics").iterdir()
    whole = load_file(kept)
    for damaged in (kept.read_bytes()[:-1], save({**whole, "covariance": whole["covariance"][:3, :3].contiguous()})):
        kept.write_bytes(damaged)
        assert seen() == (2 * n, first[1])
    Image.new("RGB", (24, 20), "red").save(photos / IMAGES[0])
    changed = seen()
    assert changed[0] == 2 * n and values(changed[1], at / "a")["rfid"] != values(first[1], at / "a")["rfid"]
    (tmp_path / "tiny.pth").write_bytes(b"others")
    assert seen()[0] == 2 * n
    assert [seen("--precision", "bf16")[0] for _ in range(2)] == [2 * n, n]  # a judge rounds as it is told to


def test_a_command_that_is_stopped_writes_nothing_and_can_be_repeated(
    at: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reconstructed, calls = autoencoders.reconstruct, []

    def interrupted(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return reconstructed(*given)

    flags = ["--model", at / "a", "--image_folder", at / "photos"]
    with monkeypatch.context() as patch:
        patch.setattr(autoencoders, "reconstruct", interrupted)
        with pytest.raises(SystemExit) as raised:
            report_of(*flags, output=tmp_path / "values")
    assert raised.value.code == 75 and not list(tmp_path.iterdir())
    assert "nothing written; the same command starts over" in capsys.readouterr().out
    assert report_of(*flags, output=tmp_path / "values")["samples"] == len(IMAGES)


def test_a_file_that_cannot_be_read_is_named_and_left_out_and_one_that_is_partly_read_is_named(
    at: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = shutil.copytree(at / "photos", tmp_path / "photos")
    (photos / IMAGES[1]).write_bytes(b"no picture")
    (photos / "notes.pdf").touch()
    still = Image.open(photos / IMAGES[0]).copy()
    still.save(photos / IMAGES[0], save_all=True, append_images=[still.rotate(90)])
    broken = report_of("--model", at / "a", "--image_folder", photos, output=tmp_path / "broken")
    said = capsys.readouterr().out
    assert said.count(IMAGES[1]) == 1 and "1 file is skipped in" in said
    assert f"read only in part: 1 sample, such as {photos / IMAGES[0]}: it holds several pictures" in said
    (photos / IMAGES[1]).unlink()
    whole = report_of("--model", at / "a", "--image_folder", photos, output=tmp_path / "whole")
    assert broken["samples"] == len(IMAGES) - 1
    # The rest of an image's batch may round differently.
    assert values(broken, at / "a")["psnr"] == pytest.approx(values(whole, at / "a")["psnr"], rel=1e-5)


# Mistakes.


def test_processes_that_see_other_files_and_a_model_that_is_not_finite_end_in_a_line(
    at: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--model", at / "a", "--image_folder", at / "photos", "--num_workers", "0"]
    with monkeypatch.context() as patch:
        patch.setattr(ProcessGroup, "gather_objects", lambda self, value: [value, [len(IMAGES), "other names", "cpu"]])
        assert "do not see the same files" in refusal(evaluate.main, *flags)
    monkeypatch.setattr(autoencoders, "reconstruct", lambda model, x, *_: (x / 0, model.encode(x)))
    assert "not finite" in refusal(evaluate.main, *flags)


def test_a_run_that_holds_nothing_out_and_one_of_sounds_are_refused(
    at: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data)
    run = VQGAN.train(tmp_path / "run", "--image_folder", "images", "--valid_fraction", "0", "--max_steps", "1")
    flags = ["--model", run, "--held_out_of", run]
    assert f"{run} was trained on all of images" in refusal(evaluate.main, *flags)
    monkeypatch.chdir(tmp_path)
    assert "no folder 'images'" in refusal(evaluate.main, *flags)
    sounds = MULAN.train(tmp_path / "sounds", "--max_steps", "1")
    assert "train_mulan.py" in refusal(evaluate.main, "--model", at / "a", "--held_out_of", sounds)
