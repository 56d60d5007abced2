"""Training time leaves out what is not training, and a time limit leaves room for the last save."""

from training.run import stopwatch
from training.run.stopwatch import Deadline, Stopwatch


def test_laps_leave_out_pauses_and_the_total_does_not(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("training.run.stopwatch.time.monotonic", lambda: now[0])
    watch = Stopwatch()
    now[0] += 5
    with watch.paused():
        now[0] += 20
    now[0] += 1
    assert (watch.lap(), watch.seconds) == (6, 26)
    now[0] += 2
    assert (watch.lap(), watch.seconds) == (2, 28)


def test_room_for_the_last_save_grows_with_updates_and_saves(monkeypatch):
    now = 100.0
    monkeypatch.setattr(stopwatch, "process_seconds", lambda: now)
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: now)
    deadline = Deadline(minutes=60)
    for _ in range(3):
        deadline.asked()
        now += 30.0
    now = 3600 - 2 * (3 * 30 + 20) - 1
    assert not deadline.near(save_seconds=20.0) and deadline.near(save_seconds=21.0)
    assert not Deadline(minutes=None).near(save_seconds=1e9)
