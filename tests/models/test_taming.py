"""The body of taming-transformers: against a plain computation, and the numbers of weights of published models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.models import VQGAN
from tests.models.helpers import TAMING, lively, refused, some_images

DEEPER: dict[str, Any] = {
    **TAMING, "quantizer": "kl", "latent_dim": 3, "num_resnet_blocks": [2], "z_channels": 5, "attention_levels": [1, 2]
}  # fmt: skip


def made(**sizes: Any) -> VQGAN:
    torch.manual_seed(0)
    return lively(VQGAN.from_dict({**DEEPER, **sizes})).eval()


class Plain:
    """The same from the weights by name, one sum after the other: Esser et al. 2021, appendix; Rombach et al. 2022."""

    def __init__(self, model: VQGAN) -> None:
        self.weights, self.sizes = model.state_dict(), model.config

    def conv(self, name: str, x: Tensor, **how: Any) -> Tensor:
        return F.conv2d(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], **how)

    def norm(self, name: str, x: Tensor) -> Tensor:
        groups = x.reshape(len(x), self.sizes["norm_groups"], -1)
        spread = (groups.var(-1, keepdim=True, correction=0) + 1e-6).sqrt()
        normed = ((groups - groups.mean(-1, keepdim=True)) / spread).reshape(x.shape)
        return normed * self.weights[f"{name}.weight"][:, None, None] + self.weights[f"{name}.bias"][:, None, None]

    def swished(self, name: str, x: Tensor) -> Tensor:
        normed = self.norm(name, x)
        return normed * normed.sigmoid()

    def block(self, name: str, x: Tensor) -> Tensor:
        inner = self.conv(f"{name}.conv1", self.swished(f"{name}.norm1", x), padding=1)
        inner = self.conv(f"{name}.conv2", self.swished(f"{name}.norm2", inner), padding=1)
        is_wider = f"{name}.nin_shortcut.weight" in self.weights
        return inner + (self.conv(f"{name}.nin_shortcut", x) if is_wider else x)

    def attention(self, name: str, x: Tensor) -> Tensor:
        normed = self.norm(f"{name}.norm", x)
        q, k, v = (self.conv(f"{name}.{part}", normed).flatten(2) for part in "qkv")
        shares = (torch.einsum("bci,bcj->bij", q, k) / math.sqrt(x.shape[1])).softmax(-1)
        return x + self.conv(f"{name}.proj_out", torch.einsum("bij,bcj->bci", shares, v).reshape(x.shape))

    def middle(self, half: str, x: Tensor) -> Tensor:
        x = self.attention(f"{half}.mid_attn_1", self.block(f"{half}.mid_block_1", x))
        return self.block(f"{half}.mid_block_2", x)

    def level(self, name: str, x: Tensor, level: int, blocks: int) -> Tensor:
        for number in range(blocks):
            x = self.block(f"{name}_block_{number}", x)
            if level in self.sizes["attention_levels"]:
                x = self.attention(f"{name}_attn_{number}", x)
        return x

    def encoded(self, images: Tensor) -> Tensor:
        (blocks,), last = self.sizes["num_resnet_blocks"], len(self.sizes["ch_mult"]) - 1
        x = self.conv("encoder.conv_in", 2 * images - 1, padding=1)
        for level in range(last + 1):
            x = self.level(f"encoder.down_{level}", x, level, blocks)
            if level < last:
                x = self.conv(f"encoder.down_{level}_downsample.conv", F.pad(x, (0, 1, 0, 1)), stride=2)
        x = self.conv("encoder.conv_out", self.swished("encoder.norm_out", self.middle("encoder", x)), padding=1)
        return self.conv("encoder.quant_conv", x)

    def decoded(self, latents: Tensor) -> Tensor:
        (blocks,), last = self.sizes["num_resnet_blocks"], len(self.sizes["ch_mult"]) - 1
        x = self.conv("decoder.conv_in", self.conv("decoder.post_quant_conv", latents), padding=1)
        x = self.middle("decoder", x)
        for level in range(last, -1, -1):
            x = self.level(f"decoder.up_{level}", x, level, blocks + 1)
            if level:
                twice = x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
                x = self.conv(f"decoder.up_{level}_upsample.conv", twice, padding=1)
        return (self.conv("decoder.conv_out", self.swished("decoder.norm_out", x), padding=1) + 1) / 2


def test_latents_and_images_are_those_of_a_plain_computation() -> None:
    model, images = made(), some_images()
    plain = Plain(model)
    mean, log_variance = plain.encoded(images).chunk(2, dim=1)
    torch.testing.assert_close(model.encode(images), mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.decode(mean), plain.decoded(mean), rtol=1e-4, atol=1e-5)
    noise = torch.randn(mean.shape)
    sampled = plain.decoded(mean + (log_variance / 2).exp() * noise)
    torch.testing.assert_close(model(images, noise).reconstruction, sampled, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(images).reconstruction, sampled, atol=1e-3)


SD = {"quantizer": "kl", "ch_mult": [1, 2, 4, 4]}
F16 = {"quantizer": "vq", "ch_mult": [1, 1, 2, 2, 4], "attention_levels": [4], "z_channels": 256}


# Of the published modules, counted without codebooks: diffusers' AutoencoderKL, taming's and LlamaGen's VQModel.
@pytest.mark.parametrize(
    ("sizes", "count"),
    [({**SD, "latent_dim": 4}, 83_653_863), ({**SD, "latent_dim": 16, "quant_conv": False}, 83_819_683),
     ({**F16, "codebook_dim": 256}, 71_879_555), ({**F16, "codebook_dim": 8}, 71_752_331)],
    ids=["Stable Diffusion 1", "Stable Diffusion 3", "taming f16", "LlamaGen VQ-16"],
)  # fmt: skip
def test_published_shapes_have_the_published_number_of_weights(sizes: dict[str, Any], count: int) -> None:
    with torch.device("meta"):
        model = VQGAN.from_dict({"body": "taming", "num_resnet_blocks": [2], **sizes})
    assert sum(weight.numel() for weight in model.parameters()) == count


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"ch_mult": [1]}, "ch_mult [1]"), ({"ch_mult": [1, 0]}, "ch_mult [1, 0]"), ({"ch_mult": [1] * 13}, "12"),
     ({"attention_levels": [3]}, "levels 0 to 2"), ({"norm_groups": 3}, "norm_groups 3"), ({"dim": 6}, "dim 6"),
     ({"num_resnet_blocks": [1, 2]}, "num_resnet_blocks [1, 2]"), ({"num_resnet_blocks": [0]}, "num_resnet_blocks [0]"),
     ({"normalize_input": False}, "--no-normalize_input"),
     ({"quant_conv": False}, "z_channels 5"), ({"latent_dim": 0}, "latent_dim 0"),
     ({"image_size": 18}, "image_size 18"), ({"body": "unet"}, "'unet'")],
    ids=str,
)  # fmt: skip
def test_what_makes_no_body_is_refused_by_its_name(wrong: dict[str, Any], said: str) -> None:
    assert said in refused(made, **wrong)
