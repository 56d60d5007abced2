"""Validation of autoencoders of images and videos."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tandem.training.visuals.images import code_histogram

from .averages import AllReduce

if TYPE_CHECKING:
    from PIL import Image

    from .reconstruction import ReconstructionQuality
    from .videos import VideoQuality


def evaluate_autoencoder(
    model: Any, samples: Iterable[Tensor], pixel_loss: Callable[[Tensor, Tensor], Tensor],
    quality: ReconstructionQuality | VideoQuality, all_reduce: AllReduce,
) -> dict[str, float | Image.Image]:  # fmt: skip
    """Quality of a model's reconstructions over the validation split and all processes, and a histogram of the codes.
    Collective.

    Args:
        samples: The batches of this process, in [0, 1]: images (b, c, h, w) or videos (b, c, f, h, w).
        pixel_loss: Reconstructions and samples -> their mean error, 0-d.
        quality: Measures the reconstructions; its `losses` are ["recon_loss"], the `pixel_loss`.
    """
    was_training = model.training
    model.eval()  # the quantizer updates no statistics and calls no collective
    for batch in samples:
        out = model(batch)
        quality.add(batch, out.reconstruction, out.codes, recon_loss=pixel_loss(out.reconstruction, batch))
    model.train(was_training)
    values, counts = quality.result(all_reduce)
    return {**values, **({"codes": code_histogram(counts)} if len(counts) else {})}


def reconstructions(models: Mapping[str, Any], samples: Tensor) -> dict[str, Tensor]:
    """Each model's reconstructions of images (b, c, h, w) or videos (b, c, f, h, w) in [0, 1], in the same shape."""
    return {name: model.decode(model.encode(samples)) for name, model in models.items()}
