"""Flags of the scripts that train a quantizing autoencoder against a discriminator. Imports the standard library only,
so that `--help` is fast."""

import argparse
from collections.abc import Mapping

from .converters import (
    fraction,
    non_negative_float,
    non_negative_int,
    number_or,
    positive_float,
    positive_int,
    size,
    sizes,
)

# fmt: off


def add_quantizer_arguments(
    parser: argparse.ArgumentParser,
    quantizers: Mapping[str, str],
    *,
    codebook_size: int,
    commitment_loss_weight: float = 0.25,
    diversity_gamma: float = 1.0,
) -> None:
    """Add the flags of every script whose model has a quantizer, one of `quantizers`: names, and what they are in a few
    words. The other parameters are defaults."""
    add = parser.add_argument_group("quantizer").add_argument
    add("--quantizer", type=str.lower, choices=tuple(quantizers), default="lfq", help=", ".join(quantizers.values()))
    add("--codebook_size", type=size, default=codebook_size, metavar="CODES",
        help="a power of two for lfq and bsq")
    add("--codebook_dim", type=size, default=32, metavar="DIM", help="width of a codebook entry (vq, ibq)")
    add("--vq_decay", type=fraction, default=0.8, metavar="DECAY",
        help="decay of the moving averages from which the codebook is computed (vq)")
    add("--vq_cosine", action="store_true",
        help="take the codebook entry at the smallest angle instead of distance (vq)")
    add("--fsq_levels", type=sizes, metavar="N,N...",
        help="levels per dimension, instead of those that make --codebook_size (fsq)")
    add("--commitment_loss_weight", type=non_negative_float, default=commitment_loss_weight, metavar="WEIGHT",
        help="weight of the loss that keeps the encoder near its codes")
    add("--entropy_loss_weight", type=non_negative_float, default=0.1, metavar="WEIGHT",
        help="weight of the entropy loss in nats, H(code of a position) - gamma H(code over the batch) (lfq, bsq, ibq)")
    add("--diversity_gamma", type=non_negative_float, default=diversity_gamma, metavar="GAMMA",
        help="gamma in the formula of --entropy_loss_weight")
    add("--inv_temperature", type=positive_float, default=100.0, metavar="X",
        help="inverse temperature of the soft codes in the entropy loss (lfq, bsq)")
    add("--entropy_anneal_factor", type=positive_float, default=1.0, metavar="FACTOR",
        help="at the start, the entropy loss counts this many times --entropy_loss_weight")
    add("--entropy_anneal_steps", type=non_negative_int, default=0, metavar="UPDATES",
        help="updates over which that factor falls to 1")


def add_adversary_arguments(
    parser: argparse.ArgumentParser, *, penalty: str = "one_centred", perceptual_loss_weight: float = 1.0
) -> None:
    """Add the flags of every script that trains against a discriminator (`training.objectives.adversaries`); the
    parameters are defaults."""
    add = parser.add_argument_group("perceptual loss").add_argument
    add("--perceptual", type=str.lower, choices=("none", "vgg", "lpips"), default="none",
        help="kind of perceptual loss: distance of VGG16 features, or LPIPS; both need weights")
    add("--perceptual_weights", metavar="FILE",
        help="file with the weights of the perceptual network (default: from torch.hub's cache)")
    add("--perceptual_loss_weight", type=non_negative_float, default=perceptual_loss_weight, metavar="WEIGHT",
        help="weight of the perceptual loss")

    add = parser.add_argument_group("adversary").add_argument
    add("--discr_dim", type=size, metavar="DIM",
        help="channels of the discriminator's first layer (default: as many as the generator's)")
    add("--discr_layers", type=size, default=4, metavar="N",
        help="times that the discriminator halves the image, whose side must be at least 4 x 2^N pixels")
    add("--discr_start_step", type=non_negative_int, default=0, metavar="UPDATES",
        help="updates of the generator before the discriminator takes part")
    add("--discr_learning_rate", type=positive_float, metavar="LR",
        help="learning rate of the discriminator (default: --learning_rate)")
    add("--discr_max_grad_norm", type=non_negative_float, metavar="NORM",
        help="clip the discriminator's gradient to this 2-norm; 0: no clipping (default: --max_grad_norm)")
    add("--gan_loss", type=str.lower, choices=("hinge", "bce"), default="hinge",
        help="adversarial loss of generator and discriminator")
    add("--gan_weight", type=number_or("adaptive"), default="adaptive", metavar="WEIGHT",
        help="weight of the generator's adversarial loss: a number, or adaptive, which makes the gradients of "
        "adversarial and reconstruction loss equally large at the last layer, before --gan_weight_scale")
    add("--gan_weight_scale", type=non_negative_float, metavar="FACTOR",
        help="factor on --gan_weight (default: 0.1 if that is adaptive, else 1)")
    add("--penalty", type=str.lower, choices=("one_centred", "zero_centred"), default=penalty,
        help="gradient penalty of the discriminator: one_centred draws the norm of its gradient at real images to 1, "
        "zero_centred those at real and at generated images to 0")
    add("--penalty_weight", type=non_negative_float, default=10.0, metavar="WEIGHT",
        help="weight of the discriminator's gradient penalty")
    add("--apply_grad_penalty_every", type=positive_int, default=4,
        metavar="UPDATES",
        help="updates from one gradient penalty to the next")
    add("--lecam_weight", type=non_negative_float, default=0.0, metavar="WEIGHT",
        help="weight of the discriminator's LeCam regulariser")
    add("--lecam_decay", type=fraction, default=0.999, metavar="DECAY",
        help="decay per update of the averages in the LeCam regulariser")
