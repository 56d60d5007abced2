"""horovodrun, but with all the time in the world for processes that it has asked to end: it kills them after 5 s
otherwise, and on a loaded machine a save may take longer."""

import sys

from horovod.runner.common.util import safe_shell_exec
from horovod.runner.launch import run_commandline

# Horovod spawns helper processes, which import this file anew and need the same value.
safe_shell_exec.GRACEFUL_TERMINATION_TIME_S = 3600

if __name__ == "__main__":
    sys.exit(run_commandline())
