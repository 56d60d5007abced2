"""One clock, and what shows it."""

import io
import re

import pytest

from tandem.io.writing import say
from tandem.training.logging.progress import Progress, ProgressDisplay, describe_changes, run_length


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("limits", "steps", "flag", "text"),
    [((2, None, 100, 10), 20, "--epochs", "20 updates (--epochs 2)"),
     ((2, 7, 100, 10), 7, "--max_steps", "7 updates (--max_steps 7; --epochs 2 would make 20)"),
     ((2, 20, 100, 10), 20, "--epochs", "20 updates (--epochs 2)"),
     ((2, 1000, 100, 10), 20, "--epochs", "20 updates (--epochs 2, which ends the run before --max_steps 1000)"),
     ((1e9, 1, 100, 10), 1, "--max_steps", "1 update (--max_steps 1)"),
     ((2, None, 100, 10, 90.0), 20, "--epochs",
      "20 updates (--epochs 2) or 90 minutes (--max_minutes), whichever comes first"),
     ((1, None, 114, 8), 15, "--epochs", "15 updates (--epochs 1)"),
     ((0.1, None, 70, 7), 1, "--epochs", "1 update (--epochs 0.1)"),
     ((0.001, None, 10, 8), 1, "--epochs", "1 update (--epochs 0.001)"),
     ((0.5, None, 101, 1), 50, "--epochs", "50 updates (--epochs 0.5)")],
)  # fmt: skip
def test_length_is_whole_updates_of_the_shorter_limit_and_says_which_flag_ends_it(limits, steps, flag, text):
    assert run_length(*limits) == (steps, flag, text)


@pytest.mark.parametrize(
    ("max_seconds_left", "last_step", "left"),
    [(90.0, 10**12, "1:30"), (-5.0, 10**12, "0:00"), (None, 1, "0:00"), (None, 10**12, "d")],
)
def test_the_time_left_is_that_of_the_limit_that_comes_first_in_lines_and_bar(max_seconds_left, last_step, left):
    for stream in (io.StringIO(), Terminal()):
        progress = Progress(4, 16, 10**12)
        display = ProgressDisplay(
            progress, True, stream, max_seconds_left=max_seconds_left and (lambda: max_seconds_left)
        )
        progress.advance()
        progress.last_step = last_step
        display.update()
        display.log({"loss": 1.0})
        row = next(line for line in stream.getvalue().splitlines() if "1.000" in line)
        assert left in row.split()[-1]
        assert row.split()[1] == ("1" if max_seconds_left else f"1/{10**12}")
        assert (f"/{10**12}" in stream.getvalue()) == (max_seconds_left is None), "a total that the run does not reach"
    assert re.search(rf"{left}\S* left", stream.getvalue()), "the bar"


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

    attempts = []

    def gone(text):
        attempts.append(text)
        raise BrokenPipeError(32, "Broken pipe")

    stream.write = gone
    progress.advance()
    display.update()
    display.log({"loss": 1.0})
    display.close()
    monkeypatch.setattr("sys.stderr", stream)
    say("stopped: nobody reads this")
    assert "stopped: nobody reads this" in "".join(attempts) and "1.000" in "".join(attempts)
