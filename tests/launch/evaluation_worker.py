"""evaluate.py, of which the last process meets something in its second batch: a mistake, or a signal.

torchrun --nproc_per_node 2 tests/launch/evaluation_worker.py mistake [flags of evaluate.py]
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import evaluate
from tandem.measuring import autoencoders


def main(argv: Sequence[str]) -> None:
    what, *flags = argv
    reconstructed, calls = autoencoders.reconstruct, 0

    def meeting(*given: Any) -> Any:
        nonlocal calls
        calls += 1  # the first one tries the model
        if os.environ["RANK"] == "1" and calls == 3:
            if what == "mistake":
                raise ValueError("a mistake of one process")
            os.kill(os.getpid(), signal.Signals[what])
        return reconstructed(*given)

    autoencoders.reconstruct = meeting
    evaluate.main(flags)


if __name__ == "__main__":
    main(sys.argv[1:])
