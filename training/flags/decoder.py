"""Flags of the cascaded diffusion decoder, whose Unets are numbered from 1. Imports the standard library only, so that
`--help` is fast."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tandem.converters import (
    FILE,
    FOLDER,
    Names,
    any_float,
    fraction,
    non_negative_float,
    pixels,
    pixels_or_0,
    positive_float,
    positive_int,
    size,
    size_or_0,
    sizes,
    updates_or_0,
    width,
)
from tandem.fields import Needs, above_0, flag, when

UNET_SWITCHES = (
    "self_attn", "sparse_attn", "memory_efficient", "self_cond", "coordinates", "cosine_sim_self_attn",
    "cosine_sim_cross_attn", "cross_embed_downsample", "scale_skip_connection", "combine_upsample_fmaps",
)  # fmt: skip
SWITCHES = (
    *UNET_SWITCHES, "nearest_upsampling", "plain_init_conv", "weight_standardization", "no_embeds_in_time",
)  # fmt: skip
SCHEDULES = ("cosine", "linear", "quadratic", "sigmoid", "jsd", "flow")

#: Of flags that only guidance needs.
GUIDED = Needs("cond_scale", "other than 1, such as 3", lambda args: any(scale != 1 for scale in args.cond_scale))
_SEVERAL = Needs("image_sizes", "of several Unets", lambda args: len(args.image_sizes) > 1)
_BLURRED = (when("lowres_condition", "blur"), _SEVERAL)
_BY_IMAGE, _BY_TEXT = (
    Needs("condition_on", f"{kind}, or image,text", when("condition_on", kind).is_met) for kind in ("image", "text")
)


def per_unet(
    default: Any, help: str, convert: Callable[[str], Any] | None = None, *, first: Any = None, **options: Any
) -> Any:
    """A flag of one value for all Unets, or of one for each; in a run it has one for each, or is None.

    Args:
        first: What the first of several Unets has if one value is given; None: that one, too.
        options: Others of `flag`.
    """
    field = flag(default, help, convert, nargs="+", **options)
    field.metadata = {**field.metadata, "first": first}
    return field


@dataclass
class SamplingFlags:
    """Of drawing pictures from noise."""

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
    )
    guidance_interval: list[float] | None = flag(
        None,
        "guide only where the noise is between these multiples of the signal (Kynkaanniemi et al. 2024)",
        non_negative_float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        needs=GUIDED,
    )
    cfg_rescale: float = flag(
        0.0, "how much of the contrast that guidance adds is taken back (Lin et al. 2023)", fraction, needs=GUIDED
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


@dataclass
class DecoderFlags(SamplingFlags):
    """Of a cascade: its Unets, how they are trained and judged, noise, and sampling."""

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
        [()], f"none, or a comma list of {', '.join(SWITCHES)}", Names(*SWITCHES), in_weights=True
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
        lasting=True,
        needs=_BY_IMAGE,
    )
    max_text_len: int = flag(
        256,
        "text encodings are padded to so many tokens; longer ones are refused",
        size,
        metavar="TOKENS",
        in_weights=True,
        needs=_BY_TEXT,
    )
    image_cond_drop_prob: float = flag(
        0.1, "share of samples that train without their image embedding, for guidance", fraction, needs=_BY_IMAGE
    )
    text_cond_drop_prob: float = flag(
        0.5, "share of samples that train without their text, for guidance", fraction, needs=_BY_TEXT
    )
    train_unets: list[int] | None = flag(
        None,
        "numbers of the Unets to train, from 1; the others stay as --init_from has them (default: all)",
        positive_int,
        nargs="+",
        title="training (rate, warm-up and decay: one value, or one for each Unet)",
    )
    init_from: str | None = flag(
        None,
        "start from a run, a checkpoint, model/ folder, DALLE2-pytorch file or USER/NAME of the Hugging Face Hub, "
        "whose shape the flags that are not given take over",
        FOLDER,
    )
    learning_rate: list[float] = per_unet([0.0001], "highest learning rate", positive_float, also="lr")
    lr_warmup_steps: list[int] = per_unet(
        [0], "updates of linear warm-up from 0, at most half of the run", updates_or_0, also="warmup_steps"
    )
    weight_decay: list[float] = per_unet(
        [0.01], "weight decay of matrices; biases and scales do not decay", non_negative_float, also="wd"
    )
    lr_cosine: bool = flag(False, "let the learning rate fall to 0 along a cosine; constant otherwise")
    n_evaluation_samples: int = flag(
        0,
        "pictures to draw for conditions of the validation split and to judge by the measures below",
        size_or_0,
        title="evaluation",
    )
    evaluate_every_n_steps: int = flag(
        0,
        "updates between two such evaluations; 0: only at the end",
        updates_or_0,
        needs=above_0("n_evaluation_samples"),
    )
    fid_weights: str | None = flag(
        None,
        "report FID, KID and inception score with these weights of Inception",
        FILE,
        needs=above_0("n_evaluation_samples"),
    )
    lpips_weights: str | None = flag(
        None, "report LPIPS with these weights", FILE, needs=above_0("n_evaluation_samples")
    )
    noise_schedule: list[str] = per_unet(
        ["cosine"],
        "how the signal-to-noise ratio falls over the noise levels",
        choices=SCHEDULES,
        title="diffusion (one value for all Unets, or one for each)",
        in_weights=True,
        also="beta_schedule",
    )
    objective: list[str] = per_unet(
        ["v"], "what a Unet predicts", choices=("noise", "x_start", "v", "flow"), in_weights=True
    )
    loss_weight: list[str] = per_unet(
        ["none"], "weight of the loss by noise level", choices=("none", "min_snr", "p2", "sigmoid", "learned")
    )
    learned_variance: list[int] = per_unet(
        [0],
        "also learn the variance of a step of ddpm (Nichol and Dhariwal 2021)",
        int,
        choices=(0, 1),
        metavar="0|1",
        in_weights=True,
    )
    random_crop_sizes: list[int] = per_unet(
        [0],
        "train an upsampling Unet on random crops of this side; 0: on whole pictures; one size is that of "
        "all upsampling Unets, in a list the first is 0",
        pixels_or_0,
        first=0,
    )
    timesteps: int = flag(1000, "noise levels", size, title="diffusion (the same for all Unets)", in_weights=True)
    zero_terminal_snr: bool = flag(True, "the highest noise level is noise alone (Lin et al. 2023)", lasting=True)
    noise_shift: int | None = flag(
        None,
        "more noise for larger pictures: shift the log SNR by 2 log(PIXELS / side) (Hoogeboom et al. 2023)",
        size,
        metavar="PIXELS",
        lasting=True,
    )
    loss_type: str = flag("l2", "distance of prediction and target", choices=("l2", "l1", "huber"))
    min_snr_gamma: float = flag(
        5.0, "of min_snr (Hang et al. 2023)", positive_float, needs=when("loss_weight", "min_snr")
    )
    p2_loss_weight_gamma: float = flag(
        1.0, "gamma of p2 (Choi et al. 2022)", non_negative_float, needs=when("loss_weight", "p2")
    )
    p2_loss_weight_k: float = flag(1.0, "k of p2", positive_float, needs=when("loss_weight", "p2"))
    sigmoid_bias: float = flag(
        -1.0, "bias of sigmoid (Hoogeboom et al. 2024)", any_float, needs=when("loss_weight", "sigmoid")
    )
    vb_loss_weight: float = flag(
        0.001,
        "weight of the variational bound that trains a learned variance, as a sum over all levels",
        non_negative_float,
        needs=when("learned_variance", 1),
    )
    time_sampling: str = flag(
        "uniform", "distribution of noise levels in training", choices=("uniform", "logit_normal")
    )
    logit_normal: list[float] = flag(
        [0.0, 1.0],
        "of the logit of the noise level with --time_sampling logit_normal; a mean above 0: more noise",
        any_float,
        nargs=2,
        metavar=("MEAN", "STD"),
        needs=when("time_sampling", "logit_normal"),
    )
    stratified_times: bool = flag(
        True, "spread the noise levels of a batch evenly: less variance, the same expectation"
    )
    lowres_condition: str = flag(
        "blur",
        "what is done to an upsampling Unet's condition in training, so that it bears mistakes of the Unet before",
        choices=("noise", "blur", "none"),
        lasting=True,
        needs=_SEVERAL,
    )
    blur_prob: float = flag(0.5, "share of conditions that are blurred", fraction, needs=_BLURRED)
    blur_sigma: list[float] = flag(
        [0.6],
        "width of the blur, by a kernel of 3 x 3 pixels of the smaller picture: one number, or the least "
        "and the greatest, between which it is drawn for each sample",
        positive_float,
        nargs="+",
        metavar="PIXELS",
        needs=_BLURRED,
    )
    lowres_noise_level: float = flag(
        0.2,
        "noise level of the condition when sampling, as a share of --timesteps",
        fraction,
        needs=when("lowres_condition", "noise"),
    )
    gradient_checkpointing: bool = flag(
        False,
        "compute the layers' activations again in the backward pass: slower, and far less memory",
        title="precision",
    )

    @classmethod
    def settle(cls, args: argparse.Namespace, parser: Any) -> None:
        count, sides = len(args.image_sizes), " ".join(map(str, args.image_sizes))
        _spread(cls, args, parser)
        args.cond_dim = args.cond_dim or list(args.dim)
        args.num_resnet_blocks = [  # "2,2" of two levels is "2"
            blocks[:1] if blocks == blocks[:1] * len(mults) else blocks
            for blocks, mults in zip(args.num_resnet_blocks, args.dim_mults, strict=True)
        ]
        if args.random_crop_sizes[0]:
            crops = " ".join(map(str, args.random_crop_sizes))
            parser.error(f"--random_crop_sizes {crops}: Unet 1 is trained on whole pictures; give 0 for it")
        for number in args.train_unets or []:
            if number > count:
                parser.error(f"--train_unets {number}: there are {count} Unets (--image_sizes {sides})")
        if any(larger <= side for side, larger in itertools.pairwise(args.image_sizes)):
            parser.error(f"--image_sizes {sides}: give them ascending, the smallest first")
        if args.logit_normal[1] <= 0:
            parser.error("--logit_normal: the standard deviation has to be above 0")
        if len(args.blur_sigma) > 2 or args.blur_sigma[0] > args.blur_sigma[-1]:
            parser.error("--blur_sigma: give one width, or the least and the greatest")
        is_conditional = bool(args.condition_on)
        of_guidance = ["cond_scale", "guidance_interval", "cfg_rescale"]
        parser.refuse_idle(args, of_guidance, "condition_on", "image or text", is_conditional)
        is_clip_used = is_conditional or args.n_evaluation_samples > 0
        parser.refuse_idle(
            args, ["clip"], "condition_on", "image or text, or give --n_evaluation_samples", is_clip_used
        )
        never = [kind for kind in args.condition_on if not getattr(args, f"{kind}_cond_drop_prob")]
        if args.cond_scale[0] != 1 and never:
            parser.error(
                f"--cond_scale {args.cond_scale[0]:g} guides away from what the model draws without a condition, which "
                f"it never learns with --{never[0]}_cond_drop_prob 0: give 0.1, for example"
            )


def _spread(config: type, args: argparse.Namespace, parser: Any) -> None:
    """Give each flag that is `per_unet` a value for each Unet."""
    count, sides = len(args.image_sizes), " ".join(map(str, args.image_sizes))
    needed = f"1 or {count}" if count > 1 else "1"
    for field in dataclasses.fields(config):
        values = getattr(args, field.name) if "first" in field.metadata else None
        if values is not None and len(values) not in (1, count):
            parser.error(
                f"--{field.name} has {len(values)} values for {count} Unets (--image_sizes {sides}): give {needed}"
            )
        if values is not None and len(values) < count:
            first = field.metadata["first"]
            setattr(args, field.name, [values[0] if first is None else first, *values * (count - 1)])
