"""The configuration of a `Decoder`: flags of train_decoder.py, whose Unets are numbered from 1, and fields without a
flag. Imports no PyTorch, so that `--help` is fast."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.config.converters import Names, fraction, non_negative_float, pixels, size, sizes, width
from tandem.config.fields import ModelConfig, Requirement, check_whole, flag, when

from .autoencoders import RecomputingConfig

_SWITCHES = ("sparse_attn", "memory_efficient", "coordinates", "plain_init_conv")
#: Fields of `UnetConfig` for which `DecoderConfig` has a list with a value for each Unet.
PER_UNET = (
    "dim", "dim_mults", "cond_dim", "num_resnet_blocks", "self_attn", "attn_heads", "attn_dim_head",
    "cross_attn_heads", "cross_attn_dim_head", "resnet_groups",
)  # fmt: skip
# Least and largest value of the fields of `UnetConfig` that have a value for each level.
_LEVEL_LIMITS = {"dim_mults": (1, math.inf), "num_resnet_blocks": (0, math.inf), "self_attn": (0, 1)}
_CLIP_KEYS = {"name", "weights", "sha256"}
SCHEDULES = ("cosine", "linear", "sigmoid", "flow")
OBJECTIVES = ("noise", "x_start", "v", "flow")
LOWRES_CONDITIONS = ("noise", "blur", "none")
# Headings in --help.
ONE_EACH = "diffusion (one value for all Unets, or one for each)"
SAME_FOR_ALL = "diffusion (the same for all Unets)"

SEVERAL_UNETS = Requirement("image_sizes", "of several Unets", lambda args: len(args.image_sizes) > 1)
CONDITIONED_ON_IMAGE, CONDITIONED_ON_TEXT = (
    Requirement("condition_on", f"{kind}, or image,text", when("condition_on", kind).is_met)
    for kind in ("image", "text")
)


def per_unet(
    default: Any, help: str, convert: Callable[[str], Any] | None = None, *, first: Any = None, **options: Any
) -> Any:
    """A flag that takes one value for all Unets, or one for each. `expand_per_unet` turns the former into the latter.

    Args:
        first: The value of the first Unet if one value is given for several Unets; None: the same value.
        options: Further arguments of `flag`.
    """
    field = flag(default, help, convert, nargs="+", **options)
    field.metadata = {**field.metadata, "first": first}
    return field


def expand_per_unet(config_class: type, config_or_args: Any) -> None:
    """Give each `per_unet` field of a configuration class a list with a value for each Unet, in place. Raises
    ValueError, in one line, if a field has neither one value nor one for each Unet."""
    count, sizes_text = len(config_or_args.image_sizes), " ".join(map(str, config_or_args.image_sizes))
    expected = f"1 or {count}" if count > 1 else "1"
    for field in dataclasses.fields(config_class):
        values = getattr(config_or_args, field.name) if "first" in field.metadata else None
        if values is not None and len(values) not in (1, count):
            raise ValueError(
                f"--{field.name} has {len(values)} values for {count} Unets (--image_sizes {sizes_text}): "
                f"give {expected}"
            )
        if values is not None and len(values) < count:
            first = field.metadata["first"]
            setattr(config_or_args, field.name, [values[0] if first is None else first, *values * (count - 1)])


@dataclass
class UnetConfig(ModelConfig):
    """Configuration of a `Unet`. In an instance, dim_mults, num_resnet_blocks and self_attn have a value for each
    level.

    Args:
        dim: Channels at full resolution; level n, finest first, has dim x dim_mults[n].
        dim_mults: A number for each level. Each level but the last halves the sides; with memory_efficient, each does.
        cond_dim: Width of the tokens that the blocks attend to; None: dim.
        num_resnet_blocks: Residual blocks of a level after its first one, on the way down and again on the way up: one
            number, or one for each level.
        self_attn: 1 for self-attention at the end of a level, 0 for none: one value, or one for each level. The middle
            always has self-attention.
        sparse_attn: Linear attention at the end of each level without self-attention.
        attn_heads, attn_dim_head: Number and size of the heads of self-attention and of linear attention.
        cross_attn_heads, cross_attn_dim_head: Those of the attention to tokens. DALLE2-pytorch has 8 and 64.
        resnet_groups: Groups of the GroupNorms.
        memory_efficient: Halve the sides before the blocks of a level instead of after them (Saharia et al. 2022,
            "Imagen", Efficient U-Net).
        coordinates: Two more channels of the input hold the position of each pixel, across and down, from -1 to 1 (Liu
            et al. 2018, "CoordConv"). Otherwise only padding shows positions. DALLE2-pytorch has no such channels.
        plain_init_conv: The first convolution has one kernel, of side 7, instead of three of the sides 3, 7 and 15.
        image_embed_dim, text_embed_dim: Widths of the image embedding and of the text encodings on which it is
            conditioned; None: it is not. The two blocks in the middle alone attend to texts.
        max_text_len: Tokens of a text. Learned tokens replace missing ones; further ones are cut off, which a training
            prevents.
        image_embed_scale: Factor of the image embedding; sqrt(image_embed_dim) gives unit vectors entries of about 1.
        lowres_cond: It is conditioned on an image of lower resolution.
        lowres_noise_cond: It is conditioned on the noise level of that image, too.
        learned_variance: The output has twice the channels, the second half for the variance.
        gradient_checkpointing: In training, compute blocks and attention again in the backward pass instead of keeping
            their activations; less memory, the same bits, a third more time.

    Raises:
        ValueError: one line, if a value is out of range or does not fit another one.
    """

    dim: int
    dim_mults: Sequence[int] = (1, 2, 4, 8)
    cond_dim: int = None  # type: ignore[assignment]  # __post_init__ fills it in
    num_resnet_blocks: Sequence[int] = (2,)
    self_attn: Sequence[int] = (0,)
    attn_heads: int = 16
    attn_dim_head: int = 32
    cross_attn_heads: int = 8
    cross_attn_dim_head: int = 64
    resnet_groups: int = 8
    sparse_attn: bool = False
    memory_efficient: bool = False
    coordinates: bool = False
    plain_init_conv: bool = False
    image_embed_dim: int | None = None
    text_embed_dim: int | None = None
    max_text_len: int = 256
    image_embed_scale: float = 1.0
    lowres_cond: bool = False
    lowres_noise_cond: bool = False
    learned_variance: bool = False
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        self.cond_dim = self.cond_dim or self.dim
        for name in ("dim", "cond_dim", "attn_heads", "attn_dim_head", "cross_attn_heads", "cross_attn_dim_head",
                     "resnet_groups", "max_text_len"):  # fmt: skip
            check_whole(name, getattr(self, name))
        if self.dim % 2 or self.dim < 4:
            raise ValueError(f"dim {self.dim}: give an even number of channels of at least 4")
        for name, (minimum, maximum) in _LEVEL_LIMITS.items():
            values = getattr(self, name)
            is_list = isinstance(values, (list, tuple)) and bool(values)
            if not is_list or not all(type(element) is int and minimum <= element <= maximum for element in values):
                limits = f"{minimum} or {maximum}" if maximum == 1 else f"whole numbers of at least {minimum}"
                raise ValueError(f"{name} {values}: give {limits}, for each level, finest first")
            levels = len(self.dim_mults)
            if len(values) not in (1, levels):
                raise ValueError(f"{name} {values} has {len(values)} values, dim_mults {levels}: give 1 or {levels}")
            setattr(self, name, list(values) * (levels if len(values) == 1 else 1))
        for channels in (self.dim, *(self.dim * mult for mult in self.dim_mults)):
            if channels % self.resnet_groups:
                raise ValueError(
                    f"resnet_groups {self.resnet_groups} must divide the {channels} channels of each level; change one"
                )
        if self.lowres_noise_cond and not self.lowres_cond:
            raise ValueError("lowres_noise_cond is the noise level of the low-resolution image: set lowres_cond too")
        if not 0 < self.image_embed_scale < math.inf:
            raise ValueError(f"image_embed_scale {self.image_embed_scale}: give a number greater than 0")


@dataclass
class DecoderConfig(RecomputingConfig):
    """Configuration of a `Decoder`.

    Args:
        image_embed_dim, text_embed_dim: Widths of the conditions of the first Unet; None for those that it lacks.
        clip: {"name", "weights", "sha256"} of the CLIP that computed the conditions in training (`Clip.origin`);
            None if they were stored.
    """

    image_sizes: list[int] = flag(
        [64],
        "side of the pictures of each Unet, ascending; as many Unets as sizes",
        pixels,
        nargs="+",
        title="model (one value for all Unets, or one for each)",
        architecture=True,
        aliases="image_size",
    )
    dim: list[int] = per_unet([128], "channels of the finest level", width, architecture=True)
    dim_mults: list[tuple[int, ...]] = per_unet(
        [(1, 2, 3, 4)],
        "channels of each level, finest first, as multiples of --dim; each further level halves the side",
        sizes,
        architecture=True,
    )
    cond_dim: list[int] | None = per_unet(
        None, "width of the tokens that cross-attention sees (default: --dim)", width, architecture=True
    )
    num_resnet_blocks: list[tuple[int, ...]] = per_unet(
        [(2,)],
        "residual blocks per level after the first one: one number, or one for each level",
        sizes,
        architecture=True,
    )
    self_attn: list[tuple[int, ...]] = per_unet(
        [(0,)], "self-attention at the end of a level: 0 or 1, for all levels or for each", sizes, architecture=True
    )
    attn_heads: list[int] = per_unet([16], "heads of self-attention", size, architecture=True)
    attn_dim_head: list[int] = per_unet([32], "width of a head of self-attention", width, architecture=True)
    cross_attn_heads: list[int] = per_unet([8], "heads of the attention to the condition", size, architecture=True)
    cross_attn_dim_head: list[int] = per_unet([64], "width of a head of that attention", width, architecture=True)
    resnet_groups: list[int] = per_unet([8], "groups of the group normalisations", size, architecture=True)
    switches: list[tuple[str, ...]] = per_unet(
        [()],
        f"variants of the layers: none, or a comma list of {', '.join(_SWITCHES)}",
        Names(*_SWITCHES),
        architecture=True,
    )
    condition_on: tuple[str, ...] = flag(
        ("image",),
        "conditions of the first Unet: none, or a comma list of image, text",
        Names("image", "text"),
        title="conditions",
        architecture=True,
    )
    image_embed_scale: float = flag(
        0.0,
        "factor on image embeddings; 0: the square root of their width, so that the entries of an embedding of "
        "length 1 become about 1",
        non_negative_float,
        architecture=True,
        requires=CONDITIONED_ON_IMAGE,
    )
    max_text_len: int = flag(
        256,
        "text encodings are padded to so many tokens; data with longer ones is refused",
        size,
        metavar="TOKENS",
        architecture=True,
        requires=CONDITIONED_ON_TEXT,
    )
    noise_schedule: list[str] = per_unet(
        ["cosine"],
        "schedule by which the signal-to-noise ratio falls over the noise levels",
        choices=SCHEDULES,
        title=ONE_EACH,
        architecture=True,
        aliases="beta_schedule",
    )
    objective: list[str] = per_unet(["v"], "what a Unet predicts", choices=OBJECTIVES, architecture=True)
    learned_variance: list[int] = per_unet(
        [0],
        "also learn the variance of a step of ddpm (Nichol and Dhariwal 2021)",
        int,
        choices=(0, 1),
        metavar="0|1",
        architecture=True,
    )
    timesteps: int = flag(1000, "number of noise levels", size, title=SAME_FOR_ALL, architecture=True)
    zero_terminal_snr: bool = flag(
        True, "the highest noise level is noise alone (Lin et al. 2023)", fixed_on_resume=True
    )
    lowres_condition: str = flag(
        "blur",
        "degradation of the smaller picture in training, so that an upsampling Unet tolerates errors of the one before",
        choices=LOWRES_CONDITIONS,
        fixed_on_resume=True,
        requires=SEVERAL_UNETS,
    )
    lowres_noise_level: float = flag(
        0.2,
        "noise level of the smaller picture in sampling, from 0 (none) to 1 (the highest of 1000 levels, whatever "
        "--timesteps is)",
        fraction,
        requires=when("lowres_condition", "noise"),
    )
    image_embed_dim: int | None = None
    text_embed_dim: int | None = None
    clip: Any = None

    def __post_init__(self) -> None:
        if not self.image_sizes:
            raise ValueError("image_sizes: a decoder has at least one Unet")
        if self.clip is not None:
            names = self.clip if isinstance(self.clip, dict) else {}
            if names.keys() != _CLIP_KEYS or not all(isinstance(text, str) and text for text in names.values()):
                raise ValueError(f"clip {str(self.clip)[:80]}: it needs {', '.join(sorted(_CLIP_KEYS))} of a CLIP")
        expand_per_unet(type(self), self)
        self.cond_dim = self.cond_dim or list(self.dim)
        for name in ("num_resnet_blocks", "self_attn"):  # "2,2" and "2" of two levels are the same model
            lists = getattr(self, name)
            setattr(self, name, [levels[:1] if len(set(levels)) == 1 < len(levels) else levels for levels in lists])

    @classmethod
    def from_data(cls, args: Any, widths: Mapping[str, Any], clip: Mapping[str, str] | None = None) -> DecoderConfig:
        """The configuration in a run's arguments, for data of these widths.

        Args:
            widths: {"image_embed": d, "text_encodings": (L, d)}; None for unused ones.
            clip: The `Clip.origin` of the CLIP that computes the conditions; None if they are stored.

        Raises:
            ValueError: one line, if texts have more tokens than --max_text_len.
        """
        config = DecoderConfig.from_args(args)
        config.clip = dict(clip) if clip and args.condition_on else None
        if "image" in args.condition_on:
            config.image_embed_dim = widths["image_embed"]
        if "text" in args.condition_on:
            tokens, config.text_embed_dim = widths["text_encodings"]
            if tokens > args.max_text_len:
                limit = f"--max_text_len {args.max_text_len}"
                raise ValueError(f"texts of {tokens} tokens are longer than {limit}: raise it")
        return config

    @classmethod
    def validate(cls, args: argparse.Namespace, parser: Any) -> None:
        try:
            expand_per_unet(cls, args)
            DecoderConfig.derive_missing(args)
        except ValueError as error:
            parser.error(str(error))
        if any(larger <= side for side, larger in itertools.pairwise(args.image_sizes)):
            sizes_text = " ".join(map(str, args.image_sizes))
            parser.error(f"--image_sizes {sizes_text}: give them ascending, the smallest first")

    @classmethod
    def architecture_of(cls, model: Mapping[str, Any], args: Any) -> dict[str, Any]:
        sizes = model["image_sizes"]
        # With another number of Unets, the lists of all other flags differ in length, too.
        if "image_sizes" in args.explicit and len(args.image_sizes) != len(sizes):
            hint = f"they need --image_sizes {' '.join(map(str, sizes))}"
            raise ValueError(f"the weights in {args.init_from} are of another model; {hint}")
        # No architecture, but weights are sampled from with the noise level that they were trained for.
        return {**super().architecture_of(model, args), "lowres_noise_level": model["lowres_noise_level"]}

    def unets(self) -> list[UnetConfig]:
        """The configuration of each Unet, the smallest first; only that one has the conditions."""
        scale = self.image_embed_scale or math.sqrt(self.image_embed_dim or 1)
        first: dict[str, Any] = {"image_embed_dim": self.image_embed_dim, "text_embed_dim": self.text_embed_dim}
        others: dict[str, Any] = {"lowres_cond": True, "lowres_noise_cond": self.lowres_condition == "noise"}
        return [
            UnetConfig(
                **{name: getattr(self, name)[index] for name in PER_UNET},
                **{name: name in switches for name in _SWITCHES},  # type: ignore[arg-type]
                **(others if index else first), max_text_len=self.max_text_len, image_embed_scale=scale,
                learned_variance=bool(learns_variance), gradient_checkpointing=self.gradient_checkpointing,
            )
            for index, (switches, learns_variance) in enumerate(zip(self.switches, self.learned_variance, strict=True))
        ]  # fmt: skip


#: Requirements of the flags of guidance.
CONDITIONAL = Requirement("condition_on", "image or text", lambda args: bool(getattr(args, "condition_on", True)))
GUIDED = Requirement("cond_scale", "other than 1, such as 3", lambda args: any(scale != 1 for scale in args.cond_scale))


@dataclass
class Sampling(ModelConfig):
    """Options of `diffusion.sampling`; `cond_scale` and `sample_timesteps` have one value, or one for each Unet."""

    sampler: str = flag(
        "dpmpp_2m", "algorithm that turns noise into a picture", choices=("dpmpp_2m", "ddim", "ddpm"), title="sampling"
    )
    sample_timesteps: list[int] = per_unet([20], "steps of the sampler, one number or one for each Unet", size)
    cond_scale: list[float] = per_unet(
        [1.0],
        "guidance: 1 follows the condition, above 1 exaggerates it; one number or one for each Unet",
        non_negative_float,
        requires=CONDITIONAL,
    )
    guidance_interval: list[float] | None = flag(
        None,
        "guide only where the noise is between these multiples of the signal (Kynkaanniemi et al. 2024)",
        non_negative_float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        requires=(CONDITIONAL, GUIDED),
    )
    ddim_eta: float = flag(
        0.0,
        "fresh noise in each step of ddim: 0 none, 1 as much as ddpm",
        non_negative_float,
        aliases="ddim_sampling_eta",
        requires=when("sampler", "ddim"),
    )
    dynamic_thresholding: float = flag(
        0.0,
        "in each step, scale the predicted picture so that this quantile of its absolute values, such as 0.95, is in "
        "range; 0: clip to the range",
        fraction,
        aliases="dynamic_thres_percentile",
    )

    @classmethod
    def validate(cls, args: argparse.Namespace, parser: Any) -> None:
        if args.guidance_interval and args.guidance_interval[0] >= args.guidance_interval[1]:
            parser.error("--guidance_interval: the first number has to be the smaller one")
