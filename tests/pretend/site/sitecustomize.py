"""With this folder in PYTHONPATH, each Python that starts has the pretend accelerator (docs/devices.md)."""

import sys
from pathlib import Path

if "multiprocessing" not in " ".join(sys.orig_argv[1:3]):  # what forks and ends loader processes computes nothing
    sys.path.insert(0, str(Path(__file__).parents[3]))
    import torch

    from tests.pretend import library
    from tests.pretend.device import install

    sys.path.pop(0)
    install(library.built())
    torch.set_num_threads(1)
