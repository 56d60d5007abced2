"""Two good updates, then rank 1 produces a NaN gradient from a finite loss for ever."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

import distributed


class NaNBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * torch.nan


class Model(nn.Sequential):
    spoil = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self[0](x)
        return self[1](NaNBackward.apply(hidden) if self.spoil else hidden)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output")
    distributed.add_arguments(parser)
    parser.set_defaults(
        batch_size=4, grad_accum_steps=1, precision="fp32", max_grad_norm=0.0, max_skipped_updates=3, compile=False
    )
    args = parser.parse_args()
    with distributed.from_args(args) as backend:
        torch.manual_seed(0)
        model = Model(nn.Linear(3, 5, bias=False), nn.Linear(5, 2))
        engine = backend.wrap(model, torch.optim.Adam(model.parameters(), fused=True))
        for update in range(20):
            model.spoil = update >= 2 and backend.rank == 1
            engine.backward(engine(torch.ones(2, 3)).square().mean())
            engine.step()


if __name__ == "__main__":
    main()
