"""Trains a few updates; after the third the weights of rank 1 are not what they are elsewhere."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

import distributed


def main() -> None:
    parser = argparse.ArgumentParser()
    distributed.add_arguments(parser)
    parser.set_defaults(
        batch_size=4, grad_accum_steps=1, precision="fp32", max_grad_norm=0.0, max_skipped_updates=3, compile=False
    )
    args = parser.parse_args()
    with distributed.from_args(args) as backend:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        engine = backend.wrap(model, torch.optim.Adam(model.parameters(), fused=True), name="toy")
        for update in range(8):
            if update == 3 and backend.rank == 1:
                with torch.no_grad():
                    model[1].bias[0] += 1e-7
            engine.backward(engine(torch.ones(2, 3)).square().mean())
            engine.step()


if __name__ == "__main__":
    main()
