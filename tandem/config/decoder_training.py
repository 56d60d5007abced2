"""Flags of the cascaded diffusion decoder, whose Unets are numbered from 1. Imports the standard library only, so that
`--help` is fast."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from .converters import (
    FILE,
    any_float,
    fraction,
    non_negative_float,
    pixels_or_0,
    positive_float,
    positive_int,
    size_or_0,
    step_count_or_0,
)
from .fields import above_0, flag, when
from .models.decoder import CONDITIONED_ON_IMAGE, CONDITIONED_ON_TEXT, ONE_EACH, SAME_FOR_ALL, SEVERAL_UNETS, per_unet
from .shared import VALIDATION, start_flag, validation_for

_EVALUATED = (above_0("n_evaluation_samples"), VALIDATION)
_BLURRED_CONDITION = (when("lowres_condition", "blur"), SEVERAL_UNETS)


@dataclass
class DecoderFlags:
    """Flags of the training and the evaluation of a cascade of Unets, used together with `DecoderConfig`."""

    image_cond_drop_prob: float = flag(
        0.1,
        "share of samples trained without image embedding, for guidance",
        fraction,
        requires=CONDITIONED_ON_IMAGE,
        title="conditions",
    )
    text_cond_drop_prob: float = flag(
        0.5, "share of samples trained without text, for guidance", fraction, requires=CONDITIONED_ON_TEXT
    )
    train_unets: list[int] | None = flag(
        None,
        "numbers of the Unets to train, from 1; the others stay as --init_from has them (default: all)",
        positive_int,
        nargs="+",
        fixed_on_resume=lambda numbers: sorted(numbers or []),
        title="training (rate, warm-up and decay: one value, or one for each Unet)",
    )
    init_from: str | None = start_flag(
        "start from a run, a checkpoint, model/ folder, DALLE2-pytorch file or USER/NAME of the Hugging Face Hub"
    )
    learning_rate: list[float] = per_unet([0.0001], "highest learning rate", positive_float, aliases="lr")
    lr_warmup_steps: list[int] = per_unet(
        [0], "updates of linear warm-up from 0, at most half of the run", step_count_or_0, aliases="warmup_steps"
    )
    weight_decay: list[float] = per_unet(
        [0.01], "weight decay of matrices; biases and scales do not decay", non_negative_float, aliases="wd"
    )
    n_evaluation_samples: int = flag(
        0,
        "number of validation samples for which pictures are drawn and evaluated (--fid_weights, --lpips_weights)",
        size_or_0,
        title="evaluation",
        requires=validation_for("n_evaluation_samples"),
    )
    evaluate_every_n_steps: int = flag(
        0,
        "updates between two evaluations of drawn pictures; 0: only at the end",
        step_count_or_0,
        requires=_EVALUATED,
    )
    fid_weights: str | None = flag(
        None,
        "report FID, KID and inception score by these weights: a file, or the word published, which downloads them",
        FILE,
        requires=_EVALUATED,
    )
    lpips_weights: str | None = flag(
        None,
        "report LPIPS by these weights: a file, a folder, or the word published, which downloads them",
        FILE,
        requires=_EVALUATED,
    )
    loss_weight: list[str] = per_unet(
        ["none"], "loss weight by noise level", choices=("none", "min_snr", "p2"), title=ONE_EACH
    )
    random_crop_sizes: list[int] = per_unet(
        [0],
        "train the upsampling Unets on random crops of this side; 0: on whole pictures; a list with a value for each "
        "Unet begins with 0",
        pixels_or_0,
        first=0,
    )
    min_snr_gamma: float = flag(
        5.0,
        "gamma of min_snr (Hang et al. 2023)",
        positive_float,
        title=SAME_FOR_ALL,
        requires=when("loss_weight", "min_snr"),
    )
    p2_loss_weight_gamma: float = flag(
        1.0, "gamma of p2 (Choi et al. 2022)", non_negative_float, requires=when("loss_weight", "p2")
    )
    p2_loss_weight_k: float = flag(1.0, "k of p2", positive_float, requires=when("loss_weight", "p2"))
    vb_loss_weight: float = flag(
        0.001,
        "weight of the loss that trains a learned variance: the variational bound, summed over the noise levels",
        non_negative_float,
        requires=when("learned_variance", 1),
    )
    time_sampling: str = flag("uniform", "distribution of noise levels", choices=("uniform", "logit_normal"))
    logit_normal: list[float] = flag(
        [0.0, 1.0],
        "mean and standard deviation of the logit of the noise level with --time_sampling logit_normal; a mean above 0 "
        "gives more noise",
        any_float,
        nargs=2,
        metavar=("MEAN", "STD"),
        requires=when("time_sampling", "logit_normal"),
    )
    stratified_times: bool = flag(
        True, "spread the noise levels of a batch evenly: less variance, the same expectation"
    )
    blur_prob: float = flag(
        0.5,
        "share of the training samples of an upsampling Unet whose smaller picture, its input, is blurred",
        fraction,
        requires=_BLURRED_CONDITION,
    )
    blur_sigma: list[float] = flag(
        [0.6],
        "standard deviation of the blur of a smaller picture, by a kernel of 3 x 3 of its pixels: one number, "
        "or the least and the greatest, between which it is drawn for each sample",
        positive_float,
        nargs="+",
        metavar="PIXELS",
        requires=_BLURRED_CONDITION,
    )

    @classmethod
    def validate(cls, args: argparse.Namespace, parser: Any) -> None:
        count, sizes_text = len(args.image_sizes), " ".join(map(str, args.image_sizes))
        if args.random_crop_sizes[0]:
            crops = " ".join(map(str, args.random_crop_sizes))
            parser.error(f"--random_crop_sizes {crops}: Unet 1 is trained on whole pictures; give 0 for it")
        for number in args.train_unets or []:
            if number > count:
                parser.error(f"--train_unets {number}: there are {count} Unets (--image_sizes {sizes_text})")
        if args.logit_normal[1] <= 0:
            parser.error("--logit_normal: the standard deviation has to be above 0")
        if len(args.blur_sigma) > 2 or args.blur_sigma[0] > args.blur_sigma[-1]:
            parser.error("--blur_sigma: give one width, or the least and the greatest")
        # The first Unet alone has the conditions.
        kinds = [kind for kind in args.condition_on if not getattr(args, f"{kind}_cond_drop_prob")]
        if args.cond_scale[0] != 1 and kinds:
            parser.error(
                f"--cond_scale {args.cond_scale[0]:g} guides away from what the model draws without a condition, which "
                f"it never learns with --{kinds[0]}_cond_drop_prob 0: give 0.1, for example"
            )
