"""Parts of models by themselves: LFQ's entropy, what gradient checkpointing costs and saves, and sampling."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

import train_decoder
from data.demo import WIDTH
from models.configs import QuantizerConfig
from models.decoder_config import Sampling
from models.quantizers import make_quantizer
from training.generation import noise_of

from .jobs import GIVE_MEMORY_BACK, PYTHON, JobFailed, measure
from .report import Row
from .training import above_mib, peak_mib

_BITS, _VECTORS, _PICTURES = 16, 2048, 4
_DEMO = (
    "--config",
    "configs/decoder/demo.yaml",
    "--sample_timesteps",
    "1",
    "--num_images_save",
    "1",
    "--random_crop_sizes",
    "0",
)  # fmt: skip  (whole pictures: activations take more memory than PyTorch itself)


def parts(rounds: int) -> Iterator[Row]:
    """Ours over the plain way."""
    yield from _entropy(rounds)
    yield from _checkpointing(rounds)
    yield from _sampling(rounds)


def _entropy(rounds: int) -> Iterator[Row]:
    """Forward and backward of LFQ's entropy for a codebook of 2^16."""
    z = torch.randn(1, _BITS, _VECTORS, 1) * 0.1
    quantizer = make_quantizer(QuantizerConfig(codebook_size=2**_BITS))
    signs = torch.tensor([[1.0 if code >> bit & 1 else -1.0 for bit in range(_BITS)] for code in range(2**_BITS)])

    def factored() -> None:
        x = z.clone().requires_grad_()
        quantizer(x).losses["entropy"].backward()
        quantizer.after_update(0, 0)

    def softmax() -> None:
        x = z.clone().requires_grad_()
        log_p = (200 * x[0, :, :, 0].T @ signs.T).log_softmax(1)
        p = log_p.exp()
        mean = p.mean(0)
        (-(p * log_p).sum(1).mean() + (mean * mean.clamp_min(1e-20).log()).sum()).backward()

    note = f"over the softmax of {_VECTORS} vectors x 2^{_BITS} codes"
    yield Row("entropy loss of LFQ, 2^16 codes", "seconds", *_in_turn(rounds, factored, softmax), note=note)


def _checkpointing(rounds: int) -> Iterator[Row]:
    """The demonstration of train_decoder.py with --gradient_checkpointing over that without."""
    sides = [[*_DEMO, "--gradient_checkpointing"], _DEMO]
    try:
        with_, without = (
            measure(PYTHON, ["script"], flags, script="train_decoder", rounds=rounds, turns=1, updates=3,
                    environment=GIVE_MEMORY_BACK)["script"] for flags in sides
        )  # fmt: skip
    except JobFailed as error:
        yield Row("--gradient_checkpointing", "samples/s", note=str(error))
        return
    speeds = (each["samples_per_second"] for each in (with_, without))
    yield Row("--gradient_checkpointing", "samples/s", *speeds, note="over that without, not in turn")
    memory = [each["memory_bytes"] for each in (with_, without)]
    note = " and ".join(above_mib(each, "updates") for each in memory) + " of them above the imports"
    yield Row("... peak memory", "MiB", *([peak_mib(each)] for each in memory), note=note)


def _sampling(rounds: int) -> Iterator[Row]:
    """The same conditions and the same first noise, on the demonstration's Unets before training."""
    args = train_decoder.build_parser().parse(_DEMO)
    model = train_decoder.build_model(args, {"image_embed": WIDTH, "text_encodings": None}).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    conditions = {"image_embed": torch.randn(_PICTURES, WIDTH, device=model.device)}

    def draw(name: str, steps: int) -> None:
        noise, sampling = (
            noise_of(0, range(_PICTURES), model.device),
            Sampling(name, [steps], cond_scale=args.cond_scale),
        )
        model.sample(conditions, noise, sampling, batch=_PICTURES).cpu()  # waits for the device

    times = _in_turn(rounds, lambda: draw("dpmpp_2m", 20), lambda: draw("ddim", 250))
    note = f"over 250 steps of ddim; {_PICTURES} pictures, two Unets, the first one guided"
    yield Row("sampling, 20 steps of dpmpp_2m", "seconds", *times, note=note)


def _in_turn(rounds: int, *runs: Callable[[], None]) -> list[list[float]]:
    """Seconds of each, by round, after one that does not count."""
    seconds: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 1):
        for run, found in zip(runs, seconds, strict=True):
            began = time.perf_counter()
            run()
            if number:
                found.append(time.perf_counter() - began)
    return seconds
