"""What all engines compute alike."""

from __future__ import annotations

import pytest
import torch

from distributed.engines.micro import all_finite, gradient_norm

MANY = 3 * 2**17 + 1  # more than are added at a time


@pytest.mark.parametrize("size", [1, 1000, MANY])
def test_the_norm_of_gradients_is_that_of_all_numbers_in_fp64_and_not_finite_if_one_is_not(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    gradients = [torch.randn(size, 3, generator=generator).T, torch.randn(2, 2, generator=generator), torch.tensor(5.0)]
    norm = gradient_norm(gradients)
    expected = sum(gradient.double().square().sum() for gradient in gradients) ** 0.5
    assert norm.dtype == torch.float64 and norm.dim() == 0
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    gradients[0][-1, -1] = torch.finfo(torch.float32).max
    assert gradient_norm(gradients).isfinite() and all_finite(gradients)
    for wrong in (torch.nan, torch.inf, -torch.inf):
        gradients[0][-1, -1] = wrong
        assert not gradient_norm(gradients).isfinite() and not all_finite(gradients)
