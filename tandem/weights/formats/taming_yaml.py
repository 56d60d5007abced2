"""Training configurations of autoencoders of taming-transformers and latent diffusion, and the flags of train_vqgan.py
that they become (`convert.py config`). Keys are named without the `params` between them; their defaults there stand in
public_names.yaml. Where a configuration says nothing, the defaults of its classes and of its main.py hold.

Images are in [-1, 1] there, where an absolute error is twice that of [0, 1], and a squared one four times: what weighs
against it is half or a quarter as large here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tandem.config.converters import nearest

from .config_keys import Flags, Known, Section, checked, known_of, number, part_of, short

if TYPE_CHECKING:
    from tandem.config.public_names import Row

_KL, _GUMBEL = "AutoencoderKL", "GumbelVQ"
_MODELS = (_KL, "VQModel", "VQModelInterface", "EMAVQ", _GUMBEL)
_LOSSES = ("VQLPIPSWithDiscriminator", "LPIPSWithDiscriminator")
_NONE_OF_LOSSES = ("Identity", "DummyLoss")
_FIRST_STAGE = "first_stage_config"
_RANDOMLY_CROPPED = ("ImageNetTrain", "FacesHQTrain")  # unless they are told otherwise
_HERE: dict[str, Sequence[Any]] = {
    "model.ddconfig.in_channels": (3,), "model.ddconfig.out_ch": (3,), "model.lossconfig.disc_in_channels": (3,),
}  # fmt: skip
_CAP = 1e4  # of the adaptive weight
_SEED, _EPOCHS, _ENDLESS = 23, 1000, 10**9  # defaults of main.py, and of Lightning's trainer; no end by epochs


def autoencoder_of(config: Section) -> tuple[dict[str, Any], list[str]]:
    """The configuration without `params`, and with numbers for texts such as 1e-6, which YAML 1.1 takes for words; of a
    latent diffusion, the autoencoder alone. Beside it what is to be said of that.

    Raises:
        ValueError: one line, if it is of another model.
    """
    flat = _flat(config)
    model = checked(flat.get("model"), "model")
    kind = _name(model)
    if _FIRST_STAGE in model:
        flat, whole = {"model": checked(model[_FIRST_STAGE], _FIRST_STAGE)}, kind
        model, kind = flat["model"], _name(flat["model"])
        said = [f"model.target {whole}: its {_FIRST_STAGE} is read, and nothing of what it trains on the latents"]
    else:
        said = []
    if kind not in _MODELS:
        hint = nearest(kind, _MODELS)
        raise ValueError(f"model.target {short(model.get('target'))}: it is none of {', '.join(_MODELS)}{hint}")
    return flat, said


def known_keys(rows: Sequence[Row]) -> Known:
    """What `without_counterpart` is told of the keys; ``rows``: those about train_vqgan.py."""
    return {**known_of(rows, _HERE), "data.train.*": ((), "of its dataset, in whose place --image_folder stands")}


def processes_of(config: Section) -> int:
    """As many as the GPUs that the options of the trainer name, by their number or as a list; 1 if they name none."""
    trainer = part_of(config, "lightning", "trainer")

    def count(value: Any) -> int:
        is_number = isinstance(value, int) or (isinstance(value, str) and value.isdecimal())
        return max(int(value) if is_number else len(str(value).strip("[],").split(",")), 1)

    return count(trainer.get("gpus", trainer.get("devices", 1))) * count(trainer.get("num_nodes", 1))


def flags_of_yaml(config: Section, processes: int) -> tuple[Flags, list[str]]:
    """The flags, and what is to be said of them.

    Args:
        config: As `autoencoder_of` gives it.
        processes: How many will train together.

    Raises:
        ValueError: one line that names the key whose value is missing or cannot be used.
    """
    model, trainer = part_of(config, "model"), part_of(config, "lightning", "trainer")
    shape, said = _shape(model, part_of(config, "data", "train"))
    losses, more = _losses(model, shape["image_size"][1], trainer)
    pictures = part_of(config, "lightning", "callbacks", "image_logger")
    steps = None if trainer.get("max_steps") == -1 else trainer.get("max_steps")
    flags: Flags = {
        **shape, **losses, **_batch(model, part_of(config, "data"), trainer, processes),
        "init_from": ("model.ckpt_path", model.get("ckpt_path")), "seed": ("seed", _SEED),
        "betas": ("model.target", "0.5,0.9"), "penalty_weight": ("model.lossconfig", 0.0),
        "ema_decay": ("model.use_ema", 0.9999 if model.get("use_ema") else 0.0),
        "num_workers": ("data.num_workers", part_of(config, "data").get("num_workers")),
        "max_steps": ("lightning.trainer.max_steps", steps),
        "epochs": ("lightning.trainer.max_epochs", trainer.get("max_epochs") or (_ENDLESS if steps else _EPOCHS)),
        "precision": ("lightning.trainer.precision", _precision(trainer.get("precision", 32))),
        "sample_every_n_steps": ("lightning.callbacks.image_logger.batch_frequency", pictures.get("batch_frequency")),
        "num_images_save": ("lightning.callbacks.image_logger.max_images", pictures.get("max_images")),
    }  # fmt: skip
    if "learning_rate" in flags:
        rate, batch = model["base_learning_rate"], flags["batch_size"][1]
        said.append(
            f"learning_rate {flags['learning_rate'][1]:g} is base_learning_rate {rate:g} x batch_size {batch:g}, as in "
            "main.py there, unless it is told --scale_lr False"
        )
    else:
        said.append("data.batch_size or model.base_learning_rate is not said: give --batch_size and --learning_rate")
    return flags, said + more


def _shape(model: Section, data: Section) -> tuple[Flags, list[str]]:
    """Flags of the model and of its images, and what is to be said of them."""
    layers, said = checked(model.get("ddconfig"), "model.ddconfig"), []
    kind, where = _name(model), "model.ddconfig."
    for name in ("ch", "ch_mult", "num_res_blocks", "attn_resolutions", "z_channels", "resolution"):
        if layers.get(name) is None:
            raise ValueError(f"{where}{name} is missing, without which there is no model")
    resolution, multiples = number(layers["resolution"], f"{where}resolution"), layers["ch_mult"]
    if not isinstance(multiples, list) or not isinstance(layers["attn_resolutions"], list):
        raise ValueError(f"{where}ch_mult and attn_resolutions: give lists of numbers")
    sides = {resolution // 2**level: level for level in range(len(multiples))}
    attended = sorted(sides[side] for side in layers["attn_resolutions"] if side in sides)
    if other := [side for side in layers["attn_resolutions"] if side not in sides]:
        said.append(f"{where}attn_resolutions {short(other)}: no level has this side, so there is no attention at it")
    if kind == _GUMBEL:
        said.append(
            "model.target GumbelVQ: there is no Gumbel quantizer; a vector quantizer of as many codes is written"
        )
    data = {**data, **part_of(data, "config")}
    size, side = data.get("size"), data.get("crop_size") or data.get("size") or resolution
    if size not in (None, side):
        said.append(f"data.train.size {short(size)}: the shorter side is resized to {side}, not to it, before the crop")
    is_random = data.get("random_crop", _name(data) in _RANDOMLY_CROPPED)
    is_kl, code = kind == _KL, model.get("embed_dim")
    if code is None or (model.get("n_embed") is None and not is_kl):
        raise ValueError("model.embed_dim, and for codes model.n_embed, are missing, without which there is no model")
    of_codes: Flags = {
        "codebook_size": ("model.n_embed", model.get("n_embed")), "codebook_dim": ("model.embed_dim", code),
        "vq_decay": ("model.target", 0.99),  # of EMAVectorQuantizer there; others have no averages
    }  # fmt: skip
    crop, quantizer = "random" if is_random else "center", "kl" if is_kl else "vq"
    flags: Flags = {
        "image_size": ("data.train.size", side), "crop": ("data.train.random_crop", crop),
        "body": ("model.target", "taming"), "dim": (f"{where}ch", layers["ch"]),
        "ch_mult": (f"{where}ch_mult", multiples),
        "num_resnet_blocks": (f"{where}num_res_blocks", [layers["num_res_blocks"]]),
        "attention_levels": (f"{where}attn_resolutions", attended or None),
        "z_channels": (f"{where}z_channels", layers["z_channels"]), "quantizer": ("model.target", quantizer),
        **({"latent_dim": ("model.embed_dim", code)} if is_kl else of_codes),
    }  # fmt: skip
    return flags, said


def _losses(model: Section, side: float, trainer: Section) -> tuple[Flags, list[str]]:
    """Flags of the losses of generator and discriminator and of the norms to which their gradients are clipped, and
    what is to be said of them. ``side``: of the images."""
    loss, at = checked(model.get("lossconfig"), "model.lossconfig"), "model.lossconfig."
    kind, said = _name(loss), []
    if kind not in _LOSSES:
        of_none = "it says no losses" if kind in _NONE_OF_LOSSES or not kind else f"no {' or '.join(_LOSSES)}"
        return {}, [f"{at}target {kind or 'missing'}: {of_none}; give the flags of losses, or keep their defaults"]

    def value(name: str, default: float) -> float:
        return number(loss.get(name, default), at + name)

    is_squared, is_kl = loss.get("pixel_loss") == "l2", _name(model) == _KL
    range_factor = 0.25 if is_squared else 0.5
    perceptual, factor = value("perceptual_weight", 1.0), value("disc_factor", 1.0)
    scale = value("disc_weight", 1.0) * factor
    colours = 3 * side**2
    flags: Flags = {
        "l2_recon_loss": (f"{at}pixel_loss", is_squared),
        "perceptual": (f"{at}perceptual_weight", "lpips" if perceptual else "none"),
        "perceptual_loss_weight": (f"{at}perceptual_weight", perceptual * range_factor),
        "gan_loss": (f"{at}disc_loss", "bce" if loss.get("disc_loss") == "vanilla" else "hinge"),
        "gan_weight": (f"{at}disc_weight", "adaptive"), "gan_weight_scale": (f"{at}disc_weight", scale),
        "discr_dim": (f"{at}disc_ndf", loss.get("disc_ndf", 64)),
        "discr_layers": (f"{at}disc_num_layers", loss.get("disc_num_layers", 3)),
        "discr_start_step": (f"{at}disc_start", value("disc_start", 0)),
    }  # fmt: skip
    if is_kl:
        fixed = float(f"{_CAP * scale * range_factor / colours:.3g}")
        flags |= {"gan_weight": (f"{at}disc_weight", fixed), "gan_weight_scale": (f"{at}disc_weight", 1.0)}
        flags["kl_loss_weight"] = (f"{at}kl_weight", value("kl_weight", 1.0) * range_factor)
        said.append(
            f"{at}disc_weight {scale:g}: errors are summed over {colours:,.0f} colours there, and the adaptive weight "
            f"of at most {_CAP:g} is taken to be at this limit: gan_weight {fixed:g} of a mean"
        )
    else:
        weight = value("codebook_weight", 1.0) * range_factor
        flags["commitment_loss_weight"] = (f"{at}codebook_weight", weight)
    if loss.get("disc_loss") == "vanilla":
        said.append(f"{at}disc_loss vanilla: written as bce, whose loss of the generator is another one, too")
    if norm := number(trainer.get("gradient_clip_val") or 0, "lightning.trainer.gradient_clip_val"):
        clip = norm * range_factor / (colours if is_kl else 1)
        flags["max_grad_norm"] = ("lightning.trainer.gradient_clip_val", clip)
        # There, the discriminator's loss is half of ours.
        flags["discr_max_grad_norm"] = ("lightning.trainer.gradient_clip_val", 2 * norm / (factor or 1))
    return flags, said


def _batch(model: Section, data: Section, trainer: Section, processes: int) -> Flags:
    """Flags of the batch and of the learning rates that follow from it; none that are not said."""
    parts = number(trainer.get("accumulate_grad_batches", 1), "lightning.trainer.accumulate_grad_batches")
    flags: Flags = {"grad_accum_steps": ("lightning.trainer.accumulate_grad_batches", parts)}
    each, rate = data.get("batch_size"), model.get("base_learning_rate")
    if each is None:
        return flags
    batch = number(each, "data.batch_size") * parts * processes
    flags["batch_size"] = ("data.batch_size", batch)
    if rate is None:
        return flags
    scaled = number(rate, "model.base_learning_rate") * batch
    factor = number(model.get("lr_g_factor", 1.0), "model.lr_g_factor")
    flags["learning_rate"] = ("model.base_learning_rate", float(f"{scaled * factor:.6g}"))
    if factor != 1:
        flags["discr_learning_rate"] = ("model.lr_g_factor", float(f"{scaled:.6g}"))
    return flags


def _precision(value: Any) -> str | None:
    """The flag's value for Lightning's; None for fp32."""
    bits = str(value)
    return "bf16" if bits.startswith("bf16") else "fp16" if bits.startswith("16") else None


def _name(part: Mapping[str, Any]) -> str:
    """The class that a part names, without its package."""
    return str(part.get("target") or "").rpartition(".")[2]


def _flat(value: Any) -> Any:
    if isinstance(value, str):
        if "${" in value:
            raise ValueError(f"{short(value)} stands for another value: write that in its place")
        try:
            return float(value) if "e" in value.lower() and math.isfinite(float(value)) else value
        except ValueError:
            return value
    if isinstance(value, list):
        return [_flat(each) for each in value]
    if not isinstance(value, dict):
        return value
    parts: Iterator[tuple[Any, Any]] = ((key, _flat(each)) for key, each in value.items())
    flat: dict[Any, Any] = {}
    for key, each in parts:
        flat |= each if key == "params" and isinstance(each, dict) else {key: each}
    return flat
