"""Configurations of DALLE2-pytorch 1.15.6 ("public"): the section about a decoder as `DecoderConfig`, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tandem.config.fields import check_whole
from tandem.config.models.decoder import PER_UNET, DecoderConfig, UnetConfig

CROSS_ATTENTION = (8, 64)  # heads, and width of a head: constants in DALLE2-pytorch's code
SCHEDULES = ("cosine", "linear", "sigmoid")
_OBJECTIVES = {"noise": (False, False), "x_start": (True, False), "v": (False, True)}  # predict_x_start, predict_v

# Keys of a unet for which a `DecoderConfig` has a list with a value for each unet; their defaults are `UnetConfig`'s.
_PER_UNET = tuple(name for name in PER_UNET if not name.startswith("cross_attn"))
# Key of a unet -> (switch of a `DecoderConfig`, value of the key for which the switch is set).
_SWITCHES = {"sparse_attn": ("sparse_attn", True), "memory_efficient": ("memory_efficient", True),
             "init_cross_embed": ("plain_init_conv", False)}  # fmt: skip
UNET_KEYS = (*_PER_UNET, *_SWITCHES, "image_embed_dim", "text_embed_dim", "cond_on_text_encodings", "max_text_len")
FIXED: dict[str, Any] = {
    "channels": 3, "num_image_tokens": 4, "num_time_tokens": 2, "self_cond": False, "cosine_sim_cross_attn": False,
    "cosine_sim_self_attn": False, "attend_at_middle": True, "add_image_embeds_to_time": True, "init_dim": None,
    "init_conv_kernel_size": 7, "resnet_weight_standardization": False, "init_cross_embed_kernel_sizes": [3, 7, 15],
    "cross_embed_downsample": False, "cross_embed_downsample_kernel_sizes": [2, 4], "scale_skip_connection": False,
    "pixel_shuffle_upsample": True, "final_conv_kernel_size": 1, "combine_upsample_fmaps": False,
}  # fmt: skip
"""Keys of a unet -> the only value that `Unet` supports, which is LAION's and the public default."""


def decoder_part(config: Any) -> dict[str, Any]:
    """The section about the decoder in a training configuration, or in a configuration of this section alone.

    Raises:
        ValueError: there is none.
    """
    if isinstance(config, dict) and "decoder" in config:
        config = config["decoder"]
    if not isinstance(config, dict):
        raise ValueError("its configuration has no part about a decoder")
    unets = config.get("unets")
    if not isinstance(unets, (list, tuple)) or not unets or not all(isinstance(unet, dict) for unet in unets):
        raise ValueError("its configuration has no list of unets")
    return config


def unsupported_options(decoder: Mapping[str, Any]) -> Iterator[str]:
    """A line about each option of a public unet whose value `Unet` does not support."""
    for index, unet in enumerate(decoder["unets"]):
        for name, expected in FIXED.items():
            option = unet.get(name)
            if option is not None and (list(option) if isinstance(option, tuple) else option) != expected:
                yield f"unets[{index}].{name} {str(option)[:40]}: here it is {expected}"


def decoder_config(decoder: Mapping[str, Any], count: int | None = None, width: int | None = None) -> DecoderConfig:
    """The configuration of the first ``count`` Unets (None: all) of a public decoder. Options that `Unet` does not
    support, and keys without any effect, are ignored.

    Args:
        decoder: As `decoder_part` gives it.
        width: Width of image embeddings and text encodings, for configurations without it.

    Raises:
        ValueError: one line, if there is no such decoder.
    """
    unets, first = decoder["unets"], decoder["unets"][0]
    noisy = _values_after_first(decoder, "use_noise_for_lowres_cond", False)
    blurred = _values_after_first(decoder, "use_blur_for_lowres_cond", True)
    if len(set(noisy)) > 1:
        raise ValueError("its use_noise_for_lowres_cond is not the same for all unets after the first")
    is_conditional = not decoder.get("unconditional")
    takes_text = [is_conditional and bool(unet.get("cond_on_text_encodings")) for unet in unets]
    if any(takes_text[1:]):
        raise ValueError("its unets after the first are conditioned on texts; only the first one can be")
    kinds = {"image": is_conditional, "text": takes_text[0]}
    widths: dict[str, Any] = {
        f"{kind}_embed_dim": first.get(f"{kind}_embed_dim") or width for kind, takes_kind in kinds.items() if takes_kind
    }
    for name, value in widths.items():
        if value is None:
            raise ValueError(f"its first unet has no {name}, the width of what it is conditioned on")
    check_whole("its timesteps", timesteps := decoder.get("timesteps", 1000))
    pairs = zip(*(values_per_unet(decoder, name, False) for name in ("predict_x_start", "predict_v")), strict=True)
    objectives = ["v" if is_v else "x_start" if is_x_start else "noise" for is_x_start, is_v in pairs]
    flags: dict[str, Any] = {
        **{name: [_unet_option(unet, name) for unet in unets] for name in _PER_UNET},
        "cross_attn_heads": [CROSS_ATTENTION[0]] * len(unets), "cross_attn_dim_head": [CROSS_ATTENTION[1]] * len(unets),
        "switches": [
            tuple(sorted(flag for name, (flag, value) in _SWITCHES.items() if unet.get(name) == value))
            for unet in unets
        ],
        "image_sizes": _image_sizes(decoder), "noise_schedule": _schedule_names(decoder), "objective": objectives,
        "learned_variance": _learned_variance(decoder),
    }  # fmt: skip
    return DecoderConfig(
        **{name: values[:count] for name, values in flags.items()}, **widths, image_embed_scale=1.0,
        condition_on=tuple(kind for kind, takes_kind in kinds.items() if takes_kind),
        max_text_len=first.get("max_text_len") or 256, timesteps=timesteps,
        lowres_condition="noise" if any(noisy) else "blur" if any(blurred) else "none",
        lowres_noise_level=decoder.get("lowres_noise_sample_level", 0.2), zero_terminal_snr=False,
    )  # fmt: skip


def public_config(config: DecoderConfig) -> dict[str, Any]:
    """A public training configuration with this decoder. Its sections about data and training, which the public package
    requires, hold placeholders.

    Raises:
        ValueError: one line, if the public package has no such decoder.
    """
    unets, is_text = config.unets(), "text" in config.condition_on
    for index, unet in enumerate(unets):
        check_dalle2_can_express(unet, index)
    if not set(config.noise_schedule) <= set(SCHEDULES):
        raise ValueError(f"DALLE2-pytorch has no schedule but {', '.join(SCHEDULES)}: {config.noise_schedule}")
    return {
        "decoder": {
            "unets": [
                {
                    **{name: getattr(unet, name) for name in ("image_embed_dim", "text_embed_dim", *_PER_UNET)},
                    **{name: getattr(unet, flag) == value for name, (flag, value) in _SWITCHES.items()},
                    "self_attn": [bool(number) for number in unet.self_attn], "max_text_len": unet.max_text_len,
                    "cond_on_text_encodings": is_text and index == 0,
                }
                for index, unet in enumerate(unets)
            ],
            "image_sizes": config.image_sizes, "timesteps": config.timesteps, "beta_schedule": config.noise_schedule,
            "learned_variance": [bool(number) for number in config.learned_variance],
            "predict_x_start": [_OBJECTIVES[name][0] for name in config.objective],
            "predict_v": [_OBJECTIVES[name][1] for name in config.objective],
            "unconditional": not config.condition_on, "lowres_noise_sample_level": config.lowres_noise_level,
            "use_noise_for_lowres_cond": [config.lowres_condition == "noise"] * (len(unets) - 1),
            "use_blur_for_lowres_cond": [config.lowres_condition == "blur"] * (len(unets) - 1),
        },
        "data": {
            "webdataset_base_url": "", "text_embeddings_url": "", "splits": {"train": 0.75, "val": 0.15, "test": 0.1},
        },
        "train": {},
        "evaluate": {},
        "tracker": {"log": {"log_type": "console"}, "save": [{"save_to": "local"}]},
    }  # fmt: skip


def check_dalle2_can_express(unet: UnetConfig, index: int) -> None:
    """Raise a ValueError of one line unless the public package has such a unet as number ``index``, from 0."""
    reasons = {
        f"its unets have {CROSS_ATTENTION} for cross_attn_heads and cross_attn_dim_head":
            (unet.cross_attn_heads, unet.cross_attn_dim_head) != CROSS_ATTENTION,
        "image_embed_dim must differ from cond_dim": unet.image_embed_dim == unet.cond_dim,
        "the first unet has an image embedding if it has a text":
            bool(unet.text_embed_dim) and not unet.image_embed_dim,
        "its unets do not know coordinates": unet.coordinates,
        "dim_mults must begin with 1 without memory_efficient": not unet.memory_efficient and unet.dim_mults[0] != 1,
    }  # fmt: skip
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"DALLE2-pytorch has no such unet as number {index + 1}: {reason}")


def values_per_unet(decoder: Mapping[str, Any], name: str, default: Any) -> list[Any]:
    """A key's value for each unet, from a list or from one value for all. Raises ValueError, in one line, for a list of
    another length."""
    value, count = decoder.get(name, default), len(decoder["unets"])
    values = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count:
        raise ValueError(f"its {name} {value} is not for {count} unets")
    return values


def _unet_option(unet: Mapping[str, Any], name: str) -> Any:
    """The value of a unet's key, in the form that `DecoderConfig` has for it."""
    value = getattr(UnetConfig, name, None) if unet.get(name) is None else unet[name]
    if name == "cond_dim":
        return unet["dim"] if value is None else value
    if name == "resnet_groups" and isinstance(value, (list, tuple)):
        if len(set(value)) != 1:
            raise ValueError(f"its resnet_groups {value} are not the same for all levels")
        return value[0]
    if name in ("dim_mults", "num_resnet_blocks", "self_attn"):
        values = value if isinstance(value, (list, tuple)) else [value]
        return [int(element) if isinstance(element, bool) else element for element in values]
    return value


def _values_after_first(decoder: Mapping[str, Any], name: str, default: bool) -> list[bool]:
    """A value for each unet but the first, which has no low-resolution image."""
    value, count = decoder.get(name, default), len(decoder["unets"]) - 1
    values = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(values) not in (count, count + 1):
        raise ValueError(f"its {name} {value} is not for {count} unets after the first")
    return [bool(element) for element in values[len(values) - count :]]


def _learned_variance(decoder: Mapping[str, Any]) -> list[int]:
    """A value for each unet; a single value is for the first unet alone."""
    value = decoder.get("learned_variance", True)
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return [int(bool(element)) for element in [*values, *[False] * (len(decoder["unets"]) - len(values))]]


def _schedule_names(decoder: Mapping[str, Any]) -> list[str]:
    """The name of each unet's schedule; by default cosine, but linear for the last of several unets."""
    count = len(decoder["unets"])
    default = ["cosine"] * count if count == 1 else ["cosine"] * (count - 1) + ["linear"]
    names = default if decoder.get("beta_schedule") is None else values_per_unet(decoder, "beta_schedule", None)
    if not all(isinstance(name, str) and name in SCHEDULES for name in names):
        raise ValueError(f"its beta_schedule {str(names)[:80]} is not of {', '.join(SCHEDULES)}")
    return names


def _image_sizes(decoder: Mapping[str, Any]) -> list[int]:
    sizes, count = decoder.get("image_sizes") or [decoder.get("image_size")], len(decoder["unets"])
    if not all(isinstance(size, int) and size > 0 for size in sizes) or len(set(sizes)) != count:
        raise ValueError(f"its image_sizes {str(sizes)[:80]} are not for {count} unets")
    return sorted(set(sizes))
