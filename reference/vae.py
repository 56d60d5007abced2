"""The discrete VAE of DALL-E (Ramesh et al. 2021, section 2.1): images to a grid of codes and back, in one file.

    python reference/vae.py photos/     # writes vae.safetensors and vae.png, originals above reconstructions
    python reference/vae.py photos/ --image_size 64 --num_tokens 256 --hidden_dim 64 --max_steps 500

A convolutional encoder gives every place of a grid logits over K codes, and a decoder makes an image of the codebook's
vectors at the chosen codes. A choice has no gradient. So while the model trains, Gumbel noise and a softmax of
temperature T choose a mixture of all vectors (Jang et al. 2017, Maddison et al. 2017); as T falls, the mixture comes
closer to a single one.

This is the model and the training of train_vae.py, on one process and without run folders; tests/test_references.py
compares the two. As in DALLE-pytorch, whose names the weights have, the loss is the squared error instead of the
paper's logit-Laplace likelihood. Of the script's options, RGBA and ReinMax are left out.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
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
    """Hyper-parameters: names and defaults are those of the flags of train_vae.py."""

    image_size: int = 128  # side of the images in pixels
    num_tokens: int = 8192  # K
    num_layers: int = 3  # halvings of the side: a code stands for 2^num_layers x 2^num_layers pixels
    num_resnet_blocks: int = 2  # on the coarsest grid, in the encoder and in the decoder; at least 1 here
    codebook_dim: int = 512  # width of a codebook vector
    hidden_dim: int = 256  # channels of the convolutions
    smooth_l1_loss: bool = False  # instead of the squared error
    kl_loss_weight: float = 0.0
    straight_through: bool = False  # decode the likeliest code alone, with the gradient of the mixture
    starting_temp: float = 1.0
    temp_min: float = 0.5
    anneal_rate: float = 1e-6
    learning_rate: float = 1e-3
    lr_decay_rate: float = 0.98
    max_grad_norm: float = 0.0  # clip the gradient to this norm; 0: do not clip
    batch_size: int = 8
    max_steps: int = 20_000
    seed: int = 0


class ResBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(dim, dim, 3, padding=1), nn.ReLU(),
            nn.Conv2d(dim, dim, 3, padding=1), nn.ReLU(),
            nn.Conv2d(dim, dim, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


class DiscreteVAE(nn.Module):
    """Images (b, 3, H, W) -> logits (b, K, h, w) over the codes -> images in [-1, 1]; h = H / 2^num_layers."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        dim, halvings = settings.hidden_dim, settings.num_layers

        def blocks() -> list[nn.Module]:
            return [ResBlock(dim) for _ in range(settings.num_resnet_blocks)]

        def down(fan_in: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(fan_in, dim, 4, stride=2, padding=1), nn.ReLU())

        def up() -> nn.Module:
            return nn.Sequential(nn.ConvTranspose2d(dim, dim, 4, stride=2, padding=1), nn.ReLU())

        self.encoder = nn.Sequential(
            down(3), *[down(dim) for _ in range(halvings - 1)], *blocks(), nn.Conv2d(dim, settings.num_tokens, 1)
        )
        self.codebook, self.settings = nn.Embedding(settings.num_tokens, settings.codebook_dim), settings
        self.decoder = nn.Sequential(
            nn.Conv2d(settings.codebook_dim, dim, 1), *blocks(), *[up() for _ in range(halvings)], nn.Conv2d(dim, 3, 1)
        )

    def decode(self, weights: Tensor) -> Tensor:
        """Weights (b, K, h, w) of the codes, which sum to 1 -> images (b, 3, H, W)."""
        return self.decoder(torch.einsum("bkhw,kd->bdhw", weights, self.codebook.weight))

    def forward(self, images: Tensor, gumbel: Tensor, temperature: float) -> Tensor:
        """Images (b, 3, H, W) in [0, 1] -> loss, 0-d: the reconstruction error, and the KL of the evidence lower
        bound."""
        x, settings = 2 * images - 1, self.settings
        logits = self.encoder(x)
        out = self.decode(relaxed_choice(logits, gumbel, temperature, settings.straight_through))
        error = F.smooth_l1_loss(out, x) if settings.smooth_l1_loss else F.mse_loss(out, x)
        # KL(q || uniform) = sum_k q log(q K), in nats, averaged over images and positions, keeps all codes in use. It
        # has no temperature, because q is the encoder's distribution and not the relaxed choice that is decoded.
        log_q = logits.log_softmax(dim=1)
        kl = (log_q.exp() * (log_q + math.log(settings.num_tokens))).sum(dim=1).mean()
        return error + settings.kl_loss_weight * kl

    @torch.no_grad()
    def reconstruct(self, x: Tensor) -> Tensor:
        """Images in [-1, 1] -> images, through the likeliest code at every position, as the trained model is used."""
        return self.decode(one_hot(self.encoder(x)))


def one_hot(logits: Tensor) -> Tensor:
    """(b, K, ...) -> the same shape: 1 where the logit is the largest, 0 elsewhere."""
    return torch.zeros_like(logits).scatter_(1, logits.argmax(dim=1, keepdim=True), 1.0)


def relaxed_choice(logits: Tensor, gumbel: Tensor, temperature: float, straight_through: bool) -> Tensor:
    """Logits and standard Gumbel noise (b, K, h, w) -> weights of the codes. argmax(logits + gumbel) would be a sample
    of softmax(logits); the softmax in place of the argmax has a gradient, which grows more noisy as T falls."""
    soft = ((logits + gumbel) / temperature).softmax(dim=1)
    if not straight_through:
        return soft
    return one_hot(soft) + (soft - soft.detach())  # the parenthesis is exactly 0, and has the gradient of `soft`


def schedule(settings: Settings) -> Iterator[tuple[float, float]]:
    """Learning rate and temperature of the updates 0, 1, 2, ...; both change after the updates 0, 100, 200, ... only.
    The exponent holds the number of all updates so far, so the temperature falls like exp(-rate x n^2 / 200)."""
    rate, temperature = settings.learning_rate, settings.starting_temp
    for step in itertools.count():
        yield rate, temperature
        if step % 100 == 0:
            rate *= settings.lr_decay_rate
            temperature = max(temperature * math.exp(-settings.anneal_rate * step), settings.temp_min)


def train(
    model: DiscreteVAE, batches: Iterable[Tensor], noise: Callable[[int, int], Tensor], settings: Settings
) -> Iterator[dict[str, Tensor | float]]:
    """Train on uint8 images (b, 3, H, W); yields the metrics of each update.

    noise: (number of the update, b) -> standard Gumbel noise (b, K, h, w).
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for step, (batch, (rate, temperature)) in enumerate(zip(batches, schedule(settings), strict=False)):
        images = batch.to(device).float() / 255
        gumbel = noise(step, len(images)).to(device)
        loss = model(images, gumbel, temperature)
        optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm or math.inf)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        yield {"loss": loss.detach(), "grad_norm": grad_norm, "lr": rate, "temperature": temperature}


def draw_noise(settings: Settings, n: int, device: str) -> Tensor:
    """For `train`: standard Gumbel noise (n, K, h, w) for n images."""
    side = settings.image_size // 2**settings.num_layers
    return -torch.empty(n, settings.num_tokens, side, side, device=device).exponential_().log()


def load_images(folder: str, side: int) -> Iterator[Tensor]:
    """Images of a folder and its subfolders, uint8 (3, side, side), in a new order in every pass, without end."""
    endings = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
    paths = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in endings)
    if not paths:
        raise SystemExit(f"no images in {folder}")
    while True:
        for index in torch.randperm(len(paths)).tolist():
            with Image.open(paths[index]) as file:
                square = ImageOps.fit(ImageOps.exif_transpose(file).convert("RGB"), (side, side))
            yield torch.from_numpy(np.array(square)).permute(2, 0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="images to train on")
    for field in fields(Settings):
        if isinstance(field.default, bool):
            parser.add_argument(f"--{field.name}", action="store_true")
        else:
            parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    flags = vars(parser.parse_args())
    folder, settings = flags.pop("folder"), Settings(**flags)

    torch.manual_seed(settings.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = DiscreteVAE(settings).to(device)
    images = load_images(folder, settings.image_size)
    batches = (torch.stack([*itertools.islice(images, settings.batch_size)]) for _ in range(settings.max_steps))
    for step, update in enumerate(train(model, batches, lambda step, n: draw_noise(settings, n, device), settings)):
        if step % 10 == 0:
            print(f"update {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in update.items()), flush=True)

    save_file(model.state_dict(), "vae.safetensors")
    originals = torch.stack([*itertools.islice(images, 4)]).to(device).float() / 255
    rows = [originals, (model.reconstruct(2 * originals - 1) + 1) / 2]  # originals above reconstructions
    pixels = torch.cat([torch.cat([*row], dim=2) for row in rows], dim=1).clamp(0, 1)
    Image.fromarray((255 * pixels).byte().permute(1, 2, 0).cpu().numpy()).save("vae.png")


if __name__ == "__main__":
    main()
