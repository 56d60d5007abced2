"""The arguments of the Unet: checked, and with what they leave open filled in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .resampling import widths_of

COMBINER_GROUPS = 8  # of the GroupNorms of combine_upsample_fmaps, whatever resnet_groups says

_SIZES = (
    "cond_dim", "num_image_tokens", "num_time_tokens", "channels", "channels_out", "attn_dim_head", "attn_heads",
    "cross_attn_dim_head", "cross_attn_heads", "max_text_len", "init_dim", "image_embed_dim", "text_embed_dim",
)  # fmt: skip
_SWITCHES = (
    "lowres_cond", "lowres_noise_cond", "self_cond", "coordinates", "sparse_attn", "cosine_sim_cross_attn",
    "cosine_sim_self_attn",
    "cond_on_text_encodings", "cond_on_image_embeds", "add_image_embeds_to_time", "resnet_weight_standardization",
    "init_cross_embed", "cross_embed_downsample", "memory_efficient", "scale_skip_connection", "pixel_shuffle_upsample",
    "combine_upsample_fmaps", "gradient_checkpointing",
)  # fmt: skip


def complete(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `Unet`, of JSON's types: lists instead of tuples and instead of one value for all levels, numbers
    instead of None, and None for the width of a condition that the Unet does not have.

    Raises:
        ValueError: one line, if an argument is out of range or does not fit another one.
    """
    done: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value for name, value in arguments.items()
    }
    dim = done["dim"]
    if not _is_whole(dim, 4) or dim % 2:
        raise ValueError(f"dim {dim}: give an even number of channels of at least 4")
    mults = done["dim_mults"]
    if not isinstance(mults, list) or not mults or not all(_is_whole(mult) for mult in mults):
        raise ValueError(f"dim_mults {mults}: give a whole number of at least 1 for each level, as 1,2,4,8")
    for name, condition in (("text_embed_dim", "cond_on_text_encodings"), ("image_embed_dim", "cond_on_image_embeds")):
        if done[condition] and done[name] is None:
            raise ValueError(f"{condition} needs {name}, the width of what the Unet is conditioned on")
        done[name] = done[name] if done[condition] else None
    for name, usual in (("cond_dim", dim), ("init_dim", dim), ("channels_out", done["channels"])):
        done[name] = usual if done[name] is None else done[name]
    for name in _SIZES:
        if done[name] is not None and not _is_whole(done[name]):
            raise ValueError(f"{name} {done[name]}: give a whole number of at least 1")
    for name in _SWITCHES:
        if not isinstance(done[name], bool):
            raise ValueError(f"{name} {done[name]!r}: give True or False")
    for name, least in (("self_attn", None), ("resnet_groups", 1), ("num_resnet_blocks", 0)):
        done[name] = _per_level(name, done[name], len(mults), least)
    if done["lowres_noise_cond"] and not done["lowres_cond"]:
        raise ValueError("lowres_noise_cond is the noise level of the low-resolution image: set lowres_cond too")
    scale = done["image_embed_scale"]
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
        raise ValueError(f"image_embed_scale {scale}: give a number greater than 0")
    done["image_embed_scale"] = float(scale)
    _check_kernels(done)
    _check_groups(done)
    return done


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


def _check_kernels(done: Mapping[str, Any]) -> None:
    for name in ("init_conv_kernel_size", "final_conv_kernel_size"):
        if not _is_whole(done[name]) or done[name] % 2 == 0:
            raise ValueError(f"{name} {done[name]}: give an odd number, so that the convolution keeps the size")
    for name, odd, width in (
        ("init_cross_embed_kernel_sizes", 1, done["init_dim"]),
        ("cross_embed_downsample_kernel_sizes", 0, done["dim"] * min(done["dim_mults"])),
    ):
        sizes = done[name]
        if not isinstance(sizes, list) or not sizes or not all(_is_whole(k) and k % 2 == odd for k in sizes):
            raise ValueError(
                f"{name} {sizes}: give {'odd' if odd else 'even'} numbers, as {'3,7,15' if odd else '2,4'}"
            )
        used = done["init_cross_embed" if odd else "cross_embed_downsample"]
        if used and min(widths_of(width, len(sizes))) < 1:
            raise ValueError(f"{name} {sizes}: {width} channels are too few for {len(sizes)} kernels")


def _check_groups(done: Mapping[str, Any]) -> None:
    """GroupNorm needs groups that divide the channels."""
    dim, first, groups = done["dim"], done["init_dim"], done["resnet_groups"]
    widths = [dim * mult for mult in done["dim_mults"]]
    inputs = widths if done["memory_efficient"] else [first, *widths[:-1]]  # of the blocks on the way down
    pairs = [*zip(groups, widths, strict=True), *zip(groups, inputs, strict=True), (groups[0], dim)]
    if done["memory_efficient"]:
        pairs.append((groups[0], first))
    for count, width in pairs:
        if width % count:
            raise ValueError(f"resnet_groups {count} must divide the {width} channels of its level; change one of them")
    if done["combine_upsample_fmaps"] and dim % COMBINER_GROUPS:
        raise ValueError(f"combine_upsample_fmaps needs a dim that {COMBINER_GROUPS} divides, not {dim}")
