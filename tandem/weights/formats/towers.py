"""Configurations and weights of published encoders, from files on this machine, for the towers of
`tandem.models.audio_text.pretrained_towers`. Nothing is downloaded, and no code of a file runs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tandem.config.models.towers import AUDIO_KINDS, FIELDS, SAMPLE_RATE, TEXT_KINDS, check_tower
from tandem.io.published import part_with, read_state_dict, shape_of
from tandem.io.reading import one_line, read_json
from tandem.models.audio_text import pretrained_towers as towers
from tandem.models.base import CONFIG_FILE, holds_weights, read_weights
from tandem.models.building import build_on_meta, check_arguments

if TYPE_CHECKING:
    from tandem.models import VisionFeatures

# Parts of names in open_clip's text tower -> those of the same network in transformers; replaced in this order.
_OPEN_CLIP_NAMES = {
    "positional_embedding": "embeddings.position_embedding.weight", "token_embedding": "embeddings.token_embedding",
    "transformer.resblocks": "encoder.layers", "ln_final": "final_layer_norm", ".attn.": ".self_attn.",
    ".ln_": ".layer_norm", ".c_fc.": ".fc1.", ".c_proj.": ".fc2.",
}  # fmt: skip


# Types of vision transformers -> transformers' class. The files of clip and siglip hold an encoder of texts, too.
VISION_KINDS = {
    "dinov2": "Dinov2Model", "dinov2_with_registers": "Dinov2WithRegistersModel", "dinov3_vit": "DINOv3ViTModel",
    "vit": "ViTModel", "vit_mae": "ViTModel", "clip": "CLIPVisionModel", "clip_vision_model": "CLIPVisionModel",
    "siglip": "SiglipVisionModel", "siglip_vision_model": "SiglipVisionModel",
}  # fmt: skip
_PREPROCESSOR_FILE = "preprocessor_config.json"
#: The files of a vision transformer in a folder.
VISION_FILES = (CONFIG_FILE, _PREPROCESSOR_FILE, "model.safetensors")


class Tower(NamedTuple):
    """An encoder: `config` of its class in `pretrained_towers`, and its weights by name, fp32 on the CPU."""

    config: dict[str, Any]
    weights: dict[str, Tensor]


def read_text_tower(path: str | Path, quick_gelu: bool = False) -> Tower:
    """The text encoder in a file or folder, without its output projection or classifier.

    Args:
        path: A state dict of an open_clip model (.pt, .bin or .safetensors), or a checkpoint of its training; a folder
            with an open_clip_config.json beside such a file; or a folder of transformers, with a config.json of the
            type clip, clip_text_model, bert, roberta or xlm-roberta, and model.safetensors or pytorch_model.bin.
        quick_gelu: Whether the model has OpenAI's activation, which cannot be inferred from a state dict.

    Raises:
        ValueError: one line, if it is missing, damaged, hostile or no such encoder, or transformers is missing.
    """
    return _read_tower(Path(path).expanduser(), "--text_tower", lambda path: _read_text(path, quick_gelu))


def read_audio_tower(path: str | Path) -> Tower:
    """The encoder in a folder of transformers' ASTModel or ASTForAudioClassification: config.json, its weights and
    preprocessor_config.json, whose settings of the spectrogram become those of the tower.

    Raises:
        ValueError: one line, if it is missing, damaged, hostile or no such encoder, or transformers is missing.
    """
    return _read_tower(Path(path).expanduser(), "--audio_tower", _read_ast)


def read_towers(text: str | None, audio: str | None, quick_gelu: bool) -> dict[str, Tower]:
    """The towers at the paths that are not None, by argument of `MuLaN`."""
    pretrained = {"text_tower": read_text_tower(text, quick_gelu)} if text else {}
    return pretrained | ({"audio_tower": read_audio_tower(audio)} if audio else {})


def load_towers(model: Any, pretrained: Mapping[str, Tower], tokenizer: Any) -> None:
    """Give a `MuLaN` the weights of its towers. Raises ValueError, in one line, if the text tower knows fewer tokens
    than the tokenizer, which has a `vocab_size` and a `name`."""
    if tokenizer.vocab_size > (vocab_size := model.config["vocab_size"]):
        actual = f"--tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens"
        raise ValueError(f"{actual}, and --text_tower knows {vocab_size}: give the tokenizer of that tower")
    for name, tower in pretrained.items():
        getattr(model, name.removesuffix("_tower")).encoder.load_state_dict(tower.weights)


def import_vision_library() -> Any:
    """The package transformers. Raises ValueError, in one line, if it is not installed."""
    return towers.import_transformers("--align_with")


def read_vision(path: Path) -> VisionFeatures:
    """The vision transformer in a folder of transformers: a config.json of one of VISION_KINDS, its weights, and a
    preprocessor_config.json, which states the mean and the deviation of its images' colours.

    Raises:
        ValueError: one line, if it is missing, damaged, hostile or no such model, or transformers is missing.
    """
    from tandem.models import VisionFeatures

    transformers = import_vision_library()
    with _one_line_errors(path, "--align_with", "vision model"):
        config = read_json(path / CONFIG_FILE)
        model_class = getattr(transformers, VISION_KINDS[_check_type(config, VISION_KINDS)])
        config = config.get("vision_config") or config
        preprocessor, state = read_json(path / _PREPROCESSOR_FILE), _read_state(path)
        check_arguments(config, state)
        if (channels := config.get("num_channels", 3)) != 3:
            raise ValueError(f"its images have {channels} channels, not 3")
        options = {"add_pooling_layer": False} if model_class is transformers.ViTModel else {}
        network = _load_network(model_class, model_class.config_class.from_dict(config), state, options)
        if bad_name := next((n for n, weight in network.state_dict().items() if not weight.isfinite().all()), None):
            raise ValueError(f"its tensor {bad_name} has values that are not finite")
        mean, std = [0.0] * 3, [1.0] * 3
        if preprocessor.get("do_normalize", True):
            mean, std = preprocessor["image_mean"], preprocessor["image_std"]
        if not (len(mean) == len(std) == 3 and all(map(math.isfinite, [*mean, *std])) and min(std) > 0):
            raise ValueError(f"its image_mean {mean} and image_std {std} are not of three colours, or not above 0")
        colours = {"image_mean": torch.tensor(mean), "image_std": torch.tensor(std)}
        return VisionFeatures(network, mean, std, _sha256({**state, **colours}))


def _read_tower(path: Path, flag: str, read: Callable[[Path], tuple[dict[str, Any], dict[str, Tensor]]]) -> Tower:
    towers.import_transformers()
    with _one_line_errors(path, flag, "encoder"):
        config, state = read(path)
        return Tower(config, _convert_weights(config, state))


@contextmanager
def _one_line_errors(path: Path, flag: str, what: str) -> Iterator[None]:
    """Turn every error of reading a network into a ValueError of one line."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot read {flag} {path}: {error.filename or ''} {error.strerror or error}") from None
    except Exception as error:  # transformers can raise anything for untrusted values
        reason = f"{error} is missing or unknown" if isinstance(error, KeyError) else one_line(error)
        raise ValueError(f"{flag} {path} holds no {what} that can be used: {reason}") from None


def _read_text(path: Path, quick_gelu: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if path.is_file():
        return _convert_open_clip(read_state_dict(path), {}, quick_gelu)
    if (path / "open_clip_config.json").is_file():
        content = read_json(path / "open_clip_config.json")
        config = content.get("model_cfg", content)
        names = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
        file = next((path / name for name in names if (path / name).is_file()), path / names[0])
        quick_gelu = quick_gelu or bool(config.get("quick_gelu"))
        return _convert_open_clip(read_state_dict(file), config["text_cfg"], quick_gelu)
    if quick_gelu:
        raise ValueError("its config.json names the activation: leave out --text_tower_quick_gelu")
    config = read_json(path / CONFIG_FILE)
    if config.get("position_embedding_type", "absolute") != "absolute" or config.get("is_decoder"):
        raise ValueError(
            "it is a decoder or has relative positions; only an encoder with absolute positions can be used"
        )
    if config.get("model_type") == "clip":
        config = {**config, **(config.get("text_config") or {}), "model_type": "clip_text_model"}
    return _select_fields(config, TEXT_KINDS), _read_state(path)


def _read_ast(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, extractor = read_json(path / CONFIG_FILE), read_json(path / _PREPROCESSOR_FILE)
    tower_config = _select_fields(config, AUDIO_KINDS)
    if (rate := extractor.get("sampling_rate", SAMPLE_RATE)) != SAMPLE_RATE:
        raise ValueError(f"its sampling_rate is {rate}; only {SAMPLE_RATE} is supported")
    sizes = extractor.get("num_mel_bins", 128), extractor.get("max_length", 1024)
    if sizes != (tower_config["num_mel_bins"], tower_config["max_length"]):
        raise ValueError("the size of a spectrogram in its preprocessor_config.json is not that in its config.json")
    statistics = {"mean": extractor.get("mean", -4.2677393), "std": extractor.get("std", 4.5689974)}
    no_statistics = {"mean": 0.0, "std": 0.5}  # (x - 0) / (2 x 0.5)
    return {**tower_config, **(statistics if extractor.get("do_normalize", True) else no_statistics)}, _read_state(path)


def _select_fields(config: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a tower's network in a published config.json, with the defaults of its type."""
    model_type = _check_type(config, kinds)
    defaults = getattr(towers.import_transformers(), kinds[model_type]).config_class().to_dict()
    return {"model_type": model_type, **{name: config.get(name, defaults[name]) for name in FIELDS if name in defaults}}


def _check_type(config: Mapping[str, Any], kinds: Mapping[str, str]) -> str:
    """The model_type of a published config.json. Raises ValueError, in one line, if it is none of `kinds`."""
    model_type: Any = config.get("model_type")
    if model_type not in kinds:
        raise ValueError(f"its model_type is {str(model_type)[:40]!r}; use {', '.join(kinds)}")
    return str(model_type)


def _read_state(path: Path) -> dict[str, Tensor]:
    bin_path = path / "pytorch_model.bin"
    return read_state_dict(bin_path) if bin_path.is_file() and not holds_weights(path) else read_weights(path)


def _sha256(state: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _convert_open_clip(
    state: Mapping[str, Tensor], config: Mapping[str, Any], quick_gelu: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """open_clip's text tower as transformers' CLIPTextModel, which is the same network. open_clip's own layers are not
    used, because their attention kernels, and so its rounding, differ with and without autograd."""
    defaults = {"embed_cls": False, "no_causal_mask": False, "ls_init_value": None, "hf_model_name": None,
                "act_kwargs": None, "norm_kwargs": None, "block_type": None, "final_ln_after_pool": False}  # fmt: skip
    for name, value in defaults.items():
        if config.get(name, value) not in (value, {}):
            raise ValueError(f"its {name} is {str(config[name])[:40]}; only the plain text tower of CLIP can be used")
    embedding = "token_embedding.weight"
    _, state = part_with(state, embedding)
    shape_of(state, embedding, 2)
    weights: dict[str, Tensor] = {}
    for our_name, tensor in state.items():
        for public_part, our_part in _OPEN_CLIP_NAMES.items():
            our_name = our_name.replace(public_part, our_part)
        start, in_projection, end = our_name.partition("in_proj_")
        names = [f"{start}{part}_proj.{end}" for part in "qkv"] if in_projection else [our_name]
        weights |= zip(names, tensor.chunk(3) if in_projection else [tensor], strict=True)
    tokens, dim = weights["embeddings.token_embedding.weight"].shape
    layers = {name.split(".")[2] for name in weights if name.startswith("encoder.layers.")}
    return {
        "model_type": "clip_text_model", "hidden_size": dim, "num_hidden_layers": len(layers),
        # All heads of CLIP are 64 wide.
        "num_attention_heads": config.get("heads", max(1, dim // 64)),
        "intermediate_size": len(weights["encoder.layers.0.mlp.fc1.weight"]),
        "vocab_size": tokens, "layer_norm_eps": 1e-5,
        "max_position_embeddings": len(weights["embeddings.position_embedding.weight"]),
        # Only OpenAI's own files hold input_resolution, and their models have its activation.
        "hidden_act": "quick_gelu" if quick_gelu or "input_resolution" in state else "gelu",
    }, weights  # fmt: skip


def _convert_weights(config: Mapping[str, Any], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of an encoder by their present names, in fp32."""
    check_tower("its config.json", config, AUDIO_KINDS if config["model_type"] in AUDIO_KINDS else TEXT_KINDS)
    model_class, model_config, options = towers.get_constructor(config)
    weights: dict[str, Tensor] = _load_network(model_class, model_config, state, options).state_dict()
    return weights


def _load_network(model_class: Any, model_config: Any, state: dict[str, Tensor], options: dict[str, Any]) -> Any:
    """The network of transformers with these weights, in fp32; transformers renames those of its earlier versions and
    of models with a head. Raises ValueError that names the first one that is missing."""
    expected = build_on_meta(lambda: model_class(model_config, **options)).state_dict()
    if sum(weight.numel() for weight in expected.values()) > sum(tensor.numel() for tensor in state.values()):
        raise ValueError("it lacks tensors, or its config.json is of a larger encoder")
    model, info = model_class.from_pretrained(
        None, config=model_config, state_dict=state, dtype=torch.float32, output_loading_info=True,
        ignore_mismatched_sizes=True, **options,
    )  # fmt: skip
    if bad_names := sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}):
        raise ValueError(f"it has no tensor {bad_names[0]}, or one of another shape than config.json says")
    return model
