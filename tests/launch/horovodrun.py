"""horovodrun, but with all the time in the world for processes that it has asked to end: it kills them after 5 s
otherwise, and on a loaded machine a save may take longer."""

import functools
import sys

import psutil
from horovod.runner.launch import run_commandline

# What Horovod waits with for the processes; for the shell around them, which it has stopped, it goes on waiting 5 s.
# Horovod spawns helper processes, which import this file anew and wait alike.
_wait_procs = psutil.wait_procs
psutil.wait_procs = functools.wraps(_wait_procs)(lambda processes, timeout=None: _wait_procs(processes, 3600))

if __name__ == "__main__":
    sys.exit(run_commandline())
