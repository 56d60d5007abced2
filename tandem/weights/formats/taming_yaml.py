"""Training configurations of autoencoders of taming-transformers and latent diffusion as flags of train_vqgan.py
(`convert.py config`). Keys are named without the `params` between them; public_names.yaml has their public defaults.
The value of an absent key is the default of its class, or of the public main.py.

Public images are in [-1, 1]. Their absolute error is twice that of images in [0, 1], their squared error four times.
The weights of the other losses, which are relative to this error, are therefore half or a quarter as large here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tandem.config.converters import did_you_mean

from .config_keys import (
    Flags,
    Section,
    SupportedValues,
    get_section,
    require_mapping,
    require_number,
    shorten,
    supported_values,
)

if TYPE_CHECKING:
    from tandem.config.public_names import Row

_KL, _GUMBEL = "AutoencoderKL", "GumbelVQ"
_MODELS = (_KL, "VQModel", "VQModelInterface", "EMAVQ", _GUMBEL)
_LOSSES = ("VQLPIPSWithDiscriminator", "LPIPSWithDiscriminator")
_EMPTY_LOSSES = ("Identity", "DummyLoss")
_FIRST_STAGE = "first_stage_config"
_RANDOMLY_CROPPED = ("ImageNetTrain", "FacesHQTrain")  # datasets that crop at random by default
_EQUIVALENTS: dict[str, Sequence[Any]] = {
    "model.ddconfig.in_channels": (3,), "model.ddconfig.out_ch": (3,), "model.lossconfig.disc_in_channels": (3,),
}  # fmt: skip
_MAX_WEIGHT = 1e4  # limit of the adaptive weight in the other packages
_SEED, _EPOCHS, _ENDLESS = 23, 1000, 10**9  # main.py's default, that of Lightning's trainer, and epochs without end


def select_autoencoder(config: Section) -> tuple[dict[str, Any], list[str]]:
    """The configuration of the autoencoder, also if it is a part of that of a latent diffusion, and notes for the user.
    It has no `params`, and numbers in place of strings such as 1e-6, which YAML 1.1 does not read as numbers.

    Raises:
        ValueError: one line, if it is of another model.
    """
    flat, notes = _flatten(config), []
    model = require_mapping(flat.get("model"), "model")
    if _FIRST_STAGE in model:
        name = _class_name(model)
        notes.append(f"model.target {name}: its {_FIRST_STAGE} is read, and nothing about the model of the latents")
        model = require_mapping(model[_FIRST_STAGE], _FIRST_STAGE)
        flat = {"model": model}
    if (kind := _class_name(model)) not in _MODELS:
        hint = did_you_mean(kind, _MODELS)
        raise ValueError(f"model.target {shorten(model.get('target'))}: it is none of {', '.join(_MODELS)}{hint}")
    return flat, notes


def supported_keys(rows: Sequence[Row]) -> SupportedValues:
    """The keys for `without_counterpart`; ``rows``: those about train_vqgan.py."""
    return supported_values(rows, _EQUIVALENTS) | {
        "data.train.*": ((), "an option of its dataset, which --image_folder replaces")
    }


def count_processes(config: Section) -> int:
    """The number of GPUs in the options of the trainer, which give it as a number or a list; 1 without any."""
    trainer = get_section(config, "lightning", "trainer")

    def count(value: Any) -> int:
        is_number = isinstance(value, int) or (isinstance(value, str) and value.isdecimal())
        return max(int(value) if is_number else len(str(value).strip("[],").split(",")), 1)

    return count(trainer.get("gpus", trainer.get("devices", 1))) * count(trainer.get("num_nodes", 1))


def flags_from_yaml(config: Section, processes: int) -> tuple[Flags, list[str]]:
    """The flags, and notes for the user.

    Args:
        config: As `select_autoencoder` gives it.
        processes: The number of processes of the training.

    Raises:
        ValueError: one line that names the key whose value is missing or cannot be used.
    """
    model, trainer = get_section(config, "model"), get_section(config, "lightning", "trainer")
    model_flags, notes = _model_flags(model, get_section(config, "data", "train"))
    loss_flags, loss_notes = _loss_flags(model, model_flags["image_size"][1], trainer)
    pictures = get_section(config, "lightning", "callbacks", "image_logger")
    steps = None if trainer.get("max_steps") == -1 else trainer.get("max_steps")
    flags: Flags = {
        **model_flags, **loss_flags, **_batch_flags(model, get_section(config, "data"), trainer, processes),
        "init_from": ("model.ckpt_path", model.get("ckpt_path")), "seed": ("seed", _SEED),
        "betas": ("model.target", "0.5,0.9"), "penalty_weight": ("model.lossconfig", 0.0),
        "ema_decay": ("model.use_ema", 0.9999 if model.get("use_ema") else 0.0),
        "num_workers": ("data.num_workers", get_section(config, "data").get("num_workers")),
        "max_steps": ("lightning.trainer.max_steps", steps),
        "epochs": ("lightning.trainer.max_epochs", trainer.get("max_epochs") or (_ENDLESS if steps else _EPOCHS)),
        "precision": ("lightning.trainer.precision", _precision_flag(trainer.get("precision", 32))),
        "sample_every_n_steps": ("lightning.callbacks.image_logger.batch_frequency", pictures.get("batch_frequency")),
        "num_images_save": ("lightning.callbacks.image_logger.max_images", pictures.get("max_images")),
    }  # fmt: skip
    if "learning_rate" in flags:
        rate, batch = model["base_learning_rate"], flags["batch_size"][1]
        notes.append(
            f"learning_rate {flags['learning_rate'][1]:g} is base_learning_rate {rate:g} x batch_size {batch:g}, as in "
            "taming's main.py unless it has --scale_lr False"
        )
    else:
        notes.append("data.batch_size or model.base_learning_rate is missing: give --batch_size and --learning_rate")
    return flags, notes + loss_notes


def _model_flags(model: Section, data: Section) -> tuple[Flags, list[str]]:
    """Flags of the model and of its images, and notes for the user."""
    ddconfig, notes = require_mapping(model.get("ddconfig"), "model.ddconfig"), []
    kind, prefix = _class_name(model), "model.ddconfig."
    for name in ("ch", "ch_mult", "num_res_blocks", "attn_resolutions", "z_channels", "resolution"):
        if ddconfig.get(name) is None:
            raise ValueError(f"{prefix}{name} is missing: a model needs it")
    resolution, multiples = require_number(ddconfig["resolution"], f"{prefix}resolution"), ddconfig["ch_mult"]
    if not isinstance(multiples, list) or not isinstance(ddconfig["attn_resolutions"], list):
        raise ValueError(f"{prefix}ch_mult and attn_resolutions: give lists of numbers")
    sides = {resolution // 2**level: level for level in range(len(multiples))}
    attention_levels = sorted(sides[side] for side in ddconfig["attn_resolutions"] if side in sides)
    if missing_sides := [side for side in ddconfig["attn_resolutions"] if side not in sides]:
        notes.append(f"{prefix}attn_resolutions {shorten(missing_sides)}: no level has this side, so none attends")
    if kind == _GUMBEL:
        notes.append(
            "model.target GumbelVQ: there is no Gumbel quantizer; a vector quantizer of as many codes is written"
        )
    data = {**data, **get_section(data, "config")}
    size = data.get("size")
    side = require_number(data.get("crop_size") or size or resolution, "data.train.size or crop_size")
    if size not in (None, side):
        notes.append(f"data.train.size {shorten(size)}: the shorter side is resized to {side} instead, before the crop")
    is_random = data.get("random_crop", _class_name(data) in _RANDOMLY_CROPPED)
    is_kl, code = kind == _KL, model.get("embed_dim")
    if code is None or (model.get("n_embed") is None and not is_kl):
        raise ValueError("model.embed_dim, or for codes model.n_embed, is missing: a model needs it")
    codebook_flags: Flags = {
        "codebook_size": ("model.n_embed", model.get("n_embed")), "codebook_dim": ("model.embed_dim", code),
        "vq_decay": ("model.target", 0.99),  # of EMAVectorQuantizer there; others have no averages
    }  # fmt: skip
    crop, quantizer = "random" if is_random else "center", "kl" if is_kl else "vq"
    flags: Flags = {
        "image_size": ("data.train.size", side), "crop": ("data.train.random_crop", crop),
        "body": ("model.target", "taming"), "dim": (f"{prefix}ch", ddconfig["ch"]),
        "ch_mult": (f"{prefix}ch_mult", multiples),
        "num_resnet_blocks": (f"{prefix}num_res_blocks", [ddconfig["num_res_blocks"]]),
        "attention_levels": (f"{prefix}attn_resolutions", attention_levels or None),
        "z_channels": (f"{prefix}z_channels", ddconfig["z_channels"]), "quantizer": ("model.target", quantizer),
        **({"latent_dim": ("model.embed_dim", code)} if is_kl else codebook_flags),
    }  # fmt: skip
    return flags, notes


def _loss_flags(model: Section, side: float, trainer: Section) -> tuple[Flags, list[str]]:
    """Flags of the losses of generator and discriminator and of the norms to which their gradients are clipped, and
    notes for the user. ``side``: of the images."""
    loss, prefix = require_mapping(model.get("lossconfig"), "model.lossconfig"), "model.lossconfig."
    kind, notes = _class_name(loss), []
    if kind not in _LOSSES:
        problem = "it has no losses" if kind in _EMPTY_LOSSES or not kind else f"no {' or '.join(_LOSSES)}"
        return {}, [f"{prefix}target {kind or 'missing'}: {problem}; give the flags of losses, or keep their defaults"]

    def value(name: str, default: float) -> float:
        return require_number(loss.get(name, default), prefix + name)

    is_squared, is_kl = loss.get("pixel_loss") == "l2", _class_name(model) == _KL
    range_factor = 0.25 if is_squared else 0.5
    perceptual, factor = value("perceptual_weight", 1.0), value("disc_factor", 1.0)
    scale = value("disc_weight", 1.0) * factor
    pixel_values = 3 * side**2  # of an image
    flags: Flags = {
        "l2_recon_loss": (f"{prefix}pixel_loss", is_squared),
        "perceptual": (f"{prefix}perceptual_weight", "lpips" if perceptual else "none"),
        "perceptual_loss_weight": (f"{prefix}perceptual_weight", perceptual * range_factor),
        "gan_loss": (f"{prefix}disc_loss", "bce" if loss.get("disc_loss") == "vanilla" else "hinge"),
        "gan_weight": (f"{prefix}disc_weight", "adaptive"), "gan_weight_scale": (f"{prefix}disc_weight", scale),
        "discr_dim": (f"{prefix}disc_ndf", loss.get("disc_ndf", 64)),
        "discr_layers": (f"{prefix}disc_num_layers", loss.get("disc_num_layers", 3)),
        "discr_start_step": (f"{prefix}disc_start", value("disc_start", 0)),
    }  # fmt: skip
    if is_kl:
        fixed = float(f"{_MAX_WEIGHT * scale * range_factor / pixel_values:.3g}")
        flags |= {"gan_weight": (f"{prefix}disc_weight", fixed), "gan_weight_scale": (f"{prefix}disc_weight", 1.0)}
        flags["kl_loss_weight"] = (f"{prefix}kl_weight", value("kl_weight", 1.0) * range_factor)
        notes.append(
            f"{prefix}disc_weight {scale:g}: there, errors are sums over {pixel_values:,.0f} numbers of an image, and "
            f"the adaptive weight is taken to be at its limit of {_MAX_WEIGHT:g}; here, errors are means: gan_weight "
            f"is {fixed:g}"
        )
    else:
        weight = value("codebook_weight", 1.0) * range_factor
        flags["commitment_loss_weight"] = (f"{prefix}codebook_weight", weight)
    if loss.get("disc_loss") == "vanilla":
        notes.append(f"{prefix}disc_loss vanilla: written as bce, where the generator's loss differs, too")
    if norm := require_number(trainer.get("gradient_clip_val") or 0, "lightning.trainer.gradient_clip_val"):
        clip = norm * range_factor / (pixel_values if is_kl else 1)
        flags["max_grad_norm"] = ("lightning.trainer.gradient_clip_val", clip)
        # There, the discriminator's loss is half of ours.
        flags["discr_max_grad_norm"] = ("lightning.trainer.gradient_clip_val", 2 * norm / (factor or 1))
    return flags, notes


def _batch_flags(model: Section, data: Section, trainer: Section, processes: int) -> Flags:
    """Flags of the batch and of the learning rates that follow from it, as far as the configuration gives them."""
    micro_batches = require_number(
        trainer.get("accumulate_grad_batches", 1), "lightning.trainer.accumulate_grad_batches"
    )
    flags: Flags = {"grad_accum_steps": ("lightning.trainer.accumulate_grad_batches", micro_batches)}
    micro_batch_size, rate = data.get("batch_size"), model.get("base_learning_rate")
    if micro_batch_size is None:
        return flags
    batch = require_number(micro_batch_size, "data.batch_size") * micro_batches * processes
    flags["batch_size"] = ("data.batch_size", batch)
    if rate is None:
        return flags
    scaled_rate = require_number(rate, "model.base_learning_rate") * batch
    factor = require_number(model.get("lr_g_factor", 1.0), "model.lr_g_factor")
    flags["learning_rate"] = ("model.base_learning_rate", float(f"{scaled_rate * factor:.6g}"))
    if factor != 1:
        flags["discr_learning_rate"] = ("model.lr_g_factor", float(f"{scaled_rate:.6g}"))
    return flags


def _precision_flag(value: Any) -> str | None:
    """The flag's value for Lightning's; None for fp32."""
    bits = str(value)
    return "bf16" if bits.startswith("bf16") else "fp16" if bits.startswith("16") else None


def _class_name(section: Mapping[str, Any]) -> str:
    """The name of a section's class, without its package."""
    return str(section.get("target") or "").rpartition(".")[2]


def _flatten(value: Any) -> Any:
    """A configuration whose `params` are keys of the section around them, with numbers in place of texts of numbers."""
    if isinstance(value, str):
        if "${" in value:
            raise ValueError(f"{shorten(value)} stands for another value: write that in its place")
        try:
            return float(value) if "e" in value.lower() and math.isfinite(float(value)) else value
        except ValueError:
            return value
    if isinstance(value, list):
        return [_flatten(element) for element in value]
    if not isinstance(value, dict):
        return value
    flat: dict[Any, Any] = {}
    for key, element in value.items():
        element = _flatten(element)
        flat |= element if key == "params" and isinstance(element, dict) else {key: element}
    return flat
