"""The communicator over torch.distributed: NCCL on GPUs, Gloo on CPUs. The backends ddp, fsdp and deepspeed use it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import json
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.io.writing import say

from .collectives import Communicator, Handle
from .devices import gpu_id, gpus_are_shared, shared_gpu_error
from .errors import UserMistake
from .launchers import DEFAULT_MASTER_PORT, Launch

# Before `remove_time_limit`, collectives time out so much later than --timeout_minutes that the watchdog, whose message
# says more, ends the job first.
GRACE_SECONDS = 60
_NO_TIMEOUT = timedelta(days=3650)
_THREADS = "/proc/self/task"
REPORT_SECONDS, _MAX_NAMED_RANKS = 10.0, 8  # seconds until a wait is reported; ranks in that line
TRY_SECONDS, _MAX_TRIES_WITH_TORCHRUN = 1.0, 10  # of `_wait_for_store`
_POLL_SECONDS, _QUIET_POLLS, THREAD_WAIT_SECONDS = 0.005, 3, 2.0  # of `_wait_for_threads`
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


def init_process_group(launch: Launch, device: torch.device, timeout_minutes: float) -> bool:
    """Join the default process group, with rank and address from the launcher. Return whether the launcher has started
    any of these processes again after a failure."""
    # Adam's first step imports this module. Imported after the group exists, the module's default arguments would keep
    # the group's threads alive, and a thread that frees a tensor while the interpreter shuts down aborts it.
    import torch.distributed.nn  # noqa: F401

    os.environ.setdefault("MASTER_ADDR", launch.master_address)
    if launch.world_size > 1:
        os.environ.setdefault("MASTER_PORT", str(launch.master_port or DEFAULT_MASTER_PORT))
    # DeepSpeed reads these whatever launcher started the process.
    os.environ.update(RANK=str(launch.rank), LOCAL_RANK=str(launch.local_rank), WORLD_SIZE=str(launch.world_size))
    options: dict[str, Any] = {"timeout": timedelta(minutes=timeout_minutes, seconds=GRACE_SECONDS)}
    uses_nccl = device.type != "cpu" and not gpus_are_shared()
    # In a job of one process, DeepSpeed's groups fail if the default group has a device_id (DeepSpeed#8248).
    if uses_nccl and launch.world_size > 1:
        options["device_id"] = device
    is_restart = launch.is_restart
    if launch.world_size == 1 and "MASTER_PORT" not in os.environ:
        # One process needs no port, and two such runs on one machine must not collide on one.
        options["store"] = dist.HashStore()
    else:
        _wait_for_store(launch, options["timeout"])
        # PyTorch's own `rendezvous` waits for all processes without a message, and fails with a long one.
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(
            *address, is_master=launch.is_root and not _is_store_in_torchrun(), timeout=options["timeout"],
            wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip
        gpu = None if gpus_are_shared() else gpu_id(device)
        start = agree_on_start(store, launch, options["timeout"], gpu)
        if start.mistake:  # before NCCL starts, which would fail with a long text
            raise UserMistake(start.mistake)
        options["store"] = dist.PrefixStore(f"start/{start.number}", store)
        is_restart = start.is_restart
        if start.external_address and unreachable_own_address():
            set_gloo_interface(start.external_address)
    # Initialize Gloo beside NCCL: collectives of small tensors on the CPU then never wait for the GPU.
    dist.init_process_group(
        f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}" if uses_nccl else "gloo",
        rank=launch.rank,
        world_size=launch.world_size,
        **options,
    )
    return is_restart


def remove_time_limit() -> None:
    """Let the collectives of all process groups wait for as long as it takes."""
    # The older name is that of PyTorch up to 2.14.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in list(dist.distributed_c10d._world.pg_map):
        set_timeout(_NO_TIMEOUT, group)


class Start(NamedTuple):
    """One start of all processes."""

    number: int  # from 1, among the starts that share a store
    is_restart: bool
    external_address: str | None = None  # of a process, as other machines reach it; None on a single machine
    mistake: str | None = None  # why the processes cannot train together


def agree_on_start(store: dist.Store, launch: Launch, timeout: timedelta, gpu: str | None = None) -> Start:
    """Wait until all processes of this start have called this. Returns the same on every process.

    torchrun keeps its store when it starts the processes again, so each start needs a prefix of its own: otherwise it
    would read what the start before wrote. TORCHELASTIC_RESTART_COUNT cannot be that prefix, because each machine
    counts only the failures of its own processes (pytorch/pytorch#108158).

    Each process publishes a token, the address from which it reaches MASTER_ADDR and the id of its ``gpu``. The root
    answers each with its token and a digest of the list of all tokens, and repeats that with each new list. A process
    returns a digest only if it comes with its present token. So when all have returned the digest of the same list, no
    token in it is of an earlier start. The bytes that a process sends and receives do not grow with the number of
    processes. After ``REPORT_SECONDS`` the root prints which ranks are missing; if the root is missing, one process of
    each machine prints that.

    Raises:
        RuntimeError: after the timeout, in one line that names a missing process; or at once, if the store is that of
            another job.
    """
    if launch.is_root:
        store.set("job", launch.job)
    all_jobs, is_store_of_this_job = store, False
    if launch.job:
        store = dist.PrefixStore(f"job {launch.job}", store)
    own_token, ranks, entries = uuid.uuid4().hex[:12], range(launch.world_size), []
    token_keys, seen_keys = [f"token/{rank}" for rank in ranks], [f"seen/{rank}" for rank in ranks]
    address = own_address(os.environ.get("MASTER_ADDR", launch.master_address))
    store.set(f"token/{launch.rank}", json.dumps([own_token, launch.is_restart, address, gpu]))
    start_time, pause = time.monotonic(), 0.001
    deadline, has_reported = start_time + timeout.total_seconds(), False
    tokens_digest = returned_digest = ""
    while time.monotonic() < deadline:
        if not is_store_of_this_job and all_jobs.check(["job"]):
            if (job := all_jobs.get("job").decode()) != launch.job:
                raise RuntimeError(
                    f"port {os.environ.get('MASTER_PORT')} of {os.environ.get('MASTER_ADDR')} belongs to another job "
                    f"({job or 'without an id'}; this one is {launch.job or 'without an id'}): give each job its own "
                    "MASTER_PORT"
                )
            is_store_of_this_job = True
        if not has_reported and time.monotonic() > start_time + REPORT_SECONDS:
            has_reported = True
            _report_missing(launch, [rank for rank, key in enumerate(token_keys) if not store.check([key])])
        if launch.is_root and store.check(token_keys):
            entries = [json.loads(text) for text in store.multi_get(token_keys)]
            tokens = [token for token, *_ in entries]
            digest = hashlib.blake2b(json.dumps(tokens).encode(), digest_size=16).hexdigest()
            if digest != tokens_digest:
                tokens_digest = digest
                answers = [json.dumps([token, tokens_digest]) for token in tokens]
                store.multi_set([f"listed/{rank}" for rank in ranks], answers)  # type: ignore[attr-defined]
        if store.check([f"listed/{launch.rank}"]):
            token, digest = json.loads(store.get(f"listed/{launch.rank}"))
            if token == own_token and digest != returned_digest:
                returned_digest = digest
                store.set(f"seen/{launch.rank}", returned_digest)
        if entries and store.check(seen_keys) and set(store.multi_get(seen_keys)) == {tokens_digest.encode()}:
            number = store.add("starts", 1)
            _, restarts, addresses, gpus = zip(*entries, strict=True)
            external_address = next((address for address in addresses if not _is_loopback(address)), None)
            start = [number, number > 1 or any(restarts), external_address, shared_gpu_error(list(gpus))]
            store.set("start", json.dumps([tokens_digest, *start]))
        if returned_digest and store.check(["start"]):
            start_digest, *start = json.loads(store.get("start"))
            if start_digest == returned_digest:
                return Start(*start)
        time.sleep(pause)
        pause = min(2 * pause, 0.25)
    missing = next((f"rank {rank}" for rank, key in enumerate(token_keys) if not store.check([key])), "another process")
    raise RuntimeError(f"{missing} did not come within {timeout.total_seconds() / 60:g} minutes{_launch_hint(launch)}")


def _report_missing(launch: Launch, missing: Sequence[int]) -> None:
    """Print which processes are missing: on the root, or on one process of each machine that waits for the root."""
    if launch.is_root or (launch.local_rank == 0 and 0 in missing):
        present_count = launch.world_size - len(missing)
        rank_text = ", ".join(map(str, missing[:_MAX_NAMED_RANKS]))
        rank_text += " ..." if len(missing) > _MAX_NAMED_RANKS else ""
        count_text = f"{present_count} of {launch.world_size} processes {'has' if present_count == 1 else 'have'} come"
        address = f"{os.environ.get('MASTER_ADDR')}, port {os.environ.get('MASTER_PORT')}"
        say(f"rank {launch.rank} waits for rank {rank_text} at {address}: {count_text}{_launch_hint(launch)}")


def _launch_hint(launch: Launch) -> str:
    """The end of a line about missing processes: a likely mistake in the launch, or nothing."""
    if launch.launcher != "srun" or "SLURM_PTY_PORT" not in os.environ:
        return ""
    return (
        "; in a shell of `srun --pty` python is one process, though the shell's SLURM_STEP_NUM_TASKS is "
        f"{launch.world_size}: unset that for one process, or start all with `srun --overlap python ...`"
    )


def _is_store_in_torchrun() -> bool:
    """Whether torchrun's own process has the rendezvous store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _wait_for_store(launch: Launch, timeout: timedelta) -> None:
    """Wait until the rendezvous store answers: PyTorch's own wait lasts three times as long, and prints more than a
    line.

    Raises:
        ConnectionError: nobody answers until the timeout; or for 10 s, if torchrun has the store: it has ended then.
    """
    is_store_in_torchrun = _is_store_in_torchrun()
    if launch.is_root and not is_store_in_torchrun:  # this process has the store
        return
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    # A busy machine may refuse a connection for a moment, and another one may be slow to start.
    start_time, has_reported = time.monotonic(), False
    limit = _MAX_TRIES_WITH_TORCHRUN * TRY_SECONDS if is_store_in_torchrun else timeout.total_seconds()
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=TRY_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() > start_time + limit:
                cause = "torchrun has ended"
                if not is_store_in_torchrun:
                    cause = f"rank 0 did not come within {timeout.total_seconds() / 60:g} minutes"
                raise ConnectionError(f"{cause}: nobody answers at {host}, port {port} ({error})") from None
            if not has_reported and time.monotonic() > start_time + REPORT_SECONDS and launch.local_rank == 0:
                has_reported = True
                say(f"rank {launch.rank} waits for rank 0: nobody answers at {host}, port {port} ({error})")
        time.sleep(TRY_SECONDS)


def set_gloo_interface(external_address: str) -> None:
    """Let Gloo use the network interface towards ``external_address``, unless the user has named one. By default Gloo
    listens at the address of the host name: in Debian's /etc/hosts 127.0.1.1, which no other machine reaches."""
    address = own_address(external_address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(reply[20:24]) == address:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def own_address(host: str) -> str | None:
    """The IPv4 address of this machine from which packets for ``host`` leave; None without a route."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # asks for the route; sends nothing
        return str(probe.getsockname()[0])
    return None


def unreachable_own_address() -> str | None:
    """The address of this machine's host name, if no other machine reaches that, or "no address" if the name has none.
    None if other machines reach it."""
    address = None
    with contextlib.suppress(OSError):
        address = str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    return (address or "no address") if _is_loopback(address) else None


def _is_loopback(address: str | None) -> bool:
    """Whether no other machine reaches this address; also for None."""
    return address is None or ipaddress.ip_address(address).is_loopback


class TorchCommunicator(Communicator):
    """Collectives of the default process group."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def all_reduce_(self, tensor: Tensor, name: str) -> Handle:
        return dist.all_reduce(tensor, async_op=True)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        # Into one tensor: NCCL would copy a list of tensors one by one. Gloo takes only flat ones.
        own = tensor.contiguous().view(-1)
        flat = own.new_empty(self.world_size * own.numel())
        dist.all_gather_into_tensor(flat, own)
        return list(flat.view(self.world_size, *tensor.shape).unbind(0))


def leave_process_group(gracefully: bool) -> None:
    """Destroy the process group, but not after an error, because the other processes may be gone."""
    if gracefully and dist.is_initialized():
        dist.destroy_process_group()
    _wait_for_threads()


def _wait_for_threads() -> None:
    """Wait until no other thread of this process runs, at most ``THREAD_WAIT_SECONDS``.

    FSDP's and DeepSpeed's objects keep process groups alive, whose threads free the tensors of a collective after it
    has returned. For that they need the interpreter's lock, and a thread that asks for it while the interpreter shuts
    down aborts the process (https://github.com/pytorch/pytorch/issues/190489)."""
    own_thread, deadline, quiet_polls = str(threading.get_native_id()), time.monotonic() + THREAD_WAIT_SECONDS, 0
    while quiet_polls < _QUIET_POLLS and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)  # releases the interpreter's lock
        try:
            others = [thread for thread in os.listdir(_THREADS) if thread != own_thread]
        except OSError:  # not Linux
            time.sleep(_QUIET_POLLS * _POLL_SECONDS)
            return
        quiet_polls = 0 if any(map(_is_running, others)) else quiet_polls + 1


def _is_running(thread: str) -> bool:
    """Whether a thread runs or waits for a processor (state R in proc_pid_stat(5))."""
    try:
        with open(f"{_THREADS}/{thread}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"R"
    except OSError:  # it has ended
        return False
