"""Lines of metrics as people read them: columns that stay in place, no wider than asked, no fault hidden."""

import math

import pytest

from training.run.table import MetricsTable, difference, number, time_left

FAULTS = ("skipped_updates", "bad_samples", "partial_samples")
COLUMNS = ("recon_loss", "codes_used", "discr_loss", "valid/psnr", "valid/loss")
LINE = {"loss": 0.5, "recon_loss": 0.25, "codes_used": 7, "samples_per_second": 54.321, "skipped_updates": 0,
        "bad_samples": 0, "data_seconds": 0.1, "peak_host_memory_gb": 0.5}  # fmt: skip


def ends(line: str) -> list[int]:
    """Where the words of a line end."""
    return [n for n, sign in enumerate(line) if sign != " " and line[n + 1 : n + 2] in ("", " ")]


def test_columns_stay_in_place_whatever_the_values():
    table, rows = MetricsTable(2000, COLUMNS, 100), []
    values = [0.06431, -123.456, 1e-9, 9.99996, 0.0, math.nan, math.inf, -1234567.0, None, 12345]
    for step, value in enumerate(values, start=994):
        rate = 10.0 ** (step - 994)
        rows += table.lines(step, {**LINE, "loss": value, "samples_per_second": min(rate, 1e5)}, 5.0 ** (step - 994))
    heading, *rows = rows
    assert heading.split() == ["loss", "recon_loss", "codes_used", "discr_loss", "samples/s", "left"]
    assert len(rows) == len(values) and max(map(len, rows)) <= 100
    assert all(ends(row) == ends(rows[0]) and ends(heading) == ends(row)[2:] for row in rows)


def test_what_has_no_value_yet_is_a_dash_and_a_zero_of_a_fault_is_not_shown():
    """As the loss of a discriminator that has not started."""
    heading, row = MetricsTable(20, COLUMNS, 100).lines(3, LINE, None)
    assert "skipped_updates" not in heading and "bad_samples" not in heading
    assert row.split() == ["update", "3/20", "0.5000", "0.2500", "7", "-", "54.32", "-"]


def test_a_fault_becomes_a_column_and_takes_the_place_of_the_least_important_one():
    table = MetricsTable(1400, COLUMNS, 100)
    assert len(list(table.lines(1, LINE, 8.0))) == 2
    heading, row = table.lines(2, {**LINE, "skipped_updates": 3, "bad_samples": 1}, 8.0)
    assert heading.split()[-2:] == ["skipped_updates", "bad_samples"] and row.split()[-2:] == ["3", "1"]
    assert len(heading) == len(row) <= 100 and "recon_loss" in heading and "discr_loss" not in heading
    assert len(list(table.lines(3, {**LINE, "skipped_updates": 3, "bad_samples": 2}, 8.0))) == 1


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_line_is_wider_than_asked(width):
    many = [*(f"unet{n}/error" for n in range(9)), *(f"valid/metric_{n}" for n in range(9))]
    table = MetricsTable(10**6, many, width)
    values = dict.fromkeys(many, 1.0) | {f"valid/ema_{n}/metric_0": 1.0 for n in range(3)}
    for step in (10**5, 2 * 10**5):
        lines = list(table.lines(step, {**LINE, **values, **dict.fromkeys(FAULTS, 5)}, 1e6))
        assert max(map(len, lines)) <= width and any("metric_0" in line for line in lines)
        assert all("0.5000" in line for line in lines if line.startswith("update"))


def test_a_heading_comes_back_after_a_screen():
    table = MetricsTable(100, (), 100)
    lines = [line for step in range(1, 42) for line in table.lines(step, {"loss": 1.0}, 1.0)]
    assert [n for n, line in enumerate(lines) if "loss" in line] == [0, 21, 42]


def test_a_validation_is_a_line_of_its_own_with_what_changed():
    table = MetricsTable(1400, COLUMNS, 100)
    first = {
        "valid/loss": 0.0512,
        "valid/psnr": 20.5,
        "valid/ema/psnr": 19.0,
        "valid/ema/loss": 0.06,
        "valid/ssim": 0.7,
    }
    (line,) = table.lines(250, {**first, "bad_samples": 0, "samples_per_second": 9.0}, 8.0)
    assert line.split() == ["valid", "250/1400", "psnr", "20.50", "ema/psnr", "19.00", "loss", "0.05120"]
    second = {**first, "valid/psnr": 22.25, "valid/loss": 0.0412, "valid_whole/psnr": 22.0}
    _, _, line, whole = table.lines(500, {**LINE, **second}, 8.0)
    told = ["psnr", "22.25", "(+1.75)", "ema/psnr", "19.00", "(+0.00)", "loss", "0.04120", "(-0.01000)"]
    assert line.split() == ["valid", "500/1400", *told]
    assert whole.split() == ["whole", "500/1400", "psnr", "22.00"]


def test_columns_of_validations_stay_in_place_whatever_the_values():
    """A loss that falls below 0.1 has a digit more, and so has its change."""
    table, lines = MetricsTable(100000, ("valid/loss", "valid/psnr", "valid/codes_used"), 100), []
    values = [12345.678, 0.36, 0.1032, 0.09903, 0.09475, 8.8e-5, 8.7e-5, 1e-7, 0.0, math.nan, math.inf, 2e6, 1.0]
    for step, value in enumerate(values):
        metrics = {"valid/loss": value, "valid/psnr": 15.0 + step, "valid/codes_used": 250 + step}
        lines += table.lines(step, metrics, None)
    assert len({line.index("psnr") for line in lines}) == len({line.index("codes_used") for line in lines}) == 1
    assert max(map(len, lines)) <= 100


def test_a_measure_of_the_average_alone_is_shown_and_compared_with_its_last_one():
    """As what is measured of the pictures that a decoder has drawn, rarely, with the model that is kept."""
    table = MetricsTable(10, ("valid/loss", "valid/fid"), 100)
    told = [*table.lines(2, {"valid/ema/fid": 50.0}, 1.0), *table.lines(4, {"valid/loss": 1.0}, 1.0),
            *table.lines(6, {"valid/ema/fid": 40.0}, 1.0)]  # fmt: skip
    assert told[-1].split() == ["valid", "6/10", "ema/fid", "40.00", "(-10.00)"]


def test_after_a_resume_the_change_is_that_since_the_validation_of_the_start_before():
    table = MetricsTable(10, (), 100)
    table.remember(
        {"step": 2, "loss": 1.0, "valid/psnr": 20.0, "valid/ssim": None, "valid/x": "text", "valid/y": 10**400}
    )
    (line,) = table.lines(4, {"valid/psnr": 21.0, "valid/ssim": 0.5, "valid/x": 1.0, "valid/y": 2.0}, 1.0)
    assert line.split() == ["valid", "4/10", "psnr", "21.00", "(+1.00)", "ssim", "0.5000", "x", "1.000", "y", "2.000"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.362331, ".3623"), (18.2, "18.20"), (123.456, "123.5"), (0.99996, "1.000"), (7.0144e-5, "7.01e-05"), (12, "12"),
     (998765.0, "998765"), (-2e6, "-2.00e+06"), (0.0, "0.000"), (math.nan, "nan"), (None, "-"), ("text", "text")],
)  # fmt: skip
def test_numbers_have_four_significant_digits(value, text):
    assert number(value).removeprefix("0" if text.startswith(".") else "") == text


@pytest.mark.parametrize(
    ("value", "before", "text"),
    [(18.25, 17.0, "+1.25"), (0.06431, 0.07, "-0.00569"), (7, 4, "+3"), (3e-5, 4e-5, "-1.0e-05"), (0.0, 1.0, "-1.000"),
     (0.06431, 12.5, "-12.44"), (0.5, 12345.678, "-12345"), (1e-3, 1.00095, "-1.000"), (math.nan, 1.0, "+nan")],
)  # fmt: skip
def test_a_change_has_the_decimals_of_its_value_but_no_more_than_four_digits(value, before, text):
    assert difference(value, before) == text


def test_times_left_are_short():
    texts = ["0:00", "0:08", "3:20", "59:59", "1h00", "5h02", "99h59", "4d04h"]
    assert [time_left(seconds) for seconds in (-3, 8, 200, 3599.4, 3599.6, 18120, 359999, 360000)] == texts
