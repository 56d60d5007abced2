"""Training time leaves out what is not training, and a time limit leaves room for the last save."""

from unittest.mock import ANY

from tandem.training.logging import clock
from tandem.training.logging.clock import Clock
from tests.processes import Process


def test_the_rate_leaves_out_pauses_and_the_total_does_not(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("tandem.training.logging.clock.time.monotonic", lambda: now[0])
    watch = Clock(Process())
    now[0] += 5
    with watch.paused():
        now[0] += 20
    now[0] += 1
    assert watch.times(12) == {"samples_per_second": 2.0, "seconds": 26.0, "time": ANY}
    now[0] += 2
    assert watch.times(18) == {"samples_per_second": 3.0, "seconds": 28.0, "time": ANY}


def test_room_for_the_last_save_grows_with_updates_and_saves(monkeypatch):
    now, asked = 100.0, [0.0]
    monkeypatch.setattr(clock, "process_seconds", lambda: now)
    monkeypatch.setattr(clock.time, "monotonic", lambda: asked[-1])
    watch = Clock(Process(), minutes=60)
    for seconds in (0.0, 30.0, 60.0):
        asked.append(seconds)
        assert not watch.is_late(save_seconds=20.0)
    now = 3600 - 2 * (3 * 30 + 20) - 1
    assert not watch.is_late(save_seconds=20.0) and watch.is_late(save_seconds=21.0)
    assert not Clock(Process()).is_late(save_seconds=1e9)


def test_the_share_of_a_validation_is_that_of_the_time_since_the_one_before(monkeypatch):
    now, shares = [100.0], []
    monkeypatch.setattr("tandem.training.logging.clock.time.monotonic", lambda: now[0])
    watch = Clock(Process())
    for training, validating in ((50.0, 20.0), (9.0, 1.0), (4.0, 1.0), (0.0, 0.0)):
        now[0] += training
        start = now[0]
        now[0] += validating
        shares.append(watch.end_validation(start))
    assert shares == [0.0, 0.1, 0.2, 0.0]


def test_a_look_at_the_clock_comes_before_half_of_what_is_left_and_in_the_end_after_each_update(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(clock.time, "monotonic", lambda: now[-1])
    watch = Clock(Process(), save_minutes=20, run_minutes=30)
    watch.begin(600.0, 0)  # 10 minutes of earlier starts
    now[-1] = 60.0
    assert watch.check_limits(1) == (False, False, (1200 - 60) // 120), "half of what is left, in updates of 60 s"
    for now[-1] in (60.0, 63.0, 65.0):
        watch.is_late(save_seconds=0.0)
    assert watch.check_limits(65) == (False, False, (1200 - 65) // 6), "the slowest update took 3 s"
    now[-1] = 1195.0
    assert watch.check_limits(1195) == (False, False, 1)
    now[-1] = 1200.0
    assert watch.check_limits(1200) == (True, True, 1200 // 6), "a save begins now"
    with watch.saving():
        now[-1] = 1250.0
    assert watch.check_limits(1250) == (False, True, 1200 // 6)
    assert Clock(Process()).check_limits(1) == (False, False, 1000)
