"""Training in which each process sees a folder of its own: {rank} in a flag stands for its rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import train_vae


def main(argv: Sequence[str]) -> None:
    train_vae.main([flag.replace("{rank}", os.environ["RANK"]) for flag in argv])


if __name__ == "__main__":
    main(sys.argv[1:])
