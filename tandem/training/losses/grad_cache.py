"""Micro-batches with a contrastive loss over the whole batch: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch
Size under Memory Limited Setup" (GradCache)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tandem.flops import recomputation

from .contrastive import Contrastive, ContrastiveResult

if TYPE_CHECKING:
    from tandem.distributed import ProcessGroup


def grad_cache_losses(
    engine: Any, processes: ProcessGroup, contrastive: Contrastive, batch: Mapping[str, Any],
    inputs: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> Iterator[tuple[Tensor, ContrastiveResult]]:  # fmt: skip
    """The contrastive loss of a whole batch, for an update in micro-batches: for each of them the loss, 0-d, whose
    gradient is that with respect to its embeddings, and the same result of the batch. Collective.

    With several micro-batches, all are first embedded without a graph, to compute the result: the loss and its
    gradients with respect to the embeddings. Then each is embedded again, with a graph that gives them these gradients.
    So every micro-batch is compared with all negatives, in the memory of one micro-batch. The engine's `backward` has
    to sum the losses over micro-batches and processes, not average them (items=1, total=1).

    Args:
        engine: Engine of a model that returns ``audio``, ``text`` (b, h, d), ``scale`` and ``bias`` (h,) (as
            ``models.MulanOutput``), and whose output depends on its arguments alone: its noise is an argument, too.
        batch: This process's part of the batch, ``caption_ids`` (b,) among it.
        inputs: A micro-batch -> keyword arguments of the model.
    """

    def compare(outputs: list[Any]) -> ContrastiveResult:
        audio, text = torch.cat([out.audio for out in outputs]), torch.cat([out.text for out in outputs])
        # A training batch is split evenly over the processes.
        return contrastive.value_and_gradients(
            audio, text, outputs[0].scale, outputs[0].bias, batch["caption_ids"], is_even=True
        )

    result, row = None, 0
    # A single micro-batch needs no first pass. With `is_replicated` there is one nevertheless: runs on fewer processes,
    # which must get the same bits, have one, and without a graph PyTorch may choose another kernel.
    if engine.grad_accum_steps > 1 or contrastive.is_replicated:
        with torch.no_grad(), recomputation():
            outputs = [engine(**inputs(micro_batch)) for micro_batch in engine.micro_batches(batch)]
        result = compare(outputs)
    for micro_batch in engine.micro_batches(batch):
        out = engine(**inputs(micro_batch))
        result = compare([out]) if result is None else result
        # The root's first micro-batch alone gets the gradients of scale and bias, which are those of the whole batch.
        # The others get 0, not a missing term: all processes must use the same parameters.
        factor = 1.0 if processes.is_root and row == 0 else 0.0
        rows = slice(row, row + len(out.audio))
        surrogate = (
            (out.audio * result.audio_gradient[rows]).sum()
            + (out.text * result.text_gradient[rows]).sum()
            + factor * (out.scale * result.scale_gradient + out.bias * result.bias_gradient).sum()
        )
        # The value must be that of the loss, because the engine skips the update if it is not finite.
        yield surrogate + (result.loss - surrogate).detach(), result
        row = rows.stop
