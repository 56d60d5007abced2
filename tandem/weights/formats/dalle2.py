"""Decoders of DALLE2-pytorch 1.15.6 as `Decoder`, and back.

Three layouts are read: {"version", "config", "model"}, as LAION published; a trainer's checkpoint, which has moving
averages too; and a plain state dict beside a decoder_config.json.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.config.models.decoder import DecoderConfig, UnetConfig
from tandem.io.archive import check_sizes, has_weight_name
from tandem.io.reading import check_regular, read_json
from tandem.io.weights import on_cpu, read_content, save_pickled
from tandem.models.building import check_arguments, plain_values
from tandem.models.diffusion.decoder import Decoder
from tandem.models.diffusion.schedule import Schedule
from tandem.models.diffusion.unet import IMAGE_TOKENS

from .dalle2_config import decoder_config, decoder_part, public_config, unsupported_options

_VERSION, _CONFIG_FILE = "1.15.6", "decoder_config.json"
_RELATIVE_TOLERANCE = 1e-3  # of alphas_cumprod, alpha^2 here

_UNET_KEY = re.compile(r"unets\.(\d{1,4})\.(.+)", re.DOTALL)
_SCHEDULE_KEY = re.compile(r"noise_schedulers\.(\d{1,4})\.alphas_cumprod")
_EMA_KEY = re.compile(r"(\d{1,4})\.ema_model\.(.+)", re.DOTALL)
# In public names a number stands for a part of a level, and each wrapper of an attention adds ".fn".
_PARTS = {
    "downs": ("before", "first", "blocks", "attention", "after"),
    "ups": ("first", "blocks", "attention", "after"),
}
_SELF_ATTENTION = re.compile(r"((?:downs|ups)\.\d+\.attention|mid_attn)\.")
# In public models these weights include our factor image_embed_scale, which is 1 in a model read from such a file.
_SCALED_WEIGHTS = ("image_to_tokens.0.weight", "to_image_hiddens.0.weight")


def is_public_decoder(path: Path) -> bool:
    """Whether a .pt or .pth holds names of weights of Unets, or a decoder_config.json is beside it. Raises ValueError,
    in one line, if it is no regular file."""
    return (check_regular(path).parent / _CONFIG_FILE).is_file() or has_weight_name(path, b"unets.")


def save_public_decoder(decoder: Decoder, path: Path) -> None:
    """Write {"version", "config", "model"}, which the public package loads strictly; the file appears whole or not at
    all. Raises ValueError, in one line, if the public package has no such decoder."""
    config = public_config(DecoderConfig(**decoder.config))
    content = {"version": _VERSION, "config": config, "model": on_cpu(public_state(decoder))}
    save_pickled(content, path)


def public_state(decoder: Decoder) -> dict[str, Tensor]:
    """The state dict of a decoder, fp32, for ``Decoder.load_state_dict`` of DALLE2-pytorch."""
    state: dict[str, Tensor] = {}
    for index in range(len(decoder.unets)):
        unet = decoder.unet(index)
        weights, spec = unet.state_dict(), unet.spec
        for name, tensor in weights.items():
            tensor = tensor.detach().float()
            if _SELF_ATTENTION.sub("", name) == "to_q.weight":
                tensor = tensor * spec.attn_dim_head**0.5
            if name in _SCALED_WEIGHTS:
                tensor = tensor * spec.image_embed_scale
            state[f"unets.{index}.{_public_name(name, weights)}"] = tensor
        state |= {f"unets.{index}.{name}": tensor for name, tensor in _unused_tensors(spec).items()}
        state |= schedule_tensors(f"noise_schedulers.{index}", decoder.schedules[index].betas)
        if spec.lowres_noise_cond and (lowres := decoder.lowres_schedule()):
            state |= schedule_tensors(f"lowres_conds.{index}.noise_scheduler", lowres.betas)
    return state


def schedule_tensors(prefix: str, betas: Tensor) -> dict[str, Tensor]:
    """The 13 tensors of a public noise scheduler (Ho et al. 2020, equations 4 to 7), fp32 (T,) and computed in fp64.

    Args:
        prefix: Prefix of their names.
        betas: The variances beta (T,) of the schedule.
    """
    betas = betas.detach().cpu().double()
    alphas = torch.cumprod(1 - betas, dim=0)
    previous = torch.cat([torch.ones(1, dtype=alphas.dtype), alphas[:-1]])
    variance = betas * (1 - previous) / (1 - alphas)
    tensors = {
        "betas": betas,
        "alphas_cumprod": alphas,
        "alphas_cumprod_prev": previous,
        "sqrt_alphas_cumprod": alphas.sqrt(),
        "sqrt_one_minus_alphas_cumprod": (1 - alphas).sqrt(),
        "log_one_minus_alphas_cumprod": (1 - alphas).log(),
        "sqrt_recip_alphas_cumprod": alphas.rsqrt(),
        "sqrt_recipm1_alphas_cumprod": (1 / alphas - 1).sqrt(),
        "posterior_variance": variance,
        "posterior_log_variance_clipped": variance.clamp_min(1e-20).log(),
        "posterior_mean_coef1": betas * previous.sqrt() / (1 - alphas),
        "posterior_mean_coef2": (1 - previous) * (1 - betas).sqrt() / (1 - alphas),
        "p2_loss_weight": torch.ones_like(betas),
    }
    return {f"{prefix}.{name}": tensor.float() for name, tensor in tensors.items()}


def _unused_tensors(unet: UnetConfig) -> dict[str, Tensor]:
    """Parameters that a public unet of this configuration has and does not use."""
    cond_dim, unused = unet.cond_dim, dict[str, Tensor]()
    if not unet.image_embed_dim:
        unused = {"null_image_embed": torch.zeros(1, IMAGE_TOKENS, cond_dim)}
        unused["null_image_hiddens"] = torch.zeros(1, 4 * unet.dim)
    if not unet.text_embed_dim:
        unused["null_text_embed"] = torch.zeros(1, unet.max_text_len, cond_dim)
    if len(unet.dim_mults) == 1:
        unused |= {"norm_cond.weight": torch.ones(cond_dim), "norm_cond.bias": torch.zeros(cond_dim)}
    return unused


def _public_name(name: str, weights: Mapping[str, Tensor]) -> str:
    """The public name of a weight of the `Unet` with this state dict ``weights``."""
    if match := _SELF_ATTENTION.match(name):
        is_linear = f"{match[0]}to_qkv.weight" in weights
        name = f"{match[0]}{'fn' if is_linear else 'fn.fn'}.{name[match.end() :]}"
    return re.sub(r"^(downs|ups)\.(\d+)\.(\w+)", lambda m: f"{m[1]}.{m[2]}.{_PARTS[m[1]].index(m[3])}", name)


def _our_name(name: str) -> str:
    """The name in a `Unet` of a public weight. Before 1.15, cross-attention also had an ".fn"."""

    def rename_part(match: re.Match[str]) -> str:
        parts, number = _PARTS[match[1]], int(match[3])
        return f"{match[1]}.{match[2]}.{parts[number]}." if number < len(parts) else match[0]

    return re.sub(r"^(downs|ups)\.(\d+)\.(\d)\.", rename_part, re.sub(r"(\.fn)+(?=\.)", "", name))


def read_public_decoder(path: Path, weights: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments of the `Decoder` in a public file, and its weights in fp32, without unused ones. The public
    self-attention divides by sqrt(attn_dim_head) twice; the second factor is multiplied into the weights of queries.

    Args:
        weights: Of checkpoints: their moving average ("ema"), as trained ("online"), or the average if there is one
            ("best").

    Raises:
        ValueError, or another of `READ_ERRORS` of tandem/io/reading.py, or RuntimeError: the file is missing, damaged,
            hostile, or of a model that no `Decoder` equals.
    """
    content = read_content(path)
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not a dict")
    averages, model = content.get("ema"), content.get("model", content)
    if weights == "ema" and not averages:
        raise ValueError("it holds no moving average of the weights")
    is_average = bool(averages) and weights != "online"
    unets = _split_by_unet(averages, _EMA_KEY) if is_average else _split_by_unet(model, _UNET_KEY)
    tables = _schedule_tables(model)
    check_sizes(path, [*tables.values(), *(tensor for unet in unets.values() for tensor in unet.values())])
    decoder = decoder_part(content["config"] if "config" in content else _read_config_beside(path))
    list(plain_values("its configuration", decoder))  # raises ValueError for a hostile one
    if max(unets) >= len(decoder["unets"]):
        raise ValueError(f"it holds unet {max(unets) + 1}, and its configuration has {len(decoder['unets'])}")
    if missing := sorted(set(range(max(unets))) - set(unets)):
        raise ValueError(f"it holds unet {max(unets) + 1} and no unet {missing[0] + 1}, whose pictures it enlarges")
    if option := next(unsupported_options(decoder), None):
        raise ValueError(option)
    config = decoder_config(decoder, len(unets))
    tensors = {f"{index}.{name}": unet[name] for index, unet in unets.items() for name in unet}
    check_arguments(config.to_dict(), tensors)
    state: dict[str, Tensor] = {}
    for index, spec in enumerate(config.unets()):
        with torch.device("meta"):
            unused = _unused_tensors(spec)
        for public_name, tensor in unets[index].items():
            if (name := _our_name(public_name)) not in unused:
                tensor = tensor.float() if tensor.is_floating_point() else tensor
                is_query = _SELF_ATTENTION.sub("", name) == "to_q.weight"
                state[f"unets.{index}.{name}"] = tensor * spec.attn_dim_head**-0.5 if is_query else tensor
    config = dataclasses.replace(config, zero_terminal_snr=_ends_at_zero_snr(config, tables))
    return config.to_dict(), state


def _ends_at_zero_snr(config: DecoderConfig, tables: Mapping[int, Tensor]) -> bool:
    """Whether the last level is noise alone, which follows from the tables of noise levels, not from the names of the
    schedules."""
    for index, table in tables.items():
        if len(table) != config.timesteps:
            raise ValueError(f"unet {index + 1} has {len(table)} noise levels, its configuration {config.timesteps}")
    pairs = [(name, tables[index]) for index, name in enumerate(config.noise_schedule) if index in tables]
    for ends_at_zero_snr in (False, True):
        if all(_matches(Schedule.from_name(name, len(x), zero_terminal_snr=ends_at_zero_snr), x) for name, x in pairs):
            return ends_at_zero_snr
    names = ", ".join(dict.fromkeys(config.noise_schedule))
    raise ValueError(f"its noise levels are not those of its schedule {names}, with or without a last level of SNR 0")


def _matches(schedule: Schedule, table: Tensor) -> bool:
    limits = torch.finfo(table.dtype)
    tolerance = max(_RELATIVE_TOLERANCE, 4 * limits.eps)
    return torch.allclose(schedule.log_snr.sigmoid(), table.double(), rtol=tolerance, atol=limits.tiny)


def _read_config_beside(path: Path) -> dict[str, Any]:
    config_path = path.with_name(_CONFIG_FILE)
    if not config_path.exists():
        raise ValueError(f"it does not say what its unets are like, and there is no {config_path}")
    return read_json(config_path)


def _schedule_tables(model: Any) -> dict[int, Tensor]:
    """Index of a unet -> alpha^2 of its noise levels, (T,)."""
    tables = {}
    for name, table in model.items() if isinstance(model, dict) else ():
        if match := _SCHEDULE_KEY.fullmatch(str(name)):
            if not isinstance(table, Tensor) or table.ndim != 1 or not table.is_floating_point():
                raise ValueError(f"its {name} is no table of numbers")
            tables[int(match[1])] = table
    return tables


def _split_by_unet(state: Any, pattern: re.Pattern[str]) -> dict[int, dict[str, Tensor]]:
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise ValueError("its weights are no dict of names and tensors")
    unets: dict[int, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        if match := pattern.fullmatch(name):
            if not isinstance(tensor, Tensor):
                raise ValueError(f"its {name[:80]} is not a tensor")
            unets.setdefault(int(match[1]), {})[match[2]] = tensor
        elif name.startswith("vaes."):
            raise ValueError("its unets draw codes of a VQGAN; only unets that draw pixels can be read")
    if not unets:
        raise ValueError("it holds no weights of unets: their names begin with unets.0.")
    return unets
