"""The perceptual distances against torchvision's VGG16 and the LPIPS package, and where weights are found."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lpips
import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor

from models import perceptual
from models.files.published import read_state_dict
from models.perceptual import PerceptualLoss, load_perceptual
from tests.models.helpers import assert_same_bits, some_images

NARROW = (4, 6, 8, 8, 8)
HEADS_FILE = Path(lpips.__file__).parent / "weights/v0.1/vgg.pth"
TRUNK_NAME = "vgg16-397923af.pth"
KINDS = pytest.mark.parametrize("kind", ["vgg", "lpips"])


def narrow(kind: str) -> PerceptualLoss:
    torch.manual_seed(0)
    model = PerceptualLoss(kind, NARROW)
    with torch.no_grad():
        for parameter in model.features.parameters():
            parameter.mul_(2)
        for parameter in model.heads.parameters():
            parameter.abs_()
    return model


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
def cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty torch.hub cache, and no heads in installed packages; downloading fails."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("downloads")

    if "with_packages" not in request.keywords:
        monkeypatch.setattr(perceptual, "_HEADS_IN_PACKAGES", {})
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    folder = tmp_path / "home" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def test_the_trunk_has_the_names_and_shapes_of_torchvisions_vgg16() -> None:
    with torch.device("meta"):
        expected = part(torchvision.models.vgg16().state_dict(), "features.")
        found = PerceptualLoss("vgg").state_dict()
    assert {name: tensor.shape for name, tensor in found.items()} == {n: t.shape for n, t in expected.items()}


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


def test_lpips_with_its_published_heads_equals_the_lpips_package(cache: Path) -> None:
    torch.manual_seed(0)
    torch.save(PerceptualLoss("vgg").state_dict(), cache / TRUNK_NAME)
    model = load_perceptual("lpips", HEADS_FILE)
    assert model is not None
    with torch.device("meta"):  # it has a classifier, too
        package = lpips.LPIPS(net="vgg", pnet_rand=True, pretrained=False, verbose=False)
    ours = published(model)
    trunk = {name: ours[f"features.{name.split('.', 2)[2]}"] for name in package.state_dict() if "slice" in name}
    package.load_state_dict({**trunk, **part(ours, "lin")}, strict=False, assign=True)
    images, reconstructions = pair(size=48)
    with torch.no_grad():
        expected = package(reconstructions, images, normalize=True).flatten()
    assert expected.min() > 1e-3
    torch.testing.assert_close(model.distances(reconstructions, images), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(model(reconstructions, images), expected.mean(), rtol=1e-5, atol=1e-7)


@KINDS
def test_an_image_decides_its_own_distance_which_is_zero_for_equal_ones_even_after_train(kind: str) -> None:
    model, (images, reconstructions) = narrow(kind).train(), pair(batch=3, size=16)
    assert not any(module.training for module in model.modules())
    assert model(images, images).item() == 0 == model(images.clone().requires_grad_(), images).item()
    apart = torch.cat([model.distances(x[None], y[None]) for x, y in zip(reconstructions, images, strict=True)])
    assert apart.min() > 0
    torch.testing.assert_close(model.distances(reconstructions, images), apart)


@KINDS
def test_the_network_learns_nothing_and_the_gradient_goes_to_the_reconstructions(kind: str) -> None:
    model, (images, reconstructions) = narrow(kind), pair()
    model(reconstructions.requires_grad_(), images.requires_grad_()).backward()
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert reconstructions.grad is not None and reconstructions.grad.abs().sum() > 0 and images.grad is None


@KINDS
def test_under_autocast_activations_are_rounded_and_distances_are_fp32(kind: str) -> None:
    model, (images, reconstructions) = narrow(kind), pair()
    types = []
    for layer in [*model.features, *model.heads]:
        if isinstance(layer, torch.nn.Conv2d):
            layer.register_forward_hook(lambda layer, inputs, output: types.append(output.dtype))
    reconstructions = reconstructions / 10  # dark: far more than rounding tells their activations apart
    expected = model.distances(reconstructions, images)
    assert set(types) == {torch.float32}
    types.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model.distances(reconstructions.requires_grad_(), images)
    assert types == [torch.bfloat16] * 2 * 13 + [torch.float32] * len(model.heads)
    assert rounded.dtype == torch.float32 and not torch.equal(rounded, expected)
    torch.testing.assert_close(rounded, expected, rtol=0.05, atol=0)  # bf16 has 8 bits, over 13 layers
    rounded.sum().backward()
    assert reconstructions.grad is not None and reconstructions.grad.dtype == torch.float32
    assert model.distances(reconstructions.bfloat16(), images).dtype == torch.float32


@KINDS
def test_grey_images_are_compared_as_grey_colour_images(kind: str) -> None:
    model, (images, reconstructions) = narrow(kind), pair(channels=1)
    expected = model(reconstructions.repeat(1, 3, 1, 1), images.repeat(1, 3, 1, 1))
    torch.testing.assert_close(model(reconstructions, images), expected)


@pytest.mark.parametrize(("channels", "size"), [(4, 32), (3, 15)])
def test_images_that_vgg_cannot_take_are_an_error(channels: int, size: int) -> None:
    images = some_images(channels=channels, size=size)
    with pytest.raises(ValueError, match=f"not {channels} of {size} x {size}; use larger images$"):
        narrow("vgg")(images, images)


def test_images_that_will_be_too_small_are_an_error_before_any_weights_are_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not 3 of 15 x 15; use larger images, or do without \(no --lpips_weights\)$"):
        load_perceptual("lpips", "mine.pth", side=15, flag="--lpips_weights")
    torch.save(published(narrow("vgg")), tmp_path / "mine.pth")
    assert load_perceptual("vgg", tmp_path / "mine.pth", side=16, widths=NARROW) is not None
    assert load_perceptual("none", side=15) is None


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


@pytest.mark.with_packages
@pytest.mark.parametrize("package", ["lpips", "torchmetrics"])
def test_the_heads_are_found_in_the_packages_that_carry_them(
    package: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if package == "torchmetrics":  # which is not installed here
        folder = tmp_path / "site" / "torchmetrics"
        (folder / "functional" / "image" / "lpips_models").mkdir(parents=True)
        (folder / "__init__.py").write_text("raise AssertionError('imported')")
        shutil.copy(HEADS_FILE, folder / "functional" / "image" / "lpips_models")
        monkeypatch.syspath_prepend(tmp_path / "site")
        monkeypatch.setattr(perceptual, "_HEADS_IN_PACKAGES", {package: perceptual._HEADS_IN_PACKAGES[package]})
    torch.manual_seed(0)
    trunk = part(published(PerceptualLoss("lpips")), "features")
    torch.save(trunk, cache / TRUNK_NAME)
    found = load_perceptual("lpips")
    assert found is not None
    for number, weight in enumerate(torch.load(HEADS_FILE, map_location="cpu", weights_only=True).values()):
        assert torch.equal(found.heads[number].weight, weight)


@pytest.mark.parametrize(("network", "said"), [
    ("vgg16", "vgg16-397923af.pth"), ("inception", "6726825d"), ("i3d", "fid-metrics"), ("", ""),
])  # fmt: skip
def test_a_missing_file_of_a_published_network_says_where_it_comes_from(
    network: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"^cannot read .*none\.pt: ") as error:
        read_state_dict(tmp_path / "none.pt", network=network)
    assert said in str(error.value) and ("published" in str(error.value)) == bool(network)


@KINDS
@pytest.mark.parametrize("flag", ["--lpips_weights", "--perceptual_weights"])
def test_a_named_file_that_is_missing_says_where_the_weights_come_from(kind: str, flag: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^{flag}: there is no .*nope\.pt ") as error:
        load_perceptual(kind, tmp_path / "nope.pt", widths=NARROW, flag=flag)
    said = str(error.value)
    assert "https://download.pytorch.org/models/vgg16-397923af.pth" in said and "SHA-256 begins with 397923af" in said
    assert ("pip install lpips" in said) == (kind == "lpips") and "\n" not in said


@KINDS
def test_one_named_file_may_hold_everything_and_goes_before_the_cache(kind: str, tmp_path: Path, cache: Path) -> None:
    model, file = narrow(kind), tmp_path / "mine.safetensors"
    torch.save({name: tensor + 1 for name, tensor in published(model).items()}, cache / TRUNK_NAME)
    # Even where the cache would do.
    with pytest.raises(ValueError, match=r"^--perceptual_weights: there is no .*mine\.safetensors "):
        load_perceptual(kind, file, widths=NARROW)
    save_file(published(model), file)
    assert_same_bits(load_perceptual(kind, str(file), "cpu", widths=NARROW), model)


def test_a_file_of_the_published_shapes_fits_and_loading_draws_no_random_numbers(tmp_path: Path) -> None:
    with torch.device("meta"):
        shapes = part(torchvision.models.vgg16().state_dict(), "features.")
    weights = {name: torch.full(shape.shape, 0.5, dtype=torch.float16) for name, shape in shapes.items()}
    torch.save(weights, tmp_path / TRUNK_NAME)
    before = torch.get_rng_state()
    model = load_perceptual("vgg", tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert model is not None and not model.training and not any(p.requires_grad for p in model.parameters())
    assert all(torch.equal(p, torch.full_like(p, 0.5)) and p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize(("kind", "file"), [("vgg", TRUNK_NAME), ("lpips", "vgg_lpips.pth or vgg.pth")])
def test_weights_that_are_nowhere_are_one_line_with_file_places_and_the_way_out(
    kind: str, file: str, cache: Path
) -> None:
    if kind == "lpips":
        torch.save(part(published(narrow(kind)), "features"), cache / TRUNK_NAME)
    ways_out = {"--perceptual_weights": "--perceptual none", "--lpips_weights": "no --lpips_weights"}
    flag = "--lpips_weights" if kind == "lpips" else "--perceptual_weights"  # some scripts have one of them only
    with pytest.raises(ValueError, match=rf"name it \({flag}\), or do without \({ways_out.pop(flag)}\)$") as error:
        load_perceptual(kind, widths=NARROW, flag=flag)
    assert not any(other in str(error.value) for other in (*ways_out, *ways_out.values()))
    source = "pip install lpips" if kind == "lpips" else "https://download.pytorch.org/models/vgg16-397923af.pth"
    assert all(text in str(error.value) for text in (file, str(cache), source)) and "\n" not in str(error.value)


def test_weights_of_another_network_are_an_error_that_names_the_first_that_differs_or_the_file(tmp_path: Path) -> None:
    torch.save(published(narrow("vgg")), tmp_path / "x.pth")
    with pytest.raises(ValueError, match=r"^--perceptual_weights: the weights of vgg are .*features\.0\.weight"):
        load_perceptual("vgg", tmp_path / "x.pth")
    shutil.copy(HEADS_FILE, tmp_path / "x.pth")
    with pytest.raises(ValueError, match=r"are in none of .*x\.pth.*: VGG16's \(vgg16-397923af\.pth\)"):
        load_perceptual("vgg", tmp_path / "x.pth", widths=NARROW)
