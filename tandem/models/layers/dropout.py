"""Dropout whose draws are a function of a key per sample and of the place of a number, computed where the numbers are.

A drawn number per attention weight would be gigabytes to make and to send, and a generator's numbers depend on the
device and on how far a sample is padded. A hash of key and place has no state: each process, each pass over a
micro-batch, each recomputation and each device finds the same numbers, whatever else is in the batch.
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


def derived(keys: Tensor, place: int | Tensor) -> Tensor:
    """Keys for a part of what others are for, such as a layer; different places give unrelated keys.

    Args:
        keys: int64 (..., 2), in [0, 2^32).
        place: A number of at least 0, for keys of the same shape; or int64 (n,), for keys (..., n, 2).
    """
    if isinstance(place, Tensor):
        keys = keys[..., None, :]
    one = mix32(keys[..., 0] ^ mix32(place + 1))
    return torch.stack([mix32(keys[..., 1] ^ one), one], dim=-1)


def dropout(x: Tensor, rate: float, keys: Tensor | None) -> Tensor:
    """Numbers (b, ..., n), of which a part, the rate, is set to 0 and the others are divided by 1 - rate (Srivastava et
    al. 2014). Whether a number is dropped depends on its sample's key and on its indices, not on the sizes of x.

    Args:
        rate: Probability of a number to be dropped, in [0, 1).
        keys: int64 (b, 2), in [0, 2^32), one key for each sample; None drops nothing.
    """
    if keys is None or not rate:
        return x
    for size in x.shape[1:-1]:
        keys = derived(keys, torch.arange(size, device=x.device))
    # One round for each number: the words of columns are scrambled before they meet those of rows, so that no two rows
    # have the same draws in another order.
    columns = mix32(torch.arange(x.shape[-1], device=x.device))
    words = mix32(keys[..., :1] ^ columns) ^ keys[..., 1:]
    return x.masked_fill(words < round(rate * 2**32), 0.0) * (1 / (1 - rate))
