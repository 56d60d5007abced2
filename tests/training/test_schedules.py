"""The shapes of learning rates, temperatures and weights."""

from __future__ import annotations

import math

import pytest

from tandem import schedules


@pytest.mark.parametrize("lowest", [0.0, 0.1])
def test_the_rate_warms_up_falls_along_a_cosine_and_does_not_climb_again(lowest: float) -> None:
    rates = [schedules.with_warmup("cosine", step, 110, 2.0, 10, lowest) for step in range(300)]
    assert rates[:10] == pytest.approx([0.2 * (n + 1) for n in range(10)]) and rates[9:11] == [2.0, 2.0]
    assert rates[35] == pytest.approx(2 * lowest + (1 - lowest) * (1 + math.cos(math.pi / 4)))
    assert rates[60] == pytest.approx(1 + lowest) and rates[110] == pytest.approx(2 * lowest)
    assert rates[10:] == sorted(rates[10:], reverse=True) and set(rates[110:]) == {2 * lowest}


def test_a_warm_up_takes_at_most_half_of_the_run() -> None:
    assert [schedules.limit_warmup(10, total) for total in (8, 20, 100)] == [4, 10, 10]
    assert [schedules.with_warmup("constant", step, 4, 1.0, 1000) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]


def test_a_line_ends_at_its_last_value_and_has_it_from_the_start_if_it_has_no_length() -> None:
    assert [schedules.linear(step, 200, 3.0, 1.0) for step in (0, 100, 200, 5000)] == [3.0, 2.0, 1.0, 1.0]
    assert [schedules.linear(step, 4, 0.0, 1.0) for step in (0, 1, 4, 5)] == [0.0, 0.25, 1.0, 1.0]
    assert schedules.linear(0, 0, 3.0, 1.0) == 1.0
