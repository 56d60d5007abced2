"""Training time leaves out what is not training."""

from training.run.stopwatch import Stopwatch


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
