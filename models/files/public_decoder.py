"""Whole decoders of DALLE2-pytorch 1.15.6 as `Decoder`, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.files.reading import check_regular

from ..decoder import Decoder
from ..decoder_config import DecoderConfig
from ..unets.config import UnetConfig
from .archive import mentions
from .building import build_on_meta, check_arguments
from .dalle2 import CONFIG_FILE, build_unets, read_public, save_public
from .dalle2_config import check_overruled, decoder_part, settings_of, unet_arguments
from .description import describe_weights
from .errors import one_line
from .public_schedules import noise_arguments


def is_public_decoder(path: Path) -> bool:
    """Whether a .pt or .pth names weights of Unets, or has a decoder_config.json beside it. Raises ValueError, in one
    line, if it is no regular file."""
    return (check_regular(path).parent / CONFIG_FILE).is_file() or mentions(path, b"unets.")


def load_public_decoder(paths: Sequence[Path], *, weights: str = "best") -> Decoder:
    """The decoder in one or several public files, in eval mode; arguments as for `dalle2.read_public`.

    Raises:
        ValueError: one line, if a file is missing, damaged, hostile, of something else, or has what a `Decoder` lacks.
    """
    found = read_public(paths, weights=weights)
    unets = build_unets(found)
    try:
        noise = noise_arguments(found.settings, found.tables)
    except ValueError as error:
        raise ValueError(f"{paths[0]}: {error}") from None
    return Decoder(_around([unet.spec for unet in unets], found.settings, **noise)).with_unets(unets).eval()


def configured_decoder(config: Mapping[str, Any], width: int = 512) -> tuple[Decoder, dict[str, Any]]:
    """The decoder that a training configuration describes, without weights, and what it says around the unets.

    Args:
        config: The configuration, or its part about the decoder. Keys that are unknown there are left out.
        width: Of image embeddings and text encodings, where it does not say it.

    Returns:
        The decoder, on the meta device; and the settings, see `dalle2_config.settings_of`.

    Raises:
        ValueError: one line, if there is no such decoder.
    """
    decoder = decoder_part(config)
    try:
        settings = settings_of([decoder] * len(decoder["unets"]))
        unets = [unet_arguments(decoder, index) for index in range(len(decoder["unets"]))]
        for index, arguments in enumerate(unets):
            check_overruled(decoder, index, arguments)
        widths: dict[str, Any] = {"image_embed_dim": width, "text_embed_dim": width}
        for arguments in (settings, *unets):
            check_arguments(arguments)
        made = [UnetConfig(**widths | arguments) for arguments in unets]
        return build_on_meta(lambda: Decoder(_around(made, settings))), settings
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ValueError(one_line(error)) from None


def _around(unets: Sequence[UnetConfig], said: Mapping[str, Any], **noise: Any) -> DecoderConfig:
    """That of a decoder of these Unets, of what `dalle2_config.settings_of` gives, and of this noise."""
    noisy, blurred = any(said["use_noise_for_lowres_cond"]), any(said["use_blur_for_lowres_cond"][1:])
    return DecoderConfig.around(
        unets, image_sizes=said["image_sizes"], noise_schedule=said["beta_schedule"], objective=said["objective"],
        learned_variance=[int(is_learned) for is_learned in said["learned_variance"]], timesteps=said["timesteps"],
        lowres_condition="noise" if noisy else "blur" if blurred else "none",
        lowres_noise_level=said["lowres_noise_sample_level"], **{"zero_terminal_snr": False, **noise},
    )  # fmt: skip


def save_public_decoder(decoder: Decoder, path: Path) -> None:
    """Write {"version", "config", "model"}, which the public package loads strictly; the file appears whole or not at
    all. Raises ValueError, in one line, if the public package has no such decoder."""
    config, numbers = decoder.config, range(len(decoder.unets))
    schedules = [decoder.schedule(index) for index in numbers]
    if any(schedule.is_flow for schedule in schedules):
        raise ValueError("DALLE2-pytorch has no flow schedule, on which this decoder was trained")
    kind = config["lowres_condition"]
    settings = {
        "image_sizes": decoder.image_sizes, "timesteps": config["timesteps"],
        "beta_schedule": config["noise_schedule"], "objective": decoder.objectives,
        "learned_variance": [bool(is_learned) for is_learned in config["learned_variance"]],
        "use_noise_for_lowres_cond": [index > 0 and kind == "noise" for index in numbers],
        "use_blur_for_lowres_cond": [index > 0 and kind == "blur" for index in numbers],
        "lowres_noise_sample_level": config["lowres_noise_level"],
    }  # fmt: skip
    betas = [schedule.betas.cpu() for schedule in schedules]
    save_public(path, [decoder.unet(index) for index in numbers], settings, betas)


def describe_public_decoder(path: Path) -> dict[str, Any]:
    """Facts about a public file. Errors: see `dalle2.read_public`."""
    found = read_public([path])
    weights = {f"unets.{number}.{name}": t for number, (_, of) in enumerate(found.unets) for name, t in of.items()}
    arguments = {**found.settings, "unets": [arguments for arguments, _ in found.unets]}
    facts = {"kind": "DALLE2-pytorch file", "model": "Decoder", "arguments": arguments, **describe_weights(weights)}
    return {**facts, "bytes": {path.name: path.stat().st_size}}
