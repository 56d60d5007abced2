"""Trains the VAE for 10 updates, saves, and goes on for 20; or loads what others saved, and goes on for the same 20.

    torchrun --nproc_per_node 2 tests/launch/portability_worker.py --output DIR [flags of train_vae.py]
    torchrun --nproc_per_node 2 tests/launch/portability_worker.py --output DIR --checkpoints DIR/checkpoints ...

The root leaves a safetensors file per run: the losses, and the whole state at update 10 and at the end.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from safetensors.torch import save_file
from torch import Tensor

import data
import distributed
import train_vae
from distributed import Backend
from training.checkpoint import Checkpoints
from training.ema import make_ema
from training.noise import Noise

SAVED_AT, END = 10, 30


def coarse_images(step: int, args: argparse.Namespace) -> Tensor:
    """The global batch of an update, uint8 (b, 3, s, s): 4 x 4 random colours, which such a small model can learn."""
    cell = args.image_size // 4
    colours = torch.randint(256, (args.batch_size, 3, 4, 4), generator=torch.Generator().manual_seed(step))
    return colours.to(torch.uint8).repeat_interleave(cell, dim=2).repeat_interleave(cell, dim=3)


class Training:
    """Model, optimizer, average and noise of train_vae.py, and its update."""

    def __init__(self, args: argparse.Namespace, backend: Backend, name: str) -> None:
        self.args, self.backend = args, backend
        self.model = train_vae.build_model(args)
        optimizer = torch.optim.Adam(self.model.parameters(), lr=args.learning_rate, fused=True)
        self.ema = make_ema(self.model, args.ema_decay)
        self.engine = backend.wrap(self.model, optimizer, name=name)
        self.noise = Noise(0, "gumbel")
        self.losses: list[float] = []
        self.numbers: dict[str, Tensor] = {}

    def advance(self, first: int, end: int) -> None:
        """The updates first, ..., end - 1, by their losses."""
        share = self.args.batch_size // self.backend.world_size
        mine = range(self.backend.rank * share, (self.backend.rank + 1) * share)
        for step in range(first, end):
            self.engine.lr = train_vae.learning_rate(step, self.args)
            batch = {"images": coarse_images(step, self.args)[mine.start : mine.stop], "positions": list(mine)}
            for micro in self.engine.micro_batches(batch):
                noise = self.noise.gumbel(step, micro["positions"], self.model.noise_shape)
                out = self.engine(
                    data.to_unit_range(micro["images"]),
                    noise=noise,
                    temperature=train_vae.gumbel_temperature(step, self.args),
                )
                self.engine.backward(out.loss)
            self.losses.append(self.backend.mean({"loss": out.loss.detach()})["loss"])
            self.engine.step()
            self.ema.update(self.engine.gathered)

    def parts(self) -> dict[str, Any]:
        """What a checkpoint holds. Collective."""
        return {"engine": self.engine.state_dict(), "ema": self.ema.state_dict()}

    def note(self, when: str, parts: Mapping[str, Any]) -> None:
        self.numbers |= {f"{when}/{path}": number for path, number in flattened(parts)}

    def write(self, path: Path) -> None:
        """Collective."""
        self.note("end", self.parts())
        if self.backend.is_root:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({"losses": torch.tensor(self.losses, dtype=torch.float64), **self.numbers}, path)


def flattened(tree: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Copies of the tensors and counts in a tree, by '/'-joined path."""
    found = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found += [(f"{key}/{path}", number) for path, number in flattened(value)]
        elif isinstance(value, Tensor | int):
            found.append((key, torch.as_tensor(value).clone().contiguous()))
    return found


def written(args: argparse.Namespace, backend: Backend) -> None:
    """A run that leaves a checkpoint on its way."""
    training = Training(args, backend, "vae")
    training.advance(0, SAVED_AT)
    parts = training.parts()
    training.note("update 10", parts)
    checkpoints = Checkpoints(args.output / "checkpoints", 1, backend.is_root, backend.barrier)
    checkpoints.save(SAVED_AT, parts, {})
    checkpoints.wait()
    training.advance(SAVED_AT, END)
    training.write(args.output / "uninterrupted.safetensors")


def continued(args: argparse.Namespace, backend: Backend, folder: Path) -> None:
    """A run that goes on from somebody's checkpoint; nothing it begins with may survive."""
    writer = folder.parent.name
    training = Training(argparse.Namespace(**{**vars(args), "seed": 1}), backend, f"from-{writer}")
    checkpoints = Checkpoints(folder, 1, backend.is_root, backend.barrier)
    latest = checkpoints.latest()
    assert latest is not None, folder
    parts, _ = checkpoints.load(latest, expected=("engine", "ema"))
    training.engine.load_state_dict(parts["engine"])
    training.ema.load_state_dict(parts["ema"])
    training.note("update 10", training.parts())
    training.advance(SAVED_AT, END)
    training.write(args.output / f"from-{writer}.safetensors")


def main() -> None:
    parser = train_vae.build_parser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--checkpoints", type=Path, nargs="*", default=[])
    args = parser.parse()
    torch.set_num_threads(1)
    with distributed.from_args(args) as backend:
        if not args.checkpoints:
            written(args, backend)
        for folder in args.checkpoints:
            continued(args, backend, folder)


if __name__ == "__main__":
    main()
