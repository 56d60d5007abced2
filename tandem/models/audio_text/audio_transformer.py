"""A transformer over the patches of a spectrogram (Gong et al. 2021, "AST: Audio spectrogram transformer")."""

from __future__ import annotations

import math

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.config.models.mulan import MuLaNConfig
from tandem.models.layers.attention import Transformer, output_layers


class PreciseLayerNorm(nn.LayerNorm):
    """LayerNorm in the precision of its input, because the values of a power spectrogram exceed the range of fp16. Its
    output has the dtype of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps).to(self.weight.dtype)


class PatchEmbedding(nn.Module):
    """Patches (b, n, p x p) -> (b, n, dim), normalised before and after (Kumar et al. 2023, "Dual PatchNorm").

    The first norm removes the loudness of a patch. With ``has_levels``, asinh of the mean and of the standard deviation
    of each patch are therefore projected and added after the norm: asinh is about the identity for small values and a
    logarithm for large ones, such as those of a power spectrogram.
    """

    def __init__(self, patch_size: int, dim: int, has_levels: bool) -> None:
        super().__init__()
        self.norm_before = PreciseLayerNorm(patch_size**2)
        self.project = nn.Linear(patch_size**2, dim)
        self.levels = nn.Linear(2, dim, bias=False) if has_levels else None
        self.norm_after = nn.LayerNorm(dim)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.project(self.norm_before(patches))
        if self.levels is not None:
            deviations, means = torch.std_mean(patches, dim=-1, correction=0)
            x = x + self.levels(torch.stack([means, deviations], dim=-1).asinh().to(self.levels.weight.dtype))
        return self.norm_after(x)


class RelativePositionBias(nn.Module):
    """A bias for each head and each displacement between two patches, computed by a small MLP.

    The MLP gets a displacement d as sign(d) ln(1 + |d|), so that the inputs for clips longer than those of training
    stay near the range that it was trained on (Liu et al. 2022, "Swin transformer V2", section 3.3); or d itself.
    """

    def __init__(self, heads: int, hidden_dim: int, is_log: bool) -> None:
        super().__init__()
        self.is_log = is_log
        self.mlp = nn.Sequential(
            nn.Linear(2, hidden_dim), nn.SiLU(), nn.Linear(hidden_dim, hidden_dim), nn.SiLU(),
            nn.Linear(hidden_dim, heads),
        )  # fmt: skip

    def forward(self, indices: Tensor, rows: int, columns: int) -> Tensor:
        """Indices (b, n) of patches in a grid of ``rows`` x ``columns``, row by row -> (b, heads, n, n).

        Entry (i, j) belongs to the displacement from patch j to patch i.
        """
        dtype: torch.dtype = self.mlp[0].weight.dtype  # type: ignore[assignment]
        dy, dx = (torch.arange(1 - size, size, device=indices.device) for size in (rows, columns))
        displacements = torch.cartesian_prod(dy, dx).to(torch.promote_types(dtype, torch.float32))
        if self.is_log:
            table = self.mlp((displacements.sign() * displacements.abs().log1p()).to(dtype))
        else:
            with torch.autocast(indices.device.type, enabled=False):  # bf16 does not tell 257 from 256
                table = self.mlp(displacements.to(dtype))
        # Patch (y, x) has the cell y (2 columns - 1) + x, so that two displacements never have the same difference of
        # cells.
        cells = indices // columns * (2 * columns - 1) + indices % columns
        centre = (rows - 1) * (2 * columns - 1) + columns - 1
        index = cells[:, :, None] - cells[:, None, :] + centre
        bias = rearrange(F.embedding(index, table), "b i j h -> b h i j")
        return bias.contiguous()  # one copy here instead of one in each layer


class AudioTransformer(nn.Module):
    """Spectrograms (b, bands, frames) to pooled features of the final output and of layers below it.

    Sides that are no multiples of the patch are cropped to the nearest one below: the highest bands and the last
    frames are left out.

    Raises:
        ValueError: one line that names the argument.
    """

    def __init__(self, config: MuLaNConfig) -> None:
        super().__init__()
        dim, is_tandem = config.audio_dim, config.layout == "tandem"  # or "musiclm", that of musiclm-pytorch
        if dim % 4 or dim < 8:
            problem = f"audio_dim {dim} is no multiple of 4 of at least 8"
            raise ValueError(f"{problem}, which sine and cosine of two coordinates need")
        self.dim, self.patch_size, self.patch_dropout = dim, config.patch_size, config.patch_dropout
        self.layout = config.layout
        self.layers = output_layers(config.audio_depth, config.hierarchical_layers, config.hierarchical_spacing)
        self.embed = PatchEmbedding(config.patch_size, dim, has_levels=is_tandem)
        hidden = max(32, dim // 4) if is_tandem else dim // 4
        self.relative_bias = RelativePositionBias(config.tower_arguments("audio")["heads"], hidden, is_log=is_tandem)
        self.transformer = Transformer(**config.tower_arguments("audio"))
        self.norms = nn.ModuleList(nn.LayerNorm(dim, bias=False) for _ in self.layers)

    def grid(self, bands: int, frames: int) -> tuple[int, int]:
        """Rows and columns of whole patches in a spectrogram."""
        return bands // self.patch_size, frames // self.patch_size

    def num_kept(self, num_patches: int) -> int:
        """Number of patches that remain after dropout; at least one."""
        return num_patches - min(int(num_patches * self.patch_dropout), num_patches - 1)

    def crop(self, spectrograms: Tensor) -> Tensor:
        """The part (b, rows x p, columns x p) that whole patches cover."""
        rows, columns = self.grid(*spectrograms.shape[1:])
        return spectrograms[:, : rows * self.patch_size, : columns * self.patch_size]

    def forward(self, spectrograms: Tensor, noise: Tensor | None = None, dropout_keys: Tensor | None = None) -> Tensor:
        """Spectrograms (b, bands, frames) -> features (b, 1 + hierarchical_layers, dim); [:, 0] are those of the final
        output.

        Args:
            noise: Uniform (b, patches): each sample keeps the patches with the smallest noise. None keeps all.
            dropout_keys: int64 (b, 2), for the dropout in the transformer; None drops nothing there.
        """
        rows, columns = self.grid(*spectrograms.shape[1:])
        p, count = self.patch_size, rows * columns
        patches = rearrange(self.crop(spectrograms), "b (y i) (x j) -> b (y x) (i j)", i=p, j=p)
        positions = sincos_positions(rows, columns, self.dim, self.layout, spectrograms.device)
        indices = torch.arange(count, device=spectrograms.device)[None]
        if noise is None or self.num_kept(count) == count:
            positions = positions[None]
        else:
            indices = noise.argsort(dim=1, stable=True)[:, : self.num_kept(count)]
            patches = patches.gather(1, repeat(indices, "b n -> b n pixels", pixels=p * p))
            positions = positions[indices]
        x = self.embed(patches)
        outputs = self.transformer(x + positions.to(x.dtype), self.relative_bias(indices, rows, columns), dropout_keys)
        pairs = zip(self.layers, self.norms, strict=True)
        return torch.stack([norm(outputs[layer].mean(dim=1)) for layer, norm in pairs], dim=1)


def sincos_positions(rows: int, columns: int, dim: int, layout: str, device: torch.device) -> Tensor:
    """Fixed positions (rows x columns, dim) in fp32: half of the width encodes the row, half the column, each as sines
    and cosines of dim / 4 wavelengths from 2 pi to almost 10000 x 2 pi (Vaswani et al. 2017, section 3.5). In the
    layout "musiclm" the longest is 10000 x 2 pi, and the column comes first (Beyer et al. 2022, "Better plain ViT
    baselines for ImageNet-1k")."""
    steps = torch.arange(dim // 4, device=device)
    if layout == "musiclm":
        frequencies = 1 / 10000 ** (steps / (dim // 4 - 1))
    else:
        frequencies = torch.exp(steps * (-math.log(10000) / (dim // 4)))
    y, x = (torch.arange(size, device=device)[:, None] * frequencies for size in (rows, columns))
    y, x = (torch.cat([angles.sin(), angles.cos()], dim=-1) for angles in (y, x))
    y, x = repeat(y, "y d -> (y x) d", x=columns), repeat(x, "x d -> (y x) d", y=rows)
    return torch.cat([x, y] if layout == "musiclm" else [y, x], dim=-1)
