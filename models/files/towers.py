"""Configurations and weights of published encoders, read from files on this machine, by the names that the towers of
`models.pretrained_towers` have for them. Nothing is downloaded, and no code of a file runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.files.reading import read_json

from .errors import one_line
from .pretrained import CONFIG_FILE, read_weights
from .published import read_state_dict

_ACTIVATIONS = {
    "gelu": "gelu", "quick_gelu": "quick_gelu", "relu": "relu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip


class Tower(NamedTuple):
    """An encoder: `config` of its class in `models.pretrained_towers`, and its weights by name, fp32 on the CPU."""

    config: dict[str, Any]
    weights: dict[str, Tensor]


class _Names(NamedTuple):
    """Where a library keeps an encoder's weights. `outer` maps names of tensors, `layer` those inside a layer, in which
    {} is weight or bias; several are put together, one below the other. The first of `outer` is of no other part of a
    model, so that what stands before it stands before all."""

    outer: Mapping[str, str]
    layers: str
    layer: Mapping[str, tuple[str, ...]]


def _norm(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.{end}": f"{theirs}.{end}" for end in ("weight", "bias")}


def _bert_layer(attention: str, norms: tuple[str, str]) -> dict[str, tuple[str, ...]]:
    return {
        "to_qkv": tuple(f"attention.{attention}.{part}.{{}}" for part in ("query", "key", "value")),
        "to_out": ("attention.output.dense.{}",),
        "expand": ("intermediate.dense.{}",), "contract": ("output.dense.{}",),
        "norm1": (f"{norms[0]}.{{}}",), "norm2": (f"{norms[1]}.{{}}",),
    }  # fmt: skip


_OPEN_CLIP = _Names(
    {"tokens.weight": "token_embedding.weight", "positions.weight": "positional_embedding",
     **_norm("norm_after", "ln_final")},
    "transformer.resblocks",
    {"norm1": ("ln_1.{}",), "to_qkv": ("attn.in_proj_{}",), "to_out": ("attn.out_proj.{}",), "norm2": ("ln_2.{}",),
     "expand": ("mlp.c_fc.{}",), "contract": ("mlp.c_proj.{}",)},
)  # fmt: skip
_CLIP = _Names(
    {"tokens.weight": "embeddings.token_embedding.weight", "positions.weight": "embeddings.position_embedding.weight",
     **_norm("norm_after", "final_layer_norm")},
    "encoder.layers",
    {"norm1": ("layer_norm1.{}",), "norm2": ("layer_norm2.{}",), "expand": ("mlp.fc1.{}",),
     "contract": ("mlp.fc2.{}",), "to_out": ("self_attn.out_proj.{}",),
     "to_qkv": tuple(f"self_attn.{part}_proj.{{}}" for part in "qkv")},
)  # fmt: skip
_BERT = _Names(
    {"tokens.weight": "embeddings.word_embeddings.weight", "positions.weight": "embeddings.position_embeddings.weight",
     "types": "embeddings.token_type_embeddings.weight", **_norm("norm_before", "embeddings.LayerNorm")},
    "encoder.layer", _bert_layer("self", ("attention.output.LayerNorm", "output.LayerNorm")),
)  # fmt: skip
_AST = _Names(
    {**_norm("patches", "embeddings.patch_embeddings.projection"), "class_token": "embeddings.cls_token",
     "distillation_token": "embeddings.distillation_token", "positions": "embeddings.position_embeddings",
     **_norm("norm_after", "layernorm")},
    "encoder.layer", _bert_layer("attention", ("layernorm_before", "layernorm_after")),
)  # fmt: skip


def read_text_tower(path: str | Path, quick_gelu: bool = False) -> Tower:
    """The text encoder of a file or folder, without what projects or classifies its output.

    Args:
        path: A state dict of an open_clip model (.pt, .bin or .safetensors), or a checkpoint of its training; a folder
            with an open_clip_config.json beside such a file; or a folder of transformers, with a config.json of the
            type clip, clip_text_model, bert, roberta or xlm-roberta, and model.safetensors.
        quick_gelu: The model has OpenAI's activation, which a state dict alone does not say.

    Raises:
        ValueError: one line, if it is missing, damaged, hostile or something else.
    """
    return _read(Path(path).expanduser(), "--text_tower", lambda folder: _text(folder, quick_gelu))


def read_audio_tower(path: str | Path) -> Tower:
    """The encoder in a folder of transformers' ASTModel or ASTForAudioClassification: config.json, model.safetensors
    and preprocessor_config.json, whose settings of the spectrogram become those of the tower.

    Raises:
        ValueError: one line, if it is missing, damaged, hostile or something else.
    """
    return _read(Path(path).expanduser(), "--audio_tower", _ast)


def read_towers(text: str | None, audio: str | None, quick_gelu: bool) -> dict[str, Tower]:
    """`read_text_tower` and `read_audio_tower` of the paths that are given, by argument of `MuLaN`."""
    towers = {"text_tower": read_text_tower(text, quick_gelu)} if text else {}
    return towers | ({"audio_tower": read_audio_tower(audio)} if audio else {})


def take_towers(model: Any, towers: Mapping[str, Tower], tokenizer: Any) -> None:
    """Give a `MuLaN` the weights of its towers, where there are some. Raises ValueError, in one line, if they do not
    fit, or the text tower knows fewer tokens than the tokenizer, which has a `vocab_size` and a `name`."""
    if tokenizer.vocab_size > (known := model.config["vocab_size"]):
        has = f"--tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens"
        raise ValueError(f"{has}, and --text_tower knows {known}: give the tokenizer of that tower")
    for name, tower in towers.items():
        if tower.weights:
            getattr(model, name.removesuffix("_tower")).take_weights(tower.weights)


def _read(path: Path, flag: str, read: Any) -> Tower:
    try:
        tower: Tower = read(path)
    except OSError as error:
        raise ValueError(f"cannot read {flag} {path}: {error.filename or ''} {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, IndexError) as error:
        raise ValueError(f"{flag} {path} holds no encoder that can be used: {one_line(error)}") from None
    return tower


def _text(path: Path, quick_gelu: bool) -> Tower:
    if path.is_file():
        return _open_clip(read_state_dict(path, part="state_dict"), {}, quick_gelu)
    if (path / "open_clip_config.json").is_file():
        content = read_json(path / "open_clip_config.json")
        config = content.get("model_cfg", content)
        names = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
        file = next((path / name for name in names if (path / name).is_file()), path / names[0])
        return _open_clip(read_state_dict(file), config["text_cfg"], quick_gelu or bool(config.get("quick_gelu")))
    config = read_json(path / CONFIG_FILE)
    kind = config.get("model_type")
    if kind in ("clip", "clip_text_model"):
        return _clip({**config, **(config.get("text_config") or {})}, read_weights(path))
    if kind in ("bert", "roberta", "xlm-roberta"):
        return _bert(config, read_weights(path))
    raise ValueError(f"its model_type is {str(kind)[:40]!r}; use clip, clip_text_model, bert, roberta or xlm-roberta")


def _open_clip(state: Mapping[str, Tensor], config: Mapping[str, Any], quick_gelu: bool) -> Tower:
    usual = {"embed_cls": False, "no_causal_mask": False, "ls_init_value": None, "hf_model_name": None,
             "act_kwargs": None, "norm_kwargs": None, "block_type": None, "final_ln_after_pool": False}  # fmt: skip
    for name, value in usual.items():
        if config.get(name, value) not in (value, {}):
            raise ValueError(f"its {name} is {str(config[name])[:40]}; only the plain text tower of CLIP can be taken")
    weights = _mapped(state, _OPEN_CLIP)
    # OpenAI's own files say their sizes, and have its activation. All heads of CLIP are 64 wide.
    act = "quick_gelu" if quick_gelu or "input_resolution" in state else "gelu"
    heads = config.get("heads", max(1, weights["tokens.weight"].shape[1] // 64))
    return Tower(_configured("clip", weights, heads, act, 1e-5), weights)


def _clip(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> Tower:
    weights = _mapped(state, _CLIP)
    act, eps = config.get("hidden_act", "quick_gelu"), config.get("layer_norm_eps", 1e-5)
    return Tower(_configured("clip", weights, config.get("num_attention_heads", 8), act, eps), weights)


def _bert(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> Tower:
    if config.get("position_embedding_type", "absolute") != "absolute" or config.get("is_decoder"):
        raise ValueError("it is a decoder, or has relative positions; only a plain encoder can be taken")
    weights = _mapped(state, _BERT)
    # RoBERTa's positions begin after that of the padding. A text is of one type, the first.
    first = 0 if config["model_type"] == "bert" else config.get("pad_token_id", 1) + 1
    weights["positions.weight"] = weights["positions.weight"][first:] + weights.pop("types")[0]
    act, eps = config.get("hidden_act", "gelu"), config.get("layer_norm_eps", 1e-12)
    return Tower(_configured("bert", weights, config.get("num_attention_heads", 12), act, eps), weights)


def _ast(path: Path) -> Tower:
    from ..fbank import SAMPLE_RATE

    config, features = read_json(path / CONFIG_FILE), read_json(path / "preprocessor_config.json")
    if config.get("model_type") != "audio-spectrogram-transformer" or not config.get("qkv_bias", True):
        raise ValueError(f"its model_type is {str(config.get('model_type'))[:40]!r}, not audio-spectrogram-transformer")
    if (rate := features.get("sampling_rate", SAMPLE_RATE)) != SAMPLE_RATE:
        raise ValueError(f"its sampling_rate is {rate}; only {SAMPLE_RATE} can be used")
    bands, frames = config.get("num_mel_bins", 128), config.get("max_length", 1024)
    if (features.get("num_mel_bins", 128), features.get("max_length", 1024)) != (bands, frames):
        raise ValueError("its preprocessor_config.json is of spectrograms of another size than its config.json")
    weights = _mapped(read_weights(path), _AST)
    weights["positions"], weights["patches.weight"] = weights["positions"][0], weights["patches.weight"].flatten(1)
    weights["class_tokens"] = torch.cat([weights.pop("class_token")[0], weights.pop("distillation_token")[0]])
    is_normalised = features.get("do_normalize", True)
    mean, std = features.get("mean", -4.2677393), features.get("std", 4.5689974)
    act, eps = config.get("hidden_act", "gelu"), config.get("layer_norm_eps", 1e-12)
    found = _configured("ast", weights, config.get("num_attention_heads", 12), act, eps)
    found |= {
        "sample_rate": SAMPLE_RATE, "bands": bands, "frames": frames, "patch_size": config.get("patch_size", 16),
        "frequency_stride": config.get("frequency_stride", 10), "time_stride": config.get("time_stride", 10),
        "mean": mean if is_normalised else None, "std": std if is_normalised else None,
    }  # fmt: skip
    return Tower(found, weights)


def _configured(kind: str, weights: Mapping[str, Tensor], heads: Any, activation: Any, eps: Any) -> dict[str, Any]:
    """The configuration of a tower; its sizes are those of its weights."""
    if activation not in _ACTIVATIONS:
        raise ValueError(f"its activation {str(activation)[:40]!r} is unknown; use {', '.join(_ACTIVATIONS)}")
    inner, dim = weights["layers.0.expand.weight"].shape
    depth = len({name.split(".")[1] for name in weights if name.startswith("layers.")})
    config = {
        "kind": kind, "dim": dim, "depth": depth, "heads": heads, "inner": inner, "norm_eps": eps,
        "activation": _ACTIVATIONS[activation],
    }  # fmt: skip
    if kind != "ast":
        config |= {"vocab_size": len(weights["tokens.weight"]), "max_tokens": len(weights["positions.weight"])}
    return config


def _mapped(state: Mapping[str, Tensor], names: _Names) -> dict[str, Tensor]:
    """The weights of an encoder by our names, in fp32. Raises ValueError that names the first one that is missing."""
    anchor = next(iter(names.outer.values()))
    places = [name.removesuffix(anchor) for name in state if name == anchor or name.endswith(f".{anchor}")]
    if len(places) != 1:
        raise ValueError(f"it has {len(places)} tensors {anchor}, not 1")

    def tensor(name: str) -> Tensor:
        for known in (name, name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta")):
            if places[0] + known in state:
                return state[places[0] + known].detach().float()
        raise ValueError(f"it has no tensor {places[0]}{name}")

    found = {ours: tensor(theirs) for ours, theirs in names.outer.items()}
    start = f"{places[0]}{names.layers}."
    depth = len({name.removeprefix(start).split(".")[0] for name in state if name.startswith(start)})
    for index in range(max(1, depth)):
        for ours, theirs in names.layer.items():
            for end in ("weight", "bias"):
                parts = [tensor(f"{names.layers}.{index}.{part.format(end)}") for part in theirs]
                found[f"layers.{index}.{ours}.{end}"] = torch.cat(parts)
    return found
