"""Micro-batches with a contrastive loss over the whole batch: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch
Size under Memory Limited Setup" (GradCache)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tandem.flops import recomputation

from .contrastive import Contrastive, ContrastiveResult

if TYPE_CHECKING:
    from tandem.distributed import ProcessGroup


class GradCache:
    """The contrastive loss of a whole batch, for an update in micro-batches. Collective.

    With several micro-batches, all are first embedded without a graph, to compute `result`: the loss and its gradients
    with respect to the embeddings. Then each is embedded again: `surrogate_loss(out, caption_ids)` has the value of the
    loss, and its graph gives these gradients to the embeddings. So every micro-batch is compared with all negatives, in
    the memory of one micro-batch. The engine's `backward` has to sum the surrogate losses over micro-batches and
    processes, not average them (items=1, total=1).

    Args:
        engine: Engine of a model that returns ``audio``, ``text`` (b, h, d), ``scale`` and ``bias`` (h,) (as
            ``models.MulanOutput``), and whose output depends on its arguments alone: its noise is an argument, too.
        batch: This process's part of the batch, ``caption_ids`` (b,) among it.
        inputs: A micro-batch -> keyword arguments of the model.
    """

    def __init__(
        self,
        engine: Any,
        processes: ProcessGroup,
        contrastive: Contrastive,
        batch: Mapping[str, Any],
        inputs: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    ) -> None:
        self._contrastive, self._is_root, self._next_row = contrastive, processes.is_root, 0
        self._result: ContrastiveResult | None = None
        # A single micro-batch needs no first pass. With `is_replicated` there is one nevertheless: runs on fewer
        # processes, which must get the same bits, have one, and without a graph PyTorch may choose another kernel.
        if engine.grad_accum_steps > 1 or contrastive.is_replicated:
            with torch.no_grad(), recomputation():
                outputs = [(engine(**inputs(micro)), micro["caption_ids"]) for micro in engine.micro_batches(batch)]
            self._result = self._compare(outputs)

    @property
    def result(self) -> ContrastiveResult:
        """The loss of the batch and its gradients, from the first call of `surrogate_loss` on."""
        assert self._result is not None
        return self._result

    def surrogate_loss(self, out: Any, caption_ids: Tensor) -> Tensor:
        """The model's output for the next micro-batch -> the loss of the batch, 0-d, with its gradients with respect to
        these embeddings. The gradients of scale and bias are those of the whole batch: only the root's first
        micro-batch gets them."""
        if self._result is None:
            self._result = self._compare([(out, caption_ids)])
        result, rows = self._result, slice(self._next_row, self._next_row + len(out.audio))
        is_first = self._is_root and self._next_row == 0
        self._next_row = rows.stop
        factor = 1.0 if is_first else 0.0  # 0, not a missing term: all processes must use the same parameters
        surrogate = (
            (out.audio * result.audio_gradient[rows]).sum()
            + (out.text * result.text_gradient[rows]).sum()
            + factor * (out.scale * result.scale_gradient + out.bias * result.bias_gradient).sum()
        )
        # The value must be that of the loss, because the engine skips the update if it is not finite.
        return surrogate + (result.loss - surrogate).detach()

    def _compare(self, outputs: Sequence[tuple[Any, Tensor]]) -> ContrastiveResult:
        """The loss of the outputs of all micro-batches, each with its caption ids, and its gradients with respect to
        their embeddings."""
        outs, captions = zip(*outputs, strict=True)
        audio, text = torch.cat([out.audio for out in outs]), torch.cat([out.text for out in outs])
        # A training batch is split evenly over the processes.
        return self._contrastive.value_and_gradients(
            audio, text, outs[0].scale, outs[0].bias, torch.cat(captions), is_even=True
        )
