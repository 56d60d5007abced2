"""What processes agree on: errors of one of them, and what they do before and after."""

from __future__ import annotations

import contextlib

import pytest

from tandem.distributed import TrainingStopped, UserMistake
from tandem.io.exits import CannotGoOn
from tests.processes import Process, on_processes, python, single


def failing(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(("error", "kind", "said"), [
    (ValueError("seven\nlines"), UserMistake, "seven"), (OSError(28, "No space left"), UserMistake, "No space left"),
    (MemoryError("of 7 bytes"), UserMistake, "not enough memory: of 7 bytes"),
    (RuntimeError("can't allocate memory: 7"), UserMistake, "not enough memory: can't allocate memory: 7"),
    (CannotGoOn("a worker was killed"), TrainingStopped, "a worker was killed"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("rank", [0, 2])
def test_what_fails_on_one_process_is_the_same_error_of_one_line_on_all(
    rank: int, error: Exception, kind: type[Exception], said: str
) -> None:
    def work(process: Process) -> None:
        with process.raise_on_all_ranks():
            if process.rank == rank:
                raise error

    found = on_processes(3, work, catches=(UserMistake, TrainingStopped))
    assert [type(each) for each in found] == [kind] * 3
    assert len(set(map(str, found))) == 1 and said in str(found[0]) and "\n" not in str(found[0])
    assert ("rank 2" in str(found[0])) == (rank == 2)


@pytest.mark.parametrize("error", [KeyError("a bug"), RuntimeError("a bug"), TrainingStopped("the end")], ids=repr)
def test_another_error_is_not_agreed_on(error: Exception) -> None:
    def work(process: Process) -> None:
        with process.raise_on_all_ranks():
            raise error

    with pytest.raises(type(error)) as raised:
        work(Process())
    assert raised.value is error


@pytest.mark.parametrize("error", [ValueError("broken"), CannotGoOn("broken")], ids=repr)
def test_data_that_one_process_cannot_get_ends_that_process_alone(error: Exception) -> None:
    with pytest.raises(TrainingStopped, match=r"^rank 0: broken$") as stopped:
        list(Process().iterate("data", map(failing, [error])))
    assert stopped.value.on_one_rank
    assert list(Process().iterate("data", "ab")) == ["a", "b"]


@pytest.mark.parametrize("fails", [False, True])
def test_work_for_after_the_others_is_done_if_nothing_failed(fails: bool) -> None:
    done: list[str] = []
    with contextlib.suppress(ZeroDivisionError), single() as backend:
        backend.after_leaving(lambda: done.append("work"))
        if fails:
            raise ZeroDivisionError
    assert done == ["work"] * (not fails)


def test_what_a_start_imports_is_not_searched_for_garbage() -> None:
    program = "import gc; from tandem.distributed.base import import_torch; import_torch(); "
    result = python(f"{program} print(gc.isenabled(), gc.get_freeze_count() > 100_000)")
    assert result.stdout == "True True\n", result.stderr
