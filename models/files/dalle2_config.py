"""Configurations of DALLE2-pytorch 1.15.6: what they say about a decoder and its unets, and how they say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..unets.config import UnetConfig

PUBLIC_VERSION = "1.15.6"
CROSS_ATTENTION = (8, 64)  # heads and their size, which have no name there
SCHEDULES = ("cosine", "linear", "quadratic", "sigmoid", "jsd")
_OBJECTIVES = {"noise": (False, False), "x_start": (True, False), "v": (False, True)}  # predict_x_start, predict_v

# Arguments that are ours alone, and those that the public decoder sets, whatever the configuration of a unet says.
_OURS = ("cross_attn_dim_head", "cross_attn_heads", "image_embed_scale", "coordinates", "gradient_checkpointing")
_OF_THE_DECODER = ("lowres_cond", "lowres_noise_cond", "cond_on_image_embeds", "channels", "channels_out")
_PUBLIC = tuple(field.name for field in fields(UnetConfig) if field.name not in (*_OURS, *_OF_THE_DECODER))
UNET_KEYS = (*_PUBLIC, *_OF_THE_DECODER)

# Settings of the whole decoder, and what they are if nothing is said.
DECODER_WIDE: dict[str, Any] = {
    "loss_type": "l2", "image_cond_drop_prob": 0.1, "text_cond_drop_prob": 0.5, "unconditional": False,
    "lowres_downsample_first": True, "blur_prob": 0.5, "blur_sigma": 0.6, "blur_kernel_size": 3,
    "lowres_noise_sample_level": 0.2, "p2_loss_weight_k": 1, "vb_loss_weight": 0.001,
    "learned_variance_constrain_frac": False, "use_dynamic_thres": False, "dynamic_thres_percentile": 0.95,
    "clip": None,
}  # fmt: skip


def decoder_part(config: Any) -> dict[str, Any]:
    """The part about the decoder of a training configuration, or of one that has this part alone.

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


def unet_arguments(decoder: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Those of our `UnetConfig` for unet ``index``, from 0. Keys without any effect there are left out."""
    given = decoder["unets"][index]
    arguments = {name: given[name] for name in _PUBLIC if given.get(name) is not None}
    is_conditional, channels = not decoder.get("unconditional"), decoder.get("channels", 3)
    return {
        **{name: list(value) if isinstance(value, tuple) else value for name, value in arguments.items()},
        "cond_on_text_encodings": is_conditional and bool(given.get("cond_on_text_encodings")),
        "cond_on_image_embeds": is_conditional and index == 0,
        "lowres_cond": index > 0,
        "lowres_noise_cond": _after_the_first(decoder, "use_noise_for_lowres_cond", False)[index],
        "channels": channels,
        "channels_out": 2 * channels if _learned_variance(decoder)[index] else channels,
    }


def check_overruled(decoder: Mapping[str, Any], index: int, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line, if the configuration of unet ``index`` says otherwise than its arguments what the
    public decoder sets itself, without a word."""
    for name in _OF_THE_DECODER:
        said = decoder["unets"][index].get(name)
        if said is not None and said != arguments[name]:
            raise ValueError(f"unets[{index}].{name} {said}: in this decoder it is {arguments[name]}; leave it out")


def settings_of(decoders: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is around the unets, of JSON's types.

    Args:
        decoders: For each unet the configuration in which it stands at its place.

    Returns:
        Lists with a value for each unet: image_sizes, beta_schedule (names), objective ("noise", "x_start" or "v"),
        learned_variance, sample_timesteps (None: all), random_crop_sizes (None: none), use_noise_for_lowres_cond,
        use_blur_for_lowres_cond, p2_loss_weight_gamma. Values for all: timesteps and those of the public decoder with
        the names in `DECODER_WIDE`, with the defaults there.

    Raises:
        ValueError: one line, if configurations do not fit one another.
    """
    timesteps = {decoder.get("timesteps", 1000) for decoder in decoders}
    if len(timesteps) > 1:
        raise ValueError(f"the unets were trained with different timesteps: {sorted(timesteps)}")
    image_sizes: list[Any] = []
    for index, decoder in enumerate(decoders):
        sizes = _image_sizes(decoder)
        if sizes[:index] != image_sizes:
            raise ValueError(
                f"unet {index + 1} enlarges images of {sizes[:index]}, but the ones before make {image_sizes}"
            )
        image_sizes.append(sizes[index])
    each: dict[str, list[Any]] = {
        "beta_schedule": [_schedules(decoder) for decoder in decoders],
        "objective": [_objectives(decoder) for decoder in decoders],
        "learned_variance": [_learned_variance(decoder) for decoder in decoders],
        "sample_timesteps": [_for_each(decoder, "sample_timesteps", None) for decoder in decoders],
        "random_crop_sizes": [_for_each(decoder, "random_crop_sizes", None) for decoder in decoders],
        "use_noise_for_lowres_cond":
            [_after_the_first(decoder, "use_noise_for_lowres_cond", False) for decoder in decoders],
        "use_blur_for_lowres_cond":
            [_after_the_first(decoder, "use_blur_for_lowres_cond", True) for decoder in decoders],
        "p2_loss_weight_gamma": [_for_each(decoder, "p2_loss_weight_gamma", 0.0) for decoder in decoders],
    }  # fmt: skip
    return {
        "image_sizes": image_sizes, "timesteps": timesteps.pop(),
        **{name: [values[index] for index, values in enumerate(lists)] for name, lists in each.items()},
        **{name: decoders[0].get(name, usual) for name, usual in DECODER_WIDE.items()},
    }  # fmt: skip


def training_config(unets: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A whole public training configuration around unets with these arguments; what it says about data and training is
    there only because the public package asks for it.

    Args:
        unets: Their `config`.
        settings: As those of `settings_of`, of which only image_sizes is needed.

    Raises:
        ValueError: one line, for a setting that the public package does not know.
    """
    count, objectives = len(unets), settings.get("objective") or ["noise"] * len(unets)
    schedules = settings.get("beta_schedule") or ["cosine"] * count
    for name, values, known in (("objective", objectives, _OBJECTIVES), ("beta_schedule", schedules, SCHEDULES)):
        if len(values) != count or not set(values) <= set(known):
            raise ValueError(f"DALLE2-pytorch needs an {name} for each of {count} unets, one of {', '.join(known)}; "
                             f"not {values}")  # fmt: skip
    if len(settings["image_sizes"]) != count:
        raise ValueError(f"image_sizes {settings['image_sizes']}: there are {count} unets")
    first = unets[0]
    decoder: dict[str, Any] = {
        "unets": [{name: unet[name] for name in _PUBLIC} for unet in unets],
        **{name: settings.get(name, usual) for name, usual in DECODER_WIDE.items()},
        "image_sizes": list(settings["image_sizes"]),
        "timesteps": settings.get("timesteps", 1000),
        "channels": first["channels"],
        "beta_schedule": list(schedules),
        "learned_variance": [unet["channels_out"] > unet["channels"] for unet in unets],
        "predict_x_start": [_OBJECTIVES[name][0] for name in objectives],
        "predict_v": [_OBJECTIVES[name][1] for name in objectives],
        "unconditional": not first["cond_on_image_embeds"],
        "use_noise_for_lowres_cond": [unet["lowres_noise_cond"] for unet in unets[1:]],
        "use_blur_for_lowres_cond": list((settings.get("use_blur_for_lowres_cond") or [True] * count)[1:]),
    }
    for name in ("sample_timesteps", "random_crop_sizes", "p2_loss_weight_gamma"):
        if settings.get(name):
            decoder[name] = list(settings[name])
    return {
        "decoder": decoder,
        "data": {
            "webdataset_base_url": "", "text_embeddings_url": "", "splits": {"train": 0.75, "val": 0.15, "test": 0.1},
        },
        "train": {},
        "evaluate": {},
        "tracker": {"log": {"log_type": "console"}, "save": [{"save_to": "local"}]},
    }  # fmt: skip


def _count(decoder: Mapping[str, Any]) -> int:
    return len(decoder["unets"])


def _for_each(decoder: Mapping[str, Any], name: str, usual: Any) -> list[Any]:
    """A value for each unet, of a list or of one value for all."""
    value = decoder.get(name, usual)
    values = list(value) if isinstance(value, (list, tuple)) else [value] * _count(decoder)
    if len(values) != _count(decoder):
        raise ValueError(f"its {name} {value} is not for {_count(decoder)} unets")
    return values


def _after_the_first(decoder: Mapping[str, Any], name: str, usual: bool) -> list[bool]:
    """A value for each unet; the configuration leaves out the first, which has no low-resolution image."""
    value = decoder.get(name, usual)
    values = list(value) if isinstance(value, (list, tuple)) else [value] * (_count(decoder) - 1)
    values = [False, *values] if len(values) < _count(decoder) else values
    if len(values) != _count(decoder):
        raise ValueError(f"its {name} {value} is not for {_count(decoder) - 1} unets after the first")
    return [bool(each) for each in values]


def _learned_variance(decoder: Mapping[str, Any]) -> list[bool]:
    """Of each unet; one value is for the first alone."""
    value = decoder.get("learned_variance", True)
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return [bool(each) for each in [*values, *[False] * (_count(decoder) - len(values))]]


def _schedules(decoder: Mapping[str, Any]) -> list[str]:
    """Names; if nothing is said, all are cosine, but the last of several is linear."""
    count = _count(decoder)
    usual = ["cosine"] * count if count == 1 else ["cosine"] * (count - 1) + ["linear"]
    names = usual if decoder.get("beta_schedule") is None else _for_each(decoder, "beta_schedule", None)
    if not all(isinstance(name, str) and name in SCHEDULES for name in names):
        raise ValueError(f"its beta_schedule {str(names)[:80]} is not of {', '.join(SCHEDULES)}")
    return names


def _objectives(decoder: Mapping[str, Any]) -> list[str]:
    starts, vs = (_for_each(decoder, name, False) for name in ("predict_x_start", "predict_v"))
    return ["v" if v else "x_start" if start else "noise" for start, v in zip(starts, vs, strict=True)]


def _image_sizes(decoder: Mapping[str, Any]) -> list[Any]:
    sizes = decoder.get("image_sizes") or [decoder.get("image_size")]
    if len(set(sizes)) != _count(decoder) or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(f"its image_sizes {str(sizes)[:80]} are not for {_count(decoder)} unets")
    return sorted(set(sizes))
