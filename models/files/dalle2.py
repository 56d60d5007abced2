"""Decoders of DALLE2-pytorch 1.15.6: files of their unets, and the description of what is around them.

Three layouts are read: {"version", "config", "model"}, as LAION published; a trainer's checkpoint, which has moving
averages too; and a plain state dict beside a decoder_config.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.files.reading import DAMAGES, check_regular, read_json

from ..unet import Unet
from ..unets.config import UnetConfig
from .archive import Ignored, check_archive, check_sizes
from .building import build_with_weights, check_arguments, plain_values
from .dalle2_config import CROSS_ATTENTION, PUBLIC_VERSION, decoder_part, settings_of, training_config, unet_arguments
from .errors import one_line
from .public_schedules import schedule_tensors
from .writing import on_cpu, replacing

CONFIG_FILE = "decoder_config.json"
WEIGHTS = ("best", "ema", "online")
_DAMAGES: tuple[type[Exception], ...] = (*DAMAGES, RuntimeError)

# What older files pickle as their version: an object of packaging.version, whose make-up has changed over the years.
_IGNORED = frozenset((
    "packaging.version Version", "packaging.version _Version", "packaging._structures InfinityType",
    "packaging._structures NegativeInfinityType",
))  # fmt: skip

_OF_A_UNET = re.compile(r"unets\.(\d{1,4})\.(.+)", re.DOTALL)
_OF_A_SCHEDULE = re.compile(r"noise_schedulers\.(\d{1,4})\.alphas_cumprod")
_OF_AN_AVERAGE = re.compile(r"(\d{1,4})\.ema_model\.(.+)", re.DOTALL)
_QUERIES = re.compile(r".*fn\.fn\.to_q\.weight")  # of self-attention
_FROM_THE_EMBEDDING = ("image_to_tokens.0.weight", "to_image_hiddens.0.weight")


class PublicDecoder(NamedTuple):
    """What files of a decoder hold, in the terms of this package."""

    unets: list[tuple[dict[str, Any], dict[str, Tensor]]]
    """The fields of `UnetConfig` and the weights of each Unet, coarsest first."""
    settings: dict[str, Any]
    """Of the decoder around them: see `dalle2_config.settings_of`."""
    tables: list[Tensor | None]
    """alpha^2 (T,) of each unet's noise levels; None where a file has no such table."""


def read_public(
    paths: Sequence[Path], config: Path | None = None, *, weights: str = "best",
    numbers: Sequence[Sequence[int]] | None = None,
) -> PublicDecoder:  # fmt: skip
    """The unets in one or several public files; each file gives those that it holds.

    Args:
        paths: Files. What a file does not say about itself stands in the decoder_config.json beside it.
        config: That file, if it stands elsewhere; for all paths.
        weights: Of checkpoints: their moving average ("ema"), as trained ("online"), or the average if there is one.
        numbers: For each path, the numbers from 1 of the unets to take from it; None: all that it holds.

    Raises:
        ValueError: one line, if a file is missing, damaged, hostile or something else, or if the files do not fit one
            another.
    """
    if numbers is not None and len(numbers) != len(paths):
        raise ValueError(f"unet numbers are given for {len(numbers)} files, and there are {len(paths)}")
    found: dict[int, tuple[Path, dict[str, Any], dict[str, Tensor], Tensor | None]] = {}
    for place, path in enumerate(paths):
        decoder, held, tables = _read(path, config, weights)
        chosen = sorted(held) if numbers is None else [number - 1 for number in numbers[place]]
        for index in chosen:
            if index not in held:
                others = ", ".join(str(each + 1) for each in sorted(held))
                raise ValueError(f"{path} holds no unet {index + 1}; it holds {others}")
            if index in found:
                raise ValueError(f"unet {index + 1} is in {found[index][0]} and in {path}: say which to take from each")
            found[index] = path, decoder, held[index], tables.get(index)
    if missing := sorted(set(range(max(found, default=0))) - set(found)):
        raise ValueError(f"unet {missing[0] + 1} is in none of the files; give the file that holds it too")
    unets = []
    for index, (path, decoder, state, _) in sorted(found.items()):
        with _errors_of(path):
            arguments = unet_arguments(decoder, index)
            check_arguments(arguments, state)
            unets.append((arguments, from_public(arguments, state)))
    with _errors_of(paths[0]):
        settings = settings_of([decoder for _, (_, decoder, *_) in sorted(found.items())])
    return PublicDecoder(unets, settings, [table for _, (*_, table) in sorted(found.items())])


def build_unets(found: PublicDecoder) -> list[Unet]:
    """The unets of a public decoder, in eval mode.

    Raises:
        ValueError: one line, naming the first weight or argument that does not fit.
    """
    unets = []
    for number, (arguments, weights) in enumerate(found.unets, start=1):
        try:
            unets.append(build_with_weights(partial(Unet.made, arguments), weights).eval())
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"unet {number} is not as its configuration says: {one_line(error)}") from None
    return unets


def from_public(arguments: Mapping[str, Any], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a public unet in the form that `Unet` has for these arguments: fp32, without those that nothing uses,
    and with the second 1 / sqrt(attn_dim_head) of the public self-attention in its queries."""
    weights = {}
    scale = 1.0 if arguments.get("cosine_sim_self_attn") else arguments.get("attn_dim_head", 32) ** -0.5
    unused = _unused(arguments)
    for public_name, tensor in state.items():
        name = public_name.replace(".cross_attn.fn.", ".cross_attn.")  # so it was before 1.15
        if name not in unused:
            tensor = tensor.float() if tensor.is_floating_point() else tensor
            weights[name] = tensor * scale if _QUERIES.fullmatch(name) else tensor
    return weights


def to_public(unets: Sequence[Unet], betas: Sequence[Tensor] | None = None) -> dict[str, Tensor]:
    """The public state dict of a decoder of these unets, fp32, as ``Decoder.load_state_dict`` takes it.

    Args:
        betas: For each unet the variances beta (T,) of its schedule, fp64; without them the tensors of the schedules
            are left out, and only the unets can be loaded.

    Raises:
        ValueError: one line, if the public package has no such unets.
    """
    if betas is not None and len(betas) != len(unets):
        raise ValueError(f"schedules are given for {len(betas)} unets, and there are {len(unets)}")
    state: dict[str, Tensor] = {}
    for index, unet in enumerate(unets):
        check_is_public(unet.spec, index)
        state |= {f"unets.{index}.{name}": tensor for name, tensor in _public_weights(unet).items()}
    for index, unet in enumerate(unets if betas is not None else ()):
        state |= schedule_tensors(f"noise_schedulers.{index}", betas[index])  # type: ignore[index]
        if unet.spec.lowres_noise_cond:
            linear = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
            state |= schedule_tensors(f"lowres_conds.{index}.noise_scheduler", linear)
    return state


def save_public(path: Path, unets: Sequence[Unet], settings: Mapping[str, Any], betas: Sequence[Tensor]) -> None:
    """Write a file as LAION's, {"version", "config", "model"}; it appears whole or not at all.

    Args:
        settings: As `PublicDecoder.settings`; what they leave out is as usual there.

    Raises:
        ValueError: one line, if the public package has no such unets.
    """
    config = training_config([unet.config for unet in unets], settings)
    content = {"version": PUBLIC_VERSION, "config": config, "model": on_cpu(to_public(unets, betas))}
    with replacing(path) as unfinished:
        torch.save(content, unfinished)


def check_is_public(unet: UnetConfig, index: int) -> None:
    """Raise a ValueError of one line unless the public package has such a unet as number ``index``, from 0."""
    reasons = {
        f"its unets have {CROSS_ATTENTION} for cross_attn_heads and cross_attn_dim_head":
            (unet.cross_attn_heads, unet.cross_attn_dim_head) != CROSS_ATTENTION,
        "image_embed_dim must differ from cond_dim": unet.image_embed_dim == unet.cond_dim,
        "the first unet has no low-resolution image": index == 0 and unet.lowres_cond,
        "unets after the first have a low-resolution image": index > 0 and not unet.lowres_cond,
        "unets after the first have no image embedding": index > 0 and unet.cond_on_image_embeds,
        "the first unet has an image embedding if it has a text":
            index == 0 and unet.cond_on_text_encodings and not unet.cond_on_image_embeds,
        "channels_out must be channels or twice as many":
            unet.channels_out not in (unet.channels, 2 * unet.channels),
        "its unets do not know coordinates": unet.coordinates,
        "init_dim must be dim, and dim_mults begin with 1 without memory_efficient": not _has_public_widths(unet),
    }  # fmt: skip
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"DALLE2-pytorch has no such unet as number {index + 1}: {reason}")


def _has_public_widths(unet: UnetConfig) -> bool:
    if unet.init_dim != unet.dim:
        return False
    return bool(unet.memory_efficient or unet.dim_mults[0] == 1)


def _unused(arguments: Mapping[str, Any]) -> set[str]:
    """Public parameters that a public unet of these arguments has and does not use."""
    image = arguments.get("cond_on_image_embeds")
    unused = set() if image else {"null_image_embed", "null_image_hiddens"}
    if not arguments.get("add_image_embeds_to_time", True):
        unused.add("null_image_hiddens")
    if not arguments.get("cond_on_text_encodings"):
        unused.add("null_text_embed")
    if len(arguments.get("dim_mults", (1, 2, 4, 8))) == 1:
        unused |= {"norm_cond.weight", "norm_cond.bias"}
    return unused


def _public_weights(unet: Unet) -> dict[str, Tensor]:
    config = unet.spec
    state = {name: tensor.detach().float() for name, tensor in unet.state_dict().items()}
    for name in state:
        if _QUERIES.fullmatch(name) and not config.cosine_sim_self_attn:
            state[name] = state[name] * config.attn_dim_head**0.5
        if name in _FROM_THE_EMBEDDING:
            state[name] = state[name] * config.image_embed_scale
    cond_dim = config.cond_dim
    state.setdefault("null_image_embed", torch.zeros(1, config.num_image_tokens, cond_dim))
    state.setdefault("null_image_hiddens", torch.zeros(1, 4 * config.dim))
    state.setdefault("null_text_embed", torch.zeros(1, config.max_text_len, cond_dim))
    state.setdefault("norm_cond.weight", torch.ones(cond_dim))
    state.setdefault("norm_cond.bias", torch.zeros(cond_dim))
    return state


def _read(
    path: Path, config: Path | None, weights: str
) -> tuple[dict[str, Any], dict[int, dict[str, Tensor]], dict[int, Tensor]]:
    """The configuration of the decoder in a file, and by index its unets' weights and alpha^2 (T,) of their levels."""
    try:
        check_archive(check_regular(path), ignored=_IGNORED)
        with torch.serialization.safe_globals([(Ignored, name.replace(" ", ".")) for name in _IGNORED]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{path} holds no decoder that can be read without running code: {one_line(error)}") from None
    with _errors_of(path):
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not a dict")
        averages, model = content.get("ema"), content.get("model", content)
        if weights == "ema" and not averages:
            raise ValueError("it holds no moving average of the weights")
        if averages and weights != "online":
            state, pattern = averages, _OF_AN_AVERAGE
        else:
            state, pattern = model, _OF_A_UNET
        unets, tables = _by_unet(state, pattern), _tables(model)
        check_sizes(path, [*tables.values(), *(tensor for unet in unets.values() for tensor in unet.values())])
        if "config" in content and config is None:
            decoder = decoder_part(content["config"])
        else:
            decoder = decoder_part(_config_beside(path, config))
        for _ in plain_values("its configuration", decoder):
            pass
        if max(unets) >= len(decoder["unets"]):
            raise ValueError(f"it holds unet {max(unets) + 1}, and its configuration has {len(decoder['unets'])}")
    return decoder, unets, tables


def _config_beside(path: Path, config: Path | None) -> dict[str, Any]:
    where = config or path.with_name(CONFIG_FILE)
    if not where.exists():
        raise ValueError(f"it does not say what its unets are like, and there is no {where}")
    return read_json(where)


def _tables(model: Any) -> dict[int, Tensor]:
    tables = {}
    for name, table in model.items() if isinstance(model, dict) else ():
        if found := _OF_A_SCHEDULE.fullmatch(str(name)):
            if not isinstance(table, Tensor) or table.ndim != 1 or not table.is_floating_point():
                raise ValueError(f"its {name} is no table of numbers")
            tables[int(found[1])] = table
    return tables


def _by_unet(state: Any, pattern: re.Pattern[str]) -> dict[int, dict[str, Tensor]]:
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise ValueError("its weights are no dict of names")
    unets: dict[int, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        if found := pattern.fullmatch(name):
            if not isinstance(tensor, Tensor):
                raise ValueError(f"its {name[:80]} is not a tensor")
            unets.setdefault(int(found[1]), {})[found[2]] = tensor
        elif name.startswith("vaes."):
            raise ValueError("its unets work on the codes of a VQGAN, which this version does not")
    if not unets:
        raise ValueError("it holds no weights of unets: their names begin with unets.0.")
    return unets


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Turn every error of reading a public file into a ValueError of one line."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot read {error.filename or path}: {error.strerror or error}") from None
    except _DAMAGES as error:
        raise ValueError(f"{path} is not a decoder of DALLE2-pytorch: {one_line(error)}") from None
