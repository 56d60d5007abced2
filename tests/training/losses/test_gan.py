"""The two steps of a GAN update against the plain loop on the whole batch, one graph and two optimizers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv3d_weight

from tandem.config.models.autoencoders import VQGANConfig
from tandem.distributed import Backend
from tandem.models import VQGAN, Discriminator, VideoDiscriminator
from tandem.training.losses import gan
from tandem.training.losses.adversarial import (
    LeCam,
    gradient_penalty,
    hinge_discriminator_loss,
    zero_centred_penalty,
)
from tandem.training.losses.gan import GANLoss
from tests.processes import on_backends, single

pytestmark = pytest.mark.usefixtures("no_gpu")

BATCH = 8
RULES = {
    "gan_loss": "hinge", "gan_weight": "adaptive", "gan_weight_max": 1e4, "gan_weight_scale": 1.0,
    "penalty": "one_centred", "penalty_weight": 10.0, "lecam_weight": 0.0, "lecam_decay": 0.999,
    "perceptual_loss_weight": 0.7, "gram_loss_weight": 3.0, "discr_start_step": 0, "apply_grad_penalty_every": 1,
}  # fmt: skip
RATE = 1e-2


@pytest.fixture(params=[1, 4], ids=["whole", "accumulation 4"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with single(batch_size=BATCH, grad_accum_steps=request.param) as backend:
        yield backend


def models(quantizer: str = "lfq") -> tuple[VQGAN, Discriminator]:
    torch.manual_seed(0)
    size = 256 if quantizer == "fsq" else 16  # fewer codes than vectors: twins would be a matter of rounding
    sizes = {"codebook_size": size, "image_size": 16, "dim": 8, "num_layers": 2}
    config = VQGANConfig(quantizer=quantizer, inv_temperature=1.0, **sizes)
    generator = VQGAN(config)
    return generator, Discriminator.from_dict({"dim": 8, "layers": 2})


class Game(GANLoss):
    """Makes updates as the scripts do, and keeps the means of what is logged of one."""

    def __init__(self, backend: Backend, generator: nn.Module, discriminator: nn.Module, rules: Any, **given: Any):
        # SGD without momentum: weights change by the gradient, so that a wrong factor shows.
        self.g = backend.wrap(generator, torch.optim.SGD(generator.parameters(), lr=RATE), name="g")
        self.d = backend.wrap(discriminator, torch.optim.SGD(discriminator.parameters(), lr=RATE), name="d")
        self.rules = SimpleNamespace(**{**RULES, **rules})
        options = {"images": lambda micro: micro["x"], "log": self.add, **given}
        super().__init__(self.rules, self.g, self.d, backend.processes, **options)
        self.means: dict[str, Tensor] = {}

    def add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.means[name] = self.means.get(name, 0) + value.detach().double() / self.g.grad_accum_steps

    def generate(self, batch: Mapping[str, Any], *, step: int = 0) -> Any:
        """An update of the generator, with weight 0.5 of the losses of codes."""
        self.means, self.fakes = {}, []
        for micro_batch in self.micro_batches(batch, step):
            out = self.g(micro_batch.images)
            recon, adversarial, weight = self(out, micro_batch)
            self.g.backward(recon + weight * adversarial + 0.5 * sum(out.losses.values()))
            self.fakes.append(out.reconstruction.detach())
        update = self.g.step()
        self.g.module.quantizer.after_step(step, 0, update.skipped)
        return update


def make_game(backend: Backend, generator: VQGAN, discriminator: Discriminator, **rules: Any) -> Game:
    return Game(backend, generator, discriminator, rules, pixel_loss=F.l1_loss, perceptual_loss=None)


def play(game: Game, images: Tensor, *, step: int = 0) -> dict[str, Tensor]:
    game.generate({"x": images}, step=step)
    game.update_discriminator({"x": images}, step, game.fakes)
    return game.means


def plain_update(generator: VQGAN, discriminator: Discriminator, images: Tensor, lecam: LeCam, **rules: Any) -> Tensor:
    """What every tutorial writes, on the whole batch: returns the adaptive weight."""
    discriminator.requires_grad_(False)
    out = generator(images)
    nll, gan = F.l1_loss(out.reconstruction, images), -discriminator(out.reconstruction).mean()
    last = generator.last_layer.weight
    (of_nll,), (of_gan,) = (torch.autograd.grad(loss, last, retain_graph=True) for loss in (nll, gan))
    weight = of_nll.norm() / of_gan.norm() if rules.get("gan_weight", "adaptive") == "adaptive" else rules["gan_weight"]
    (nll + weight * gan + 0.5 * sum(out.losses.values())).backward()
    descend(generator)
    discriminator.requires_grad_(True)
    fake = out.reconstruction.detach()
    real_logits, fake_logits = discriminator(images), discriminator(fake)
    loss = F.relu(1 - real_logits).mean() + F.relu(1 + fake_logits).mean()
    loss = loss + rules.get("lecam_weight", 0) * lecam(real_logits, fake_logits)
    lecam.update(real_logits.mean(), fake_logits.mean())
    (loss + 10 * gradient_penalty(discriminator, images)).backward()
    descend(discriminator)
    return torch.as_tensor(weight)


def descend(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.data -= RATE * parameter.grad
            parameter.grad = None


def assert_same_change(start: nn.Module, ours: nn.Module, expected: nn.Module) -> None:
    for name, before in start.state_dict().items():
        ours_now, reference = ours.state_dict()[name], expected.state_dict()[name]
        if not before.is_floating_point():
            assert torch.equal(ours_now, reference), name
            continue
        largest = (reference - before).abs().max().item()
        # A wrong factor is a quarter at least. Rounding is 1e-4 of a change of 1e-3 in a weight of 0.1, and a kink of a
        # LeakyReLU or of |x| that it crosses makes more of it.
        tolerance = 1e-2 * max(largest, 1e-4)
        torch.testing.assert_close(ours_now, reference, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("quantizer", ["lfq", "vq", "fsq", "bsq", "ibq"])
def test_updates_equal_the_plain_loop_on_the_whole_batch(backend: Backend, quantizer: str) -> None:
    generator, discriminator = models(quantizer)
    start, plain = (copy.deepcopy((generator, discriminator)) for _ in range(2))
    game = make_game(backend, generator, discriminator, lecam_weight=0.3)
    lecam = LeCam(0.999)
    for step in range(3):
        images = torch.rand(BATCH, 3, 16, 16, generator=torch.Generator().manual_seed(step))
        means = play(game, images, step=step)
        weight = plain_update(*plain, images, lecam, lecam_weight=0.3)
        plain[0].quantizer.after_step(step, 0)
        torch.testing.assert_close(means["gan_weight"].float(), weight.detach(), rtol=1e-4, atol=0)
    assert_same_change(start[0], generator, plain[0])
    assert_same_change(start[1], discriminator, plain[1])
    torch.testing.assert_close(game.lecam.state_dict(), lecam.state_dict(), rtol=1e-5, atol=1e-7)


def test_two_processes_make_the_updates_of_the_whole_batch() -> None:
    start = models("fsq")
    plain, *of_ranks = (copy.deepcopy(start) for _ in range(3))
    batches = [torch.rand(BATCH, 3, 16, 16, generator=torch.Generator().manual_seed(step)) for step in range(2)]

    def work(backend: Backend) -> list[Tensor]:
        process = backend.processes
        game = make_game(backend, *of_ranks[process.rank], lecam_weight=0.3)
        mine = slice(process.rank * BATCH // 2, (process.rank + 1) * BATCH // 2)
        return [play(game, images[mine], step=step)["gan_weight"] for step, images in enumerate(batches)]

    weights = on_backends(2, work, batch_size=BATCH)
    lecam = LeCam(0.999)
    for step, images in enumerate(batches):
        weight = plain_update(*plain, images, lecam, lecam_weight=0.3).detach()
        for of_rank in weights:
            torch.testing.assert_close(of_rank[step].float(), weight, rtol=1e-4, atol=0)
    for of_rank in of_ranks:
        assert_same_change(start[0], of_rank[0], plain[0])
        assert_same_change(start[1], of_rank[1], plain[1])


def test_in_parts_mean_gradients_and_averages_have_the_same_bits_with_two_three_or_six_parts_to_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Means of fp32 numbers often lie half-way between two fp32 numbers, where one more rounding chooses the other."""
    start = models("fsq")
    generator = torch.Generator().manual_seed(1)  # with it, two of the means lie half-way
    batches = [torch.rand(6, 3, 16, 16, generator=generator) for _ in range(20)]
    mean_gradients: set[bytes] = set()

    def record(recon_gradient: Tensor, gan_gradient: Tensor, maximum: float) -> Tensor:
        mean_gradients.add(torch.cat([recon_gradient.flatten(), gan_gradient.flatten()]).numpy().tobytes())
        return torch.ones(())

    monkeypatch.setattr(gan, "adaptive_weight", record)

    def work(backend: Backend) -> dict[str, Tensor]:
        processes, size = backend.processes, 6 // backend.processes.world_size
        game = make_game(backend, *copy.deepcopy(start), lecam_weight=0.3)
        for step, images in enumerate(batches):
            play(game, images[processes.rank * size : (processes.rank + 1) * size], step=step)
        return dict(game.lecam.state_dict())

    averages = []
    for world_size in (1, 2, 3):
        averages += on_backends(world_size, work, batch_size=6, batch_parts=6)
        assert len(mean_gradients) == len(batches), world_size
    for others in averages[1:]:
        torch.testing.assert_close(others, averages[0], rtol=0, atol=0)


class Reconstructor(nn.Module):
    """Videos (b, 3, f, h, w) to videos, by a causal convolution after another one. It has no codes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(3, 4, (1, 3, 3), padding=(0, 1, 1)), nn.Conv3d(4, 3, 3, padding=(0, 1, 1))
        self.quantizer = SimpleNamespace(needs_stats=False, after_step=lambda *_: None)

    def forward(self, videos: Tensor) -> SimpleNamespace:
        features = self.first(videos).tanh()
        reconstruction = self.last(F.pad(features, (0, 0, 0, 0, 2, 0)))
        codes = torch.zeros(len(videos), 1)
        return SimpleNamespace(reconstruction=reconstruction, codes=codes, losses={}, features=features)

    def last_layer_gradient(self, features: Tensor, gradient: Tensor) -> Tensor:
        before = F.pad(features, (0, 0, 0, 0, 2, 0))
        return conv3d_weight(before, (3, 4, 3, 3, 3), gradient, padding=(0, 1, 1)).flatten()


def frame_errors(fake: Tensor, videos: Tensor, frames: Tensor) -> dict[str, Tensor]:
    """Those of one frame of each clip, by the names of the terms of a perceptual loss."""
    rows = torch.arange(len(videos))
    pair = fake[rows, :, frames], videos[rows, :, frames]
    return {"perceptual_loss": F.l1_loss(*pair), "gram_loss": F.mse_loss(*pair)}


@pytest.mark.parametrize("penalty", ["one_centred", "zero_centred"])
def test_updates_on_videos_and_images_equal_the_plain_loop_on_the_whole_batch(backend: Backend, penalty: str) -> None:
    """Three heads, of which those of clips are idle in the first of three updates, on images; the frames are given."""
    torch.manual_seed(0)
    generator, discriminator = Reconstructor(), VideoDiscriminator.from_dict({"dim": 4, "layers": 2})
    start, (plain_g, plain_d) = (copy.deepcopy((generator, discriminator)) for _ in range(2))
    game = Game(
        backend, generator, discriminator,
        {"lecam_weight": 0.3, "penalty": penalty, "penalty_weight": 0.2, "apply_grad_penalty_every": 2},
        loss_inputs=lambda micro, step: {"frames": (micro["positions"] + step) % micro["x"].shape[2]},
        pixel_loss=F.mse_loss, perceptual_loss=frame_errors,
    )  # fmt: skip
    lecam = LeCam(0.999, heads=3)
    for step, length in enumerate((1, 5, 5)):
        x = torch.rand(BATCH, 3, length, 16, 16, generator=torch.Generator().manual_seed(step))
        batch, frames = {"x": x, "positions": torch.arange(BATCH)}, (torch.arange(BATCH) + step) % length
        game.generate(batch, step=step)
        game.update_discriminator(batch, step, game.fakes)

        fake = plain_g(x).reconstruction
        terms = frame_errors(fake, x, frames)
        nll = F.mse_loss(fake, x) + 0.7 * terms["perceptual_loss"] + 3.0 * terms["gram_loss"]
        gan = torch.stack([-logits.mean() for logits in plain_d(fake, frames)]).sum()
        norms = [torch.autograd.grad(of, plain_g.last.weight, retain_graph=True)[0].norm() for of in (nll, gan)]
        weight = (norms[0] / norms[1]).detach()
        torch.testing.assert_close(game.means["gan_weight"].float(), weight, rtol=1e-4, atol=0)
        (nll + weight * gan).backward(inputs=list(plain_g.parameters()))
        descend(plain_g)
        fake, real_logits = fake.detach(), plain_d(x, frames)
        fake_logits = plain_d(fake, frames)
        loss = hinge_discriminator_loss(real_logits, fake_logits) + 0.3 * lecam(real_logits, fake_logits)
        means = torch.full((2, 3), torch.nan)
        for row, of_heads in zip(means, (real_logits, fake_logits), strict=True):
            row[: len(of_heads)] = torch.stack([logits.detach().mean() for logits in of_heads])
        lecam.update(*means)
        if step % 2 == 0 and penalty == "one_centred":
            loss = loss + 0.2 * gradient_penalty(lambda y: plain_d(y, frames), x)  # noqa: B023
        elif step % 2 == 0:
            both = frames.repeat(2)
            loss = loss + 0.2 * zero_centred_penalty(lambda y: plain_d(y, both), x, fake)  # noqa: B023
        loss.backward()
        descend(plain_d)
    assert_same_change(start[0], generator, plain_g)
    assert_same_change(start[1], discriminator, plain_d)
    torch.testing.assert_close(game.lecam.state_dict(), lecam.state_dict(), rtol=1e-5, atol=1e-7)
    assert game.lecam.mass[0] > game.lecam.mass[1], "the heads of clips were idle once"


def test_a_fixed_weight_is_used_times_its_scale(backend: Backend) -> None:
    generator, discriminator = models()
    start, plain = (copy.deepcopy((generator, discriminator)) for _ in range(2))
    images = torch.rand(BATCH, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    play(make_game(backend, generator, discriminator, gan_weight=0.5, gan_weight_scale=0.5), images)
    plain_update(*plain, images, LeCam(), gan_weight=0.25)
    assert_same_change(start[0], generator, plain[0])


def test_an_update_that_is_skipped_leaves_the_codebook_alone(backend: Backend) -> None:
    generator, discriminator = models("vq")
    game = make_game(backend, generator, discriminator, discr_start_step=2)
    game.generate({"x": torch.rand(BATCH, 3, 16, 16)})
    before = {name: tensor.clone() for name, tensor in generator.state_dict().items()}
    broken = torch.rand(BATCH, 3, 16, 16)
    broken[-1, 0, 0, 0] = torch.nan
    update = game.generate({"x": broken}, step=1)
    assert bool(update.skipped)
    torch.testing.assert_close(dict(generator.state_dict()), before, rtol=0, atol=0)


def test_an_update_that_is_skipped_leaves_the_averages_of_lecam_alone(backend: Backend) -> None:
    """Its logits are finite: with fp16, gradients alone overflow while the scale of the loss is searched for."""
    generator, discriminator = models()
    game = make_game(backend, generator, discriminator, lecam_weight=0.3)
    play(game, torch.rand(BATCH, 3, 16, 16))
    before = {name: average.clone() for name, average in game.lecam.state_dict().items()}
    discriminator.to_logits[0].weight.register_hook(lambda gradient: gradient * torch.inf)
    batch = {"x": torch.rand(BATCH, 3, 16, 16)}
    game.generate(batch, step=1)
    assert bool(game.update_discriminator(batch, 1, game.fakes).skipped)
    assert before["mass"] > 0
    torch.testing.assert_close(dict(game.lecam.state_dict()), before, rtol=0, atol=0)
