"""A short torture; `make torture`, also every night, goes on for minutes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_a_short_torture_loses_nothing() -> None:
    """Rank 0 of two is killed in a save, then an old checkpoint cannot be deleted, and the result is compared bit for
    bit."""
    plan = ["--seed", "2353", "--trials", "1", "--launchers", "python", "torchrun", "--kills", "2", "--minutes", "60"]
    command = [sys.executable, str(Path(__file__).with_name("torture.py")), *plan]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as torture:
        try:
            output, _ = torture.communicate()
        finally:
            torture.terminate()  # torture.py then ends the processes that it has started
    assert torture.returncode == 0, output
    assert output.endswith("nothing was lost\n")
    # Planned faults may be missing: a run may be finished before their moment comes.
    assert (counted := re.search(r"(\d+) faults", output)) and int(counted[1]) >= 1, output
