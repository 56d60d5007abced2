"""Lines of metrics as people read them: columns that stay in place, no wider than asked, no fault hidden."""

import math

import pytest

from tandem.training.logging.table import MetricsTable, format_number

COLUMNS = ("recon_loss", "codes_used", "discr_loss", "valid/psnr", "valid/loss")
LINE = {"loss": 0.5, "recon_loss": 0.25, "codes_used": 7, "samples_per_second": 54.321, "skipped_updates": 0,
        "bad_samples": 0, "data_seconds": 0.1, "peak_host_memory_gb": 0.5}  # fmt: skip


def test_rows_keep_their_columns_within_the_width_and_hide_no_fault():
    table = MetricsTable(1400, COLUMNS, 80)
    heading, row = table.lines(1, LINE, 8.0)
    assert len(heading) == len(row) <= 80 and "recon_loss" in heading and "discr_loss" not in heading
    assert row.split() == ["update", "1/1400", "0.5000", "0.2500", "7", "54.32", "0:08"]
    (faulty,) = table.lines(2, {**LINE, "skipped_updates": 3, "bad_samples": 1}, 8.0)
    assert faulty == row.replace("   1/", "   2/") + "  skipped_updates 3  bad_samples 1"
    assert [len(list(table.lines(step, LINE, 8.0))) for step in range(3, 23)] == [1] * 18 + [2, 1]


def test_a_validation_is_a_line_of_its_own_in_which_the_last_values_have_no_room():
    table = MetricsTable(1400, COLUMNS, 60)
    values = {"valid/loss": 0.0512, "valid/psnr": 20.5, "valid/ema/psnr": 19.0, "valid/ema/loss": 0.06}
    (line,) = table.lines(250, {**values, "valid/ssim": 0.7, "bad_samples": 0, "samples_per_second": 9.0}, 8.0)
    assert line.split() == ["valid", "250/1400", "psnr", "20.50", "ema/psnr", "19.00", "loss", "0.05120"]
    *_, line, whole = MetricsTable(1400, COLUMNS, 45).lines(500, {**LINE, **values, "valid_whole/psnr": 22.0}, 8.0)
    assert line.split()[2:] == ["psnr", "20.50", "ema/psnr", "19.00"]
    assert whole.split() == ["whole", "500/1400", "psnr", "22.00"]
    (line,) = MetricsTable(9, ("codes_used",), 100).lines(1, {"valid/loss": 0.5, "valid/ema/loss": 0.25}, None)
    assert line.split()[2:] == ["loss", "0.5000", "ema/loss", "0.2500"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.362331, ".3623"), (18.2, "18.20"), (123.456, "123.5"), (0.99996, "1.000"), (7.0144e-5, "7.01e-05"), (12, "12"),
     (998765.0, "998765"), (-2e6, "-2.00e+06"), (0.0, "0.000"), (math.nan, "nan"), (None, "-"), ("text", "text")],
)  # fmt: skip
def test_numbers_have_four_significant_digits(value, text):
    assert format_number(value).removeprefix("0" if text.startswith(".") else "") == text
