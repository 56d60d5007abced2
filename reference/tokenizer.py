"""A causal tokenizer of videos after MAGVIT-v2 (Yu et al. 2024): clips to grids of codes and back, in one file.

    python reference/tokenizer.py clips/  # writes tokenizer.safetensors and tokenizer.png, frames above reconstructions
    python reference/tokenizer.py clips/ --image_size 32 --num_frames 9 --init_dim 16 --discr_layers 2 --max_steps 500

No code depends on a later frame: convolutions in time are padded in front alone, and 1 + 2n frames become 1 + n. So the
first grid of codes is that of an image. A code is the signs of d numbers (LFQ). Discriminators see frames and motion.
train_tokenizer.py trains the same model with more options, such as attention, which the paper does not have.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from einops import rearrange
from PIL import Image, ImageOps
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Settings:
    """Hyper-parameters: names and defaults are those of the flags of train_tokenizer.py."""

    image_size: int = 128  # side of a frame in pixels
    num_frames: int = 17  # of a clip
    layers: str = "residual,compress_space,residual,compress_space,residual,compress_time,residual"  # to the codes
    init_dim: int = 64  # channels at full resolution, of generator and discriminators
    input_kernel: int = 7
    codebook_size: int = 1024  # 2^d
    inv_temperature: float = 10.0  # of the soft choice of a code, whose entropies are in the loss
    diversity_gamma: float = 2.5  # weight of the entropy of all choices, over that of each
    entropy_loss_weight: float = 0.1
    commitment_loss_weight: float = 1.0
    discr_layers: int = 4  # halvings of the side in the discriminators
    gan_weight_scale: float = 0.1
    penalty_weight: float = 10.0
    apply_grad_penalty_every: int = 4
    learning_rate: float = 1e-5
    lr_warmup_steps: int = 1000
    weight_decay: float = 0.01
    batch_size: int = 8
    max_steps: int = 20_000
    seed: int = 0


class CausalConv3d(nn.Conv3d):
    """Pads a clip in front with zeros, one frame fewer than the kernel has: output j sees frames up to stride x j."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, 0, 0, 0, self.kernel_size[0] - 1, 0)))


class Up(nn.Module):
    """Doubles height and width; or in time makes 1 + 2n frames from 1 + n, frame f from frame ceil(f / 2)."""

    def __init__(self, fan_in: int, fan_out: int, in_time: bool) -> None:
        super().__init__()
        self.in_time, copies = in_time, 2 if in_time else 4
        self.expand = nn.Conv3d(fan_in, copies * fan_out, 1)
        filters = nn.init.kaiming_uniform_(torch.empty(fan_out, fan_in, 1, 1, 1))
        self.expand.weight.data = filters.repeat_interleave(copies, dim=0)  # the parts begin equal: no checkerboard
        nn.init.zeros_(self.expand.get_parameter("bias"))

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.expand(x))
        if self.in_time:
            return rearrange(x, "b (c p) f h w -> b c (f p) h w", p=2)[:, :, 1:]
        return rearrange(x, "b (c p q) f h w -> b c f (h p) (w q)", p=2, q=2)


class ResidualUnit(nn.Module):
    """x + y times gates in (0, 2) for each channel and frame, from a weighted mean over the frame (global context, Cao
    et al. 2020). Gates start as 1; almost closed, as in the public code, they would have almost no gradient."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv, self.mix = CausalConv3d(dim, dim, 3, padding=(0, 1, 1)), nn.Conv3d(dim, dim, 1)
        squeeze, excite = nn.Linear(dim, max(16, dim // 2)), nn.Linear(max(16, dim // 2), dim)
        self.gate = nn.ModuleDict({"to_weights": nn.Conv3d(dim, 1, 1), "squeeze": squeeze, "excite": excite})
        excite.weight.data.zero_(), excite.bias.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        y = F.elu(self.mix(F.elu(self.conv(x))))
        weights = self.gate["to_weights"](y).flatten(3).softmax(dim=-1)  # (b, 1, f, h w)
        mean = rearrange((y.flatten(3) * weights).sum(dim=-1), "b c f -> b f c")
        gates = 2 * torch.sigmoid(self.gate["excite"](F.leaky_relu(self.gate["squeeze"](mean), 0.1)))
        return x + y * rearrange(gates, "b f c -> b c f 1 1")


class RMSNorm(nn.Module):
    """Over the channels of each position by itself: a norm over frames would see the future."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(dim=1, keepdim=True) + 1e-6).rsqrt() * self.gain[:, None, None, None]


def sequential(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


class VideoTokenizer(nn.Module):
    """The generator: clips (b, 3, f, h, w) in [0, 1] -> latents (b, d, f', h', w') -> signs -> clips."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        dim, bits, size = settings.init_dim, settings.codebook_size.bit_length() - 1, settings.input_kernel
        encoder: list[nn.Module] = []
        decoder: list[nn.Module] = []
        conv_in = CausalConv3d(3, dim, size, padding=(0, size // 2, size // 2))
        conv_out = CausalConv3d(dim, 3, 3, padding=(0, 1, 1))
        for name in settings.layers.split(","):  # the decoder mirrors them
            if name == "residual":
                encoder.append(ResidualUnit(dim))
                decoder.append(ResidualUnit(dim))
                continue
            in_time = name == "compress_time"
            kernel, stride, padding = ((3, 1, 1), (2, 1, 1), 0) if in_time else ((1, 3, 3), (1, 2, 2), (0, 1, 1))
            encoder.append(CausalConv3d(dim, 2 * dim, kernel, stride, padding))
            decoder.append(Up(2 * dim, dim, in_time))
            dim *= 2
        self.encoder = sequential(
            conv_in=sequential(conv=conv_in), layers=nn.Sequential(*encoder), norm=RMSNorm(dim),
            to_latents=nn.Conv3d(dim, bits, 1),
        )  # fmt: skip
        self.decoder = sequential(
            from_latents=nn.Conv3d(bits, dim, 1), layers=nn.Sequential(*decoder[::-1]),
            conv_out=sequential(conv=conv_out),
        )  # fmt: skip

    def encode(self, clips: Tensor) -> Tensor:
        """The layers work on frames in [-1, 1]. The soft clamp keeps entropies from vanishing."""
        return 10 * torch.tanh(self.encoder(2 * clips - 1) / 10)

    def decode(self, signs: Tensor) -> Tensor:
        return (self.decoder(signs) + 1) / 2


class Head(nn.Module):
    """A discriminator of overlapping patches of frames (b, 3, h, w) or of clips: positive where one looks real."""

    def __init__(self, dim: int, halvings: int, is_3d: bool) -> None:
        super().__init__()
        conv: Any = nn.Conv3d if is_3d else nn.Conv2d
        widths = [3 if is_3d else dim, *(dim * 2**level for level in range(halvings))]
        self.layers, self.to_logits = nn.Sequential(), nn.Sequential()
        if not is_3d:
            self.layers.append(nn.Sequential(conv(3, dim, 5, padding=2), nn.LeakyReLU(0.1)))
        for level, (i, o) in enumerate(itertools.pairwise(widths)):
            kernel, stride = ((3, 4, 4), (2 if level in (1, 2) else 1, 2, 2)) if is_3d else (4, 2)
            norm = nn.Identity() if is_3d and level == 0 else nn.GroupNorm(math.gcd(16, o), o)
            self.layers.append(nn.Sequential(conv(i, o, kernel, stride, padding=1), norm, nn.LeakyReLU(0.1)))
        self.to_logits.extend([conv(o, o, 1), nn.LeakyReLU(0.1), conv(o, 1, (1, 4, 4) if is_3d else 4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.to_logits(self.layers(x))


class VideoDiscriminator(nn.Module):
    """Three heads: for one frame of each clip, for all frames, and for every second one. A loss is a sum over them."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.frame_head = Head(settings.init_dim, settings.discr_layers, is_3d=False)
        self.clip_heads = nn.ModuleList(Head(settings.init_dim, settings.discr_layers, is_3d=True) for _ in range(2))

    def forward(self, clips: Tensor, frames: Tensor) -> list[Tensor]:
        """frames: int64 (b,), the one of each clip that the first head sees."""
        images = clips[torch.arange(len(clips), device=clips.device), :, frames]
        return [self.frame_head(images), self.clip_heads[0](clips), self.clip_heads[1](clips[:, :, ::2])]


def quantize(z: Tensor) -> Tensor:
    """Latents -> their signs, 1 above 0 and else -1, with the gradient of the latents, which goes straight through."""
    return torch.where(z > 0, 1.0, -1.0) + (z - z.detach())


def entropy_loss(z: Tensor, settings: Settings) -> Tensor:
    """E H(p) - gamma H(E p) over all latents z, in nats: each should choose one code clearly, and all together all
    codes. p is the softmax of -t |z - c|^2, or of 2 t <z, c>, over the 2^d codes c; t is the inverse temperature. For
    large codebooks, vqgan.py avoids the table of all latents x 2^d codes."""
    corners = torch.tensor([*itertools.product((-1.0, 1.0), repeat=z.shape[1])], device=z.device)
    log_p = (2 * settings.inv_temperature * z.movedim(1, -1).flatten(0, -2) @ corners.T).log_softmax(dim=1)
    mean = log_p.exp().mean(dim=0)
    sample_entropy = -(log_p.exp() * log_p).sum(dim=1).mean()
    return sample_entropy + settings.diversity_gamma * (mean * mean.clamp_min(1e-37).log()).sum()


def adaptive_weight(reconstruction: Tensor, adversarial: Tensor, layer: Tensor) -> Tensor:
    """The weight that gives both losses gradients of one norm at the last layer (Esser et al. 2021, equation 7)."""
    norms = [torch.autograd.grad(loss, layer, retain_graph=True)[0].norm() for loss in (reconstruction, adversarial)]
    return (norms[0] / norms[1].clamp_min(1e-4)).clamp_max(1e4)


def gradient_penalty(discriminator: VideoDiscriminator, clips: Tensor, frames: Tensor) -> Tensor:
    """E |grad_x D(x)|^2, D(x) the mean logit of a clip, summed over the heads (Mescheder et al. 2018, R1 and R2)."""
    x = clips.detach().requires_grad_()
    means = [logits.flatten(1).mean(dim=1).sum() for logits in discriminator(x, frames)]
    gradients = [torch.autograd.grad(mean, x, create_graph=True)[0] for mean in means]
    return torch.stack([gradient.flatten(1).square().sum(dim=1).mean() for gradient in gradients]).sum()


def make_adam(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Matrices and kernels decay; gains, biases and other tensors with one dimension above 1 do not."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        groups[sum(size > 1 for size in parameter.shape) > 1].append(parameter)
    adam = torch.optim.AdamW(groups[True], betas=(0.9, 0.99), weight_decay=settings.weight_decay, fused=True)
    adam.add_param_group({"params": groups[False], "weight_decay": 0.0})
    return adam


def train(
    generator: VideoTokenizer, discriminator: VideoDiscriminator, batches: Iterable[Tensor],
    noise: Callable[[int, int], Tensor], settings: Settings,
) -> Iterator[dict[str, Tensor]]:  # fmt: skip
    """Train on uint8 clips (b, 3, f, h, w); yields the metrics of each update.

    noise: (number of the update, b) -> uniform in [0, 1), (b,), which chooses the frame for the frame head."""
    last_layer, models = generator.get_parameter("decoder.conv_out.conv.weight"), (generator, discriminator)
    adams, warmup = [make_adam(m, settings) for m in models], min(settings.lr_warmup_steps, settings.max_steps // 2)
    for step, batch in enumerate(batches):
        clips = batch.to(last_layer.device).float() / 255
        frames = (noise(step, len(clips)) * clips.shape[2]).long().to(last_layer.device)
        for group in (*adams[0].param_groups, *adams[1].param_groups):
            group["lr"] = settings.learning_rate * min(1.0, (step + 1) / max(warmup, 1))

        # The generator: reconstruct the clips, stay near the codes, and fool the discriminator, which is frozen.
        discriminator.requires_grad_(False)
        z = generator.encode(clips)
        fake = generator.decode(quantize(z))
        error = F.mse_loss(fake, clips)
        adversarial = -torch.stack([logits.mean() for logits in discriminator(fake, frames)]).sum()
        loss = error + settings.gan_weight_scale * adaptive_weight(error, adversarial, last_layer) * adversarial
        loss = loss + settings.commitment_loss_weight * F.mse_loss(z, quantize(z).detach())
        loss = loss + settings.entropy_loss_weight * entropy_loss(z, settings)
        adams[0].zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(generator.parameters(), math.inf)
        adams[0].step()

        # The discriminator: tell the same clips from their reconstructions.
        discriminator.requires_grad_(True)
        fake = fake.detach()
        logits = zip(discriminator(clips, frames), discriminator(fake, frames), strict=True)
        losses = [F.relu(1 - real).mean() + F.relu(1 + fake).mean() for real, fake in logits]
        discr_loss = hinge = torch.stack(losses).sum()
        if step % settings.apply_grad_penalty_every == 0:
            penalty = gradient_penalty(discriminator, clips, frames) + gradient_penalty(discriminator, fake, frames)
            discr_loss = hinge + settings.penalty_weight * penalty
        adams[1].zero_grad()
        discr_loss.backward()
        discr_grad_norm = nn.utils.clip_grad_norm_(discriminator.parameters(), math.inf)
        adams[1].step()
        values = {"loss": loss, "grad_norm": grad_norm, "discr_loss": hinge, "discr_grad_norm": discr_grad_norm}
        yield {name: value.detach() for name, value in values.items()}


def draw_noise(settings: Settings, n: int, device: str) -> Tensor:
    """For `train`: uniform noise (n,) in [0, 1) for n clips."""
    return torch.rand(n)


def load_clips(folder: str, side: int, num_frames: int) -> Iterator[Tensor]:
    """Clips from random places of the videos below a folder, uint8 (3, num_frames, side, side), without end."""
    endings = (".mp4", ".mkv", ".webm", ".mov", ".avi", ".gif")
    paths = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in endings)
    if not paths:
        raise SystemExit(f"no videos in {folder}")
    while True:
        for index in torch.randperm(len(paths)).tolist():
            with av.open(str(paths[index])) as file:
                file.seek(int(float(torch.rand(())) * (file.duration or 0)))  # to the key frame before
                frames = [frame.to_image() for frame in itertools.islice(file.decode(video=0), num_frames)]
            if not frames:  # the place is after the last frame, where only sound is left
                continue
            squares = [np.array(ImageOps.fit(frame, (side, side))) for frame in frames]
            clip = [squares[min(i, len(squares) - 1)] for i in range(num_frames)]  # the last frame is repeated
            yield torch.from_numpy(np.stack(clip)).permute(3, 0, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="videos to train on")
    for field in fields(Settings):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    flags = vars(parser.parse_args())
    folder, settings = flags.pop("folder"), Settings(**flags)
    if settings.image_size < (least := 4 * 2**settings.discr_layers):
        parser.error(f"--discr_layers {settings.discr_layers} needs an --image_size of at least {least}")
    torch.manual_seed(settings.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator, discriminator = VideoTokenizer(settings).to(device), VideoDiscriminator(settings).to(device)
    clips = load_clips(folder, settings.image_size, settings.num_frames)
    batches = (torch.stack([*itertools.islice(clips, settings.batch_size)]) for _ in range(settings.max_steps))
    updates = train(generator, discriminator, batches, lambda step, n: draw_noise(settings, n, device), settings)
    for step, update in enumerate(updates):
        if step % 10 == 0:
            print(f"update {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in update.items()), flush=True)
    save_file(generator.state_dict(), "tokenizer.safetensors")
    clip = next(clips)[None].to(device).float() / 255
    with torch.no_grad():
        rows = torch.cat([clip, generator.decode(quantize(generator.encode(clip)))])  # frames above reconstructions
    pixels = rearrange(rows.clamp(0, 1), "row c f h w -> (row h) (f w) c")
    Image.fromarray((255 * pixels).byte().cpu().numpy()).save("tokenizer.png")


if __name__ == "__main__":
    main()
