"""The MuLaN of musiclm-pytorch 0.2.8: its weights by the names that they have there, and the same outputs of them.

The mathematics are those of `MuLaN` and its towers, whose forward passes are inherited; the classes here give the parts
other names, and override what the public package computes otherwise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import Attention, FeedForward, Transformer, l2_normalize
from .audio_transformer import AudioTransformer, PreciseLayerNorm, between_patches, displacements_in
from .files.pretrained import Pretrained
from .log_mel import Spectrogram
from .mulan import MuLaN
from .mulan_config import MusicLMMuLaNConfig
from .text_transformer import TextTransformer


class MusicLMMuLaN(MuLaN):
    """`MuLaN` as musiclm-pytorch 0.2.8 computes it, on which its MusicLM can be conditioned.

    What differs: spectrograms are raw powers, and mirrored at the ends; the level of a patch is lost when it is
    normalised; positions have other frequencies; displacements between patches are not compressed; the token 0 is
    padding wherever it stands; intermediate layers are spaced evenly from the first one on, and share a module.

    The public package's weights load strictly, but for constants that it saves and that have no name here: see
    `files.musiclm`.

    The intermediate layers are floor(i depth / hierarchical_layers) of a tower, i from hierarchical_layers - 1 down to
    0. audio_dim is a multiple of 4 of at least 8.

    Raises:
        ValueError: one line that names the field of the configuration.
    """

    Config = MusicLMMuLaNConfig
    # A public file does not say the last three.
    not_in_the_weights = MusicLMMuLaNConfig.not_in_the_weights() | {"sample_rate", "n_fft", "hop_length"}
    marks_texts = False

    def __init__(self, config: MusicLMMuLaNConfig) -> None:
        Pretrained.__init__(self)  # not that of MuLaN, which makes other towers
        config.check()
        self.config = config.plain()
        self._listen(config, Spectrogram(
            config.sample_rate, config.n_fft, config.hop_length, kind="power", min_frames=config.patch_size,
            win_length=config.win_length, padding="reflect",
        ))  # fmt: skip
        audio, text = config.sizes("audio"), config.sizes("text")
        layers, dim_latent, recompute = config.hierarchical_layers, config.dim_latent, config.gradient_checkpointing
        options = {name: self.config[name] for name in ("ff_mult", "attn_dropout", "ff_dropout")}
        read = [[depth - 1, *reversed(compared_layers(layers, depth))] for _, depth, *_ in (audio, text)]
        # Registered in the order of calls, as in MuLaN.
        audio_dim, _, heads, _ = audio
        of_audio = _Transformer(*audio, recompute, **options)
        self.audio = _AudioTower(of_audio, audio_dim, heads, config.patch_size, config.patch_dropout, read[0])
        self.audio_to_latents = nn.Linear(audio_dim, dim_latent)
        of_text = _Transformer(*text, recompute, **options)
        self.text = _TextTower(of_text, config.text_dim, config.vocab_size, config.max_text_tokens, read[1])
        self.text_to_latents = nn.Linear(config.text_dim, dim_latent)
        bias = float(config.init_bias) if config.sigmoid_contrastive_loss else None
        starts = math.log(config.init_temperature), bias
        self.contrast = _Contrast(1, *starts)
        if layers:
            of_layers = _Contrast(layers, *starts)
            self.multi_layer_contrastive_learning = _MultiLayer(audio_dim, config.text_dim, dim_latent, of_layers)

    @property
    def tau(self) -> Tensor:  # type: ignore[override]
        """(h,)"""
        return torch.cat([contrast.temperatures.flatten().flip(0) for contrast in self._contrasts()])

    @property
    def bias(self) -> Tensor:  # type: ignore[override]
        """(h,)"""
        if not self.config["sigmoid_contrastive_loss"]:
            return torch.full_like(self.tau.detach(), self.config["init_bias"])
        return torch.cat([contrast.bias.flatten().flip(0) for contrast in self._contrasts()])

    def _contrasts(self) -> list[_Contrast]:
        of_layers = [self.multi_layer_contrastive_learning.contrast] if self.config["hierarchical_layers"] else []
        return [self.contrast, *of_layers]

    def audio_latents(self, features: Tensor) -> Tensor:  # type: ignore[override]
        """What the audio tower gives (b, h, audio_dim) -> unit vectors (b, h, dim_latent) in fp32 or fp64."""
        return self._latents("audio", self.audio_to_latents, features)

    def text_latents(self, features: Tensor) -> Tensor:  # type: ignore[override]
        """What the text tower gives (b, h, text_dim) -> unit vectors (b, h, dim_latent) in fp32 or fp64."""
        return self._latents("text", self.text_to_latents, features)

    def _latents(self, tower: str, project: nn.Linear, features: Tensor) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):  # as in mulan.Latents
            features = features.to(project.weight.dtype)
            latents = l2_normalize(project(features[:, 0]))[:, None]
            if not self.config["hierarchical_layers"]:
                return latents
            return torch.cat([latents, self.multi_layer_contrastive_learning(tower, features[:, 1:])], dim=1)


def compared_layers(count: int, depth: int) -> list[int]:
    """Numbers, from 0, of the layers of a tower that the hierarchical loss compares, the lowest first: floor(i depth /
    count), in fp32 as in the public package (which makes a difference beyond 25 layers)."""
    found: list[int] = (torch.arange(count, device="cpu") * (depth / max(count, 1))).floor().long().tolist()
    return found


class _LayerNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.learned_gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.learned_gamma)


class _Attention(Attention):
    """The weights of queries are apart from those of keys and values."""

    def __init__(self, dim: int, heads: int, dim_head: int, share: float) -> None:
        nn.Module.__init__(self)
        self.heads, self.share = heads, share
        self.norm = _LayerNorm(dim)  # type: ignore[assignment]
        self.to_q = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_kv = nn.Linear(dim, 2 * heads * dim_head, bias=False)
        self.q_scale = nn.Parameter(torch.ones(dim_head))
        self.k_scale = nn.Parameter(torch.ones(dim_head))
        # Place 1 of the public one is dropout, which `Attention` applies.
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim, bias=False))  # type: ignore[assignment]

    def to_qkv(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.cat([self.to_q(x), self.to_kv(x)], dim=-1)


class _FeedForward(FeedForward):
    """The public one is a sequence, with the activation at place 2 and dropout at place 3."""

    def __init__(self, dim: int, mult: int, share: float) -> None:
        nn.Module.__init__(self)
        inner, self.share = max(1, 2 * mult * dim // 3), share
        self.add_module("0", _LayerNorm(dim))
        self.add_module("1", nn.Linear(dim, 2 * inner, bias=False))
        self.add_module("4", nn.Linear(inner, dim, bias=False))

    @property
    def norm(self) -> nn.Module:  # type: ignore[override]
        return self.get_submodule("0")

    @property
    def expand(self) -> nn.Module:  # type: ignore[override]
        return self.get_submodule("1")

    @property
    def contract(self) -> nn.Module:  # type: ignore[override]
        return self.get_submodule("4")


class _Transformer(Transformer):
    """Attention and feed-forward of a layer are in one list."""

    def __init__(
        self, dim: int, depth: int, heads: int, dim_head: int, recompute: bool, ff_mult: int, attn_dropout: float,
        ff_dropout: float,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        self.recompute = recompute
        self.layers = nn.ModuleList(
            nn.ModuleList([_Attention(dim, heads, dim_head, attn_dropout), _FeedForward(dim, ff_mult, ff_dropout)])
            for _ in range(depth)
        )

    @property
    def attention(self) -> list[nn.Module]:  # type: ignore[override]
        return [layer[0] for layer in self.layers]  # type: ignore[index]

    @property
    def feed_forward(self) -> list[nn.Module]:  # type: ignore[override]
        return [layer[1] for layer in self.layers]  # type: ignore[index]


class _AudioTower(AudioTransformer):
    def __init__(
        self, transformer: _Transformer, dim: int, heads: int, patch_size: int, patch_dropout: float, layers: list[int]
    ) -> None:
        nn.Module.__init__(self)
        if dim % 4 or dim < 8:
            raise ValueError(f"audio_dim {dim} is no multiple of 4 of at least 8, which its positions need")
        self.dim, self.patch_size, self.patch_dropout, self.layers = dim, patch_size, patch_dropout, layers
        # Place 0 of the public one cuts the spectrogram into patches.
        self.to_patch_tokens = nn.Sequential(
            nn.Identity(), PreciseLayerNorm(patch_size**2), nn.Linear(patch_size**2, dim), nn.LayerNorm(dim)
        )
        hidden = dim // 4
        self.dynamic_pos_bias_mlp = nn.Sequential(
            nn.Linear(2, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, heads)
        )
        self.transformer = transformer
        self.norm = _LayerNorm(dim)

    def embed(self, patches: Tensor) -> Tensor:  # type: ignore[override]
        tokens: Tensor = self.to_patch_tokens(patches)
        return tokens

    def positions(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """Sines, then cosines of the column, then those of the row, of dim / 4 wavelengths from 2 pi to 10000 x 2 pi,
        both included (Beyer et al. 2022, "Better plain ViT baselines for ImageNet-1k")."""
        quarter = self.dim // 4
        frequencies = 1 / 10000 ** (torch.arange(quarter, device=device) / (quarter - 1))
        places = torch.cartesian_prod(torch.arange(rows, device=device), torch.arange(columns, device=device))
        y, x = (places[:, axis, None] * frequencies for axis in (0, 1))
        return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)

    def relative_bias(self, patches: Tensor, rows: int, columns: int) -> Tensor:  # type: ignore[override]
        dtype: torch.dtype = self.dynamic_pos_bias_mlp[0].weight.dtype  # type: ignore[assignment]
        with torch.autocast(patches.device.type, enabled=False):  # bf16 does not tell 257 from 256
            table = self.dynamic_pos_bias_mlp(displacements_in(rows, columns, patches.device).to(dtype))
        return between_patches(table, patches, rows, columns)

    @property
    def norms(self) -> list[nn.Module]:  # type: ignore[override]
        return _norms(self.norm, self.layers)


class _TextTower(TextTransformer):
    pad = 0

    def __init__(
        self, transformer: _Transformer, dim: int, vocab_size: int, max_tokens: int, layers: list[int]
    ) -> None:
        nn.Module.__init__(self)
        self.vocab_size, self.max_tokens, self.layers = vocab_size, max_tokens, layers
        self.token_emb = nn.Embedding(vocab_size, dim)
        self.pos_emb = nn.Embedding(max_tokens, dim)
        self.cls_token = nn.Parameter(torch.randn(dim))
        self.transformer = transformer
        self.norm = _LayerNorm(dim)

    @property
    def tokens(self) -> nn.Embedding:  # type: ignore[override]
        return self.token_emb

    @property
    def positions(self) -> nn.Embedding:  # type: ignore[override]
        return self.pos_emb

    @property
    def cls(self) -> Tensor:  # type: ignore[override]
        return self.cls_token

    @property
    def norms(self) -> list[nn.Module]:  # type: ignore[override]
        return _norms(self.norm, self.layers)


def _norms(norm: nn.Module, layers: list[int]) -> list[nn.Module]:
    """That of the final output, and none for the others: `_MultiLayer` normalises them."""
    return [norm, *(nn.Identity() for _ in layers[1:])]


class _Contrast(nn.Module):
    """Temperatures, in the log, and biases of some outputs. It only holds them."""

    def __init__(self, outputs: int, tau: float, bias: float | None) -> None:
        super().__init__()
        self.temperatures = nn.Parameter(torch.full((outputs, 1, 1), tau))
        if bias is not None:
            self.bias = nn.Parameter(torch.full((outputs, 1, 1), bias))


class _MultiLayer(nn.Module):
    """Features of intermediate layers (b, n, dim) of a tower, "audio" or "text", the highest first -> unit vectors
    (b, n, dim_latent). Its weights begin with those of the lowest."""

    def __init__(self, audio_dim: int, text_dim: int, dim_latent: int, contrast: _Contrast) -> None:
        super().__init__()
        layers = len(contrast.temperatures)
        for tower, dim in (("audio", audio_dim), ("text", text_dim)):
            self.register_parameter(f"{tower}_gamma", nn.Parameter(torch.ones(layers, 1, dim)))
            self.register_parameter(f"{tower}_latent_weight", nn.Parameter(torch.randn(layers, dim, dim_latent)))
            self.register_parameter(f"{tower}_latent_bias", nn.Parameter(torch.randn(layers, 1, dim_latent)))
        self.contrast = contrast

    def forward(self, tower: str, features: Tensor) -> Tensor:
        gamma, weight, bias = (getattr(self, f"{tower}_{part}") for part in ("gamma", "latent_weight", "latent_bias"))
        x = F.layer_norm(features, features.shape[-1:]).flip(1).transpose(0, 1)
        return l2_normalize(torch.baddbmm(bias, x * gamma, weight)).transpose(0, 1).flip(1)
