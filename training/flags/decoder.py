"""Flags of the cascaded diffusion decoder. Standard library only, so that `--help` answers at once.

Where a flag takes one value per Unet, one value alone is that of all Unets. Unets are numbered from 1.
"""

from __future__ import annotations

import argparse

from .converters import (
    Names,
    fraction,
    non_negative_float,
    non_negative_int,
    pixels,
    pixels_or_0,
    positive_float,
    positive_int,
    size,
    size_or_0,
    sizes,
)

UNET_SWITCHES = (
    "self_attn", "sparse_attn", "memory_efficient", "self_cond", "coordinates", "cosine_sim_self_attn",
    "cosine_sim_cross_attn", "cross_embed_downsample", "scale_skip_connection", "combine_upsample_fmaps",
)  # fmt: skip
SWITCHES = (
    *UNET_SWITCHES, "nearest_upsampling", "plain_init_conv", "weight_standardization", "no_embeds_in_time",
)  # fmt: skip
SCHEDULES = ("cosine", "linear", "quadratic", "sigmoid", "jsd", "flow")

# fmt: off


def add_decoder_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of training a cascade: its Unets, how they are trained and judged, noise, and sampling."""
    add_unet_arguments(parser)
    add_condition_arguments(parser)
    add_cascade_arguments(parser)
    add_diffusion_arguments(parser)
    add_sampling_arguments(parser)


def add_unet_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the Unets of a cascade."""
    add = parser.add_argument_group("model (one value for all Unets, or one for each)").add_argument
    add("--image_sizes", type=pixels, nargs="+", default=[64], metavar="PIXELS",
        help="side of the pictures of each Unet, ascending; as many Unets as sizes")
    add("--dim", type=size, nargs="+", default=[128], metavar="DIM", help="channels of the finest level")
    add("--dim_mults", type=sizes, nargs="+", default=[(1, 2, 3, 4)], metavar="N,N...",
        help="channels of each level, finest first, as multiples of --dim; each further level halves the side")
    add("--cond_dim", type=size, nargs="+", metavar="DIM",
        help="width of the tokens that cross-attention sees (default: --dim)")
    add("--num_resnet_blocks", type=sizes, nargs="+", default=[(2,)], metavar="N[,N...]",
        help="residual blocks per level: one number, or one for each level")
    add("--attn_heads", type=size, nargs="+", default=[16], metavar="N", help="heads of self-attention")
    add("--attn_dim_head", type=size, nargs="+", default=[32], metavar="DIM", help="width of such a head")
    add("--cross_attn_heads", type=size, nargs="+", default=[8], metavar="N",
        help="heads of the attention to the condition")
    add("--cross_attn_dim_head", type=size, nargs="+", default=[64], metavar="DIM", help="width of such a head")
    add("--resnet_groups", type=size, nargs="+", default=[8], metavar="N",
        help="groups of the group normalisations")
    add("--switches", type=Names(*SWITCHES), nargs="+", default=[()], metavar="NAME,...",
        help=f"none, or a comma list of {', '.join(SWITCHES)}")


def add_condition_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of what the first Unet of a cascade is given."""
    add = parser.add_argument_group("conditions").add_argument
    add("--condition_on", type=Names("image", "text"), default="image", metavar="NAMES",
        help="what the first Unet is given: none, or a comma list of image, text")
    add("--image_embed_scale", type=non_negative_float, default=0.0, metavar="X",
        help="factor on image embeddings; 0: the square root of their width, which gives unit-length ones entries of "
        "about 1")
    add("--max_text_len", type=size, default=256, metavar="TOKENS",
        help="text encodings are padded to so many tokens; longer ones are refused")
    add("--image_cond_drop_prob", type=fraction, default=0.1, metavar="P",
        help="share of samples that train without their image embedding, for guidance")
    add("--text_cond_drop_prob", type=fraction, default=0.5, metavar="P",
        help="share of samples that train without their text, for guidance")


def add_diffusion_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the noise schedules and the losses of a cascade."""
    add = parser.add_argument_group("diffusion (one value for all Unets, or one for each)").add_argument
    add("--noise_schedule", type=str.lower, choices=SCHEDULES, nargs="+", default=["cosine"],
        help="how the signal-to-noise ratio falls over the noise levels")
    add("--objective", type=str.lower, choices=("noise", "x_start", "v", "flow"), nargs="+", default=["v"],
        help="what a Unet predicts")
    add("--loss_weight", type=str.lower, choices=("none", "min_snr", "p2", "sigmoid", "learned"), nargs="+",
        default=["none"], help="weight of the loss by noise level")
    add("--learned_variance", type=int, choices=(0, 1), nargs="+", default=[0], metavar="0|1",
        help="also learn the variance of a step of ddpm (Nichol and Dhariwal 2021)")
    add("--random_crop_sizes", type=pixels_or_0, nargs="+", default=[0], metavar="PIXELS",
        help="train an upsampling Unet on random crops of this side; 0: on whole pictures; one size is that of all "
        "upsampling Unets, in a list the first is 0")
    add = parser.add_argument_group("diffusion (the same for all Unets)").add_argument
    add("--timesteps", type=size, default=1000, metavar="LEVELS", help="noise levels")
    add("--zero_terminal_snr", action=argparse.BooleanOptionalAction, default=True,
        help="the highest noise level is noise alone (Lin et al. 2023)")
    add("--noise_shift", type=size, metavar="PIXELS",
        help="more noise for larger pictures: shift the log SNR by 2 log(PIXELS / side) (Hoogeboom et al. 2023)")
    add("--loss_type", choices=("l2", "l1", "huber"), default="l2", help="distance of prediction and target")
    add("--min_snr_gamma", type=positive_float, default=5.0, metavar="GAMMA", help="of min_snr (Hang et al. 2023)")
    add("--p2_loss_weight_gamma", type=non_negative_float, default=1.0, metavar="GAMMA",
        help="gamma of p2 (Choi et al. 2022)")
    add("--p2_loss_weight_k", type=positive_float, default=1.0, metavar="K", help="k of p2")
    add("--sigmoid_bias", type=float, default=-1.0, metavar="B", help="bias of sigmoid (Hoogeboom et al. 2024)")
    add("--vb_loss_weight", type=non_negative_float, default=0.001, metavar="WEIGHT",
        help="weight of the variational bound that trains a learned variance, as a sum over all levels")
    add("--time_sampling", type=str.lower, choices=("uniform", "logit_normal"), default="uniform",
        help="distribution of noise levels in training")
    add("--logit_normal", type=float, nargs=2, default=[0.0, 1.0], metavar=("MEAN", "STD"),
        help="of the logit of the noise level with --time_sampling logit_normal; a mean above 0: more noise")
    add("--stratified_times", action=argparse.BooleanOptionalAction, default=True,
        help="spread the noise levels of a batch evenly: less variance, the same expectation")
    add("--lowres_condition", type=str.lower, choices=("noise", "blur", "none"), default="blur",
        help="what is done to an upsampling Unet's condition in training, so that it bears mistakes of the Unet before")
    add("--blur_prob", type=fraction, default=0.5, metavar="P", help="share of conditions that are blurred")
    add("--blur_sigma", type=positive_float, nargs="+", default=[0.6], metavar="PIXELS",
        help="width of the blur, by a kernel of 3 x 3 pixels of the smaller picture: one number, or the least and the "
        "greatest, between which it is drawn for each sample")
    add("--lowres_noise_level", type=fraction, default=0.2, metavar="SHARE",
        help="noise level of the condition when sampling, as a share of --timesteps")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of drawing pictures from noise."""
    add = parser.add_argument_group("sampling").add_argument
    add("--sampler", type=str.lower, choices=("dpmpp_2m", "ddim", "ddpm", "heun"), default="dpmpp_2m",
        help="how noise becomes a picture")
    add("--sample_timesteps", type=size, nargs="+", default=[20], metavar="STEPS",
        help="steps of the sampler, one number or one for each Unet")
    add("--spacing", type=str.lower, choices=("auto", "uniform", "karras"), default="auto",
        help="noise levels that the steps visit: uniform: evenly by number; karras: more of them near pure noise and "
        "near the clean picture (Karras et al. 2022); auto: karras for dpmpp_2m on linear and jsd, and but for ddpm "
        "after a large --noise_shift; uniform otherwise")
    add("--cond_scale", type=non_negative_float, nargs="+", default=[1.0], metavar="SCALE",
        help="guidance: 1 follows the condition, above 1 exaggerates it; one number or one for each Unet")
    add("--guidance_interval", type=non_negative_float, nargs=2, metavar=("LOW", "HIGH"),
        help="guide only where the noise is between these multiples of the signal (Kynkaanniemi et al. 2024)")
    add("--cfg_rescale", type=fraction, default=0.0, metavar="SHARE",
        help="how much of the contrast that guidance adds is taken back (Lin et al. 2023)")
    add("--ddim_eta", "--ddim_sampling_eta", type=non_negative_float, default=0.0, metavar="ETA",
        help="fresh noise in each step of ddim: 0 none, 1 as much as ddpm")
    add("--dynamic_thresholding", "--use_dynamic_thres", type=fraction, default=0.0, metavar="QUANTILE",
        help="scale each picture so that this quantile of its values fits, 0.95 for example; 0: clip to the range")



def add_cascade_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of how the Unets of a cascade are trained and judged."""
    add = parser.add_argument_group("training (rate, warm-up and decay: one value, or one for each Unet)").add_argument
    add("--train_unets", type=positive_int, nargs="+", metavar="NUMBER",
        help="numbers of the Unets to train, from 1; the others stay as --init_from has them (default: all)")
    add("--init_from", metavar="DIR",
        help="start from a run, a checkpoint, model/ folder, DALLE2-pytorch file or USER/NAME of the Hugging Face Hub")
    add("--learning_rate", type=positive_float, nargs="+", default=[1e-4], metavar="LR",
        help="highest learning rate")
    add("--lr_warmup_steps", type=non_negative_int, nargs="+", default=[0], metavar="UPDATES",
        help="updates of linear warm-up from 0, at most half of the run")
    add("--weight_decay", type=non_negative_float, nargs="+", default=[0.01], metavar="DECAY",
        help="weight decay of matrices; biases and scales do not decay")
    add("--lr_cosine", action="store_true", help="let the learning rate fall to 0 along a cosine; constant otherwise")
    add = parser.add_argument_group("evaluation").add_argument
    add("--n_evaluation_samples", type=size_or_0, default=0, metavar="N",
        help="pictures to draw for conditions of the validation split and to judge by the measures below; those of "
        "demo:shapes are read, too, and as many of combinations that it never shows")
    add("--evaluate_every_n_steps", type=non_negative_int, default=0, metavar="UPDATES",
        help="updates between two such evaluations, which measure what a validation does too; 0: only at the end")
    add("--fid_weights", metavar="FILE", help="report FID, KID and inception score with these weights of Inception")
    add("--lpips_weights", metavar="FILE", help="report LPIPS with these weights")
