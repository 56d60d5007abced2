"""The discrete VAE against its specification: names, sizes, and every formula written out a second time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.config.models.autoencoders import DiscreteVAEConfig
from tandem.models import DiscreteVAE
from tests.models.helpers import VAE, some_images


def small_vae(**overrides: Any) -> DiscreteVAE:
    """With weights large enough for codes to differ between places."""
    torch.manual_seed(0)
    model = DiscreteVAE.from_dict({**VAE, **overrides})
    with torch.no_grad():
        for parameter in model.encoder.parameters():
            parameter.mul_(2.5)
    return model


def some_noise(model: DiscreteVAE, batch: int = 2) -> Tensor:
    uniform = torch.rand(batch, *model.noise_shape, generator=torch.Generator().manual_seed(2))
    return -(-uniform.clamp(1e-6, 1 - 1e-6).log()).log()


def logits_of(model: DiscreteVAE, normalized: Tensor) -> Tensor:
    """tests/test_references.py holds the layers against another implementation."""
    logits: Tensor = model.encoder(normalized)
    return logits


def decoded_by(model: DiscreteVAE, weights: Tensor) -> Tensor:
    """Weights (b, K, s, s) over the codes -> normalised images."""
    images: Tensor = model.decoder(torch.einsum("bkij,kd->bdij", weights, model.state_dict()["codebook.weight"]))
    return images


def softmax(x: np.ndarray, axis: int = 1) -> np.ndarray:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def one_hot(soft: Tensor) -> Tensor:
    return F.one_hot(soft.argmax(1), soft.shape[1]).movedim(-1, 1).float()


def encoder_gradient(model: DiscreteVAE) -> Tensor:
    gradients = [parameter.grad for parameter in model.encoder.parameters()]
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


def test_the_scripts_defaults_have_16672259_parameters() -> None:
    with torch.device("meta"):
        model = DiscreteVAE(DiscreteVAEConfig())
    assert sum(parameter.numel() for parameter in model.parameters()) == 16_672_259


def test_without_noise_and_temperature_noise_is_zero_and_the_temperature_is_1() -> None:
    model, images = small_vae(), some_images()
    out, same = model(images), model(images, noise=torch.zeros(2, *model.noise_shape), temperature=1.0)
    assert model.noise_shape == (13, 4, 4) and out.reconstruction.shape == images.shape
    assert torch.equal(out.recon_loss, same.recon_loss) and torch.equal(out.reconstruction, same.reconstruction)
    assert out.recon_loss != model(images, temperature=0.9).recon_loss


@pytest.mark.parametrize("is_transparent", [False, True])
def test_colours_are_normalised_and_alpha_is_left_as_it_is(is_transparent: bool) -> None:
    channels = 4 if is_transparent else 3
    model, images = small_vae(channels=channels), some_images(channels=channels)
    mean, deviation = [0.5, 0.5, 0.5, 0.0], [0.5, 0.5, 0.5, 1.0]
    means, deviations = (torch.tensor(values[:channels])[:, None, None] for values in (mean, deviation))
    target = (images - means) / deviations
    with torch.no_grad():
        decoded = decoded_by(model, logits_of(model, target).softmax(1))
        out = model(images)
    assert out.recon_loss.item() == pytest.approx(F.mse_loss(decoded, target).item(), rel=1e-5)
    torch.testing.assert_close(out.reconstruction, decoded * deviations + means)


def test_the_gradient_of_hard_codes_with_reinmax_is_that_of_the_paper() -> None:
    """Liu et al. 2023, equation 7: 2 J(pi1) g - J(pi0) g / 2 with J(p) g = p (g - <p, g>). Without it the gradient
    is that of reference/vae.py."""
    model, images, temperature = small_vae(straight_through=True, reinmax=True), some_images(), 0.7
    noise = some_noise(model)
    model(images, noise=noise, temperature=temperature).recon_loss.backward()
    got = encoder_gradient(model)

    model.zero_grad()
    logits = logits_of(model, images * 2 - 1)
    soft = ((logits + noise) / temperature).softmax(1)
    hard = one_hot(soft).requires_grad_()
    (wanted,) = torch.autograd.grad(F.mse_loss(decoded_by(model, hard), images * 2 - 1), hard)
    values, g = logits.detach().double().numpy(), wanted.double().numpy()
    pi0 = softmax(values)
    pi1 = (hard.detach().double().numpy() + softmax(values / temperature)) / 2
    jacobian = [p * (g - (p * g).sum(axis=1, keepdims=True)) for p in (pi0, pi1)]
    logits.backward(torch.from_numpy(2 * jacobian[1] - jacobian[0] / 2).float())
    torch.testing.assert_close(got, encoder_gradient(model), rtol=1e-4, atol=1e-7)


def vae_with_logits(bias: list[float], **overrides: Any) -> DiscreteVAE:
    """Gives these logits at every place of every image."""
    model = small_vae(num_tokens=len(bias), **overrides)
    weights = model.state_dict()
    weights["encoder.2.weight"].zero_()
    weights["encoder.2.bias"].copy_(torch.tensor(bias))
    return model


@pytest.mark.parametrize(("bias", "kl"), [
    ([0.0] * 8, 0.0),
    ([100.0] + [0.0] * 7, math.log(8)),
    ([100.0, 100.0] + [0.0] * 6, math.log(4)),
    ([math.log(3), 0.0], 0.75 * math.log(1.5) + 0.25 * math.log(0.5)),
], ids=["uniform", "one code", "two codes", "three to one"])  # fmt: skip
def test_kl_has_its_closed_form(bias: list[float], kl: float) -> None:
    assert vae_with_logits(bias)(some_images()).kl.item() == pytest.approx(kl, abs=1e-6)


def test_kl_depends_neither_on_batch_size_nor_on_temperature_and_without_a_weight_keeps_no_graph() -> None:
    model, images = small_vae(), some_images(batch=1)
    expected = model(images)
    assert model(images.expand(5, -1, -1, -1), temperature=0.1).kl.item() == pytest.approx(expected.kl.item(), rel=1e-6)
    assert not expected.kl.requires_grad and small_vae(kl_loss_weight=0.1)(images).kl.requires_grad
