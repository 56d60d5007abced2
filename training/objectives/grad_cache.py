"""An update of two towers with a contrastive loss over the whole batch, however it is cut into micro-batches: Gao et
al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (GradCache)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..contracts import Processes
from .contrastive import Contrastive, ContrastiveResult


def contrastive_update(
    engine: Any,
    processes: Processes,
    contrastive: Contrastive,
    batch: Mapping[str, Any],
    inputs: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> ContrastiveResult:
    """Backward passes of one update; the caller calls ``engine.step``. Collective.

    With several micro-batches, all are first embedded without a graph, for the loss and its gradients with respect to
    the embeddings. Then each is embedded again with a graph, through which its gradient goes back. So every micro-batch
    is compared with all negatives, in the memory that one micro-batch needs.

    The gradients of temperature and bias are totals over the batch, so only the root's first micro-batch adds them.

    Args:
        engine: Engine of a model that gives ``audio``, ``text`` (b, h, d), ``scale`` and ``bias`` (h,) (as
            ``models.MulanOutput``), and whose output depends on its arguments alone, noise included.
        batch: This process's part of the batch, ``caption_ids`` (b,) among it.
        inputs: A micro-batch -> keyword arguments of the model.
    """
    # A single micro-batch needs no first pass. With `whole` the first pass is made nevertheless: runs with another
    # number of processes make it, and PyTorch may choose another kernel without a graph, which would change the bits.
    sees_all_at_once = processes.grad_accum_steps == 1 and not contrastive.whole
    result = None
    if not sees_all_at_once:
        with torch.no_grad():
            micros = [(engine(**inputs(micro)), micro["caption_ids"]) for micro in engine.micro_batches(batch)]
        result = _loss(contrastive, [out for out, _ in micros], [captions for _, captions in micros])
    start = 0
    for index, micro in enumerate(engine.micro_batches(batch)):
        out = engine(**inputs(micro))
        if result is None:
            result = _loss(contrastive, [out], [micro["caption_ids"]])
        rows = slice(start, start + len(out.audio))
        start = rows.stop
        is_first = processes.is_root and index == 0
        # items / total = 1 makes the engine sum over processes and micro-batches instead of averaging.
        engine.backward(_surrogate(out, result, rows, is_first), items=1, total=1)
    assert result is not None
    return result


def _loss(contrastive: Contrastive, outs: Sequence[Any], captions: list[Tensor]) -> ContrastiveResult:
    """The loss of the outputs of all micro-batches, and its gradients with respect to their embeddings."""
    audio, text = torch.cat([out.audio for out in outs]), torch.cat([out.text for out in outs])
    # Every process holds its equal part of a batch of training.
    return contrastive.value_and_gradients(audio, text, outs[0].scale, outs[0].bias, torch.cat(captions), is_even=True)


def _surrogate(out: Any, result: ContrastiveResult, rows: slice, is_first: bool) -> Tensor:
    """0-d, with the value of the loss and its gradients with respect to these rows, temperature and bias."""
    once = 1.0 if is_first else 0.0  # times 0 instead of left out: a parameter must be used on all processes or on none
    surrogate = (
        (out.audio * result.audio_gradient[rows]).sum()
        + (out.text * result.text_gradient[rows]).sum()
        + once * (out.scale * result.scale_gradient + out.bias * result.bias_gradient).sum()
    )
    # The value must be that of the loss, because the engine skips the update if it is not finite.
    return surrogate + (result.loss - surrogate).detach()
