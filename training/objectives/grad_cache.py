"""An update of two towers with a contrastive loss over the whole batch, however it is cut into micro-batches: Gao et
al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (GradCache)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from .contrastive import Contrastive, ContrastiveResult


class Processes(Protocol):
    """What the update asks of the processes that train together."""

    @property
    def is_root(self) -> bool: ...
    @property
    def grad_accum_steps(self) -> int: ...


def contrastive_update(
    engine: Any,
    processes: Processes,
    contrastive: Contrastive,
    batch: Mapping[str, Any],
    inputs: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> ContrastiveResult:
    """Add the gradients of one update's loss to the engine; its ``step`` is left to the caller. Collective.

    With several micro-batches all are embedded without a graph first. Then each is embedded again, with one, and the
    gradient of the loss with respect to its embeddings goes back through it. So every micro-batch sees all negatives,
    and the memory of one is enough.

    The gradients of temperature and bias are totals over the batch: they are given out once, by the root's first
    micro-batch. A rule inside the model that looks at them (a clamp) sees them as they are, but for a positive factor.

    Args:
        engine: Of a model that gives ``audio``, ``text`` (b, h, d), ``scale`` and ``bias`` (h,) (as
            ``models.MulanOutput``), and whose output depends on its arguments alone: noise is one of them.
        processes: Who trains.
        contrastive: The loss.
        batch: This process's part of the batch, ``caption_ids`` (b,) among it.
        inputs: A micro-batch -> keyword arguments of the model.
    """
    # Of one micro-batch the graph can be kept. Not where bits must be the same on any number of processes: elsewhere
    # the same samples are embedded without a graph, for which PyTorch may choose another kernel.
    sees_all_at_once = processes.grad_accum_steps == 1 and not contrastive.whole
    result = None if sees_all_at_once else _look_ahead(engine, contrastive, batch, inputs)
    start = 0
    for index, micro in enumerate(engine.micro_batches(batch)):
        out = engine(**inputs(micro))
        if result is None:
            result = contrastive.value_and_gradients(*_embeddings(out), micro["caption_ids"])
        rows = slice(start, start + len(out.audio))
        start = rows.stop
        is_first = processes.is_root and index == 0
        # A weight of 1: what all processes and micro-batches hand in is added, no mean of it taken.
        engine.backward(_surrogate(out, result, rows, is_first), items=1, total=1)
    assert result is not None
    return result


@torch.no_grad()
def _look_ahead(
    engine: Any,
    contrastive: Contrastive,
    batch: Mapping[str, Any],
    inputs: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> ContrastiveResult:
    """The loss and its gradients with respect to the embeddings of all micro-batches."""
    audio, text, captions = [], [], []
    for micro in engine.micro_batches(batch):
        out = engine(**inputs(micro))
        audio.append(out.audio)
        text.append(out.text)
        captions.append(micro["caption_ids"])
    return contrastive.value_and_gradients(torch.cat(audio), torch.cat(text), out.scale, out.bias, torch.cat(captions))


def _embeddings(out: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return out.audio, out.text, out.scale, out.bias


def _surrogate(out: Any, result: ContrastiveResult, rows: slice, is_first: bool) -> Tensor:
    """0-d, with the loss's value and its gradient with respect to these rows (and once to temperature and bias)."""
    once = 1.0 if is_first else 0.0  # and not left out: a parameter is used on every process or on none
    pull = (
        (out.audio * result.audio_gradient[rows]).sum()
        + (out.text * result.text_gradient[rows]).sum()
        + once * (out.scale * result.scale_gradient + out.bias * result.bias_gradient).sum()
    )
    # The engine skips an update and says why if a loss is not finite: that must be the loss itself.
    return pull + (result.loss - pull).detach()
