"""The perceptual distances against torchvision's VGG16 and the LPIPS package, and where weights are found."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lpips
import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

from models.perceptual import PerceptualLoss, load_perceptual

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


def some_images(seed: int = 0, batch: int = 2, channels: int = 3, size: int = 32) -> Tensor:
    return torch.rand(batch, channels, size, size, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty torch.hub cache; downloading fails."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("downloads")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    folder = tmp_path / "home" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


# Values.


def test_the_trunk_has_the_names_and_shapes_of_torchvisions_vgg16() -> None:
    with torch.device("meta"):
        expected = part(torchvision.models.vgg16().state_dict(), "features.")
        found = PerceptualLoss("vgg").state_dict()
    assert {name: tensor.shape for name, tensor in found.items()} == {n: t.shape for n, t in expected.items()}


def test_vgg_is_the_mean_squared_difference_of_torchvisions_last_relu() -> None:
    model, images, reconstructions = narrow("vgg"), some_images(), some_images(1)
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


def lpips_package(model: PerceptualLoss) -> nn.Module:
    """The package's network with the weights of this one. Made without memory first: it has a classifier, too."""
    with torch.device("meta"):
        reference = lpips.LPIPS(net="vgg", pnet_rand=True, pretrained=False, verbose=False)
    ours = published(model)
    trunk = {name: ours[f"features.{name.split('.', 2)[2]}"] for name in reference.state_dict() if "slice" in name}
    reference.load_state_dict({**trunk, **part(ours, "lin")}, strict=False, assign=True)
    return reference


def test_lpips_with_its_published_heads_equals_the_lpips_package(cache: Path) -> None:
    torch.manual_seed(0)
    torch.save(PerceptualLoss("vgg").state_dict(), cache / TRUNK_NAME)
    model = load_perceptual("lpips", HEADS_FILE)
    assert model is not None
    images, reconstructions = some_images(size=48), some_images(1, size=48)
    with torch.no_grad():
        expected = lpips_package(model)(reconstructions, images, normalize=True).flatten()
    assert expected.min() > 1e-3
    torch.testing.assert_close(model.distances(reconstructions, images), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(model(reconstructions, images), expected.mean(), rtol=1e-5, atol=1e-7)


@KINDS
def test_identical_images_are_at_distance_zero_even_after_train(kind: str) -> None:
    model, images = narrow(kind).train(), some_images()
    assert not any(module.training for module in model.modules())
    assert model(images, images).item() == 0 == model(images.clone().requires_grad_(), images).item()
    assert model(some_images(1), images).item() > 0


@KINDS
def test_an_image_decides_only_its_own_distance(kind: str) -> None:
    model, images, reconstructions = narrow(kind), some_images(batch=3), some_images(1, batch=3)
    apart = [model.distances(x[None], y[None]) for x, y in zip(reconstructions, images, strict=True)]
    torch.testing.assert_close(model.distances(reconstructions, images), torch.cat(apart))


@KINDS
def test_the_network_learns_nothing_and_the_gradient_goes_to_the_reconstructions(kind: str) -> None:
    model = narrow(kind)
    images, reconstructions = some_images().requires_grad_(), some_images(1).requires_grad_()
    model(reconstructions, images).backward()
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert reconstructions.grad is not None and reconstructions.grad.abs().sum() > 0 and images.grad is None


@KINDS
def test_autocast_changes_nothing(kind: str) -> None:
    model, images, reconstructions = narrow(kind), some_images(), some_images(1)
    expected = model.distances(reconstructions, images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model.distances(reconstructions, images), expected)
    assert model.distances(reconstructions.bfloat16(), images).dtype == torch.float32


@KINDS
def test_grey_images_are_compared_as_grey_colour_images(kind: str) -> None:
    model, images, reconstructions = narrow(kind), some_images(channels=1), some_images(1, channels=1)
    expected = model(reconstructions.repeat(1, 3, 1, 1), images.repeat(1, 3, 1, 1))
    torch.testing.assert_close(model(reconstructions, images), expected)


@pytest.mark.parametrize(("channels", "size"), [(4, 32), (3, 15)])
def test_images_that_vgg_cannot_take_are_an_error(channels: int, size: int) -> None:
    images = some_images(channels=channels, size=size)
    with pytest.raises(ValueError, match=f"not {channels} of {size} x {size}; use larger images, or do without"):
        narrow("vgg")(images, images)


def test_images_that_will_be_too_small_are_an_error_before_any_weights_are_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not 3 of 15 x 15; .*no --lpips_weights"):
        load_perceptual("vgg", "mine.pth", side=15)
    torch.save(published(narrow("vgg")), tmp_path / "mine.pth")
    assert load_perceptual("vgg", tmp_path / "mine.pth", side=16, widths=NARROW) is not None
    assert load_perceptual("none", side=15) is None


def test_sixteen_pixels_are_enough() -> None:
    for kind in ("vgg", "lpips"):
        assert narrow(kind)(some_images(size=16), some_images(1, size=16)).item() > 0


# Where weights are found.


def save_old(content: Any, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


def same(found: PerceptualLoss | None, expected: PerceptualLoss) -> bool:
    if found is None:
        return False
    ours, theirs = found.state_dict(), expected.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("save", [torch.save, save_old], ids=["zip", "old"])
def test_weights_come_from_the_cache_where_none_are_named(save: Callable[..., None], cache: Path) -> None:
    model = narrow("lpips")
    save({**part(published(model), "features"), "classifier.0.weight": torch.zeros(2)}, cache / TRUNK_NAME)
    save(part(published(model), "lin"), cache / "vgg.pth")
    assert same(load_perceptual("lpips", widths=NARROW), model)
    assert same(load_perceptual("vgg", widths=NARROW), narrow("vgg"))


def test_weights_come_from_a_folder_under_their_published_names(tmp_path: Path) -> None:
    model = narrow("lpips")
    torch.save(part(published(model), "features"), tmp_path / TRUNK_NAME)
    torch.save(part(published(model), "lin"), tmp_path / "vgg_lpips.pth")
    assert same(load_perceptual("lpips", tmp_path, widths=NARROW), model)


def test_one_safetensors_file_may_hold_everything(tmp_path: Path) -> None:
    model = narrow("lpips")
    save_file(published(model), tmp_path / "lpips.safetensors")
    assert same(load_perceptual("lpips", str(tmp_path / "lpips.safetensors"), "cpu", widths=NARROW), model)


def test_a_named_file_goes_before_the_cache(tmp_path: Path, cache: Path) -> None:
    model, other = narrow("vgg"), narrow("vgg")
    torch.save({name: tensor + 1 for name, tensor in published(other).items()}, cache / TRUNK_NAME)
    torch.save(published(model), tmp_path / "mine.pth")
    assert same(load_perceptual("vgg", tmp_path / "mine.pth", widths=NARROW), model)


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
    with pytest.raises(ValueError, match=r"--perceptual none\)$") as error:
        load_perceptual(kind, widths=NARROW)
    assert file in str(error.value) and str(cache) in str(error.value) and "\n" not in str(error.value)


def test_a_named_file_that_is_not_there_is_an_error_even_where_the_cache_would_do(cache: Path) -> None:
    torch.save(published(narrow("vgg")), cache / TRUNK_NAME)
    with pytest.raises(ValueError, match=r"^there is no mine\.pth "):
        load_perceptual("vgg", "mine.pth", widths=NARROW)


def test_weights_of_another_network_are_an_error_with_the_first_that_differs(tmp_path: Path) -> None:
    torch.save(published(narrow("vgg")), tmp_path / "x.pth")
    with pytest.raises(ValueError, match=r"^the weights for --perceptual vgg are .* features\.0\.weight should have"):
        load_perceptual("vgg", tmp_path / "x.pth")


def test_a_file_without_the_weights_is_an_error_that_names_it(tmp_path: Path) -> None:
    shutil.copy(HEADS_FILE, tmp_path / "x.pth")
    with pytest.raises(ValueError, match=r"are in none of .*x\.pth.*: VGG16's \(vgg16-397923af\.pth\)"):
        load_perceptual("vgg", tmp_path / "x.pth", widths=NARROW)
