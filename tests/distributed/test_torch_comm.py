"""How processes of one start find one another, and that a backend that disconnects ends its threads."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.launching import free_port
from tandem.distributed import torch_comm
from tandem.distributed.backends.horovod import HorovodBackend
from tandem.distributed.launchers import Launch
from tandem.distributed.torch_comm import Start, agree_on_start
from tests.processes import python

PATIENCE = timedelta(seconds=60)  # only ends a hang
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
PROGRAM = """
import os, torch, distributed
from tests.processes import parsed
with distributed.from_args(parsed("--distributed_backend", "ddp", batch_size=2)) as backend:
    model = torch.nn.Linear(3, 3)
    engine = backend.wrap(model, torch.optim.Adam(model.parameters(), fused=True))
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
for task in os.listdir("/proc/self/task"):
    print(open(f"/proc/self/task/{task}/comm").read().strip())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the names of threads from /proc")
def test_no_thread_of_the_process_group_outlives_the_backend() -> None:
    # A thread that frees a tensor while the interpreter shuts down aborts the process (pytorch/pytorch#179291).
    finished = python(PROGRAM, **ALONE)
    assert finished.returncode == 0, finished.stderr
    assert not [name for name in finished.stdout.split() if "gloo" in name or "tcpstore" in name], finished.stdout


class Job:
    """A store that outlives its processes, as that of torchrun does."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(
        self, restarted: list[bool], late: int = 0, addresses: Sequence[str] = (), gpus: Sequence[str | None] = ()
    ) -> list[Start]:
        """What ranks agree on, of which each says whether it was started before; rank `late` comes last."""
        place = addresses or ["127.0.0.1"] * len(restarted)

        def of_rank(rank: int) -> Start:
            client = dist.TCPStore("127.0.0.1", self._store.port, is_master=False, timeout=PATIENCE)
            time.sleep(0.5 * (rank == late))
            launch = Launch("torchrun", rank, 0, len(restarted), place[rank], is_restart=restarted[rank])
            return agree_on_start(client, launch, PATIENCE, gpus[rank] if gpus else None)

        with ThreadPoolExecutor(len(restarted)) as threads:
            return list(threads.map(of_rank, range(len(restarted))))

    def leave_behind(self, **keys: str) -> None:
        for key, value in keys.items():
            self._store.set(key.replace("_", "/"), value)


@pytest.mark.parametrize("late", [0, 2])
def test_all_processes_of_a_start_agree_whatever_their_launchers_count(late: int) -> None:
    job = Job()
    assert job.start([False] * 3, late) == [Start(1, False)] * 3
    # A process has failed on one of two machines: the launcher of the other one counts no restart.
    assert job.start([False, True, False], late) == [Start(2, True)] * 3
    # A machine has joined.
    assert job.start([False] * 4, late) == [Start(3, True)] * 4
    assert job.start([False], 0) == [Start(4, True)]


def test_what_a_start_that_failed_left_behind_is_not_taken_for_a_process() -> None:
    job = Job()
    job.leave_behind(token_1=json.dumps(["old", False, None]))
    assert job.start([False, False], late=1) == [Start(1, False)] * 2
    job.leave_behind(listed_0=json.dumps(["old", "digest"]), listed_1=json.dumps(["old", "digest"]), seen_0="digest")
    assert job.start([False, False], late=1) == [Start(2, True)] * 2


def test_a_process_of_another_job_is_not_taken_for_one_of_this_job() -> None:
    """Two jobs were started on one machine with the same port, and the root of the second could not have it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def of_process(job: str, rank: int, late: float) -> Start | str:
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=PATIENCE)
        time.sleep(late)
        try:
            return agree_on_start(client, Launch("srun", rank, rank, 2, job=job), PATIENCE)
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(3) as threads:
        places = [("7.0", 0, 0.2), ("7.0", 1, 0.4), ("7.1", 1, 0.0)]
        *own, other = threads.map(of_process, *zip(*places, strict=True))
    assert own == [Start(1, False)] * 2
    assert isinstance(other, str) and "belongs to another job (7.0; this one is 7.1): give each" in other


@pytest.mark.parametrize(("came", "local_rank", "tells"), [(0, 0, True), (1, 0, True), (1, 1, False)])
def test_a_process_that_does_not_come_is_named_soon_and_at_the_end(
    came: int, local_rank: int, tells: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the root does not come, one process of each machine says so."""
    monkeypatch.setattr(torch_comm, "REPORT_SECONDS", 0.01)
    monkeypatch.setenv("MASTER_ADDR", "node7")
    monkeypatch.setenv("MASTER_PORT", "123")
    store, wait = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), timedelta(seconds=0.3)
    with pytest.raises(RuntimeError, match=f"^rank {1 - came} did not come within 0.005 minutes$"):
        agree_on_start(store, Launch("torchrun", came, local_rank, 2), wait)
    line = f": rank {came} waits for rank {1 - came} at node7, port 123: 1 of 2 processes has come\n"
    said = capsys.readouterr().err
    assert said.endswith(line) and said.count("\n") == 1 if tells else not said, said


def test_a_shell_of_srun_in_which_python_is_one_process_of_two_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_comm, "REPORT_SECONDS", 0.01)
    monkeypatch.setattr(torch_comm, "GRACE_SECONDS", 0.3)
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")  # has them deleted after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_PTY_PORT", "1234")
    with pytest.raises(RuntimeError, match=r"rank 1 did not come within .* minutes; in a shell of `srun --pty` python"):
        launch = Launch("srun", 0, 0, 2, "127.0.0.1", free_port())
        torch_comm.init_process_group(launch, torch.device("cpu"), 0)
    said = capsys.readouterr()
    assert "1 of 2 processes has come; in a shell of `srun --pty`" in said.err and said.err.count("\n") == 1, said


def test_processes_whose_torchrun_was_killed_do_not_wait_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(closed.getsockname()[1])}
        for name, value in {**place, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch_comm, "TRY_SECONDS", 0.01)
        with pytest.raises(ConnectionError, match="torchrun has ended: nobody answers at"):
            torch_comm.init_process_group(Launch("torchrun", world_size=2), torch.device("cpu"), 60)


def test_a_machine_whose_root_does_not_come_ends_with_its_address_after_the_timeout_and_not_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        monkeypatch.setattr(torch_comm, "REPORT_SECONDS", 0)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(closed.getsockname()[1]))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        monkeypatch.setattr(torch_comm, "TRY_SECONDS", 0.01)
        monkeypatch.setattr(torch_comm, "GRACE_SECONDS", 0)
        with pytest.raises(ConnectionError, match=r"^rank 0 did not come within 0\.001 minutes: .* 127\.0\.0\.1, port"):
            torch_comm.init_process_group(Launch("slurm", 1, 0, 2), torch.device("cpu"), 0.001)
    assert capsys.readouterr().err.count("rank 1 waits for rank 0: nobody answers at 127.0.0.1, port ") == 1


def test_an_address_by_which_machines_reach_one_another_is_agreed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(torch_comm, "own_address", lambda master: master)
    # The name of rank 0's machine leads the processes on it to 127.0.1.1.
    assert (
        Job().start([False] * 3, addresses=["127.0.1.1", "127.0.1.1", "10.0.0.2"]) == [Start(1, False, "10.0.0.2")] * 3
    )
    assert Job().start([False] * 2, addresses=["127.0.1.1", "127.0.0.1"]) == [Start(1, False, None)] * 2


def test_all_processes_learn_that_two_of_them_share_a_gpu_before_nccl_starts() -> None:
    starts = Job().start([False] * 3, gpus=["GPU-1", "GPU-2", "GPU-1"])
    assert len(set(starts)) == 1 and str(starts[0].mistake).startswith("ranks 0 and 2 share one GPU, GPU-1; start one")
    assert Job().start([False] * 2, gpus=["GPU-1", "GPU-2"]) == [Start(1, False)] * 2


@pytest.mark.parametrize("backend", ["ddp", pytest.param("horovod", id="horovodrun")])
def test_processes_that_share_a_gpu_are_refused_in_one_line(backend: str) -> None:
    """The line itself: test_devices.py. That NCCL is not asked where they may share one: `make gpu`."""
    program = f"""
from tandem import distributed
from tandem.distributed import devices
from tests.processes import parsed
devices.shared_gpu_error = lambda gpus: f"they share a GPU: {{gpus}}"
with distributed.from_args(parsed("--distributed_backend", "{backend}", batch_size=1)):
    print("started")
"""
    finished = python(program, MASTER_PORT=str(free_port()), **ALONE)
    assert "they share a GPU: [None]" in finished.stderr.splitlines()[-1] and not finished.stdout


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="names of interfaces")
def test_gloo_gets_the_interface_towards_the_other_machines_unless_the_user_names_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is restored
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    torch_comm.set_gloo_interface("no such host")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    torch_comm.set_gloo_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    torch_comm.set_gloo_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_horovod_says_in_one_line_that_other_machines_do_not_reach_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_comm.socket, "gethostname", lambda: "localhost")
    monkeypatch.setenv("HOROVOD_CROSS_SIZE", "2")
    with pytest.raises(ValueError, match=r"of this machine, localhost, resolves to (127\.0\.0\.1|::1) on it"):
        HorovodBackend.connect(Mock())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the states of threads from /proc")
def test_a_backend_disconnects_when_threads_that_still_run_have_come_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as those of a process group that FSDP keeps alive, which free the tensors of the last collective."""
    monkeypatch.setattr(torch_comm, "THREAD_WAIT_SECONDS", 60.0)  # only ends a hang
    with ThreadPoolExecutor() as pool:
        running = pool.submit(hashlib.pbkdf2_hmac, "sha256", b"", b"", 2_000_000)  # without the interpreter's lock
        torch_comm.leave_process_group(gracefully=True)
        assert running.done()
