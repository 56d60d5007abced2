"""The conditional Unet of DALL-E 2's decoder (Ramesh et al. 2022, section 2.1), with the parameter names of
DALLE2-pytorch 1.15.6."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import at_least_fp32
from .files.pretrained import Pretrained
from .recompute import recomputed
from .unets.attention import CrossAttention
from .unets.blocks import BlockOptions, ResnetBlock
from .unets.conditions import Conditions, Context, LevelEmbedding, kept, together, tokens_from
from .unets.config import UnetConfig
from .unets.inputs import check_conditions, check_maps
from .unets.levels import attended, joined, make_levels, self_attention
from .unets.resampling import CrossEmbed, UpsampleCombiner


class Unet(Pretrained):
    """Noisy images, their noise levels and conditions -> a prediction of the shape of the images.

    Only parameters that are used exist. The output is 0 at the start.

    Raises:
        ValueError: one line, if an input does not fit.
    """

    Config = UnetConfig
    not_in_the_weights = frozenset(("gradient_checkpointing",))

    def __init__(self, config: UnetConfig) -> None:
        super().__init__()
        self.config, self.spec = config.plain(), config
        self.recompute = config.gradient_checkpointing
        dim, dim_mults, channels = config.dim, config.dim_mults, config.channels
        cond_dim, dim_time, first = config.cond_dim, 4 * dim, config.init_dim
        widest, groups = dim * dim_mults[-1], config.resnet_groups
        options = BlockOptions(
            dim_time, cond_dim, config.cross_attn_heads, config.cross_attn_dim_head, config.cosine_sim_cross_attn,
            config.resnet_weight_standardization,
        )  # fmt: skip

        dim_in = channels * (1 + config.lowres_cond + config.self_cond) + 2 * config.coordinates
        if config.init_cross_embed:
            self.init_conv: nn.Module = CrossEmbed(dim_in, first, config.init_cross_embed_kernel_sizes, stride=1)
        else:
            self.init_conv = nn.Conv2d(
                dim_in, first, config.init_conv_kernel_size, padding=config.init_conv_kernel_size // 2
            )
        self.to_time_hiddens = LevelEmbedding(dim, dim_time)
        self.to_time_tokens = tokens_from(dim_time, config.num_time_tokens, cond_dim)
        self.to_time_cond = nn.Sequential(nn.Linear(dim_time, dim_time))
        if config.lowres_noise_cond:
            self.to_lowres_noise_cond = LevelEmbedding(dim, dim_time, nn.Linear(dim_time, dim_time))
        if config.cond_on_image_embeds:
            assert config.image_embed_dim is not None
            self.image_to_tokens = tokens_from(config.image_embed_dim, config.num_image_tokens, cond_dim)
            self.null_image_embed = nn.Parameter(torch.randn(1, config.num_image_tokens, cond_dim))
            if config.add_image_embeds_to_time:
                self.to_image_hiddens = nn.Sequential(nn.Linear(config.image_embed_dim, dim_time), nn.GELU())
                self.null_image_hiddens = nn.Parameter(torch.randn(1, dim_time))
        if config.cond_on_text_encodings:
            assert config.text_embed_dim is not None
            self.text_to_cond = nn.Linear(config.text_embed_dim, cond_dim)
            self.null_text_embed = nn.Parameter(torch.randn(1, config.max_text_len, cond_dim))
        self.norm_cond = nn.LayerNorm(cond_dim) if len(dim_mults) > 1 else None  # the finest level does not attend
        self.norm_mid_cond = nn.LayerNorm(cond_dim)

        self.init_resnet_block = ResnetBlock(first, first, groups[0], options) if config.memory_efficient else None
        self.downs, ups = make_levels(config, options)
        self.mid_block1 = ResnetBlock(widest, widest, groups[-1], options, attends=True)
        self.mid_attn = self_attention(config, widest)
        self.mid_block2 = ResnetBlock(widest, widest, groups[-1], options, attends=True)
        self.ups = ups  # registered where they are called: gradients are sent in the reverse order of registration
        dims = [dim * mult for mult in reversed(dim_mults)]
        self.upsample_combiner = UpsampleCombiner(dims, dim) if config.combine_upsample_fmaps else None
        combined = (first if config.memory_efficient else dims[-1]) + (
            len(dims) * dim if config.combine_upsample_fmaps else 0
        )
        self.final_resnet_block = ResnetBlock(combined + first, dim, groups[0], options)
        self.to_out = nn.Conv2d(
            dim + channels * config.lowres_cond, config.channels_out, config.final_conv_kernel_size,
            padding=config.final_conv_kernel_size // 2,
        )  # fmt: skip
        nn.init.zeros_(self.to_out.weight)
        nn.init.zeros_(self.to_out.bias)  # type: ignore[arg-type]

        self._attending = [module for module in self.modules() if isinstance(module, CrossAttention)]
        for index, attention in enumerate(self._attending):
            attention.index = index

    @property
    def smallest_multiple(self) -> int:
        """The height and the width of the images must be multiples of this."""
        levels = len(self.spec.dim_mults)
        return int(2 ** (levels if self.spec.memory_efficient else levels - 1))

    def forward(
        self, x: Tensor | None, time: Tensor | None, *, image_embed: Tensor | None = None,
        text_encodings: Tensor | None = None, lowres_image: Tensor | None = None, lowres_time: Tensor | None = None,
        self_cond: Tensor | None = None, keep_image: Tensor | None = None, keep_text: Tensor | None = None,
        conditions: Conditions | None = None, coordinates: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Prediction for noisy images, fp32 (b, channels_out, h, w).

        Args:
            x: (b, channels, h, w), about [-1, 1]. None, with time None, is for `condition` alone.
            time: (b,), int or float: index of the noise level. It is embedded in fp32 whatever the precision.
            image_embed: (b, image_embed_dim).
            text_encodings: (b, L, text_embed_dim); rows of zeros, anywhere, are no tokens.
            lowres_image: (b, channels, h', w'); other sizes than h x w are brought to it by repeating pixels.
            lowres_time: (b,), int or float: index of the noise level of ``lowres_image``.
            self_cond: (b, channels, h, w), an earlier prediction of the clean images; None: zeros.
            keep_image, keep_text: bool (b,); False gives this sample the learned null condition. Without the
                condition itself they must be all False.
            conditions: What `condition` gives for the image embeddings and the texts, instead of these.
            coordinates: (b, 2, h, w), the places of the pixels if these are parts of pictures: the same parts of
                `coordinates_of` the whole pictures. None: the images are whole.

        Raises:
            ValueError: one line, if an input is missing, superfluous or of another shape.
        """
        given = (image_embed, text_encodings, keep_image, keep_text)
        if x is None or time is None:
            return self._conditions(*given)  # type: ignore[return-value]
        check_maps(self.spec, self.smallest_multiple, x, time, self_cond, lowres_image, lowres_time, coordinates)
        dtype = self.to_out.weight.dtype
        maps = [x.to(dtype)]
        if self.spec.self_cond:
            maps.append(torch.zeros_like(maps[0]) if self_cond is None else self_cond.to(dtype))
        if self.spec.coordinates:
            maps.append(coordinates_of(maps[0]) if coordinates is None else coordinates.to(dtype))
        if lowres_image is not None:
            maps.append(_of_size(lowres_image.to(dtype), x))
        level = self.to_time_hiddens(time)
        tokens, t = self.to_time_tokens(level), self.to_time_cond(level)
        if lowres_time is not None:
            t = t + self.to_lowres_noise_cond(lowres_time)
        fixed: tuple[Tensor | None, ...] = ()
        if conditions is None:
            hidden, image, text = self._condition_tokens(len(x), *given)
            tokens = together(tokens, image)
        else:
            _check_fit(conditions, len(x), given)
            (hidden, fixed), text = conditions, None
        inner = Context(self.norm_mid_cond(together(tokens, text)), fixed)
        outer = inner if self.norm_cond is None else Context(self.norm_cond(tokens), fixed)
        t = F.silu(t if hidden is None else t + hidden)
        out = self._through_levels(self.init_conv(torch.cat(maps, dim=1)), t, outer, inner)
        return at_least_fp32(self.to_out(out if lowres_image is None else torch.cat([out, maps[-1]], dim=1)))

    def condition(
        self, image_embed: Tensor | None = None, text_encodings: Tensor | None = None,
        keep_image: Tensor | None = None, keep_text: Tensor | None = None,
    ) -> Conditions:  # fmt: skip
        """What all calls with the same image embeddings and texts have in common; the arguments are those of forward.

        Raises:
            ValueError: as forward.
        """
        # Through the call of the module, because ZeRO 3 gathers the weights of a module when it is called.
        result: Conditions = self(None, None, image_embed=image_embed, text_encodings=text_encodings,
                                  keep_image=keep_image, keep_text=keep_text)  # fmt: skip
        return result

    def _conditions(self, *given: Tensor | None) -> Conditions:
        batch = next((len(each) for each in given if each is not None), 0)
        hidden, image, text = self._condition_tokens(batch, *given)
        inner = together(image, text)
        if inner is None:
            return Conditions(hidden, ())
        inner = self.norm_mid_cond(inner)
        outer = None if image is None or self.norm_cond is None else self.norm_cond(image)
        middle = (self.mid_block1.cross_attn, self.mid_block2.cross_attn)
        seen = [inner if attention in middle else outer for attention in self._attending]
        pairs = zip(self._attending, seen, strict=True)
        return Conditions(hidden, tuple(None if x is None else attention.to_kv(x) for attention, x in pairs))

    def _condition_tokens(
        self, batch: int, image_embed: Tensor | None, text_encodings: Tensor | None, keep_image: Tensor | None,
        keep_text: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """The vector (b, 4 dim) of the image, its tokens and those of the text (b, n, cond_dim); None for what the Unet
        does not have."""
        config, out = self.spec, self.to_out.weight
        check_conditions(config, batch, image_embed, text_encodings, keep_image, keep_text)
        hidden = image = text = None
        everything = torch.ones(batch, dtype=torch.bool, device=out.device)
        if config.cond_on_image_embeds:
            keep = everything if keep_image is None else keep_image
            embed = None if image_embed is None else image_embed.to(out.dtype) * config.image_embed_scale
            image = kept(keep, None if embed is None else self.image_to_tokens(embed), self.null_image_embed)
            if config.add_image_embeds_to_time:
                hidden = kept(keep, None if embed is None else self.to_image_hiddens(embed), self.null_image_hiddens)
        if config.cond_on_text_encodings:
            keep = everything if keep_text is None else keep_text
            if text_encodings is not None:
                encodings = text_encodings[:, : config.max_text_len]
                missing = config.max_text_len - encodings.shape[1]
                keep = F.pad((encodings != 0).any(dim=-1) & keep[:, None], (0, missing))
                text = F.pad(self.text_to_cond(encodings.to(out.dtype)), (0, 0, 0, missing))
            text = kept(keep, text, self.null_text_embed)
        return hidden, image, text

    def _through_levels(self, x: Tensor, t: Tensor, outer: Context, inner: Context) -> Tensor:
        """(b, init_dim, h, w) -> (b, dim, h, w).

        Args:
            t: SiLU of the embedding of the noise level, (b, 4 dim).
            outer, inner: What the blocks of the levels attend to, and those in the middle.
        """
        recompute = self.recompute and self.training
        first, skips, outputs = x, [], []
        if self.init_resnet_block is not None:
            x = recomputed(self.init_resnet_block, x, t, when=recompute)
        for down in self.downs:
            x, maps = down(x, t, outer, recompute)
            skips.append(maps)
        x = recomputed(self.mid_block1, x, t, inner, when=recompute)
        x = attended(self.mid_attn, x, recompute)
        x = recomputed(self.mid_block2, x, t, inner, when=recompute)
        for up in self.ups:
            x, output = up(x, skips.pop(), t, outer, recompute)
            outputs.append(output)
        if self.upsample_combiner is not None:
            x = self.upsample_combiner(x, outputs)
        return recomputed(joined, self.final_resnet_block, x, first, 1.0, t, None, when=recompute)


def coordinates_of(like: Tensor) -> Tensor:
    """Places of the pixels of whole pictures (b, c, h, w): (b, 2, h, w), across and down, from -1 to 1."""
    height, width = like.shape[-2:]
    down, across = (torch.linspace(-1, 1, side, device=like.device, dtype=like.dtype) for side in (height, width))
    grid = torch.stack([across.expand(height, width), down[:, None].expand(height, width)])
    return grid.expand(len(like), -1, -1, -1)


def _of_size(images: Tensor, like: Tensor) -> Tensor:
    """Images (b, c, h', w') brought to the height and width of ``like`` by the nearest pixel, as the public weights are
    used to it."""
    size = like.shape[-2:]
    return images if images.shape[-2:] == size else F.interpolate(images, size=size, mode="nearest")


def _check_fit(conditions: Conditions, batch: int, given: tuple[Tensor | None, ...]) -> None:
    if any(each is not None for each in given):
        raise ValueError("conditions stand for image_embed, text_encodings and what is kept of them: leave these out")
    sizes = {len(each) for each in (conditions.hidden, *conditions.keys_values) if each is not None}
    if sizes - {batch}:
        raise ValueError(f"conditions are for {min(sizes)} images, and there are {batch}")
