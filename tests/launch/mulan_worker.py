"""Trains a tiny MuLan with every loss, in one job of whatever launcher started it.

    torchrun --nproc_per_node 2 tests/launch/mulan_worker.py --outputs runs/ [flags of train_mulan.py]

Each run leaves its folder under the output, named after its variant. A job starts slowly: one serves several ZeRO
stages.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import distributed
import train_mulan

VARIANTS: dict[str, dict[str, Any]] = {
    "decoupled": {},
    "softmax": {"loss": "softmax", "hierarchical_layers": 1, "duplicates": "negatives"},
    "sigmoid": {"loss": "sigmoid", "use_lion": True, "learning_rate": 1e-4},
}


def main() -> None:
    parser = train_mulan.build_parser()
    parser.add_argument("--outputs", nargs="+", help="folders of runs")
    parser.add_argument("--zero_stages", type=int, nargs="*", default=[], help="one per output")
    args = parser.parse()
    with distributed.from_args(args) as backend:
        gc.freeze()  # DeepSpeed collects garbage at every wrap
        for output, stage in itertools.zip_longest(args.outputs, args.zero_stages):
            if stage is not None:
                backend.zero_stage = stage  # read whenever a model is wrapped
            for name, settings in VARIANTS.items():
                of_run = argparse.Namespace(**{**vars(args), **settings})
                of_run.output_dir = str(Path(output) / name)
                train_mulan.train(of_run, parser.settings(of_run), backend)


if __name__ == "__main__":
    main()
