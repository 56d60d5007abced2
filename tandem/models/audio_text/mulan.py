"""MuLan: embeddings of music and of sentences about it in one space (Huang et al. 2022)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tandem.config.models.mulan import MAX_SCALE, MuLaNConfig
from tandem.config.models.towers import count_patches
from tandem.models.base import Pretrained
from tandem.models.layers.attention import at_least_fp32, l2_normalize
from tandem.models.layers.dropout import derive_keys

from .audio_transformer import AudioTransformer
from .log_mel import MASK_NOISE, Spectrogram, spec_augment
from .pretrained_towers import Fbank, PretrainedAudioTower, PretrainedTextTower
from .text_transformer import TextTransformer

# Limit of the elements of all tensors for one clip: 1 GiB in fp32.
_MAX_ELEMENTS = 1 << 28

# Elements in memory for each attention weight with dropout: logit, weight, weight after dropout, 64-bit random words.
_DROPOUT_ELEMENTS = 8


class MulanOutput(NamedTuple):
    """Results of a forward pass; h = 1 + hierarchical_layers. Index 0 of h is the final output; the others are the
    lower layers, in the order of `output_layers`."""

    audio: Tensor
    """(b, h, dim_latent), unit vectors in fp32 or fp64."""
    text: Tensor
    """(b, h, dim_latent), unit vectors in fp32 or fp64."""
    scale: Tensor
    """(h,): exp(logit_scale), clamped at 100; similarities are multiplied by it."""
    bias: Tensor
    """(h,): added to the scaled similarities in the sigmoid loss; other losses do not use it."""


class _ClampedExp(torch.autograd.Function):
    """exp(min(logit_scale, ln 100)). The gradient is that of exp at the clamped value; it is 0 only where gradient
    descent would raise a logit_scale that is already above ln 100."""

    @staticmethod
    def forward(ctx: Any, logit_scale: Tensor) -> Tensor:
        scale = logit_scale.clamp(max=math.log(MAX_SCALE)).exp()
        ctx.save_for_backward(logit_scale, scale)
        return scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        logit_scale, scale = ctx.saved_tensors
        grad = grad * scale
        return grad.masked_fill((logit_scale > math.log(MAX_SCALE)) & (grad < 0), 0.0)


class LatentProjections(nn.Module):
    """Features of each output of a tower (b, h, dim) -> unit vectors (b, h, dim_latent) in fp32 or fp64.

    Autocast is off here, because the similarities multiply rounding errors of the latents by the scale.
    """

    def __init__(self, outputs: int, dim: int, dim_latent: int) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(dim, dim_latent) for _ in range(outputs))

    def forward(self, features: Tensor) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):
            dtype: torch.dtype = self.projections[0].weight.dtype  # type: ignore[assignment]
            pairs = zip(self.projections, features.to(dtype).unbind(dim=1), strict=True)
            return l2_normalize(torch.stack([project(feature) for project, feature in pairs], dim=1))


class MuLaN(Pretrained):
    """Two towers: a transformer over log-mel patches and one over tokens, each with a linear map to unit vectors.

    Clips of any length can be encoded; `noise_size`, how many uniform numbers a clip needs in training, is that of a
    clip of clip_seconds. Each of `hierarchical_layers` below the final output has its own linear map, temperature and
    bias (Shukor et al. 2022, "ViCHA").

    The layout "musiclm" computes the same as the MuLaN of musiclm-pytorch 0.2.8 (`weights.formats.musiclm`), so that
    its MusicLM can be conditioned on it: spectrograms are powers; clips are mirrored at their ends; patches are
    normalised, and their mean and deviation are not added again; positions have other frequencies; displacements
    between patches enter the position bias without a logarithm; every token 0 is padding; intermediate layers are
    spaced evenly from the first one on.

    Raises:
        ValueError: one line that names the field of the configuration.
    """

    Config = MuLaNConfig
    cut_before = ("text",)  # where torch.compile begins a new graph: `cut_graph` of distributed.engines.replicated

    def __init__(self, config: MuLaNConfig) -> None:
        config.check()
        super().__init__(config)
        # Whether CLIP's tokenizer marks the start and the end of a text; musiclm-pytorch has no marks.
        self.adds_special_tokens = config.layout == "tandem"
        self.spectrogram = Fbank(config.audio_tower) if config.audio_tower else Spectrogram(config)
        self.mask_fractions = config.time_mask_fraction, config.frequency_mask_fraction
        self.clip_samples = round(min(config.clip_seconds * config.sample_rate, _MAX_ELEMENTS))
        if not config.audio_tower and self.spectrogram.bands < config.patch_size:
            problem = f"patch_size {config.patch_size} is larger than"
            raise ValueError(f"{problem} the {self.spectrogram.bands} bands of a spectrogram")
        self.clip_elements = self._count_clip_elements()
        self._check_caption()
        tower_options = config.hierarchical_layers, config.gradient_checkpointing, config.hierarchical_spacing
        self.audio: AudioTransformer | PretrainedAudioTower
        if config.audio_tower:
            self.audio = PretrainedAudioTower(config.audio_tower, *tower_options, config.freeze_audio_tower)
        else:
            self.audio = AudioTransformer(config)
        self.noise_size = self._count_noise(self.clip_samples)
        text: TextTransformer | PretrainedTextTower
        if config.text_tower:
            text = PretrainedTextTower(config.text_tower, *tower_options, config.freeze_text_tower)
        else:
            text = TextTransformer(config)
        outputs = config.hierarchical_layers + 1
        # Registered in the order of calls: gradients are sent in the reverse order of registration.
        self.audio_latents = LatentProjections(outputs, config.audio_dim, config.dim_latent)
        self.text = text
        self.text_latents = LatentProjections(outputs, config.text_dim, config.dim_latent)
        # t of Radford et al. 2021: the log of the inverse temperature.
        self.logit_scale = nn.Parameter(torch.full((outputs,), float(config.init_logit_scale)))
        self.bias = nn.Parameter(torch.full((outputs,), float(config.init_bias)))

    def _count_clip_elements(self) -> int:
        """The number of tensor elements that a clip of clip_seconds takes at once: its samples, its spectrum and its
        attention weights. Raises ValueError if there are too many."""
        config, frames = self.config, self.spectrogram.num_frames(self.clip_samples)
        tower = config["audio_tower"]
        if tower and frames > tower["max_length"]:
            limit = f"the audio tower takes up to {tower['max_length']} frames, {tower['max_length'] / 100:g} seconds"
            raise ValueError(f"clip_seconds {config['clip_seconds']:g}: {limit}; use shorter clips")
        patches = (self.spectrogram.bands // config["patch_size"]) * (frames // config["patch_size"])
        num_weights = config["audio_heads"] * (count_patches(tower) if tower else patches) ** 2
        num_elements = self.clip_samples + frames * (config["n_fft"] + 2) + num_weights
        dropout_elements = (_DROPOUT_ELEMENTS - 1) * num_weights if config["attn_dropout"] and not tower else 0
        if num_elements + dropout_elements >= _MAX_ELEMENTS:
            problem = f"a clip of clip_seconds {config['clip_seconds']:g} and hop_length {config['hop_length']}"
            raise ValueError(
                f"{problem} takes more than {4 * _MAX_ELEMENTS / 1e9:.2g} GB, because attention compares each patch "
                "with each: use shorter clips, a longer hop_length or a larger patch_size"
            )
        return num_elements

    def _check_caption(self) -> None:
        """Raise a ValueError if the dropout of attention would take too much memory for the longest caption."""
        config = self.config
        num_weights = config["text_heads"] * (config["max_text_tokens"] + 1) ** 2
        if config["attn_dropout"] and not config["text_tower"] and _DROPOUT_ELEMENTS * num_weights >= _MAX_ELEMENTS:
            size = f"more than {4 * _MAX_ELEMENTS / 1e9:.2g} GB with attn_dropout: use fewer tokens, or attn_dropout 0"
            raise ValueError(f"a caption of max_text_tokens {config['max_text_tokens']} takes {size}")

    @property
    def has_dropout(self) -> bool:
        """Whether training needs the `dropout_keys` of `forward`."""
        config = self.config
        has_own_tower = not (config["audio_tower"] and config["text_tower"])
        return has_own_tower and max(config["attn_dropout"], config["ff_dropout"]) > 0

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile in place, as `nn.Module.compile` does."""
        # Constants created inside the graph would cause a recompilation.
        self.spectrogram.prepare(next(self.parameters()).device)
        super().compile(*args, **kwargs)

    def forward(
        self, waveforms: Tensor, tokens: Tensor, lengths: Tensor, noise: Tensor | None = None,
        dropout_keys: Tensor | None = None,
    ) -> MulanOutput:  # fmt: skip
        """Clips and their captions to unit vectors.

        Args:
            waveforms: (b, n) in [-1, 1] at sample_rate.
            tokens: int64 (b, t), t <= max_text_tokens. Tokens beyond ``lengths`` are ignored.
            lengths: int64 (b,), tokens of each caption.
            noise: (b, noise_size) uniform in [0, 1) for masks and patch dropout; None for no masks and no patch
                dropout.
            dropout_keys: int64 (b, 2) in [0, 2^32), one key for each pair; None for no dropout of attention and
                feed-forwards.

        Raises:
            ValueError: a shape that does not match these.
        """
        if dropout_keys is not None and dropout_keys.shape != (count := len(waveforms), 2):
            raise ValueError(f"dropout_keys of shape {tuple(dropout_keys.shape)}: {count} pairs take ({count}, 2)")
        audio_keys, text_keys = (None if dropout_keys is None else derive_keys(dropout_keys, part) for part in (0, 1))
        audio = self._encode_audio(waveforms, noise, audio_keys)
        text = self.text_latents(self.text(tokens, lengths, text_keys))
        # Return a copy: some backends free the memory of a weight after the forward pass.
        bias = at_least_fp32(self.bias).clone()
        return MulanOutput(audio, text, _ClampedExp.apply(at_least_fp32(self.logit_scale)), bias)

    def encode_audio(self, waveforms: Tensor) -> Tensor:
        """Waveforms (b, n) in [-1, 1] at sample_rate, of any length -> unit vectors (b, dim_latent)."""
        return self._encode_audio(waveforms, None)[:, 0]

    def encode_text(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Tokens int64 (b, t), of which the first ``lengths`` (b,) of a row count -> unit vectors (b, dim_latent)."""
        return self.text_latents(self.text(tokens, lengths))[:, 0]

    def _encode_audio(self, waveforms: Tensor, noise: Tensor | None, dropout_keys: Tensor | None = None) -> Tensor:
        spectrograms = self.audio.crop(self.spectrogram(waveforms))
        if noise is not None:
            expected = (len(waveforms), self._count_noise(waveforms.shape[1]))
            if noise.shape != expected:
                problem = f"{expected[0]} clips of {waveforms.shape[1]} samples take {expected}"
                hint = "train on clips of clip_seconds and use noise_size"
                raise ValueError(f"noise of shape {tuple(noise.shape)}: {problem}; {hint}")
            mask_noise, noise = noise.split([MASK_NOISE, expected[1] - MASK_NOISE], dim=1)
            spectrograms = spec_augment(spectrograms, mask_noise, *self.mask_fractions)
        return self.audio_latents(self.audio(spectrograms, noise, dropout_keys))

    def _count_noise(self, samples: int) -> int:
        """Uniform numbers that a clip of so many samples needs in training: 4 for the masks, and one per patch."""
        rows, columns = self.audio.grid(self.spectrogram.bands, self.spectrogram.num_frames(samples))
        return MASK_NOISE + rows * columns
