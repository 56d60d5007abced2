"""Towers with the weights of published encoders, against the libraries that publish these."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.models.audio_text.pretrained_towers import Fbank, PretrainedAudioTower, PretrainedTextTower
from tandem.weights.formats.towers import Tower, read_audio_tower, read_text_tower
from tests.models.helpers import one_line_of
from tests.models.towers import VOCABULARY, audio_folder, open_clip_file, text_folder

KINDS = ["clip", "clip_text_model", "bert", "roberta"]
FORMS = ["model.safetensors", "several files", "pytorch_model.bin"]
LENGTHS = torch.tensor([9, 4, 1, 12])


def some_tokens() -> Tensor:
    """(4, 12), of which LENGTHS count; a text ends with the last token of the vocabulary, as CLIP's do. What does not
    count is no token at all."""
    tokens = torch.randint(2, VOCABULARY - 1, (4, 12), generator=torch.Generator().manual_seed(0))
    for row, length in enumerate(LENGTHS):
        tokens[row, length - 1], tokens[row, length:] = VOCABULARY - 1, -1
    return tokens


def text_tower(tower: Tower, num_lower: int = 0) -> PretrainedTextTower:
    torch.manual_seed(1)
    module = PretrainedTextTower(tower.config, num_lower, False, "last", False)
    module.encoder.load_state_dict(tower.weights)
    return module


@pytest.mark.parametrize(("kind", "form"), [*((kind, FORMS[0]) for kind in KINDS), *(("bert", form) for form in FORMS)])
def test_a_text_tower_of_transformers_gives_the_features_of_its_library(kind: str, form: str, tmp_path: Path) -> None:
    theirs = text_folder(tmp_path, kind, max_shard_size="9KB" if form == "several files" else "1GB")
    if form == "pytorch_model.bin":
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / form)
        (tmp_path / "model.safetensors").unlink()
    assert (tmp_path / "model.safetensors").exists() == (form == "model.safetensors")
    tower = text_tower(read_text_tower(tmp_path), num_lower=1)
    tokens = some_tokens()
    shown = torch.arange(12) < LENGTHS[:, None]
    with torch.no_grad():
        out = theirs(input_ids=tokens.where(shown, 1), attention_mask=shown.long(), output_hidden_states=True)
        ours = tower(tokens, LENGTHS)
    place = LENGTHS - 1 if "clip" in kind else torch.zeros(4, dtype=torch.int64)
    expected = out.last_hidden_state[torch.arange(4), place]
    below = tower.norms[0](out.hidden_states[-2][torch.arange(4), place])
    torch.testing.assert_close(ours, torch.stack([expected, below], dim=1), atol=1e-5, rtol=1e-5)
    assert expected.std(dim=0).min() > 1e-3, "the texts are all the same"


@pytest.mark.parametrize("quick_gelu", [False, True])
@pytest.mark.parametrize("form", ["file", "custom", "training", "folder"])
def test_a_text_tower_of_open_clip_gives_what_its_library_projects(form: str, quick_gelu: bool, tmp_path: Path) -> None:
    path = tmp_path / "open_clip_pytorch_model.bin"
    theirs = open_clip_file(path, custom=form == "custom", quick_gelu=quick_gelu, config=form == "folder")
    if form == "training":
        torch.save({"epoch": 3, "state_dict": {f"module.{n}": w for n, w in theirs.state_dict().items()}}, path)
    tower = text_tower(read_text_tower(tmp_path if form == "folder" else path, quick_gelu and form != "folder"))
    assert tower.encoder.config.num_attention_heads == (4 if form == "folder" else 2)
    tokens = some_tokens()
    with torch.no_grad():
        expected = theirs.encode_text(tokens.where(torch.arange(12) < LENGTHS[:, None], 0))
        projection = (theirs.text if form == "custom" else theirs).text_projection
        torch.testing.assert_close(tower(tokens, LENGTHS)[:, 0] @ projection, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("kind", "features"), [
    ("ASTModel", {"mean": -3.0, "std": 2.5}), ("ASTForAudioClassification", {"do_normalize": False}),
])  # fmt: skip
def test_an_audio_tower_gives_the_features_of_transformers_from_the_waveform_on(
    kind: str, features: dict[str, Any], tmp_path: Path
) -> None:
    theirs, extractor = audio_folder(tmp_path, kind, **features)
    config, weights = read_audio_tower(tmp_path)
    tower = PretrainedAudioTower(config, 1, False, "last", False)
    tower.encoder.load_state_dict(weights)
    for samples in (9000, 4000, 12000):  # 54 frames; 23, which are padded; 73, which are cut off
        waveforms = np.random.default_rng(samples).normal(size=(2, samples)).astype(np.float32) * 0.1
        inputs = extractor(list(waveforms), sampling_rate=16000, return_tensors="pt")
        with torch.no_grad():
            out = theirs(**inputs, output_hidden_states=True)
            ours = tower(Fbank(config)(torch.from_numpy(waveforms)))
        below = tower.norms[0](out.hidden_states[-2][:, :2].mean(dim=1))
        torch.testing.assert_close(ours, torch.stack([out.pooler_output, below], dim=1), atol=1e-4, rtol=1e-4)


def leave_out(folder: Path, part: str) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight for name, weight in weights.items() if part not in name}, folder / "model.safetensors")


@pytest.mark.parametrize(("change", "complaint"), [
    (lambda config: {**config, "model_type": "gpt2"}, "'gpt2'; use clip_text_model, bert"),
    (lambda config: {**config, "hidden_act": "none"}, "'none' is missing or unknown"),
    (lambda config: {**config, "layer_norm_eps": math.nan}, "layer_norm_eps nan"),
    (lambda config: {**config, "model_type": "roberta", "pad_token_id": None}, "pad_token_id None"),
    (lambda config: {**config, "model_type": "roberta", "pad_token_id": 11}, "not in 0 ... 10"),
    (lambda config: {**config, "position_embedding_type": "relative_key"}, "relative positions"),
    (lambda config: [config], "no encoder that can be used"),
    (lambda config: {**config, "num_attention_heads": 3}, "3 heads"),
    (lambda config: {**config, "vocab_size": 10**6}, "larger encoder"),
    (lambda config: {**config, "intermediate_size": 20}, "intermediate.dense"),
    (lambda config: {**config, "num_hidden_layers": 10**9}, "more than 16384 tensors"),
])  # fmt: skip
def test_a_text_tower_of_another_kind_is_refused_in_one_line(change: Any, complaint: str, tmp_path: Path) -> None:
    text_folder(tmp_path, "bert")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(change(config)))
    assert complaint in one_line_of(read_text_tower, tmp_path)


def test_nothing_but_a_network_is_taken_of_a_strangers_configuration(tmp_path: Path) -> None:
    """Code, kernels of attention and dropout may be named in it."""
    text_folder(tmp_path, "bert")
    config = json.loads((tmp_path / "config.json").read_text())
    named = {"auto_map": {"AutoModel": "stranger--model.Model"}, "attn_implementation": "stranger/kernel",
             "quantization_config": {"quant_method": "bitsandbytes"}, "hidden_dropout_prob": 0.5}  # fmt: skip
    expected = text_tower(read_text_tower(tmp_path)).train()(some_tokens(), LENGTHS)
    (tmp_path / "config.json").write_text(json.dumps({**config, **named}))
    tower = read_text_tower(tmp_path)
    assert not named.keys() & tower.config.keys()
    torch.testing.assert_close(text_tower(tower).train()(some_tokens(), LENGTHS), expected, rtol=0, atol=0)


def test_what_is_missing_of_a_tower_is_named_in_one_line(tmp_path: Path) -> None:
    assert "No such file" in one_line_of(read_text_tower, tmp_path / "none")
    text_folder(tmp_path, "bert")
    leave_out(tmp_path, "layer.1.intermediate.dense.bias")
    assert "no tensor encoder.layer.1.intermediate.dense.bias" in one_line_of(read_text_tower, tmp_path)
    leave_out(tmp_path, "word_embeddings")
    assert "it lacks tensors" in one_line_of(read_text_tower, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    assert "no encoder" in one_line_of(read_text_tower, tmp_path)
    audio_folder(tmp_path / "audio", sampling_rate=8000)
    assert "8000; only 16000" in one_line_of(read_audio_tower, tmp_path / "audio")
    audio_folder(tmp_path / "audio", max_length=80)
    assert "the size of a spectrogram in its preprocessor_config.json" in one_line_of(
        read_audio_tower, tmp_path / "audio"
    )
    assert "preprocessor_config.json No such file" in one_line_of(read_audio_tower, tmp_path)
