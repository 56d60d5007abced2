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
    two_fractions,
)
from .parser import ArgumentParser

# What a quantizer is trained with by its authors, and lfq by what was measured, where it differs from the others.
_USUAL_OF = {
    "lfq": {"inv_temperature": 10.0},
    "bsq": {"inv_temperature": 1.0, "commitment_loss_weight": 0.0, "diversity_gamma": 1.0},
    "ibq": {"commitment_loss_weight": 1.0, "entropy_loss_weight": 0.05, "diversity_gamma": 1.0},
}

_MOST_ALONE = 0.3  # the largest --gan_weight_scale that cost little without a perceptual loss: docs/vqgan.md

# fmt: off


def add_quantizer_arguments(
    parser: ArgumentParser,
    quantizers: Mapping[str, str],
    *,
    codebook_size: int,
    commitment_loss_weight: float = 0.25,
    diversity_gamma: float = 1.0,
) -> None:
    """Add the flags of every script whose model has a quantizer, one of `quantizers`: names, and what they are in a few
    words. The other parameters are defaults, but for quantizers whose authors train them with others."""
    usual = {
        "commitment_loss_weight": commitment_loss_weight, "entropy_loss_weight": 0.1, "diversity_gamma": diversity_gamma
    }

    def settle(args: argparse.Namespace) -> None:
        for name, value in (usual | _USUAL_OF.get(args.quantizer, {})).items():
            if getattr(args, name) is None:
                setattr(args, name, value)

    def defaults(name: str) -> str:
        values = ((quantizer, own.get(name, usual[name])) for quantizer, own in _USUAL_OF.items())
        others = (f"; {quantizer}: {value:g}" for quantizer, value in values if value != usual[name])
        return f"(default: {usual[name]:g}{''.join(others)})"

    parser.add_consequence(settle)
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
    add("--commitment_loss_weight", type=non_negative_float, metavar="WEIGHT",
        help=f"weight of the loss that keeps the encoder near its codes {defaults('commitment_loss_weight')}")
    add("--entropy_loss_weight", type=non_negative_float, metavar="WEIGHT",
        help="weight of the entropy loss in nats, H(code of a position) - gamma H(code over the batch) (lfq, bsq, ibq) "
        f"{defaults('entropy_loss_weight')}")
    add("--diversity_gamma", type=non_negative_float, metavar="GAMMA",
        help=f"gamma in the formula of --entropy_loss_weight {defaults('diversity_gamma')}")
    add("--inv_temperature", type=positive_float, metavar="X",
        help="inverse temperature of the soft codes in the entropy loss (lfq, bsq) (default: 10; bsq: 1)")
    add("--entropy_anneal_factor", type=positive_float, default=1.0, metavar="FACTOR",
        help="at the start, the entropy loss counts this many times --entropy_loss_weight")
    add("--entropy_anneal_steps", type=non_negative_int, default=0, metavar="UPDATES",
        help="updates over which that factor falls to 1")


def add_adversary_arguments(
    parser: ArgumentParser, *, penalty: str = "one_centred", perceptual_loss_weight: float = 1.0
) -> None:
    """Add the flags of every script that trains against a discriminator (`training.objectives.adversaries`); the
    parameters are defaults."""
    parser.add_consequence(settle_gan_weight_scale)
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
    add("--discr_betas", type=two_fractions, metavar="B1,B2",
        help="betas of the discriminator's optimizer (default: --betas)")
    add("--discr_max_grad_norm", type=non_negative_float, metavar="NORM",
        help="clip the discriminator's gradient to this 2-norm; 0: no clipping (default: --max_grad_norm)")
    add("--gan_loss", type=str.lower, choices=("hinge", "bce", "hinge_softplus"), default="hinge",
        help="adversarial loss of generator and discriminator; hinge_softplus: the discriminator's is hinge, the "
        "generator's softplus(-mean logit of an image), as in Open-MAGVIT2")
    add("--gan_weight", type=number_or("adaptive"), default="adaptive", metavar="WEIGHT",
        help="weight of the generator's adversarial loss: a number, or adaptive, which makes the gradients of "
        "adversarial and reconstruction loss equally large at the last layer, before --gan_weight_scale")
    add("--gan_weight_scale", type=non_negative_float, metavar="FACTOR",
        help="factor on --gan_weight (default: 0.1 if that is adaptive and there is no perceptual loss, else 1)")
    add("--penalty", type=str.lower, choices=("one_centred", "zero_centred"), default=penalty,
        help="gradient penalty of the discriminator: one_centred draws the norm of its gradient at real images to 1, "
        "zero_centred those at real and at generated images to 0")
    add("--penalty_weight", type=non_negative_float, default=10.0, metavar="WEIGHT",
        help="weight of the discriminator's gradient penalty")
    add("--apply_grad_penalty_every", type=positive_int, default=4,
        metavar="UPDATES",
        help="updates from one gradient penalty to the next, counted from the first update of the run")
    add("--lecam_weight", type=non_negative_float, default=0.0, metavar="WEIGHT",
        help="weight of the discriminator's LeCam regulariser")
    add("--lecam_decay", type=fraction, default=0.999, metavar="DECAY",
        help="decay per update of the averages in the LeCam regulariser")
# fmt: on


def settle_gan_weight_scale(args: argparse.Namespace) -> None:
    """The default of --gan_weight_scale. Published trainers take the whole adaptive weight beside a perceptual loss;
    without one, an adversarial gradient as strong as that of the pixels undoes the reconstruction."""
    if args.gan_weight_scale is None:
        is_alone = args.gan_weight == "adaptive" and args.perceptual == "none"
        args.gan_weight_scale = 0.1 if is_alone else 1.0


def without_perceptual_loss(args: argparse.Namespace) -> str | None:
    """What to expect of a run without a perceptual loss, in one line; None for one that has it."""
    if args.perceptual != "none":
        return None
    line = "no perceptual loss (--perceptual none): reconstructions will be smoother than with one"
    if args.gan_weight == "adaptive" and args.gan_weight_scale > _MOST_ALONE:
        line += f"; --gan_weight_scale {args.gan_weight_scale:g} is for a run with one: try 0.1 (docs/vqgan.md)"
    return line
