"""What the Unet is built from: checked, and with what is left open filled in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.fields import ModelConfig

from .resampling import widths_of

COMBINER_GROUPS = 8  # of the GroupNorms of combine_upsample_fmaps, whatever resnet_groups says
_OPEN: Any = None  # what __post_init__ fills in


@dataclass
class UnetConfig(ModelConfig):
    """Of a `Unet`. Once it is made there are lists instead of tuples and instead of one value for all levels, numbers
    instead of None, and None for the width of a condition that the Unet does not have.

    Args:
        dim: Channels at full resolution; level n, finest first, has dim x dim_mults[n].
        image_embed_dim, text_embed_dim: Widths of the image embedding and of the text encodings.
        cond_dim: Width of the tokens that the blocks attend to; None: dim.
        num_image_tokens, num_time_tokens: Tokens that an image embedding and a noise level become.
        dim_mults: A number for each level; each level but one halves the sides, with memory_efficient each.
        channels: Of the images.
        channels_out: Of the output, as 2 x channels for a learned variance; None: channels.
        self_attn: Self-attention at the end of a level: one value, or one for each level, finest first. The middle
            always has it.
        attn_dim_head, attn_heads: Size and number of the heads of self-attention and of linear attention.
        cross_attn_dim_head, cross_attn_heads: Those of the attention to tokens. The public Unet has 64 and 8.
        lowres_cond: Conditioned on an image of lower resolution.
        lowres_noise_cond: Conditioned on the noise level of that image too.
        self_cond: Conditioned on an earlier prediction (Chen et al. 2022, "Analog bits").
        coordinates: Two more channels of the input hold the place of each pixel, across and down, from -1 to 1 (Liu et
            al. 2018, "CoordConv"). Otherwise places are known from the edges alone. The public Unet has no such thing.
        sparse_attn: Linear attention at the end of each level without self-attention.
        cosine_sim_cross_attn, cosine_sim_self_attn: Logits are 16 times the cosine of query and key.
        cond_on_text_encodings: The two blocks in the middle attend to text encodings.
        max_text_len: Tokens of a text; longer ones are cut off, the place of missing ones has learned tokens.
        cond_on_image_embeds: Conditioned on an image embedding, as tokens.
        add_image_embeds_to_time: ... and as a vector that is added to the embedding of the noise level.
        image_embed_scale: Factor of the image embedding; sqrt(image_embed_dim) gives unit vectors entries of about 1.
        init_dim: Channels after the first convolution; None: dim.
        init_conv_kernel_size: Side of its kernel without init_cross_embed.
        init_cross_embed, init_cross_embed_kernel_sizes: It consists of convolutions of these sizes.
        resnet_groups, num_resnet_blocks: Groups of the GroupNorms, and blocks on the way down and up besides the first:
            one number, or one for each level, finest first.
        resnet_weight_standardization: Standardise the weights of the blocks' convolutions.
        cross_embed_downsample, cross_embed_downsample_kernel_sizes: Halve the sides by convolutions of these sizes.
        memory_efficient: Halve the sides before the blocks of a level instead of after them.
        scale_skip_connection: Maps from the way down are multiplied by 1 / sqrt 2.
        pixel_shuffle_upsample: Double the sides by pixel shuffle; otherwise each pixel becomes four.
        final_conv_kernel_size: Side of the last convolution's kernel.
        combine_upsample_fmaps: The last block sees the maps of all levels on the way up.
        gradient_checkpointing: In training, compute blocks and attention again in the backward pass instead of keeping
            what is inside of them: less memory, the same bits, a third more time.

    Raises:
        ValueError: one line, if a value is out of range or does not fit another one.
    """

    dim: int
    image_embed_dim: int | None = None
    text_embed_dim: int | None = None
    cond_dim: int = _OPEN
    num_image_tokens: int = 4
    num_time_tokens: int = 2
    dim_mults: Sequence[int] = (1, 2, 4, 8)
    channels: int = 3
    channels_out: int = _OPEN
    self_attn: Any = False
    attn_dim_head: int = 32
    attn_heads: int = 16
    cross_attn_dim_head: int = 64
    cross_attn_heads: int = 8
    lowres_cond: bool = False
    lowres_noise_cond: bool = False
    self_cond: bool = False
    coordinates: bool = False
    sparse_attn: bool = False
    cosine_sim_cross_attn: bool = False
    cosine_sim_self_attn: bool = False
    cond_on_text_encodings: bool = False
    max_text_len: int = 256
    cond_on_image_embeds: bool = False
    add_image_embeds_to_time: bool = True
    image_embed_scale: float = 1.0
    init_dim: int = _OPEN
    init_conv_kernel_size: int = 7
    resnet_groups: Any = 8
    resnet_weight_standardization: bool = False
    num_resnet_blocks: Any = 2
    init_cross_embed: bool = True
    init_cross_embed_kernel_sizes: Sequence[int] = (3, 7, 15)
    cross_embed_downsample: bool = False
    cross_embed_downsample_kernel_sizes: Sequence[int] = (2, 4)
    memory_efficient: bool = False
    scale_skip_connection: bool = False
    pixel_shuffle_upsample: bool = True
    final_conv_kernel_size: int = 1
    combine_upsample_fmaps: bool = False
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        kinds = {field.name: field.type for field in dataclasses.fields(self)}
        for name in kinds:
            if isinstance(value := getattr(self, name), tuple):
                setattr(self, name, list(value))
        dim, mults = self.dim, self.dim_mults
        if not _is_whole(dim, 4) or dim % 2:
            raise ValueError(f"dim {dim}: give an even number of channels of at least 4")
        if not isinstance(mults, list) or not mults or not all(_is_whole(mult) for mult in mults):
            raise ValueError(f"dim_mults {mults}: give a whole number of at least 1 for each level, as 1,2,4,8")
        for name, is_used in (
            ("text_embed_dim", self.cond_on_text_encodings), ("image_embed_dim", self.cond_on_image_embeds),
        ):  # fmt: skip
            if is_used and getattr(self, name) is None:
                condition = "cond_on_text_encodings" if name == "text_embed_dim" else "cond_on_image_embeds"
                raise ValueError(f"{condition} needs {name}, the width of what the Unet is conditioned on")
            if not is_used:
                setattr(self, name, None)
        for name, usual in (("cond_dim", dim), ("init_dim", dim), ("channels_out", self.channels)):
            if getattr(self, name) is None:
                setattr(self, name, usual)
        for name, kind in kinds.items():
            value = getattr(self, name)
            if kind in ("int", "int | None") and not (_is_whole(value) or (kind != "int" and value is None)):
                raise ValueError(f"{name} {value}: give a whole number of at least 1")
            if kind == "bool" and not isinstance(value, bool):
                raise ValueError(f"{name} {value!r}: give True or False")
        for name, least in (("self_attn", None), ("resnet_groups", 1), ("num_resnet_blocks", 0)):
            setattr(self, name, _per_level(name, getattr(self, name), len(mults), least))
        if self.lowres_noise_cond and not self.lowres_cond:
            raise ValueError("lowres_noise_cond is the noise level of the low-resolution image: set lowres_cond too")
        scale = self.image_embed_scale
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
            raise ValueError(f"image_embed_scale {scale}: give a number greater than 0")
        self.image_embed_scale = float(scale)
        self._check_kernels()
        self._check_groups()

    def _check_kernels(self) -> None:
        for name in ("init_conv_kernel_size", "final_conv_kernel_size"):
            if (side := getattr(self, name)) % 2 == 0:
                raise ValueError(f"{name} {side}: give an odd number, so that the convolution keeps the size")
        for name, odd, width in (
            ("init_cross_embed_kernel_sizes", 1, self.init_dim),
            ("cross_embed_downsample_kernel_sizes", 0, self.dim * min(self.dim_mults)),
        ):
            sizes = getattr(self, name)
            if not isinstance(sizes, list) or not sizes or not all(_is_whole(k) and k % 2 == odd for k in sizes):
                raise ValueError(
                    f"{name} {sizes}: give {'odd' if odd else 'even'} numbers, as {'3,7,15' if odd else '2,4'}"
                )
            used = self.init_cross_embed if odd else self.cross_embed_downsample
            if used and min(widths_of(width, len(sizes))) < 1:
                raise ValueError(f"{name} {sizes}: {width} channels are too few for {len(sizes)} kernels")

    def _check_groups(self) -> None:
        """GroupNorm needs groups that divide the channels."""
        dim, first, groups = self.dim, self.init_dim, self.resnet_groups
        widths = [dim * mult for mult in self.dim_mults]
        inputs = widths if self.memory_efficient else [first, *widths[:-1]]  # of the blocks on the way down
        pairs = [*zip(groups, widths, strict=True), *zip(groups, inputs, strict=True), (groups[0], dim)]
        if self.memory_efficient:
            pairs.append((groups[0], first))
        for count, width in pairs:
            if width % count:
                raise ValueError(
                    f"resnet_groups {count} must divide the {width} channels of its level; change one of them"
                )
        if self.combine_upsample_fmaps and dim % COMBINER_GROUPS:
            raise ValueError(f"combine_upsample_fmaps needs a dim that {COMBINER_GROUPS} divides, not {dim}")


def _is_whole(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _per_level(name: str, value: Any, levels: int, least: int | None) -> list[Any]:
    """A value for each level; ``least`` is the least number, None for True and False."""
    values = value if isinstance(value, list) else [value] * levels
    kind = "True or False" if least is None else f"a number of at least {least}"
    if len(values) != levels:
        raise ValueError(f"{name} {value} has {len(values)} values, dim_mults {levels}: give {kind} for all levels, "
                         "or one for each, finest first")  # fmt: skip
    if not all(isinstance(each, bool) if least is None else _is_whole(each, least) for each in values):
        raise ValueError(f"{name} {value}: give {kind} for all levels, or one for each, finest first")
    return list(values)
