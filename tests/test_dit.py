"""reference/dit.py: its sampler against a flow that is known in closed form, its loss at the start, and a run from
photos to pictures."""

import json
import math
import subprocess
import sys

import pytest
import torch
from PIL import Image

from reference import dit
from tests.scripts import ROOT


def test_following_the_exact_velocity_of_a_normal_distribution_gives_its_samples():
    """Between noise e and normal x with mean m and deviation s, the velocity E[e - x | x_t] moves e to m + s e."""
    mean, deviation = 2.0, 0.3

    def velocity(x, times):
        t = times[:, None]
        variance = (1 - t) ** 2 * deviation**2 + t**2
        deflection = (x - (1 - t) * mean) / variance
        return t * deflection - (mean + (1 - t) * deviation**2 * deflection)

    noise = torch.randn(1000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    samples = dit.sample(velocity, noise, steps=200)
    torch.testing.assert_close(samples, mean + deviation * noise, atol=2e-3, rtol=0)


def small():
    torch.manual_seed(0)
    settings = dit.Settings(dim=32, depth=2, heads=2, batch_size=8, max_steps=60, learning_rate=3e-3, ema_decay=0.9)
    return settings, dit.DiT(settings, (2, 4, 4), num_classes=3)


def test_a_new_model_predicts_nothing_so_that_its_loss_is_the_mean_square_of_noise_minus_latents():
    _, model = small()
    x = torch.randn(4, 2, 4, 4)
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(16, 2, 4, 4, generator=generator) for _ in x]
    expected = torch.stack([(e - latent).square().mean() for e, latent in zip(noise, x, strict=True)]).mean()
    loss = dit.held_out_loss(model, x, torch.tensor([0, 1, 2, 3]))
    assert loss == pytest.approx(expected.item(), rel=1e-5) and loss == pytest.approx(2, abs=0.3)


def test_it_learns_what_classes_look_like():
    """Each class is one latent: with its class, the loss on new noise falls far below that of a guess."""
    settings, model = small()
    classes, labels = 2 * torch.randn(3, 2, 4, 4), torch.arange(3)
    ema = dit.copy.deepcopy(model)

    def batches():
        for step in range(settings.max_steps):
            rows = (torch.arange(8) + step) % 3
            yield classes[rows], labels[rows]

    before = dit.held_out_loss(model, classes, labels)
    losses = [loss.item() for loss in dit.train(model, ema, batches(), settings)]
    assert len(losses) == 60 and dit.held_out_loss(ema, classes, labels) < 0.7 * before
    right, wrong = (dit.held_out_loss(ema, classes, each) for each in (labels, labels.roll(1)))
    assert right < wrong


def test_tokens_see_one_another_and_places_are_told_apart():
    _, model = small()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x, times, labels = torch.randn(1, 2, 4, 4), torch.tensor([0.5]), torch.tensor([1])
    changed = x.clone()
    changed[..., 0, 0] += 1
    difference = (model(changed, times, labels) - model(x, times, labels)).abs().amax(1)[0]
    assert difference.min() > 0
    equal = model(torch.ones(1, 2, 4, 4), times, labels)
    assert (equal[..., 0, 0] - equal[..., 3, 3]).abs().max() > 1e-3


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    """Latents of a small model, as encode.py writes them."""
    folder = tmp_path_factory.mktemp("dit")
    model = ["--image_size", "16", "--dim", "8", "--num_layers", "2", "--quantizer", "kl", "--discr_layers", "2"]
    quick = ["--max_steps", "1", "--valid_fraction", "0", "--num_workers", "0", "--output_dir", str(folder / "run")]
    for command in (
        ["train_vqgan.py", "--image_folder", "demo:shapes:16", *model, *quick],
        ["encode.py", "--model", str(folder / "run"), "--image_folder", "demo:shapes:24", "--output",
         str(folder / "latents"), "--with_flip", "--num_workers", "0"],
    ):  # fmt: skip
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
    return folder


def test_from_a_folder_of_latents_to_a_picture(latents, tmp_path):
    size = ["--dim", "32", "--depth", "1", "--heads", "2", "--max_steps", "3", "--sampling_steps", "2"]
    command = [sys.executable, ROOT / "reference" / "dit.py", latents / "latents", "--model", latents / "run", *size]
    finished = subprocess.run([*map(str, command)], cwd=tmp_path, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    values = json.loads((tmp_path / "dit.json").read_text())
    assert "held-out loss" in finished.stdout and math.isfinite(values["held_out_loss"]) and values["images"] == 24
    with Image.open(tmp_path / "dit.png") as picture:
        assert picture.size == (2 * 16, 16)  # of the two held-out images
    plain, mirrored, _ = dit.read_latents(str(latents / "latents"))
    assert plain.shape == mirrored.shape == (24, 4, 4, 4) and not torch.equal(plain, mirrored)


@pytest.mark.parametrize(
    "said",
    [{"latent": "moments"}, {"normalize": "channels"}, {"normalize": "scale"}, {"scaled": True}, {"latent": None}],
)
def test_moments_and_latents_that_would_be_normalised_twice_are_refused_in_one_line(said, tmp_path):
    (tmp_path / "index.json").write_text(json.dumps({"latent": "mean", **said}))
    with pytest.raises(SystemExit, match="holds codes, moments or normalised latents"):
        dit.read_latents(str(tmp_path))
