"""The conditional Unet of DALL-E 2's decoder (Ramesh et al. 2022, section 2.1), with the parts that the decoders of
DALLE2-pytorch 1.15.6 have by default and in LAION's published configurations."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.config.models.decoder import UnetConfig
from tandem.models.base import Pretrained
from tandem.models.layers.attention import at_least_fp32
from tandem.models.layers.convolutional import check_multiple, replicate_filters
from tandem.models.layers.recompute import recompute_in_backward

from .attention import CrossAttention, LinearAttention, MultiQueryAttention

CHANNELS = 3  # of pictures
TIME_TOKENS, IMAGE_TOKENS = 2, 4  # tokens into which a noise level and an image embedding are projected
_KERNELS = (3, 7, 15)  # sizes in `CrossEmbed`, the first layer unless plain_init_conv
_MAX_PERIOD = 10_000  # period of the slowest sinusoid over 2 pi, in noise levels


class Unet(Pretrained):
    """Noisy images, their noise levels and conditions -> a prediction of the shape of the images.

    It has only parameters that its configuration uses. The output is 0 at the start of training.
    """

    Config = UnetConfig

    def __init__(self, config: UnetConfig) -> None:
        super().__init__(config)
        self.spec = config  # the dataclass; `config` of `Pretrained` is a dict
        dim, cond_dim, hidden, widest = config.dim, config.cond_dim, 4 * config.dim, config.dim * config.dim_mults[-1]

        dim_in = CHANNELS * (1 + config.lowres_cond) + 2 * config.coordinates
        self.init_conv = nn.Conv2d(dim_in, dim, 7, padding=3) if config.plain_init_conv else CrossEmbed(dim_in, dim)
        # The Identity keeps the numbers in public names, where the sinusoidal embedding is number 0.
        self.to_time_hiddens = nn.Sequential(nn.Identity(), nn.Linear(dim, hidden), nn.GELU())
        self.to_time_tokens = _make_token_projection(hidden, TIME_TOKENS, cond_dim)
        self.to_time_cond = nn.Sequential(nn.Linear(hidden, hidden))
        if config.lowres_noise_cond:
            last = nn.Linear(hidden, hidden)
            self.to_lowres_noise_cond = nn.Sequential(nn.Identity(), nn.Linear(dim, hidden), nn.GELU(), last)
        if config.image_embed_dim:
            self.image_to_tokens = _make_token_projection(config.image_embed_dim, IMAGE_TOKENS, cond_dim)
            self.null_image_embed = nn.Parameter(torch.randn(1, IMAGE_TOKENS, cond_dim))
            self.to_image_hiddens = nn.Sequential(nn.Linear(config.image_embed_dim, hidden), nn.GELU())
            self.null_image_hiddens = nn.Parameter(torch.randn(1, hidden))
        if config.text_embed_dim:
            self.text_to_cond = nn.Linear(config.text_embed_dim, cond_dim)
            self.null_text_embed = nn.Parameter(torch.randn(1, config.max_text_len, cond_dim))
        levels = range(len(config.dim_mults))
        # No block of the finest level attends to tokens.
        self.norm_cond = nn.LayerNorm(cond_dim) if len(levels) > 1 else None
        self.norm_mid_cond = nn.LayerNorm(cond_dim)

        self.init_resnet_block = ResnetBlock(dim, dim, config) if config.memory_efficient else None
        level_pairs = [(Down(config, level), Up(config, level)) for level in levels]
        self.downs = nn.ModuleList(down for down, _ in level_pairs)
        self.mid_block1 = ResnetBlock(widest, widest, config, attends=True)
        self.mid_attn = MultiQueryAttention(widest, config)
        self.mid_block2 = ResnetBlock(widest, widest, config, attends=True)
        # Registered in the order of calls, because gradients are sent in the reverse order of registration.
        self.ups = nn.ModuleList(up for _, up in reversed(level_pairs))
        width = dim if config.memory_efficient else dim * config.dim_mults[0]
        self.final_resnet_block = ResnetBlock(width + dim, dim, config)
        channels_out = CHANNELS * (1 + config.learned_variance)
        self.to_out = nn.Conv2d(dim + CHANNELS * config.lowres_cond, channels_out, 1)
        for weight in self.to_out.parameters():
            nn.init.zeros_(weight)

    def _architecture(self) -> dict[str, Any]:
        return {**super()._architecture(), "gradient_checkpointing": None}  # it has no effect on the weights

    @property
    def smallest_multiple(self) -> int:
        """The height and the width of the images must be multiples of this."""
        return int(2 ** (len(self.spec.dim_mults) - 1 + self.spec.memory_efficient))

    def forward(
        self, x: Tensor, time: Tensor, *, image_embed: Tensor | None = None, text_encodings: Tensor | None = None,
        lowres_image: Tensor | None = None, lowres_time: Tensor | None = None, keep_image: Tensor | None = None,
        keep_text: Tensor | None = None, coordinates: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Prediction for noisy images, fp32 (b, 3, h, w), or (b, 6, h, w) with a learned variance.

        Args:
            x: (b, 3, h, w), about [-1, 1].
            time: (b,), int or float: index of the noise level. It is embedded in fp32 whatever the precision.
            image_embed: (b, image_embed_dim); None gives all samples the learned null condition.
            text_encodings: (b, L, text_embed_dim); rows of zeros count as missing tokens. None gives all
                samples the learned null condition.
            lowres_image: (b, 3, h', w'); it is resized to h x w by the nearest pixel.
            lowres_time: (b,), int or float: index of the noise level of ``lowres_image``.
            keep_image, keep_text: bool (b,); False gives this sample the learned null condition.
            coordinates: (b, 2, h, w), for images that are crops: the same crops of the `pixel_coordinates` of the whole
                pictures. None: the images are whole.

        Raises:
            ValueError: one line, if an input is missing, superfluous or of another shape.
        """
        self._check_inputs(
            x, time=time, image_embed=image_embed, text_encodings=text_encodings, lowres_image=lowres_image,
            lowres_time=lowres_time, keep_image=keep_image, keep_text=keep_text, coordinates=coordinates,
        )  # fmt: skip
        dtype, dim = self.to_out.weight.dtype, self.spec.dim
        maps = [x.to(dtype)]
        if self.spec.coordinates:
            maps.append(pixel_coordinates(maps[0]) if coordinates is None else coordinates.to(dtype))
        lowres = [] if lowres_image is None else [_resize_nearest(lowres_image.to(dtype), x)]
        hiddens = self.to_time_hiddens(sinusoids(time, dim).to(dtype))
        tokens, t = self.to_time_tokens(hiddens), self.to_time_cond(hiddens)
        if lowres_time is not None:
            t = t + self.to_lowres_noise_cond(sinusoids(lowres_time, dim).to(dtype))
        if self.spec.image_embed_dim:
            image_tokens, image_hiddens = self._image_condition(len(x), image_embed, keep_image)
            tokens, t = torch.cat([tokens, image_tokens], dim=1), t + image_hiddens
        mid_tokens = tokens
        if self.spec.text_embed_dim:
            mid_tokens = torch.cat([tokens, self._text_condition(len(x), text_encodings, keep_text)], dim=1)
        mid_tokens = self.norm_mid_cond(mid_tokens)
        tokens = mid_tokens if self.norm_cond is None else self.norm_cond(tokens)
        out = self._apply_levels(self.init_conv(torch.cat([*maps, *lowres], dim=1)), F.silu(t), tokens, mid_tokens)
        return at_least_fp32(self.to_out(torch.cat([out, *lowres], dim=1)))

    def _image_condition(self, batch: int, embed: Tensor | None, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Tokens (b, IMAGE_TOKENS, cond_dim), and a summand of the embedding of the noise level (b, 4 dim)."""
        nulls = self.null_image_embed.expand(batch, -1, -1), self.null_image_hiddens.expand(batch, -1)
        if embed is None:
            return nulls
        embed = embed.to(self.to_out.weight.dtype) * self.spec.image_embed_scale
        keep = embed.new_ones(batch, dtype=torch.bool) if keep is None else keep
        tokens = torch.where(keep[:, None, None], self.image_to_tokens(embed), self.null_image_embed)
        return tokens, torch.where(keep[:, None], self.to_image_hiddens(embed), self.null_image_hiddens)

    def _text_condition(self, batch: int, encodings: Tensor | None, keep: Tensor | None) -> Tensor:
        """Tokens (b, max_text_len, cond_dim), with learned ones in place of missing ones."""
        if encodings is None:
            return self.null_text_embed.expand(batch, -1, -1)
        encodings = encodings[:, : self.spec.max_text_len]
        num_missing = self.spec.max_text_len - encodings.shape[1]
        keep = encodings.new_ones(batch, dtype=torch.bool) if keep is None else keep
        is_present = F.pad((encodings != 0).any(dim=-1) & keep[:, None], (0, num_missing))
        tokens = F.pad(self.text_to_cond(encodings.to(self.to_out.weight.dtype)), (0, 0, 0, num_missing))
        return torch.where(is_present[..., None], tokens, self.null_text_embed)

    def _apply_levels(self, x: Tensor, t: Tensor, tokens: Tensor, mid_tokens: Tensor) -> Tensor:
        """(b, dim, h, w) -> (b, dim, h, w).

        Args:
            t: SiLU of the embedding of the noise level, (b, 4 dim).
            tokens, mid_tokens: Tokens (b, n, cond_dim) to which the blocks of the levels attend, and those to which the
                blocks in the middle attend.
        """
        recompute = self.spec.gradient_checkpointing and self.training
        first, skips = x, []
        if self.init_resnet_block is not None:
            x = recompute_in_backward(self.init_resnet_block, x, t, when=recompute)
        for down in self.downs:
            x, maps = down(x, t, tokens, recompute)
            skips.append(maps)
        x = recompute_in_backward(self.mid_block1, x, t, mid_tokens, when=recompute)
        x = recompute_in_backward(self.mid_attn, x, when=recompute)
        x = recompute_in_backward(self.mid_block2, x, t, mid_tokens, when=recompute)
        for up in self.ups:
            x = up(x, skips.pop(), t, tokens, recompute)
        return recompute_in_backward(_apply_to_joined, self.final_resnet_block, x, first, t, None, when=recompute)

    def _check_inputs(self, x: Tensor, **inputs: Tensor | None) -> None:
        if x.dim() != 4 or x.shape[1] != CHANNELS or not x.is_floating_point():
            problem = f"x has the shape {tuple(x.shape)} and the type {x.dtype}"
            raise ValueError(f"{problem}: give floating-point numbers (b, {CHANNELS}, height, width)")
        (batch, _, *size), multiple, spec = x.shape, self.smallest_multiple, self.spec
        for side in size:
            check_multiple("side", side, multiple, f"{multiple}, as the levels halve the sides")
        shapes = {  # -1: any size; None: this Unet does not take it
            "time": (batch,), "keep_image": (batch,), "keep_text": (batch,),
            "image_embed": (batch, spec.image_embed_dim) if spec.image_embed_dim else None,
            "text_encodings": (batch, -1, spec.text_embed_dim) if spec.text_embed_dim else None,
            "lowres_image": (batch, CHANNELS, -1, -1) if spec.lowres_cond else None,
            "lowres_time": (batch,) if spec.lowres_noise_cond else None,
            "coordinates": (batch, 2, *size) if spec.coordinates else None,
        }  # fmt: skip
        for name, value in inputs.items():
            shape = shapes[name]
            if value is None:
                if shape and name.startswith("lowres"):
                    raise ValueError(f"this Unet is conditioned on a low-resolution image: give {name}")
            elif shape is None:
                raise ValueError(f"{name} was given, but this Unet does not take it: leave {name} out")
            elif value.dim() != len(shape) or any(expected not in (-1, n) for n, expected in zip(value.shape, shape)):  # noqa: B905
                raise ValueError(f"{name} has the shape {tuple(value.shape)}: give {shape}, -1 for any number")


class Down(nn.Module):
    """A level on the way down: a block, blocks that may attend to the condition, and self-attention. The sides are
    halved after them, except at the last level; with memory_efficient they are halved before them at every level."""

    def __init__(self, config: UnetConfig, level: int) -> None:
        super().__init__()
        halves_first, is_last = config.memory_efficient, level == len(config.dim_mults) - 1
        narrow, wide = _level_widths(config, level)
        dim = wide if halves_first else narrow
        self.before = _make_halving(narrow, wide) if halves_first else nn.Identity()
        self.first = ResnetBlock(dim, dim, config)
        blocks = (ResnetBlock(dim, dim, config, attends=level > 0) for _ in range(config.num_resnet_blocks[level]))
        self.blocks = nn.ModuleList(blocks)
        self.attention = _make_attention(config, level, dim)
        self.after = nn.Conv2d(dim, wide, 1) if halves_first or is_last else _make_halving(dim, wide)

    def forward(self, x: Tensor, t: Tensor, tokens: Tensor, recompute: bool) -> tuple[Tensor, list[Tensor]]:
        """The level's output, and the maps after each of `blocks` and after the attention, for the way up."""
        t, tokens = t.view_as(t), tokens.view_as(tokens)  # see `ResnetBlock`
        x = recompute_in_backward(self.first, self.before(x), t, when=recompute)
        skips = []
        for block in self.blocks:
            x = recompute_in_backward(block, x, t, tokens, when=recompute)
            skips.append(x)
        if self.attention is not None:
            x = recompute_in_backward(self.attention, x, when=recompute)
        return self.after(x), [*skips, x]


class Up(nn.Module):
    """A level on the way up: blocks, self-attention, and the doubling of the sides, except at the finest level without
    memory_efficient. Each block also gets a map of the way down."""

    def __init__(self, config: UnetConfig, level: int) -> None:
        super().__init__()
        narrow, wide = _level_widths(config, level)
        dim_in, attends = wide + (wide if config.memory_efficient else narrow), level > 0
        self.first = ResnetBlock(dim_in, wide, config, attends)
        blocks = (ResnetBlock(dim_in, wide, config, attends) for _ in range(config.num_resnet_blocks[level]))
        self.blocks = nn.ModuleList(blocks)
        self.attention = _make_attention(config, level, wide)
        is_upsampling = config.memory_efficient or level > 0
        self.after = _make_doubling(wide, narrow) if is_upsampling else nn.Identity()

    def forward(self, x: Tensor, skips: list[Tensor], t: Tensor, tokens: Tensor, recompute: bool) -> Tensor:
        """The level's output. ``skips`` are the maps of the level on the way down."""
        t, tokens = t.view_as(t), tokens.view_as(tokens)
        for block, skip in zip((self.first, *self.blocks), reversed(skips), strict=True):
            x = recompute_in_backward(_apply_to_joined, block, x, skip, t, tokens, when=recompute)
        if self.attention is not None:
            x = recompute_in_backward(self.attention, x, when=recompute)
        return self.after(x)


class Block(nn.Module):
    """3 x 3 convolution, GroupNorm, FiLM (Perez et al. 2018) if there is one, SiLU."""

    def __init__(self, dim: int, dim_out: int, groups: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(dim, dim_out, 3, padding=1)
        self.norm = nn.GroupNorm(groups, dim_out)

    def forward(self, x: Tensor, film: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """(b, dim, h, w) -> (b, dim_out, h, w). ``film`` are the scale, minus 1, and the shift, (b, dim_out, 1, 1)."""
        x = self.norm(self.project(x))
        if film is not None:
            scale, shift = film
            x = x * (scale + 1) + shift
        return F.silu(x)


class ResnetBlock(nn.Module):
    """x + block2(attention(block1(x))): the first block has FiLM by the noise level; cross-attention, with its own
    residual, follows if the block ``attends``.

    A module of the Unet takes a view of each input that it uses more than once. The view adds up the gradients of these
    uses before other modules add theirs. Without it the order of the sum, and so its bits, would depend on hooks at the
    borders of modules (ZeRO 3).
    """

    def __init__(self, dim: int, dim_out: int, config: UnetConfig, attends: bool = False) -> None:
        super().__init__()
        # The public Unet has a SiLU in the place of the Identity; here `Unet` applies it once for all blocks.
        self.time_mlp = nn.Sequential(nn.Identity(), nn.Linear(4 * config.dim, 2 * dim_out))
        self.cross_attn = CrossAttention(dim_out, config) if attends else None
        self.block1 = Block(dim, dim_out, config.resnet_groups)
        self.block2 = Block(dim_out, dim_out, config.resnet_groups)
        self.res_conv = nn.Conv2d(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x: Tensor, t: Tensor, tokens: Tensor | None = None) -> Tensor:
        """(b, dim, h, w) -> (b, dim_out, h, w).

        Args:
            t: SiLU of the embedding of the noise level, (b, 4 dim).
            tokens: (b, n, cond_dim), for blocks that attend.
        """
        x = x.view_as(x)
        scale, shift = self.time_mlp(t)[:, :, None, None].chunk(2, dim=1)
        h = self.block1(x, (scale, shift))
        if self.cross_attn is not None:
            h = h + self.cross_attn(h, tokens)
        return self.block2(h) + self.res_conv(x)


class CrossEmbed(nn.Module):
    """Convolutions with kernels of several sizes, their outputs concatenated (Wang et al. 2021, "CrossFormer"). The
    smallest kernel has half of the channels, the next a quarter, the largest the rest."""

    def __init__(self, dim: int, dim_out: int) -> None:
        super().__init__()
        widths = dim_out // 2, dim_out // 4, dim_out - dim_out // 2 - dim_out // 4
        self.convs = nn.ModuleList(
            nn.Conv2d(dim, width, kernel, padding=kernel // 2) for kernel, width in zip(_KERNELS, widths, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(b, dim, h, w) -> (b, dim_out, h, w)."""
        return torch.cat([conv(x) for conv in self.convs], dim=1)


class UnshuffledConv2d(nn.Conv2d):
    """A 1 x 1 convolution of pixel-unshuffled maps: (b, c, h, w) -> (b, dim_out, h / 2, w / 2), with a weight
    (dim_out, 4 c, 1, 1). Computed as the equal 2 x 2 convolution of stride 2, without the unshuffled copy."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight.reshape(self.out_channels, -1, 2, 2), self.bias, stride=2)


def sinusoids(x: Tensor, dim: int) -> Tensor:
    """Numbers (b,) -> fp32 (b, dim): sines, then cosines of dim / 2 frequencies from 1 to 1 / 10000 (Vaswani et al.
    2017, section 3.5). Never in a lower precision: bf16 cannot tell apart the integers above 256."""
    steps = torch.arange(dim // 2, device=x.device, dtype=torch.float32)
    angles = x.float()[:, None] * torch.exp(steps * -(math.log(_MAX_PERIOD) / (dim // 2 - 1)))
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def pixel_coordinates(images: Tensor) -> Tensor:
    """Positions of the pixels of whole pictures (b, c, h, w): (b, 2, h, w), across and down, from -1 to 1."""
    height, width = images.shape[-2:]
    rows, columns = (torch.linspace(-1, 1, side, device=images.device, dtype=images.dtype) for side in (height, width))
    grid = torch.stack([columns.expand(height, width), rows[:, None].expand(height, width)])
    return grid.expand(len(images), -1, -1, -1)


def _resize_nearest(images: Tensor, like: Tensor) -> Tensor:
    """Images (b, c, h', w') resized to the height and width of ``like`` by the nearest pixel, as the public weights
    were trained."""
    size = like.shape[-2:]
    return images if images.shape[-2:] == size else F.interpolate(images, size=size, mode="nearest")


def _level_widths(config: UnetConfig, level: int) -> tuple[int, int]:
    """Channels of the next finer level (at the finest level: of the first convolution), and of the level itself."""
    widths = [config.dim, *(config.dim * mult for mult in config.dim_mults)]
    return widths[level], widths[level + 1]


def _make_attention(config: UnetConfig, level: int, dim: int) -> nn.Module | None:
    if config.self_attn[level]:
        return MultiQueryAttention(dim, config)
    return LinearAttention(dim, config) if config.sparse_attn else None


def _make_halving(dim: int, dim_out: int) -> nn.Sequential:
    """(b, dim, h, w) -> (b, dim_out, h / 2, w / 2): pixel unshuffle and a 1 x 1 convolution."""
    return nn.Sequential(nn.Identity(), UnshuffledConv2d(4 * dim, dim_out, 1))


def _make_doubling(dim: int, dim_out: int) -> nn.Sequential:
    """(b, dim, h, w) -> (b, dim_out, 2 h, 2 w): 1 x 1 convolution, SiLU and pixel shuffle. The four pixels start equal:
    see `replicate_filters`."""
    conv = replicate_filters(nn.Conv2d(dim, 4 * dim_out, 1), 4)
    return nn.Sequential(OrderedDict(net=nn.Sequential(conv, nn.SiLU(), nn.PixelShuffle(2))))


def _make_token_projection(dim_in: int, count: int, dim: int) -> nn.Sequential:
    """Vectors (b, dim_in) -> tokens (b, count, dim)."""
    return nn.Sequential(nn.Linear(dim_in, count * dim), nn.Unflatten(1, (count, dim)))


def _apply_to_joined(block: ResnetBlock, x: Tensor, skip: Tensor, t: Tensor, tokens: Tensor | None) -> Tensor:
    """The block, applied to two maps concatenated. Recomputation keeps the two maps and not their concatenation."""
    return block(torch.cat([x, skip], dim=1), t, tokens)
