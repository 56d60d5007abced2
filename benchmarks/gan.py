"""Speed of train_vqgan.py against the usual two-optimizer loop, and of LFQ's entropy against a plain softmax."""

from __future__ import annotations

import copy
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from models import VQGAN, Discriminator
from models.quantizers import make_quantizer
from training.objectives.adversarial import gradient_penalty, last_layer_gradient
from training.objectives.adversaries import AdversarialTraining, AdversarialWeights

from .jobs import ROOT, one_process
from .report import Goal, Row

_GOAL = Goal("ratio", ">=", 0.97)
_BATCH, _SIDE, _UPDATES = 8, 64, 4  # four updates: one of them with the penalty
_BITS, _VECTORS = 16, 2048


def gan(rounds: int) -> Iterator[Row]:
    """Updates per second of both models, without data loading and logging."""
    ours, bare = _ours(), _bare()
    ours(), bare()
    speeds = [[_UPDATES / _seconds(run) for run in (ours, bare)] for _ in range(rounds)]
    mine, theirs = zip(*speeds, strict=True)
    note = f"LFQ 2^10, adaptive weight, penalty at each 4th; {_SIDE} px, batch {_BATCH}"
    yield Row("train_vqgan.py, one process", "updates/s", mine, theirs, _GOAL, note=f"over a bare loop; {note}")
    memory = [[_peak_mib(which) for which in ("ours", "bare")] for _ in range(2)]
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
    times = [[_seconds(run) for run in (factored, softmax)] for _ in range(rounds)]
    ours, theirs = zip(*times, strict=True)
    note = f"over the softmax of {_VECTORS} vectors x 2^{_BITS} codes"
    yield Row("entropy loss of LFQ, 2^16 codes", "seconds", ours, theirs, note=note)


def _models() -> tuple[VQGAN, Discriminator, Tensor]:
    torch.manual_seed(0)
    generator = VQGAN(_SIDE, dim=32, num_layers=3, codebook_size=1024)
    return generator, Discriminator(32, layers=2), torch.rand(_BATCH, 3, _SIDE, _SIDE)


def _ours() -> Callable[[], None]:
    generator, discriminator, images = _models()
    backend = one_process(_BATCH).__enter__()
    g, d = (
        backend.wrap(model, torch.optim.Adam(model.parameters(), lr=3e-4, fused=True), name=name)
        for model, name in ((generator, "generator"), (discriminator, "discriminator"))
    )

    def l1(fake: Tensor, real: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = F.l1_loss(fake, real)
        return loss, {"recon_loss": loss}

    adversaries = AdversarialTraining(
        g, d, backend, quantizer=generator.quantizer, seed=0,
        last_layer_gradient=partial(last_layer_gradient, weight_shape=tuple(generator.last_layer.weight.shape)),
        images=lambda micro: micro["images"], reconstruction_loss=l1, weights=AdversarialWeights(),
        log=lambda **losses: None,
    )  # fmt: skip

    def updates() -> None:
        for step in range(_UPDATES):
            weights = {"commitment": 0.25, "entropy": 0.1}
            _, fakes, _ = adversaries.generator_step({"images": images}, weights, step, is_adversarial=True)
            adversaries.discriminator_step({"images": images}, fakes, step, with_penalty=step == 3)

    return updates


def _bare() -> Callable[[], None]:
    generator, discriminator, images = copy.deepcopy(_models())
    g, d = (torch.optim.Adam(m.parameters(), lr=3e-4, fused=True) for m in (generator, discriminator))

    def updates() -> None:
        for step in range(_UPDATES):
            discriminator.requires_grad_(False)
            out: Any = generator(images)
            nll, deceive = F.l1_loss(out.reconstruction, images), -discriminator(out.reconstruction).mean()
            last = generator.last_layer.weight
            (of_nll,), (of_gan,) = (torch.autograd.grad(loss, last, retain_graph=True) for loss in (nll, deceive))
            weight = (of_nll.norm() / of_gan.norm().clamp_min(1e-4)).clamp_max(1e4).detach()
            codes = 0.25 * out.losses["commitment"] + 0.1 * out.losses["entropy"]
            g.zero_grad()
            (nll + weight * deceive + codes).backward()
            g.step()
            discriminator.requires_grad_(True)
            real_logits, fake_logits = discriminator(images), discriminator(out.reconstruction.detach())
            loss = F.relu(1 - real_logits).mean() + F.relu(1 + fake_logits).mean()
            if step == 3:
                loss = loss + 10 * gradient_penalty(discriminator, images)
            d.zero_grad()
            loss.backward()
            d.step()

    return updates


def _seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _peak_mib(which: str) -> float:
    """Peak memory of a process that makes the updates twice."""
    command = [sys.executable, "-m", "benchmarks.gan", which]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout)


if __name__ == "__main__":
    run = {"ours": _ours, "bare": _bare}[sys.argv[1]]()
    run(), run()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
