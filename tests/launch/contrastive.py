"""Contrastive updates of toy towers, and the losses alone on ragged batches, on any backend."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import distributed
from distributed import Backend
from training.objectives import contrastive as losses
from training.objectives.contrastive import KINDS, Contrastive
from training.objectives.grad_cache import GradCache

BATCH, HEADS, DIM = 48, 2, 5  # divides by 1, 2, 3 and 4 processes with 1 or 4 accumulation steps
FLAGS = ["--batch_size", str(BATCH), "--max_skipped_updates", "1"]
RAGGED = [5, 0, 11, 2]  # pairs on each of four processes; of fewer processes, the last one takes the rest


class Output(NamedTuple):
    audio: Tensor
    text: Tensor
    scale: Tensor
    bias: Tensor


class Towers(nn.Module):
    """Two towers with odd sizes, which no number of processes divides."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.audio = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, HEADS * DIM))
        self.text = nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, HEADS * DIM))
        self.tau, self.bias = nn.Parameter(torch.tensor([0.3, 1.2])), nn.Parameter(torch.tensor([-1.0, -3.0]))
        self.to(dtype)

    def forward(self, sounds: Tensor, words: Tensor) -> Output:
        audio, text = (
            F.normalize(x.unflatten(-1, (HEADS, DIM)), dim=-1) for x in (self.audio(sounds), self.text(words))
        )
        return Output(audio, text, self.tau.exp(), self.bias)


def global_batch(dtype: torch.dtype) -> dict[str, Tensor]:
    """A batch in which some captions occur twice, far from one another."""
    generator = torch.Generator().manual_seed(1)
    sounds, words = (torch.randn(BATCH, width, generator=generator).to(dtype) for width in (7, 5))
    return {"sounds": sounds, "words": words, "caption_ids": torch.arange(BATCH) % (BATCH * 3 // 4)}


def ragged_pairs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """audio, text, scale, bias, caption ids."""
    generator, pairs = torch.Generator().manual_seed(2), sum(RAGGED)
    audio, text = F.normalize(torch.randn(2, pairs, HEADS, DIM, generator=generator, dtype=torch.float64), dim=-1)
    scale, bias = torch.tensor([4.0, 14.0]), torch.tensor([-1.0, -10.0])
    return [*(tensor.to(dtype) for tensor in (audio, text, scale, bias)), torch.arange(pairs) * 5 % 13]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)  # after the first step the momentum equals the gradient


def rows_of(backend: Backend, sizes: list[int]) -> slice:
    bounds = list(itertools.accumulate(sizes, initial=0))
    return slice(bounds[backend.rank], bounds[backend.rank + 1])


def use_accumulation(backend: Backend, steps: int) -> None:
    """Set up the backend as if the job had been started with this --grad_accum_steps."""
    plan = distributed.plan_batches(BATCH, steps, backend.world_size, None, 0)
    backend.options = dataclasses.replace(backend.options, plan=plan)


def inputs(micro: Mapping[str, Any]) -> dict[str, Any]:
    return {"sounds": micro["sounds"], "words": micro["words"]}


def updates(backend: Backend, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    """The loss of every kind and the gradients that the optimizer received."""
    model = Towers(dtype)
    engine = backend.wrap(model, sgd(model.parameters()), name=f"updates{next(NUMBERS)}")
    begin, found = engine.state_dict(), {}
    size = BATCH // backend.world_size
    batch = {k: v[backend.rank * size : (backend.rank + 1) * size] for k, v in global_batch(dtype).items()}
    for kind in [*KINDS, "softmax again"]:
        contrastive = Contrastive(kind.split()[0], backend, **options)
        cache = GradCache(engine, backend, contrastive, batch, inputs)
        for micro in engine.micro_batches(batch):
            engine.backward(cache.carried(engine(**inputs(micro)), micro["caption_ids"]), items=1, total=1)
        engine.step()
        gradients = engine.state_dict()["optimizer"]["moments"]["momentum_buffer"]
        found[kind] = {
            "loss": float(cache.result.loss),
            **{name: tensor.tolist() for name, tensor in gradients.items()},
        }
        engine.load_state_dict(begin)
    return found


NUMBERS = itertools.count()  # engines have distinct names


def ragged(backend: Backend) -> dict[str, Any]:
    """Results of the losses alone, with a different number of pairs on each process. For each kind, every field has the
    form that it has on a single process."""
    sizes = RAGGED[: backend.world_size - 1]
    sizes = [*sizes, sum(RAGGED) - sum(sizes)]
    audio, text, scale, bias, captions = ragged_pairs()
    own, found = rows_of(backend, sizes), {}
    for kind in KINDS:
        contrastive = Contrastive(kind, backend)
        result = contrastive.value_and_gradients(audio[own], text[own], scale, bias, captions[own])
        by_rank = backend.gather_objects({name: tensor.tolist() for name, tensor in result._asdict().items()})
        same = [name for name in result._fields if name not in ("audio_gradient", "text_gradient")]
        found[kind] = {
            **{
                name: list(itertools.chain(*(fields[name] for fields in by_rank)))
                for name in ("audio_gradient", "text_gradient")
            },
            **{name: by_rank[0][name] for name in same},
            "agree": all(fields[name] == by_rank[0][name] for fields in by_rank for name in same),
        }
    return found


def measure(args: argparse.Namespace, backend: Backend) -> None:
    """Measure what depends on the engine: with accumulation, or with --batch_parts."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    found = {}
    if args.batch_parts:
        found["parts"] = updates(backend, torch.float32, whole=True)
    else:
        dtype = torch.float32 if backend.name == "deepspeed" else torch.float64
        for accumulation in (1, 4):
            use_accumulation(backend, accumulation)
            found[f"accumulation {accumulation}"] = updates(backend, dtype)
    torch.use_deterministic_algorithms(deterministic)
    write(args, backend, found)


def measure_once(args: argparse.Namespace, backend: Backend) -> None:
    """Measure what a job measures only once, for all its ZeRO stages."""
    found = {"ragged": ragged(backend)}
    with patch.object(losses, "_GATHERED_BYTES", 0):  # as if the batch were large
        found["ragged, around a ring"] = ragged(backend)
    write(args, backend, found)


def write(args: argparse.Namespace, backend: Backend, found: dict[str, Any]) -> None:
    if backend.is_root:
        (Path(args.output_dir) / "result.json").write_text(json.dumps(found))
