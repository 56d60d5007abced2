"""The contracts and a training of the VAE, one after the other in one job, for the test of --batch_parts.

    torchrun --nproc_per_node 2 tests/launch/parts_worker.py --batch_parts 4 --outputs DIR
    torchrun --nproc_per_node 2 tests/launch/parts_worker.py --batch_parts 4 --outputs DIR --checkpoints A/checkpoints

A job starts slowly: one serves several ZeRO stages. With --checkpoints it only goes on from them.
"""

from __future__ import annotations

import gc
import itertools
import json
from pathlib import Path

import contract_worker as contracts  # a script finds its neighbours
import portability_worker as portability

import distributed
import train_vae

CONTRACTS = [contracts.plain, contracts.several_backwards, contracts.by_items, contracts.gan, contracts.contrastive]


def main() -> None:
    parser = train_vae.build_parser()
    parser.add_argument("--outputs", type=Path, nargs="+")
    parser.add_argument("--zero_stages", type=int, nargs="*", default=[], help="one per output")
    parser.add_argument("--checkpoints", type=Path, nargs="*", default=[])
    args = parser.parse()
    assert args.batch_size == contracts.BATCH
    with distributed.from_args(args) as backend:
        gc.freeze()
        for output, stage in itertools.zip_longest(args.outputs, args.zero_stages):
            if stage is not None:
                backend.zero_stage = stage  # read whenever a model is wrapped
            for folder in args.checkpoints:
                portability.continued(args, backend, output, folder)
            if not args.checkpoints:
                portability.written(args, backend, output)
                result = {contract.__name__: contract(backend) for contract in CONTRACTS}
                result["skipped"] = contracts.plain(backend, "skipped", spoil_update=3)
                if backend.is_root:
                    (output / "contracts.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
