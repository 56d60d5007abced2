"""What a run costs: waits, memory and utilisation of the device."""

from __future__ import annotations

import time

import pytest
import torch

from tests.training.processes import OneProcess
from training.run import costs
from training.run.costs import Costs, peak_flops


@pytest.fixture
def process() -> OneProcess:
    return OneProcess()


def test_waits_are_those_since_the_last_line_without_evaluations(process):
    measured = Costs(process, precision="fp32", compiled=False)
    process.waited = {"data": 2.0, "communication": 1.0}
    with measured.paused():
        process.waited = {"data": 7.0, "communication": 4.0}
    process.waited = {"data": 7.5, "communication": 4.0}
    assert measured.waits() == {"data_seconds": 2.5, "communication_seconds": 1.0, "save_seconds": 0.0}
    assert set(measured.waits().values()) == {0.0}


def test_a_save_is_counted_even_within_an_evaluation(process):
    measured = Costs(process, precision="fp32", compiled=False)
    with measured.paused(), measured.saving():
        time.sleep(0.01)
    assert measured.waits()["save_seconds"] >= 0.01


def test_the_memory_is_that_of_the_process_at_its_peak(process):
    measured = Costs(process, precision="fp32", compiled=False)
    before = measured.memory()["peak_host_memory_gb"]
    block = torch.ones(100_000_000 + int(before * 1e9 / 4))  # larger than all that the process ever had
    del block
    assert measured.memory()["peak_host_memory_gb"] >= before + 0.4
    assert measured.memory().keys() == {"peak_host_memory_gb"}, "there is no GPU"


def layer_and_update() -> tuple[torch.nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 4, bias=False)
    return layer, torch.randn(2, 8, requires_grad=True)


def test_the_operations_of_the_first_update_are_counted_and_change_nothing(process, monkeypatch):
    monkeypatch.setattr(costs, "peak_flops", lambda device, precision: 1000.0)
    measured = Costs(process, precision="fp32", compiled=False)
    assert measured.utilisation(1.0) == {}
    gradients = []
    for _ in range(2):
        layer, inputs = layer_and_update()
        with measured.counting(0):
            layer(inputs).square().sum().backward()
        gradients.append(layer.weight.grad)
    assert torch.equal(*gradients)
    # Forward, gradient of the input and gradient of the weight: three products of 2 x 8 x 4, a multiplication and an
    # addition for each.
    assert measured.utilisation(2.0) == {"flop_utilisation": 3 * 2 * (2 * 8 * 4) * 2.0 / 1000.0}


def test_an_update_that_is_counted_may_ask_for_gradients_of_its_own(process, monkeypatch):
    monkeypatch.setattr(costs, "peak_flops", lambda device, precision: 1000.0)
    measured = Costs(process, precision="fp32", compiled=False)
    layer, inputs = layer_and_update()
    with measured.counting(0):
        out = layer(inputs)
        torch.autograd.grad(out.sum(), layer.weight, retain_graph=True)
        out.sum().backward()
    assert measured.utilisation(1.0)["flop_utilisation"] > 0


def test_the_operations_are_counted_again_from_time_to_time(process, monkeypatch):
    monkeypatch.setattr(costs, "peak_flops", lambda device, precision: 1000.0)
    measured = Costs(process, precision="fp32", compiled=False)
    found = []
    for step in (7, 8, 1000):
        with measured.counting(step):
            for _ in range(step):
                torch.ones(1, 10) @ torch.ones(10, 1)
        found.append(measured.utilisation(1.0)["flop_utilisation"])
    assert found == [0.14, 0.14, 20.0]


def test_on_a_gpu_the_waits_for_computing_are_not_taken_for_communication(process):
    process.device = torch.device("cuda")
    measured = Costs(process, precision="fp32", compiled=True)
    assert measured.waits().keys() == {"data_seconds", "save_seconds"}


def test_nothing_is_counted_without_a_known_peak_or_of_a_compiled_model(process, monkeypatch):
    assert Costs(process, precision="fp32", compiled=False).utilisation(1.0) == {}
    monkeypatch.setattr(costs, "peak_flops", lambda device, precision: 1000.0)
    measured = Costs(process, precision="fp32", compiled=True)
    with measured.counting(0):
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert measured.utilisation(1.0) == {}


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [("NVIDIA A100-SXM4-80GB", "bf16", 312.0), ("NVIDIA A100-SXM4-80GB", "fp32", 19.5), ("NVIDIA H200", "tf32", 494.5),
     ("NVIDIA H100 80GB HBM3", "fp16", 989.5), ("NVIDIA H100 PCIe", "bf16", 756.5), ("NVIDIA L40S", "bf16", 362.0),
     ("NVIDIA L4", "bf16", 121.0),
     ("NVIDIA H200 NVL", "fp32", 60.0), ("NVIDIA A10", "fp32", 31.2), ("NVIDIA A10G", "fp32", None),
     ("NVIDIA GeForce RTX 3060", "fp32", None)],
)  # fmt: skip
def test_the_peak_is_that_of_the_device_and_precision(monkeypatch, name, precision, teraflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    expected = None if teraflops is None else teraflops * 1e12
    assert peak_flops(torch.device("cuda", 0), precision) == expected
    assert peak_flops(torch.device("cpu"), precision) is None
