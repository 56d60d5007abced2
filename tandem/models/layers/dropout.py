"""Dropout whose mask is a hash of the sample's key and of the indices of each number, computed on the device.

One random number per attention weight would be gigabytes to draw and to transfer, and the numbers of a generator depend
on the device and on the padding of a sample. The hash has no state: each process, each pass over a micro-batch, each
recomputation and each device computes the same mask, whatever else is in the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BITS = (1 << 32) - 1


def mix32(word: Any) -> Any:
    """A bijection of [0, 2^32), of an int or an int64 tensor, in which every bit of the result depends on every bit of
    the word: two rounds of multiply and xor-shift, with the constants of Wellons' "hash prospector" (2018) that are
    below 2^31, so that no product exceeds an int64."""
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & _BITS
    word = ((word ^ (word >> 15)) * 0x735A2D97) & _BITS
    return word ^ (word >> 15)


def derive_keys(keys: Tensor, index: int | Tensor) -> Tensor:
    """Keys of a part, such as a layer, from those of the whole; different indices give unrelated keys.

    Args:
        keys: int64 (..., 2), in [0, 2^32).
        index: A number of at least 0, for keys of the same shape; or int64 (n,), for keys (..., n, 2).
    """
    if isinstance(index, Tensor):
        keys = keys[..., None, :]
    mixed = mix32(keys[..., 0] ^ mix32(index + 1))
    return torch.stack([mix32(keys[..., 1] ^ mixed), mixed], dim=-1)


def dropout(x: Tensor, rate: float, keys: Tensor | None) -> Tensor:
    """Set each number of x (b, ..., n) to 0 with the probability `rate`, and divide the others by 1 - rate (Srivastava
    et al. 2014). Whether a number is dropped depends on its sample's key and on its indices, not on the sizes of x.

    Args:
        rate: Probability of a number to be dropped, in [0, 1).
        keys: int64 (b, 2), in [0, 2^32), one key for each sample; None drops nothing.
    """
    if keys is None or not rate:
        return x
    for size in x.shape[1:-1]:
        keys = derive_keys(keys, torch.arange(size, device=x.device))
    # Columns are hashed before they are combined with rows, so that no row is a permutation of another row.
    columns = mix32(torch.arange(x.shape[-1], device=x.device))
    words = mix32(keys[..., :1] ^ columns) ^ keys[..., 1:]
    return x.masked_fill(words < round(rate * 2**32), 0.0) * (1 / (1 - rate))
