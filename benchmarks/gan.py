"""Speed of the adversarial scripts against the usual two-optimizer loop, and of LFQ's entropy against a plain
softmax."""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import VQGAN, Discriminator, VideoDiscriminator, VideoTokenizer
from models.quantizers import make_quantizer
from training.objectives.adversarial import gradient_penalty, heads_of, zero_centred_penalty
from training.objectives.adversaries import AdversarialTraining, AdversarialWeights

from .bare import DTYPES
from .jobs import ROOT, one_process
from .report import Goal, Row
from .worker import peak_memory_bytes, reset_peak_memory

_GOAL = Goal("ratio", ">=", 0.97)
_BATCH, _SIDE, _UPDATES = 8, 64, 4  # four updates: one of them with the penalty
_VIDEO_BATCH, _FRAMES, _VIDEO_SIDE = 4, 9, 32
_BITS, _VECTORS = 16, 2048


def gan(rounds: int) -> Iterator[Row]:
    """Updates per second of both models, without data loading and logging."""
    sizes = {"train_vqgan.py": f"{_SIDE} px, batch {_BATCH}",
             "train_tokenizer.py": f"{_FRAMES} x {_VIDEO_SIDE} px, batch {_VIDEO_BATCH}"}  # fmt: skip
    for script, make in GAMES.items():
        ours, bare = _ours(on_device(make())), _bare(on_device(make()))
        ours(), bare()
        times = [[_times(run) for run in (ours, bare)] for _ in range(rounds)]
        mine, theirs = ([_UPDATES / wall for wall, _ in side] for side in zip(*times, strict=True))
        # The ratio in CPU time changes little if other programs run on the machine.
        cpu = statistics.median(of_bare / of_ours for (_, of_ours), (_, of_bare) in times)
        of_loop = "LFQ 2^10, adaptive weight, penalty at each 4th"
        note = f"over a bare loop; {of_loop}; {sizes[script]}; in CPU time {cpu:.3f}"
        yield Row(f"{script}, one process", "updates/s", mine, theirs, _GOAL, note=note)
        memory = [[_peak_mib(which, script) for which in SIDES] for _ in range(2)]
        mine, theirs = zip(*memory, strict=True)
        yield Row("... peak memory", "MiB", mine, theirs, note="over the bare loop's; the imports included")
    yield from _entropy(rounds)


def _entropy(rounds: int) -> Iterator[Row]:
    """Forward and backward of LFQ's entropy for a codebook of 2^16."""
    z = torch.randn(1, _BITS, _VECTORS, 1) * 0.1
    quantizer = make_quantizer("lfq", codebook_size=2**_BITS)
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

    factored(), softmax()
    times = [[_times(run)[0] for run in (factored, softmax)] for _ in range(rounds)]
    ours, theirs = zip(*times, strict=True)
    note = f"over the softmax of {_VECTORS} vectors x 2^{_BITS} codes"
    yield Row("entropy loss of LFQ, 2^16 codes", "seconds", ours, theirs, note=note)


@dataclass(frozen=True)
class _Game:
    """What a script trains against what.

    Args:
        real: Images or videos.
        given: Further arguments of the discriminator and of the penalty, one entry per sample each.
        last_layer: The generator's last convolution, and the function with which the script measures its gradient.
        error: Reconstruction loss.
        weights: The script's defaults.
    """

    generator: Any
    discriminator: Any
    real: Tensor
    given: dict[str, Tensor]
    last_layer: nn.Module
    last_layer_gradient: Callable[[Tensor, Tensor], Tensor]
    error: Callable[[Tensor, Tensor], Tensor]
    weights: AdversarialWeights


def _of_images() -> _Game:
    torch.manual_seed(0)
    generator = VQGAN(_SIDE, dim=32, num_layers=3, codebook_size=1024)
    images = torch.rand(_BATCH, 3, _SIDE, _SIDE)
    return _Game(
        generator,
        Discriminator(32, layers=2),
        images,
        {},
        generator.last_layer,
        generator.last_layer_gradient,
        F.l1_loss,
        AdversarialWeights(),
    )


def _of_videos() -> _Game:
    torch.manual_seed(0)
    layers = "residual,compress_space:64,residual,compress_time:64,residual,compress_time:96,residual,attend_time"
    generator = VideoTokenizer(_VIDEO_SIDE, layers, init_dim=32, patch_size=2, input_kernel=3, codebook_size=1024)
    videos = torch.rand(_VIDEO_BATCH, 3, _FRAMES, _VIDEO_SIDE, _VIDEO_SIDE)
    frames = torch.randint(0, _FRAMES, (_VIDEO_BATCH,))
    return _Game(
        generator, VideoDiscriminator(16, layers=2), videos, {"frames": frames}, generator.decoder.conv_out.conv,
        generator.last_layer_gradient, F.mse_loss, AdversarialWeights(penalty="zero_centred"),
    )  # fmt: skip


GAMES = {"train_vqgan.py": _of_images, "train_tokenizer.py": _of_videos}


def on_device(game: _Game) -> _Game:
    """The game on the GPU, if there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    game.generator.to(device), game.discriminator.to(device)
    given = {name: value.to(device) for name, value in game.given.items()}
    return replace(game, real=game.real.to(device), given=given)


def _ours(game: _Game, precision: str = "fp32") -> Callable[[], None]:
    backend = one_process(len(game.real), precision).__enter__()
    g, d = (
        backend.wrap(model, torch.optim.Adam(model.parameters(), lr=3e-4, fused=True), name=name)
        for model, name in ((game.generator, "generator"), (game.discriminator, "discriminator"))
    )

    def loss(fake: Tensor, real: Tensor, **given: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        value = game.error(fake, real)
        return value, {"recon_loss": value}

    adversaries = AdversarialTraining(
        g, d, backend, quantizer=game.generator.quantizer, seed=0, last_layer_gradient=game.last_layer_gradient,
        images=lambda micro: micro["real"], given=lambda micro, step: game.given, reconstruction_loss=loss,
        heads=getattr(game.discriminator, "num_heads", 1), weights=game.weights, log=lambda **losses: None,
    )  # fmt: skip
    batch = {"real": game.real}

    def updates() -> None:
        for step in range(_UPDATES):
            weights = {"commitment": 0.25, "entropy": 0.1}
            _, fakes, _ = adversaries.generator_step(batch, weights, step, is_adversarial=True)
            adversaries.discriminator_step(batch, fakes, step, with_penalty=step == 3)

    return updates


def _bare(game: _Game, precision: str = "fp32") -> Callable[[], None]:
    generator, discriminator, real, last = game.generator, game.discriminator, game.real, game.last_layer.weight
    g, d = (torch.optim.Adam(m.parameters(), lr=3e-4, fused=True) for m in (generator, discriminator))

    dtype = DTYPES.get(precision)

    def cast() -> torch.autocast:
        return torch.autocast(real.device.type, dtype=dtype, enabled=dtype is not None)

    def judge(images: Tensor) -> list[Tensor]:
        """Logits of each head."""
        with cast():
            return heads_of(discriminator(images, **game.given))

    def penalty(fake: Tensor) -> Tensor:  # in fp32, as in the script
        if game.weights.penalty == "one_centred":
            return gradient_penalty(lambda images: heads_of(discriminator(images, **game.given)), real)
        return zero_centred_penalty(
            lambda images: discriminator(images, **{name: value.repeat(2) for name, value in game.given.items()}),
            real, fake.detach(),
        )  # fmt: skip

    def updates() -> None:
        for step in range(_UPDATES):
            discriminator.requires_grad_(False)
            with cast():
                out: Any = generator(real)
            nll = game.error(out.reconstruction, real)
            deceive = sum(-logits.mean() for logits in judge(out.reconstruction))
            (of_nll,), (of_gan,) = (torch.autograd.grad(loss, last, retain_graph=True) for loss in (nll, deceive))
            weight = (of_nll.norm() / of_gan.norm().clamp_min(1e-4)).clamp_max(1e4).detach()
            codes = 0.25 * out.losses["commitment"] + 0.1 * out.losses["entropy"]
            g.zero_grad()
            (nll + weight * deceive + codes).backward()
            g.step()
            discriminator.requires_grad_(True)
            both = zip(judge(real), judge(out.reconstruction.detach()), strict=True)
            loss = sum(F.relu(1 - of_real).mean() + F.relu(1 + of_fake).mean() for of_real, of_fake in both)
            if step == 3:
                loss = loss + 10 * penalty(out.reconstruction)
            d.zero_grad()
            loss.backward()
            d.step()

    return updates


def _times(run: Callable[[], None]) -> tuple[float, float]:
    """Seconds on the wall's clock and of the CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu


SIDES = {"ours": _ours, "bare": _bare}


def _peak_mib(which: str, script: str) -> float:
    """Peak memory of a process that makes the updates a few times."""
    command = [sys.executable, "-m", "benchmarks.gan", which, script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["peak_mib"])


def main(which: str, script: str, precisions: str = "fp32", rounds: str = "1") -> None:
    """Measure one side alone, and print a JSON object per precision of a comma list. The bare loop has PyTorch's own
    settings, and in tf32 what one would add to them."""
    for precision in precisions.split(","):
        if which == "bare":
            torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        game = on_device(GAMES[script]())
        reset_peak_memory(game.real.device)
        updates = SIDES[which](game, precision)
        updates()
        seconds = [_times(updates)[0] for _ in range(int(rounds))]
        peak = peak_memory_bytes(game.real.device) / 2**20
        print(json.dumps({"peak_mib": peak, "updates_per_second": [_UPDATES / each for each in seconds]}), flush=True)
        del game, updates
        gc.collect()


if __name__ == "__main__":
    main(*sys.argv[1:])
