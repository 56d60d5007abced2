"""Profiles of averages of weights that are powers of time, and how one of another length is made of stored ones.

Karras et al. 2024, "Analyzing and Improving the Training Dynamics of Diffusion Models", sections 3.1 and 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

#: The length of the plain mean of all updates, exponent 0: no average that weighs late updates more is longer.
LONGEST = 1 / math.sqrt(12)

# Singular directions of the profiles' inner products below this fraction of the largest are rounding of float64.
_ROUNDING = 1e-13
# Smaller coefficients are rounding of the solution: the largest is about 1, and thousands of profiles are nearly alike.
_NO_COEFFICIENT = 1e-6


class Profile(NamedTuple):
    """Density (g + 1) / T (t / T)^g of an average over the times 0 < t <= T, in updates."""

    updates: float  # T
    exponent: float  # g


def length_of(exponent: float) -> float:
    """The relative length of an average: the standard deviation of t / T under its profile of exponent g > -1,
    sqrt(g + 1) / ((g + 2) sqrt(g + 3)). It falls as g >= 0 grows."""
    return math.sqrt(exponent + 1) / ((exponent + 2) * math.sqrt(exponent + 3))


def exponent_of(length: float) -> float:
    """The exponent g >= 0 of the profile with this relative length in (0, LONGEST]; by bisection.

    Raises:
        ValueError: there is none.
    """
    if not 0 < length <= LONGEST:
        raise ValueError(f"an average has a length above 0 and at most {LONGEST:.4f}, not {length}")
    low, high = 0.0, 1 / length  # length_of(g) < 1 / (g + 2)
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if length_of(middle) > length else (low, middle)
    return low


def inner_products(ones: Sequence[Profile], others: Sequence[Profile]) -> Tensor:
    """Integrals of the products of profiles over time: n and m of them -> float64 (n, m).

    For profiles that end at S <= T with exponents f and g: (f + 1) (g + 1) / (f + g + 1) (S / T)^g / T. Of the two
    quotients of powers that the integral gives, one cancels, so that nothing overflows.
    """
    (t, f), (u, g) = (torch.tensor(profiles, dtype=torch.float64).unbind(1) for profiles in (ones, others))
    t, f, u, g = t[:, None], f[:, None], u[None], g[None]
    later, of_later = torch.maximum(t, u), torch.where(t > u, f, g)
    return (f + 1) * (g + 1) / (f + g + 1) * (torch.minimum(t, u) / later) ** of_later / later


def coefficients(stored: Sequence[Profile], wanted: Profile) -> tuple[Tensor, float]:
    """How to add stored averages up to one with the wanted profile.

    Least squares of the difference of the profiles over time (Karras et al. 2024, algorithm 3), among the coefficients
    whose sum is 1: a sum of averages is an average of the weights only then.

    Returns:
        float64 coefficients (n,), exactly 0 for averages that are not needed, and the norm of what is left of the
        profile as a fraction of its norm: 0 if the stored ones make it exactly.
    """
    norms = inner_products(stored, stored).diagonal().sqrt()
    norm = inner_products([wanted], [wanted]).sqrt().item()
    # Of profiles scaled to norm 1, so that late and early ones count alike.
    products = inner_products(stored, stored) / (norms[:, None] * norms)
    with_wanted = inner_products(stored, [wanted])[:, 0] / (norms * norm)
    inverse = torch.linalg.pinv(products, rtol=_ROUNDING, hermitian=True)
    ones = norm / norms  # coefficients of scaled profiles -> their contribution to the sum
    free, push = inverse @ with_wanted, inverse @ ones
    scaled = free - push * ((ones @ free - 1) / (ones @ push))
    found = scaled * ones
    found = torch.where(found.abs() > _NO_COEFFICIENT, found, 0.0)
    found /= found.sum()
    scaled = found / ones
    left = 1 - 2 * scaled @ with_wanted + scaled @ products @ scaled
    return found, math.sqrt(max(left.item(), 0.0))
