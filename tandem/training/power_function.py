"""Power-function profiles of averages of weights, and the average of another length from stored ones (post-hoc EMA).

Karras et al. 2024, "Analyzing and Improving the Training Dynamics of Diffusion Models", sections 3.1 and 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

#: The relative length (`length_of`) of the plain mean of all updates, whose exponent is 0; larger exponents have
#: smaller lengths.
LONGEST = 1 / math.sqrt(12)

# Eigenvalues of the matrix of inner products below this fraction of the largest are rounding errors of float64.
_ROUNDING = 1e-13
# Smaller coefficients are rounding errors of the solution: the largest is about 1, and many profiles are nearly alike.
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


def inner_products(first: Sequence[Profile], second: Sequence[Profile]) -> Tensor:
    """Integrals of the products of profiles over time: n and m of them -> float64 (n, m).

    For profiles that end at S <= T with exponents f and g: (f + 1) (g + 1) / (f + g + 1) (S / T)^g / T, which contains
    no power that overflows."""
    (t, f), (u, g) = (torch.tensor(profiles, dtype=torch.float64).unbind(1) for profiles in (first, second))
    t, f, u, g = t[:, None], f[:, None], u[None], g[None]
    later, later_exponent = torch.maximum(t, u), torch.where(t > u, f, g)
    return (f + 1) * (g + 1) / (f + g + 1) * (torch.minimum(t, u) / later) ** later_exponent / later


def coefficients(stored: Sequence[Profile], target: Profile) -> tuple[Tensor, float]:
    """The coefficients with which stored averages add up to the average with the target profile.

    Least squares of the difference of the profiles over time (Karras et al. 2024, algorithm 3), among the coefficients
    whose sum is 1: a sum of averages is an average of the weights only then.

    Returns:
        float64 coefficients (n,), exactly 0 for averages that are not needed, and the norm of the residual as a
        fraction of the target's norm: 0 if the sum has exactly that profile.
    """
    norms = inner_products(stored, stored).diagonal().sqrt()
    norm = inner_products([target], [target]).sqrt().item()
    # Inner products of profiles scaled to norm 1, so that late and early ones count alike.
    products = inner_products(stored, stored) / (norms[:, None] * norms)
    target_products = inner_products(stored, [target])[:, 0] / (norms * norm)
    inverse = torch.linalg.pinv(products, rtol=_ROUNDING, hermitian=True)
    unscaling = norm / norms  # coefficients = unscaling x coefficients of scaled profiles
    unconstrained, correction = inverse @ target_products, inverse @ unscaling
    scaled_solution = unconstrained - correction * ((unscaling @ unconstrained - 1) / (unscaling @ correction))
    solution = scaled_solution * unscaling
    solution = torch.where(solution.abs() > _NO_COEFFICIENT, solution, 0.0)
    solution /= solution.sum()
    scaled_solution = solution / unscaling
    residual = 1 - 2 * scaled_solution @ target_products + scaled_solution @ products @ scaled_solution
    return solution, math.sqrt(max(residual.item(), 0.0))
