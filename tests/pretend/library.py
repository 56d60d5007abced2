"""Builds the C++ part of the pretend device, once for each version of its sources and of PyTorch."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = HERE / "pretend.cpp", HERE / "pccl.inc"
FLAGS = "-O1 -w -std=c++20 -fPIC -shared -DTORCH_EXTENSION_NAME=_pretend -DUSE_C10D -DUSE_DISTRIBUTED -DUSE_C10D_GLOO"
LIBRARIES = "-ltorch -ltorch_cpu -ltorch_python -lc10"


def built() -> Path:
    """The shared library, which the first process builds (one call of g++, about half a minute) and later ones find.

    Raises FileNotFoundError without g++, and CalledProcessError, with the compiler's lines, if it fails.
    """
    if shutil.which("g++") is None:
        raise FileNotFoundError("g++ is not installed: apt-get install g++")
    of = torch.__version__.encode() + sys.version.encode() + b"".join(source.read_bytes() for source in SOURCES)
    folder = Path(sys.prefix) / "pretend-device"
    library = folder / f"{hashlib.sha256(of).hexdigest()[:16]}.so"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            root = Path(torch.__file__).parent
            headers = root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]
            unfinished = library.with_suffix(".unfinished")
            command = ["g++", *FLAGS.split(), *(f"-I{folder}" for folder in headers), str(SOURCES[0])]
            command += ["-o", str(unfinished), f"-L{root / 'lib'}", *LIBRARIES.split()]
            subprocess.run(command, check=True, capture_output=True, text=True)
            unfinished.rename(library)
    return library


if __name__ == "__main__":
    print(built())
