"""The continuous latents of a folder of images on the disk, as trainers of diffusion transformers read them.

    latents/latents-00000.safetensors    "latents" (n, d, h, w), fp16, bf16 or fp32; "latents_flip", those of the images
                                         mirrored left to right; "labels" int64 (n,): LightningDiT's names
    latents/index.jsonl                  {"path": "cats/1.jpg", "shard": 0, "row": 0, "label": 0}, a line per image
    latents/index.json                   settings, classes, shards and unreadable files; see shards.py
    latents/features/00000-00000.npy     as .npy, of shard and row, (1, d, h, w): fast-DiT's layout. A mirrored image is
    latents/labels/00000-00000.npy       one more, 00000-00000-flip.npy, with the same label, int64 (1,)

Latents are means or samples of their Gaussians, or moments: (n, 2 d, h, w), means and then standard deviations. They
are as the encoder gives them, or, if they are `scaled`, (latent - shift_factor) * scaling_factor, both in index.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .codes import StoredCodes
from .encoding import encode_batches
from .shards import Array, Encoded, ShardWriter, explained, read_columns

if TYPE_CHECKING:
    from training.noise import Noise

    from .output import OutputFolder

LATENTS, FLIPPED, LABELS = "latents", "latents_flip", "labels"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Latents:
    """What is kept of the latents of a model without codes.

    Args:
        model: A VQGAN.
        args: --latent, --latent_dtype, --with_flip, --scaled and --seed.
        noise: Of that seed; a sample depends on it and on the number of the image alone.

    Raises ValueError, in one line, if latents are to be scaled and the model's scale is not known.
    """

    def __init__(self, model: Any, args: Any, noise: Noise) -> None:
        config = model.saved_config()
        self._scale, self._shift = config["scaling_factor"], config["shift_factor"] or 0.0
        if args.scaled and not self._scale:
            raise ValueError("--scaled: the model has no scaling_factor, which training measures; leave it out")
        self._model, self._args, self._noise = model, args, noise

    def settings(self, grid: Sequence[int], classes: Sequence[str]) -> dict[str, Any]:
        """What the index says of rows of this shape (v, 2 d, h, w)."""
        latent, (_, width, *sides) = self._args.latent, grid
        return {
            "latent": latent, "grid": [width if latent == "moments" else width // 2, *sides],
            "dtype": self._args.latent_dtype, "with_flip": self._args.with_flip, "scaled": self._args.scaled,
            "scaling_factor": self._scale, "shift_factor": self._shift,
            "seed": self._args.seed if latent == "sample" else None, "classes": [*classes],
        }  # fmt: skip

    def encode(self, images: Tensor) -> Tensor:
        """Images (b, c, h, w) in [0, 1] -> moments fp32 (b, v, 2 d, h', w'), as the encoder gives them; v is 1, or 2
        with the mirrored images behind."""
        views = [images, images.flip(-1)] if self._args.with_flip else [images]
        return torch.stack([self._model.moments(view) for view in views], 1)

    def shards(self, load: Any, describe: Any, shards: Sequence[range], encode: Any, **how: Any) -> Iterator[Encoded]:
        """`encode_batches` of what `encode` gives, as it is kept: (n, v, d or 2 d, h', w')."""
        encoded = encode_batches(load, describe, shards, encode, **how)
        for items, of_shard in zip(shards, encoded, strict=True):
            bad = {sample.index for sample in of_shard.bad}
            kept = [index for index in items if index not in bad]
            parts = [self._kept(torch.cat([*of_shard.parts]), kept)] if kept else []
            yield of_shard._replace(parts=parts)

    def _kept(self, moments: Tensor, items: Sequence[int]) -> Tensor:
        latents, deviation = moments.chunk(2, dim=2)
        if self._args.latent == "sample":
            views, shape = latents.shape[1], latents.shape[2:]
            drawn = [self._noise.normal(view, items, shape) for view in range(views)]
            latents = latents + deviation * torch.stack(drawn, 1)
        if self._args.scaled:
            latents, deviation = (latents - self._shift) * self._scale, deviation * self._scale
        if self._args.latent == "moments":
            latents = torch.cat([latents, deviation], 2)
        kept = latents.to(DTYPES[dtype := self._args.latent_dtype])
        if not kept.isfinite().all():
            raise ValueError(f"latents are not finite in {dtype}: give --latent_dtype fp32 or bf16, or --scaled")
        return kept


class LatentWriter(ShardWriter):
    """Shards of latents: each row holds those of an image, and of the mirrored image if it has two."""

    def columns(self, rows: Tensor, notes: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        views = dict(zip((LATENTS, FLIPPED), rows.unbind(1), strict=False))
        return {**views, LABELS: torch.tensor([note["label"] for note in notes], dtype=torch.int64)}

    def arrays(self, shard: int, columns: Mapping[str, Tensor]) -> Iterator[tuple[str, Array]]:
        for name, ending in ((LATENTS, ""), (FLIPPED, "-flip")):
            for row, latent in enumerate(columns.get(name, ())):
                file = f"{shard:05d}-{row:05d}{ending}.npy"
                yield f"features/{file}", latent[None].numpy()
                yield f"labels/{file}", columns[LABELS][row, None].numpy()


class StoredLatents(StoredCodes):
    """A complete folder of latents. Raises what `StoredCodes` raises."""

    name = LATENTS

    @classmethod
    def writer(cls, output: OutputFolder, *items: Any, npy: bool) -> ShardWriter:
        grid, dtype = output.settings["grid"], DTYPES[output.settings["dtype"]]
        views = 1 + output.settings["with_flip"]
        return LatentWriter(output, LATENTS, torch.zeros((0, views, *grid), dtype=dtype), *items, npy=npy)

    def rows(self, shard: int) -> Tensor:
        """What the decoder takes, fp32 (n, d, h, w): the latents, or of moments the means, as the encoder gave them."""
        index, entry = self.index, self.index["shards"][shard]
        with explained(path := self.folder / entry["file"]):
            shape = (entry["rows"], *index["grid"])
            shapes = {LATENTS: shape, **({FLIPPED: shape} if index["with_flip"] else {}), LABELS: (entry["rows"],)}
            latents = read_columns(path, shapes, entry["sha256"])[LATENTS]
            if latents.dtype != DTYPES[index["dtype"]]:
                raise ValueError(f"it holds {latents.dtype}, not {index['dtype']}")
            if index["latent"] == "moments":
                latents = latents.chunk(2, dim=1)[0]
            latents = latents.float()
            if index["scaled"]:
                latents = latents / index["scaling_factor"] + index["shift_factor"]
            if not latents.isfinite().all():
                raise ValueError("not all of its numbers are finite")
            return latents
