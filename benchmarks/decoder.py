"""Speed of train_decoder.py against a bare loop, what gradient checkpointing costs and saves, and seconds of sampling.

The model is that of the demonstration, configs/decoder/demo.yaml: 24 pixels, and crops of 16 of 48 pixels. One Unet is
its first one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
import yaml

import train_decoder
from data.images.scenes import WIDTH
from models.decoder import Decoder, Sampling
from training.flags.unets import PER_UNET
from training.generation import noise_of

from .jobs import GIVE_MEMORY_BACK, PYTHON, JobFailed, measure
from .report import Goal, Row
from .training import above_mib, against_bare_loops, peak_mib

_SPEED_GOAL = Goal("ratio", ">=", 0.95)
_DEMO = ("--config", "configs/decoder/demo.yaml", "--sample_timesteps", "1", "--num_images_save", "1")
# Whole pictures of the second Unet, so that activations take more memory than PyTorch itself.
_WHOLE_PICTURES = ("--random_crop_sizes", "0")
_PICTURES = 4


def decoder(rounds: int) -> Iterator[Row]:
    """Training in one process, and drawing pictures."""
    goals = {"fused_adam": _SPEED_GOAL, "same_noise": _SPEED_GOAL, "channels_last": None}
    of_script = partial(against_bare_loops, script="train_decoder", rounds=rounds, turns=5, updates=1)
    yield from of_script("train_decoder.py, one Unet", [*_DEMO, *first_unet()], goals)
    yield from of_script("train_decoder.py, two Unets", _DEMO, goals)
    recomputing = [*_DEMO, *_WHOLE_PICTURES, "--gradient_checkpointing"]
    yield from of_script("... --gradient_checkpointing, whole pictures", recomputing, {"fused_adam": None})
    yield from _memory()
    yield from _sampling(rounds)


def first_unet() -> list[str]:
    """Flags that leave the demonstration its first Unet alone."""
    said = yaml.safe_load(train_decoder.DEMO_CONFIG.read_text())
    of_first = {name: said[name][0] for name in ("image_sizes", *PER_UNET) if isinstance(said.get(name), list)}
    flags = [word for name, value in of_first.items() for word in (f"--{name}", str(value))]
    return [*flags, "--random_crop_sizes", "0"]  # the first Unet sees whole pictures


def _memory() -> Iterator[Row]:
    """Peak memory with gradient checkpointing over that without."""
    flags = [*_DEMO, *_WHOLE_PICTURES]
    try:
        with_, without = (_memory_bytes(said) for said in ([*flags, "--gradient_checkpointing"], flags))
    except JobFailed as error:
        yield Row("... peak memory", "MiB", note=str(error))
        return
    above = f"{above_mib(with_, 'updates')} and {above_mib(without, 'updates')} of them above the imports"
    note = f"over that without --gradient_checkpointing; {above}"
    yield Row("... peak memory", "MiB", [peak_mib(with_)], [peak_mib(without)], note=note)


def _memory_bytes(flags: Sequence[str]) -> Mapping[str, int]:
    found: Mapping[str, int] = measure(
        PYTHON, ["script"], flags, script="train_decoder", rounds=1, turns=3, updates=1, environment=GIVE_MEMORY_BACK
    )["script"]["memory_bytes"]
    return found


def _sampling(rounds: int) -> Iterator[Row]:
    """The same conditions and the same first noise, on the demonstration's Unets before training."""
    parser = train_decoder.build_parser()
    args = parser.parse(_DEMO)
    model = train_decoder.build_model(args, {"image_embed": WIDTH, "text_encodings": None}).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    conditions = {"image_embed": torch.randn(_PICTURES, WIDTH, device=model.device)}
    samplings = [Sampling(name, (n,), args.cond_scale) for name, n in (("dpmpp_2m", 20), ("ddim", 250))]
    _seconds(model, conditions, samplings[0])
    times = [[_seconds(model, conditions, sampling) for sampling in samplings] for _ in range(rounds)]
    few, many = zip(*times, strict=True)
    note = f"over 250 steps of ddim; {_PICTURES} pictures, two Unets, the first one guided"
    yield Row("sampling, 20 steps of dpmpp_2m", "seconds", few, many, note=note)


def _seconds(model: Decoder, conditions: Mapping[str, torch.Tensor], sampling: Sampling) -> float:
    began = time.perf_counter()
    noise = noise_of(0, range(_PICTURES), model.device)
    model.sample(conditions, noise, sampling, batch=_PICTURES).cpu()  # waits for the device
    return time.perf_counter() - began
