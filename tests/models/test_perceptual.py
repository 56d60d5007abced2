"""The perceptual distances against torchvision's VGG16 and ResNet-50, and where weights are found. The LPIPS package is
compared in tests/test_evaluate.py."""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import lpips
import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from torchvision.models.resnet import Bottleneck, ResNet

from tandem.io.fetching import MIRROR, PublishedFile
from tandem.io.published import LPIPS_HEADS, PUBLISHED, RESNET50, VGG16, read_state_dict
from tandem.models.features.lpips import LogitDistance, PerceptualLoss, load_lpips, load_perceptual
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
    torch.testing.assert_close(model(reconstructions, images), {"perceptual_loss": expected.mean()})


@pytest.mark.parametrize(("blocks", "side", "size"), [((3, 4, 6, 3), 224, 256), ((1, 1, 1, 1), 64, 32)])
def test_resnet50_is_the_mean_squared_difference_of_torchvisions_logits_in_eval_mode(
    blocks: tuple[int, ...], side: int, size: int, tmp_path: Path
) -> None:
    """Images are shrunk to the 224 pixels of the real network; or enlarged, for one that is tiny."""
    torch.manual_seed(0)
    network = ResNet(Bottleneck, list(blocks))
    for module in network.modules():  # statistics that are not those of the batch
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2)
    weights = network.eval().state_dict()
    # Older files do not count the batches.
    torch.save({name: each for name, each in weights.items() if "num_batches" not in name}, tmp_path / "old.pth")
    model = load_perceptual("resnet50", tmp_path / "old.pth") if side == 224 else LogitDistance(blocks)
    assert isinstance(model, LogitDistance)
    if side == 224:
        assert_same_bits(model.network, weights)
    else:
        model.network.load_state_dict(weights)
    model.side = side
    assert not model.train().network.training and not any(weight.requires_grad for weight in model.parameters())
    images, reconstructions = pair(size=size, batch=1 if side == 224 else 2)
    reconstructions.requires_grad_()
    loss = model(reconstructions, images)["perceptual_loss"]
    (gradient,) = torch.autograd.grad(loss, reconstructions)
    resize = functools.partial(F.interpolate, size=(side, side), mode="bilinear", antialias=True, align_corners=False)
    normalize = torchvision.transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    ours, theirs = (network(normalize(resize(each))) for each in (reconstructions, images))
    expected = F.mse_loss(ours, theirs.detach())
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
    (public,) = torch.autograd.grad(expected, reconstructions)
    assert (gradient - public).norm() < 1e-2 * public.norm()  # rounding lets a ReLU take the other side


@KINDS
def test_the_gram_loss_is_the_squared_distance_of_gram_matrices_of_four_blocks_image_by_image(kind: str) -> None:
    model, (images, reconstructions) = narrow(kind, gram=True), pair()
    found = model(reconstructions, images)
    assert torch.equal(found["perceptual_loss"], narrow(kind)(reconstructions, images)["perceptual_loss"])
    expected = []
    for both in zip(reconstructions, images, strict=True):
        total = 0.0
        blocks = zip(*(model._activations(each[None]) for each in both), strict=True)
        for x, y in list(blocks)[:4]:  # relu1_2, relu2_2, relu3_3, relu4_3
            grams = [torch.einsum("chw,dhw->cd", f[0].double(), f[0].double()) / f.numel() for f in (x, y)]
            total += float((grams[0] - grams[1]).square().sum())
        expected.append(total)
    assert min(expected) > 0
    torch.testing.assert_close(found["gram_loss"].item(), sum(expected) / 2, rtol=1e-5, atol=0)


def test_the_gram_loss_ignores_where_a_texture_is() -> None:
    model, (images, _) = narrow("vgg", gram=True), pair(size=64)
    moved = images.roll((16, 16), (2, 3))
    terms, others = model(moved, images), model(pair(size=64)[1] ** 2, images)
    assert terms["gram_loss"] < 0.1 * others["gram_loss"] and terms["perceptual_loss"] > 0.1 * others["perceptual_loss"]


def test_without_torchvision_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.models.resnet", None)
    assert "pip install --upgrade torch torchvision" in refused(load_perceptual, "resnet50")


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
    ("resnet50", RESNET50, "--perceptual_weights", "--perceptual none"),
])  # fmt: skip
def test_offline_weights_that_are_nowhere_are_one_line_with_file_place_and_the_way_out(
    kind: str, file: PublishedFile, flag: str, way_out: str, cache: Path
) -> None:
    """Some scripts have one of the flags only."""
    if kind == "lpips":
        torch.save(part(published(narrow(kind)), "features"), cache / TRUNK_NAME)
    said = refused(load_perceptual, kind, PUBLISHED, widths=NARROW, flag=flag)
    assert all(text in said for text in (str(file), str(cache), flag, f"({way_out}"))
    assert ("--perceptual" if kind == "lpips" else "--lpips_weights") not in said


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
