"""A diffusion transformer on the latents of an autoencoder (Peebles & Xie 2023), trained by flow matching (Lipman et
al. 2023; Ma et al. 2024, "SiT"): images of a class out of noise, in one file.

    python encode.py --model runs/vae --image_folder photos/ --output latents/ --with_flip
    python reference/dit.py latents/ --model runs/vae     # writes dit.safetensors, dit.json and dit.png
    python reference/dit.py latents/ --depth 4 --dim 256 --max_steps 2000

It is a witness: what a small transformer cannot predict after a few updates, a large one will find harder, too. So it
reports its loss on held-out latents, per dimension of latents whose channels have mean 0 and deviation 1: an
autoencoder cannot lower that loss by a change of scale. Compare only latents of one shape.

Latents x and noise e give points x_t = (1 - t) x + t e on a straight line, and the model predicts its direction, the
velocity e - x, from x_t, t and the class. Samples follow the predicted velocity from noise, at t = 1, to t = 0.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Settings:
    """Hyper-parameters. The size is a small one for two cores; DiT-B has 12 blocks of 768 channels and 12 heads."""

    patch_size: int = 1  # latents of a patch's side, which are one token
    dim: int = 192
    depth: int = 6
    heads: int = 3
    class_dropout: float = 0.1  # share of images that are trained without their class, for guidance
    learning_rate: float = 5e-4
    lr_warmup_steps: int = 100
    ema_decay: float = 0.999
    batch_size: int = 64
    max_steps: int = 2000
    held_out: float = 0.1  # share of the images, whose loss is reported
    sampling_steps: int = 50
    guidance: float = 1.5  # 1: no guidance
    seed: int = 0


def read_latents(folder: str) -> tuple[Tensor, Tensor, Tensor]:
    """What encode.py wrote with --latent mean or sample: latents (n, d, h, w), those of the mirrored images, or the
    same again without --with_flip, and the classes int64 (n,)."""
    root = Path(folder)
    index = json.loads((root / "index.json").read_text())
    if index.get("latent") not in ("mean", "sample") or index.get("normalize", "none") != "none" or index.get("scaled"):
        advice = "give encode.py --latent mean, without --normalize: they are normalised here"
        raise SystemExit(f"{folder} holds codes, moments or normalised latents: {advice}")
    shards = [load_file(root / shard["file"]) for shard in index["shards"]]
    plain, labels = (torch.cat([shard[name] for shard in shards]) for name in ("latents", "labels"))
    mirrored = torch.cat([shard["latents_flip"] for shard in shards]) if index["with_flip"] else plain
    return plain.float(), mirrored.float(), labels


def frequencies(positions: Tensor, dim: int, longest: float = 10_000.0) -> Tensor:
    """Positions of any shape -> sines and cosines (..., dim) of geometric wavelengths (Vaswani et al. 2017)."""
    angles = positions[..., None] * longest ** -torch.linspace(0, 1, dim // 2, device=positions.device)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Block(nn.Module):
    """Self-attention and two layers per token. The condition scales and shifts the inputs of both, and gates their
    outputs, at first by 0, so that a block begins as the identity ("adaLN-Zero")."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU("tanh"), nn.Linear(4 * dim, dim))
        self.modulation = zero(nn.Linear(dim, 6 * dim))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.to_qkv(x).chunk(3, dim=-1))
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulation(F.silu(condition))[:, None].chunk(6, dim=-1)
        shift, scale, gate = parts[:3]
        x = x + gate * self.attend(self.norms[0](x) * (1 + scale) + shift)
        shift, scale, gate = parts[3:]
        return x + gate * self.feed_forward(self.norms[1](x) * (1 + scale) + shift)


def zero(layer: nn.Linear) -> nn.Linear:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


class DiT(nn.Module):
    """Latents (b, d, h, w), times (b,) in [0, 1] and classes int64 (b,) -> velocities (b, d, h, w). Class `num_classes`
    stands for none."""

    def __init__(self, settings: Settings, shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        dim, side = settings.dim, settings.patch_size
        self.num_classes, self.shape, (channels, height, width) = num_classes, shape, shape
        rows, columns = torch.meshgrid(torch.arange(height // side), torch.arange(width // side), indexing="ij")
        positions = torch.cat([frequencies(x.flatten().float(), dim // 2) for x in (rows, columns)], dim=-1)
        self.register_buffer("positions", positions, persistent=False)
        self.to_tokens = nn.Conv2d(channels, dim, side, stride=side)
        self.time = nn.Sequential(nn.Linear(256, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.classes = nn.Embedding(num_classes + 1, dim)
        nn.init.normal_(self.classes.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(dim, settings.heads) for _ in range(settings.depth))
        self.last_norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.last_modulation = zero(nn.Linear(dim, 2 * dim))
        self.to_patches = zero(nn.Linear(dim, side * side * channels))

    def forward(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        tokens = self.to_tokens(x)
        grid, side = tokens.shape[-2:], x.shape[-1] // tokens.shape[-1]
        tokens = tokens.flatten(2).transpose(1, 2) + self.positions
        condition = self.time(frequencies(1000 * times, 256)) + self.classes(labels)
        for block in self.blocks:
            tokens = block(tokens, condition)
        shift, scale = self.last_modulation(F.silu(condition))[:, None].chunk(2, dim=-1)
        patches = self.to_patches(self.last_norm(tokens) * (1 + scale) + shift)
        return F.pixel_shuffle(patches.transpose(1, 2).unflatten(2, grid), side)


def flow_matching_loss(model: DiT, x: Tensor, labels: Tensor, times: Tensor, noise: Tensor) -> Tensor:
    """Squared error of the predicted velocity, a mean over images and over the dimensions of a latent, 0-d."""
    t = times[:, None, None, None]
    return F.mse_loss(model((1 - t) * x + t * noise, times, labels), noise - x)


def train(model: DiT, ema: DiT, batches: Iterator[tuple[Tensor, Tensor]], settings: Settings) -> Iterator[Tensor]:
    """Train on latents and their classes; yields the loss of each update. `ema`, a copy of the model at first, becomes
    the exponential moving average of its weights."""
    adam = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0, fused=True)
    for step, (x, labels) in enumerate(batches):
        adam.param_groups[0]["lr"] = settings.learning_rate * min(1.0, (step + 1) / max(settings.lr_warmup_steps, 1))
        is_dropped = torch.rand(len(x), device=x.device) < settings.class_dropout
        times = torch.randn(len(x), device=x.device).sigmoid()  # more often near 1/2 (Esser et al. 2024, section 3.1)
        labels = labels.masked_fill(is_dropped, model.num_classes)
        loss = flow_matching_loss(model, x, labels, times, torch.randn_like(x))
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        share = max(1 - settings.ema_decay, 9 / (step + 11))  # larger at first, to forget the initial weights
        for old, new in zip(ema.parameters(), model.parameters(), strict=True):
            old.data.lerp_(new.data, share)
        yield loss.detach()


@torch.no_grad()
def held_out_loss(model: DiT, x: Tensor, labels: Tensor, seed: int = 0, times_per_latent: int = 16) -> float:
    """`flow_matching_loss` of latents at times spread evenly over [0, 1], with the same noise in every call."""
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for latent, label in zip(x, labels, strict=True):
        times = (torch.arange(times_per_latent) + 0.5).to(x) / times_per_latent
        noise = torch.randn(times_per_latent, *latent.shape, generator=generator).to(x)
        batch = latent.expand_as(noise), label.expand(times_per_latent)
        losses.append(flow_matching_loss(model, *batch, times, noise).item())
    return math.fsum(losses) / len(losses)


@torch.no_grad()
def sample(velocity: Callable[[Tensor, Tensor], Tensor], noise: Tensor, steps: int) -> Tensor:
    """Follow velocity(x_t, times (b,)) from noise, at t = 1, to t = 0, by Heun's method."""
    x, ends = noise, torch.linspace(1, 0, steps + 1).tolist()
    for t, next_t in itertools.pairwise(ends):
        v = velocity(x, x.new_full((len(x),), t))
        forecast = x + (next_t - t) * v
        x = x + (next_t - t) * (v + velocity(forecast, x.new_full((len(x),), next_t))) / 2
    return x


def guided(model: DiT, labels: Tensor, guidance: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The velocity for these classes, away from the one without a class (Ho & Salimans 2022)."""

    def velocity(x: Tensor, times: Tensor) -> Tensor:
        with_class, without = (model(x, times, y) for y in (labels, torch.full_like(labels, model.num_classes)))
        return without + guidance * (with_class - without)

    return velocity


def draw(path: str, latents: Tensor) -> Image.Image:
    """A row of the images that an autoencoder of this project, or a public one, decodes of latents (n, d, h, w)."""
    from tandem.weights.load import open_model

    images = open_model(path, "VQGAN").model.decode(latents)
    pixels = 255 * torch.cat([*images], dim=2).clamp(0, 1)
    return Image.fromarray(pixels.byte().permute(1, 2, 0).numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="that encode.py wrote")
    parser.add_argument("--model", help="the autoencoder, to draw samples")
    parser.add_argument("--output", default=".", help="folder for dit.safetensors, dit.json and dit.png")
    for field in fields(Settings):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    flags = vars(parser.parse_args())
    folder, path, output = flags.pop("folder"), flags.pop("model"), Path(flags.pop("output"))
    settings = Settings(**flags)
    torch.manual_seed(settings.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain, mirrored, labels = read_latents(folder)
    n_held_out = max(1, round(settings.held_out * len(plain)))
    order = torch.randperm(len(plain))
    held_out, trained = order[:n_held_out], order[n_held_out:]
    deviation, mean = torch.std_mean(plain[trained], (0, 2, 3), keepdim=True)
    deviation = deviation.clamp_min(1e-6)  # of a channel that says nothing
    views = torch.stack([(view - mean) / deviation for view in (plain, mirrored)])
    model = DiT(settings, plain.shape[1:], num_classes=int(labels.max()) + 1).to(device)
    ema = copy.deepcopy(model)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(settings.max_steps):
            rows = trained[torch.randint(len(trained), (settings.batch_size,))]
            x = views[torch.randint(2, (settings.batch_size,)), rows]
            yield x.to(device), labels[rows].to(device)

    for step, loss in enumerate(train(model, ema, batches(), settings)):
        if step % 100 == 0:
            print(f"update {step}: loss {loss:.4f}", flush=True)
    error = held_out_loss(ema.eval(), views[0, held_out].to(device), labels[held_out].to(device))
    print(f"held-out loss per dimension of normalised latents: {error:.5f} ({n_held_out} images)")
    output.mkdir(parents=True, exist_ok=True)
    save_file(ema.state_dict(), output / "dit.safetensors")
    (output / "dit.json").write_text(json.dumps({**asdict(settings), "held_out_loss": error, "images": len(order)}))
    if path:
        classes = labels[held_out][:8].to(device)
        noise = torch.randn(len(classes), *model.shape, device=device)
        x = sample(guided(ema, classes, settings.guidance), noise, settings.sampling_steps)
        with torch.no_grad():
            draw(path, x.cpu() * deviation + mean).save(output / "dit.png")


if __name__ == "__main__":
    main()
