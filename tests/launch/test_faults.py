"""Processes that die, stall, are asked to stop or compute nonsense: the job ends by itself and says why."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from forks import Forked, completed, fork

from benchmarks.launching import (
    CHOSEN_ON_TWO,
    ENVIRONMENT,
    HANG_SECONDS,
    ONE_PROCESS,
    ROOT,
    WHOLE_MATRIX,
    Finished,
    Job,
    Launcher,
    finish,
    send,
    start,
    wait_until,
)
from tandem.io.reading import counted
from tests.scripts import VAE, metrics, without_clocks, words

ENDLESS = [*words(VAE.tiny), "--epochs", "1000000", "--num_workers", "1", "--log_every_n_steps", "1",
           "--save_every_n_steps", "0", "--validate_every_n_steps", "0", "--sample_every_n_steps", "0"]  # fmt: skip
TORCHRUN, DEEPSPEED, HOROVODRUN = (Launcher(name, 2) for name in ("torchrun", "deepspeed", "horovodrun"))
WORKER = "tests/launch/fault_worker.py"
LAUNCHER = -1  # in the place of a rank
# What ends a run, in turn: a signal at the launcher, at a rank, which tells the others, or a kill of a rank; rank 0 is
# the one that all others are connected to. A closed terminal ends the other launchers without a word to the run.
AT_LAUNCHERS = {
    TORCHRUN: [(LAUNCHER, signal.SIGHUP), (LAUNCHER, signal.SIGKILL)],
    DEEPSPEED: [(LAUNCHER, signal.SIGTERM), (1, signal.SIGKILL)],
    HOROVODRUN: [(LAUNCHER, signal.SIGTERM), (0, signal.SIGKILL)],
}
OF_TWO = [(1, signal.SIGUSR1), (0, signal.SIGKILL), (1, signal.SIGKILL)]
AT_RANKS = {ONE_PROCESS: [(0, signal.SIGUSR1)], **dict.fromkeys((TORCHRUN, *CHOSEN_ON_TWO), OF_TWO)}
KILLS = {
    **{f"launcher of {each}": (each, False, kills) for each, kills in AT_LAUNCHERS.items()},
    **{f"a rank of {each}": (each, True, kills) for each, kills in AT_RANKS.items()},
}


def has_trained(job: Job | Forked) -> bool:
    """Whether a job has completed a few updates."""
    return len(re.findall(r"update +\d+/", job.output)) >= 3


def assert_saved(finished: Finished, output_dir: Path) -> int:
    """Assert that a job which was asked to stop saved a checkpoint. Returns the update of the checkpoint."""
    said = re.search(r"asked to stop: saved update (\d+)", finished.output)
    assert said, finished.output
    step = int(said[1])
    assert [line["step"] for line in metrics(output_dir)] == list(range(1, step + 1))
    assert (output_dir / "checkpoints" / f"step_{step:08d}").is_dir()
    return step


@pytest.mark.parametrize("asked", KILLS)
def test_a_run_that_is_asked_to_end_saves_the_next_start_resumes_and_a_killed_process_is_named(
    asked: str, tmp_path: Path
) -> None:
    """All these ends are tested on one run, which is started again after each of them, because a job starts slowly."""
    launcher, is_forked, kills = KILLS[asked]
    folder, resumed = tmp_path / "run", ""
    command = [*ENDLESS, "--output_dir", str(folder)]
    for target, number in kills:
        if is_forked:
            job = Forked("train_vae", [*command, *launcher.flags], tmp_path / "log", launcher.processes)
            job.wait_until(lambda job=job: has_trained(job))
            os.kill(job.pids[target], number)
            ranks = job.finish()
        else:
            started = start(launcher, "train_vae.py", command)
            wait_until(started, lambda started=started: has_trained(started))
            pids = {LAUNCHER: psutil.Process(started.process.pid)} | dict(enumerate(started.ranks()))
            send([pids[target]], number)
            ranks = [finish(started)]
        assert resumed in ranks[0].output, ranks[0].output
        if target == LAUNCHER or number != signal.SIGKILL:
            resumed = f"resumed from {folder}/checkpoints/step_{assert_saved(ranks[0], folder):08d}"
            assert not is_forked or {rank.returncode for rank in ranks} == {75}, ranks[0].output
        else:
            lost = f"stopped: rank {1 - target}: lost contact with rank {target} at update"
            assert all(rank.returncode for rank in ranks) and lost in ranks[0].output, ranks[0].output


@pytest.mark.parametrize("fault", ["lost_in_meeting", "lost_unnoticed"] if WHOLE_MATRIX else ["lost_unnoticed"])
def test_a_process_lost_where_no_collective_reports_it_is_named_before_the_launcher_kills_the_others(
    fault: str,
) -> None:
    command = Launcher("torchrun", 3).command(WORKER, ["--fault", fault])
    # torchrun kills those that are left after 30 seconds; the tests of other faults let it wait longer.
    finished = finish(Job(command, WORKER, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="30"))
    for rank in (0, 2):  # of these, whoever ends first is not lost
        named = [line for line in finished.output.splitlines() if f"stopped: rank {rank}: lost contact with" in line]
        assert len(named) == 1, finished.output
        assert re.search(r"lost contact with rank 1 at update \d+( \([^;]*\))?$", named[0]), finished.output


def patiently(check: Callable[[str], None]) -> None:
    """Call ``check`` with a --timeout_minutes. A process that gets no processor for that long counts as one that hangs,
    so on a loaded machine try again with a longer timeout."""
    for minutes in ("0.1", "0.4"):
        try:
            check(minutes)
            return
        except AssertionError as failed:
            if f"for {minutes} minutes" not in str(failed):
                raise
    check("2")


# Of a fault of the worker: the exit codes, how often which line is printed, and whether there is a checkpoint. Writes
# and lists may last longer than the timeout, but on no disk that hangs, and a write ends before its job.
NON_FINITE = "stopped: 3 updates in a row .* the last at update 5: rank 1: the gradient of 0.weight holds nan"
FAULTS = {
    "frozen": ([0, 0], 2, "^rank [01] goes on", False),
    "slow_write": ([0, 0], 0, "stopped:", True),
    "stuck_write": ([1, 1], 2, r"stopped:.* rank 0 stands at update 0 \(writing a checkpoint\)$", False),
    "stands_in_write": ([1, 1], 2, r"stopped:.* rank 1 stands at update 0 \(standing\)$", True),
    "slow_listing": ([0, 0], 0, "stopped:", False),
    "stuck_listing": ([1, 1], 2, r"stopped:.* rank 1 stands at update 0 \(listing the samples\)$", False),
    "lost_at_end": ([0, -signal.SIGKILL], 1, "rank 0: lost contact with rank 1 at update", False),
    "mistake": ([1, 1], 1, "no such folder$", False),
    "load": ([2, 2], 2, r"weight of 1\.weight is missing.*\(on rank 1\)", False),
    "nan": ([1, 1], 1, NON_FINITE, False),
}
SHARDED = Launcher("deepspeed", 2, zero_stage=3)
CASES = {
    **{fault: (fault, TORCHRUN) for fault in FAULTS},
    **{f"load {each}": ("load", each) for each in (SHARDED, *CHOSEN_ON_TWO)},
    **{f"nan {each}": ("nan", each) for each in (SHARDED, *CHOSEN_ON_TWO)},
}


if WHOLE_MATRIX:
    CASES["load of one stage"] = ("load", Launcher("deepspeed", 2, zero_stage=1))


@pytest.mark.parametrize("case", CASES)
def test_what_goes_wrong_on_one_process_ends_all_with_a_line_or_none(case: str, tmp_path: Path) -> None:
    fault, launcher = CASES[case]
    codes, count, said, is_saved = FAULTS[fault]

    def check(minutes: str) -> None:
        folder = tmp_path / minutes
        flags = ["--fault", fault, "--timeout_minutes", minutes, "--folder", str(folder), *launcher.flags]
        ranks = fork("fault_worker", flags, tmp_path / "log", 2)
        output = ranks[0].output
        assert [rank.returncode for rank in ranks] == codes, output
        lines = [line for line in output.splitlines() if re.search(said, line)]
        assert len(lines) == count and output.count("stopped:") == sum("stopped:" in line for line in lines), output
        assert "no progress" not in output or " stands " in said, output
        assert "Traceback" not in output or fault == "mistake", output
        assert (folder / "step_00000001").is_dir() == is_saved, output

    if fault == "frozen" or fault.endswith(("write", "listing")):
        patiently(check)
    else:
        check("3")


@pytest.mark.parametrize("fault", ["fails_in_write", "ends_in_write"])
def test_a_write_is_finished_although_the_launcher_asks_its_process_to_end_because_another_one_has(
    fault: str, tmp_path: Path
) -> None:
    job = Forked("fault_worker", ["--fault", fault, "--folder", str(tmp_path / "run")], tmp_path / "log", 2)
    job.join(1)
    with contextlib.suppress(ProcessLookupError):  # which a good end of the other would have waited for
        os.kill(job.pids[0], signal.SIGTERM)  # as launchers do
    ranks = job.finish()
    assert [rank.returncode for rank in ranks] == [1, 1], job.output
    assert (tmp_path / "run" / "step_00000001").is_dir(), job.output
    assert "KeyError: 'x'" in job.output if fault == "fails_in_write" else "stopped: enough" in job.output


LISTING = [ONE_PROCESS, TORCHRUN, *([DEEPSPEED, HOROVODRUN] if WHOLE_MATRIX else [])]
WAITS = {**{f"listing {each}": ("listing", each) for each in LISTING}, "reading": ("reading", ONE_PROCESS)}


@pytest.mark.parametrize("waits", WAITS)
def test_a_start_that_is_asked_to_stop_ends_at_once_though_a_process_waits_for_its_data_for_ever(
    waits: str, tmp_path: Path
) -> None:
    """The launchers wait for their processes for an hour (`ENVIRONMENT`). A resumed run waits for its first batch."""
    work, launcher = WAITS[waits]
    command = [*ENDLESS, "--output_dir", str(tmp_path / "run"), "--dataset", f"tests.launch.endless:{work}"]
    if work == "reading":
        [first] = fork("train_vae", [*command, "--max_steps", "2"], tmp_path / "log")
        assert first.returncode == 0, first.output
    finished = asked_to_stop(launcher, [*command, "--max_steps", "4"], f"{work} for ever", tmp_path / "log")
    assert finished.returncode == 75 if launcher == ONE_PROCESS else finished.returncode != 0, finished
    assert ("resumed from" in finished.output) == (work == "reading"), finished
    assert not (tmp_path / "run" / "model").exists() or work == "reading", finished
    assert "stopped before there was anything to save" in finished.output or launcher.name == "deepspeed"
    assert "Traceback" not in finished.output or launcher != ONE_PROCESS, finished.output


def asked_to_stop(launcher: Launcher, command: list[str], when: str, log: Path) -> Finished:
    """Start a run, and ask it to stop when it has said something. Forks are asked as torchrun asks its processes."""
    if launcher in (ONE_PROCESS, TORCHRUN):
        forked = Forked("train_vae", command, log, launcher.processes)
        forked.wait_until(lambda: when in forked.output)
        for pid in forked.pids:
            os.kill(pid, signal.SIGTERM)
        return forked.finish()[0]
    job = start(launcher, "train_vae.py", command)
    wait_until(job, lambda: when in job.output)
    job.process.send_signal(signal.SIGTERM)
    return finish(job)


def test_a_run_whose_loader_process_hangs_hears_that_it_is_to_stop_and_saves(tmp_path: Path) -> None:
    command = [*ENDLESS, "--output_dir", str(tmp_path / "run"), "--dataset", "tests.launch.endless:stuck"]
    job = Forked("train_vae", command, tmp_path / "log")

    def waits() -> bool:
        said = re.search(r"reading for ever after (\d+) batches", job.output)
        return said is not None and len(metrics(tmp_path / "run")) == int(said[1])

    job.wait_until(waits)
    os.kill(job.pids[0], signal.SIGTERM)
    [finished] = job.finish()
    assert finished.returncode == 75 and "Traceback" not in finished.output, finished.output
    assert_saved(finished, tmp_path / "run")


def test_processes_that_cannot_connect_end_with_the_code_of_what_may_go_well_next_time(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(taken.getsockname()[1])}  # fmt: skip
        command = [*ENDLESS, "--output_dir", str(tmp_path / "run")]
        ended = completed("train_vae.py", command, tmp_path, {**os.environ, **ENVIRONMENT, **place})
    assert ended.returncode == 1, ended.stderr
    assert len(ended.stderr.splitlines()) == 1 and "rank 0 of 2 could not connect through ddp" in ended.stderr


@pytest.mark.parametrize("when", ["at the start", "later"])
def test_a_loader_process_that_is_killed_is_one_line_and_no_mistake(when: str, tmp_path: Path) -> None:
    command = [*ENDLESS, "--output_dir", str(tmp_path / "run")]
    if when == "at the start":
        command += ["--dataset", "tests.launch.endless:killed"]
    job = Forked("train_vae", command, tmp_path / "log")
    if when == "later":
        job.wait_until(lambda: has_trained(job))
        send(psutil.Process(job.pids[0]).children(), signal.SIGKILL)
    [finished] = job.finish()
    assert finished.returncode == 1 and "Traceback" not in finished.output, finished.output
    assert len(re.findall("stopped: .*a loader process was killed.* memory", finished.output)) == 1, finished.output


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stalled_process_is_named_and_ends_the_others(rank: int, tmp_path: Path) -> None:
    """They end after --timeout_minutes. On a slow machine the start alone may take longer than the timeout: try again
    with a longer timeout."""
    for minutes in ["0.1", "0.3", *["0.9"] * 20]:
        flags = [*ENDLESS, "--output_dir", str(tmp_path / "run"), "--fresh", "--timeout_minutes", minutes]
        job = Forked("train_vae", flags, tmp_path / "log", 2)
        try:
            job.wait_until(lambda job=job: has_trained(job))
            break
        except AssertionError as ended:
            if f"no progress for {minutes} minutes" not in str(ended):
                raise
    else:
        pytest.fail("it does not start without a pause of 0.9 minutes")
    os.kill(job.pids[rank], signal.SIGSTOP)
    job.join(1 - rank)
    job.kill()
    assert job.finish()[1 - rank].returncode == 1, job.output
    stands = f"no progress for {minutes} minutes: rank 1 stands at update"
    silent = f"rank 0 has not answered for {minutes} minutes, at update"
    assert (stands if rank == 1 else silent) in job.output, job.output


def test_torchrun_starts_the_processes_again_and_the_run_goes_on_in_spite_of_fresh(tmp_path: Path) -> None:
    command = [*ENDLESS, "--output_dir", str(tmp_path), "--fresh", "--max_steps", "12", "--save_every_n_steps", "1"]
    command += ["--interrupt", "SIGKILL@9", "--last_alone"]
    worker = "tests/launch/interrupted_worker.py"
    finished = finish(start(Launcher("torchrun", 2), worker, command, launcher_flags=["--max-restarts", "1"]))
    assert finished.returncode == 0, finished.output
    assert "stopped: rank 0: lost contact with rank 1 at update" in finished.output, finished.output
    assert f"resumed from {tmp_path}/checkpoints/step_00000008" in finished.output, finished.output
    assert "starting over" not in finished.output
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, 13))


def test_a_signal_to_one_process_within_a_validation_stops_all_at_the_same_batch(tmp_path: Path) -> None:
    """The fourth of eight batches of the second validation; the update before it is saved first."""
    flags = [*ENDLESS, "--image_folder", "demo:shapes:64", "--valid_fraction", "0.5", "--valid_samples", "0",
             "--batch_size", "4", "--max_steps", "6", "--ema_decay", "0", "--validate_every_n_steps", "2",
             "--save_every_n_steps", "4"]  # fmt: skip
    worker, ended = "interrupted_worker", {}
    for name, interruptions in {"whole": [""], "stopped": ["SIGTERM@batch12", ""]}.items():
        for interruption in interruptions:
            command = [*flags, "--output_dir", str(tmp_path / name), "--interrupt", interruption]
            ended[name, interruption] = fork(worker, command, tmp_path / "log", 2)
            if interruption:
                lines = metrics(tmp_path / name)
                assert [line["step"] for line in lines] == [1, 2, 3, 4] and "evaluation_seconds" not in lines[-1]
                assert (tmp_path / name / "checkpoints" / "step_00000004").is_dir()
    assert {key: [rank.returncode for rank in ranks] for key, ranks in ended.items()} == {
        ("whole", ""): [0, 0], ("stopped", "SIGTERM@batch12"): [75, 75], ("stopped", ""): [0, 0]
    }, ended  # fmt: skip
    assert without_clocks(tmp_path / "stopped") == without_clocks(tmp_path / "whole")
    models = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "stopped")]
    assert models[0] == models[1]


def test_fewer_processes_go_on_with_the_same_batch_by_accumulating_more(tmp_path: Path) -> None:
    flags = [*ENDLESS, "--batch_size", "8", "--save_every_n_steps", "4"]
    for processes, steps in ((4, 4), (2, 8), (1, 12)):
        command = [*flags, "--max_steps", str(steps), "--output_dir", str(tmp_path / "a")]
        ranks = fork("train_vae", command, tmp_path / "log", processes)
        said = ranks[0].output
        assert [rank.returncode for rank in ranks] == [0] * processes, said
        assert f"batch 8 = 2 x {4 // processes} accumulation x {counted(processes, 'process')}" in said
        assert ("there are fewer processes than before" in said) == (processes < 4)
    command = [*flags, "--max_steps", "12", "--output_dir", str(tmp_path / "b")]
    [whole] = fork("train_vae", command, tmp_path / "log")
    assert whole.returncode == 0, whole.output
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in "ab"]
    # Sums of fp32 in another order: 1e-5 relative over the first 20 updates.
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_run_whose_standard_streams_were_closed_before_it_began_trains(tmp_path: Path) -> None:
    command = [sys.executable, "train_vae.py", *ENDLESS, "--max_steps", "2", "--output_dir", str(tmp_path)]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
    assert subprocess.run(closed, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, timeout=HANG_SECONDS).returncode == 0
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]
    assert (tmp_path / "model" / "model.safetensors").exists()
