"""python tests/launch/like_macos.py SCRIPT.py FLAGS...: runs a script without what macOS lacks: functions of the
system, /proc, /dev/shm, and processes that are forked to load samples. Loader processes run these lines, too, because
`spawn` begins with them."""

import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import torch  # noqa: E402, F401  # as on Linux: it is what is installed here

LACKING = ((os, "posix_fallocate"), (os, "sched_getaffinity"), (signal, "sigtimedwait"), (time, "CLOCK_BOOTTIME"))
for module, name in LACKING:
    delattr(module, name)


def refuse_proc(event: str, arguments: tuple[Any, ...]) -> None:
    """What opens or lists something of /proc does not find it."""
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str | os.PathLike):
        path = os.fspath(arguments[0])
        if str(path).startswith(("/proc", "/dev/shm")):
            raise FileNotFoundError(2, "there is no such thing on macOS", path)


sys.addaudithook(refuse_proc)
sys.platform, linux = "darwin", sys.platform
import tandem.data.sampling.workers  # noqa: E402, F401

sys.platform = linux

if __name__ == "__main__":
    import multiprocessing

    multiprocessing.set_start_method("spawn")
    script, *flags = sys.argv[1:]
    sys.argv = [script, *flags]
    runpy.run_path(str(ROOT / script), run_name="__main__")
