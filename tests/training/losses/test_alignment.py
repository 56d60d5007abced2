"""The alignment of latents with a vision model: its two terms by hand, and updates against the plain loop."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.distributed import Backend
from tandem.models import VQGAN, VideoTokenizer
from tandem.training.losses.alignment import Alignment, alignment_terms
from tandem.training.losses.gan import MicroBatch
from tests.processes import single

pytestmark = pytest.mark.usefixtures("no_gpu")

SIDE, BATCH, RATE = 16, 4, 0.1
MARGINS = (0.3, 0.1)
LAYERS = "residual,compress_space,compress_space,compress_time"


class Colours(nn.Module):
    """A vision model of which one knows everything: a feature has the mean colours of its patch, and their squares."""

    width, seen = 6, None

    def forward(self, images: Tensor, rows: int, columns: int) -> Tensor:
        self.seen = images
        means = F.adaptive_avg_pool2d(images, (rows, columns)) - 0.5
        return torch.cat([means, means.square()], dim=1)


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def model(quantizer: str) -> VQGAN:
    torch.manual_seed(0)
    sizes = {} if quantizer == "kl" else {"codebook_size": 16}
    return VQGAN.from_dict({"image_size": SIDE, "dim": 8, "num_layers": 2, "quantizer": quantizer, **sizes})


def tokenizer() -> VideoTokenizer:
    torch.manual_seed(0)
    return VideoTokenizer.from_dict({"image_size": SIDE, "layers": LAYERS, "init_dim": 8, "codebook_size": 64})


def aligned(
    backend: Backend, generator: nn.Module, log: Any = lambda **values: None, *, weight: float | None = None
) -> tuple[Any, Alignment]:
    """With an adaptive `weight`, or with the script's."""
    engine = backend.wrap(generator, torch.optim.SGD(generator.parameters(), lr=RATE), name="generator")
    config = SimpleNamespace(
        seed=0, align_cosine_margin=MARGINS[0], align_distance_margin=MARGINS[1], align_adaptive=weight is not None,
        align_weight=weight,
    )  # fmt: skip
    sgd = lambda projection: torch.optim.SGD(projection.parameters(), lr=RATE)  # noqa: E731
    return engine, Alignment(config, backend, engine, Colours(), sgd, log)


def test_the_terms_are_means_over_places_and_over_pairs_of_places_of_each_image() -> None:
    z, f = some(2, 5, 2, 3), some(2, 5, 2, 3, seed=1)
    cosine, distance, count = 0.0, 0.0, 0
    for ours, theirs in zip(z.flatten(2).mT, f.flatten(2).mT, strict=True):  # (6, 5) of an image
        for place in range(6):
            cosine += max(0, 1 - MARGINS[0] - F.cosine_similarity(ours[place], theirs[place], dim=0).item()) / 12
            for other in range(6):
                of_z, of_f = (F.cosine_similarity(x[place], x[other], dim=0).item() for x in (ours, theirs))
                distance += max(0, abs(of_z - of_f) - MARGINS[1])
                count += 1
    assert [term.item() for term in alignment_terms(z, f, *MARGINS)] == pytest.approx([cosine, distance / count])


def test_equal_directions_cost_nothing_opposite_ones_twice_and_relations_do_not_ask_for_directions() -> None:
    f = some(2, 5, 3, 3)
    assert alignment_terms(2 * f, f, 0.0, 1e-6) == (pytest.approx(0, abs=1e-6), 0)
    assert alignment_terms(-f, f, 0.25, 1e-6) == (pytest.approx(1.75), 0)
    rotation = torch.linalg.qr(some(5, 5, seed=2))[0]
    cosine, distance = alignment_terms(torch.einsum("ij,bjhw->bihw", rotation, f), f, 0.0, 1e-5)
    assert cosine > 0.1 and distance == 0


@pytest.mark.parametrize("steps", [1, 2], ids=["whole", "in micro-batches"])
@pytest.mark.parametrize("quantizer", ["kl", "lfq"])
def test_encoder_and_projection_learn_as_in_a_plain_loop(quantizer: str, steps: int) -> None:
    generator, images = model(quantizer), torch.rand(BATCH, 3, SIDE, SIDE)
    plain, noise = copy.deepcopy(generator), some(BATCH, generator.quantizer.dim, 4, 4)
    logged: dict[str, float] = {}

    def log(**values: Tensor) -> None:
        logged.update({name: logged.get(name, 0) + value.item() / steps for name, value in values.items()})

    with single(batch_size=BATCH, grad_accum_steps=steps) as backend:
        engine, alignment = aligned(backend, generator, log)
        projection = copy.deepcopy(alignment.parts["projection"].module)
        batch, pairs = {"x": images, "noise": noise}, []
        for part in engine.micro_batches(batch):
            out = engine(part["x"], part["noise"]) if quantizer == "kl" else engine(part["x"])
            terms, pair = alignment.terms(out, MicroBatch(part["x"], {}, {}, False))
            [(name, term)] = terms.items()
            pairs.append(pair)
            engine.backward(3 * term)
        engine.step()
        alignment.update(batch, pairs, RATE)
        ours = alignment.parts["projection"].module.weight

    moments = plain.encoder(2 * images - 1)
    mean, log_variance = moments.chunk(2, dim=1) if quantizer == "kl" else (moments, None)
    latents = mean if log_variance is None else mean + (0.5 * log_variance).exp() * noise
    cosine, distance = alignment_terms(projection(latents), Colours()(images, 4, 4), *MARGINS)
    (cosine + distance).backward()
    assert name == "alignment_loss" and cosine > 0.1 and distance > 0.01
    assert logged == pytest.approx({"alignment_cosine": cosine.item(), "alignment_distance": distance.item()})
    # Sums of fp32 numbers in another order.
    torch.testing.assert_close(ours, projection.weight - RATE * projection.weight.grad, rtol=1e-4, atol=1e-6)
    weight = plain.encoder[0].weight
    torch.testing.assert_close(generator.encoder[0].weight, weight - 3 * RATE * weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 2], ids=["whole", "in micro-batches"])
def test_an_adaptive_weight_makes_the_gradient_of_each_image_a_share_of_that_of_all_other_terms(steps: int) -> None:
    generator, images, share = model("kl"), torch.rand(BATCH, 3, SIDE, SIDE), 0.25
    images[0] = images[0, :, :1, :1]  # of an image without detail, both gradients are of another size
    plain, noise = copy.deepcopy(generator), some(BATCH, generator.quantizer.dim, 4, 4)
    with single(batch_size=BATCH, grad_accum_steps=steps) as backend:
        engine, alignment = aligned(backend, generator, weight=share)
        projection = copy.deepcopy(alignment.parts["projection"].module)
        for part in engine.micro_batches({"x": images, "noise": noise}):
            inputs = alignment.generator_inputs()
            out = engine(part["x"], part["noise"], **inputs)
            term = alignment.terms(out, MicroBatch(part["x"], inputs, {}, False))[0]["alignment_loss"]
            assert not term.requires_grad
            engine.backward((out.reconstruction - part["x"]).square().mean() + share * term)
        engine.step()

    mean, log_variance = plain.encoder(2 * images - 1).chunk(2, dim=1)
    latents = mean + (0.5 * log_variance).exp() * noise
    error = (plain._decode(latents)[0] - images).square().mean()
    terms = alignment_terms(projection(latents), Colours()(images, 4, 4), *MARGINS)
    gradients = [torch.autograd.grad(loss, latents, retain_graph=True)[0] for loss in (error, sum(terms))]
    of_error, of_alignment = gradients
    for n in range(BATCH):
        of_error[n] += share * of_error[n].norm() * of_alignment[n] / of_alignment[n].norm()
    latents.backward(of_error)
    weight = plain.encoder[0].weight
    assert (of_error.norm() / gradients[1].norm()).item() != pytest.approx(1, abs=0.1)
    torch.testing.assert_close(generator.encoder[0].weight, weight - RATE * weight.grad, rtol=1e-4, atol=1e-6)


def test_an_image_within_the_margins_gets_no_gradient_from_the_alignment() -> None:
    with single(batch_size=2) as backend:
        _, alignment = aligned(backend, tokenizer(), weight=1.0)
        alignment._config.align_cosine_margin = alignment._config.align_distance_margin = 3.0
        latents, inputs = some(2, 6, 3, 4, 4).requires_grad_(), alignment.generator_inputs()
        latents.register_hook(inputs["change_latent_gradient"])
        out = SimpleNamespace(latents=latents)
        alignment.terms(out, MicroBatch(torch.rand(2, 3, 5, SIDE, SIDE), inputs, {}, False))
        latents.sum().backward()
        assert torch.equal(latents.grad, torch.ones_like(latents))  # type: ignore[arg-type]


def test_of_a_video_the_first_frame_is_aligned_and_later_ones_get_no_gradient() -> None:
    videos = torch.rand(2, 3, 5, SIDE, SIDE)
    with single(batch_size=2) as backend:
        _, alignment = aligned(backend, tokenizer())
        latents = some(2, 6, 3, 4, 4).requires_grad_()
        for images in (videos, videos[:, :, 0]):
            out = SimpleNamespace(latents=latents if images.dim() == 5 else latents[:, :, :1])
            term = alignment.terms(out, MicroBatch(images, {}, {}, False))[0]["alignment_loss"]
            gradient = torch.autograd.grad(term, latents)[0]
            assert torch.equal(alignment._vision.seen, videos[:, :, 0])
            assert gradient[:, :, 0].abs().min() > 0 and gradient[:, :, 1:].abs().max() == 0


def test_without_a_vision_model_there_is_no_term_and_nothing_to_save() -> None:
    alignment = Alignment(SimpleNamespace(), None, None, None, None, None)  # type: ignore[arg-type]
    assert alignment.terms(None, None) == ({}, None) and not alignment.parts  # type: ignore[arg-type]
    alignment.update({}, [None], 1.0)
