"""The arguments of a `MuLaN`: those that follow from others, and which values are possible."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .attention import SPACINGS
from .pretrained_towers import TEXT_KINDS, check_audio_tower, check_tower

# Upper bound of the factor of the similarities (Radford et al. 2021, section 2.5).
MAX_SCALE = 100.0


def with_own_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a `MuLaN`, in which the sizes that others decide, such as those of a pretrained tower, have their
    values. Raises ValueError, in one line, if a tower has no configuration that is possible."""
    sizes = {f"{tower}_{name}": config[name] for tower in ("audio", "text") for name in ("heads", "dim_head")}
    sizes["win_length"] = config["n_fft"]
    found = {**config, **{name: size for name, size in sizes.items() if config.get(name) is None}}
    for name in ("audio", "text"):
        if isinstance(tower := config.get(f"{name}_tower"), Mapping):
            check_audio_tower(tower) if name == "audio" else check_tower(tower, TEXT_KINDS)
            found |= {f"{name}_{size}": tower[size] for size in ("dim", "depth", "heads")}
            found[f"{name}_dim_head"] = tower["dim"] // tower["heads"]
            found |= {"vocab_size": tower["vocab_size"]} if name == "text" else {}
    return found


def check_config(config: Mapping[str, Any]) -> None:
    """Raise a ValueError, in one line that names the argument, if a `MuLaN.config` cannot be."""
    for name in ("sample_rate", "n_fft", "hop_length", "n_mels", "patch_size", "audio_dim", "audio_depth", "text_dim",
                 "text_depth", "heads", "dim_head", "audio_heads", "audio_dim_head", "text_heads", "text_dim_head",
                 "ff_mult", "vocab_size", "max_text_tokens", "dim_latent", "hierarchical_layers"):  # fmt: skip
        least = 0 if name == "hierarchical_layers" else 1
        if type(config[name]) is not int or config[name] < least:
            raise ValueError(f"{name} {config[name]!r} is not a whole number of at least {least}")
    depth = min(config["audio_depth"], config["text_depth"])
    if config["hierarchical_layers"] >= depth:
        below = f"a tower of {depth} layers has {depth - 1} below its output; use at most {depth - 1} or more layers"
        raise ValueError(f"hierarchical_layers {config['hierarchical_layers']}: {below}")
    if not 0 < config["clip_seconds"] < math.inf:
        raise ValueError(f"clip_seconds {config['clip_seconds']} is no positive length")
    if config["hierarchical_spacing"] not in SPACINGS:
        known = " or ".join(SPACINGS)
        raise ValueError(f"hierarchical_spacing {config['hierarchical_spacing']!r} is unknown; use {known}")
    for name in ("patch_dropout", "time_mask_fraction", "frequency_mask_fraction", "attn_dropout", "ff_dropout"):
        if not 0 <= config[name] < 1:
            raise ValueError(f"{name} {config[name]} is not in [0, 1)")
    visible = (1 - config["time_mask_fraction"]) * (1 - config["frequency_mask_fraction"])
    if visible <= config["patch_dropout"]:
        left = f"the largest masks leave {visible:.2g} of a spectrogram, and all of that could be dropped"
        lower = "lower it, time_mask_fraction or frequency_mask_fraction"
        raise ValueError(f"patch_dropout {config['patch_dropout']}: {left}; {lower}")
    if not 0 < config["init_temperature"] <= MAX_SCALE:
        raise ValueError(f"init_temperature {config['init_temperature']} is not in (0, {MAX_SCALE:g}]")
    text, audio = config.get("text_tower"), config.get("audio_tower")
    for name, tower in (("text_tower", text), ("audio_tower", audio)):
        if tower is not None and not isinstance(tower, Mapping):
            raise ValueError(f"{name} {str(tower)[:40]!r} is no configuration of a tower")
    if text and config["max_text_tokens"] > text["max_tokens"]:
        longest = f"the text tower takes up to {text['max_tokens']} tokens"
        raise ValueError(f"max_text_tokens {config['max_text_tokens']}: {longest}; lower it")
    if audio and config["sample_rate"] != audio["sample_rate"]:
        given = f"sample_rate {config['sample_rate']}"
        raise ValueError(f"{given}: the audio tower hears sounds of {audio['sample_rate']} Hz; use that")
    if not math.isfinite(config["init_bias"]):
        raise ValueError(f"init_bias {config['init_bias']} is not finite")
