"""One clock, and what shows it."""

import io

import pytest

from tandem.io.writing import say
from tandem.training.logging.progress import Progress, ProgressDisplay, describe_changes, run_length


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("epochs", "max_steps", "size", "batch_size", "expected"),
    [(2, None, 100, 10, 20), (2, 7, 100, 10, 7), (2, 1000, 100, 10, 20), (1, None, 114, 8, 15),
     (0.1, None, 70, 7, 1), (0.001, None, 10, 8, 1), (0.5, None, 101, 1, 50)],
)  # fmt: skip
def test_length_is_whole_updates_of_the_shorter_limit(epochs, max_steps, size, batch_size, expected):
    assert run_length(epochs, max_steps, size, batch_size)[0] == expected


@pytest.mark.parametrize(
    ("limits", "flag", "text"),
    [((2, None, 100, 10), "--epochs", "20 updates (--epochs 2)"),
     ((2, 7, 100, 10), "--max_steps", "7 updates (--max_steps 7; --epochs 2 would make 20)"),
     ((2, 20, 100, 10), "--epochs", "20 updates (--epochs 2)"),
     ((2, 1000, 100, 10), "--epochs", "20 updates (--epochs 2, which ends the run before --max_steps 1000)"),
     ((1e9, 1, 100, 10), "--max_steps", "1 update (--max_steps 1)"),
     ((2, None, 100, 10, 90.0), "--epochs", "20 updates (--epochs 2; at most 90 minutes by --max_minutes)")],
)  # fmt: skip
def test_a_run_says_which_flag_ends_it(limits, flag, text):
    assert run_length(*limits)[1:] == (flag, text)


def test_the_time_left_is_that_of_the_limit_that_comes_first():
    def left(max_seconds_left: float) -> str:
        stream, progress = io.StringIO(), Progress(4, 16, 10**12)
        display = ProgressDisplay(progress, True, stream, max_seconds_left=lambda: max_seconds_left)
        progress.advance()
        display.log({"loss": 1.0})
        return stream.getvalue().split()[-1]

    assert left(90.0) == "1:30" and left(-5.0) == "0:00"
    assert "d" in left(float("inf")), "so many updates take days"


def test_a_run_whose_last_update_is_made_has_no_time_left():
    stream, progress = io.StringIO(), Progress(4, 16, 10**12)
    display = ProgressDisplay(progress, True, stream)
    progress.advance()
    progress.last_step = 1
    display.log({"loss": 1.0})
    assert stream.getvalue().split()[-1] == "0:00"


def test_the_bar_of_a_terminal_shows_the_same_time_left():
    stream, progress = Terminal(), Progress(4, 16, 10**12)
    display = ProgressDisplay(progress, True, stream, max_seconds_left=lambda: 90.0)
    progress.advance()
    display.update()
    display.log({"loss": 1.0})
    assert "1:30 left" in stream.getvalue()


@pytest.mark.parametrize(
    ("parts", "device", "bits"), [((4, 4), "cpu", True), ((4, 8), "cpu", False), ((4, 4), "cuda:0", False),
                                  ((0, 0), "cpu", False)],
)  # fmt: skip
def test_only_a_batch_in_the_same_parts_keeps_its_bits_on_another_backend(parts, device, bits):
    before = {"backend": "single", "world_size": 1, "device": "cpu", "batch_parts": parts[0]}
    now = {"backend": "ddp", "world_size": 2, "device": device, "batch_parts": parts[1]}
    (line,) = describe_changes(before, now)
    assert ("gives the same bits" in line) is bits and ("seventh digit" in line) is not bits


@pytest.mark.parametrize("isatty", [False, True])
def test_a_terminal_that_is_gone_ends_nothing(isatty, monkeypatch):
    stream, progress = Terminal(), Progress(4, 16, 4)
    stream.isatty = lambda: isatty
    display = ProgressDisplay(progress, True, stream)

    def gone(text):
        raise BrokenPipeError(32, "Broken pipe")

    stream.write = gone
    progress.advance()
    display.update()
    display.log({"loss": 1.0})
    display.close()
    monkeypatch.setattr("sys.stderr", stream)
    say("stopped: nobody reads this")
