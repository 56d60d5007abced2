"""What all quantizers promise, and each against its formula and a kept library."""

from __future__ import annotations

import copy
import math
import threading
from typing import Any

import pytest
import torch
import vector_quantize_pytorch as library
from torch import Tensor
from torch.nn import functional as F

from tandem.config.models.autoencoders import QUANTIZERS
from tandem.models.quantizers.base import Quantizer
from tests.models.helpers import assert_same_bits, quantizer_of, some, state_of

SMALL: dict[str, dict[str, Any]] = {
    "lfq": {"codebook_size": 64},
    "vq": {"codebook_size": 11, "codebook_dim": 5},
    "fsq": {"fsq_levels": [8, 5, 4]},
    "bsq": {"codebook_size": 64},
    "ibq": {"codebook_size": 11, "codebook_dim": 5},
}
all_quantizers = pytest.mark.parametrize("name", QUANTIZERS)


def small(name: str, **options: Any) -> Quantizer:
    return quantizer_of(name, **{**SMALL[name], **options})


def some_z(quantizer: Quantizer, batch: int = 4, size: int = 3) -> Tensor:
    return some(batch, quantizer.dim, size, size)


def forbidden(tensor: Tensor) -> Tensor:
    raise AssertionError("nobody may be asked")


@all_quantizers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computed_in_fp32_and_codes_alone_are_the_same_to_the_bit(name: str, dtype: torch.dtype) -> None:
    quantizer = small(name).eval()
    z = some_z(quantizer, size=9).to(dtype)
    expected = quantizer(z.float())
    with torch.autocast("cpu", torch.bfloat16):
        out, codes = quantizer(z), quantizer.codes(z)
    assert torch.equal(out.quantized, expected.quantized) and out.losses == expected.losses
    assert torch.equal(out.codes, expected.codes) and torch.equal(codes, out.codes) and codes.dtype == torch.int64


@all_quantizers
def test_without_training_or_gradients_and_for_codes_alone_nobody_is_asked_and_nothing_recorded(name: str) -> None:
    quantizer = small(name)
    quantizer.all_reduce = quantizer.gather = forbidden
    before = state_of(quantizer)
    quantizer.eval()(some_z(quantizer))
    with torch.no_grad():
        quantizer.train()(some_z(quantizer))
    codes = quantizer.codes(some_z(quantizer).requires_grad_())
    assert codes.shape == (4, 3, 3) and not codes.requires_grad
    assert_same_bits(quantizer, before)
    if name == "vq":
        with pytest.raises(RuntimeError, match="forward"):
            quantizer.after_step(1, 0)


@all_quantizers
def test_a_copy_shares_the_way_to_other_processes_instead_of_copying_it(name: str) -> None:
    class Backend:
        def __init__(self) -> None:
            self.lock = threading.Lock()  # cannot be copied, as sockets cannot

        def sum(self, tensor: Tensor) -> Tensor:
            return tensor * 2

    backend, quantizer = Backend(), small(name)
    quantizer.all_reduce, quantizer.rank, quantizer.world_size = backend.sum, 1, 2
    twin = copy.deepcopy(quantizer)
    assert twin.all_reduce.__self__ is backend and (twin.rank, twin.world_size) == (1, 2)
    assert set(quantizer.state_dict()) == set(small(name).state_dict())
    z = some_z(quantizer)
    assert torch.equal(twin.eval()(z).codes, quantizer.eval()(z).codes)
    for mine, other in zip(quantizer.state_dict().values(), twin.state_dict().values(), strict=True):
        assert mine.data_ptr() != other.data_ptr()


@all_quantizers
def test_what_is_not_finite_shows_in_the_output_and_leaves_codes_in_range(name: str) -> None:
    quantizer = small(name).eval()
    z = some_z(quantizer)
    z[0] = math.nan
    out = quantizer(z)
    assert out.quantized[0].isnan().any() and out.quantized[1:].isfinite().all()
    assert out.codes.min() >= 0 and out.codes.max() < quantizer.num_codes
    assert torch.equal(quantizer.codes(z), out.codes)


def test_fsq_has_the_published_number_of_codes_and_channels() -> None:
    for bits, expected in {8: (240, 3), 10: (1000, 4), 12: (4375, 5), 14: (15360, 5), 16: (64000, 6)}.items():
        quantizer = quantizer_of("fsq", codebook_size=2**bits)
        assert (quantizer.num_codes, quantizer.dim) == expected


def test_fsq_agrees_with_the_library() -> None:
    """Codes, of which the first channel is the fastest digit, entries and gradients."""
    quantizer, theirs = small("fsq"), library.FSQ([8, 5, 4])
    z = (3 * some_z(quantizer, batch=20)).requires_grad_()
    other = z.detach().clone().requires_grad_()
    out = quantizer(z)
    quantized, codes = theirs(other)
    assert torch.equal(out.codes, codes.long())
    torch.testing.assert_close(out.quantized, quantized)
    weights = torch.randn_like(quantized)
    (out.quantized * weights).sum().backward()
    (quantized * weights).sum().backward()
    torch.testing.assert_close(z.grad, other.grad)


def gradient_of_quantized(quantizer: Quantizer, z: Tensor, weights: Tensor) -> Tensor:
    z = z.clone().requires_grad_()
    (quantizer(z).quantized * weights).sum().backward()
    assert z.grad is not None
    return z.grad


@pytest.mark.parametrize(("name", "options"), [("bsq", {}), ("vq", {"vq_cosine": True})])
def test_on_the_sphere_the_gradient_goes_through_the_direction(name: str, options: dict[str, Any]) -> None:
    quantizer = small(name, **options)
    z = some_z(quantizer)
    weights = torch.randn_like(z)
    other = z.clone().requires_grad_()
    (F.normalize(other, dim=1) * weights).sum().backward()
    torch.testing.assert_close(gradient_of_quantized(quantizer, z, weights), other.grad)


def test_lfq_codes_have_the_first_channel_as_highest_bit_and_count_zero_as_negative() -> None:
    z = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, -1.0], [-0.1, -0.2, 0.0]]).view(3, 3, 1, 1)
    out = quantizer_of("lfq", codebook_size=8)(z)
    assert out.codes.flatten().tolist() == [0b101, 0b010, 0b000]
    assert out.quantized[1].flatten().tolist() == [-1, 1, -1]
