"""A VQGAN (Esser et al. 2021): images to a grid of codes and back, against a discriminator, in one file.

    python reference/vqgan.py photos/     # writes vqgan.safetensors and vqgan.png, originals above reconstructions
    python reference/vqgan.py photos/ --image_size 64 --dim 32 --num_layers 3 --codebook_size 1024 --discr_layers 2

The convolutions are those of Muse's tokenizer (Chang et al. 2023), and the quantizer is lookup-free (LFQ; Yu et al.
2024, MAGVIT-v2, section 3.1): a code is the signs of d numbers, so that 2^d codes need neither vectors nor a search for
the nearest. train_vqgan.py trains the same model with more options; tests/test_references.py compares the two.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Settings:
    """Hyper-parameters: names and defaults are those of the flags of train_vqgan.py."""

    image_size: int = 256  # side of the images in pixels
    dim: int = 128  # channels at full resolution; every halving doubles them
    num_layers: int = 4  # halvings of the side: a code stands for 2^num_layers x 2^num_layers pixels
    num_resnet_blocks: int = 1  # on the coarsest grid, in the encoder and in the decoder
    codebook_size: int = 65536  # 2^d
    inv_temperature: float = 10.0  # of the soft choice of a code, whose entropies are in the loss
    diversity_gamma: float = 1.0  # weight of the entropy of all choices, over that of each
    entropy_loss_weight: float = 0.1
    commitment_loss_weight: float = 0.25
    discr_dim: int = 0  # channels of the discriminator's first layer; 0: dim
    discr_layers: int = 4  # halvings of the side in the discriminator
    discr_start_step: int = 0  # updates of the generator alone
    gan_weight_scale: float = 0.1  # 1 in the paper, which has a perceptual loss beside it
    penalty_weight: float = 10.0
    apply_grad_penalty_every: int = 4
    lecam_weight: float = 0.0
    lecam_decay: float = 0.999
    learning_rate: float = 3e-4
    lr_warmup_steps: int = 0
    max_grad_norm: float = 0.0  # clip the gradient of either model to this norm; 0: do not clip
    ema_decay: float = 0.995
    batch_size: int = 8
    max_steps: int = 20_000
    seed: int = 0


class ResBlock(nn.Module):
    """Two 3 x 3 convolutions and a 1 x 1 one beside a skip; those of the decoder are gated (GLU)."""

    def __init__(self, dim: int, is_gated: bool) -> None:
        super().__init__()

        layers: list[nn.Module] = []
        for _ in range(2):
            norm = nn.GroupNorm(math.gcd(16, dim), dim)
            activation = [nn.GLU(dim=1), norm] if is_gated else [norm, nn.LeakyReLU(0.1)]
            layers += [nn.Conv2d(dim, 2 * dim if is_gated else dim, 3, padding=1), *activation]
        self.net = nn.Sequential(*layers, nn.Conv2d(dim, dim, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


class VQGAN(nn.Module):
    """The generator: images (b, 3, H, W) in [0, 1] -> latents (b, d, h, w) -> signs -> images; h = H / 2^num_layers."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        dim, bits, blocks = settings.dim, settings.codebook_size.bit_length() - 1, range(settings.num_resnet_blocks)
        widths = [dim] + [dim * 2**level for level in range(settings.num_layers)]
        levels, deepest = list(itertools.pairwise(widths)), widths[-1]
        self.encoder = nn.Sequential(
            nn.Conv2d(3, dim, 5, padding=2),
            *[nn.Sequential(nn.Conv2d(i, o, 4, 2, padding=1), nn.LeakyReLU(0.1)) for i, o in levels],
            *[ResBlock(deepest, is_gated=False) for _ in blocks],
            nn.Conv2d(deepest, bits, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(bits, deepest, 1),
            *[ResBlock(deepest, is_gated=True) for _ in blocks],
            *[nn.Sequential(nn.ConvTranspose2d(o, i, 4, 2, padding=1), nn.LeakyReLU(0.1)) for i, o in levels[::-1]],
            nn.Conv2d(dim, 3, 1),
        )

    def encode(self, images: Tensor) -> Tensor:
        # The layers work on images in [-1, 1], so that the zeros of a convolution's padding are grey, not black.
        return self.encoder(2 * images - 1)

    def decode(self, signs: Tensor) -> Tensor:
        return (self.decoder(signs) + 1) / 2


class Discriminator(nn.Module):
    """Images (b, 3, H, W) in [0, 1] -> logits of overlapping patches (b, 1, h, w), positive where one looks real."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        dim = settings.discr_dim or settings.dim
        widths = [dim] + [dim * 2**level for level in range(settings.discr_layers)]
        self.layers = nn.Sequential(nn.Sequential(nn.Conv2d(3, dim, 5, padding=2), nn.LeakyReLU(0.1)))
        for i, o in itertools.pairwise(widths):
            norm = nn.GroupNorm(math.gcd(16, o), o)
            self.layers.append(nn.Sequential(nn.Conv2d(i, o, 4, 2, padding=1), norm, nn.LeakyReLU(0.1)))
        self.to_logits = nn.Sequential(nn.Conv2d(o, o, 1), nn.LeakyReLU(0.1), nn.Conv2d(o, 1, 4))

    def forward(self, images: Tensor) -> Tensor:
        return self.to_logits(self.layers(images))


def quantize(z: Tensor) -> Tensor:
    """Latents -> their signs, 1 above 0 and else -1, with the gradient of the latents, which goes straight through."""
    return torch.where(z > 0, 1.0, -1.0) + (z - z.detach())


def entropy_loss(z: Tensor, settings: Settings) -> Tensor:
    """E H(p) - gamma H(E p) over all latents z (b, d, h, w), in nats: each should choose one code, all together all
    codes. p is the softmax of -t |z - c|^2, or of 2 t <z, c>, over the 2^d codes c; t is the inverse temperature.

    As <z, c> is a sum over the bits, p is the outer product of the distributions of the first and of the second half of
    them. So the entropies of the halves add up, and the mean of p is a product of two matrices, without a table of all
    latents x 2^d codes (Zhao et al. 2024, "Image and video tokenization with binary spherical quantization")."""
    halves = z.movedim(1, -1).flatten(0, -2).tensor_split(2, dim=1)  # (n, d / 2)
    corners = [torch.tensor([*itertools.product((-1.0, 1.0), repeat=half.shape[1])]).to(z) for half in halves]
    log_p = [(2 * settings.inv_temperature * h @ c.T).log_softmax(1) for h, c in zip(halves, corners, strict=True)]
    sample_entropy = -sum((x.exp() * x).sum(dim=1).mean() for x in log_p)
    mean = log_p[0].exp().T @ log_p[1].exp() / len(log_p[0])
    return sample_entropy + settings.diversity_gamma * (mean * mean.clamp_min(1e-37).log()).sum()


def adaptive_weight(reconstruction: Tensor, adversarial: Tensor, layer: Tensor) -> Tensor:
    """The weight that gives both losses gradients of one norm at the last layer (Esser et al. 2021, equation 7)."""
    norms = [torch.autograd.grad(loss, layer, retain_graph=True)[0].norm() for loss in (reconstruction, adversarial)]
    return (norms[0] / norms[1].clamp_min(1e-4)).clamp_max(1e4)


def gradient_penalty(discriminator: Discriminator, images: Tensor) -> Tensor:
    """mean (|grad_x sum D(x)| - 1)^2 at real images x, against ever steeper logits (Gulrajani et al. 2017)."""
    x = images.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(discriminator(x).sum(), x, create_graph=True)
    return (gradient.flatten(1).norm(dim=1) - 1).square().mean()


def lecam(real: Tensor, fake: Tensor, averages: Tensor) -> Tensor:
    """Pull real logits down to the average generated one, and those up to the average real one, which regularises the
    discriminator (Tseng et al. 2021). `averages`: of D(real), D(fake) and the constant 1, which corrects the others for
    their start from 0, as in Adam."""
    real_mean, fake_mean = averages[:2] / averages[2]
    return F.relu(real - fake_mean).square().mean() + F.relu(real_mean - fake).square().mean()


def train(
    generator: VQGAN, discriminator: Discriminator, ema: VQGAN, batches: Iterable[Tensor], settings: Settings
) -> Iterator[dict[str, Tensor]]:
    """Train on uint8 images (b, 3, H, W); yields the metrics of each update. `ema`, a copy of the generator at
    first, becomes the exponential moving average of its weights."""
    last_layer, clip = generator.decoder[-1].get_parameter("weight"), settings.max_grad_norm or math.inf
    adams = [torch.optim.Adam(model.parameters(), fused=True) for model in (generator, discriminator)]
    warmup = min(settings.lr_warmup_steps, settings.max_steps // 2)
    lecam_averages = torch.zeros(3, device=last_layer.device)
    for step, batch in enumerate(batches):
        images, is_adversarial = batch.to(last_layer.device).float() / 255, step >= settings.discr_start_step
        for adam in adams:
            adam.param_groups[0]["lr"] = settings.learning_rate * min(1.0, (step + 1) / max(warmup, 1))
            adam.zero_grad()

        # The generator: reconstruct the images, stay near the codes, and fool the discriminator, which is frozen.
        discriminator.requires_grad_(False)
        z = generator.encode(images)
        fake = generator.decode(quantize(z))
        loss = F.l1_loss(fake, images)
        if is_adversarial:
            adversarial = -discriminator(fake).mean()
            loss = loss + settings.gan_weight_scale * adaptive_weight(loss, adversarial, last_layer) * adversarial
        loss = loss + settings.commitment_loss_weight * F.mse_loss(z, quantize(z).detach())
        loss = loss + settings.entropy_loss_weight * entropy_loss(z, settings)
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(generator.parameters(), clip)
        adams[0].step()
        update = {"loss": loss.detach(), "grad_norm": grad_norm}
        share = max(1 - settings.ema_decay, 9 / (step + 11))  # larger at first, to forget the initial weights
        for old, new in zip(ema.parameters(), generator.parameters(), strict=True):
            old.data.lerp_(new.data, share)

        # The discriminator: tell the same images from their reconstructions.
        if is_adversarial:
            discriminator.requires_grad_(True)
            real_logits, fake_logits = discriminator(images), discriminator(fake.detach())
            hinge = loss = F.relu(1 - real_logits).mean() + F.relu(1 + fake_logits).mean()
            if settings.lecam_weight and lecam_averages[2] > 0:
                loss = loss + settings.lecam_weight * lecam(real_logits, fake_logits, lecam_averages)
            if step % settings.apply_grad_penalty_every == 0:
                loss = loss + settings.penalty_weight * gradient_penalty(discriminator, images)
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(discriminator.parameters(), clip)
            adams[1].step()
            means = torch.stack([real_logits.detach().mean(), fake_logits.detach().mean(), lecam_averages.new_ones(())])
            lecam_averages = lecam_averages.lerp(means, 1 - settings.lecam_decay)
            update |= {"discr_loss": hinge.detach(), "discr_grad_norm": grad_norm}
        yield update


def load_images(folder: str, side: int) -> Iterator[Tensor]:
    """The images below a folder, uint8 (3, side, side), in a new order in every pass, without end."""
    endings = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
    paths = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in endings)
    if not paths:
        raise SystemExit(f"no images in {folder}")
    while True:
        for index in torch.randperm(len(paths)).tolist():
            image = ImageOps.exif_transpose(Image.open(paths[index])).convert("RGB")
            yield torch.from_numpy(np.array(ImageOps.fit(image, (side, side)))).permute(2, 0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="images to train on")
    for field in fields(Settings):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    flags = vars(parser.parse_args())
    folder, settings = flags.pop("folder"), Settings(**flags)
    if settings.image_size < (least := 4 * 2**settings.discr_layers):
        parser.error(f"--discr_layers {settings.discr_layers} needs an --image_size of at least {least}")
    torch.manual_seed(settings.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator, discriminator = VQGAN(settings).to(device), Discriminator(settings).to(device)
    ema = copy.deepcopy(generator)
    images = load_images(folder, settings.image_size)
    batches = (torch.stack([*itertools.islice(images, settings.batch_size)]) for _ in range(settings.max_steps))
    for step, update in enumerate(train(generator, discriminator, ema, batches, settings)):
        if step % 10 == 0:
            print(f"update {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in update.items()), flush=True)
    save_file(ema.state_dict(), "vqgan.safetensors")
    originals = torch.stack([*itertools.islice(images, 4)]).to(device).float() / 255
    with torch.no_grad():
        rows = [originals, ema.decode(quantize(ema.encode(originals)))]  # originals above reconstructions
    pixels = torch.cat([torch.cat([*row], dim=2) for row in rows], dim=1).clamp(0, 1)
    Image.fromarray((255 * pixels).byte().permute(1, 2, 0).cpu().numpy()).save("vqgan.png")


if __name__ == "__main__":
    main()
