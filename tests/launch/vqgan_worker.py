"""Trains a tiny VQGAN with every quantizer, in one job of whatever launcher started it.

    torchrun --nproc_per_node 2 tests/launch/vqgan_worker.py --outputs runs/ [flags of train_vqgan.py]

Each run leaves its folder under the output, named after its quantizer. A job starts slowly: one serves several ZeRO
stages.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import distributed
import train_vqgan

QUANTIZERS = ("lfq", "vq", "fsq", "bsq", "ibq")


def main() -> None:
    parser = train_vqgan.build_parser()
    parser.add_argument("--outputs", nargs="+", help="folders of runs")
    parser.add_argument("--zero_stages", type=int, nargs="*", default=[], help="one per output")
    args = parser.parse()
    with distributed.from_args(args) as backend:
        gc.freeze()  # DeepSpeed collects garbage at every wrap
        for output, stage in itertools.zip_longest(args.outputs, args.zero_stages):
            if stage is not None:
                backend.zero_stage = stage  # read whenever a model is wrapped
            for quantizer in QUANTIZERS:
                of_run = argparse.Namespace(**vars(args))
                of_run.quantizer, of_run.output_dir = quantizer, str(Path(output) / quantizer)
                train_vqgan.train(of_run, parser.settings(of_run), backend)


if __name__ == "__main__":
    main()
