"""What a device could do, by its name, and which updates are counted."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.training.logging.operations import MAX_KINDS, Operations, measure_matmul_flops, peak_flops


@pytest.mark.parametrize(
    ("name", "bf16"),
    [("NVIDIA A100-SXM4-80GB", 312), ("A100-SXM4-40GB", 312), ("NVIDIA A100 80GB PCIe", 312),
     ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989),
     ("NVIDIA L4", 121), ("NVIDIA L40S", 362), ("NVIDIA GeForce RTX 4090", 165.2), ("AMD Instinct MI300X", 1307.4)],
)  # fmt: skip
def test_a_device_is_known_by_its_name(name: str, bf16: float) -> None:
    rates = [peak_flops(name, precision) for precision in ("bf16", "fp16", "tf32", "fp32")]
    assert rates[0] == rates[1] == bf16 * 1e12
    assert rates == sorted(rates, key=lambda rate: -(rate or 0))


@pytest.mark.parametrize(
    "name",
    ["NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA L40", "NVIDIA GH200 480GB",
     "Pretend", "", None],
)  # fmt: skip
def test_another_device_is_not_taken_for_one_that_is_known(name: str | None) -> None:
    assert peak_flops(name, "bf16") is None
    assert peak_flops("Tesla T4", "fp16") == 65e12 and peak_flops("Tesla T4", "bf16") is None, "no units for bf16"


def product(size: int) -> None:
    torch.ones(size, size) @ torch.ones(size, size)


def test_the_first_two_updates_of_a_kind_are_counted_and_the_later_one_holds() -> None:
    operations = Operations()
    for size in (4, 2, 8):
        with operations.update("kind"):
            product(size)
    assert operations.flops_of("kind") == 2 * 2**3
    assert math.isnan(operations.flops_of("another"))


def test_a_line_has_the_mean_of_the_updates_since_the_line_before_of_whatever_kind() -> None:
    operations = Operations()
    for size in (2, 4, 2, 2):
        with operations.update(size):
            product(size)
    assert operations.mean_since_line() == (3 * 2 * 2**3 + 2 * 4**3) / 4
    with operations.update(4):
        product(4)
    assert operations.mean_since_line() == 2 * 4**3
    assert math.isnan(operations.mean_since_line())  # no update since


def test_a_line_has_no_figure_while_one_of_its_updates_is_not_known() -> None:
    operations = Operations(is_compiled=True)
    for kind in ("a", "b", "a"):
        with operations.update(kind):
            product(2)
    assert math.isnan(operations.mean_since_line())
    for kind in ("a", "b"):
        with operations.update(kind):
            product(2)
    assert operations.mean_since_line() == 2 * 2**3
    unknown = Operations(is_compiled=True, hides_recomputation=True)
    for _ in range(3):
        with unknown.update("a"):
            product(2)
    assert math.isnan(unknown.mean_since_line())


def test_a_matrix_product_is_measured() -> None:
    assert 0 < measure_matmul_flops(torch.device("cpu"), "fp32") < math.inf


def test_ever_new_kinds_of_updates_are_not_counted_without_end() -> None:
    operations = Operations()
    for kind in range(MAX_KINDS + 3):
        with operations.update(kind):
            product(2)
    assert operations.flops_of(MAX_KINDS - 1) == 2 * 2**3 and math.isnan(operations.flops_of(MAX_KINDS))
    assert math.isnan(operations.mean_since_line())
    with operations.update(0):
        product(2)
    assert operations.mean_since_line() == 2 * 2**3
