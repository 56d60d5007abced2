"""A cascade of diffusion Unets: from noise and a condition to pictures (Ramesh et al. 2022, section 2.1; Ho et al.
2022, "Cascaded diffusion models")."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.config.models.decoder import LOWRES_CONDITIONS, DecoderConfig, Sampling
from tandem.models.base import Pretrained
from tandem.models.layers.convolutional import check_images, check_multiple
from tandem.models.layers.resizing import crop_images, resize_images

from .losses import predict_x_start
from .sampling import Denoise, Denoised, Inpaint, apply_guidance, dynamic_threshold, sample
from .schedule import Schedule
from .unet import CHANNELS, Unet, pixel_coordinates
from .variance import variance_fraction

# Schedule of the noise on low-resolution conditions, the same for all schedules of the Unets, as in DALLE2-pytorch.
LOWRES_SCHEDULE, LOWRES_TIMESTEPS = "linear", 1000
CONDITIONS = {"image_embed": "image_embed_dim", "text_encodings": "text_embed_dim"}
"""For each condition, the field of `UnetConfig` with its width; the field is None if the Unet does not take it."""

NoiseSource = Callable[[str, int, Sequence[int]], Tensor]
"""(name of the noise, number of the step, shape of one picture) -> standard normal noise (b, *shape)."""


class Decoder(Pretrained):
    """Unets of ascending sizes: the first makes small pictures from noise and a condition; each further one makes
    larger pictures, conditioned on those of the Unet before it.

    Raises:
        ValueError: one line, if values do not fit one another.
    """

    Config = DecoderConfig

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        if config.lowres_condition not in LOWRES_CONDITIONS:
            raise ValueError(f"lowres_condition {config.lowres_condition!r} is none of {', '.join(LOWRES_CONDITIONS)}")
        level, timesteps = config.lowres_noise_level, config.timesteps
        if not 0 <= level <= 1:
            raise ValueError(f"lowres_noise_level {level} is no share of the noise levels: give 0 to 1")
        self.unets = nn.ModuleList(Unet(unet_config) for unet_config in config.unets())
        self.image_sizes, self.objectives = list(config.image_sizes), list(config.objective)
        self._check_sizes()
        with torch.device("cpu"):  # also while the weights are built on the meta device
            self.schedules = [
                Schedule.from_name(name, timesteps, zero_terminal_snr=config.zero_terminal_snr)
                for name in config.noise_schedule
            ]
            has_noise = config.lowres_condition == "noise"
            self._lowres_schedule = Schedule.from_name(LOWRES_SCHEDULE, LOWRES_TIMESTEPS) if has_noise else None
        self._lowres_level = min(int(level * LOWRES_TIMESTEPS), LOWRES_TIMESTEPS - 1)

    def _architecture(self) -> dict[str, Any]:
        # Of the values of lowres_condition, "noise" alone adds weights; `clip` is not part of the model.
        has_noise = self.config["lowres_condition"] == "noise"
        return {**super()._architecture(), "clip": None, "lowres_noise_cond": has_noise}

    def _check_sizes(self) -> None:
        for size, larger in itertools.pairwise(self.image_sizes):
            if larger <= size:
                raise ValueError(f"image_sizes {size} and {larger}: each Unet makes larger pictures than the last")
        for number, size in enumerate(self.image_sizes, start=1):
            check_multiple(f"image_sizes of Unet {number}:", size, self.unet(number - 1).smallest_multiple)

    def unet(self, index: int) -> Unet:
        """Unet number ``index``, from 0."""
        return cast(Unet, self.unets[index])

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def with_unets(self, unets: Sequence[nn.Module]) -> Decoder:
        """This decoder with other Unets of the same arguments in place of its own."""
        other = copy.copy(self)
        other._modules = {**self._modules, "unets": nn.ModuleList(unets)}
        return other

    def schedule(self, index: int) -> Schedule:
        """The schedule of Unet number ``index``, from 0, on the device of the weights."""
        return self.schedules[index].to(self.device)

    def lowres_schedule(self) -> Schedule | None:
        """The schedule of the noise on low-resolution pictures, on the device of the weights; None if there is none."""
        return self._lowres_schedule.to(self.device) if self._lowres_schedule else None

    def picture_shape(self, index: int, crop: int = 0) -> tuple[int, int, int]:
        """(c, s, s) of the pictures that Unet number ``index``, from 0, is trained on: crops of side ``crop``, or whole
        pictures if that is 0.

        Raises:
            ValueError: one line, if there are no such crops, or the Unet does not take them.
        """
        size, multiple = self.image_sizes[index], self.unet(index).smallest_multiple
        if crop > size or crop % multiple:
            expected = f"a multiple of {multiple}, {size} at most"
            raise ValueError(f"random_crop_sizes: {crop} pixels for Unet {index + 1}: give 0 or {expected}")
        return CHANNELS, crop or size, crop or size

    def training_pictures(
        self, batch: Mapping[str, Any], index: int, blur_sigma: Tensor | None = None, *, places: Tensor | None = None,
        crop: int = 0,
    ) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
        """Pictures x0 (b, c, s, s) in [-1, 1] for the training of Unet number ``index`` (from 0), and its other inputs,
        by the names of the arguments of `Unet.forward`.

        Args:
            batch: "images" uint8 (b, c, S, S), and the conditions "image_embed" and "text_encodings", if there are any.
            blur_sigma: (b,), in pixels of the low-resolution pictures, which are blurred before they are enlarged.
            places, crop: Places and side of crops of both pictures: see `crop_images`. A Unet with coordinates gets
                those of its crop in the whole picture.
        """
        images = batch["images"].float() / 127.5 - 1
        spec = self.unet(index).spec
        inputs = {name: batch[name] for name, width in CONDITIONS.items() if getattr(spec, width)}
        size = self.image_sizes[index]
        if index:
            lowres_images = resize_images(images, self.image_sizes[index - 1])
            lowres_images = lowres_images if blur_sigma is None else blur(lowres_images, blur_sigma)
            inputs["lowres_image"] = crop_images(resize_images(lowres_images, size), places, crop)
        resized_images = resize_images(images, size)
        if spec.coordinates and places is not None:
            inputs["coordinates"] = crop_images(pixel_coordinates(resized_images), places, crop)
        return crop_images(resized_images, places, crop), inputs

    @torch.no_grad()
    def sample(
        self,
        conditions: Mapping[str, Tensor],
        noise_sources: Callable[[int], NoiseSource],
        sampling: Sampling | None = None,
        *,
        batch: int,
        start_at: int = 1,
        stop_at: int | None = None,
        images: Tensor | None = None,
        inpaint_image: Tensor | None = None,
        inpaint_mask: Tensor | None = None,
        resample_times: int = 5,
        guide: Decoder | None = None,
        on_step: Callable[[int, int], None] | None = None,
        on_pictures: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Pictures (b, c, s, s) in [0, 1] of the size of the last Unet that runs.

        Args:
            conditions: "image_embed" (b, d) and "text_encodings" (b, L, d'), those that the Unets take.
            noise_sources: Number of a Unet from 0 -> source of noise on the device. A picture's noise should depend on
                the key of this picture alone, so that no picture depends on the others.
            batch: Number of pictures b.
            start_at, stop_at: First and last Unet, from 1; None: the last one of the decoder.
            images: (b, c, s', s') in [0, 1], the pictures of the Unet before the first one; None if that is Unet 1.
            inpaint_image, inpaint_mask: Images (b, c, s, s) in [0, 1], and bool (b, s, s), True where they stay; any s.
            resample_times: See `Inpaint`.
            guide: A weaker decoder to guide away from (autoguidance), with as many Unets, of the same sizes and noise
                levels, that take no other conditions. It has no effect where `sampling.cond_scale` is 1.
            on_step: Called after each step of a Unet with the number of its steps so far and that of all its steps.
            on_pictures: Called with the pictures (b, c, s', s') in [0, 1] of each Unet, also of the last one.

        Raises:
            ValueError: one line, if arguments do not fit the decoder.
        """
        sampling = sampling or Sampling()
        stop_at = stop_at or len(self.unets)
        if not 1 <= start_at <= stop_at <= len(self.unets):
            raise ValueError(f"Unets {start_at} to {stop_at} do not exist: the decoder has 1 to {len(self.unets)}")
        if start_at > 1 and images is None:
            raise ValueError(f"to start at Unet {start_at}, give the images of Unet {start_at - 1}")
        if guide is not None:
            check_guide(self, guide)
        for value in (*conditions.values(), images, inpaint_image):
            if value is not None and len(value) != batch:
                raise ValueError(f"{len(value)} conditions or images for {batch} pictures: give one for each")
        for value in (images, inpaint_image):
            if value is not None:
                check_images(value, CHANNELS)
        pictures = None if images is None else images * 2 - 1
        for index in range(start_at - 1, stop_at):
            side, schedule, source = self.image_sizes[index], self.schedule(index), noise_sources(index)
            shape, scale = (CHANNELS, side, side), _value_for_unet(sampling.cond_scale, index)
            lowres = self._lowres_inputs(pictures, side, source) if index else {}
            inpaint = None
            if inpaint_image is not None and inpaint_mask is not None:
                known_image = resize_images(inpaint_image, side) * 2 - 1
                is_known = F.interpolate(inpaint_mask[:, None].float(), size=(side, side), mode="nearest") > 0.5
                inpaint = Inpaint(known_image, is_known, resample_times)
            denoise = self._denoiser(index, conditions, lowres)
            if scale != 1 and (guide or is_conditional(self.unet(index))):
                reference = guide._denoiser(index, conditions, lowres) if guide else self._denoiser(index, {}, lowres)
                denoise = apply_guidance(denoise, reference, schedule, scale, sampling.guidance_interval)
            pictures = sample(
                denoise,
                schedule,
                source("first", 0, shape),
                draw=lambda name, step, source=source, shape=shape: source(name, step, shape),  # type: ignore[misc]
                sampler=sampling.sampler,
                steps=min(_value_for_unet(sampling.sample_timesteps, index), schedule.timesteps),
                eta=sampling.ddim_eta,
                threshold=partial(dynamic_threshold, percentile=sampling.dynamic_thresholding),
                inpaint=inpaint,
                on_step=on_step,
            ).clamp(-1, 1)
            if on_pictures is not None:
                on_pictures((pictures + 1) / 2)
        assert pictures is not None
        return (pictures + 1) / 2

    def _lowres_inputs(self, pictures: Tensor | None, side: int, source: NoiseSource) -> dict[str, Tensor]:
        assert pictures is not None
        image, schedule = resize_images(pictures, side), self.lowres_schedule()
        if schedule is None:
            return {"lowres_image": image}
        times = torch.full((len(image),), self._lowres_level, device=image.device)
        noise = source("lowres", 0, image.shape[1:])
        return {"lowres_image": schedule.add_noise(image, noise, times), "lowres_time": times}

    def _denoiser(self, index: int, conditions: Mapping[str, Tensor], lowres: Mapping[str, Tensor]) -> Denoise:
        """The estimate by Unet number ``index``, from 0, from those of the conditions that the Unet takes."""
        unet, schedule, objective = self.unet(index), self.schedule(index), self.objectives[index]
        inputs = {name: value for name, value in conditions.items() if getattr(unet.spec, CONDITIONS[name])}
        inputs |= {name: x for name, x in lowres.items() if name != "lowres_time" or unet.spec.lowres_noise_cond}

        def denoise(x: Tensor, t: int) -> Denoised:
            times = torch.full((len(x),), t, device=x.device)
            output = unet(x, times, **inputs)
            prediction, variance = output[:, :CHANNELS], output[:, CHANNELS:]
            x_start = predict_x_start(objective, prediction, x, *schedule.at(times, x))
            return Denoised(x_start, variance_fraction(variance) if variance.shape[1] else None)

        return denoise


def is_conditional(unet: Unet) -> bool:
    """Whether a Unet takes an image embedding or a text."""
    return any(getattr(unet.spec, width) for width in CONDITIONS.values())


def check_guide(decoder: Decoder, guide: Decoder) -> None:
    """Raise ValueError, in one line, unless a guide fits a decoder: as many Unets, the same sizes and noise levels, and
    no condition that the decoder does not take. Objectives may differ."""
    if (count := len(guide.unets)) != len(decoder.unets):
        raise ValueError(f"the guide has {count} Unets and the decoder {len(decoder.unets)}: give one with as many")
    for index, (size, guide_size) in enumerate(zip(decoder.image_sizes, guide.image_sizes, strict=True)):
        config, guide_config = decoder.unet(index).spec, guide.unet(index).spec
        ours, theirs = decoder.schedules[index], guide.schedules[index]
        problem = None
        if guide_size != size:
            problem = f"makes pictures of {guide_size} pixels a side, but that of the decoder makes pictures of {size}"
        elif theirs.timesteps != ours.timesteps:
            problem = f"has {theirs.timesteps} noise levels, but that of the decoder has {ours.timesteps}"
        elif theirs.is_flow != ours.is_flow or not torch.equal(theirs.log_snr, ours.log_snr):
            problem = "has another noise schedule than that of the decoder"
        elif guide_config.lowres_noise_cond and decoder.lowres_schedule() is None:
            problem = "takes the noise level of the smaller picture, but the decoder adds no noise to it"
        for name, width in CONDITIONS.items():
            dim, guide_dim = getattr(config, width), getattr(guide_config, width)
            if guide_dim not in (None, dim):
                actual = f"width {dim}" if dim else "none"
                problem = problem or f"takes {name} of width {guide_dim}, but that of the decoder takes {actual}"
        if problem:
            raise ValueError(f"Unet {index + 1} of the guide {problem}: give a guide that fits")


def blur(images: Tensor, sigma: Tensor) -> Tensor:
    """Gaussian blur of each image by a kernel of 3 x 3 pixels, as in DALLE2-pytorch; edges are reflected. In training
    it lowers the quality of the smaller pictures to that of generated ones (Ho et al. 2022, section 4).

    Args:
        images: (b, c, h, w).
        sigma: (b,), in pixels; 0 leaves an image bitwise as it is.
    """
    offsets = torch.arange(-1, 2, device=images.device)
    # For sigma 0, a number so small that every tap but the middle one becomes exactly 0.
    taps = torch.exp(-(offsets / sigma.clamp_min(1e-18)[:, None]).square() / 2)
    taps = (taps / taps.sum(1, keepdim=True)).to(images.dtype)
    for axis in (2, 3):
        side = images.shape[axis]
        if side == 1:  # there is nothing to reflect or to mix
            continue
        padded = F.pad(images, (0, 0, 1, 1) if axis == 2 else (1, 1, 0, 0), mode="reflect")
        images = sum(
            (tap.view(-1, 1, 1, 1) * padded.narrow(axis, first, side) for first, tap in enumerate(taps.unbind(1))),
            start=torch.zeros_like(images),
        )
    return images


def _value_for_unet(values: Sequence[Any], index: int) -> Any:
    """The value for a Unet; a single value is for all Unets."""
    return values[index if len(values) > 1 else 0]
