"""--profile_steps."""

from __future__ import annotations

from training.run.profiling import Profiler


def made(profiler, *numbers):
    for number in numbers:
        with profiler.update(number):
            pass
    profiler.close()


def test_what_was_recorded_is_written_where_the_run_ends_earlier(tmp_path):
    said = []
    made(Profiler((2, 9), tmp_path / "profile", said.append), 1, 2, 3)
    assert {path.name for path in (tmp_path / "profile").iterdir()} == {"updates_2-3.json.gz", "updates_2-3.txt"}
    assert len(said) == 1 and "updates_2-3.json.gz" in said[0]


def test_a_start_that_makes_none_of_the_updates_says_so(tmp_path):
    said = []
    made(Profiler((8, 9), tmp_path, said.append), 1, 2)
    assert said == ["--profile_steps 8:9: this start made none of these updates"] and not list(tmp_path.iterdir())


def test_nothing_is_said_where_nothing_was_asked_for(tmp_path):
    said = []
    made(Profiler(None, tmp_path, said.append), 1)
    assert not said
