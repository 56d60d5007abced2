"""Configurations of published encoders that serve as towers of MuLan (`models.audio_text.pretrained_towers`), and their
checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tandem.config.fields import check_whole

TEXT_KINDS = {
    "clip_text_model": "CLIPTextModel", "bert": "BertModel", "roberta": "RobertaModel",
    "xlm-roberta": "XLMRobertaModel",
}  # fmt: skip
AUDIO_KINDS = {"audio-spectrogram-transformer": "ASTModel"}

# Fields of transformers' configuration of a tower beside model_type; ours of an audio tower has a mean and a std, too.
# Sizes are at least 1.
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_TEXT_SIZES = (*_SIZES, "vocab_size", "max_position_embeddings")
_AUDIO_SIZES = (*_SIZES, "num_mel_bins", "max_length", "patch_size", "frequency_stride", "time_stride")
FIELDS = (
    *_TEXT_SIZES, *_AUDIO_SIZES, "hidden_act", "layer_norm_eps", "type_vocab_size", "pad_token_id", "qkv_bias",
)  # fmt: skip

SAMPLE_RATE = 16000


def count_patches(config: Mapping[str, Any]) -> int:
    """Number of patches of a clip's spectrogram for an audio tower; with strides below patch_size they overlap."""
    patch = config["patch_size"]
    rows = (config["num_mel_bins"] - patch) // config["frequency_stride"] + 1
    return rows * ((config["max_length"] - patch) // config["time_stride"] + 1)


def max_tokens(config: Mapping[str, Any]) -> int:
    """Number of tokens that a text tower takes."""
    return config["max_position_embeddings"] - first_position(config)


def first_position(config: Mapping[str, Any]) -> int:
    """The position of the first token; RoBERTa numbers positions from pad_token_id + 1."""
    return 1 + config["pad_token_id"] if "roberta" in config["model_type"] else 0


def check_tower(name: str, config: Any, kinds: Mapping[str, str]) -> None:
    """Raise ValueError, in one line, unless this is the configuration of a tower of these kinds. ``name`` is what holds
    it."""
    if not isinstance(config, Mapping) or config.get("model_type") not in kinds:
        raise ValueError(f"{name} {str(config)[:80]!r} is no configuration of a tower of the kind {' or '.join(kinds)}")
    for size in _AUDIO_SIZES if kinds is AUDIO_KINDS else _TEXT_SIZES:
        check_whole(f"a tower's {size}", config.get(size))
    if config["hidden_size"] % config["num_attention_heads"]:
        raise ValueError(
            f"a tower of {config['hidden_size']} channels cannot have {config['num_attention_heads']} heads"
        )
    eps = config.get("layer_norm_eps")
    if not isinstance(eps, int | float) or not 0 < eps < 1:
        raise ValueError(f"layer_norm_eps {eps!r} of a tower is not in (0, 1)")
    if "roberta" in config["model_type"]:
        padding, max_padding = config.get("pad_token_id"), config["max_position_embeddings"] - 2
        if type(padding) is not int or not 0 <= padding <= max_padding:
            raise ValueError(
                f"pad_token_id {padding!r} of a RoBERTa of {max_padding + 2} positions is not in 0 ... {max_padding}"
            )
    if kinds is AUDIO_KINDS:
        if config["patch_size"] > min(config["num_mel_bins"], config["max_length"]):
            raise ValueError(f"a patch of {config['patch_size']} is larger than a spectrogram of this tower")
        mean, std = config.get("mean"), config.get("std")
        if not all(isinstance(value, int | float) and math.isfinite(value) for value in (mean, std)) or not std:
            raise ValueError(f"mean {mean!r} and std {std!r} of an audio tower cannot normalise a spectrogram")
