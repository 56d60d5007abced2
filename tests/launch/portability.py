"""Trains the VAE for 8 updates, saves, and trains for 8 more; or loads a checkpoint of another job, and makes the
same 8 updates.

The root leaves a safetensors file per run: losses, gradient norms, and the whole state at update 8 and at the end.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import data
import train_vae
from distributed import Backend
from training.checkpoints.store import Checkpoints
from training.ema import make_ema
from training.noise import Noise

SAVED_AT, END = 8, 16


def coarse_images(step: int, args: argparse.Namespace) -> Tensor:
    """The global batch of an update, uint8 (b, 3, s, s): 4 x 4 random colours, which such a small model can learn."""
    cell = args.image_size // 4
    colours = torch.randint(256, (args.batch_size, 3, 4, 4), generator=torch.Generator().manual_seed(step))
    return colours.to(torch.uint8).repeat_interleave(cell, dim=2).repeat_interleave(cell, dim=3)


def without_kinks(model: Any) -> Any:
    """The model with SiLU instead of ReLU. About one in a million activations is so near to zero that the order of
    summation decides its sign by rounding. There ReLU turns a difference in the seventh digit of its input into one in
    the third digit of a channel's gradient."""
    for layers in [module for module in model.modules() if isinstance(module, nn.Sequential)]:
        for name, layer in layers.named_children():
            if isinstance(layer, nn.ReLU):
                layers.register_module(name, nn.SiLU())
    return model


class Training:
    """Model (with SiLU instead of ReLU), optimizer, average, noise and update of train_vae.py."""

    def __init__(self, args: argparse.Namespace, backend: Backend, name: str) -> None:
        self.args, self.backend = args, backend
        self.model = train_vae.build_model(args)
        if not args.batch_parts:  # --batch_parts fixes the order of summation
            self.model = without_kinks(self.model)
        optimizer = torch.optim.Adam(self.model.parameters(), lr=args.learning_rate, fused=True)
        self.engine = backend.wrap(self.model, optimizer, name=name)
        self.ema = make_ema(self.engine, args.ema_decay)
        self.noise = Noise(0, "gumbel")
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.states: dict[str, Tensor] = {}

    def advance(self, first: int, end: int) -> None:
        """Make the updates first, ..., end - 1, and record their losses."""
        share = self.args.batch_size // self.backend.world_size
        mine = range(self.backend.rank * share, (self.backend.rank + 1) * share)
        for step in range(first, end):
            self.engine.lr = train_vae.learning_rate(step, self.args)
            loss = torch.zeros((), dtype=torch.float64)
            batch = {"images": coarse_images(step, self.args)[mine.start : mine.stop], "positions": list(mine)}
            for micro in self.engine.micro_batches(batch):
                noise = self.noise.gumbel(step, micro["positions"], self.model.noise_shape)
                out = self.engine(
                    data.to_unit_range(micro["images"]),
                    noise=noise,
                    temperature=train_vae.gumbel_temperature(step, self.args),
                )
                self.engine.backward(out.loss)
                loss += out.loss.detach() / self.backend.grad_accum_steps
            self.losses.append(self.backend.mean({"loss": loss})["loss"])
            self.grad_norms.append(float(self.engine.step().grad_norm))
            self.ema.update()

    def parts(self) -> dict[str, Any]:
        """What a checkpoint holds. Collective."""
        return {"engine": self.engine.state_dict(), "ema": self.ema.state_dict()}

    def note(self, when: str, parts: Mapping[str, Any]) -> None:
        self.states |= {f"{when}/{path}": number for path, number in flattened(parts)}

    def write(self, path: Path) -> None:
        """Write everything that was recorded. Collective."""
        self.note("end", self.parts())
        if self.backend.is_root:
            curves = {"losses": torch.tensor(self.losses), "grad_norms": torch.tensor(self.grad_norms)}
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({**curves, **self.states}, path)


def flattened(tree: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Copies of the tensors and counts in a tree, by '/'-joined path."""
    found = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found += [(f"{key}/{path}", number) for path, number in flattened(value)]
        elif isinstance(value, Tensor | int):
            found.append((key, torch.as_tensor(value).clone().contiguous()))
    return found


def write(args: argparse.Namespace, backend: Backend) -> None:
    """Run without interruption, and save a checkpoint during the run."""
    output = Path(args.output_dir)
    training = Training(args, backend, "written")
    training.advance(0, SAVED_AT)
    training.note("saved", training.parts())
    checkpoints = Checkpoints(output / "checkpoints", 1, backend)
    checkpoints.save(SAVED_AT, {"engine": training.engine.live_state(), "ema": training.ema.live_state()}, {})
    training.advance(SAVED_AT, END)  # while the checkpoint is being written
    checkpoints.wait()
    training.write(output / "uninterrupted.safetensors")


def read(args: argparse.Namespace, backend: Backend, writers: dict[str, str]) -> None:
    """Continue a run from every checkpoint. The run begins with different weights, all of which must be replaced.

    Args:
        writers: Output folders of ``write`` by the launcher's name.
    """
    for writer, folder in writers.items():
        training = Training(argparse.Namespace(**{**vars(args), "seed": 1}), backend, f"from {writer}")
        checkpoints = Checkpoints(Path(folder) / "checkpoints", 1, backend)
        latest = checkpoints.latest()
        assert latest is not None, folder
        parts, _ = checkpoints.load(latest, expected=("engine", "ema"))
        training.engine.load_state_dict(parts["engine"])
        training.ema.load_state_dict(parts["ema"])
        training.note("saved", training.parts())
        training.advance(SAVED_AT, END)
        training.write(Path(args.output_dir) / f"{writer}.safetensors")
