"""What happens to machines and to the network between them: the run goes on, or ends with one line and is resumed."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab import Lab, Machine
from launches import TOOLS, start_on_all, torchrun
from slurm import Slurm

from benchmarks.launching import ROOT, Finished, Job, Launcher, finish, tool, wait_until
from tests.scripts import VAE, metrics, words

TINY = [*words(VAE.tiny), "--image_folder", "demo:shapes:64", "--epochs", "1000000", "--num_workers", "0",
        "--log_every_n_steps", "1", "--validate_every_n_steps", "0", "--sample_every_n_steps", "0"]  # fmt: skip
SAVING = ["--save_every_n_steps", "5"]
AS_DEBIAN_INSTALLS = "127.0.1.1 {name}"  # in /etc/hosts
SCRIPT = "train_vae.py"
TORCHRUN = Launcher("torchrun", 2)
LAUNCHERS = [Launcher("deepspeed", 2, zero_stage=1), Launcher("horovodrun", 2), Launcher("mpirun", 2)]


@pytest.fixture
def make_lab(tmp_path: Path, needs: Callable[..., None]) -> Iterator[Callable[..., Lab]]:
    """Makes a lab that ends with the test; see `Lab`."""
    needs()
    labs: list[Lab] = []

    def make(**options: object) -> Lab:
        labs.append(Lab(tmp_path, **options))
        return labs[-1]

    yield make
    for lab in labs:
        lab.close()


def flags(lab: Lab, *more: str) -> list[str]:
    return [*TINY, "--output_dir", str(lab.folder / "run"), *more]


def train(lab: Lab, *more: str) -> list[Job]:
    """Start a run on all machines."""
    return start_on_all(lab, TORCHRUN, SCRIPT, flags(lab, *more))


def train_alone(machine: Machine, lab: Lab, *more: str) -> Job:
    """Start a run on one machine, in one process."""
    return machine.start([sys.executable, ROOT / SCRIPT, *flags(lab, *more)], SCRIPT)


def updates(job: Job) -> int:
    """The number of updates that the root has completed."""
    return len(re.findall(r"update +\d+/", job.output))


def wait_for_updates(job: Job, count: int = 3) -> None:
    """Wait until the root has completed some more updates."""
    before = updates(job)
    wait_until(job, lambda: updates(job) >= before + count)


def saved(lab: Lab) -> list[Path]:
    return sorted((lab.folder / "run" / "checkpoints").glob("step_*"))


def wait_for_a_checkpoint(job: Job, lab: Lab) -> None:
    wait_until(job, lambda: bool(saved(lab)))


def why_it_stopped(job: Job) -> str:
    """The one line that says why the processes of a job have ended. The launcher may wait for another machine longer
    than they do."""
    while job.ranks():
        time.sleep(0.1)
    [line] = [line for line in job.output.splitlines() if "stopped:" in line]
    job.kill()
    return line


def ended(jobs: list[Job], code: int = 0) -> list[Finished]:
    finished = [finish(job) for job in jobs]
    assert [each.returncode for each in finished] == [code] * len(jobs), finished
    return finished


def assert_goes_on(jobs: list[Job], lab: Lab, last: Path, steps: int) -> None:
    """Assert that the jobs go on from a checkpoint to their last update, and that no update is missing."""
    said = ended(jobs)[0].output
    assert f"resumed from {last}" in said, said
    assert [line["step"] for line in metrics(lab.folder / "run")] == list(range(1, steps + 1))


def assert_found(lab: Lab, jobs: list[Job]) -> None:
    ended(jobs)
    assert [line["step"] for line in metrics(lab.folder / "run")] == [1, 2, 3]


def test_machines_whose_names_lead_to_127_0_1_1_find_one_another(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(hosts=AS_DEBIAN_INSTALLS)
    assert_found(lab, train(lab, "--max_steps", "3"))


@pytest.mark.long
@pytest.mark.parametrize("launcher", [*LAUNCHERS, Launcher("srun", 2)], ids=str)
def test_so_they_do_under_other_launchers_and_horovod_says_that_it_cannot(
    launcher: Launcher, make_lab: Callable[..., Lab], needs: Callable[..., None]
) -> None:
    needs(*TOOLS[launcher.name])
    lab = make_lab(hosts=AS_DEBIAN_INSTALLS)
    slurm = Slurm(lab) if launcher.name == "srun" else lab.start_sshd()
    jobs = start_on_all(lab, launcher, SCRIPT, flags(lab, "--max_steps", "3"), slurm)
    if launcher.name == "horovodrun":
        assert "the name of this machine, node1, resolves to 127.0.1.1 on it" in finish(jobs[0]).output
    else:
        assert_found(lab, jobs)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("fault", [Machine.die, Machine.end])
def test_a_machine_that_is_lost_is_named_and_another_one_goes_on_alone(
    fault: Callable[[Machine], None], victim: int, make_lab: Callable[..., Lab]
) -> None:
    """`die`: nobody is told. `end`: the machine's kernel still closes the connections."""
    lab = make_lab()
    jobs = train(lab, *SAVING)
    wait_for_a_checkpoint(jobs[0], lab)
    fault(lab[victim])
    why = why_it_stopped(jobs[1 - victim])
    assert f"lost contact with rank {victim} at update" in why, why
    last = saved(lab)[-1]
    steps = int(last.name[-8:]) + 3
    assert_goes_on([train_alone(lab[1 - victim], lab, "--max_steps", str(steps))], lab, last, steps)


@pytest.mark.long
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=str)
def test_every_launcher_ends_when_a_machine_is_lost(
    launcher: Launcher, make_lab: Callable[..., Lab], needs: Callable[..., None]
) -> None:
    needs(*TOOLS[launcher.name])
    lab = make_lab()
    lab.start_sshd()
    [job] = start_on_all(lab, launcher, SCRIPT, flags(lab, *SAVING))
    wait_for_a_checkpoint(job, lab)
    lab[1].die()
    finished = finish(job)
    assert finished.returncode != 0
    # mpirun may notice first that its connection by ssh is gone, and then ends its processes.
    assert launcher.name == "mpirun" or "stopped: rank 0: lost contact with rank 1 at update" in finished.output, (
        finished
    )


@pytest.mark.long
@pytest.mark.parametrize("moment", ["update", "save"])
def test_both_ends_of_a_cut_link_end_and_the_next_start_goes_on(moment: str, make_lab: Callable[..., Lab]) -> None:
    lab = make_lab()
    jobs = train(lab, *SAVING)
    wait_for_a_checkpoint(jobs[0], lab)
    if moment == "save":
        wait_until(jobs[0], lambda: any(saved(lab)[-1].parent.glob(".unfinished-*")), pause=0)
    lab[1].cut()
    whys = [why_it_stopped(job) for job in jobs]
    assert "stopped: rank 0: lost contact with rank 1 at update" in whys[0], whys
    assert "stopped: rank 1: lost contact with rank 0 at update" in whys[1], whys
    lab[1].mend()
    last = saved(lab)[-1]
    steps = int(last.name[-8:]) + 3
    assert_goes_on(train(lab, "--max_steps", str(steps)), lab, last, steps)


@pytest.mark.long
def test_a_link_that_is_away_for_some_seconds_stops_nothing(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab()
    jobs = train(lab)
    wait_for_updates(jobs[0])
    lab[1].cut()
    time.sleep(8)
    lab[1].mend()
    wait_for_updates(jobs[0])


@pytest.mark.long
def test_clocks_an_hour_apart_change_nothing(make_lab: Callable[..., Lab], needs: Callable[..., None]) -> None:
    needs("cc")
    lab = make_lab()
    library = lab.folder / "clock.so"
    source = Path(__file__).parent / "shifted_clock.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    ahead = {"LD_PRELOAD": str(library), "SHIFTED_SECONDS": "3600"}
    # In turn, one machine's clock is ahead. The rendezvous of c10d takes a machine for dead whose clock is 15 s behind.
    for start, steps in enumerate((6, 12)):
        static = ["--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "node1", "--master_port", "29400"]
        script = [ROOT / SCRIPT, *flags(lab, *SAVING, "--max_steps", str(steps))]
        ended([
            machine.start([tool("torchrun"), *static, "--node_rank", str(rank), *script], SCRIPT,
                          **ahead if rank == start else {})
            for rank, machine in enumerate(lab.machines)
        ])  # fmt: skip
    assert [line["step"] for line in metrics(lab.folder / "run")] == list(range(1, 13))


@pytest.mark.long
def test_an_output_dir_that_one_machine_alone_sees_is_told_before_it_is_too_late(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab()
    for name in ("run", "own"):
        (lab.folder / name).mkdir()
    lab[1].hide(lab.folder / "run", lab.folder / "own")
    said = ended(train(lab, *SAVING, "--max_steps", "6"))[0].output
    assert "rank 1 does not see" in said
    finished = finish(train(lab, "--max_steps", "8")[0])
    assert finished.returncode == 1  # torchrun's, of a process that ended with 2
    assert "error: cannot resume: rank 1 does not see" in finished.output, finished.output


@pytest.mark.long
def test_a_start_waits_for_the_folder_of_a_run_on_a_machine_that_is_cut_off_until_that_machine_has_died(
    make_lab: Callable[..., Lab],
) -> None:
    """Where the machines share a local disk, whose locks end with a process. NFS frees a lock after its lease."""
    lab = make_lab()
    first = train_alone(lab[0], lab, *SAVING)
    wait_for_a_checkpoint(first, lab)
    lab[0].cut()
    second = train_alone(lab[1], lab, *SAVING)
    waiting = (
        r"/run is in use by process \d+ on node1 since .* UTC; waiting for up to 2 minutes, in case that its machine"
    )
    wait_until(second, lambda: bool(re.search(waiting, second.output)))
    lab[0].die()
    last = saved(lab)[-1]
    wait_for_updates(second)
    assert f"resumed from {last}" in second.output, second.output


@pytest.mark.long
def test_torchrun_takes_in_a_machine_goes_on_without_a_lost_one_and_takes_in_another(
    make_lab: Callable[..., Lab],
) -> None:
    lab = make_lab(machines=3)
    ended([train_alone(lab[0], lab, "--max_steps", "2")])
    command = [*torchrun("1:2", "--max-restarts", "3"), ROOT / SCRIPT, *flags(lab, *SAVING, "--fresh")]
    # Without this, a newcomer waits for an address that torchrun 2.15 publishes only in its first round.
    joinable = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    first = lab[0].start(command, SCRIPT, **joinable)

    def starts() -> list[str]:
        """How many processes each start of the run had."""
        return re.findall(r"^ddp on (\d) x cpu", first.output, re.MULTILINE)

    wait_until(first, lambda: starts() == ["1"] and bool(saved(lab)))
    lab[1].start(command, SCRIPT, **joinable)
    wait_until(first, lambda: starts() == ["1", "2"])
    wait_for_updates(first, 10)
    lab[1].die()
    wait_until(first, lambda: starts() == ["1", "2", "1"])
    wait_for_updates(first, 10)
    lab[2].start(command, SCRIPT, **joinable)
    wait_until(first, lambda: starts() == ["1", "2", "1", "2"])
    wait_for_updates(first, 10)
    said = first.output
    lab.close()
    # The run that was there was put aside at the first start, and this one never, though torchrun does not count the
    # restart for the machine that joined before anything had failed.
    assert said.count("starting over") == 1 and said.count("resumed from") == 3, said
    assert [path.name for path in lab.folder.glob("run.old-*")] == ["run.old-1"]
    steps = [line["step"] for line in metrics(lab.folder / "run")]
    assert steps == list(range(1, len(steps) + 1))
