"""Causal video and image tokenizer after MAGVIT-2 (Yu et al. 2024) with a choice of layers and quantizers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from einops import rearrange
from torch import Tensor, nn

from .configs import VideoTokenizerConfig
from .convolutional import check_codes, check_range
from .files.pretrained import Pretrained
from .quantizers import make_quantizer
from .video.causal import CausalConv3d, Context, TimeUp
from .video.coders import COND_EXPANSION, Decoder, EdgeConv, Encoder, Stack
from .video.layers import (
    LayerOptions,
    check_condition,
    check_frames,
    check_options,
    check_side,
    check_videos,
    frames_per_code,
    make_layers,
    parse_layers,
    pixels_per_code,
)
from .video.residual import RMSNorm
from .video.streams import StreamState

Self = TypeVar("Self", bound="VideoTokenizer")


class VideoTokenizerOutput(NamedTuple):
    """Results of a forward pass. For images (b, c, h, w), reconstruction and codes have no frames either."""

    reconstruction: Tensor
    """fp32 (b, c, f, h, w), about [0, 1] and not clamped."""
    codes: Tensor
    """int64 (b, f', h', w') in [0, num_codes)."""
    losses: dict[str, Tensor]
    """Losses of the quantizer by name, 0-d and unweighted."""
    features: Tensor
    """(b, init_dim, f, h / patch_size, w / patch_size): input of the decoder's last convolution, detached; for
    `VideoTokenizer.last_layer_gradient`."""


class VideoTokenizer(Pretrained):
    """Videos (b, c, f, h, w) to codes (b, f', h', w') and back; an image is a video of one frame.

    A code depends on no later frame: with S_t = `frames_per_code` and S_s = `pixels_per_code`, f = 1 + S_t n frames
    become f' = 1 + n frames of codes, the first from the first frame alone, and h' = h / S_s, w' = w / S_s. Any n and
    any height and width that S_s divides are taken.

    In train mode a clip is computed at once. In eval mode every method computes it in the same chunks, the first frame
    and then S_t frames (or one frame of codes) at a time. Hence a stream, a whole clip and its beginning have codes and
    frames of the same bits, for the same batch size, device and weights.

    Gradient checkpointing computes each layer again in the backward pass of training instead of keeping what is inside
    of it: less memory, the same bits, a third more time. Fields of the configuration that are no flags: `channels`, 3
    for RGB or 4 for RGBA; `dim_cond`, the width of the condition of the layers ``cond_...``; heads and widths of
    attention and of linear attention.

    Raises:
        ValueError: one line, if arguments do not fit one another.
    """

    Config = VideoTokenizerConfig
    not_in_the_weights = VideoTokenizerConfig.not_in_the_weights()
    cut_before = ("decoder",)  # see distributed.engines.replicated.cut_graph

    def __init__(self, config: VideoTokenizerConfig) -> None:
        super().__init__()
        self._is_encoder_frozen = False
        self.config = config.plain()
        channels, init_dim = config.channels, config.init_dim
        patch_size, dim_cond = config.patch_size, config.dim_cond
        check_options(self.config)
        parsed = parse_layers(config.layers)
        self.frames_per_code, self.pixels_per_code = (
            frames_per_code(config.layers),
            pixels_per_code(config.layers, patch_size),
        )
        check_side("image_size", config.image_size, self.pixels_per_code)
        self.image_size, self.channels = config.image_size, channels
        self.soft_clamp = config.soft_clamp if config.quantizer == "lfq" else 0.0
        self.is_conditional = any(layer.name.startswith("cond_") for layer in parsed)
        if dim_cond is not None and not self.is_conditional:
            raise ValueError(f"dim_cond {dim_cond} has no effect without a layer that takes a condition: cond_...")

        self.quantizer = make_quantizer(config)
        dim_latent, wide_cond = self.quantizer.dim, None if dim_cond is None else COND_EXPANSION * dim_cond
        encoder, decoder, dim = make_layers(parsed, init_dim, config.max_dim, LayerOptions(
            config.residual_kernel, config.norm, wide_cond, dim_latent, config.heads, config.dim_head,
            config.linear_heads, config.linear_dim_head, config.time_window,
        ))  # fmt: skip
        of_patch, edge = channels * patch_size**2, (config.pad_mode, config.separate_first_frame)
        conv_in = EdgeConv(of_patch, init_dim, config.input_kernel, *edge)
        conv_out = EdgeConv(init_dim, of_patch, config.output_kernel, *edge)
        layers_in, layers_out = (Stack(each, config.gradient_checkpointing) for each in (encoder, decoder))
        norm_out = RMSNorm(init_dim) if config.norm == "rms" else None
        patches = (patch_size, config.patch)
        self.encoder = Encoder(conv_in, layers_in, dim, dim_latent, dim_cond, patches)
        self.decoder = Decoder(dim_latent, dim, dim_cond, layers_out, norm_out, conv_out, patches)
        for name, module in self.named_modules():
            if hasattr(module, "stream_name"):
                module.stream_name = name

    @property
    def num_codes(self) -> int:
        """Number of codes; with FSQ it may differ a little from codebook_size."""
        return int(self.quantizer.num_codes)

    @property
    def codebook_summary(self) -> str:
        """What the codebook is, in a few words, such as "fsq: 1000 codes, levels 8,5,5,5"."""
        return f"{self.config['quantizer']}: {self.quantizer.summary()}"

    def forward(
        self, videos: Tensor, cond: Tensor | None = None, *, observe: bool = False
    ) -> VideoTokenizerOutput | None:
        """Videos (b, c, f, h, w) or images (b, c, h, w) in [0, 1] through their codes and back.

        Args:
            cond: (b, dim_cond), if there are layers that take a condition.
            observe: Only add the videos to the quantizer's statistics over several micro-batches
                (``quantizer.observe``), and return None.

        Raises:
            ValueError: one line that names the nearest sizes that fit; or a condition that is missing or superfluous.
        """
        parts = list(self._latents(videos, cond))
        z = torch.cat(parts, dim=2)
        if observe:
            self.quantizer.observe(z)
            return None
        quantized, codes, losses = self.quantizer(z)
        if len(parts) > 1:  # how many vectors are compared with a codebook at once may change the bits
            codes = torch.cat([self.quantizer.codes(part) for part in parts], dim=1)
            quantized = self.quantizer.decode_codes(codes).detach() + (quantized - quantized.detach())
        reconstruction, features = self._decode(quantized, cond)
        if videos.dim() == 4:
            reconstruction, codes = reconstruction.squeeze(2), codes.squeeze(1)
        return VideoTokenizerOutput(reconstruction, codes, losses, features.detach())

    @torch.no_grad()
    def encode(self, videos: Tensor, cond: Tensor | None = None) -> Tensor:
        """Videos (b, c, f, h, w) in [0, 1] -> codes, int64 (b, f', h', w'); images (b, c, h, w) -> (b, h', w').

        Raises:
            ValueError: as forward; or videos far from [0, 1].
        """
        check_videos(videos, self.channels, self.pixels_per_code)
        check_range(videos)
        codes = torch.cat([self.quantizer.codes(z) for z in self._latents(videos, cond)], dim=1)
        return codes.squeeze(1) if videos.dim() == 4 else codes

    def decode(self, codes: Tensor, cond: Tensor | None = None) -> Tensor:
        """Codes -> fp32 videos (b, c, f, h, w), about [0, 1] and not clamped.

        Codes are (b, f', h', w'), or (b, f' x h' x w') of videos of the trained size, frame by frame and row by row; or
        (b, h', w') of images, which become (b, c, h, w).

        Raises:
            ValueError: codes (b, n) that fill no frames, or beyond the codebook; a condition that is missing or
                superfluous.
        """
        check_codes(codes, self.num_codes)
        if codes.dim() == 2:
            codes = self._as_grid(codes)
        quantized = self.quantizer.decode_codes(codes.unsqueeze(1) if codes.dim() == 3 else codes)
        videos, _ = self._decode(quantized, cond)
        return videos.squeeze(2) if codes.dim() == 3 else videos

    # The names in the public code.
    tokenize = encode
    decode_from_code_indices = decode

    def start_encoding(self, cond: Tensor | None = None) -> StreamState:
        """The state of a stream from which nothing was encoded yet."""
        return StreamState(check_condition(cond, self.is_conditional))

    @torch.no_grad()
    def encode_next(self, frames: Tensor, state: StreamState) -> Tensor:
        """The next frames of a stream, any number of them, (b, c, f, h, w) in [0, 1] -> the frames of codes that they
        complete, int64 (b, f', h', w'), f' possibly 0; the state keeps the other frames. Changes the state.

        In eval mode, all calls together give exactly the codes of the whole clip.

        Raises:
            ValueError: a height or width that does not fit, or not that of the stream; or frames far from [0, 1].
        """
        check_videos(frames, self.channels, self.pixels_per_code)
        check_range(frames)
        codes = [self.quantizer.codes(z) for z in self._encode_chunks(frames, state)]
        height, width = (side // self.pixels_per_code for side in frames.shape[-2:])
        return torch.cat([frames.new_zeros(len(frames), 0, height, width, dtype=torch.int64), *codes], dim=1)

    def finish_encoding(self, state: StreamState) -> None:
        """Raise a ValueError of one line if frames are left that are not in any code, as from a clip that has not
        1 + S_t n frames. Which ones are left, `StreamState.pending` says."""
        left = 0 if state.pending is None else state.pending.shape[2]
        check_frames(state.used + left, self.frames_per_code)

    def start_decoding(self, cond: Tensor | None = None) -> StreamState:
        """The state of a stream from which nothing was decoded yet."""
        return StreamState(check_condition(cond, self.is_conditional))

    @torch.no_grad()
    def decode_next(self, codes: Tensor, state: StreamState) -> Tensor:
        """The next codes of a stream, (b, f', h', w') -> their frames, fp32 (b, c, f, h, w). Changes the state.

        In eval mode, all calls together give exactly the frames of the whole clip. Raises ValueError, in one line, for
        codes beyond the codebook.
        """
        check_codes(codes, self.num_codes)
        frames = [video for video, _ in self._decode_chunks(self.quantizer.decode_codes(codes), state)]
        height, width = (side * self.pixels_per_code for side in codes.shape[-2:])
        none = torch.zeros(len(codes), self.channels, 0, height, width, device=codes.device)
        return torch.cat([none, *frames], dim=2)

    def last_layer_gradient(self, features: Tensor, image_gradient: Tensor) -> Tensor:
        """Gradient of a loss with respect to the weights of the decoder's last convolution, without a backward pass
        through the network. Uses shapes alone, no weights: they may be spread over processes.

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
    def inflate_from(self, source: str | Path | Pretrained, name: str = "the other model") -> None:
        """Take the weights of a tokenizer of the same arguments that was trained on images alone, to train on videos.

        Images train only the last time slice of each kernel; the others, still random, become 0 here, and so do the
        gains of what ``attend_time`` and ``gateloop_time`` see of earlier frames. Where a frame becomes two, images
        train the second alone; the first gets its weights. So each frame is coded and decoded like an image at the
        start, and the first frame stays so (not with ``cond_residual``, whose output is divided by a norm of all
        slices); a group of frames that share a code starts as its last frame.

        Raises:
            ValueError: one line, naming the arguments in which the two models differ.
        """
        self.load_weights_from(source, name)
        for module in self.modules():
            if isinstance(module, CausalConv3d):
                module.weight[:, :, :-1] = 0
            elif isinstance(module, TimeUp):
                module.repeat_frames()
            elif isinstance(gain := getattr(module, "past_gain", None), nn.Parameter):
                gain.zero_()
        for edge in (self.encoder.conv_in, self.decoder.conv_out):
            if edge.first is not None:  # images did not train the other one at all
                edge.conv.weight[:, :, -1:] = edge.first.weight
                edge.conv.bias.copy_(edge.first.bias)  # type: ignore[union-attr, arg-type]

    def freeze_encoder(self) -> None:
        """Keep the encoder and the codebook as they are; only the decoder learns."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith("decoder."))
        self._is_encoder_frozen = True
        self.train(self.training)

    def train(self: Self, mode: bool = True) -> Self:
        """As in `nn.Module`, but a frozen codebook stays in eval mode."""
        super().train(mode)
        self.quantizer.train(mode and not self._is_encoder_frozen)
        return self

    def _latents(self, videos: Tensor, cond: Tensor | None) -> Iterable[Tensor]:
        """Latents (b, d, f', h', w') before quantization, in chunks of frames; in train mode, in one."""
        check_videos(videos, self.channels, self.pixels_per_code)
        clip = videos if videos.dim() == 5 else videos.unsqueeze(2)
        check_frames(clip.shape[2], self.frames_per_code)
        if not self.training:
            return self._encode_chunks(clip, self.start_encoding(cond))
        return [self._clamped(self.encoder(clip, Context(check_condition(cond, self.is_conditional))))]

    def _encode_chunks(self, frames: Tensor, state: StreamState) -> Iterable[Tensor]:
        return (self._clamped(self.encoder(*chunk)) for chunk in state.chunks(frames, self.frames_per_code))

    def _decode(self, quantized: Tensor, cond: Tensor | None) -> tuple[Tensor, Tensor]:
        """Quantized (b, d, f', h', w') -> fp32 videos, and the input of the last convolution."""
        if self.training:
            return self.decoder(quantized, Context(check_condition(cond, self.is_conditional)))
        videos, features = zip(*self._decode_chunks(quantized, self.start_decoding(cond)), strict=True)
        return torch.cat(videos, dim=2), torch.cat(features, dim=2)

    def _decode_chunks(self, quantized: Tensor, state: StreamState) -> Iterable[tuple[Tensor, Tensor]]:
        return (self.decoder(*chunk) for chunk in state.chunks(quantized, 1))

    def _clamped(self, z: Tensor) -> Tensor:
        return self.soft_clamp * torch.tanh(z / self.soft_clamp) if self.soft_clamp else z

    def _as_grid(self, codes: Tensor) -> Tensor:
        """Codes (b, f' h' w') of videos of the trained size -> (b, f', h', w')."""
        side = self.image_size // self.pixels_per_code
        if codes.shape[1] % side**2:
            raise ValueError(f"{codes.shape[1]} codes fill no frames of {side} x {side}; give (b, f', h', w') codes")
        return rearrange(codes, "b (f h w) -> b f h w", h=side, w=side)
