"""A toy training in which rank 1 fails. With ``--fault nan``, its gradient is NaN in every update after the first two,
although its loss is finite. With ``--fault drift``, its weights differ from the other ranks' after three updates."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

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


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=("nan", "drift"), required=True)
    distributed.add_arguments(parser)
    parser.set_defaults(
        batch_size=4, grad_accum_steps=1, precision="fp32", max_grad_norm=0.0, max_skipped_updates=3, compile=False
    )
    args = parser.parse_args(argv)
    with distributed.from_args(args) as backend:
        torch.manual_seed(0)
        model = Model(nn.Linear(3, 5, bias=False), nn.Linear(5, 2))
        engine = backend.wrap(model, torch.optim.Adam(model.parameters(), fused=True), name="toy")
        for update in range(20):
            model.spoil = args.fault == "nan" and update >= 2 and backend.rank == 1
            if args.fault == "drift" and update == 3 and backend.rank == 1:
                with torch.no_grad():
                    model[1].bias[0] += 1e-7
            engine.backward(engine(torch.ones(2, 3)).square().mean())
            engine.step()


if __name__ == "__main__":
    main(sys.argv[1:])
