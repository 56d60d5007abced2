"""Sampling of pictures from a decoder, spread over the processes, and the same on any number of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from tandem.training.metrics.generation import GenerationQuality
from tandem.training.visuals.images import grid, shorten_caption

from .noise import Noise

if TYPE_CHECKING:
    from tandem.distributed import ProcessGroup
    from tandem.models import Decoder
    from tandem.models.features.clip import Clip

# Pictures that a process samples at once. Kernels may round differently for another number, so it does not depend on
# the number of processes. `draw` has few pictures: a smaller chunk divides them among more processes.
CHUNK, DRAW_CHUNK = 16, 4

Batch = Mapping[str, Any]


class _Interrupted(Exception):
    """A stop request has reached this process while it samples; the others learn of it after their chunk."""


def noise_of(seed: int, numbers: Sequence[int], device: torch.device) -> Callable[[int], Callable[..., Tensor]]:
    """The noise for `models.Decoder.sample`; that of a picture depends only on its number and the seed."""

    def unet_noise(index: int) -> Callable[..., Tensor]:
        def draw(name: str, step: int, shape: Sequence[int]) -> Tensor:
            return Noise(seed, f"sample/unet{index + 1}/{name}").normal(step, numbers, shape, device)

        return draw

    return unet_noise


class Generation:
    """Samples pictures for the conditions of a feed.

    Args:
        conditions: Batch -> the conditions of its pictures, (b, ...) each.
        sampling: The argument `sampling` of `Decoder.sample`.
        check_stop_request: Called by all processes between chunks of pictures; it may raise an error to end them.
        autocast: The precision of the decoder's forward passes.
    """

    def __init__(
        self,
        feed: Any,
        conditions: Callable[[Batch], Mapping[str, Tensor]],
        sampling: Any,
        processes: ProcessGroup,
        seed: int,
        check_stop_request: Callable[[], None],
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._feed, self._conditions, self._sampling = feed, conditions, sampling
        self._processes, self._seed, self._autocast = processes, seed, autocast
        self._check_stop_request = check_stop_request

    @torch.no_grad()
    def measure(self, decoder: Decoder, count: int, quality: GenerationQuality, clip: Clip | None) -> dict[str, float]:
        """Sample a picture for the conditions of each of `count` samples of the validation split, from its start again
        if it has fewer. Returns the values of `quality`, which compares the pictures with the real images; with `clip`
        also the CLIP scores, see `Clip.pairs_to_compare`. Collective."""

        def add(numbers: range) -> None:
            batch = self._feed.validation_samples(numbers)
            pictures = self.pictures(decoder, self._conditions(batch), numbers)
            selection = slice(0, min(len(numbers), count - numbers[0]))
            batch, pictures = {name: value[selection] for name, value in batch.items()}, pictures[selection]
            real = F.interpolate(
                batch["images"].float() / 255, size=pictures.shape[-2:], mode="bilinear", antialias=True
            )
            quality.add(real, pictures, numbers[selection], **(clip.pairs_to_compare(pictures, batch) if clip else {}))

        self._draw_in_rounds(count, CHUNK, add)
        return quality.result(self._processes.sum, self._processes.gather)

    def draw(self, decoder: Decoder, samples: Batch) -> Image.Image:
        """A row for each sample: its image, then the picture of each Unet for its condition; labelled by its caption.
        Collective; every process returns the whole picture."""
        conditions, images = self._conditions(samples), samples["images"].float() / 255
        count, own_numbers = len(images), list[int]()
        # For each Unet a list of batches of its pictures, first an empty one: a process may sample none.
        unet_columns: list[list[Tensor]] = [[images.new_zeros(0, images.shape[1], s, s)] for s in decoder.image_sizes]

        def add(numbers: range) -> None:
            indices = torch.tensor([number % count for number in numbers], device=images.device)
            chunk_conditions = {name: value[indices] for name, value in conditions.items()}
            n_needed = min(len(numbers), count - numbers[0])
            own_numbers.extend(numbers[:n_needed])
            unet_pictures: list[Tensor] = []
            self.pictures(decoder, chunk_conditions, numbers, on_pictures=unet_pictures.append)
            for column, pictures in zip(unet_columns, unet_pictures, strict=True):
                column.append(pictures[:n_needed])

        self._draw_in_rounds(count, DRAW_CHUNK, add)
        all_numbers = [number for numbers in self._processes.gather_objects(own_numbers) for number in numbers]
        order = torch.tensor(all_numbers).argsort().to(images.device)
        columns = [images, *(self._processes.gather(torch.cat(column))[order] for column in unet_columns)]
        largest = max(column.shape[-1] for column in columns)
        resized = [F.interpolate(column, size=(largest, largest), mode="nearest") for column in columns]
        rows = torch.stack(resized, dim=1)
        captions = [shorten_caption(caption) for caption in samples["captions"][:count]]
        return grid(
            {f"{number} {caption}": row for number, (caption, row) in enumerate(zip(captions, rows, strict=True), 1)}
        )

    def pictures(
        self, decoder: Decoder, conditions: Mapping[str, Tensor], numbers: Sequence[int], **options: Any
    ) -> Tensor:
        """Pictures (n, c, s, s) in [0, 1] with these numbers. Not collective."""
        noise = noise_of(self._seed, numbers, self._processes.device)

        def report_step(done: int, total: int) -> None:
            self._processes.heartbeat("drawing pictures")
            if self._processes.stop.is_requested_here:
                raise _Interrupted

        report_step(0, 0)
        with self._autocast():
            return decoder.sample(conditions, noise, self._sampling, batch=len(numbers), on_step=report_step, **options)

    def _draw_in_rounds(self, count: int, chunk: int, draw: Callable[[range], None]) -> None:
        """Call `draw` with the numbers of the pictures that this process samples, in chunks of one size. Numbers from
        `count` on only fill up a chunk. After each chunk all processes check for a stop request, as the feed does
        between batches; a request to this process interrupts its chunk. Collective."""
        size = min(chunk, count)
        for round_start in range(0, count, self._processes.world_size * size):
            start = round_start + self._processes.rank * size
            with self._processes.raise_on_all_ranks(), suppress(_Interrupted):
                if start < count:  # else this process only waits for the others
                    draw(range(start, start + size))
            self._check_stop_request()


def sampling_example(args: Any) -> list[str]:
    """Flags of sample.py, besides --model, that sample from the trained model."""
    if not args.condition_on:
        flags = ["--count", "4"]
    elif args.clip:
        weights = ["--clip_weights", args.clip_weights] if args.clip_weights else []
        flags = ["--prompts", "a text", "--clip", args.clip, *weights]
    elif args.image_folder.startswith("demo:") and not args.dataset:
        flags = ["--prompts", "a red circle on the left"]
    else:
        flags = ["--image_embeddings" if "image" in args.condition_on else "--text_embeddings", "rows.npy"]
    return [*flags, "--output", f"{args.output_dir}/pictures"]
