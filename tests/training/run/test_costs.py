"""What a run costs: waits, memory and utilisation of the device."""

from __future__ import annotations

import time

import pytest
import torch

from tests.processes import Process
from training.run.costs import Costs, counted, peak_flops


@pytest.fixture
def process() -> Process:
    return Process()


def test_waits_are_those_since_the_last_line_without_evaluations(process):
    measured = Costs(process)
    process.watchdog.waited = {"data": 2.0, "communication": 1.0}
    with measured.paused():
        process.watchdog.waited = {"data": 7.0, "communication": 4.0}
    process.watchdog.waited = {"data": 7.5, "communication": 4.0}
    assert measured.waits() == {"data_seconds": 2.5, "communication_seconds": 1.0, "save_seconds": 0.0}
    assert set(measured.waits().values()) == {0.0}


def test_a_save_is_counted_even_within_an_evaluation(process):
    measured = Costs(process)
    with measured.paused(), measured.saving():
        time.sleep(0.01)
    assert measured.waits()["save_seconds"] >= 0.01


def test_the_memory_is_that_of_the_process_at_its_peak(process):
    measured = Costs(process)
    before = measured.memory()["peak_host_memory_gb"]
    block = torch.ones(100_000_000 + int(before * 1e9 / 4))  # larger than all that the process ever had
    del block
    assert measured.memory()["peak_host_memory_gb"] >= before + 0.4
    assert measured.memory().keys() == {"peak_host_memory_gb"}, "there is no GPU"


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


def test_on_a_gpu_the_waits_for_computing_are_not_taken_for_communication(process):
    process.device = torch.device("cuda")
    measured = Costs(process)
    assert measured.waits().keys() == {"data_seconds", "save_seconds"}


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
