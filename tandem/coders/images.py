"""Images to codes or latents, and back."""

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.data.feed import to_unit_range
from tandem.data.fields import SampleDataset
from tandem.data.stores.codes import StoredCodes, code_dtype, decode_images
from tandem.data.stores.encoding import encode_batches
from tandem.data.stores.latents import DTYPES, LatentWriter, StoredLatents, open_labelled
from tandem.data.stores.writer import Encode, ShardWriter
from tandem.devices import to_device
from tandem.distributed import ProcessGroup
from tandem.models.building import require_room
from tandem.sides import Sides, height_and_width, sides_text
from tandem.training.noise import Noise

from .base import latent_settings, run_model

PNG_CHANNELS = (1, 3, 4)


class ImageCoder:
    """Images in batches, through a DiscreteVAE or a VQGAN, to codes or to latents.

    All batches are padded to one size, because at a fixed size neither the position of an image in its batch nor the
    other images change its codes. With another size or number of threads, a CPU chooses other kernels, whose latents
    may differ slightly, so that occasionally another code is the nearest.

    `settings` are those that the files depend on; `stored` and `writer` read and write a folder of codes or latents;
    for `ending` and `frames_per_code` see `DecodedFiles`.
    """

    kind, frames_per_code = "images", None

    def __init__(self, model: Any, args: argparse.Namespace, processes: ProcessGroup) -> None:
        self._model, self._args, self._processes = model, args, processes
        if args.decode and model.channels not in PNG_CHANNELS:
            if "format" in args.explicit and args.format == "png":
                raise ValueError(f"--format png: no PNG has {model.channels} channels; give --format npy")
            args.format = "npy"
        self.ending = f".{args.format}"
        self.settings: dict[str, Any] = {"batch_size": args.batch_size}
        self.stored: type[StoredCodes] = StoredCodes
        self.writer: Callable[..., ShardWriter] = ShardWriter
        if not model.num_codes:
            self.settings |= latent_settings(model, args)
            self.stored, self.writer = StoredLatents, functools.partial(LatentWriter, Noise(args.seed, "latents"))

    def _encode(self, images: Tensor) -> Tensor:
        model, processes = self._model, self._processes
        values = to_unit_range(to_device(images, processes.device))
        if model.num_codes:
            return run_model(processes, self._args.precision, "encoding", model.encode, values)
        views = [values, values.flip(-1)][: 1 + self._args.with_flip]
        return torch.stack(
            [run_model(processes, self._args.precision, "encoding", model.posterior, view) for view in views], 1
        )

    def open(self, sides: Sides) -> tuple[Tensor, dict[str, Any], SampleDataset, Encode]:
        """For samples of these sides: an empty tensor (0, ...) with the dtype and the shape of the rows that the writer
        gets; the settings "grid" and "dtype", the shape and the dtype of a row in a file; the samples; and the function
        that encodes the samples of each shard. Raises ValueError, in one line, if the model does not take them.

        The writer gets codes [h', w'], or moments [views, 2 x channels, h', w'], where a mirrored image is a second
        view."""
        model, args, batch_size = self._model, self._args, self._args.batch_size
        shape, text = (model.channels, *height_and_width(sides)), sides_text(sides)
        if shape[1:] != height_and_width(model.image_size) and type(model).__name__ == "DiscreteVAE":
            expected = sides_text(model.image_size)
            raise ValueError(f"--image_size {text}: this model takes {expected} alone; leave it out")
        require_room(f"a batch of {batch_size} images of {text} pixels", batch_size, *shape)
        try:
            grid = list(self._encode(torch.zeros(1, *shape, dtype=torch.uint8)).shape[1:])
        except ValueError as error:
            raise ValueError(f"--image_size {text} does not fit the model: {error}") from None
        needs_label = not model.num_codes  # latents are for diffusion transformers, which take a class
        images = open_labelled(args.image_folder, is_needed=needs_label, image_size=sides, channels=model.channels)
        load = functools.partial(load_image, images)
        options = {"batch_size": batch_size, "samples_per_request": batch_size, "num_workers": args.num_workers}
        options["waiting"] = self._processes.waiting_for_workers
        dtype = str(code_dtype(model.num_codes)) if model.num_codes else "float32"
        empty, row_settings = torch.zeros(0, *grid, dtype=getattr(torch, dtype)), {"grid": grid, "dtype": dtype}
        if not model.num_codes:
            _, moment_channels, *places = grid
            channels = moment_channels if args.latent == "moments" else moment_channels // 2
            row_settings = {"grid": [channels, *places], "dtype": DTYPES[args.latent_dtype]}
        compute = functools.partial(encode_batches, load, encode=self._encode, **options)
        return empty, row_settings, images, compute

    def write(self, codes: StoredCodes, shard: int, paths: Sequence[Path]) -> None:
        """Decode a shard, and write its files."""
        decode = functools.partial(run_model, self._processes, self._args.precision, "decoding", self._model.decode)
        threads = max(1, self._args.num_workers)
        decode_images(codes, shard, paths, decode=decode, batch_size=self._args.batch_size, num_threads=threads)


def load_image(images: Any, index: int) -> tuple[Tensor, dict[str, Any]]:
    """An image as a batch of one, and its index entry."""
    sample = images.load(index)
    return sample.pop("images")[None], sample
