"""Configurations of models: a dataclass for each, whose fields are the arguments of its constructor, the entries of its
config.json, and flags of its script. Imports no PyTorch, so that `--help` is fast."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.config.converters import (
    channel_count,
    fraction,
    layer_names,
    non_negative_float,
    picture_sides,
    positive_float,
    size,
    size_or_0,
    sizes,
    step_count_or_0,
    width,
)
from tandem.config.fields import ModelConfig, Requirement, above_0, flag, specs_of, when
from tandem.sides import Sides

from .taming import KL, BodyConfig, LatentConfig

#: Short descriptions of the quantizers, by name.
QUANTIZERS = {
    "lfq": "lookup-free",
    "vq": "vector (EMA codebook)",
    "fsq": "finite scalar",
    "bsq": "binary spherical",
    "ibq": "index backpropagation",
}
#: Short descriptions of the kinds of latents, by name.
LATENT_KINDS = {**QUANTIZERS, "kl": "or no codes: continuous latents"}
# Defaults of flags for a quantizer, those of its authors' code, where they differ from the flags' own defaults.
_QUANTIZER_DEFAULTS: dict[str, dict[str, float]] = {
    "bsq": {"inv_temperature": 1.0, "commitment_loss_weight": 0.0, "diversity_gamma": 1.0},
    "ibq": {"commitment_loss_weight": 1.0, "entropy_loss_weight": 0.05, "diversity_gamma": 1.0},
}
# High enough to keep the entries of a trained codebook: at 0.8, one that no vector chooses in 21 updates is replaced.
_VQ_DECAY_WITH_INIT_FROM = 0.99
_ENTROPY = when("quantizer", "lfq", "bsq", "ibq")  # the quantizers with an entropy loss
WAN = "wan"
_IS_WAN, _HAS_LAYERS = when("body", WAN), when("body", "layers")
# Flags of networks that take pictures of 3 channels alone.
_COLOURS_ONLY = ("lpips_weights", "fid_weights", "fvd_weights", "align_with")
_WAN_DIM = 96  # of Wan 2.1; 2.2 has 160, and 256 in the decoder
_LAYERS = (
    "residual,compress_space,consecutive_residual:2,compress_space,consecutive_residual:2,linear_attend_space,"
    "compress_space,consecutive_residual:2,attend_space" + 2 * ",compress_time,consecutive_residual:2" + ",attend_time"
)


def check_choices(config: ModelConfig) -> None:
    """Raise a ValueError, in one line, if a field has a value that is none of its choices."""
    for name, spec in specs_of(type(config)).items():
        value, choices = getattr(config, name), spec.options.get("choices")
        if choices and value not in choices:
            raise ValueError(f"{name} {value!r} is unknown; use {', '.join(choices)}")


def image_size_flag(default: int, of: str) -> Any:
    """The flag --image_size of a model of pictures or videos."""
    return flag(default, f"side, or height x width, of {of}", picture_sides, fixed_on_resume=True, title="images")


def channels_flag(help: str) -> Any:
    """The flag --channels; runs of earlier versions may have no such setting."""
    return flag(3, help, channel_count, architecture=True, fixed_on_resume=lambda channels: channels or 3)


_CHANNELS = (
    "channels of the images, 1 to 16. 3: colours. Another number: .npy arrays, TIFFs and grey pictures that have so "
    "many, in their full depth: whole numbers are divided by the maximum of their type, floats are from 0 to 1. 4 also "
    "reads other files as RGBA, opaque without alpha, with colours that are not multiplied by alpha. samples/ shows 1 "
    "as grey, 4 as RGBA before a checkerboard, and the first 3 of others (of 2, the first)"
)


def check_channels(args: argparse.Namespace, parser: Any) -> None:
    """Refuse networks for colours beside another number of channels."""
    if args.channels != 3:
        given_flags = [f"--{name}" for name in _COLOURS_ONLY if getattr(args, name, None)]
        if getattr(args, "perceptual", "none") != "none":
            given_flags.append(f"--perceptual {args.perceptual}")
        if given_flags:
            parser.error(f"--channels {args.channels}: leave out {given_flags[0]}, whose network takes 3 channels")


@dataclass
class DiscreteVAEConfig(ModelConfig):
    """Configuration of a `DiscreteVAE`."""

    image_size: Sides = image_size_flag(128, "the images; powers of two")
    channels: int = channels_flag(_CHANNELS)
    num_tokens: int = flag(8192, "size of the codebook", size, architecture=True, title="model")
    num_layers: int = flag(3, "halvings of the side: a code stands for 2^N x 2^N pixels", size, architecture=True)
    num_resnet_blocks: int = flag(2, "residual blocks on the coarsest grid", size_or_0, architecture=True)
    codebook_dim: int = flag(512, "width of a codebook entry", width, architecture=True, aliases="emb_dim")
    hidden_dim: int = flag(256, "channels of the convolutions", width, architecture=True)
    smooth_l1_loss: bool = flag(False, "smooth L1 loss instead of MSE", title="loss and schedules")
    kl_loss_weight: float = flag(
        0.0,
        "weight of KL(q || uniform), a mean over batch and positions in nats (DALLE-pytorch sums over both); with "
        "0 the KL is only reported",
        non_negative_float,
    )
    straight_through: bool = flag(False, "hard codes in the forward pass, with the gradient of the soft ones")
    reinmax: bool = flag(False, "ReinMax gradient estimator; needs --straight_through")


@dataclass
class QuantizerConfig(ModelConfig):
    """Configuration of the quantizer of a VQGAN or a video tokenizer, or of what stands in its place if latents are
    continuous. Options of other kinds have no effect."""

    quantizer: str = flag(
        "lfq",
        f"kind of quantizer: {', '.join(LATENT_KINDS.values())}",
        choices=tuple(LATENT_KINDS),
        title="quantizer",
        architecture=True,
    )
    codebook_size: int = flag(
        65536,
        "number of codes; a power of two for lfq, bsq",
        size,
        architecture=True,
        requires=when("quantizer", *QUANTIZERS),
    )
    codebook_dim: int = flag(
        32, "width of a codebook entry (vq, ibq)", width, architecture=True, requires=when("quantizer", "vq", "ibq")
    )
    vq_decay: float = flag(
        0.8,
        "decay per update of the averages that are the codebook (vq); default with --init_from: 0.99",
        fraction,
        requires=when("quantizer", "vq"),
    )
    vq_cosine: bool = flag(
        False,
        "choose the codebook entry by the smallest angle, not the smallest distance (vq)",
        architecture=True,
        requires=when("quantizer", "vq"),
    )
    vq_gradient: str = flag(
        "straight_through",
        "gradient of a vector (vq): straight_through: that of its codebook entry, unchanged; rotation: that gradient, "
        "turned as the entry is turned onto the vector, times |entry| / |vector| (the rotation trick)",
        choices=("straight_through", "rotation"),
        requires=when("quantizer", "vq"),
    )
    fsq_levels: tuple[int, ...] | None = flag(
        None,
        "levels of each dimension (fsq; default: levels whose product is --codebook_size)",
        sizes,
        architecture=True,
        requires=when("quantizer", "fsq"),
    )
    diversity_gamma: float = flag(
        1.0,
        "gamma in the formula of --entropy_loss_weight; default of bsq, ibq: 1",
        non_negative_float,
        requires=_ENTROPY,
    )
    # Public implementations of LFQ use 100: the entropies then have no gradient for channels beyond +-0.01, so a bit
    # that starts there never changes. On photos, 10 gave better images and more codes in use (docs/quantizers.md).
    inv_temperature: float = flag(
        10.0,
        "inverse temperature of the soft codes in the entropy loss (lfq, bsq); default of bsq: 1",
        positive_float,
        requires=when("quantizer", "lfq", "bsq"),
    )

    @classmethod
    def validate(cls, args: argparse.Namespace, parser: Any) -> None:
        for name, value in _QUANTIZER_DEFAULTS.get(args.quantizer, {}).items():
            if name not in args.explicit:
                setattr(args, name, value)
        if args.init_from and args.quantizer == "vq" and args.train == "all" and "vq_decay" not in args.explicit:
            args.vq_decay = _VQ_DECAY_WITH_INIT_FROM


@dataclass
class QuantizerLossFlags:
    """Flags of the weights of a quantizer's losses, which are no arguments of the model."""

    commitment_loss_weight: float = flag(
        0.25,
        "weight of the loss that keeps the encoder near its codes; defaults of bsq: 0, of ibq: 1",
        non_negative_float,
        title="quantizer",
        requires=when("quantizer", "lfq", "bsq", "vq", "ibq"),
    )
    entropy_loss_weight: float = flag(
        0.1,
        "weight of the entropy loss in nats, H(code of a position) - gamma H(code over the batch) "
        "(lfq, bsq, ibq); default of ibq: 0.05",
        non_negative_float,
        requires=_ENTROPY,
    )
    entropy_anneal_factor: float = flag(
        1.0,
        "factor on --entropy_loss_weight at the start of training",
        positive_float,
        requires=(_ENTROPY, above_0("entropy_anneal_steps")),
    )
    entropy_anneal_steps: int = flag(
        0, "updates until --entropy_anneal_factor is 1", step_count_or_0, requires=_ENTROPY
    )


@dataclass
class RecomputingConfig(ModelConfig):
    """Configuration of a model that can recompute its layers in the backward pass."""

    gradient_checkpointing: bool = flag(
        False, "compute activations again in the backward pass: slower, with far less memory", title="precision"
    )


@dataclass
class VQGANConfig(BodyConfig, LatentConfig, QuantizerConfig, RecomputingConfig):
    """Configuration of a `VQGAN`."""

    image_size: Sides = image_size_flag(256, "the images; multiples of 2^num_layers")
    channels: int = channels_flag(_CHANNELS)
    dim: int = flag(
        128, "channels at full resolution; muse: a halving doubles them", width, title="model", architecture=True
    )
    num_layers: int = flag(
        4,
        "halvings of the side: a code stands for 2^N x 2^N pixels",
        size,
        architecture=True,
        requires=when("body", "muse"),
    )
    num_resnet_blocks: tuple[int, ...] = flag(
        (1,),
        "residual blocks of the coarsest level, or of each level, finest first; --body taming: one number for all "
        "levels, by default 2, to which the decoder adds 1",
        sizes,
        architecture=True,
    )
    normalize_input: bool = flag(
        True,
        "map images from [0, 1] to [-1, 1] before the encoder, and back after the decoder; off for a model for "
        "muse-maskgit-pytorch",
        architecture=True,
        requires=when("body", "muse"),
    )
    latent_patch: int = flag(
        1,
        "a generator gets patches of N x N latents, as FLUX.2's does (2): each place of a patch has a mean and a "
        "deviation of its own in each channel (kl)",
        size,
        metavar="N",
        architecture=True,
        requires=when("quantizer", KL),
    )

    @classmethod
    def validate(cls, args: argparse.Namespace, parser: Any) -> None:
        check_channels(args, parser)
        *finer, coarsest = args.num_resnet_blocks
        if not any(finer):  # "0,0,1" is "1", that of the coarsest level
            args.num_resnet_blocks = (coarsest,)

    @classmethod
    def architecture_of(cls, model: Mapping[str, Any], args: Any) -> dict[str, Any]:
        return {**super().architecture_of(model, args), **_adopted_discriminator(model, args)}


def discriminator_flags(description: Mapping[str, Any]) -> dict[str, Any]:
    """The flags by name that give a discriminator of this description; {} of an empty one."""
    if not description:
        return {}
    kind = "maskbit" if description["model"] == "MaskBitDiscriminator" else description.get("frame_head", "muse")
    return {"discriminator": kind, "discr_dim": description["dim"], "discr_layers": description["layers"]}


def _adopted_discriminator(model: Mapping[str, Any], args: Any) -> dict[str, Any]:
    """The flags of the discriminator beside the model of --init_from, unless the run begins with a new one."""
    return discriminator_flags(model.get("discriminator_config", {})) if args.init_discriminator else {}


@dataclass
class DiscriminatorConfig(ModelConfig):
    """Configuration of a `Discriminator` or a `MaskBitDiscriminator`.

    Args:
        dim: Channels after the first convolution and the first halving; they double with each further halving.
        layers: Halvings of the side.
    """

    dim: int
    layers: int = 4
    channels: int = 3


@dataclass
class VideoDiscriminatorConfig(ModelConfig):
    """Configuration of a `VideoDiscriminator`.

    Args:
        dim: Channels of the first layer of each head.
        layers: Halvings of the side in every head.
        frame_head: Kind of the head that sees single frames: "muse" or "maskbit".
    """

    dim: int
    layers: int = 4
    channels: int = 3
    frame_head: str = "muse"


@dataclass
class WanConfig(ModelConfig):
    """The layers around the quantizer of a video tokenizer."""

    body: str = flag(
        "layers",
        "layers of encoder and decoder: layers: those of --layers; wan: those of the video autoencoders of Wan 2.1 "
        "and 2.2",
        choices=("layers", WAN),
        title="model",
        architecture=True,
    )
    ch_mult: tuple[int, ...] = flag(
        (1, 2, 4, 4),
        "channels of each level as multiples of --init_dim, finest first; every level but the last halves the side",
        sizes,
        architecture=True,
        requires=_IS_WAN,
    )
    time_levels: tuple[int, ...] = flag(
        (1, 2), "levels, 0 the finest, that also halve the frames", sizes, architecture=True, requires=_IS_WAN
    )
    num_resnet_blocks: int = flag(
        2, "residual blocks of each level; the decoder has one more", size, architecture=True, requires=_IS_WAN
    )
    decoder_dim: int | None = flag(
        None, "--init_dim of the decoder (default: the same)", width, architecture=True, requires=_IS_WAN
    )
    residual_resampling: bool = flag(
        False,
        "a residual connection without parameters around each level, as in Wan 2.2",
        architecture=True,
        requires=_IS_WAN,
    )


@dataclass
class VideoTokenizerConfig(WanConfig, LatentConfig, QuantizerConfig, RecomputingConfig):
    """Configuration of a `VideoTokenizer`."""

    image_size: Sides = image_size_flag(128, "the frames; multiples of the side of a code: patch_size x 2^halvings")
    channels: int = channels_flag(
        "channels of the frames, 1 to 16; files and demo:moving have 3, and --dataset may have others"
    )
    layers: str = flag(
        _LAYERS,
        "layers of the encoder, mirrored in the decoder: residual, residual_space, "
        "consecutive_residual:NUMBER, compress_space[:CHANNELS], compress_time[:CHANNELS], attend_space, "
        "attend_time, linear_attend_space, gateloop_time, adaptive",
        layer_names,
        title="model",
        architecture=True,
        requires=_HAS_LAYERS,
    )
    init_dim: int = flag(
        64, f"channels before the first layer; default of --body wan: {_WAN_DIM}", width, architecture=True
    )
    max_dim: int | None = flag(
        None, "most channels of a layer (default: no limit)", width, architecture=True, requires=_HAS_LAYERS
    )
    input_kernel: int = flag(7, "side of the first convolution's kernel", size, architecture=True, requires=_HAS_LAYERS)
    output_kernel: int = flag(3, "side of the last convolution's kernel", size, architecture=True, requires=_HAS_LAYERS)
    residual_kernel: int = flag(
        3, "side of the residual layers' kernels", size, architecture=True, requires=_HAS_LAYERS
    )
    pad_mode: str = flag(
        "constant",
        "padding in space of the first and the last convolution",
        choices=("constant", "replicate", "reflect"),
        architecture=True,
        requires=_HAS_LAYERS,
    )
    norm: str = flag(
        "none",
        "rms: RMSNorm over the channels of each position before the convolutions of residual layers",
        choices=("none", "rms"),
        architecture=True,
        requires=_HAS_LAYERS,
    )
    patch_size: int = flag(
        1, "cut frames into patches of this side first; a power of two", size, metavar="PIXELS", architecture=True
    )
    patch: str = flag(
        "haar",
        "what a patch becomes: its Haar wavelet coefficients, or its pixels",
        choices=("haar", "pixels"),
        architecture=True,
        requires=Requirement("patch_size", "above 1", lambda args: args.patch_size > 1),
    )
    separate_first_frame: bool = flag(
        False, "give the first frame convolutions of its own", architecture=True, requires=_HAS_LAYERS
    )
    time_window: int = flag(
        16,
        "attend_time looks back so many latent frames, which bounds the memory of a stream; 0: to the beginning",
        size_or_0,
        metavar="FRAMES",
        fixed_on_resume=True,
        requires=(_HAS_LAYERS, Requirement("layers", "with attend_time", lambda args: "attend_time" in args.layers)),
    )
    soft_clamp: float = flag(
        10.0,
        "the quantizer gets X tanh(z / X) in place of the latents z (lfq), with X this number; 0: z",
        non_negative_float,
        architecture=True,
        requires=when("quantizer", "lfq"),
    )
    codebook_size: int = 1024
    diversity_gamma: float = 2.5

    @classmethod
    def architecture_of(cls, model: Mapping[str, Any], args: Any) -> dict[str, Any]:
        return {**super().architecture_of(model, args), **_adopted_discriminator(model, args)}

    @classmethod
    def validate(cls, args: argparse.Namespace, parser: Any) -> None:
        if args.body == WAN and "init_dim" not in args.explicit:
            args.init_dim = _WAN_DIM
        check_channels(args, parser)
        if args.channels != 3 and not args.dataset:
            parser.error(
                f"--channels {args.channels}: films have 3 channels; give --dataset, whose frames may have others"
            )
