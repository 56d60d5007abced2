"""The perceptual distances against torchvision's VGG16, and where weights are found. The LPIPS package is compared in
tests/test_evaluate.py."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping
from pathlib import Path

import lpips
import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor

from tandem.io.fetching import MIRROR, PublishedFile
from tandem.io.published import LPIPS_HEADS, PUBLISHED, VGG16, read_state_dict
from tandem.models.features.lpips import PerceptualLoss, load_lpips, load_perceptual
from tests.models.helpers import NARROW, assert_same_bits, narrow, refused, some_images

HEADS_FILE = Path(lpips.__file__).parent / "weights/v0.1/vgg.pth"
TRUNK_NAME = "vgg16-397923af.pth"
SOURCE = VGG16.address
KINDS = pytest.mark.parametrize("kind", ["vgg", "lpips"])


def published(model: PerceptualLoss) -> dict[str, Tensor]:
    """Its weights under the names of torchvision and LPIPS."""
    names = {f"heads.{i}.weight": f"lin{i}.model.1.weight" for i in range(5)}
    return {names.get(name, name): tensor for name, tensor in model.state_dict().items()}


def part(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if name.startswith(prefix)}


def pair(**sizes: int) -> tuple[Tensor, Tensor]:
    """Images and reconstructions."""
    return some_images(**{"size": 32, **sizes}), some_images(**{"size": 32, **sizes}, seed=2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty torch.hub cache of a machine that is offline."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def test_vgg_is_the_mean_squared_difference_of_torchvisions_last_relu() -> None:
    model, (images, reconstructions) = narrow("vgg"), pair()
    a, b, c, d, e = NARROW
    trunk = torchvision.models.vgg.make_layers([a, a, "M", b, b, "M", c, c, c, "M", d, d, d, "M", e, e, e])
    trunk.load_state_dict({name[len("features.") :]: tensor for name, tensor in model.state_dict().items()})
    normalize = torchvision.transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    with torch.no_grad():
        difference = trunk(normalize(reconstructions)) - trunk(normalize(images))
    expected = difference.square().mean((1, 2, 3))
    assert difference.shape == (2, 8, 2, 2) and expected.min() > 0
    torch.testing.assert_close(model.distances(reconstructions, images), expected)
    torch.testing.assert_close(model(reconstructions, images), expected.mean())


@KINDS
def test_grey_images_are_compared_as_grey_colour_images(kind: str) -> None:
    model, (images, reconstructions) = narrow(kind), pair(channels=1)
    expected = model(reconstructions.repeat(1, 3, 1, 1), images.repeat(1, 3, 1, 1))
    torch.testing.assert_close(model(reconstructions, images), expected)


def test_images_that_vgg_cannot_take_are_an_error_before_any_weights_are_read(tmp_path: Path) -> None:
    for channels, size in ((4, 32), (3, 15)):
        images = some_images(channels=channels, size=size)
        assert f"{channels} of {size} x {size}" in refused(narrow("vgg"), images, images)
    said = refused(load_perceptual, "lpips", "mine.pth", side=15, flag="--lpips_weights")
    assert "15 x 15" in said and said.endswith("(no --lpips_weights)")
    torch.save(published(narrow("vgg")), tmp_path / "mine.pth")
    assert load_perceptual("vgg", tmp_path / "mine.pth", side=16, widths=NARROW) is not None
    assert load_perceptual("none", side=15) is None is load_lpips(None, 15)


@pytest.mark.parametrize(("heads", "is_named", "is_new"), [("vgg.pth", False, False), ("vgg_lpips.pth", True, True)])
def test_weights_come_from_the_cache_or_a_folder_under_their_published_names(
    heads: str, is_named: bool, is_new: bool, cache: Path, tmp_path: Path
) -> None:
    model, folder = narrow("lpips"), tmp_path if is_named else cache
    save = functools.partial(torch.save, _use_new_zipfile_serialization=is_new)
    save({**part(published(model), "features"), "classifier.0.weight": torch.zeros(2)}, folder / TRUNK_NAME)
    save(part(published(model), "lin"), folder / heads)
    for kind in ("lpips", "vgg"):
        assert_same_bits(load_perceptual(kind, tmp_path if is_named else None, widths=NARROW), narrow(kind))


@KINDS
def test_one_named_file_may_hold_everything_and_goes_before_the_cache(kind: str, tmp_path: Path, cache: Path) -> None:
    model, file = narrow(kind), tmp_path / "mine.safetensors"
    torch.save({name: tensor + 1 for name, tensor in published(model).items()}, cache / TRUNK_NAME)
    said = refused(load_perceptual, kind, file, widths=NARROW, flag="--lpips_weights")  # though the cache would do
    assert said.startswith("--lpips_weights") and str(file) in said and SOURCE in said
    assert (LPIPS_HEADS.address in said) == (kind == "lpips")
    save_file(published(model), file)
    assert_same_bits(load_perceptual(kind, str(file), "cpu", widths=NARROW), model)


@pytest.mark.parametrize(("kind", "file", "flag", "way_out"), [
    ("vgg", VGG16, "--perceptual_weights", "--perceptual none"), ("lpips", LPIPS_HEADS, "--lpips_weights", "no --"),
])  # fmt: skip
def test_offline_weights_that_are_nowhere_are_one_line_with_file_place_and_the_way_out(
    kind: str, file: PublishedFile, flag: str, way_out: str, cache: Path
) -> None:
    """Some scripts have one of the flags only."""
    if kind == "lpips":
        torch.save(part(published(narrow(kind)), "features"), cache / TRUNK_NAME)
    said = refused(load_perceptual, kind, PUBLISHED, widths=NARROW, flag=flag)
    assert all(text in said for text in (str(file), str(cache), flag, f"({way_out}"))
    assert ("--lpips_weights" if kind == "vgg" else "--perceptual") not in said


def test_weights_that_are_not_given_are_fetched_as_published(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv(MIRROR, HEADS_FILE.parent.as_uri())
    trunk = PerceptualLoss("vgg").state_dict()
    torch.save(trunk, cache / TRUNK_NAME)
    model = load_lpips(PUBLISHED, 32)
    assert model is not None and capfd.readouterr().err.count(f"{cache / 'vgg_lpips.pth'}\n") == 1
    assert torch.equal(published(model)["lin4.model.1.weight"], read_state_dict(HEADS_FILE)["lin4.model.1.weight"])
    assert torch.equal(model.features[0].weight, trunk["features.0.weight"])


def test_weights_of_another_network_are_an_error_that_names_the_first_that_differs_or_the_file(tmp_path: Path) -> None:
    torch.save(published(narrow("vgg")), tmp_path / "x.pth")
    said = refused(load_perceptual, "vgg", tmp_path / "x.pth")
    assert "--perceptual_weights" in said and "features.0.weight" in said
    shutil.copy(HEADS_FILE, tmp_path / "x.pth")
    said = refused(load_perceptual, "vgg", tmp_path / "x.pth", widths=NARROW)
    assert "x.pth holds no weights of vgg" in said and TRUNK_NAME in said
