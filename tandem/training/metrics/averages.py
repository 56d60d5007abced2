"""Means of metrics from sums and counts, which are exact over batches and processes of any size; counts of codes."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tandem.devices import fp64_device

AllReduce = Callable[[Tensor], Tensor]


def identity(tensor: Tensor) -> Tensor:
    """The all-reduce, and the gather, of a single process: returns its tensor."""
    return tensor


class Averages:
    """Means of named values over all items of all processes.

    Args:
        names: Names of the values; the same on every process.
        device: Device of the values. Their sums, float64, are on its `fp64_device`. If that is the same device, `add`
            does not wait for it.
    """

    def __init__(self, *names: str, device: torch.device | str = "cpu") -> None:
        self._rows = {name: row for row, name in enumerate(names)}
        self._sums_and_counts = torch.zeros(len(names), 2, dtype=torch.float64, device=fp64_device(device))

    def add(self, **values: Tensor) -> None:
        """Add one value per item: tensors (n,), or () for one item."""
        for name, value in values.items():
            row = self._sums_and_counts[self._rows[name]]
            row[0] += value.detach().to(row.device).sum(dtype=torch.float64)
            row[1] += value.numel()

    def result(self, all_reduce: AllReduce = identity) -> dict[str, float]:
        """Means by name over all processes; NaN for a name without values. Collective: one all-reduce."""
        sums, counts = all_reduce(self._sums_and_counts.clone()).cpu().unbind(1)
        return dict(zip(self._rows, (sums / counts).tolist(), strict=True))


def code_statistics(counts: Tensor) -> dict[str, float]:
    """`codes_used`, `codes_used_fraction` and `perplexity` of counts (num_codes,); {} for a model without codes. The
    perplexity is the exponential of the entropy in nats of the distribution of codes: 1 for a single code, num_codes
    for codes of equal frequency."""
    if not len(counts):
        return {}
    probabilities = counts.double() / counts.sum().clamp_min(1)
    entropy = -torch.special.xlogy(probabilities, probabilities).sum()
    n_used = int((counts > 0).sum())
    return {"codes_used": n_used, "codes_used_fraction": n_used / len(counts), "perplexity": entropy.exp().item()}


def add_codes(counts: Tensor, codes: Tensor) -> None:
    """Add to int64 `counts` (num_codes,), in place, how often each code occurs in int64 codes of any shape."""
    flat = codes.flatten()
    counts.index_add_(0, flat, torch.ones_like(flat))  # bincount would wait for the device


def count_codes(codes: Sequence[Tensor], num_codes: int, all_reduce: AllReduce = identity) -> Tensor:
    """How often each code occurs in some micro-batches, over all processes: int64 (num_codes,), on the CPU. Collective:
    one all-reduce."""
    counts = torch.zeros(num_codes, dtype=torch.int64, device=codes[0].device)
    for batch_codes in codes:
        add_codes(counts, batch_codes)
    return all_reduce(counts).cpu()
