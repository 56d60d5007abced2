"""A backend that disconnects ends the threads of its process group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import argparse, os, torch, distributed
parser = argparse.ArgumentParser()
distributed.add_arguments(parser)
args = parser.parse_args(["--distributed_backend", "ddp", "--timeout_minutes", "1"])
vars(args).update(batch_size=2, grad_accum_steps=1, precision="fp32", max_grad_norm=0.0, max_skipped_updates=1)
args.compile = False
with distributed.from_args(args) as backend:
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
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    finished = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert not [name for name in finished.stdout.split() if "gloo" in name or "tcpstore" in name], finished.stdout
