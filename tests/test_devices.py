"""Devices that lack what a GPU has. On the CPU, which is told that it lacks it: nothing here computes on such a one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tandem import devices
from tandem.distributed.collectives import Communicator
from tandem.distributed.engines.arithmetic import gradient_norm
from tandem.models.diffusion.schedule import Schedule
from tandem.models.quantizers.base import GlobalMean
from tandem.models.quantizers.vector import sums_by_code
from tandem.training.losses.contrastive import KINDS, Contrastive
from tests.processes import Process


class NoFp64(TorchDispatchMode):
    """Raises where an operation takes or makes a tensor in fp64."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        wide = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        assert all(value.dtype != torch.float64 for value in wide), f"{function} in fp64"
        return result


@pytest.fixture
def without_fp64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(devices, "has_fp64", lambda device: False)
    with NoFp64():
        yield


@pytest.mark.usefixtures("without_fp64")
def test_sums_within_an_update_need_no_fp64() -> None:
    rows = torch.arange(24.0).view(8, 3)
    assert gradient_norm([rows, rows]).item() == pytest.approx((2 * sum(n * n for n in range(24))) ** 0.5)
    counts, sums = sums_by_code(rows, torch.tensor([0, 1] * 4), 3)
    assert counts.tolist() == [4, 4, 0]
    assert sums.tolist() == [[36, 40, 44], [48, 52, 56], [0, 0, 0]]
    assert GlobalMean()(rows.sum(0), 8, None).tolist() == [10.5, 11.5, 12.5]
    assert GlobalMean()(rows.sum(0), 8, lambda packed: packed).tolist() == [10.5, 11.5, 12.5]
    assert Communicator().sum_tensor(rows).dtype == torch.float32


@pytest.mark.usefixtures("without_fp64")
def test_counts_are_read_exactly_without_fp64() -> None:
    assert devices.to_numbers([torch.tensor(2**24 + 1), torch.tensor(0.5)]) == [2**24 + 1, 0.5]


@pytest.mark.usefixtures("without_fp64")
@pytest.mark.parametrize("kind", KINDS)
def test_contrastive_losses_need_no_fp64(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    audio, text = (torch.nn.functional.normalize(torch.randn(6, 2, 4), dim=-1) for _ in range(2))
    scale, bias, captions = torch.ones(2), torch.zeros(2), torch.arange(6)
    result = Contrastive(kind, Process()).value_and_gradients(audio, text, scale, bias, captions)
    monkeypatch.setattr(devices, "has_fp64", lambda device: True)
    with _disable_current_modes():
        wide = Contrastive(kind, Process()).value_and_gradients(audio, text, scale, bias, captions)
    assert result.loss.item() == pytest.approx(wide.loss.item(), rel=1e-6)
    torch.testing.assert_close(result.audio_gradient, wide.audio_gradient)


def test_a_schedule_goes_to_a_device_without_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Schedule.from_name("cosine", 100)
    monkeypatch.setattr(devices, "has_fp64", lambda device: False)
    there = here.to("cpu")
    assert there.alpha.dtype == torch.float32 and here.alpha.dtype == torch.float64
    assert torch.equal(there.alpha, here.alpha.float())


def test_a_device_that_refuses_fp64_leaves_it_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.has_fp64("cpu") and devices.fp64_device("cpu").type == "cpu"
    assert devices.has_fp64("meta") and devices.fp64_device("meta").type == "meta"

    def refuse(*size: int, device: str) -> None:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")

    monkeypatch.setattr(torch, "ones", refuse)
    devices._has_fp64.cache_clear()
    assert not devices.has_fp64("mps") and devices.fp64_device("mps").type == "cpu"
    assert devices.sum_dtype(torch.device("mps")) == torch.float32
    devices._has_fp64.cache_clear()


def test_only_devices_with_memory_of_their_own_have_pinned_memory() -> None:
    assert [devices.has_pinned_memory(kind) for kind in ("cpu", "mps", "cuda", "xpu")] == [False, False, True, True]
