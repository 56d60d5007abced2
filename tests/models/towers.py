"""Small encoders written by the libraries that publish such encoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

VOCABULARY, DIM = 40, 16
_SIZES: dict[str, Any] = {
    "hidden_size": DIM, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24,
}  # fmt: skip
FEATURES: dict[str, Any] = {"num_mel_bins": 32, "max_length": 60}


def scattered(model: nn.Module) -> nn.Module:
    """With weights that all matter: libraries begin with biases of 0 and norms of 1."""
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=draws) * 0.2)
    return model.eval()


def text_folder(folder: Path, kind: str, max_shard_size: str = "1GB", **more: Any) -> Any:
    """Write a folder of transformers, with weights in files of such a size; returns its model. More: of the
    configuration of a BERT."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind in ("clip", "clip_text_model"):
        text = {**_SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 12, "eos_token_id": VOCABULARY - 1}
        if kind == "clip":
            vision = {**_SIZES, "image_size": 8, "patch_size": 4}
            config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
            whole = scattered(transformers.CLIPModel(config))
            whole.save_pretrained(folder)
            return whole.text_model
        model = transformers.CLIPTextModel(transformers.CLIPTextConfig(**text, hidden_act="gelu"))
    elif kind == "bert":
        sizes = {**_SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 12, **more}
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
        scattered(model).save_pretrained(folder, max_shard_size=max_shard_size)
        return model.bert
    else:
        sizes = {**_SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 14, "type_vocab_size": 1}
        model = transformers.RobertaModel(transformers.RobertaConfig(**sizes, layer_norm_eps=1e-5))
    scattered(model).save_pretrained(folder)
    return model


def audio_folder(folder: Path, kind: str = "ASTModel", **features: Any) -> Any:
    """Write a folder of transformers; returns its ASTModel and its feature extractor."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ASTConfig(**_SIZES, **FEATURES, frequency_stride=10, time_stride=8)
    model = scattered(getattr(transformers, kind)(config))
    model.save_pretrained(folder)
    extractor = transformers.ASTFeatureExtractor(**{**FEATURES, **features})
    extractor.save_pretrained(folder)
    return getattr(model, "audio_spectrogram_transformer", model), extractor


def open_clip_file(path: Path, *, custom: bool = False, quick_gelu: bool = False, config: bool = False) -> Any:
    """Write a state dict of open_clip; returns its model."""
    open_clip = pytest.importorskip("open_clip")
    torch.manual_seed(0)
    text = {"context_length": 12, "vocab_size": VOCABULARY, "width": 128, "heads": 2, "layers": 3}
    vision = {"image_size": 16, "patch_size": 8, "width": 64, "layers": 1}
    kind = open_clip.CustomTextCLIP if custom else open_clip.CLIP
    if config:
        text["heads"] = 4
        whole = {"embed_dim": 8, "vision_cfg": vision, "text_cfg": text, "quick_gelu": quick_gelu}
        (path.parent / "open_clip_config.json").write_text(json.dumps({"model_cfg": whole}))
    model = scattered(kind(embed_dim=8, vision_cfg=vision, text_cfg=text, quick_gelu=quick_gelu))
    torch.save(model.state_dict(), path)
    return model


def vision_folder(folder: Path, kind: str = "Dinov2Model", **more: Any) -> Any:
    """Write a folder of transformers with a vision transformer of 4-pixel patches; returns the model. More: of its
    configuration."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model_class, sizes = getattr(transformers, kind), {**_SIZES, "image_size": 16, "patch_size": 4, **more}
    if kind in ("CLIPModel", "SiglipModel"):
        text = {**_SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 12, "eos_token_id": VOCABULARY - 1}
        config = model_class.config_class(text_config=text, vision_config=sizes)
    else:
        config = model_class.config_class(**sizes)
    model = scattered(model_class(config))
    model.save_pretrained(folder)
    preprocessor = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.25, 0.3]}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return model
