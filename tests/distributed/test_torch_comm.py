"""A backend that disconnects ends the threads of its process group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, torch, distributed
from conftest import parsed
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
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/distributed",
                   "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # fmt: skip
    finished = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert not [name for name in finished.stdout.split() if "gloo" in name or "tcpstore" in name], finished.stdout
