"""The decoder of DALL-E 2 (Ramesh et al. 2022, section 2.1) in one file: Unets that draw pictures from noise.

    python reference/decoder.py photos/
    python reference/decoder.py photos/ --image_sizes 16 32 --dim 16 --dim_mults 1 2 --num_resnet_blocks 1 \
        --attn_heads 4 --cross_attn_heads 4 --cross_attn_dim_head 16 --batch_size 16 --learning_rate 1e-3

The first Unet draws small pictures for the embedding of an image, each further one makes them larger (Ho et al. 2022,
"Cascaded diffusion models"). KEY.npy beside KEY.jpg is CLIP's embedding of it; without it, the words of KEY are random
vectors. The weights, decoder.safetensors, have the names of train_decoder.py's model with --lowres_condition noise.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

Tensors = Mapping[str, Tensor]

LOWRES_TIMESTEPS = 1000  # of the noise on the pictures that an upsampler is given


@dataclass(frozen=True)
class Settings:  # flags of train_decoder.py, with its defaults but for image_sizes and max_steps; all Unets are alike
    image_sizes: tuple[int, ...] = (64, 256)
    dim: int = 128
    dim_mults: tuple[int, ...] = (1, 2, 3, 4)
    num_resnet_blocks: int = 2
    attn_heads: int = 16
    attn_dim_head: int = 32
    cross_attn_heads: int = 8
    cross_attn_dim_head: int = 64
    image_cond_drop_prob: float = 0.1
    timesteps: int = 1000
    noise_schedule: str = "cosine"  # or linear
    lowres_noise_level: float = 0.2
    batch_size: int = 64
    max_steps: int = 1000
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    max_grad_norm: float = 0.5
    sample_timesteps: int = 20
    cond_scale: float = 1.0


class LayerNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.g.shape, self.g)


class Attention(nn.Module):  # with cond_dim cross-attention to tokens; else self-attention, multi-query (Shazeer 2019)
    def __init__(self, dim: int, heads: int, dim_head: int, cond_dim: int | None = None) -> None:
        super().__init__()
        self.dim_head, self.norm, self.null_kv = dim_head, LayerNorm(dim), nn.Parameter(torch.randn(2, dim_head))
        self.to_q = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_kv = nn.Linear(cond_dim or dim, 2 * dim_head * (heads if cond_dim else 1), bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim, bias=False), LayerNorm(dim))

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        positions = self.norm(x.flatten(2).mT)
        q = self.to_q(positions).unflatten(2, (-1, self.dim_head)).transpose(1, 2)  # (b, heads, positions, d)
        kv = self.to_kv(positions if tokens is None else tokens).unflatten(2, (2, -1, self.dim_head))  # keys and values
        kv = kv.permute(2, 0, 3, 1, 4)
        null = self.null_kv[:, None, None, None].expand(-1, *kv.shape[1:3], -1, -1)  # learned, to attend to nothing
        k, v = torch.cat([null, kv], dim=3).expand(-1, -1, q.shape[1], -1, -1)
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).mT.view_as(x)


class ResnetBlock(nn.Module):
    def __init__(self, dim: int, dim_out: int, s: Settings, attends: bool = False) -> None:
        super().__init__()
        self.time_mlp = nn.Sequential(nn.SiLU(), nn.Linear(4 * s.dim, 2 * dim_out))
        self.cross_attn = Attention(dim_out, s.cross_attn_heads, s.cross_attn_dim_head, s.dim) if attends else None
        convs = (nn.Conv2d(width, dim_out, 3, padding=1) for width in (dim, dim_out))
        self.block1, self.block2 = (nn.ModuleDict({"project": c, "norm": nn.GroupNorm(8, dim_out)}) for c in convs)
        self.res_conv = nn.Conv2d(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x: Tensor, t: Tensor, tokens: Tensor | None = None) -> Tensor:
        scale, shift = self.time_mlp(t)[..., None, None].chunk(2, dim=1)  # FiLM (Perez et al. 2018)
        h = F.silu(self.block1["norm"](self.block1["project"](x)) * (scale + 1) + shift)
        h = h if self.cross_attn is None else h + self.cross_attn(h, tokens)
        return F.silu(self.block2["norm"](self.block2["project"](h))) + self.res_conv(x)


class Unet(nn.Module):
    def __init__(self, s: Settings, image_width: int, is_upsampler: bool) -> None:
        super().__init__()
        self.s, dim, hidden, widths = s, s.dim, 4 * s.dim, [s.dim, *(s.dim * mult for mult in s.dim_mults)]
        kernels = zip((3, 7, 15), (dim // 2, dim // 4, dim - dim // 2 - dim // 4), strict=True)
        convs = [nn.Conv2d(3 + 3 * is_upsampler, width, size, padding=size // 2) for size, width in kernels]
        self.init_conv: Any = nn.ModuleDict({"convs": nn.ModuleList(convs)})  # several sizes side by side
        self.to_time_hiddens = nn.Sequential(nn.Identity(), nn.Linear(dim, hidden), nn.GELU())
        self.to_time_tokens = nn.Sequential(nn.Linear(hidden, 2 * dim), nn.Unflatten(1, (2, dim)))
        self.to_time_cond = nn.Sequential(nn.Linear(hidden, hidden))
        if is_upsampler:
            layers = nn.Identity(), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden)
            self.to_lowres_noise_cond = nn.Sequential(*layers)
        else:
            self.image_to_tokens = nn.Sequential(nn.Linear(image_width, 4 * dim), nn.Unflatten(1, (4, dim)))
            self.to_image_hiddens = nn.Sequential(nn.Linear(image_width, hidden), nn.GELU())
            self.null_image_embed = nn.Parameter(torch.randn(1, 4, dim))
            self.null_image_hiddens = nn.Parameter(torch.randn(1, hidden))
        self.norm_cond, self.norm_mid_cond = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        for level, (narrow, wide) in enumerate(pairwise(widths)):
            blocks = [ResnetBlock(narrow, narrow, s, level > 0) for _ in range(s.num_resnet_blocks)]
            after: nn.Module = nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(4 * narrow, wide, 1))  # halves the side
            after = nn.Conv2d(narrow, wide, 1) if level == len(s.dim_mults) - 1 else after
            parts = {"first": ResnetBlock(narrow, narrow, s), "blocks": nn.ModuleList(blocks), "after": after}
            self.downs.append(nn.ModuleDict(parts))
            first, *blocks = (ResnetBlock(wide + narrow, wide, s, level > 0) for _ in range(s.num_resnet_blocks + 1))
            upsample = [nn.Conv2d(wide, 4 * narrow, 1), nn.SiLU(), nn.PixelShuffle(2)] if level else []
            after = nn.ModuleDict({"net": nn.Sequential(*upsample)})
            self.ups.insert(0, nn.ModuleDict({"first": first, "blocks": nn.ModuleList(blocks), "after": after}))
        self.mid_block1, self.mid_block2 = (ResnetBlock(widths[-1], widths[-1], s, attends=True) for _ in range(2))
        self.mid_attn = Attention(widths[-1], s.attn_heads, s.attn_dim_head)
        self.final_resnet_block = ResnetBlock(widths[1] + dim, dim, s)
        self.to_out = nn.Conv2d(dim + 3 * is_upsampler, 3, 1)
        for weight in self.to_out.parameters():
            nn.init.zeros_(weight)

    def sinusoids(self, t: Tensor) -> Tensor:
        half = self.s.dim // 2
        angles = t[:, None] * torch.exp(torch.arange(half, device=t.device) * (-math.log(1e4) / (half - 1)))
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    def forward(self, x: Tensor, time: Tensor, cond: Tensors) -> Tensor:
        """Noisy pictures (b, 3, h, w), their levels (b,), and conditions by name -> prediction (b, 3, h, w)."""
        hiddens = self.to_time_hiddens(self.sinusoids(time))
        t, tokens, lowres = self.to_time_cond(hiddens), self.to_time_tokens(hiddens), []
        if "lowres_image" in cond:
            t, lowres = t + self.to_lowres_noise_cond(self.sinusoids(cond["lowres_time"])), [cond["lowres_image"]]
        else:  # learned vectors take the place of an embedding that is dropped
            embed, keep = cond["image_embed"] * cond["image_embed"].shape[1] ** 0.5, cond["keep_image"][:, None]
            t = t + torch.where(keep, self.to_image_hiddens(embed), self.null_image_hiddens)
            image = torch.where(keep[..., None], self.image_to_tokens(embed), self.null_image_embed)
            tokens = torch.cat([tokens, image], dim=1)
        inner, tokens = self.norm_mid_cond(tokens), self.norm_cond(tokens)
        x = torch.cat([x, *lowres], dim=1)
        x = first = torch.cat([conv(x) for conv in self.init_conv["convs"]], dim=1)
        skips: list[Tensor] = []
        level: Any
        for level in self.downs:
            x = level["first"](x, t)
            for block in level["blocks"]:
                x = block(x, t, tokens)
                skips.append(x)
            skips.append(x)  # again: the model of train_decoder.py may put an attention before this skip
            x = level["after"](x)
        x = self.mid_block1(x, t, inner)
        x = self.mid_block2(x + self.mid_attn(x), t, inner)
        for level in self.ups:
            for block in (level["first"], *level["blocks"]):
                x = block(torch.cat([x, skips.pop()], dim=1), t, tokens)
            x = level["after"]["net"](x)
        x = self.final_resnet_block(torch.cat([x, first], dim=1), t)
        return self.to_out(torch.cat([x, *lowres], dim=1))


def resize(images: Tensor, side: int) -> Tensor:
    return F.interpolate(images, size=(side, side), mode="bilinear", antialias=True)


def schedule(name: str, timesteps: int, ends_in_noise: bool = False) -> Tensor:
    """Alpha and sigma (2, T + 1, 1, 1, 1) of x = alpha x0 + sigma noise, for ever more noise; [:, -1] is no noise."""
    signal = torch.cos((torch.linspace(0, 1, timesteps + 1, dtype=torch.float64) + 0.008) / 1.008 * math.pi / 2) ** 2
    betas = (1 - signal[1:] / signal[:-1]).clamp(max=0.999)  # cosine: Nichol and Dhariwal 2021, eq. 17
    if name == "linear":  # Ho et al. 2020, section 4
        betas = torch.linspace(1e-4, 0.02, timesteps, dtype=torch.float64) * 1000 / timesteps
    alpha = (1 - betas).cumprod(0).sqrt()
    if ends_in_noise:  # as sampling starts from pure noise, training must show that, too (Lin et al. 2023, Alg. 1)
        alpha = (alpha - alpha[-1]) * alpha[0] / (alpha[0] - alpha[-1])
    alpha = F.pad(alpha, (0, 1), value=1.0)
    return torch.stack([alpha, (1 - alpha**2).sqrt()]).float()[..., None, None, None]


class Decoder(nn.Module):
    levels: Tensor
    lowres_levels: Tensor

    def __init__(self, s: Settings, image_width: int) -> None:
        super().__init__()
        self.unets = nn.ModuleList(Unet(s, image_width, index > 0) for index in range(len(s.image_sizes)))
        self.register_buffer("levels", schedule(s.noise_schedule, s.timesteps, ends_in_noise=True), persistent=False)
        self.register_buffer("lowres_levels", schedule("linear", LOWRES_TIMESTEPS), persistent=False)

    def lowres(self, small: Tensor, side: int, level: Tensor, noise: Tensor) -> Tensors:
        """The condition of an upsampler: small pictures with noise. The noise hides how those of the previous Unet
        differ from photos (conditioning augmentation, Ho et al. 2022)."""
        alpha, sigma = self.lowres_levels[:, level]
        return {"lowres_image": alpha * resize(small, side) + sigma * noise, "lowres_time": level}


def train(
    decoder: Decoder, batches: Iterable[Tensors], noise: Callable[[int, int], Iterable[Tensors]], s: Settings
) -> Iterator[dict[str, Tensor]]:
    """Update every Unet once for each batch (see `main`). noise: (step, b) -> what `draw_noise` returns."""
    optimizers = []
    for unet in decoder.unets:
        groups: dict[bool, Any] = {b: {"params": [], "weight_decay": b * s.weight_decay} for b in (True, False)}
        for name, weight in unet.named_parameters():  # gains, biases and null vectors do not decay
            groups[weight.ndim > 1 and "null_" not in name]["params"].append(weight)
        optimizers.append(torch.optim.AdamW([*groups.values()], s.learning_rate, (0.9, 0.99), fused=True))
    for step, batch in zip(range(s.max_steps), batches, strict=False):
        images, values = batch["images"].float() / 127.5 - 1, dict[str, Tensor]()
        for index, draws in enumerate(noise(step, len(images))):
            side, unet, optimizer = s.image_sizes[index], decoder.unets[index], optimizers[index]
            if index == 0:
                cond: Tensors = {"image_embed": batch["image_embed"], "keep_image": draws["keep_image"]}
            else:
                small = resize(images, s.image_sizes[index - 1])
                cond = decoder.lowres(small, side, draws["lowres_time"], draws["lowres_noise"])
            x0, (alpha, sigma) = resize(images, side), decoder.levels[:, draws["times"]]
            prediction = unet(alpha * x0 + sigma * draws["noise"], draws["times"], cond)
            loss = F.mse_loss(prediction, alpha * draws["noise"] - sigma * x0)  # v of Salimans and Ho 2022
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(unet.parameters(), s.max_grad_norm)
            optimizer.step()
            values |= {f"unet{index + 1}/loss": loss.detach(), f"unet{index + 1}/grad_norm": norm}
        losses, norms = (torch.stack([v for k, v in values.items() if k.endswith(end)]) for end in ("loss", "norm"))
        yield {"loss": losses.sum(), "grad_norm": norms.norm(), **values}


@torch.no_grad()
def sample(decoder: Decoder, image_embed: Tensor, s: Settings) -> list[Tensor]:
    """Pictures (b, 3, side, side) in [-1, 1] of every Unet, by DDIM (Song et al. 2021); the first one is guided."""
    b, device, pictures = len(image_embed), image_embed.device, list[Tensor]()
    cond: Tensors = {"image_embed": image_embed.repeat(2, 1), "keep_image": torch.arange(2 * b, device=device) < b}
    levels = [*torch.linspace(s.timesteps - 1, 0, s.sample_timesteps).round().long().tolist(), -1]
    for unet, side in zip(decoder.unets, s.image_sizes, strict=True):
        if pictures:
            lowres_level = torch.full((b,), int(s.lowres_noise_level * LOWRES_TIMESTEPS), device=device)
            cond = decoder.lowres(pictures[-1], side, lowres_level, torch.randn(b, 3, side, side, device=device))
        x, copies = torch.randn(b, 3, side, side, device=device), 1 if pictures else 2
        for level, next_level in pairwise(levels):
            prediction = unet(x.repeat(copies, 1, 1, 1), torch.full((copies * b,), level, device=device), cond)
            if copies == 2:  # classifier-free guidance (Ho and Salimans 2022)
                prediction = prediction[b:] + s.cond_scale * (prediction[:b] - prediction[b:])
            alpha, sigma = decoder.levels[:, level]
            x0 = (alpha * x - sigma * prediction).clamp(-1, 1)
            x = decoder.levels[0, next_level] * x0 + decoder.levels[1, next_level] * (x - alpha * x0) / sigma
        pictures.append(x)
    return pictures


def draw_noise(s: Settings, b: int, device: str) -> list[Tensors]:
    """For `train`, on b pictures: the random numbers of each Unet. The times of a batch are spread evenly."""
    return [draw_unet_noise(s, side, b, device) for side in s.image_sizes]


def draw_unet_noise(s: Settings, side: int, b: int, device: str) -> Tensors:
    times = ((torch.randperm(b) + torch.rand(b)) / b * s.timesteps).long()
    tensors = {"times": times, "keep_image": torch.rand(b) >= s.image_cond_drop_prob}
    tensors |= {"lowres_time": torch.randint(LOWRES_TIMESTEPS, (b,)), "lowres_noise": torch.randn(b, 3, side, side)}
    return {name: x.to(device) for name, x in {**tensors, "noise": torch.randn(b, 3, side, side)}.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for field in fields(Settings):
        kind, nargs = (int, "+") if isinstance(field.default, tuple) else (type(field.default), None)
        parser.add_argument(f"--{field.name}", type=kind, nargs=nargs, default=field.default)
    args = vars(parser.parse_args())
    folder, s, device = args.pop("folder"), Settings(**args), "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    pixels, vectors, side = [], [], s.image_sizes[-1]
    for path in sorted([*folder.glob("*.jpg"), *folder.glob("*.png")]):
        pixels.append(np.array(ImageOps.fit(Image.open(path).convert("RGB"), (side, side))))
        words = [np.random.default_rng([*word.encode()]).normal(size=64) for word in path.stem.split("_")]
        file = path.with_suffix(".npy")
        vectors.append(np.load(file) if file.exists() else np.sum(words, axis=0))
    if not pixels:
        raise SystemExit(f"no .jpg or .png in {folder}")
    images = torch.from_numpy(np.stack(pixels)).movedim(-1, 1).to(device)
    embeddings = F.normalize(torch.from_numpy(np.stack(vectors)).float()).to(device)
    decoder = Decoder(s, embeddings.shape[1]).to(device)
    row_batches = (torch.randint(len(images), (s.batch_size,), device=device) for _ in range(s.max_steps))
    batches = ({"images": images[rows], "image_embed": embeddings[rows]} for rows in row_batches)
    for step, values in enumerate(train(decoder, batches, lambda _, b: draw_noise(s, b, device), s)):
        if step % 50 == 0:
            print(step, {name: round(value.item(), 4) for name, value in values.items()})
    save_file(decoder.state_dict(), "decoder.safetensors")
    rows = [images[:8].float() / 127.5 - 1, *sample(decoder, embeddings[:8], s)]  # a row of photos, and of each Unet
    grid = torch.cat([torch.cat([*resize(row, side)], dim=2) for row in rows], dim=1)
    Image.fromarray(((grid + 1) * 127.5).round().byte().movedim(0, -1).cpu().numpy()).save("decoder.png")


if __name__ == "__main__":
    main()
