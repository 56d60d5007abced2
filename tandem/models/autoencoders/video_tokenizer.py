"""Causal video and image tokenizer after MAGVIT-v2 (Yu et al. 2024) with a choice of layers and quantizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.config.models.autoencoders import WAN, VideoTokenizerConfig
from tandem.config.models.taming import check_scale
from tandem.models.layers.convolutional import check_codes, check_range, mix_noise
from tandem.models.layers.recompute import recompute_in_backward
from tandem.models.layers.video.blocks import (
    check_frames,
    check_options,
    check_side,
    check_videos,
    frames_per_code,
    make_layers,
    pixels_per_code,
)
from tandem.models.layers.video.causal import CausalConv3d, Context, RMSNorm, StreamState, TimeUp
from tandem.models.layers.video.patches import from_patches, to_patches
from tandem.models.quantizers import make_quantizer
from tandem.models.quantizers.base import straight_through
from tandem.sides import height_and_width
from tandem.transforms import Transform

from .base import Autoencoder
from .wan import Resampling, WanDecoder, WanEncoder


class VideoTokenizerOutput(NamedTuple):
    """Results of a forward pass. For images (b, c, h, w), reconstruction and codes have no frames either."""

    reconstruction: Tensor
    """fp32 (b, c, f, h, w), about [0, 1] and not clamped."""
    codes: Tensor
    """int64 (b, f', h', w') in [0, num_codes); empty if latents are continuous."""
    losses: dict[str, Tensor]
    """Losses of the quantizer by name, 0-d and unweighted."""
    features: Tensor
    """(b, init_dim, f, h / patch_size, w / patch_size): input of the decoder's last convolution, detached; for
    `VideoTokenizer.last_layer_gradient`."""
    latents: Tensor
    """fp32 (b, d, f', h', w'), f' = 1 for images, with a gradient: the continuous latents that the decoder gets, before
    noise; of a model with codes, the encoder's output before quantization."""
    transformed: Tensor | None = None
    """What the decoder makes of transformed latents, fp32 (b, c, f, h', w'); None without a `transform`."""


class VideoTokenizer(Autoencoder):
    """Videos (b, c, f, h, w) to codes (b, f', h', w'), or to continuous latents (b, d, f', h', w'), and back; an image
    is a video of one frame.

    A code, or latent, depends on no later frame: with S_t = `frames_per_code` and S_s = `pixels_per_code`, 1 + S_t n
    frames become f' = 1 + n frames of codes, the first from the first frame alone, and h' = h / S_s, w' = w / S_s. Any
    n and any height and width that S_s divides are taken.

    In train mode a clip is computed at once. In eval mode every method computes it in the same chunks: the first frame,
    then S_t frames (or one frame of codes) at a time. Hence the bits of codes and frames are the same for a stream, for
    a whole clip and for its beginning, given the same batch size, device and weights.

    Gradient checkpointing computes each layer again in the backward pass of training instead of keeping its
    activations: less memory, the same bits, a third more time.

    Raises:
        ValueError: one line, if arguments do not fit one another.
    """

    Config = VideoTokenizerConfig
    cut_before = ("decoder",)  # where torch.compile begins a new graph: `cut_graph` of distributed.engines.replicated

    def __init__(self, config: VideoTokenizerConfig) -> None:
        super().__init__(config)
        check_options(config)
        check_scale(config)
        self.frames_per_code, self.pixels_per_code = frames_per_code(config), pixels_per_code(config)
        for side in height_and_width(config.image_size):
            check_side("image_size", side, self.pixels_per_code)
        self.image_size, self.channels = config.image_size, config.channels
        self.soft_clamp = config.soft_clamp if config.quantizer == "lfq" else 0.0
        self.quantizer = make_quantizer(config)
        make_body = _make_wan if config.body == WAN else _make_layers
        self.encoder, self.decoder = make_body(config, self.channels, self.quantizer)
        for name, module in self.named_modules():
            if hasattr(module, "cache_key"):
                module.cache_key = name

    def forward(
        self, videos: Tensor, noise: Tensor | None = None, *, latent_noise: Tensor | None = None,
        noise_levels: Tensor | None = None, transform: Transform | None = None,
        change_latent_gradient: Callable[[Tensor], Tensor] | None = None, accumulate_stats: bool = False,
    ) -> VideoTokenizerOutput | None:  # fmt: skip
        """Videos (b, c, f, h, w) or images (b, c, h, w) in [0, 1] through their codes, or latents, and back.

        Args:
            noise, latent_noise, noise_levels, transform, change_latent_gradient: As for `VQGAN.forward`; shapes with
                f', which is 1 for images.
            accumulate_stats: Only add the videos to the quantizer's statistics over several micro-batches
                (``quantizer.accumulate_stats``), and return None.

        Raises:
            ValueError: one line that names the nearest sizes that fit.
        """
        chunks = list(self._latents(videos))
        z = torch.cat(chunks, dim=2)
        if accumulate_stats:
            self.quantizer.accumulate_stats(z)
            return None
        quantized, codes, losses = self.quantizer(z) if noise is None else self.quantizer(z, noise)
        latents = z if self.num_codes else quantized
        if change_latent_gradient is not None and latents.requires_grad:
            latents.register_hook(change_latent_gradient)
        # In eval mode, choose the codes chunk by chunk, as `encode` does: their bits may depend on how many vectors are
        # compared at once.
        if len(chunks) > 1 and self.num_codes:
            codes = torch.cat([self.quantizer.codes(chunk) for chunk in chunks], dim=1)
            quantized = straight_through(self.quantizer.decode_codes(codes).detach(), quantized)
        transformed = None
        if transform is not None:
            transformed, _ = self._decode(self.quantizer.requantize(transform(latents)))
            transformed = transformed.squeeze(2) if videos.dim() == 4 else transformed
        reconstruction, features = self._decode(mix_noise(quantized, latent_noise, noise_levels))
        if videos.dim() == 4:
            reconstruction, codes = reconstruction.squeeze(2), codes.squeeze(1) if self.num_codes else codes
        return VideoTokenizerOutput(reconstruction, codes, losses, features.detach(), latents.float(), transformed)

    @torch.no_grad()
    def encode(self, videos: Tensor) -> Tensor:
        """Videos (b, c, f, h, w) in [0, 1] -> codes, int64 (b, f', h', w'), or the means of continuous latents, fp32
        (b, d, f', h', w'), neither shifted nor scaled. Images (b, c, h, w) -> the same without f'.

        Raises:
            ValueError: as forward; or videos far from [0, 1].
        """
        return self._encode(videos, self.quantizer.codes)

    @torch.no_grad()
    def posterior(self, videos: Tensor) -> Tensor:
        """Videos or images as for `encode` -> the means of their continuous latents, then the standard deviations,
        concatenated along the channels: fp32 (b, 2 d, f', h', w'). Raises what `encode` raises."""
        return self._encode(videos, self._moments)

    def decode(self, codes: Tensor) -> Tensor:
        """Codes or latents -> fp32 videos (b, c, f, h, w), about [0, 1] and not clamped.

        Codes are (b, f', h', w'), or (b, f' x h' x w') of videos of the trained size, frame by frame and row by row; or
        (b, h', w') of images, which become (b, c, h, w). Latents are (b, d, f', h', w'), or (b, d, h', w') of images.

        Raises:
            ValueError: codes (b, n) that fill no frames, or beyond the codebook; or latents of another shape.
        """
        self._check_decodable(codes)
        if self.num_codes and codes.dim() == 2:
            codes = self._as_grid(codes)
        is_image = codes.dim() == (3 if self.num_codes else 4)
        videos, _ = self._decode(self.quantizer.decode_codes(codes.unsqueeze(-3) if is_image else codes))
        return videos.squeeze(2) if is_image else videos

    @torch.no_grad()
    def encode_next(self, frames: Tensor, state: StreamState) -> Tensor:
        """The next frames of a stream, any number of them, (b, c, f, h, w) in [0, 1] -> the frames of codes that they
        complete, int64 (b, f', h', w'), or means of latents, fp32 (b, d, f', h', w'), f' possibly 0. The call changes
        `state`, at first `StreamState()`, which keeps the frames that complete no code yet.

        In eval mode, all calls together give exactly the codes of the whole clip.

        Raises:
            ValueError: a height or width that does not fit, or not that of the stream; or frames far from [0, 1].
        """
        return self._encode_next(frames, state, self.quantizer.codes)

    @torch.no_grad()
    def posterior_next(self, frames: Tensor, state: StreamState) -> Tensor:
        """The same as `encode_next` of a model with continuous latents, for what `posterior` returns."""
        return self._encode_next(frames, state, self._moments)

    @torch.no_grad()
    def decode_next(self, codes: Tensor, state: StreamState) -> Tensor:
        """The next codes of a stream, (b, f', h', w'), or latents, (b, d, f', h', w') -> their frames, fp32
        (b, c, f, h, w). Changes the state.

        In eval mode, all calls together give exactly the frames of the whole clip. Raises ValueError, in one line, for
        codes beyond the codebook, or latents of another shape.
        """
        self._check_decodable(codes)
        frames = [video for video, _ in self._decode_chunks(self.quantizer.decode_codes(codes), state)]
        height, width = (side * self.pixels_per_code for side in codes.shape[-2:])
        empty = torch.zeros(len(codes), self.channels, 0, height, width, device=codes.device)
        return torch.cat([empty, *frames], dim=2)

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(d, f', h', w') of the latents, or of the entries of the codes, of videos of these lengths."""
        sides = (height // self.pixels_per_code, width // self.pixels_per_code)
        return (int(self.quantizer.dim), 1 + (frames - 1) // self.frames_per_code, *sides)

    def values_per_latent(self, frames: int) -> float:
        """How many values of a clip share a position of its latents."""
        return self.channels * self.pixels_per_code**2 * frames / self.latent_shape(frames, 0, 0)[1]

    def last_layer_gradient(self, features: Tensor, image_gradient: Tensor) -> Tensor:
        """Gradient of a loss with respect to the weights of the decoder's last convolution, without a backward pass
        through the network. Uses only the shapes of weights, whose values may be sharded over processes.

        Args:
            features: Those of `VideoTokenizerOutput`, of whole clips.
            image_gradient: The loss's gradient with respect to the reconstruction, of its shape.

        Returns:
            (n,) fp32, detached, a sum over the clips like autograd's: the weight of ``decoder.conv_out.conv``,
            flattened, and that of ``decoder.conv_out.first``, if there is one.
        """
        gradient = image_gradient if image_gradient.dim() == 5 else image_gradient.unsqueeze(2)
        return self.decoder.last_layer_gradient(features, gradient)

    @torch.no_grad()
    def inflate_from(self, source: str | Path | Autoencoder, name: str = "the other model") -> None:
        """Take the weights of a tokenizer of the same arguments that was trained on images alone, to train on videos.

        Images train only the last time slice of each kernel. The other slices, still random, become 0, and so do the
        gains of earlier frames in ``attend_time`` and ``gateloop_time``. Where a layer makes two frames of one, images
        train the weights of the second alone; those of the first become a copy. At the start, each frame is therefore
        encoded and decoded like an image, and frames that share a code are all decoded as the last of them.

        Raises:
            ValueError: one line, naming the arguments in which the two models differ.
        """
        self.load_weights_from(source, name)
        for module in self.modules():
            if isinstance(module, CausalConv3d):
                module.weight[:, :, :-1] = 0
            elif isinstance(module, TimeUp | Resampling):
                module.repeat_frames()
            elif isinstance(gain := getattr(module, "past_gain", None), nn.Parameter):
                gain.zero_()
        for outer in (self.encoder.conv_in, self.decoder.conv_out):
            if isinstance(outer, OuterConv) and outer.first is not None:  # images trained `first` alone
                outer.conv.weight[:, :, -1:] = outer.first.weight
                outer.conv.bias.copy_(outer.first.bias)  # type: ignore[union-attr, arg-type]

    def _encode(self, videos: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
        """What `read` makes of the latents of videos or images, chunk by chunk; both have f' before h' and w'."""
        check_videos(videos, self.channels, self.pixels_per_code)
        check_range(videos)
        results = torch.cat([read(z) for z in self._latents(videos)], dim=-3)
        return results.squeeze(-3) if videos.dim() == 4 else results

    def _encode_next(self, frames: Tensor, state: StreamState, read: Callable[[Tensor], Tensor]) -> Tensor:
        check_videos(frames, self.channels, self.pixels_per_code)
        check_range(frames)
        sides = (side // self.pixels_per_code for side in frames.shape[-2:])
        empty = read(frames.new_zeros(len(frames), self.quantizer.in_dim, 0, *sides))
        return torch.cat([empty, *(read(z) for z in self._encode_chunks(frames, state))], dim=-3)

    def _check_decodable(self, codes: Tensor) -> None:
        """Raise ValueError, in one line, for codes beyond the codebook, or latents of another shape."""
        if self.num_codes:
            check_codes(codes, self.num_codes)
        elif codes.dim() not in (4, 5) or codes.shape[1] != self.quantizer.dim:
            raise ValueError(f"latents of shape {tuple(codes.shape)}: give (b, {self.quantizer.dim}, f', h', w')")

    def _latents(self, videos: Tensor) -> Iterable[Tensor]:
        """Latents (b, d, f', h', w') before quantization: one chunk in train mode, chunks of frames in eval mode."""
        check_videos(videos, self.channels, self.pixels_per_code)
        clip = videos if videos.dim() == 5 else videos.unsqueeze(2)
        check_frames(clip.shape[2], self.frames_per_code)
        if not self.training:
            return self._encode_chunks(clip, StreamState())
        return [self._clamp(self.encoder(clip, Context()))]

    def _encode_chunks(self, frames: Tensor, state: StreamState) -> Iterable[Tensor]:
        return (self._clamp(self.encoder(*chunk)) for chunk in state.chunks(frames, self.frames_per_code))

    def _decode(self, quantized: Tensor) -> tuple[Tensor, Tensor]:
        """Quantized (b, d, f', h', w') -> fp32 videos, and the input of the last convolution."""
        if self.training:
            return self.decoder(quantized, Context())
        videos, features = zip(*self._decode_chunks(quantized, StreamState()), strict=True)
        return torch.cat(videos, dim=2), torch.cat(features, dim=2)

    def _decode_chunks(self, quantized: Tensor, state: StreamState) -> Iterable[tuple[Tensor, Tensor]]:
        return (self.decoder(*chunk) for chunk in state.chunks(quantized, 1))

    def _clamp(self, z: Tensor) -> Tensor:
        return self.soft_clamp * torch.tanh(z / self.soft_clamp) if self.soft_clamp else z

    def _as_grid(self, codes: Tensor) -> Tensor:
        """Codes (b, f' h' w') of videos of the trained size -> (b, f', h', w')."""
        rows, columns = (side // self.pixels_per_code for side in height_and_width(self.image_size))
        if codes.shape[1] % (rows * columns):
            raise ValueError(f"{codes.shape[1]} codes fill no frames of {rows} x {columns}; give (b, f', h', w') codes")
        return rearrange(codes, "b (f h w) -> b f h w", h=rows, w=columns)


def _make_wan(config: VideoTokenizerConfig, channels: int, quantizer: Any) -> tuple[nn.Module, Any]:
    """Encoder and decoder of body wan."""
    return WanEncoder(config, channels, quantizer.in_dim), WanDecoder(config, channels, quantizer.dim)


def _make_layers(config: VideoTokenizerConfig, channels: int, quantizer: Any) -> tuple[nn.Module, Any]:
    """Encoder and decoder of body layers."""
    encoder, decoder, dim = make_layers(config, quantizer.dim)
    patch_dim, conv_options = channels * config.patch_size**2, (config.pad_mode, config.separate_first_frame)
    conv_in = OuterConv(patch_dim, config.init_dim, config.input_kernel, *conv_options)
    conv_out = OuterConv(config.init_dim, patch_dim, config.output_kernel, *conv_options)
    layers_in, layers_out = (Stack(layers, config.gradient_checkpointing) for layers in (encoder, decoder))
    norm_out = RMSNorm(config.init_dim) if config.norm == "rms" else None
    patches = (config.patch_size, config.patch)
    return (
        _VideoEncoder(conv_in, layers_in, dim, quantizer.in_dim, patches),
        _VideoDecoder(quantizer.dim, dim, layers_out, norm_out, conv_out, patches),
    )


class OuterConv(nn.Module):
    """The outermost convolution, causal, k x k x k: the encoder's first or the decoder's last one.

    Args:
        separate_first_frame: The first frame has a convolution of its own, 1 x k x k. The outputs of later frames still
            depend on the first frame.
    """

    def __init__(self, fan_in: int, fan_out: int, kernel: int, pad_mode: str, separate_first_frame: bool) -> None:
        super().__init__()
        self.conv = CausalConv3d(fan_in, fan_out, (kernel, kernel, kernel), pad_mode=pad_mode)
        self.first = (
            CausalConv3d(fan_in, fan_out, (1, kernel, kernel), pad_mode=pad_mode) if separate_first_frame else None
        )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        out = self.conv(x, context)
        if self.first is None or not context.is_start:
            return out
        # For an image, the result uses nothing of `out`. `self.conv` is called all the same, so that its weights get a
        # gradient of zeros. Without the call they would get no gradient, which not every backend treats like zeros.
        return torch.cat([self.first(x[:, :, :1], context), out[:, :, 1:]], dim=2)

    def weight_gradient(self, x: Tensor, output_gradient: Tensor) -> Tensor:
        """A loss's gradient (n,) with respect to the weights of `conv` and `first`; see `CausalConv3d`."""
        if self.first is None:
            return self.conv.weight_gradient(x, output_gradient).flatten()
        later_gradient = F.pad(output_gradient[:, :, 1:], (0, 0, 0, 0, 1, 0))  # 0 for the first frame
        gradients = (
            self.conv.weight_gradient(x, later_gradient),
            self.first.weight_gradient(x[:, :, :1], output_gradient[:, :, :1]),
        )
        return torch.cat([gradient.flatten() for gradient in gradients])


class Stack(nn.ModuleList):
    """Layers one after the other.

    Args:
        recompute: In training, compute each layer again in the backward pass instead of keeping its activations.
    """

    def __init__(self, layers: Iterable[nn.Module], recompute: bool) -> None:
        super().__init__(layers)
        self.recompute = recompute

    def forward(self, x: Tensor, context: Context) -> Tensor:
        for layer in self:
            x = recompute_in_backward(layer, x, context, when=self.recompute and self.training)
        return x


class _VideoEncoder(nn.Module):
    """Frames (b, c, f, h, w) -> latents (b, dim_latent, f', h', w').

    Args:
        conv_in: From the channels of a patch.
        layers: As `make_layers` gives them.
        dim: Channels after the layers.
        patch: Side and kind of the patches.
    """

    def __init__(
        self, conv_in: OuterConv, layers: Stack, dim: int, dim_latent: int, patch: tuple[int, str]
    ) -> None:  # fmt: skip
        super().__init__()
        self.patch, self.conv_in, self.layers = patch, conv_in, layers
        self.norm = RMSNorm(dim)
        self.to_latents = nn.Conv3d(dim, dim_latent, 1)

    def forward(self, frames: Tensor, context: Context) -> Tensor:
        # Values in [-1, 1], because the layers learn several times faster from a mean of 0 than from one of 1/2.
        patches = to_patches(2 * frames.to(self.to_latents.weight.dtype) - 1, *self.patch)
        x = self.layers(self.conv_in(patches, context), context)
        return self.to_latents(self.norm(x))


class _VideoDecoder(nn.Module):
    """Quantized latents (b, dim_latent, f', h', w') -> frames (b, c, f, h, w) in fp32, and the input of the last
    convolution (b, d, f, h / patch, w / patch).

    Args:
        layers: As `make_layers` gives them.
        dim: Channels before the layers.
        norm: This norm and a SiLU precede the last convolution; None: neither of them.
        conv_out: To the channels of a patch.
        patch: Side and kind of the patches.
    """

    def __init__(
        self, dim_latent: int, dim: int, layers: Stack, norm: RMSNorm | None, conv_out: OuterConv,
        patch: tuple[int, str],
    ) -> None:  # fmt: skip
        super().__init__()
        self.from_latents = nn.Conv3d(dim_latent, dim, 1)
        self.layers, self.norm, self.conv_out, self.patch = layers, norm, conv_out, patch

    def forward(self, quantized: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        latents = quantized.to(self.from_latents.weight.dtype)
        context = context._replace(latents=latents)
        x = self.layers(self.from_latents(latents), context)
        features = x if self.norm is None else F.silu(self.norm(x))
        return (from_patches(self.conv_out(features, context).float(), *self.patch) + 1) / 2, features

    def last_layer_gradient(self, features: Tensor, frames_gradient: Tensor) -> Tensor:
        """A loss's gradient (n,) with respect to the weights of ``conv_out``, from whole clips; uses no weights."""
        return self.conv_out.weight_gradient(features, to_patches(frames_gradient.float() / 2, *self.patch))
