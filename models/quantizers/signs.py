"""Codes that are the signs of a vector's channels."""

from __future__ import annotations

import torch
from torch import Tensor


def code_signs(codes: Tensor, bits: int) -> Tensor:
    """Codes (...) -> their signs (..., bits), -1 or 1 in fp32, the most significant bit first."""
    shifts = torch.arange(bits - 1, -1, -1, device=codes.device)
    return ((codes[..., None] >> shifts) & 1).float() * 2 - 1


def sign_codes(rows: Tensor) -> Tensor:
    """Vectors (..., bits) -> int64 codes (...) of their signs; only what is greater than 0 counts as positive."""
    shifts = torch.arange(rows.shape[-1] - 1, -1, -1, device=rows.device)
    return ((rows > 0).long() << shifts).sum(-1)


def exact_log2(codebook_size: int) -> int:
    """The exponent d of a codebook of 2^d codes.

    Raises:
        ValueError: the size is no power of two, or less than 2.
    """
    if codebook_size < 2 or codebook_size & (codebook_size - 1):
        use = 1 << max(codebook_size, 2).bit_length() - 1
        problem = f"codebook_size {codebook_size} is no power of two, and d signs make 2^d codes"
        raise ValueError(f"{problem}; use {use} or {2 * use}")
    return codebook_size.bit_length() - 1
