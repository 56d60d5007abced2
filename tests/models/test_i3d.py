"""I3D: its size and names, its padding against TensorFlow's rule, what it does to videos, and its files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.models.features.i3d import I3D, load_i3d, pad_same
from tests.models.helpers import assert_same_bits, one_line_of, refused


@pytest.fixture(scope="module")
def model() -> I3D:
    torch.manual_seed(0)
    model = I3D()
    for parameter in model.parameters():
        if parameter.dim() == 5:  # so that values neither vanish nor grow from layer to layer
            torch.nn.init.normal_(parameter, std=(2 / parameter[0].numel()) ** 0.5)
    return model


def some_videos(frames: int = 9, side: int = 20) -> Tensor:
    return torch.rand(2, 3, frames, side, side, generator=torch.Generator().manual_seed(0))


def test_it_has_the_size_and_the_names_of_the_published_network(model: I3D) -> None:
    assert sum(parameter.numel() for parameter in model.parameters()) == 12_697_264
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes["Conv3d_1a_7x7.conv3d.weight"] == (64, 3, 7, 7, 7)
    assert shapes["Mixed_4f.b3b.conv3d.weight"] == (128, 528, 1, 1, 1) and shapes["logits.conv3d.bias"] == (400,)
    convolutions = {name for name, shape in shapes.items() if len(shape) == 5}
    assert len(convolutions) == 3 + 9 * 6 + 1
    assert len(shapes) == len(convolutions) + 1 + 5 * (len(convolutions) - 1), "a bias, or five tensors of a norm"


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "in_front", "behind"),
    [(224, 7, 2, 2, 3), (9, 7, 2, 3, 3), (112, 3, 2, 0, 1), (9, 3, 1, 1, 1), (5, 2, 2, 0, 1), (4, 2, 2, 0, 0)],
)
def test_padding_is_that_of_tensorflow(size: int, kernel: int, stride: int, in_front: int, behind: int) -> None:
    # The layers, each of one kernel, show it for few sizes.
    padded = pad_same(torch.ones(1, 1, size, 1, 1), (kernel, 1, 1), (stride, 1, 1)).flatten()
    assert padded.tolist() == [0] * in_front + [1] * size + [0] * behind


@pytest.mark.parametrize("given, eps", [({}, 1e-3), ({"eps": 1e-5}, 1e-5)])
def test_a_unit_normalises_by_the_averages_of_its_training_with_tensorflows_epsilon_or_another(
    model: I3D, given: dict[str, float], eps: float
) -> None:
    unit, x = I3D(**given).Mixed_3b.b0, torch.randn(1, 192, 2, 3, 3)
    for tensor in (unit.bn.running_mean, unit.bn.running_var, unit.bn.weight, unit.bn.bias):
        tensor.copy_(torch.rand(64) / 100 + 1e-3)
    mean, variance, scale, shift = (
        tensor[:, None, None, None]
        for tensor in (unit.bn.running_mean, unit.bn.running_var, unit.bn.weight, unit.bn.bias)
    )
    expected = (F.conv3d(x, unit.conv3d.weight) - mean) / (variance + eps).sqrt() * scale + shift
    torch.testing.assert_close(unit(x), expected.clamp_min(0), rtol=1e-4, atol=1e-5)


def test_features_are_of_8_bits_and_224_pixels_in_fp32_and_depend_on_the_order_of_frames(model: I3D) -> None:
    videos = some_videos()
    videos[0, :, 0, 0, 0], videos[0, :, 0, 0, 1] = -0.5, 1.5
    videos[1] = videos[0].flip(1)
    found = model.features(videos)
    assert found.shape == (2, 400) and found.dtype == torch.float32 and not found.requires_grad
    as_in_a_file = (videos.clamp(0, 1) * 255).round() / 255
    large = torch.stack(
        [F.interpolate(clip.transpose(0, 1), size=(224, 224), mode="bilinear") for clip in as_in_a_file]
    )
    torch.testing.assert_close(found, model(large.transpose(1, 2) * 2 - 1), rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model.features(as_in_a_file), found)
    assert (found[0] - found[1]).abs().max() > 1e-3
    assert not model.train().training


def test_nine_frames_are_the_least(model: I3D) -> None:
    said = refused(model.features, some_videos(frames=8))
    assert "3 channels and at least 9 frames, not 3 channels and 8 frames" in said
    assert "not 1 channels and 9 frames" in refused(model.features, some_videos()[:, :1])


def test_a_plain_state_dict_is_read_with_or_without_counts_and_another_is_one_line(model: I3D, tmp_path: Path) -> None:
    state, path = model.state_dict(), tmp_path / "i3d_pretrained_400.pt"
    for weights in (state, {name: w for name, w in state.items() if not name.endswith("num_batches_tracked")}):
        torch.save(weights, path)
        assert_same_bits(load_i3d(path), model)
    del state["Mixed_4d.b2b.conv3d.weight"]
    torch.save(state, path)
    assert "not those of I3D: Mixed_4d.b2b.conv3d" in one_line_of(load_i3d, path)
