"""Features of frozen vision transformers, against the library that publishes these."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tandem.io import fetching
from tandem.weights.formats.towers import read_vision
from tandem.weights.load import load_vision
from tests.models.helpers import one_line_of
from tests.models.towers import vision_folder

KINDS = {
    "Dinov2Model": 1, "Dinov2WithRegistersModel": 5, "DINOv3ViTModel": 1, "ViTModel": 1, "ViTMAEForPreTraining": 1,
    "CLIPModel": 1, "SiglipModel": 0, "SiglipVisionModel": 0,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_those_of_the_library_place_by_place(kind: str, tmp_path: Path) -> None:
    theirs = vision_folder(tmp_path, kind)
    theirs = getattr(theirs, "vision_model", getattr(theirs, "vit", theirs))
    images = torch.rand(2, 3, 24, 16)
    ours = read_vision(tmp_path)
    features = ours(images, 3, 5)
    pixels = F.interpolate(images, size=(12, 20), mode="bilinear", antialias=True)
    mean, std = (torch.tensor(values)[:, None, None] for values in ([0.5, 0.4, 0.3], [0.2, 0.25, 0.3]))
    options = {} if "DINO" in kind.upper() else {"interpolate_pos_encoding": True}
    if kind == "ViTMAEForPreTraining":  # nothing is masked, and the patches keep their order
        theirs.config.mask_ratio, options["noise"] = 0.0, torch.arange(15.0).expand(2, 15)
    with torch.no_grad():
        out = theirs(pixel_values=(pixels - mean) / std, **options).last_hidden_state
    assert out.shape[1] == KINDS[kind] + 15
    for row in range(3):
        for column in range(5):
            expected = out[:, KINDS[kind] + 5 * row + column]
            torch.testing.assert_close(features[:, :, row, column], expected, rtol=1e-4, atol=1e-5)
    assert expected.std() > 0.1 and not ours.train().network.training and not features.requires_grad


def test_a_preprocessor_may_leave_the_colours_as_they_are(tmp_path: Path) -> None:
    vision_folder(tmp_path)
    images, normalizing = torch.rand(1, 3, 16, 16), read_vision(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"do_normalize": False}))
    normalized = (images - normalizing._mean) / normalizing._std
    assert torch.equal(read_vision(tmp_path)(normalized, 4, 4), normalizing(images, 4, 4))


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("config.json", {"model_type": "resnet"}, "resnet"),
        ("config.json", {"model_type": "dinov2", "hidden_size": 10**9}, "hidden_size"),
        ("config.json", {"model_type": "dinov2", "num_channels": 4}, "4 channels"),
        ("config.json", {"model_type": "dinov2", "num_hidden_layers": 9}, "larger"),
        ("preprocessor_config.json", {}, "image_mean"),
        ("preprocessor_config.json", {"image_mean": [0.5] * 3, "image_std": [0, 0, 0]}, "image_std [0, 0, 0]"),
        ("preprocessor_config.json", {"image_mean": [0.5], "image_std": [0.5]}, "three colours"),
        ("preprocessor_config.json", {"image_mean": [math.nan] * 3, "image_std": [0.5] * 3}, "image_mean [nan"),
        ("preprocessor_config.json", {"image_mean": 0.5, "image_std": 0.5}, "holds no vision model"),
        ("model.safetensors", {}, "layernorm.bias has values that are not finite"),
        ("preprocessor_config.json", None, "preprocessor_config.json"),
        ("model.safetensors", None, "model.safetensors"),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_line(
    file: str, content: dict[str, Any] | None, complaint: str, tmp_path: Path
) -> None:
    model, path = vision_folder(tmp_path), tmp_path / file
    if content is None:
        path.unlink()
    elif file == "model.safetensors":
        torch.nn.init.constant_(model.layernorm.bias, math.inf)
        model.save_pretrained(tmp_path)
    else:
        before = json.loads(path.read_text()) if file == "config.json" else {}
        path.write_text(json.dumps({**before, **content}))
    assert complaint in one_line_of(read_vision, tmp_path)


def test_a_name_of_the_hub_is_fetched_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vision_folder(tmp_path)
    fetched = []

    def fetch(description: str, model: str, name: str, heartbeat: object, *, revision: str | None) -> Path:
        fetched.append((model, revision, name))
        return tmp_path / name

    monkeypatch.setattr(fetching, "fetch_from_hub", fetch)
    vision = load_vision("alice/eye", "cpu")
    load_vision("alice/eye@v1", "cpu")
    names = "config.json", "preprocessor_config.json", "model.safetensors"
    assert fetched == [("alice/eye", revision, name) for revision in (None, "v1") for name in names]
    assert (vision.width, vision.patch_size) == (16, 4) and load_vision(None, "cpu") is None
