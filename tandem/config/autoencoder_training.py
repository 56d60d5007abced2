"""Flags of the scripts that train a quantizing autoencoder against a discriminator. Imports no PyTorch,
so that `--help` is fast."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from .converters import (
    FILE,
    PATH,
    fraction,
    non_negative_float,
    number_or,
    positive_float,
    size,
    step_count,
    step_count_or_0,
    two_fractions,
    width,
)
from .fields import above_0, flag, given, when
from .models.autoencoders import QuantizerLossFlags
from .models.taming import LatentLossFlags
from .shared import VALIDATION

# The largest --gan_weight_scale with which models without a perceptual loss nearly kept their PSNR: docs/vqgan.md.
_MAX_SCALE_WITHOUT_PERCEPTUAL = 0.3

_ALIGNED = given("align_with", "PATH")
_VGG = when("perceptual", "vgg", "lpips")
_PERCEPTUAL = when("perceptual", "vgg", "lpips", "resnet50")
# Flags beside those of losses in the same dataclasses.
_NO_LOSSES = {"train", "init_discriminator", "lpips_weights", "perceptual_weights", "align_with"}

#: The name of the discriminator among the parts of a checkpoint, and of its folder in a model folder.
DISCRIMINATOR = "discriminator"

# Channels of the first layer of MaskBit's discriminator, for images of 256 pixels.
_MASKBIT_DIM = 128

#: Side of the smallest images, in pixels, by the kind of --perceptual.
SMALLEST_SIDES = {"vgg": 16, "lpips": 16, "resnet50": 1}


@dataclass
class LatentRegularizerFlags:
    """Flags of every script that trains an autoencoder whose latents, or codes, are to be generated
    (`tandem.training.losses.latents`)."""

    equivariance_weight: float = flag(
        0.0,
        "weight of a second reconstruction error (EQ-VAE): latents are turned and shrunk at random, and the decoder "
        "has to make of them the images, turned and shrunk likewise; 0: none",
        non_negative_float,
        title="latents that are easy to generate",
    )
    latent_noise: float = flag(
        0.0,
        "deviation S of normal noise e in training (l-DeTok: 3): in place of latents (or entries of codes) z "
        "the decoder gets (1-t)*z + t*S*e, with t from 0 to 1 drawn for each image; 0: no noise",
        non_negative_float,
    )
    align_with: str | None = flag(
        None,
        "align the latents with the patch features of this frozen vision model (VA-VAE): a folder of transformers, or "
        "USER/NAME of the Hugging Face Hub, such as facebook/dinov2-small; a 1 x 1 convolution is trained to map the "
        "latents to the features",
        PATH,
        requires=when("train", "all"),
        fixed_on_resume=bool,  # the folder may move; a checkpoint says which model it was
    )
    align_weight: float = flag(
        0.1,
        "strength of the alignment: the gradient that it gives to the latents of an image, as a share of the gradient "
        "that they get from all other terms; with --no-align_adaptive, its weight in the loss",
        non_negative_float,
        requires=_ALIGNED,
    )
    align_adaptive: bool = flag(
        True,
        "let --align_weight be a share, so that the alignment keeps its strength while the other errors shrink; "
        "--compile needs --no-align_adaptive",
        requires=_ALIGNED,
    )
    align_cosine_margin: float = flag(
        0.5,
        "no error at a place where latent and feature have a cosine of at least 1 minus this",
        non_negative_float,
        requires=_ALIGNED,
    )
    align_distance_margin: float = flag(
        0.25,
        "no error for a pair of places whose latents have the cosine of their features to within this",
        non_negative_float,
        requires=_ALIGNED,
    )

    @classmethod
    def validate(cls, args: argparse.Namespace, parser: Any) -> None:
        """Refuse an adaptive alignment of a compiled model, whose gradients within cannot be changed. Latents that do
        not learn, by a config file of a run that learned them, are not aligned."""
        if args.train == "decoder" and "align_with" not in args.on_command_line:  # there it is refused
            args.align_with = None
        if args.align_with and args.align_adaptive and args.compile:
            parser.error(
                "--align_with and --compile: add --no-align_adaptive, because a compiled model hides its latents"
            )


@dataclass
class GANFlags:
    """Flags of every script that trains against a discriminator (`tandem.training.losses.gan`), and by a perceptual
    loss. `generator_width` is the name of the flag for the channels of the generator's first layer."""

    generator_width: ClassVar[str] = "dim"

    train: str = flag(
        "all",
        "what is trained: the whole model, or the decoder alone, for the codes or latents of --init_from",
        choices=("all", "decoder"),
        title="model",
        fixed_on_resume=True,
    )
    init_discriminator: bool = flag(
        True,
        "go on with the discriminator of --init_from, if it has one; off: with a new one, of random weights",
        requires=given("init_from", "PATH"),
    )
    discriminator: str = flag(
        "muse",
        "layers of the discriminator of images: muse: 4 x 4 convolutions of stride 2; maskbit: 3 x 3 convolutions and "
        "a fixed blur before each halving, as in MaskBit",
        choices=("muse", "maskbit"),
        title="GAN",
        fixed_on_resume=lambda kind: kind or "muse",  # runs of earlier versions have no such setting
    )
    discr_dim: int | None = flag(
        None,
        f"channels of the discriminator's first layer (default: as many as the generator's; maskbit: {_MASKBIT_DIM})",
        width,
        fixed_on_resume=True,
    )
    discr_layers: int = flag(
        4,
        "halvings of the image by the discriminator; the image's side must be at least 4 x 2^N pixels (2 x 2^N "
        "with --discriminator maskbit of train_vqgan.py)",
        size,
        fixed_on_resume=True,
    )
    discr_start_step: int = flag(
        0, "updates before the discriminator takes part", step_count_or_0, aliases="discr_start_after_step"
    )
    discr_learning_rate: float | None = flag(
        None, "learning rate of the discriminator (default: --learning_rate)", positive_float
    )
    discr_betas: tuple[float, float] | None = flag(
        None, "betas of the discriminator's optimizer (default: --betas)", two_fractions
    )
    discr_max_grad_norm: float | None = flag(
        None,
        "clip the discriminator's gradient to this norm; 0: no clipping (default: --max_grad_norm)",
        non_negative_float,
    )
    gan_loss: str = flag(
        "hinge",
        "adversarial loss of generator and discriminator; hinge_softplus: the discriminator's is hinge, the "
        "generator's softplus(-mean logit of an image), as in Open-MAGVIT2",
        choices=("hinge", "bce", "hinge_softplus"),
    )
    gan_weight: float | str = flag(
        "adaptive",
        "weight of the generator's adversarial loss: a number, or adaptive, which makes the gradients of adversarial "
        "and reconstruction loss equally large at the last layer; --gan_weight_scale multiplies either",
        number_or("adaptive"),
    )
    gan_weight_max: float = flag(
        1e4, "upper limit of an adaptive --gan_weight", positive_float, requires=when("gan_weight", "adaptive")
    )
    gan_weight_scale: float = flag(  # `validate` replaces the default
        None,
        "factor on --gan_weight (default: 1; 0.1 if that is adaptive without a perceptual loss)",
        non_negative_float,
    )
    penalty: str = flag(
        "one_centred",
        "gradient penalty of the discriminator: one_centred pulls the norm of its gradient at real images "
        "to 1, zero_centred those at real and at generated images to 0",
        choices=("one_centred", "zero_centred"),
        requires=above_0("penalty_weight"),
    )
    penalty_weight: float = flag(
        10.0,
        "weight of the discriminator's gradient penalty in the updates that have it; for StyleGAN's lazy "
        "regularization, multiply its weight by --apply_grad_penalty_every yourself",
        non_negative_float,
    )
    apply_grad_penalty_every: int = flag(
        4,
        "updates from one gradient penalty to the next, counted from the first update of the run",
        step_count,
        requires=above_0("penalty_weight"),
        aliases="apply_gradient_penalty_every",
    )
    lecam_weight: float = flag(0.0, "weight of the discriminator's LeCam regulariser", non_negative_float)
    lecam_decay: float = flag(
        0.999, "decay per update of the averages in the LeCam regulariser", fraction, requires=above_0("lecam_weight")
    )

    lpips_weights: str | None = flag(
        None,
        "report LPIPS on the validation split by these weights: a file, a folder, or published, which fetches them",
        FILE,
        title="evaluation",
        requires=VALIDATION,
    )
    perceptual: str = flag(
        "none",
        "kind of perceptual loss: distance of VGG16 features, LPIPS, or distance of a ResNet-50's logits",
        choices=("none", "vgg", "lpips", "resnet50"),
        title="perceptual loss",
    )
    perceptual_weights: str | None = flag(
        None,
        "weights of the perceptual network, a file or a folder (default: the published ones, fetched once into "
        "torch.hub's cache; with HF_HUB_OFFLINE=1 they must be there)",
        FILE,
        requires=_PERCEPTUAL,
    )
    perceptual_loss_weight: float = flag(1.0, "weight of the perceptual loss", non_negative_float, requires=_PERCEPTUAL)
    gram_loss_weight: float = flag(
        0.0,
        "weight of the squared distance of the Gram matrices of the VGG16's features, a part of the reconstruction "
        "loss beside the perceptual one; 0: none",
        non_negative_float,
        requires=_VGG,
    )

    @classmethod
    def validate(cls, args: argparse.Namespace, parser: Any) -> None:
        """Refuse --train decoder without a model, and fill in --discr_dim and --gan_weight_scale. Published trainers
        have a scale of 1 and a perceptual loss. Without a perceptual loss, an adversarial gradient as large as that of
        the pixel loss degrades the reconstruction."""
        if args.train == "decoder" and not args.init_from:
            parser.error("--train decoder keeps a trained encoder: give its model as --init_from")
        default_dim = _MASKBIT_DIM if args.discriminator == "maskbit" else getattr(args, cls.generator_width)
        args.discr_dim = args.discr_dim or default_dim
        if args.gan_weight_scale is None:
            is_reduced = args.gan_weight == "adaptive" and args.perceptual == "none"
            args.gan_weight_scale = 0.1 if is_reduced else 1.0


def discriminator_training(config: Any, updates: int) -> dict[str, Any]:
    """The part "training" of a discriminator's config.json: its weights are as trained ("online"), not averaged, after
    so many updates, and beside these losses, whose settings are given without paths. `config`: the flags of the run."""
    groups = (QuantizerLossFlags, LatentLossFlags, LatentRegularizerFlags, GANFlags)
    names = [field.name for group in groups for field in dataclasses.fields(group)]
    return {
        "weights": "online",
        "updates": updates,
        **{name: getattr(config, name) for name in names if name not in _NO_LOSSES},
    }


def perceptual_loss_warning(args: GANFlags) -> str | None:
    """A warning, of one line, about a run without a perceptual loss; None for a run with one."""
    if args.perceptual != "none":
        return None
    line = "no perceptual loss (--perceptual none): reconstructions will be smoother than with one"
    if args.gan_weight == "adaptive" and args.gan_weight_scale > _MAX_SCALE_WITHOUT_PERCEPTUAL:
        line += f"; --gan_weight_scale {args.gan_weight_scale:g} suits runs with that loss: try 0.1 (docs/vqgan.md)"
    return line
