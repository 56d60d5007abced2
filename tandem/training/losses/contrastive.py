"""Contrastive losses over the global batch, with the gradients of a single process that holds the whole batch.

For every head h the logits of n pairs are s_ij = scale_h <audio_hi, text_hj>; the losses of the heads are added. Head 0
is the final embedding; the others, if any, are embeddings of intermediate layers (Shukor et al. 2022, ViCHA).

    softmax     mean_i [-s_ii + (log sum_j exp s_ij + log sum_j exp s_ji) / 2]          Radford et al. 2021, CLIP
    decoupled   the same, j != i in both sums                                           Yeh et al. 2022, DCL
    sigmoid     -(1/n) sum_ij log sigmoid(y_ij (s_ij + bias_h)), y = 1 if i = j else -1   Zhai et al. 2023, SigLIP

scale_h is the inverse of the papers' temperature, exp(t) of CLIP, and what the metrics call "temperature".

Gradients are those of the global loss: sum them over the processes, do not average them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.devices import sum_dtype

if TYPE_CHECKING:
    from tandem.distributed import ProcessGroup


KINDS = ("softmax", "decoupled", "sigmoid")

# In place of `ProcessGroup` where each process computes everything: the collectives return their input.
_SINGLE_PROCESS: Any = SimpleNamespace(
    rank=0, world_size=1, gather=lambda tensor, sizes: tensor, sum=lambda value: value
)


class ContrastiveResult(NamedTuple):
    """A loss and its gradients. All but the gradients of the embeddings are the same on every process."""

    loss: Tensor  # 0-d, of the global batch, summed over heads
    audio_gradient: Tensor  # (b, h, d) of the global loss with respect to this process's rows
    text_gradient: Tensor  # (b, h, d)
    scale_gradient: Tensor  # (h,) total
    bias_gradient: Tensor  # (h,) total; 0 for softmax and decoupled
    audio_variance: Tensor  # 0-d in [0, 1]: of the final embeddings, 1 - |their mean|^2; 0: all are the same
    text_variance: Tensor  # 0-d
    scale: Tensor  # (h,) the argument
    bias: Tensor  # (h,) the argument
    collapsed_loss: Tensor  # 0-d: the loss if all scores were equal


class _Sums(NamedTuple):
    """Values that are summed over the processes."""

    loss: Tensor
    scale_gradient: Tensor
    bias_gradient: Tensor
    audio: Tensor  # (d,) sum of the final embeddings
    text: Tensor
    collapsed_loss: Tensor  # of one head


class Contrastive:
    """A contrastive loss over the batch of all processes, whose parts may differ in size and be empty.

    softmax and decoupled: the embeddings are gathered, and each process compares its own rows with all rows, in both
    directions. sigmoid: the texts are gathered, each process compares its own sounds with them, and the gradients of
    the texts are summed.

    Args:
        kind: "softmax", "decoupled" or "sigmoid".
        mask_duplicates: Leave pairs i != j with equal captions out of all sums, instead of using them as negatives.
        is_replicated: Every process computes the loss of the whole batch, so that the result has the same bits on any
            number of processes (for --batch_parts). Work and memory are not divided among the processes then.
    """

    def __init__(
        self, kind: str, processes: ProcessGroup, *, mask_duplicates: bool = True, is_replicated: bool = False
    ) -> None:
        assert kind in KINDS, kind
        self.kind, self.mask_duplicates, self.is_replicated = kind, mask_duplicates, is_replicated
        self._processes = processes

    def value_and_gradients(
        self, audio: Tensor, text: Tensor, scale: Tensor, bias: Tensor, caption_ids: Tensor, *, is_even: bool = False
    ) -> ContrastiveResult:
        """The loss of the global batch and its gradients, computed in fp32 (fp64 if ``audio`` is). Collective.

        A pair without negatives has a loss of 0 in softmax, by the formula, and in decoupled, where only its own
        similarity would be left, which would grow without limit.

        Args:
            audio: (b, h, d) unit vectors, this process's pairs.
            text: (b, h, d) unit vectors.
            scale: (h,), the same on every process.
            bias: (h,), the same on every process.
            caption_ids: (b,) int64; equal captions have equal ids.
            is_even: All processes hold equally many pairs; then the host does not wait for the device.
        """
        assert audio.ndim == 3 and audio.shape == text.shape, (audio.shape, text.shape)
        assert scale.shape == bias.shape == audio.shape[1:2], (audio.shape, scale.shape, bias.shape)
        assert caption_ids.shape == audio.shape[:1], (audio.shape, caption_ids.shape)
        dtype = torch.float64 if audio.dtype == torch.float64 else torch.float32
        audio, text, scale, bias = (x.detach().to(dtype) for x in (audio, text, scale, bias))
        with torch.autocast(audio.device.type, enabled=False):
            processes, sizes, own_rows = self._processes, self._gather_sizes(audio, is_even), None
            if self.is_replicated:
                pairs, caption_ids, own_rows = _gather_pairs(processes, sizes, audio, text, caption_ids)
                processes, sizes, audio, text = _SINGLE_PROCESS, [len(pairs)], pairs[:, 0], pairs[:, 1]
            compute = self._compute_sigmoid if self.kind == "sigmoid" else self._compute_rows
            n_pairs, sums, *gradients = compute(processes, sizes, audio, text, scale, bias, caption_ids)
            if own_rows is not None:
                gradients = [gradient.index_select(0, own_rows) for gradient in gradients]
            variances = [1 - (total / n_pairs).square().sum() for total in (sums.audio, sums.text)]
            gradients += [sums.scale_gradient, sums.bias_gradient]
            values = (sums.loss, *gradients, *variances, scale, bias, sums.collapsed_loss * len(scale))
            return ContrastiveResult(*(tensor.to(dtype) for tensor in values))

    def metrics(self, result: ContrastiveResult) -> dict[str, Tensor]:
        """The metrics of a result by name; the bias only if the loss uses it."""
        values = {
            "loss": result.loss, "collapsed_loss": result.collapsed_loss, "temperature": result.scale[0],
            "audio_variance": result.audio_variance, "text_variance": result.text_variance,
        }  # fmt: skip
        return {**values, "bias": result.bias[0]} if self.kind == "sigmoid" else values

    def _gather_sizes(self, audio: Tensor, is_even: bool) -> list[int]:
        """The number of pairs of each process. Collective, unless they are even."""
        processes = self._processes
        if is_even or processes.world_size == 1:
            return [len(audio)] * processes.world_size
        own_size = torch.full((1,), len(audio), device=audio.device)
        return list(processes.gather(own_size, [1] * processes.world_size).tolist())

    def _compute_rows(
        self, processes: ProcessGroup, sizes: list[int], audio: Tensor, text: Tensor, scale: Tensor, bias: Tensor,
        caption_ids: Tensor,
    ) -> tuple[int, _Sums, Tensor, Tensor]:  # fmt: skip
        """softmax and decoupled. Returns the size of the global batch, sums over it and gradients."""
        pairs, captions, own_rows = _gather_pairs(processes, sizes, audio, text, caption_ids)
        # The embeddings of this process have two gradients: one as rows of the logits, computed here, and one as
        # columns, which is summed over all processes.
        leaves = [tensor.detach().requires_grad_() for tensor in (torch.stack([audio, text], 1), pairs, scale)]
        is_own = torch.arange(len(pairs), device=own_rows.device) == own_rows[:, None]
        is_excluded = self._duplicate_mask(caption_ids, captions) & ~is_own
        if self.kind == "decoupled":
            is_excluded |= is_own
        with torch.enable_grad():
            loss = _row_losses(is_excluded, *leaves).sum() / len(pairs)
        row_gradient, pair_gradient, scale_gradient = torch.autograd.grad(loss, leaves)
        # With equal scores s the loss -s + log sum_j exp s is the log of the number of candidates: 6.236 for 512
        # decoupled pairs, a value at which runs get stuck.
        comparisons = (~is_excluded).sum(dim=1).clamp(min=1)
        collapsed_loss = comparisons.to(sum_dtype(audio.device)).log().sum() / len(pairs)
        totals = (audio[:, 0].sum(0), text[:, 0].sum(0), collapsed_loss)
        *sums, pair_gradient = _sum_over_processes(
            processes, loss, scale_gradient, torch.zeros_like(bias), *totals, pair_gradient
        )
        gradient = pair_gradient.index_select(0, own_rows) + row_gradient
        return len(pairs), _Sums(*sums), gradient[:, 0], gradient[:, 1]

    def _compute_sigmoid(
        self, processes: ProcessGroup, sizes: list[int], audio: Tensor, text: Tensor, scale: Tensor, bias: Tensor,
        caption_ids: Tensor,
    ) -> tuple[int, _Sums, Tensor, Tensor]:  # fmt: skip
        """sigmoid, with all texts gathered. Returns the size of the global batch, sums over it and gradients."""
        texts, captions = (processes.gather(tensor, sizes) for tensor in (text, caption_ids))
        # The loss, its gradients of audio, scale and bias, and the number of comparisons. In fp64, so that the number
        # of chunks does not change the rounded results.
        shapes = ((), audio.shape, scale.shape, bias.shape, ())
        totals = [torch.zeros(shape, dtype=sum_dtype(audio.device), device=audio.device) for shape in shapes]
        text_gradients = []
        # One process's texts at a time, so that the memory for comparisons does not grow with their number.
        for rank, (chunk, chunk_captions) in enumerate(zip(texts.split(sizes), captions.split(sizes), strict=True)):
            is_own = rank == processes.rank
            terms = self._compare(audio, chunk, scale, bias, caption_ids, chunk_captions, is_own, sum(sizes))
            text_gradients.append(terms.pop())
            for total, term in zip(totals, terms, strict=True):
                total += term
        loss, audio_gradient, scale_gradient, bias_gradient, n_compared = totals
        *sums, comparisons, text_gradient = _sum_over_processes(
            processes, loss, scale_gradient, bias_gradient, audio[:, 0].sum(0), text[:, 0].sum(0), n_compared,
            torch.cat(text_gradients),
        )  # fmt: skip
        start, n_pairs = sum(sizes[: processes.rank]), sum(sizes)
        global_sums = _Sums._make([*sums, _collapsed_sigmoid(n_pairs, comparisons)])
        return n_pairs, global_sums, audio_gradient, text_gradient[start : start + len(text)]

    def _compare(
        self, audio: Tensor, text: Tensor, scale: Tensor, bias: Tensor, caption_ids: Tensor, text_captions: Tensor,
        are_pairs: bool, n_pairs: int,
    ) -> list[Tensor]:  # fmt: skip
        """Compare each audio (b, h, d) with each text (m, h, d) by the sigmoid loss; ``are_pairs``: text i is that of
        audio i. Returns the sum of the losses / ``n_pairs``, its gradients of audio, scale and bias, the number of
        comparisons, and its gradient of the texts."""
        signs = -torch.ones(len(audio), len(text), dtype=audio.dtype, device=audio.device)
        is_excluded = self._duplicate_mask(caption_ids, text_captions)
        if are_pairs:
            signs.fill_diagonal_(1.0)
            is_excluded.fill_diagonal_(False)
        leaves = [tensor.detach().requires_grad_() for tensor in (audio, text, scale, bias)]
        with torch.enable_grad():
            loss = _sigmoid_losses(signs, is_excluded, *leaves).sum() / n_pairs
        audio_gradient, text_gradient, *head_gradients = torch.autograd.grad(loss, leaves)
        return [loss.detach(), audio_gradient, *head_gradients, (~is_excluded).sum(), text_gradient]

    def _duplicate_mask(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Mask (rows, columns) of equal captions, each caption with itself included; without `mask_duplicates`, all are
        False."""
        if self.mask_duplicates:
            return rows[:, None] == columns
        return torch.zeros(len(rows), len(columns), dtype=torch.bool, device=rows.device)


def _row_losses(is_excluded: Tensor, own: Tensor, pairs: Tensor, scale: Tensor) -> Tensor:
    """Softmax losses (h, b) of the rows of ``own`` (b, 2, h, d) against ``pairs`` (n, 2, h, d); the axis of 2 is audio,
    text. The denominators do not contain the comparisons that ``is_excluded`` (b, n) marks."""
    losses = -scale[:, None] * torch.einsum("bhd,bhd->hb", own[:, 0], own[:, 1])
    for row_side, column_side in ((0, 1), (1, 0)):
        logits = scale[:, None, None] * torch.einsum("bhd,nhd->hbn", own[:, row_side], pairs[:, column_side])
        losses = losses + logits.masked_fill(is_excluded, -torch.inf).logsumexp(-1) / 2
    # The logarithm of an empty sum is -inf and its gradient NaN; masked_fill stops that gradient.
    return torch.where(is_excluded.all(dim=1), 0.0, losses)


def _sigmoid_losses(
    signs: Tensor, is_excluded: Tensor, audio: Tensor, text: Tensor, scale: Tensor, bias: Tensor
) -> Tensor:
    """Losses (h, b, m) of every audio (b, h, d) with every text (m, h, d). ``signs`` (b, m) is 1 for pairs and -1
    otherwise; ``is_excluded`` (b, m) marks comparisons whose loss is not counted."""
    logits = scale[:, None, None] * torch.einsum("bhd,mhd->hbm", audio, text) + bias[:, None, None]
    return -F.logsigmoid(signs * logits).masked_fill(is_excluded, 0.0)


def _collapsed_sigmoid(n_pairs: int, comparisons: Tensor) -> Tensor:
    """The sigmoid loss (0-d) if all scores are equal, with the best bias: comparisons x H / n_pairs. ``comparisons``
    (0-d) is the number of comparisons; a share n_pairs / comparisons of them are of pairs. H is the entropy, in nats,
    of a yes/no variable with this probability."""
    others = comparisons - n_pairs
    return (-n_pairs * (n_pairs / comparisons).log() - torch.special.xlogy(others, others / comparisons)) / n_pairs


def _gather_pairs(
    processes: ProcessGroup, sizes: list[int], audio: Tensor, text: Tensor, caption_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs (n, 2, h, d) and caption ids (n,) of all processes, and the rows (b,) of this process's own pairs."""
    pairs, captions = (processes.gather(tensor, sizes) for tensor in (torch.stack([audio, text], 1), caption_ids))
    start = sum(sizes[: processes.rank])
    return pairs, captions, torch.arange(start, start + len(audio), device=audio.device)


def _sum_over_processes(processes: ProcessGroup, *tensors: Tensor) -> list[Tensor]:
    """Each tensor summed over the processes, in fp64, in a single collective."""
    total = processes.sum(torch.cat([tensor.detach().to(sum_dtype(tensor.device)).flatten() for tensor in tensors]))
    sums = total.split([tensor.numel() for tensor in tensors])
    return [flat_sum.view(tensor.shape) for flat_sum, tensor in zip(sums, tensors, strict=True)]
