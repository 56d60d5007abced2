"""Index backpropagation quantization (IBQ)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.config.models.autoencoders import QuantizerConfig

from .base import Quantizer, straight_through
from .entropy import SoftmaxEntropy

_BETA = 0.25  # weight of the term that moves entries to vectors
_TEMPERATURE = 0.01  # of the entropy loss; the softmax of the choice has temperature 1


class TrainedCodebook(nn.Module):
    """Entries (K, d). Every use of the weight is a call of this module, because DeepSpeed's ZeRO 3 gathers the weights
    of a module when the module is called."""

    def __init__(self, codebook_size: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(codebook_size, dim))

    def forward(self, x: Tensor, *, mix: bool = False) -> Tensor:
        """Codes (...) int64 -> entries (..., d); vectors (n, d) -> logits (n, K), their products with all entries.

        With ``mix``, weights (n, K) -> mixtures (n, d), without a gradient to the entries.
        """
        weight = self.weight.float()
        if mix:
            return x @ weight.detach()
        return F.linear(x, weight) if x.is_floating_point() else F.embedding(x, weight)


class IndexBackpropQuantizer(Quantizer):
    """Chooses the entry with the largest inner product with z; gradients of the choice train every entry.

    Shi et al. 2024: the one-hot choice has the gradient of softmax(z C^T), so the decoder's gradient goes to all
    entries, and to z only through the logits. Losses: ``commitment`` is the double quantization loss,
    mean (z - q)^2 + mean (z - sg e)^2 + beta mean (sg z - e)^2 (sg: stop-gradient); q has the value of the
    entry e and the gradient of the choice; ``entropy`` is H_sample - diversity_gamma H_batch in nats, with p(c | z) =
    softmax_c <z, c> / temperature.

    The backward pass needs the memory of several n x K matrices.
    """

    loss_names: ClassVar[tuple[str, ...]] = ("commitment", "entropy")

    def __init__(self, config: QuantizerConfig) -> None:
        entropy = SoftmaxEntropy(_TEMPERATURE, config.diversity_gamma)
        super().__init__(config.codebook_size, config.codebook_dim, entropy.mean)
        self.codebook, self._entropy = TrainedCodebook(self.num_codes, self.dim), entropy

    def _accumulate_stats(self, vectors: Tensor) -> None:
        self._entropy.accumulate_stats(self.codebook(vectors))

    def _quantize(self, vectors: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logits = self.codebook(vectors)
        codes = logits.detach().argmax(1)
        entries = self.codebook(codes)
        mixture = self.codebook(logits.softmax(1), mix=True)
        quantized = straight_through(entries, mixture)
        # Keep this order: the gradients of vectors are added in it, so another order would round differently.
        commitment = F.mse_loss(quantized, vectors) + F.mse_loss(vectors, entries.detach())
        commitment = commitment + _BETA * F.mse_loss(entries, vectors.detach())
        entropy = self._entropy(logits, self._forward_all_reduce)
        return quantized, codes, {"commitment": commitment, "entropy": entropy}

    def _choose(self, vectors: Tensor) -> Tensor:
        return self.codebook(vectors).argmax(1)

    def _look_up(self, codes: Tensor) -> Tensor:
        return self.codebook(codes)
