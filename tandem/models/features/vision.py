"""Features of image patches by a frozen vision transformer, such as DINOv2 (Oquab et al. 2023), with which latents are
aligned. The networks are those of the package transformers; `weights.formats.towers` reads them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F


class VisionFeatures(nn.Module):
    """A vision transformer that stays in eval mode and has no gradients. Under autocast it computes in its precision.

    Args:
        network: A model of transformers for images of 3 channels, whose last tokens are those of the patches, row by
            row.
        mean, std: Of the three colours, in [0, 1], of the images that it was trained on: its input is
            (image - mean) / std.
        sha256: Of what was read, which tells the model from others.

    Attributes:
        width: Channels of a feature.
        patch_size: Side of a patch, in pixels.
    """

    _mean: Tensor
    _std: Tensor

    def __init__(self, network: Any, mean: Sequence[float], std: Sequence[float], sha256: str) -> None:
        super().__init__()
        self.network, self._sha256 = network, sha256
        self.width, self.patch_size = int(network.config.hidden_size), int(network.config.patch_size)
        for name, values in (("_mean", mean), ("_std", std)):
            self.register_buffer(name, torch.tensor(values)[:, None, None], persistent=False)
        # Without this argument, a model takes images of any size, or only those of its own one.
        takes_argument = "interpolate_pos_encoding" in inspect.signature(network.forward).parameters
        self._options = {"interpolate_pos_encoding": True} if takes_argument else {}
        self.requires_grad_(False)
        self.eval()

    def description(self) -> dict[str, Any]:
        """What a checkpoint says of the model, which a resumed run may not exchange for another one."""
        names = ("model_type", "hidden_size", "num_hidden_layers", "patch_size")
        facts = {name: getattr(self.network.config, name) for name in names}
        return {"model": type(self).__name__, "align_with": {**facts, "sha256": self._sha256}}

    def train(self, mode: bool = True) -> VisionFeatures:
        """Ignore ``mode`` and stay in eval mode."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Tensor, rows: int, columns: int) -> Tensor:
        """Images (b, 3, h, w) in [0, 1] -> the last layer's features of rows x columns patches, fp32
        (b, width, rows, columns). The images are resized (bilinear, antialiased) to as many patches."""
        size = (rows * self.patch_size, columns * self.patch_size)
        x = F.interpolate(images.float(), size=size, mode="bilinear", antialias=True)
        tokens = self.network(pixel_values=(x - self._mean) / self._std, **self._options).last_hidden_state.float()
        return rearrange(tokens[:, -rows * columns :], "b (h w) d -> b d h w", h=rows).contiguous()
