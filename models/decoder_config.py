"""What a `Decoder` is built from: flags of train_decoder.py, whose Unets are numbered from 1, and what no flag says.
Imports no PyTorch, so that `--help` is fast."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tandem.cascades import BY_IMAGE, BY_TEXT, ONE_EACH, SAME_FOR_ALL, SEVERAL, per_unet, spread
from tandem.converters import Names, fraction, non_negative_float, pixels, size, sizes, width
from tandem.fields import ModelConfig, Needs, flag, when

from .configs import RecomputingConfig

if TYPE_CHECKING:
    from .unets.config import UnetConfig

_UNET_SWITCHES = (
    "self_attn", "sparse_attn", "memory_efficient", "self_cond", "coordinates", "cosine_sim_self_attn",
    "cosine_sim_cross_attn", "cross_embed_downsample", "scale_skip_connection", "combine_upsample_fmaps",
)  # fmt: skip
# Switch -> (argument of the Unet, its value where the switch is on).
_SWITCHES = {
    **{name: (name, True) for name in _UNET_SWITCHES},
    "nearest_upsampling": ("pixel_shuffle_upsample", False), "plain_init_conv": ("init_cross_embed", False),
    "weight_standardization": ("resnet_weight_standardization", True),
    "no_embeds_in_time": ("add_image_embeds_to_time", False),
}  # fmt: skip
_OF_UNET = (
    "dim", "dim_mults", "cond_dim", "num_resnet_blocks", "attn_heads", "attn_dim_head", "cross_attn_heads",
    "cross_attn_dim_head", "resnet_groups",
)  # fmt: skip
_SCHEDULES = ("cosine", "linear", "quadratic", "sigmoid", "jsd", "flow")


@dataclass
class DecoderConfig(RecomputingConfig):
    """Of a `Decoder`.

    Args:
        image_embed_dim, text_embed_dim: Widths of what the first Unet is conditioned on; None for what it is not.
        beyond_flags: For each Unet the arguments of `UnetConfig` that differ from those that the flags give.
    """

    image_sizes: list[int] = flag(
        [64],
        "side of the pictures of each Unet, ascending; as many Unets as sizes",
        pixels,
        nargs="+",
        title="model (one value for all Unets, or one for each)",
        in_weights=True,
        also="image_size",
    )
    dim: list[int] = per_unet([128], "channels of the finest level", width, in_weights=True)
    dim_mults: list[tuple[int, ...]] = per_unet(
        [(1, 2, 3, 4)],
        "channels of each level, finest first, as multiples of --dim; each further level halves the side",
        sizes,
        in_weights=True,
    )
    cond_dim: list[int] | None = per_unet(
        None, "width of the tokens that cross-attention sees (default: --dim)", width, in_weights=True
    )
    num_resnet_blocks: list[tuple[int, ...]] = per_unet(
        [(2,)], "residual blocks per level: one number, or one for each level", sizes, in_weights=True
    )
    attn_heads: list[int] = per_unet([16], "heads of self-attention", size, in_weights=True)
    attn_dim_head: list[int] = per_unet([32], "width of such a head", width, in_weights=True)
    cross_attn_heads: list[int] = per_unet([8], "heads of the attention to the condition", size, in_weights=True)
    cross_attn_dim_head: list[int] = per_unet([64], "width of such a head", width, in_weights=True)
    resnet_groups: list[int] = per_unet([8], "groups of the group normalisations", size, in_weights=True)
    switches: list[tuple[str, ...]] = per_unet(
        [()], f"none, or a comma list of {', '.join(_SWITCHES)}", Names(*_SWITCHES), in_weights=True
    )
    condition_on: tuple[str, ...] = flag(
        ("image",),
        "what the first Unet is given: none, or a comma list of image, text",
        Names("image", "text"),
        title="conditions",
        in_weights=True,
    )
    image_embed_scale: float = flag(
        0.0,
        "factor on image embeddings; 0: the square root of their width, which gives unit-length ones "
        "entries of about 1",
        non_negative_float,
        in_weights=True,
        needs=BY_IMAGE,
    )
    max_text_len: int = flag(
        256,
        "text encodings are padded to so many tokens; longer ones are refused",
        size,
        metavar="TOKENS",
        in_weights=True,
        needs=BY_TEXT,
    )
    noise_schedule: list[str] = per_unet(
        ["cosine"],
        "how the signal-to-noise ratio falls over the noise levels",
        choices=_SCHEDULES,
        title=ONE_EACH,
        in_weights=True,
        also="beta_schedule",
    )
    objective: list[str] = per_unet(
        ["v"], "what a Unet predicts", choices=("noise", "x_start", "v", "flow"), in_weights=True
    )
    learned_variance: list[int] = per_unet(
        [0],
        "also learn the variance of a step of ddpm (Nichol and Dhariwal 2021)",
        int,
        choices=(0, 1),
        metavar="0|1",
        in_weights=True,
    )
    timesteps: int = flag(1000, "noise levels", size, title=SAME_FOR_ALL, in_weights=True)
    zero_terminal_snr: bool = flag(True, "the highest noise level is noise alone (Lin et al. 2023)", lasting=True)
    noise_shift: int | None = flag(
        None,
        "more noise for larger pictures: shift the log SNR by 2 log(PIXELS / side) (Hoogeboom et al. 2023)",
        size,
        metavar="PIXELS",
        lasting=True,
    )
    lowres_condition: str = flag(
        "blur",
        "what is done to an upsampling Unet's condition in training, so that it bears mistakes of the Unet before",
        choices=("noise", "blur", "none"),
        lasting=True,
        needs=SEVERAL,
    )
    lowres_noise_level: float = flag(
        0.2,
        "noise of the condition when sampling, a share of --timesteps",
        fraction,
        needs=when("lowres_condition", "noise"),
    )
    image_embed_dim: int | None = None
    text_embed_dim: int | None = None
    beyond_flags: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.image_sizes:
            raise ValueError("image_sizes: a decoder has at least one Unet")
        spread(type(self), self)
        self.cond_dim = self.cond_dim or list(self.dim)
        self.num_resnet_blocks = [  # "2,2" of two levels is "2"
            blocks[:1] if len(blocks) == len(mults) and len(set(blocks)) == 1 else blocks
            for blocks, mults in zip(self.num_resnet_blocks, self.dim_mults, strict=True)
        ]
        self.beyond_flags = self.beyond_flags or [{} for _ in self.image_sizes]
        if len(self.beyond_flags) != len(self.image_sizes):
            raise ValueError(
                f"beyond_flags is for {len(self.beyond_flags)} Unets, and there are {len(self.image_sizes)}"
            )

    @classmethod
    def of_data(cls, args: argparse.Namespace, widths: Mapping[str, Any]) -> DecoderConfig:
        """What a run's arguments say, for data of these widths.

        Args:
            widths: {"image_embed": d, "text_encodings": (L, d)}; None for what is not used.

        Raises:
            ValueError: one line, if texts have more tokens than --max_text_len.
        """
        config = DecoderConfig.of(args)
        if "image" in args.condition_on:
            config.image_embed_dim = widths["image_embed"]
        if "text" in args.condition_on:
            tokens, config.text_embed_dim = widths["text_encodings"]
            if tokens > args.max_text_len:
                limit = f"--max_text_len {args.max_text_len}"
                raise ValueError(f"texts of {tokens} tokens are longer than {limit}: raise it")
        return config

    @classmethod
    def settle(cls, args: argparse.Namespace, parser: Any) -> None:
        try:
            spread(cls, args)
            for name, value in vars(DecoderConfig.of(args)).items():
                if name in args:
                    setattr(args, name, value)
        except ValueError as error:
            parser.error(str(error))
        if any(larger <= side for side, larger in itertools.pairwise(args.image_sizes)):
            sides = " ".join(map(str, args.image_sizes))
            parser.error(f"--image_sizes {sides}: give them ascending, the smallest first")

    @classmethod
    def shape_of(cls, model: Mapping[str, Any], args: Any) -> dict[str, Any]:
        sizes = model["image_sizes"]
        if "image_sizes" in args.explicit and len(args.image_sizes) != len(sizes):  # no other flag can be compared
            needed = f"they need --image_sizes {' '.join(map(str, sizes))}"
            raise ValueError(f"the weights in {args.init_from} are of another model; {needed}")
        return {**super().shape_of(model, args), "lowres_noise_level": model["lowres_noise_level"]}

    @classmethod
    def around(cls, unets: Sequence[UnetConfig], **said: Any) -> DecoderConfig:
        """That of a decoder of these Unets; ``said``: image_sizes, and other fields that are not of the Unets alone."""
        first = unets[0]
        conditions = {"image": first.cond_on_image_embeds, "text": first.cond_on_text_encodings}
        flags: dict[str, Any] = {name: [getattr(unet, name) for unet in unets] for name in _OF_UNET}
        flags |= {
            "resnet_groups": [unet.resnet_groups[0] for unet in unets],
            "switches": [_switches_of(unet) for unet in unets],
            "condition_on": tuple(name for name, is_taken in conditions.items() if is_taken),
        }
        for name in (
            "image_embed_scale", "max_text_len", "image_embed_dim", "text_embed_dim", "gradient_checkpointing",
        ):  # fmt: skip
            flags[name] = getattr(first, name)
        config = cls(**flags, **said)
        config.beyond_flags = [_beyond(config.of_flags(index), unet) for index, unet in enumerate(unets)]
        return config

    def unets(self) -> list[UnetConfig]:
        """Of each Unet, the smallest first."""
        from .unets.config import UnetConfig

        beyond = enumerate(self.beyond_flags)
        return [UnetConfig(**{**self.of_flags(index), **others}) for index, others in beyond]

    def of_flags(self, index: int) -> dict[str, Any]:
        """The arguments of the `UnetConfig` of a Unet, from 0, that flags give; the first one has the conditions."""
        switches, is_first, learned = self.switches[index], index == 0, self.learned_variance[index]
        has_image, has_text = (is_first and kind in self.condition_on for kind in ("image", "text"))
        blocks, levels = self.num_resnet_blocks[index], len(self.dim_mults[index])
        return {
            **{name: getattr(self, name)[index] for name in _OF_UNET},
            **{name: on == (switch in switches) for switch, (name, on) in _SWITCHES.items()},
            "num_resnet_blocks": list(blocks) * (levels if len(blocks) == 1 else 1),
            "dim_mults": list(self.dim_mults[index]),
            "lowres_cond": not is_first, "lowres_noise_cond": not is_first and self.lowres_condition == "noise",
            "cond_on_image_embeds": has_image, "cond_on_text_encodings": has_text,
            "image_embed_dim": self.image_embed_dim if has_image else None,
            "text_embed_dim": self.text_embed_dim if has_text else None,
            "image_embed_scale": self.image_embed_scale or math.sqrt(self.image_embed_dim or 1),
            "max_text_len": self.max_text_len, "channels_out": 6 if learned else 3,
            "gradient_checkpointing": self.gradient_checkpointing,
        }  # fmt: skip


#: Of flags that only guidance needs.
CONDITIONAL = Needs("condition_on", "image or text", lambda args: bool(getattr(args, "condition_on", True)))
GUIDED = Needs("cond_scale", "other than 1, such as 3", lambda args: any(scale != 1 for scale in args.cond_scale))


@dataclass
class Sampling(ModelConfig):
    """How noise becomes pictures: by `diffusion.sampling.sample`, and `diffusion.guidance.guided` where it is guided.
    `cond_scale` and `sample_timesteps` have a value for all Unets, or one for each."""

    sampler: str = flag(
        "dpmpp_2m", "how noise becomes a picture", choices=("dpmpp_2m", "ddim", "ddpm", "heun"), title="sampling"
    )
    sample_timesteps: list[int] = per_unet([20], "steps of the sampler, one number or one for each Unet", size)
    spacing: str = flag(
        "auto",
        "noise levels that the steps visit: uniform: evenly by number; karras: more of them near pure noise "
        "and near the clean picture (Karras et al. 2022); auto: karras for dpmpp_2m on linear and jsd, and "
        "but for ddpm after a large --noise_shift; uniform otherwise",
        choices=("auto", "uniform", "karras"),
    )
    cond_scale: list[float] = per_unet(
        [1.0],
        "guidance: 1 follows the condition, above 1 exaggerates it; one number or one for each Unet",
        non_negative_float,
        needs=CONDITIONAL,
    )
    guidance_interval: list[float] | None = flag(
        None,
        "guide only where the noise is between these multiples of the signal (Kynkaanniemi et al. 2024)",
        non_negative_float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        needs=(CONDITIONAL, GUIDED),
    )
    cfg_rescale: float = flag(
        0.0,
        "part of the contrast by guidance that is taken back (Lin et al. 2023)",
        fraction,
        needs=(CONDITIONAL, GUIDED),
    )
    ddim_eta: float = flag(
        0.0,
        "fresh noise in each step of ddim: 0 none, 1 as much as ddpm",
        non_negative_float,
        also="ddim_sampling_eta",
        needs=when("sampler", "ddim"),
    )
    dynamic_thresholding: float = flag(
        0.0,
        "scale each picture so that this quantile of its values fits, 0.95 for example; 0: clip to the range",
        fraction,
        also="dynamic_thres_percentile",
    )

    @classmethod
    def settle(cls, args: argparse.Namespace, parser: Any) -> None:
        if args.guidance_interval and args.guidance_interval[0] >= args.guidance_interval[1]:
            parser.error("--guidance_interval: the first number has to be the smaller one")


def _switches_of(unet: UnetConfig) -> tuple[str, ...]:
    """The value of --switches for a Unet; self_attn is for all levels."""
    values = {**vars(unet), "self_attn": all(unet.self_attn)}
    return tuple(sorted(switch for switch, (name, on) in _SWITCHES.items() if values[name] == on))


def _beyond(of_flags: dict[str, Any], unet: UnetConfig) -> dict[str, Any]:
    try:
        made = type(unet)(**of_flags).plain()
    except ValueError:  # the flags alone make no Unet
        made = {}
    return {name: value for name, value in unet.plain().items() if name not in made or made[name] != value}
