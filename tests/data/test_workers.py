"""Loader workers live and end with the main process, whatever signals reach them."""

from __future__ import annotations

import errno
import fcntl
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import termios

import pytest
import torch

from tandem.data.sampling.workers import Loader, _PipeEnd
from tandem.data.sets import open_images
from tandem.io.exits import CannotGoOn
from tests.data.helpers import ROOT, stream


def test_worker_computes_on_one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert list(Loader(lambda _: torch.get_num_threads(), range(2), num_workers=1)) == [1, 1]
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["INT", "TERM", "USR1", "USR2", "HUP"])
def test_signals_to_workers_change_nothing(name):
    images = open_images("demo:shapes", image_size=8)
    undisturbed = [batch["ids"] for batch in itertools.islice(stream(images), 12)]
    others = set(multiprocessing.active_children())
    batches = iter(stream(images, num_workers=2))
    disturbed = [next(batches)["ids"]]
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2
    # by another process, as a launcher or a terminal would
    subprocess.run(["kill", f"-{name}", *(str(worker.pid) for worker in workers)], check=True)
    disturbed += [next(batches)["ids"] for _ in range(11)]
    assert disturbed == undisturbed
    assert all(worker.is_alive() for worker in workers)


@pytest.mark.parametrize("is_sending", [False, True], ids=["between two passes", "while it sends"])
def test_a_worker_that_was_killed_is_one_line(is_sending):
    others = set(multiprocessing.active_children())
    loader = Loader(torch.zeros, [(1 << 22 if is_sending else 2,)] * 4, num_workers=1, keep_workers=True)
    results = iter(loader)
    if is_sending:
        reader = loader._loader._iterator._worker_result_queue._reader
        while int.from_bytes(fcntl.ioctl(reader, termios.FIONREAD, bytes(4)), sys.byteorder) <= 4:
            pass  # its length comes first
    else:
        assert len(list(results)) == 4
    (worker,) = set(multiprocessing.active_children()) - others
    worker.kill()
    worker.join()
    with pytest.raises(CannotGoOn, match="a loader process was killed") as killed:
        list(results if is_sending else loader)
    assert "--num_workers" in str(killed.value) and "--batch_size" not in str(killed.value), "which a run cannot change"


# What workers find before they load: a loader that shares memory loses what it sends, or ends.
LACKS = {
    "no shared memory": "subprocess.run('mount -t tmpfs -o size=64k tmpfs /dev/shm', shell=True, check=True)",
    "no descriptors": "resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() + 30,) * 2)",
    "no place for sockets": "os.environ['TMPDIR'] = tempfile.mkdtemp(100 * 'x')",
}
SENDS = f"""
import os, resource, subprocess, sys, tempfile
sys.path.insert(0, {str(ROOT)!r})
import torch
from tandem.data.sampling.workers import Loader

def open_files():
    return len(os.listdir("/proc/self/fd"))

def load(request):
    images = torch.full((300, 1000), request, dtype=torch.uint8)[:, ::2]
    return {{"images": images, "ids": [request], "lengths": torch.tensor(0.5)}}

LACK
before = open_files()
results = list(Loader(load, range(40), num_workers=2))
print(sum(len(result) for result in results), all((result["images"] == result["ids"][0]).all() for result in results))
results[0]["images"] += 1
"""


def can_mount() -> bool:
    try:
        return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("lack", LACKS)
def test_workers_send_tensors_without_shared_memory_sockets_and_descriptors(lack):
    if lack == "no shared memory" and not can_mount():
        pytest.skip("a small /dev/shm needs root, and `unshare --mount`")
    command = [sys.executable, "-c", SENDS.replace("LACK", LACKS[lack])]
    command = ["unshare", "--mount", *command] if lack == "no shared memory" else command
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)  # of a hang
    assert (done.stdout, done.stderr) == ("120 True\n", "")


def test_workers_send_a_dtype_that_numpy_lacks():
    sent = torch.arange(4, dtype=torch.bfloat16)
    assert [torch.equal(result, sent) for result in Loader(lambda request: sent, range(2), num_workers=1)] == [True] * 2


Nowhere = type("Nowhere", (Exception,), {})
Nowhere.__qualname__ = "Elsewhere"  # pickle looks for a class by its name


@pytest.mark.parametrize("result", [lambda: None, Nowhere("x")], ids=["no pickle", "an error of no module"])
def test_what_a_worker_cannot_send_is_one_line_and_no_wait(result, capfd):
    def load(request):
        if isinstance(result, Exception):
            raise result
        return result

    with pytest.raises(CannotGoOn, match="cannot send what it has loaded"):
        list(Loader(load, range(4), num_workers=1))
    assert "Traceback" not in capfd.readouterr().err


def test_an_end_of_a_pipe_is_closed_once_though_garbage_is_collected_that_holds_it():
    end = _PipeEnd(os.dup(2))
    number = end.fileno()
    end.close()
    other = os.open(os.devnull, os.O_RDONLY)  # takes the lowest number that is free
    assert other == number
    end.close()
    end.__del__()
    os.fstat(other)
    os.close(other)


LEAVES = f"""
import gc, os, sys, threading
sys.path.insert(0, {str(ROOT)!r})
import torch
from tandem.data.sampling.workers import Loader

gc.disable()
before = os.listdir("/proc/self/fd")
for _ in range(2):
    assert len(list(Loader(torch.zeros, [(2,)] * 4, num_workers=2))) == 4
for thread in {{*threading.enumerate()}} - {{threading.main_thread()}}:
    thread.join()  # those that send close their end of the pipe
print(len(os.listdir("/proc/self/fd")) - len(before))
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts the files of /proc")
def test_a_pass_leaves_no_file_open_though_nobody_looks_for_garbage():
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=120)  # of a hang
    assert (done.stdout, done.stderr) == ("0\n", "")


@pytest.mark.parametrize(("number", "call", "n_good", "reason"), [
    (errno.ENOSPC, "pipe", 0, "/dev/shm, the shared memory, is full"), (errno.EMFILE, "pipe", 0, "ulimit -n"),
    (errno.EAGAIN, "fork", 0, "ulimit -u"), (errno.EACCES, "pipe", 0, "is there and writable"),
    (errno.EMFILE, "fork", 1, "too many files are open"),
])  # fmt: skip
@pytest.mark.filterwarnings("error")  # of what an object that was not made prints when it is deleted
def test_workers_of_which_some_or_all_cannot_be_started_are_one_line_and_end(number, call, n_good, reason, monkeypatch):
    before, real, made = set(multiprocessing.active_children()), getattr(os, call), []

    def fail(*args):
        if len(made) == n_good:
            raise OSError(number, os.strerror(number))
        made.append(real(*args))
        return made[-1]

    monkeypatch.setattr(os, call, fail)
    results = iter(Loader(abs, range(4), num_workers=2))
    with pytest.raises(CannotGoOn, match=f"cannot be started: .*{reason}.*--num_workers 0"):
        next(results)
    del results
    assert len(made) == n_good and set(multiprocessing.active_children()) == before


HANGS = f"""
import os, sys, time
import psutil
sys.path.insert(0, {str(ROOT)!r})
from tandem.data.sampling import workers
workers._START_TIMEOUTS = (1, 1)
forks = []

def hang():  # as a lock does that another thread held, before the child's os.fork returns
    if len(forks) in (1, 3):
        time.sleep(3600)

os.register_at_fork(before=lambda: forks.append(0), after_in_child=hang)
results = iter(workers.Loader(abs, range(4), num_workers=3))
print(len(forks), len(psutil.Process().children()), *results)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")
def test_a_worker_that_hangs_in_its_fork_is_started_again():
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, timeout=120, check=True)  # of a hang
    assert done.stdout == b"5 3 0 1 2 3\n"
    assert done.stderr.count(b"a loader process has not begun within 1 s, and is started again\n") == 2


PROGRAM = f"""
import os, signal, sys
import torch.utils.data._utils.worker
torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 1000  # seconds until torch looks for the main process
sys.path.insert(0, {str(ROOT)!r})
from tandem.data.sampling.order import TrainingOrder
from tandem.data.sets import open_images
from tandem.data.sampling.stream import TrainingStream, ValidationStream
images = open_images("demo:shapes", image_size=8)
batches = iter(TrainingStream(images, TrainingOrder(range(4096), 0), batch_size=8, rank=0, world_size=1, num_workers=2))
next(batches)
validation = ValidationStream(images, range(200), batch_size=8, rank=0, world_size=1, num_workers=1)
list(validation)
print("ready", flush=True)
"""


@pytest.mark.parametrize(
    "end, code",
    [("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL), ("raise ValueError('a bug')", 1)],
    ids=["killed", "failed"],
)
def test_workers_end_with_the_main_process(end, code):
    """They hold its output open: it is at an end only when all of them are gone. (By torch alone: when they look.)"""
    command = [sys.executable, "-c", PROGRAM + end]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as main:
        assert main.stdout is not None and main.stdout.readline() == b"ready\n"
        main.communicate(timeout=120)  # of a hang
        assert main.returncode == code
