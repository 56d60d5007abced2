"""The alignment of an autoencoder's latents with the features of a frozen vision model: VA-VAE (Yao et al. 2025,
arXiv:2501.01423, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .adversarial import image_gradient
from .gan import with_gradient

if TYPE_CHECKING:
    from tandem.distributed import Backend

    from .gan import MicroBatch


_MIN_NORM = 1e-20  # of a gradient; one within the margins everywhere is 0


def alignment_terms(
    projections: Tensor, features: Tensor, cosine_margin: float, distance_margin: float
) -> tuple[Tensor, Tensor]:
    """Projected latents and features, both (b, d, h, w) -> two terms, 0-d fp32, which are means over the images.

    The first is the mean over the places of relu(1 - cosine_margin - cos), with the cosine between the two vectors of a
    place. The second is the mean over all pairs of places of an image, equal ones included, of relu(|difference| -
    distance_margin), with the difference between the cosines of the two projections and of the two features: equations
    5 and 6 of the paper, but of the projections as in the authors' code, where equation 6 has the latents.
    """
    with torch.autocast(projections.device.type, enabled=False):
        z, f = (F.normalize(x.float().flatten(2), dim=1) for x in (projections, features))
        cosine = F.relu(1 - cosine_margin - (z * f).sum(1)).mean()
        distance = F.relu((z.mT @ z - f.mT @ f).abs() - distance_margin).mean()
    return cosine, distance


class AlignedPair(NamedTuple):
    """What the projection learns from a micro-batch, without gradients."""

    latents: Tensor  # (b, d, h, w) fp32
    features: Tensor  # (b, width, h, w)


class _DirectedGradient:
    """A hook of latents (b, d, h, w), or of the first frame of (b, d, f, h, w): to the gradient g of an image it adds
    `weight` |g| times a unit vector. `direction`, these vectors, has to be set before the backward pass."""

    def __init__(self, weight: float) -> None:
        self._weight, self.direction = weight, torch.empty(0)

    def __call__(self, gradient: Tensor) -> Tensor:
        """Gradient of all terms but the alignment -> the gradient of all."""
        total = gradient.clone()
        first = _first_frame(total)
        first += (self._weight * _image_norms(first) * self.direction).to(first.dtype)
        return total


class Alignment:
    """The term of the generator's loss that aligns latents with features, and the projection of latents to the width of
    features, a 1 x 1 convolution that learns by the same term. Neither is part of the generator.

    The projection has an engine of its own. Its update follows the generator's and is made like a discriminator's: by
    the detached latents of the generator's pass, with the gradients averaged over processes and micro-batches.

    With --align_adaptive the term has no gradient of its own: the gradient that the latents of an image get from all
    other terms grows by `align_weight` times its norm in the direction of the alignment's. The authors take the ratio
    of two norms at the encoder's last convolution, over a whole batch; here it is that of each image, so that it does
    not depend on how the batch is divided, and needs no further pass.

    Args:
        config: `LatentRegularizerFlags`.
        generator: Engine of a `VQGAN` or a `VideoTokenizer`. Of a video, the first frame is aligned, on which alone
            the first frame of latents depends.
        vision: A `VisionFeatures`; None: there is no alignment, and the methods do nothing.
        make_optimizer: The projection -> its optimizer.
        log: Takes values of a micro-batch by name, 0-d (`Run.add`).
    """

    def __init__(
        self, config: Any, backend: Backend, generator: Any, vision: Any,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], log: Callable[..., None],
    ) -> None:  # fmt: skip
        self._config, self._vision, self._log = config, vision, log
        #: What belongs into a checkpoint: the engine of the projection, if there is one, by name.
        self.parts: dict[str, Any] = {}
        if vision is None:
            return
        torch.manual_seed(config.seed)
        projection = nn.Conv2d(generator.module.quantizer.dim, vision.width, 1, bias=False).to(backend.processes.device)
        self._engine = backend.wrap(projection, make_optimizer(projection), name="projection")
        self.parts["projection"] = self._engine

    def generator_inputs(self) -> dict[str, Any]:
        """A further argument of the generator for a micro-batch, which `terms` needs."""
        if self._vision is None or not self._config.align_adaptive:
            return {}
        return {"change_latent_gradient": _DirectedGradient(self._config.align_weight)}

    def terms(self, out: Any, micro_batch: MicroBatch) -> tuple[dict[str, Tensor], AlignedPair | None]:
        """The generator's output for a micro-batch -> its term by name, 0-d and unweighted: "alignment_loss", the sum
        of the two `alignment_terms`; and what `update` needs of it. Without a vision model, no term and None."""
        if self._vision is None:
            return {}, None
        latents, images = _first_frame(out.latents), _first_frame(micro_batch.images)
        inputs = latents.detach().float().requires_grad_()
        with self._engine.frozen(), self._engine.autocast():
            features = self._vision(images, *latents.shape[-2:])
            cosine, distance = self._terms(self._engine.module(inputs), features)
            loss = cosine + distance
            gradient = image_gradient(loss, inputs)
        self._log(alignment_cosine=cosine, alignment_distance=distance)
        pair = AlignedPair(inputs.detach(), features)
        if hook := micro_batch.generator_inputs.get("change_latent_gradient"):
            hook.direction = gradient / _image_norms(gradient).clamp_min(_MIN_NORM)
            return {"alignment_loss": loss.detach()}, pair
        return {"alignment_loss": with_gradient(loss.detach(), latents.float(), gradient)}, pair

    def update(self, batch: Mapping[str, Any], pairs: Sequence[Any], lr: float, *, with_norm: bool = True) -> None:
        """One update of the projection, on the `AlignedPair` of each micro-batch, from `terms`. `with_norm` as in
        `Engine.step`. Collective."""
        if self._vision is None:
            return
        self._engine.lr = lr
        for _, (latents, features) in zip(self._engine.micro_batches(batch), pairs, strict=True):
            cosine, distance = self._terms(self._engine(latents), features)
            self._engine.backward(cosine + distance)
        self._engine.step(with_norm=with_norm)

    def _terms(self, projections: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        config = self._config
        return alignment_terms(projections, features, config.align_cosine_margin, config.align_distance_margin)


def _image_norms(x: Tensor) -> Tensor:
    """(b, d, h, w) -> fp32 (b, 1, 1, 1)."""
    return torch.linalg.vector_norm(x.float(), dim=(1, 2, 3), keepdim=True)


def _first_frame(x: Tensor) -> Tensor:
    """(b, c, f, h, w) -> (b, c, h, w) of the first frame; (b, c, h, w) stays as it is."""
    return x[:, :, 0] if x.dim() == 5 else x
