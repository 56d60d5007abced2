"""What a run costs: memory and utilisation of the device."""

from __future__ import annotations

import pytest
import torch

from training.run.costs import counted, peak_flops


def test_the_operations_of_an_update_are_counted_that_asks_for_gradients_of_its_own():
    layer, inputs = torch.nn.Linear(8, 4, bias=False), torch.randn(2, 8, requires_grad=True)
    found = []
    with counted(found):
        out = layer(inputs)
        torch.autograd.grad(out.sum(), layer.weight, retain_graph=True)
        out.sum().backward()
    # Forward, gradient of the weight, and both gradients: four products of 2 x 8 x 4, a multiplication and an addition
    # for each.
    assert found == [4 * 2 * (2 * 8 * 4)]


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [("NVIDIA A100-SXM4-80GB", "fp32", 19.5), ("NVIDIA H100 80GB HBM3", "fp16", 989.5),
     ("NVIDIA H100 PCIe", "bf16", 756.5), ("NVIDIA L40S", "bf16", 362.0), ("NVIDIA L4", "bf16", 121.0),
     ("NVIDIA A10G", "fp32", None)],
)  # fmt: skip
def test_the_peak_is_that_of_the_device_and_precision(monkeypatch, name, precision, teraflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    expected = None if teraflops is None else teraflops * 1e12
    assert peak_flops(torch.device("cuda", 0), precision) == expected
    assert peak_flops(torch.device("cpu"), precision) is None
