"""Lines of metrics as people read them: columns that stay in place, no wider than asked, no fault hidden."""

import math

import pytest

from tandem.training.logging.table import MetricsTable, format_number

COLUMNS = ("recon_loss", "codes_used", "discr_loss", "valid/psnr", "valid/loss")
LINE = {"loss": 0.5, "recon_loss": 0.25, "codes_used": 7, "samples_per_second": 54.321, "skipped_updates": 0,
        "bad_samples": 0, "data_seconds": 0.1, "peak_host_memory_gb": 0.5}  # fmt: skip


def test_a_fault_becomes_a_column_and_takes_the_place_of_the_least_important_one():
    table = MetricsTable(1400, COLUMNS, 100)
    assert len(list(table.lines(1, LINE, 8.0))) == 2
    heading, row = table.lines(2, {**LINE, "skipped_updates": 3, "bad_samples": 1}, 8.0)
    assert heading.split()[-2:] == ["skipped_updates", "bad_samples"] and row.split()[-2:] == ["3", "1"]
    assert len(heading) == len(row) <= 100 and "recon_loss" in heading and "discr_loss" not in heading
    assert len(list(table.lines(3, {**LINE, "skipped_updates": 3, "bad_samples": 2}, 8.0))) == 1


def test_a_validation_is_a_line_of_its_own_with_what_changed():
    table = MetricsTable(1400, COLUMNS, 100)
    first = {"valid/loss": 0.0512, "valid/psnr": 20.5, "valid/ema/psnr": 19.0, "valid/ema/loss": 0.06}
    first["valid/ssim"] = 0.7
    (line,) = table.lines(250, {**first, "bad_samples": 0, "samples_per_second": 9.0}, 8.0)
    assert line.split() == ["valid", "250/1400", "psnr", "20.50", "ema/psnr", "19.00", "loss", "0.05120"]
    second = {**first, "valid/psnr": 22.25, "valid/loss": 0.0412, "valid_whole/psnr": 22.0}
    _, _, line, whole = table.lines(500, {**LINE, **second}, 8.0)
    told = ["psnr", "22.25", "(+1.75)", "ema/psnr", "19.00", "(+0.00)", "loss", "0.04120", "(-0.01000)"]
    assert line.split() == ["valid", "500/1400", *told]
    assert whole.split() == ["whole", "500/1400", "psnr", "22.00"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.362331, ".3623"), (18.2, "18.20"), (123.456, "123.5"), (0.99996, "1.000"), (7.0144e-5, "7.01e-05"), (12, "12"),
     (998765.0, "998765"), (-2e6, "-2.00e+06"), (0.0, "0.000"), (math.nan, "nan"), (None, "-"), ("text", "text")],
)  # fmt: skip
def test_numbers_have_four_significant_digits(value, text):
    assert format_number(value).removeprefix("0" if text.startswith(".") else "") == text
