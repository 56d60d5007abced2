"""What models of this package are built from: a dataclass for each, whose fields are the arguments of its
constructor, the entries of its config.json, and flags of its script. Imports no PyTorch, so that `--help` is fast."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.converters import (
    any_float,
    fraction,
    non_negative_float,
    pixels,
    positive_float,
    size,
    size_or_0,
    sizes,
    updates_or_0,
    width,
)
from tandem.fields import ModelConfig, Needs, above_0, flag, flags_of, given, when

from .quantizers import QUANTIZERS

# What a quantizer is trained with by its authors, and lfq by what was measured, where it differs from the others.
_USUAL_OF: dict[str, dict[str, float]] = {
    "bsq": {"inv_temperature": 1.0, "commitment_loss_weight": 0.0, "diversity_gamma": 1.0},
    "ibq": {"commitment_loss_weight": 1.0, "entropy_loss_weight": 0.05, "diversity_gamma": 1.0},
}
_ENTROPY = when("quantizer", "lfq", "bsq", "ibq")  # those that have an entropy loss
MAX_SCALE = 100.0  # of the similarities of a MuLaN (Radford et al. 2021, section 2.5)
_TANDEM = when("layout", "tandem")
_OF_MUSICLM = {"spectrogram": "power", "spectrogram_padding": "reflect", "hierarchical_spacing": "even"}
_LAYERS = (
    "residual,compress_space,consecutive_residual:2,compress_space,consecutive_residual:2,linear_attend_space,"
    "compress_space,consecutive_residual:2,attend_space" + 2 * ",compress_time,consecutive_residual:2" + ",attend_time"
)


@dataclass
class DiscreteVAEConfig(ModelConfig):
    """Of a `DiscreteVAE`."""

    image_size: int = flag(128, "a power of two", pixels, lasting=True, title="images")
    transparent: bool = flag(False, "RGBA instead of RGB", title="model", in_weights=True)
    num_tokens: int = flag(8192, "size of the codebook", size, in_weights=True)
    num_layers: int = flag(3, "halvings of the side: a code stands for 2^N x 2^N pixels", size, in_weights=True)
    num_resnet_blocks: int = flag(2, "residual blocks on the coarsest grid", size_or_0, in_weights=True)
    codebook_dim: int = flag(512, "width of a codebook entry", width, in_weights=True, also="emb_dim")
    hidden_dim: int = flag(256, "channels of the convolutions", width, in_weights=True)
    smooth_l1_loss: bool = flag(False, "smooth L1 instead of MSE", title="loss and schedules")
    kl_loss_weight: float = flag(
        0.0,
        "weight of KL(q || uniform), a mean over batch and positions in nats (DALLE-pytorch sums over positions); with "
        "0 the KL is only reported",
        non_negative_float,
    )
    straight_through: bool = flag(False, "hard codes forward, soft gradient")
    reinmax: bool = flag(False, "ReinMax gradient estimator; needs --straight_through")


@dataclass
class QuantizerConfig(ModelConfig):
    """Of the quantizer of a VQGAN or a video tokenizer. Each kind has options of its own; the others have no effect."""

    quantizer: str = flag(
        "lfq", ", ".join(QUANTIZERS.values()), choices=tuple(QUANTIZERS), title="quantizer", in_weights=True
    )
    codebook_size: int = flag(65536, "a power of two for lfq and bsq", size, in_weights=True)
    codebook_dim: int = flag(
        32, "width of a codebook entry (vq, ibq)", width, in_weights=True, needs=when("quantizer", "vq", "ibq")
    )
    vq_decay: float = flag(
        0.8,
        "decay of the moving averages from which the codebook is computed (vq)",
        fraction,
        needs=when("quantizer", "vq"),
    )
    vq_cosine: bool = flag(
        False,
        "take the codebook entry at the smallest angle instead of distance (vq)",
        in_weights=True,
        needs=when("quantizer", "vq"),
    )
    fsq_levels: tuple[int, ...] | None = flag(
        None,
        "levels per dimension, instead of those that make --codebook_size (fsq)",
        sizes,
        in_weights=True,
        needs=when("quantizer", "fsq"),
    )
    diversity_gamma: float = flag(
        1.0,
        "gamma in the formula of --entropy_loss_weight; bsq, ibq: 1",
        non_negative_float,
        needs=_ENTROPY,
    )
    inv_temperature: float = flag(
        10.0,
        "inverse temperature of the soft codes in the entropy loss (lfq, bsq); bsq: 1",
        positive_float,
        needs=when("quantizer", "lfq", "bsq"),
    )

    @classmethod
    def settle(cls, args: argparse.Namespace, parser: Any) -> None:
        for name, value in _USUAL_OF.get(args.quantizer, {}).items():
            if name not in args.explicit:
                setattr(args, name, value)


@dataclass
class QuantizerLossFlags:
    """What the losses of a quantizer weigh. They are no arguments of a model."""

    commitment_loss_weight: float = flag(
        0.25,
        "weight of the loss that keeps the encoder near its codes; bsq: 0, ibq: 1",
        non_negative_float,
        title="quantizer",
        needs=when("quantizer", "lfq", "bsq", "vq", "ibq"),
    )
    entropy_loss_weight: float = flag(
        0.1,
        "weight of the entropy loss in nats, H(code of a position) - gamma H(code over the batch) "
        "(lfq, bsq, ibq); ibq: 0.05",
        non_negative_float,
        needs=_ENTROPY,
    )
    entropy_anneal_factor: float = flag(
        1.0,
        "at the start, the entropy loss counts this many times --entropy_loss_weight",
        positive_float,
        needs=(_ENTROPY, above_0("entropy_anneal_steps")),
    )
    entropy_anneal_steps: int = flag(0, "updates over which that factor falls to 1", updates_or_0, needs=_ENTROPY)


@dataclass
class RecomputingConfig(ModelConfig):
    """Of a model that is deep enough to gain by computing its layers again."""

    gradient_checkpointing: bool = flag(
        False,
        "compute the layers' activations again in the backward pass: slower, and far less memory",
        title="precision",
    )


@dataclass
class VQGANConfig(QuantizerConfig, RecomputingConfig):
    """Of a `VQGAN`."""

    image_size: int = flag(256, "a multiple of 2^num_layers", pixels, lasting=True, title="images")
    dim: int = flag(
        128, "channels at full resolution; every halving doubles them", width, title="model", in_weights=True
    )
    num_layers: int = flag(4, "halvings of the side: a code stands for 2^N x 2^N pixels", size, in_weights=True)
    num_resnet_blocks: tuple[int, ...] = flag(
        (1,), "residual blocks of the coarsest level, or of each level, finest first", sizes, in_weights=True
    )
    centred: bool = flag(
        True,
        "let the layers see and make images in [-1, 1]; off for a model that muse-maskgit-pytorch is to load",
        in_weights=True,
    )
    channels: int = 3

    @classmethod
    def settle(cls, args: argparse.Namespace, parser: Any) -> None:
        *finer, coarsest = args.num_resnet_blocks
        if not any(finer):  # "0,0,1" is "1", that of the coarsest level
            args.num_resnet_blocks = (coarsest,)

    @classmethod
    def shape_of(cls, model: Mapping[str, Any], args: Any) -> dict[str, Any]:
        judge = model.get("discriminator", {})
        of_judge = {f"discr_{name}": judge[name] for name in ("dim", "layers") if judge}
        return {**super().shape_of(model, args), **of_judge}


@dataclass
class VideoTokenizerConfig(QuantizerConfig, RecomputingConfig):
    """Of a `VideoTokenizer`."""

    image_size: int = flag(
        128, "a multiple of patch_size x 2^(compress_space layers)", pixels, lasting=True, title="images"
    )
    layers: str = flag(
        _LAYERS,
        "layers of the encoder, mirrored in the decoder: residual, residual_space, "
        "consecutive_residual:NUMBER, compress_space[:CHANNELS], compress_time[:CHANNELS], attend_space, "
        "attend_time, linear_attend_space, gateloop_time, adaptive",
        metavar="NAME[:N],...",
        title="model",
        in_weights=True,
    )
    init_dim: int = flag(64, "channels before the first layer", width, in_weights=True)
    max_dim: int | None = flag(None, "no layer has more channels (default: no limit)", width, in_weights=True)
    input_kernel: int = flag(7, "side of the first convolution's kernel", size, in_weights=True)
    output_kernel: int = flag(3, "side of the last convolution's kernel", size, in_weights=True)
    residual_kernel: int = flag(3, "side of the residual layers' kernels", size, in_weights=True)
    pad_mode: str = flag(
        "constant",
        "padding in space of the first and the last convolution",
        choices=("constant", "replicate", "reflect"),
        in_weights=True,
    )
    norm: str = flag(
        "none",
        "rms: RMSNorm over the channels of each position before the convolutions of residual layers",
        choices=("none", "rms"),
        in_weights=True,
    )
    patch_size: int = flag(
        1,
        "cut frames into patches of this side before the first layer; a power of two",
        size,
        metavar="PIXELS",
        in_weights=True,
    )
    patch: str = flag(
        "haar",
        "what a patch becomes: its Haar wavelet coefficients, or its pixels",
        choices=("haar", "pixels"),
        in_weights=True,
        needs=Needs("patch_size", "above 1", lambda args: args.patch_size > 1),
    )
    separate_first_frame: bool = flag(False, "give the first frame convolutions of its own", in_weights=True)
    time_window: int = flag(
        16,
        "attend_time looks back so many latent frames, which bounds the memory of a stream; 0: to the beginning",
        size_or_0,
        metavar="FRAMES",
        lasting=True,
        needs=Needs("layers", "with attend_time", lambda args: "attend_time" in args.layers),
    )
    soft_clamp: float = flag(
        10.0,
        "lfq gets X tanh(z / X) instead of z; 0: z",
        non_negative_float,
        in_weights=True,
        needs=when("quantizer", "lfq"),
    )
    codebook_size: int = 1024
    diversity_gamma: float = 2.5
    channels: int = 3
    dim_cond: int | None = None
    heads: int = 8
    dim_head: int = 32
    linear_heads: int = 16
    linear_dim_head: int = 8


@dataclass
class TwoTowersConfig(RecomputingConfig):
    """What a `MuLaN` and a `MusicLMMuLaN` have in common. Sizes that are None take the value of those of both towers,
    and the window that of the Fourier transform."""

    sample_rate: int = flag(
        16000,
        "sample rate to which all sounds are resampled",
        size,
        metavar="HZ",
        title="sounds and texts",
        in_weights=True,
    )
    clip_seconds: float = flag(
        10.0,
        "length of the clip cut from a sound: at a random place in training, from the middle in validation",
        positive_float,
        metavar="SECONDS",
    )
    max_text_tokens: int = flag(
        256, "texts are cut off after this number of tokens", size, metavar="TOKENS", in_weights=True
    )
    n_fft: int = flag(
        1024,
        "length of the Fourier transform's window",
        size,
        metavar="SAMPLES",
        in_weights=True,
        title="spectrogram",
        also="spec_n_fft",
    )
    win_length: int | None = flag(
        None,
        "length of the window, in the middle of the Fourier transform's (default: --n_fft)",
        size,
        metavar="SAMPLES",
        in_weights=True,
        also="spec_win_length",
    )
    hop_length: int = flag(
        160,
        "distance between two windows of the Fourier transform",
        size,
        metavar="SAMPLES",
        in_weights=True,
        also="spec_hop_length",
    )
    time_mask_fraction: float = flag(0.2, "SpecAugment in training: mask up to this fraction of the time", fraction)
    frequency_mask_fraction: float = flag(
        0.25, "SpecAugment in training: mask up to this fraction of the frequencies", fraction
    )
    audio_dim: int = flag(512, "width of the audio tower", width, title="towers", in_weights=True)
    audio_depth: int = flag(6, "transformer layers of the audio tower", size, in_weights=True)
    text_dim: int = flag(512, "width of the text tower", width, in_weights=True)
    text_depth: int = flag(6, "transformer layers of the text tower", size, in_weights=True)
    heads: int = flag(8, "attention heads of both towers", size, in_weights=True)
    dim_head: int = flag(64, "width of an attention head", width, in_weights=True)
    audio_heads: int | None = flag(None, "attention heads of the audio tower (default: --heads)", size, in_weights=True)
    audio_dim_head: int | None = flag(
        None, "width of an attention head of the audio tower (default: --dim_head)", width, in_weights=True
    )
    text_heads: int | None = flag(None, "attention heads of the text tower (default: --heads)", size, in_weights=True)
    text_dim_head: int | None = flag(
        None, "width of an attention head of the text tower (default: --dim_head)", width, in_weights=True
    )
    ff_mult: int = flag(
        4, "inner width of the feed-forwards, in widths of the tower, before the 2/3 of GEGLU", size, in_weights=True
    )
    attn_dropout: float = flag(
        0.0, "part of the attention weights, and of the outputs of attention, that is dropped in training", fraction
    )
    ff_dropout: float = flag(
        0.0, "part of the inner numbers of the feed-forwards that is dropped in training", fraction
    )
    patch_size: int = flag(16, "side of a patch of the spectrogram", size, metavar="BINS", in_weights=True)
    patch_dropout: float = flag(
        0.25, "part of the patches that is left out in training", fraction, also="patch_dropout_prob"
    )
    hierarchical_layers: int = flag(
        0,
        "apply the loss to the outputs of this number of layers before the last, too",
        size_or_0,
        in_weights=True,
        also="hierarchical_contrastive_loss_layers",
    )
    dim_latent: int = flag(128, "width of the common space", width, title="model", in_weights=True)
    init_temperature: float = flag(
        10.0,
        "temperature in the log, at the start: cosines are multiplied by it (1 / tau); it is learned, up to 100",
        positive_float,
        title="loss",
    )
    init_bias: float = flag(
        -10.0,
        "number added to the scaled cosines at the start; it is learned (sigmoid)",
        any_float,
        needs=when("loss", "sigmoid"),
    )
    vocab_size: int = 49408

    def __post_init__(self) -> None:
        for tower in ("audio", "text"):
            for name in ("heads", "dim_head"):
                if getattr(self, f"{tower}_{name}") is None:
                    setattr(self, f"{tower}_{name}", getattr(self, name))
        if self.win_length is None:
            self.win_length = self.n_fft

    @classmethod
    def settle(cls, args: argparse.Namespace, parser: Any) -> None:
        """Fill in the sizes that are not given."""
        filled = TwoTowersConfig.of(args)
        for _, name, _, _ in flags_of(TwoTowersConfig):
            setattr(args, name, getattr(filled, name))

    def sizes(self, tower: str) -> tuple[int, int, int, int]:
        """Width, layers, heads and width of a head of the "audio" or the "text" tower."""
        dim, depth, heads, dim_head = (
            getattr(self, f"{tower}_{name}") for name in ("dim", "depth", "heads", "dim_head")
        )
        return dim, depth, heads, dim_head

    def check(self) -> None:
        """Raise a ValueError, in one line that names the field, if there is no such model."""
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "hierarchical_layers" else 1
            if str(field.type).startswith("int") and (type(value) is not int or value < least):
                raise ValueError(f"{field.name} {value!r} is not a whole number of at least {least}")
        for _, name, said, _ in flags_of(type(self)):
            value, choices = getattr(self, name), said.options.get("choices")
            if choices and value not in choices:
                raise ValueError(f"{name} {value!r} is unknown; use {' or '.join(choices)}")
            if said.convert is fraction and not 0 <= value < 1:
                raise ValueError(f"{name} {value} is not in [0, 1)")
        depth = min(self.audio_depth, self.text_depth)
        if self.hierarchical_layers >= depth:
            below = f"a tower of {depth} layers has {depth - 1} below its output"
            raise ValueError(
                f"hierarchical_layers {self.hierarchical_layers}: {below}; use at most {depth - 1} or more layers"
            )
        if not 0 < self.clip_seconds < math.inf:
            raise ValueError(f"clip_seconds {self.clip_seconds} is no positive length")
        visible = (1 - self.time_mask_fraction) * (1 - self.frequency_mask_fraction)
        if visible <= self.patch_dropout:
            left = f"the largest masks leave {visible:.2g} of a spectrogram, and all of that could be dropped"
            lower = "lower it, time_mask_fraction or frequency_mask_fraction"
            raise ValueError(f"patch_dropout {self.patch_dropout}: {left}; {lower}")
        if not 0 < self.init_temperature <= MAX_SCALE:
            raise ValueError(f"init_temperature {self.init_temperature} is not in (0, {MAX_SCALE:g}]")
        if not math.isfinite(self.init_bias):
            raise ValueError(f"init_bias {self.init_bias} is not finite")


@dataclass
class MuLaNConfig(TwoTowersConfig):
    """Of a `MuLaN`. Its towers are its own, unless there is the configuration of a `PretrainedTextTower` or a
    `PretrainedAudioTower`, which then decides sizes, vocabulary and spectrogram.

    Raises:
        ValueError: one line, if a tower has no configuration that is possible.
    """

    spectrogram: str = flag(
        "log_mel",
        "kind of spectrogram that the model is given",
        choices=("log_mel", "power"),
        title="spectrogram",
        in_weights=True,
        needs=_TANDEM,
    )
    spectrogram_padding: str = flag(
        "silence",
        "what a spectrogram takes for the sound beyond its ends: silence, or the sound itself, mirrored",
        choices=("silence", "reflect"),
        in_weights=True,
        needs=_TANDEM,
        also="spec_pad_mode",
    )
    n_mels: int = flag(64, "number of mel bands", size, in_weights=True, needs=_TANDEM)
    fmin: float = flag(
        0.0,
        "lowest frequency of the mel bands",
        non_negative_float,
        metavar="HZ",
        in_weights=True,
        needs=_TANDEM,
    )
    fmax: float | None = flag(
        None,
        "highest frequency of the mel bands (default: half of --sample_rate)",
        positive_float,
        metavar="HZ",
        in_weights=True,
        needs=_TANDEM,
    )
    hierarchical_spacing: str = flag(
        "last",
        "layers of --hierarchical_layers: those next to the last, or spaced evenly from the first one on",
        choices=("last", "even"),
        in_weights=True,
        needs=(_TANDEM, above_0("hierarchical_layers")),
        title="towers",
    )
    freeze_text_tower: bool = flag(
        False, "do not train the weights of --text_tower", title="pretrained towers", needs=given("text_tower", "PATH")
    )
    freeze_audio_tower: bool = flag(
        False, "do not train the weights of --audio_tower", needs=given("audio_tower", "PATH")
    )
    text_tower: Any = None
    audio_tower: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("audio", "text"):
            if isinstance(tower := getattr(self, f"{name}_tower"), Mapping):
                from .pretrained_towers import TEXT_KINDS, check_audio_tower, check_tower

                check_audio_tower(tower) if name == "audio" else check_tower(tower, TEXT_KINDS)
                for size in ("dim", "depth", "heads"):
                    setattr(self, f"{name}_{size}", tower[size])
                setattr(self, f"{name}_dim_head", tower["dim"] // tower["heads"])
                if name == "text":
                    self.vocab_size = tower["vocab_size"]

    @classmethod
    def shape_of(cls, model: Mapping[str, Any], args: Any) -> dict[str, Any]:
        for name in ("text_tower", "audio_tower"):
            if model.get(name) and not getattr(args, name):
                raise ValueError(f"{args.init_from} has a pretrained tower: give its file, too, by --{name}")
        of_layout: dict[str, Any] = {"layout": "musiclm" if model["model"] == "MusicLMMuLaN" else "tandem"}
        if "layout" in args.explicit and args.layout != of_layout["layout"]:
            return {}  # a model of another class, which is refused by its name
        of_layout |= {"loss": "sigmoid"} if model.get("sigmoid_contrastive_loss") else {}
        of_layout |= {"tokenizer": model["tokenizer"]} if "tokenizer" in model else {}
        of_layout |= {"clip_seconds": model["clip_seconds"]} if "assumed" in model else {}
        # A file of musiclm-pytorch does not say these: then the flags do.
        unsaid = {"sample_rate", "n_fft", "hop_length"} & args.explicit if of_layout["layout"] == "musiclm" else set()
        shape = {**super().shape_of(model, args), **of_layout}
        return {name: value for name, value in shape.items() if name not in unsaid}

    @classmethod
    def settle(cls, args: argparse.Namespace, parser: Any) -> None:
        """Take what the other layout's model has: its windows, unless one is given, and what it always has."""
        if args.layout == "tandem":
            return
        windows = ("n_fft", "win_length", "hop_length")
        if not args.explicit & set(windows):
            for name in windows:
                setattr(args, name, getattr(MusicLMMuLaNConfig, name))
        for name, fixed in _OF_MUSICLM.items():
            if name in args.on_command_line:  # which is refused as without effect
                continue
            if name in args.explicit and getattr(args, name) != fixed:
                parser.error(f"--{name} {getattr(args, name)}: --layout musiclm has {fixed} alone; leave it out")
            setattr(args, name, fixed)

    def check(self) -> None:
        super().check()
        text, audio = self.text_tower, self.audio_tower
        for name, tower in (("text_tower", text), ("audio_tower", audio)):
            if tower is not None and not isinstance(tower, Mapping):
                raise ValueError(f"{name} {str(tower)[:40]!r} is no configuration of a tower")
        if text and self.max_text_tokens > text["max_tokens"]:
            longest = f"the text tower takes up to {text['max_tokens']} tokens"
            raise ValueError(f"max_text_tokens {self.max_text_tokens}: {longest}; lower it")
        if audio and self.sample_rate != audio["sample_rate"]:
            heard = f"the audio tower hears sounds of {audio['sample_rate']} Hz"
            raise ValueError(f"sample_rate {self.sample_rate}: {heard}; use that")


@dataclass
class MusicLMMuLaNConfig(TwoTowersConfig):
    """Of a `MusicLMMuLaN`. With `sigmoid_contrastive_loss` it learns the biases of the sigmoid loss; otherwise they
    stay `init_bias`."""

    n_fft: int = 128
    win_length: int | None = 24
    hop_length: int = 12
    sigmoid_contrastive_loss: bool = False

    @classmethod
    def of(cls, args: Any) -> MusicLMMuLaNConfig:
        return dataclasses.replace(super().of(args), sigmoid_contrastive_loss=args.loss == "sigmoid")
