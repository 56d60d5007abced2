"""The MuLaN of musiclm-pytorch 0.2.8 as a `MuLaN` of the layout "musiclm", and back: the same weights by other names.

Its files hold a plain state dict and no arguments. The arguments are inferred from names and shapes, except for n_fft,
hop_length, the sample rate and the length of clips. The first two are taken to be the public defaults, 128 (or the
window, if longer) and half the window; the sample rate is taken to be 16000 Hz. The files also hold constants: the
window, a table of a time stretch that is never used, and the indices of the intermediate layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.config.models.mulan import MuLaNConfig
from tandem.io.published import part_with, read_state_dict, refuse_weights_flag, shape_of
from tandem.io.weights import on_cpu, save_pickled
from tandem.models.audio_text.mulan import MuLaN
from tandem.models.layers.attention import output_layers

from .description import format_arguments

PACKAGE = "musiclm-pytorch 0.2.8"
_N_FFT, _FF_MULT = 128, 4  # the public defaults
_TOWERS = ("audio", "text")
# The public module whose tensors stack those of all intermediate layers, the lowest first. In a MuLaN the highest is
# the first.
_LAYERS = "multi_layer_contrastive_learning"
_LAYER_PARTS = ("gamma", "latent_weight", "latent_bias")
_WINDOW, _STRETCH = "audio.spec.window", "audio.aug.0.phase_advance"
_INDICES = "{}_layers_indices"  # of the intermediate layers of a tower
_CONSTANTS = (_WINDOW, _STRETCH, *map(_INDICES.format, _TOWERS))
# torchaudio.transforms.TimeStretch(hop_length=0.8), with its default of 201 frequencies.
_STRETCH_HOP, _STRETCH_FREQUENCIES = 0.8, 201
_MAX_WINDOW = 1 << 16


def musiclm_assumptions(config: Mapping[str, Any]) -> str:
    """A text about the values that such a file lacks. `config`: arguments that were inferred from a file, or those of a
    `MuLaN`."""
    values = {"sample_rate": 16000, **config}  # arguments that were inferred from a file have no sample rate
    text = ", ".join(f"{name} {values[name]}" for name in ("n_fft", "hop_length", "sample_rate", "clip_seconds"))
    return f"{text}, because the file does not hold them"


def save_public_mulan(model: MuLaN, path: Path) -> str:
    """Write a state dict that the public MuLaN loads strictly; the file appears whole or not at all.

    Returns:
        The constructor calls of the MuLaN that loads the file, which does not hold the arguments.

    Raises:
        ValueError: one line, if the model is of another layout.
    """
    config = model.config
    if config["layout"] != "musiclm":
        raise ValueError(f"{PACKAGE} cannot load a MuLaN of --layout {config['layout']}: train with --layout musiclm")
    state = {**_make_constants(config), **_public_weights(config, on_cpu(model.state_dict()))}
    save_pickled(state, path)
    shared = {"ff_mult": config["ff_mult"]} if config["ff_mult"] != _FF_MULT else {}
    audio = {
        "dim": config["audio_dim"], "depth": config["audio_depth"], "patch_size": config["patch_size"],
        "dim_head": config["audio_dim_head"], "heads": config["audio_heads"], **shared,
        "spec_n_fft": config["n_fft"], "spec_win_length": config["win_length"], "spec_hop_length": config["hop_length"],
    }  # fmt: skip
    text = {
        "dim": config["text_dim"], "depth": config["text_depth"], "num_tokens": config["vocab_size"],
        "max_seq_len": config["max_text_tokens"], "dim_head": config["text_dim_head"], "heads": config["text_heads"],
        **shared,
    }  # fmt: skip
    options = {"dim_latent": config["dim_latent"], "sigmoid_contrastive_loss": "contrast.bias" in state}
    if layers := config["hierarchical_layers"]:
        options |= {"hierarchical_contrastive_loss": True, "hierarchical_contrastive_loss_layers": layers}
    towers = f"AudioSpectrogramTransformer({format_arguments(audio)}), TextTransformer({format_arguments(text)})"
    return f"load it into MuLaN({towers}, {format_arguments(options)}); its sounds have {config['sample_rate']} Hz"


def _name_pairs(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Our name and the public name of each weight that both have in the same form."""
    modules = [
        ("audio.embed.norm_before", "audio.to_patch_tokens.1"), ("audio.embed.project", "audio.to_patch_tokens.2"),
        ("audio.embed.norm_after", "audio.to_patch_tokens.3"),
        *((f"audio.relative_bias.mlp.{index}", f"audio.dynamic_pos_bias_mlp.{index}") for index in (0, 2, 4)),
        *((f"{tower}_latents.projections.0", f"{tower}_to_latents") for tower in _TOWERS),
    ]  # fmt: skip
    for ours, theirs in modules:
        yield from ((f"{ours}.{kind}", f"{theirs}.{kind}") for kind in ("weight", "bias"))
    yield from (("text.tokens.weight", "text.token_emb.weight"), ("text.positions.weight", "text.pos_emb.weight"))
    yield "text.cls", "text.cls_token"
    for tower in _TOWERS:
        yield f"{tower}.norms.0.weight", f"{tower}.norm.learned_gamma"
        for layer in range(config[f"{tower}_depth"]):
            attention, feed_forward, theirs = _layer_names(tower, layer)
            yield f"{attention}.norm.weight", f"{theirs}.0.norm.learned_gamma"
            yield from ((f"{attention}.{scale}", f"{theirs}.0.{scale}") for scale in ("q_scale", "k_scale"))
            yield f"{attention}.to_out.weight", f"{theirs}.0.to_out.0.weight"
            yield f"{feed_forward}.norm.weight", f"{theirs}.1.0.learned_gamma"
            yield f"{feed_forward}.expand.weight", f"{theirs}.1.1.weight"
            yield f"{feed_forward}.contract.weight", f"{theirs}.1.4.weight"


def _layer_names(tower: str, layer: int) -> tuple[str, str, str]:
    """Our names of a layer's attention and feed-forward, and their common public name."""
    ours = f"{tower}.transformer"
    return f"{ours}.attention.{layer}", f"{ours}.feed_forward.{layer}", f"{ours}.layers.{layer}"


def _convert_weights(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by our names from those by the public names. Raises ValueError, in one line, for a missing or unknown
    name."""
    remaining = {name: tensor for name, tensor in state.items() if name not in _CONSTANTS}

    def take(name: str) -> Tensor:
        if name not in remaining:
            raise ValueError(f"it lacks {name}")
        return remaining.pop(name)

    weights = {ours: take(theirs) for ours, theirs in _name_pairs(config)}
    for tower in _TOWERS:
        for layer in range(config[f"{tower}_depth"]):
            attention, _, theirs = _layer_names(tower, layer)
            parts = [take(f"{theirs}.0.{part}.weight") for part in ("to_q", "to_kv")]
            weights[f"{attention}.to_qkv.weight"] = torch.cat(parts)
    count, contrasts = config["hierarchical_layers"], _contrast_names(config)
    weights["logit_scale"] = torch.cat([take(f"{name}.temperatures").flatten().flip(0) for name in contrasts])
    weights["bias"] = torch.full_like(weights["logit_scale"], MuLaNConfig.init_bias)
    if "contrast.bias" in remaining:
        weights["bias"] = torch.cat([take(f"{name}.bias").flatten().flip(0) for name in contrasts])
    for tower in _TOWERS if count else ():
        gamma, weight, bias = (take(f"{_LAYERS}.{tower}_{part}").flip(0) for part in _LAYER_PARTS)
        for layer in range(count):
            projection = f"{tower}_latents.projections.{layer + 1}"
            weights[f"{tower}.norms.{layer + 1}.weight"] = gamma[layer, 0]
            weights |= {f"{projection}.weight": weight[layer].T, f"{projection}.bias": bias[layer, 0]}
    if remaining:
        raise ValueError(f"it holds {min(remaining)[:80]}, which is no weight of a MuLaN of {PACKAGE}")
    return weights


def _public_weights(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `_convert_weights`. Untrained biases are left out: public models have biases for the sigmoid loss
    alone."""
    state = {theirs: weights[ours] for ours, theirs in _name_pairs(config)}
    for tower in _TOWERS:
        for layer in range(config[f"{tower}_depth"]):
            attention, _, theirs = _layer_names(tower, layer)
            q, k, v = weights[f"{attention}.to_qkv.weight"].chunk(3)
            state |= {f"{theirs}.0.to_q.weight": q.clone(), f"{theirs}.0.to_kv.weight": torch.cat([k, v])}
    has_biases = bool((weights["bias"] != config["init_bias"]).any())
    for ours, theirs in [("logit_scale", "temperatures"), ("bias", "bias")][: 1 + has_biases]:
        for name, values in zip(_contrast_names(config), (weights[ours][:1], weights[ours][1:]), strict=False):
            state[f"{name}.{theirs}"] = values.flip(0)[:, None, None]
    for tower in _TOWERS if config["hierarchical_layers"] else ():
        layers = range(config["hierarchical_layers"], 0, -1)
        projections = f"{tower}_latents.projections"
        gamma = torch.stack([weights[f"{tower}.norms.{layer}.weight"] for layer in layers])
        weight = torch.stack([weights[f"{projections}.{layer}.weight"].T for layer in layers])
        bias = torch.stack([weights[f"{projections}.{layer}.bias"] for layer in layers])
        for part, values in zip(_LAYER_PARTS, (gamma[:, None], weight, bias[:, None]), strict=True):
            state[f"{_LAYERS}.{tower}_{part}"] = values
    return state


def _contrast_names(config: Mapping[str, Any]) -> list[str]:
    """The public modules that hold temperatures and biases: that of the final output, and one for all intermediate
    layers, if there are any."""
    return ["contrast", *([f"{_LAYERS}.contrast"] if config["hierarchical_layers"] else [])]


def _make_constants(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that the public package saves beside the weights, by name."""
    stretch = torch.linspace(0, math.pi * _STRETCH_HOP, _STRETCH_FREQUENCIES)[:, None]
    constants = {_WINDOW: torch.hann_window(config["win_length"]), _STRETCH: stretch}
    count = config["hierarchical_layers"]
    for tower in _TOWERS if count else ():
        constants[_INDICES.format(tower)] = torch.tensor(output_layers(config[f"{tower}_depth"], count, "even")[:0:-1])
    return constants


def read_public_mulan(path: Path, weights: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments and weights of the `MuLaN` in a file of the public state dict, or of ``MuLaNTrainer.save``.

    Raises:
        ValueError, RuntimeError, IndexError: the file is missing, damaged, hostile, of something else, or has what a
            `MuLaN` lacks; or ``weights`` is not "best", although such a file has one set of weights only.
    """
    refuse_weights_flag(path, weights)
    _, state = part_with(read_state_dict(path), _WINDOW)
    arguments = _infer_arguments(state)
    _check_constants(state, arguments)
    return arguments, _convert_weights(arguments, state)


def _infer_arguments(state: Mapping[str, Tensor]) -> dict[str, Any]:
    audio_dim, patch = shape_of(state, "audio.to_patch_tokens.2.weight", 2)
    (window,) = shape_of(state, _WINDOW, 1)
    if not 2 <= window <= _MAX_WINDOW:
        raise ValueError(f"its window has {window} samples; that of a MuLaN has 2 to {_MAX_WINDOW}")
    if math.isqrt(patch) ** 2 != patch:
        raise ValueError(f"its patches have {patch} numbers, so they are no squares; those of a MuLaN are")
    (dim_head,), (text_dim_head,) = (shape_of(state, f"{tower}.transformer.layers.0.0.q_scale", 1) for tower in _TOWERS)
    heads, _ = shape_of(state, "audio.dynamic_pos_bias_mlp.4.weight", 2)
    text_width, _ = shape_of(state, "text.transformer.layers.0.0.to_q.weight", 2)
    _, inner = shape_of(state, "audio.transformer.layers.0.1.4.weight", 2)
    vocab_size, text_dim = shape_of(state, "text.token_emb.weight", 2)
    layers = shape_of(state, f"{_LAYERS}.audio_gamma", 3)[0] if f"{_LAYERS}.audio_gamma" in state else 0
    depths = {tower: _infer_depth(state, tower) for tower in _TOWERS}
    if layers >= max(1, *depths.values()):
        raise ValueError(
            f"it has outputs of {layers} layers below the last; its towers have {depths['audio']} and {depths['text']}"
        )
    n_fft, side = max(_N_FFT, window), math.isqrt(patch)
    return {
        "n_fft": n_fft, "win_length": window, "hop_length": window // 2, "patch_size": side,
        "clip_seconds": _clip_seconds(n_fft, window // 2, side, heads),
        "audio_dim": audio_dim, "audio_depth": depths["audio"],
        "text_dim": text_dim, "text_depth": depths["text"],
        "heads": heads, "dim_head": dim_head, "text_dim_head": text_dim_head,  # audio_heads is heads by default
        "text_heads": text_width // max(1, text_dim_head),
        # inner = floor(2/3 ff_mult dim): the smallest such ff_mult.
        "ff_mult": -(-3 * inner // max(1, 2 * audio_dim)), "vocab_size": vocab_size,
        "max_text_tokens": shape_of(state, "text.pos_emb.weight", 2)[0],
        "dim_latent": shape_of(state, "text_to_latents.weight", 2)[0],
        "hierarchical_layers": layers, "layout": "musiclm", "spectrogram": "power", "spectrogram_padding": "reflect",
        "hierarchical_spacing": "even",
    }  # fmt: skip


def _clip_seconds(n_fft: int, hop_length: int, patch_size: int, heads: int) -> float:
    """The length of a clip whose attention takes 16 MB, at most 10 s. Arbitrary: the file does not hold it."""
    rows = max(1, (n_fft // 2 + 1) // patch_size)
    columns = math.isqrt(2**22 // max(1, heads)) // rows
    return max(0.01, min(10.0, columns * patch_size * hop_length // 160 / 100))  # hundredths of a second at 16 kHz


def _infer_depth(state: Mapping[str, Tensor], tower: str) -> int:
    scale = re.compile(rf"{tower}\.transformer\.layers\.\d{{1,4}}\.0\.q_scale")
    return sum(scale.fullmatch(name) is not None for name in state)


def _check_constants(state: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> None:
    for name, expected in _make_constants(arguments).items():
        if name not in state or state[name].shape != expected.shape:
            raise ValueError(f"it lacks {name} of {tuple(expected.shape)}, a constant of a MuLaN of {PACKAGE}")
        if not torch.allclose(state[name].to(torch.float64), expected.to(torch.float64), rtol=0, atol=1e-2):
            raise ValueError(f"its {name} is not that of a MuLaN of {PACKAGE}")
