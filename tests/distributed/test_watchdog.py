"""Which rank holds a job up: the root's verdict on simulated heartbeats, in simulated time."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import HashStore

from distributed import Backend, Launch, TrainingStopped, watchdog
from distributed.collectives import Alone
from distributed.watchdog import DEAD_AFTER_SECONDS, Watchdog

TIMEOUT_SECONDS = 60.0


class Job:
    """Ranks whose heartbeats the test writes, and the watchdog of the root."""

    def __init__(self, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(watchdog.time, "monotonic", lambda: self.now)
        self.watchdog = Watchdog(Alone(), torch.device("cpu"), Launch("python"), TIMEOUT_SECONDS / 60)
        self.watchdog._store, self.watchdog._world_size = HashStore(), world_size
        self.watchdog._store.set("silent", "")
        self.seen: dict[int, Any] = {}
        self.ranks: list[dict[str, Any]] = [
            {"beats": 0, "count": 0, "phase": "forward", "update": 5, "collective": False} for _ in range(world_size)
        ]

    def pass_time(self, seconds: float, *, moving: set[int], silent: Collection[int] = ()) -> str | None:
        """A heartbeat per second from all but ``silent``; ``moving`` ranks make progress. The last verdict."""
        verdict = None
        for _ in range(int(seconds)):
            self.now += 1
            for rank, beat in enumerate(self.ranks):
                beat["beats"] += rank not in silent
                beat["count"] += rank in moving
                self.watchdog._store.set(f"rank/{rank}", json.dumps(beat))
            verdict = self.watchdog._judge(self.seen)
        return verdict


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Job]:
    return lambda world_size: Job(world_size, monkeypatch)


def test_what_a_process_waited_for_is_added_up(job):
    many = job(2)
    for seconds, marks in ((3, {}), (5, {"collective": True}), (7, {}), (11, {"waits_for_data": True}), (13, {})):
        many.watchdog.mark("phase", **marks)
        many.now += seconds
    many.watchdog.mark("phase")
    assert many.watchdog.waited == {"communication": 5.0, "data": 11.0}


def test_a_pass_that_gathers_weights_is_computing_for_which_no_rank_is_blamed_while_another_stands(job):
    two = job(2)
    two.watchdog.mark("forward", gathers=True)
    two.now += 5
    assert two.watchdog._mark.collective
    two.watchdog.mark("computing")
    assert two.watchdog.waited == {"communication": 0.0, "data": 0.0} and not two.watchdog._mark.collective


def test_a_single_process_waits_for_no_other(job):
    one = job(1)
    one.watchdog.mark("sum over the processes", collective=True)
    one.now += 5
    one.watchdog.mark("computing")
    assert one.watchdog.waited == {"communication": 0.0, "data": 0.0}


REDUCING = {"phase": "reducing gradients", "collective": True}
NO_PROGRESS = "no progress for 1 minutes: "


@pytest.mark.parametrize(
    ("beats", "moving", "silent", "verdict"),
    [
        ({1: {"phase": "backward", "update": 7}}, {0, 2}, set(), "rank 1 stands at update 7 (backward)"),
        ({}, {0}, set(), "rank 1 stands at update 5 (forward); rank 2 stands at update 5 (forward)"),
        # Not those that wait in a collective for the busy one.
        ({0: REDUCING, 2: REDUCING}, set(), set(), "rank 1 stands at update 5 (forward)"),
        # Ranks 0 and 2 reduce update 9, rank 1 still reduces update 8: it left out a collective.
        ({0: {**REDUCING, "update": 9}, 1: {**REDUCING, "update": 8}, 2: {**REDUCING, "update": 9}}, set(), set(),
         "rank 1 stands at update 8 (reducing gradients)"),
        # Rank 2's process is stopped; ranks 0 and 1 wait for it, and rank 1 happens to be outside the collective.
        ({0: REDUCING, 2: {**REDUCING, "update": 4}}, set(), {2},
         "lost contact with rank 2 at update 4 (reducing gradients)"),
    ],
)  # fmt: skip
def test_the_verdict_names_who_holds_the_job_up_after_the_timeout_and_not_before(
    beats: dict[int, Any], moving: set[int], silent: set[int], verdict: str, job: Callable[[int], Job]
) -> None:
    three = job(3)
    assert three.pass_time(5 * TIMEOUT_SECONDS, moving={0, 1, 2}) is None
    for rank, beat in beats.items():
        three.ranks[rank].update(beat)
    assert three.pass_time(TIMEOUT_SECONDS, moving=moving, silent=silent) is None
    expected = verdict if silent else NO_PROGRESS + verdict
    assert three.pass_time(2, moving=moving, silent=silent) == expected


def test_waiting_alone_blames_nobody_while_the_others_move(job: Callable[[int], Job]) -> None:
    """Rank 1 may wait in a barrier while rank 0 writes a long checkpoint and marks its progress."""
    two = job(2)
    two.ranks[1].update(phase="sum over the processes", collective=True)
    assert two.pass_time(10 * TIMEOUT_SECONDS, moving={0}) is None


def test_where_all_stand_still_the_one_without_heartbeat_is_named(job: Callable[[int], Job]) -> None:
    three = job(3)
    three.pass_time(TIMEOUT_SECONDS - 10, moving=set())
    verdict = three.pass_time(12, moving=set(), silent={2})
    assert verdict == f"{NO_PROGRESS}rank 2 stands at update 5 (forward)"


@pytest.mark.parametrize("silent", [set(), {1}], ids=str)
def test_progress_after_a_pause_or_a_short_silence_starts_the_clock_again(
    silent: set[int], job: Callable[[int], Job]
) -> None:
    two = job(2)
    two.pass_time(5, moving={0, 1})
    assert two.pass_time(TIMEOUT_SECONDS - 1, moving={0}, silent=silent) is None
    assert two.pass_time(1, moving={0, 1}) is None
    assert two.pass_time(TIMEOUT_SECONDS - 1, moving={0}) is None
    assert two.pass_time(10, moving={0}) is not None


@pytest.mark.parametrize("silent", [set(), {2}], ids=str)
def test_after_a_failed_collective_every_rank_reads_from_the_root_whose_heartbeat_stopped(
    silent: set[int], job: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    three = job(3)
    three.pass_time(3, moving={0, 1, 2})
    slept = 0.0

    def sleep(seconds: float) -> None:
        nonlocal slept
        three.pass_time(int(slept + seconds) - int(slept), moving={0}, silent=silent)
        slept += seconds

    monkeypatch.setattr(watchdog.time, "sleep", sleep)
    store = three.watchdog._store
    other = Watchdog(Alone(), torch.device("cpu"), Launch("python"), 1)
    other._rank, other._store, other._answered_at = 1, Mock(get=Mock(side_effect=store.get)), three.now + 9
    lost = other._find_lost()
    assert lost == ("lost contact with rank 2 at update 5 (forward)" if silent else None)
    assert slept == DEAD_AFTER_SECONDS if silent else slept <= DEAD_AFTER_SECONDS + 1.5
    # It asked for that one answer, not for the heartbeats of all ranks.
    assert {call.args for call in other._store.get.mock_calls} == {("silent",)}
    three.pass_time(2, moving={0, 1, 2})
    assert store.get("silent") == b""


@pytest.mark.parametrize(("rank", "requests"), [(0, ["set", "multi_get", "check"]), (7, ["set", "check"])])
def test_a_rank_makes_two_requests_a_second_however_many_there_are_and_the_root_one_more(
    rank: int, requests: list[str], job: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    many = job(512)
    many.pass_time(1, moving=set(range(512)))
    dog, store, called = many.watchdog, many.watchdog._store, []

    def call(name: str, *args: Any) -> Any:
        called.append(name)
        return getattr(store, name)(*args)

    dog._rank = rank
    dog._store = Mock(**{f"{name}.side_effect": partial(call, name) for name in ("set", "check", "multi_get", "get")})
    monkeypatch.setattr(dog._stopping, "wait", Mock(side_effect=[False] * 3 + [True]))
    dog._run()
    assert called == requests * 3


@pytest.mark.parametrize("world_size", [2, 512, 10_000])
def test_ranks_that_wait_for_one_another_ask_the_store_at_a_bounded_rate(
    world_size: int, job: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    dog, asked, slept = job(world_size).watchdog, [], []
    monkeypatch.setattr(watchdog.time, "sleep", slept.append)

    def add(key: str, number: int) -> int:
        asked.append(number)
        return world_size if sum(slept) > 60 else 1

    dog._store = Mock(add=add)
    dog.meet()
    assert asked == [1, *[0] * len(slept)]
    assert max(world_size / pause for pause in slept) <= 10_000 and len(slept) <= 60 / 0.25 + 9


@pytest.mark.parametrize(("minutes", "seconds"), [(30, 60), (0.5, 30)])
def test_a_root_that_does_not_answer_is_given_up_after_a_minute_or_the_timeout(
    minutes: float, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dog = Watchdog(Alone(), torch.device("cpu"), Launch("python"), minutes)
    dog._answered_at, waited, ended = 0.0, [], RuntimeError()

    def wait(pause: float) -> bool:
        waited.append(pause)
        dog._answered_at = float(min(len(waited), 20))  # after that it is silent
        return False

    monkeypatch.setattr(dog._stopping, "wait", wait)
    monkeypatch.setattr(dog, "_end", end := Mock(side_effect=ended))
    with pytest.raises(RuntimeError) as raised:
        dog._watch_the_root(Mock(is_alive=lambda: True))
    assert raised.value is ended and sum(waited) == 20 + seconds
    end.assert_called_once_with(f"rank 0 has not answered for {seconds} seconds, at update 0")


def test_marks_count_and_keep_the_update_they_do_not_name(job: Callable[[int], Job]) -> None:
    dog = job(1).watchdog
    dog.mark("forward", update=3)
    dog.mark("sum over the processes", collective=True)
    beat = json.loads(dog._beat(9))
    assert beat == {"beats": 9, "count": 2, "phase": "sum over the processes", "update": 3, "collective": True}


def test_one_process_has_no_thread_and_explains_only_what_stops_training(single: Callable[..., Backend]) -> None:
    dog = single().watchdog
    assert dog._thread is None
    stopped = TrainingStopped("enough")
    assert dog.explain(stopped) is stopped
    assert dog.explain(None) is None and dog.explain(RuntimeError("anything")) is None
    dog.stop()


GLOO = (  # PyTorch 2.15's, word for word
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:30598: Connection "
    "reset by peer. This is typically caused by a remote worker hanging or bugs in the application. Check the logs of "
    "the remote worker before reporting an error."
)


def test_the_end_of_a_lost_process_is_told_without_places_in_gloos_sources(
    job: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    dog = job(2).watchdog
    dog._thread = threading.Thread()
    monkeypatch.setattr(dog, "_find_lost", lambda: "lost contact with rank 1 at update 5 (forward)")
    told = str(dog.explain(RuntimeError(GLOO)))
    assert told.startswith("rank 0: lost contact with rank 1 at update 5 (forward) (Read error [127.0.0.1]:30598: Conn")
    assert ".cc" not in told


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("all [../gloo/pair.cc:598] lost\nmore", "all lost"),
        ("lost [../gloo/pair.cc:598]\nmore", "lost"),
        ("[/gloo/a.h:1]\n", "RuntimeError"),
        ("", "RuntimeError"),
        ("no place [1] nor [a b.cc:3]", "no place [1] nor [a b.cc:3]"),
        ("word " * 40, "word " * 39 + "word"),
        ("word " * 41, "word " * 39 + "word ..."),
        ("letters " * 26, "letters " * 24 + "letters ..."),
        ("a " + "letters " * 26, "a " + "letters " * 23 + "letters ..."),
        ("x" * 300, "x" * 200 + " ..."),
    ],
)
def test_an_error_is_told_in_one_line_that_ends_with_a_word(text: str, line: str) -> None:
    assert watchdog._short(RuntimeError(text)) == line
