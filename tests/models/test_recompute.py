"""Gradient checkpointing: less is kept for the backward pass, and every gradient has the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import VQGAN, MuLaN, Unet, VideoTokenizer
from tests.models import helpers
from tests.models.helpers import assert_same_bits, some, some_images, some_videos

LAYERS = "residual,compress_space:8,attend_space,linear_attend_space,compress_time:8,cond_residual,attend_time,adaptive"
CASES: dict[str, tuple[type[Any], dict[str, Any], Callable[[Any], Any]]] = {
    "vqgan": (VQGAN, {**helpers.VQGAN, "num_resnet_blocks": [1, 2]}, lambda model: (some_images(),)),
    "mulan": (MuLaN, {**helpers.MULAN, "audio_depth": 4, "hierarchical_layers": 1}, lambda model: (
        some(2, model.clip_samples), torch.arange(12).view(2, 6), torch.tensor([6, 3]),
        some(2, model.noise_size).abs() % 1,
    )),
    "tokenizer": (VideoTokenizer, {**helpers.TOKENIZER, "layers": LAYERS, "dim_cond": 3, "quantizer": "vq"},
                  lambda model: (some_videos(), some(2, 3))),
    "tokenizer of images": (VideoTokenizer, {**helpers.TOKENIZER, "layers": LAYERS, "dim_cond": 3, "quantizer": "vq"},
                            lambda model: (some_videos(frames=1), some(2, 3))),
    "unet": (Unet, {**helpers.UNET, "self_attn": [False, True], "sparse_attn": True, "memory_efficient": True},
             lambda model: helpers.some_unet_inputs(side=16)),
}  # fmt: skip


def loss_of(out: Any, inputs: Any) -> Tensor:
    if isinstance(out, Tensor):
        return out.square().mean()
    if hasattr(out, "audio"):
        return -(out.audio * out.text).sum() * out.scale.sum()
    total: Tensor = F.mse_loss(out.reconstruction, inputs[0]) + sum(out.losses.values())
    return total


def trained(name: str, recompute: bool) -> tuple[dict[str, Tensor], int]:
    """Gradients and buffers after a pass, and the bytes that are kept for the backward pass."""
    kind, sizes, make_inputs = CASES[name]
    torch.manual_seed(0)
    model = kind(**sizes, gradient_checkpointing=recompute).train()
    if isinstance(model, Unet):
        nn.init.normal_(model.to_out.weight)  # which starts as 0, and lets no gradient through
    inputs = make_inputs(model)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(model(**inputs) if isinstance(inputs, dict) else model(*inputs), inputs)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) > 20
    return gradients | dict(model.named_buffers()), sum(kept.values())


@pytest.mark.parametrize("name", CASES)
def test_gradients_have_the_same_bits_and_much_less_is_kept_for_them(name: str) -> None:
    (expected, all_of_it), (ours, kept) = trained(name, recompute=False), trained(name, recompute=True)
    assert_same_bits(ours, expected)
    assert kept < 0.4 * all_of_it  # of MuLaN 0.51 if one of the towers kept all
