"""horovodrun, but it waits up to an hour for processes that it has asked to end, instead of 5 s: on a loaded machine a
save may take longer."""

import sys
from typing import Any

import psutil
from horovod.runner.launch import run_commandline

# Horovod waits for the processes by this function; for the shell around them, which it has stopped, it still waits 5 s.
# Horovod's helper processes import this file again, and so wait as long.
_wait_procs = psutil.wait_procs


def _wait_an_hour(processes: Any, timeout: Any = None) -> Any:
    return _wait_procs(processes, 3600)


psutil.wait_procs = _wait_an_hour  # type: ignore[assignment]

if __name__ == "__main__":
    sys.exit(run_commandline())
