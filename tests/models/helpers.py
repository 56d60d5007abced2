"""What several tests of the models use: small sizes, random inputs, comparisons."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tandem.config.models.autoencoders import QuantizerConfig
from tandem.io.published import RESNET50, VGG16
from tandem.models.features.lpips import LogitDistance, PerceptualLoss
from tandem.models.quantizers import make_quantizer
from tandem.models.quantizers.base import Quantizer

VAE: dict[str, Any] = {
    "image_size": 16, "num_tokens": 13, "codebook_dim": 6, "num_layers": 2, "num_resnet_blocks": 0, "hidden_dim": 5
}  # fmt: skip
VQGAN: dict[str, Any] = {"image_size": 16, "dim": 8, "num_layers": 2, "codebook_size": 256}
TAMING: dict[str, Any] = {
    "body": "taming", "image_size": 16, "dim": 8, "ch_mult": [1, 2, 2], "num_resnet_blocks": [1], "norm_groups": 4,
    "attention_levels": [1],
}  # fmt: skip
TOKENIZER: dict[str, Any] = {
    "image_size": 8, "layers": "residual,compress_space:6,compress_time,residual", "init_dim": 4, "input_kernel": 3,
    "norm": "rms", "codebook_size": 16,
}  # fmt: skip
WAN: dict[str, Any] = {
    "body": "wan", "ch_mult": [1, 2], "time_levels": [0], "num_resnet_blocks": 1, "norm": "none", "input_kernel": 7,
}  # fmt: skip
WAN_2_2: dict[str, Any] = {
    **WAN, "ch_mult": [1, 1], "residual_resampling": True, "patch_size": 2, "patch": "pixels", "decoder_dim": 6,
}  # fmt: skip
_TOWERS: dict[str, Any] = {
    "audio_dim": 16, "audio_depth": 2, "text_dim": 12, "text_depth": 2, "heads": 2, "dim_head": 4, "vocab_size": 40,
    "max_text_tokens": 10, "dim_latent": 6,
}  # fmt: skip
# 64 bands x 51 frames: 4 x 3 patches.
MULAN: dict[str, Any] = {**_TOWERS, "clip_seconds": 0.5}
# 65 bins x 51 frames: 4 x 3 patches.
MUSICLM: dict[str, Any] = {
    **_TOWERS, "audio_depth": 3, "clip_seconds": 0.15, "n_fft": 128, "win_length": 60, "hop_length": 48,
    "hierarchical_layers": 1, "layout": "musiclm", "spectrogram": "power", "spectrogram_padding": "reflect",
    "hierarchical_spacing": "even",
}  # fmt: skip
UNET: dict[str, Any] = {
    "dim": 8, "dim_mults": [1, 2], "cond_dim": 12, "num_resnet_blocks": [1, 1], "attn_heads": 2, "attn_dim_head": 4,
    "cross_attn_heads": 2, "cross_attn_dim_head": 4, "image_embed_dim": 5, "text_embed_dim": 7, "max_text_len": 6,
}  # fmt: skip
NARROW = (4, 6, 8, 8, 8)


def some(*shape: int, seed: int = 1) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_images(batch: int = 2, channels: int = 3, size: int = 16, seed: int = 1) -> Tensor:
    return torch.rand(batch, channels, size, size, generator=torch.Generator().manual_seed(seed))


def some_videos(batch: int = 2, frames: int = 5, height: int = 8, width: int = 8, seed: int = 1) -> Tensor:
    return torch.rand(batch, 3, frames, height, width, generator=torch.Generator().manual_seed(seed))


def some_pairs(model: Any, size: int = 3, columns: int = 8) -> dict[str, Tensor]:
    """Waveforms, the first silent and the last with powers beyond fp16's range; tokens; lengths from 0 up; noise."""
    draws = torch.Generator().manual_seed(1)
    waveforms = torch.randn(size, model.clip_samples, generator=draws) * torch.arange(size)[:, None] / 10
    waveforms[-1] += 0.8
    return {
        "waveforms": waveforms,
        "tokens": torch.randint(1, model.text.vocab_size, (size, columns), generator=draws),
        "lengths": torch.arange(size) * 2 % (columns + 1),
        "noise": torch.rand(size, model.noise_size, generator=draws),
    }


def some_unet_inputs(batch: int = 4, side: int = 8) -> dict[str, Tensor]:
    """For a model of UNET."""
    return {
        "x": some(batch, 3, side, side), "time": torch.arange(batch) * 300, "image_embed": some(batch, 5, seed=2),
        "text_encodings": some(batch, 4, 7, seed=3),
    }  # fmt: skip


def lively(model: nn.Module) -> Any:
    """The model, with numbers in the weights that start as 0: gates, modulations and the outputs of some."""
    for weight in model.parameters():
        if not weight.any():
            nn.init.normal_(weight, std=0.3)
    return model


def narrow(kind: str, **options: Any) -> Any:
    """A perceptual distance of few channels, or blocks, whose activations do not vanish."""
    torch.manual_seed(0)
    if kind == "resnet50":
        model = LogitDistance((1, 1, 1, 1))
        model.side = 64
        return model
    model = PerceptualLoss(kind, NARROW, **options)
    with torch.no_grad():
        for parameter in model.features.parameters():
            parameter.mul_(2)
        for parameter in model.heads.parameters():
            parameter.abs_()
    return model


def in_rows(z: Tensor) -> Tensor:
    return z.movedim(1, -1).flatten(0, -2)


def quantizer_of(name: str, **options: Any) -> Quantizer:
    torch.manual_seed(0)
    return make_quantizer(QuantizerConfig(quantizer=name, **options))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def prefixed(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict whose names have a prefix."""
    return {prefix + name: tensor for name, tensor in state.items()}


def without(state: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    """A state dict without the weights whose names begin so."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(names)}


def assert_same_bits(one: Any, other: Any) -> None:
    """Of two state dicts or models."""
    ours, theirs = (it.state_dict() if isinstance(it, nn.Module) else it for it in (one, other))
    assert ours.keys() == theirs.keys()
    same = {name: ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours}
    assert [name for name in same if not same[name]] == []


def refused(call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    """The error of a call: a ValueError of one line."""
    with pytest.raises(ValueError) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def one_line_of(read: Callable[[Path], object], path: Path) -> str:
    """The error of reading a path: one line that names it."""
    said = refused(read, path)
    assert str(path) in said
    return said


def kept_bytes(call: Callable[[], Any]) -> tuple[Any, int]:
    """What a call gives, and the bytes that are kept for its backward pass."""
    kept = dict[int, Any]()  # storages, by address: held here, so that no other one gets the same address meanwhile

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = call()
    return out, sum(storage.nbytes() for storage in kept.values())


class _Border(torch.autograd.Function):
    """The identity, as a step of its own in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Tensor:
        return gradient[0]


def across_a_border(value: Any) -> Any:
    """As ZeRO 3 does it with what comes into a module or out of it: tensors through a function, tuples as copies."""
    if isinstance(value, (list, tuple)):
        parts = [across_a_border(part) for part in value]
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    return _Border.apply(value) if isinstance(value, Tensor) and value.requires_grad else value


class Call:
    """Pickled as a call, which runs where the file is unpickled as usual."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def write_vgg16(folder: Path) -> None:
    """Write an untrained one, for --perceptual_weights."""
    torch.manual_seed(7)
    torch.save(PerceptualLoss("vgg").state_dict(), folder / VGG16.names[0])


def write_resnet50(folder: Path) -> None:
    """Write an untrained one, for --perceptual_weights."""
    torch.manual_seed(7)
    weights = LogitDistance().network.state_dict()
    torch.save(weights, folder / RESNET50.names[0])
