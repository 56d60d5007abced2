"""Training scripts for the parts of generative models, with the same numbers on every backend."""

import os
import sys

if sys.platform == "darwin":  # before torch is imported: operations that MPS lacks run on the CPU, with a warning
    os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")

__version__ = "0.3.0"
