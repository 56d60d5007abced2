"""A cascade of diffusion Unets: from noise and a condition to pictures (Ramesh et al. 2022, section 2.1; Ho et al.
2022, "Cascaded diffusion models")."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .convolutional import check_images
from .decoder_config import DecoderConfig, Sampling
from .diffusion.guidance import Passes, denoiser, guided
from .diffusion.lowres import blur
from .diffusion.sampling import Inpaint, dynamic_threshold, sample
from .diffusion.schedule import Schedule
from .files.pretrained import Pretrained
from .resizing import cropped, resized
from .unet import Unet, coordinates_of
from .unets.conditions import Conditions
from .unets.given import check_batch, check_guide, conditions_of, is_conditional, takes_level

LOWRES_CONDITIONS = ("noise", "blur", "none")
LOWRES_SCHEDULE = "linear"  # of the noise on low-resolution conditions, whatever the schedule of the Unet

Draw = Callable[[str, int, Sequence[int]], Tensor]
"""(name of the noise, number of the step, shape of one picture) -> standard normal noise (b, *shape)."""


class Decoder(Pretrained):
    """Unets of ascending sizes: the first makes small pictures of noise and a condition, each further one makes them
    larger, conditioned on the smaller ones.

    Raises:
        ValueError: one line, if values do not fit one another.
    """

    Config = DecoderConfig
    not_in_the_weights = DecoderConfig.not_in_the_weights()

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config.plain()
        if config.lowres_condition not in LOWRES_CONDITIONS:
            raise ValueError(f"lowres_condition {config.lowres_condition!r} is none of {', '.join(LOWRES_CONDITIONS)}")
        level, timesteps = config.lowres_noise_level, config.timesteps
        if not 0 <= level <= 1:
            raise ValueError(f"lowres_noise_level {level} is no share of the noise levels: give 0 to 1")
        self.unets = nn.ModuleList(Unet(each) for each in config.unets())
        self.image_sizes, self.objectives = list(config.image_sizes), list(config.objective)
        self._check_sizes()
        with torch.device("cpu"):  # also where the weights are to be on no device at all
            self.schedules = [
                schedule_of(name, size, timesteps, config.zero_terminal_snr, config.noise_shift)
                for name, size in zip(config.noise_schedule, config.image_sizes, strict=True)
            ]
            has_noise = config.lowres_condition == "noise"
            # A list, which `with_unets` shares: tables that were moved to a device stay there.
            self._lowres_schedules = [Schedule(LOWRES_SCHEDULE, timesteps)] if has_noise else []
        self._lowres_level = min(int(level * timesteps), timesteps - 1)

    def _compared(self) -> dict[str, Any]:
        return {**super()._compared(), "lowres_noise_cond": [takes_level(self.unet(n)) for n in range(len(self.unets))]}

    def _check_sizes(self) -> None:
        for size, larger in itertools.pairwise(self.image_sizes):
            if larger <= size:
                raise ValueError(f"image sizes {size} and {larger}: each Unet makes larger pictures than the last")
        for number, size in enumerate(self.image_sizes, start=1):
            unet = self.unet(number - 1)
            multiple = unet.smallest_multiple
            if size % multiple:
                near = f"{size // multiple * multiple or multiple} or {(size // multiple + 1) * multiple}"
                raise ValueError(f"image size {size} of Unet {number} must be a multiple of {multiple}; use {near}")
            if unet.spec.lowres_cond != (number > 1):
                raise ValueError(f"Unet {number} {'lacks' if number > 1 else 'must not have'} lowres_cond")

    def unet(self, index: int) -> Unet:
        """A Unet, from 0."""
        return cast(Unet, self.unets[index])

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def with_unets(self, unets: Sequence[nn.Module]) -> Decoder:
        """This decoder with other Unets of the same arguments in the place of its own."""
        other = copy.copy(self)
        other._modules = {**self._modules, "unets": nn.ModuleList(unets)}
        return other

    def schedule(self, index: int) -> Schedule:
        """The schedule of a Unet, from 0, on the device of the weights."""
        return self._on_device(self.schedules, index)

    def lowres_schedule(self) -> Schedule | None:
        """The schedule of the noise on low-resolution pictures, on the device of the weights; None if they get none."""
        return self._on_device(self._lowres_schedules, 0) if self._lowres_schedules else None

    def _on_device(self, schedules: list[Schedule], index: int) -> Schedule:
        if schedules[index].device != self.device:
            schedules[index] = schedules[index].to(self.device)
        return schedules[index]

    def picture_shape(self, index: int, crop: int = 0) -> tuple[int, int, int]:
        """(c, s, s) of the pictures that a Unet, from 0, is trained on: crops of side ``crop``; 0: whole ones.

        Raises:
            ValueError: one line, if there are no such crops, or the Unet does not take them.
        """
        size, unet = self.image_sizes[index], self.unet(index)
        multiple = unet.smallest_multiple
        if crop > size or crop % multiple:
            known = f"a multiple of {multiple}, {size} at most"
            raise ValueError(f"crops of {crop} pixels for Unet {index + 1}: give 0 or {known}")
        return unet.spec.channels, crop or size, crop or size

    def training_pictures(
        self, batch: Mapping[str, Any], index: int, blur_sigma: Tensor | None = None, *, places: Tensor | None = None,
        crop: int = 0,
    ) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
        """What Unet number ``index`` (from 0) is trained on: pictures x0 (b, c, s, s) in [-1, 1], and what it is given
        beside them, by the names of the arguments of `Unet.forward`.

        Args:
            batch: "images" uint8 (b, c, S, S), and the conditions "image_embed" and "text_encodings", if there are any.
            blur_sigma: (b,), in pixels of the low-resolution pictures, which are blurred before they are enlarged.
            places, crop: Where to cut crops of this side out of both pictures: see `cropped`. A Unet with coordinates
                is given those of its crop in the whole picture.
        """
        images = batch["images"].float() / 127.5 - 1
        spec, given = self.unet(index).spec, {}
        if spec.cond_on_image_embeds:
            given["image_embed"] = batch["image_embed"]
        if spec.cond_on_text_encodings:
            given["text_encodings"] = batch["text_encodings"]
        size = self.image_sizes[index]
        if index:
            small = resized(images, self.image_sizes[index - 1])
            small = small if blur_sigma is None else blur(small, blur_sigma)
            given["lowres_image"] = cropped(resized(small, size), places, crop)
        whole = resized(images, size)
        if spec.coordinates and places is not None:
            given["coordinates"] = cropped(coordinates_of(whole), places, crop)
        return cropped(whole, places, crop), given

    @torch.no_grad()
    def sample(
        self,
        conditions: Mapping[str, Tensor],
        draw: Callable[[int], Draw],
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
        """Pictures (b, c, s, s) in [0, 1] of the last size that is asked for.

        Args:
            conditions: "image_embed" (b, d) and "text_encodings" (b, L, d'), those that the Unets take.
            draw: Number of a Unet from 0 -> source of noise on the device. That of a picture should depend on its own
                key alone, so that no picture depends on the others.
            batch: Number of pictures b.
            start_at, stop_at: First and last Unet, from 1. `images` (b, c, s', s') in [0, 1] are the pictures of the
                one before the first.
            inpaint_image, inpaint_mask: Images (b, c, s, s) in [0, 1], and bool (b, s, s), True where they stay; any s.
            resample_times: See `Inpaint`.
            guide: A weaker decoder to guide away from (autoguidance), with as many Unets, of the same sizes and noise
                levels, that take no other conditions. It has no effect where `sampling.cond_scale` is 1.
            on_step: Called with the steps that a Unet has made and those it will make.
            on_pictures: Called with the pictures (b, c, s', s') in [0, 1] of each Unet, the last one's too.

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
        check_batch(batch, conditions, images, inpaint_image)
        for given in (images, inpaint_image):
            if given is not None:
                check_images(given, self.unet(0).spec.channels)
        pictures = None if images is None else images * 2 - 1
        for index in range(start_at - 1, stop_at):
            side, unet, schedule = self.image_sizes[index], self.unet(index), self.schedule(index)
            source = draw(index)
            lowres = self._lowres(pictures, side, source) if index else {}
            passes = self._passes(index, conditions, batch, lowres)
            weaker = guide and guide._passes(index, conditions, batch, lowres)
            shape = (unet.spec.channels, side, side)
            inpaint = None
            if inpaint_image is not None and inpaint_mask is not None:
                known = resized(inpaint_image, side) * 2 - 1
                kept = F.interpolate(inpaint_mask[:, None].float(), size=(side, side), mode="nearest") > 0.5
                inpaint = Inpaint(known, kept, resample_times)
            scale, steps = (
                _of(sampling.cond_scale, index),
                min(_of(sampling.sample_timesteps, index), schedule.timesteps),
            )
            denoise = guided(
                passes, schedule, scale=scale, interval=sampling.guidance_interval, guide=weaker,
                rescale=sampling.cfg_rescale, is_conditional=is_conditional(unet),
            )  # fmt: skip
            pictures = sample(
                denoise,
                schedule,
                source("first", 0, shape),
                draw=lambda name, step, source=source, shape=shape: source(name, step, shape),  # type: ignore[misc]
                sampler=sampling.sampler,
                steps=steps,
                spacing=sampling.spacing,
                eta=sampling.ddim_eta if sampling.sampler == "ddim" else 0.0,
                threshold=(lambda x: dynamic_threshold(x, sampling.dynamic_thresholding))
                if sampling.dynamic_thresholding
                else _clipped,
                inpaint=inpaint,
                on_step=on_step,
            ).clamp(-1, 1)
            if on_pictures is not None:
                on_pictures((pictures + 1) / 2)
        assert pictures is not None
        return (pictures + 1) / 2

    def _lowres(self, pictures: Tensor | None, side: int, draw: Draw) -> dict[str, Tensor]:
        assert pictures is not None
        image, schedule = resized(pictures, side), self.lowres_schedule()
        if schedule is None:
            return {"lowres_image": image}
        times = torch.full((len(image),), self._lowres_level, device=image.device)
        noise = draw("lowres", 0, image.shape[1:])
        return {"lowres_image": schedule.add_noise(image, noise, times), "lowres_time": times}

    def _passes(self, index: int, conditions: Mapping[str, Tensor], batch: int, lowres: Mapping[str, Tensor]) -> Passes:
        unet = self.unet(index)
        known: dict[tuple[bool, ...], Conditions] = {}
        lowres = {name: value for name, value in lowres.items() if name != "lowres_time" or takes_level(unet)}

        def predict(x: Tensor, levels: Tensor, previous: Tensor | None, blocks: tuple[bool, ...]) -> Tensor:
            if blocks not in known:
                known[blocks] = conditions_of(unet, conditions, batch, blocks)
            of_blocks = {name: torch.cat([value] * len(blocks)) for name, value in lowres.items()}
            self_cond = previous if unet.spec.self_cond else None
            out: Tensor = unet(x, levels, conditions=known[blocks], self_cond=self_cond, **of_blocks)
            return out

        return denoiser(predict, self.schedule(index), self.objectives[index])


def schedule_of(
    name: str, image_size: int, timesteps: int, zero_terminal_snr: bool, noise_shift: int | None = None
) -> Schedule:
    """The schedule of a Unet; arguments as of `DecoderConfig`."""
    shift = 2 * math.log(noise_shift / image_size) if noise_shift else 0.0
    return Schedule(name, timesteps, zero_terminal_snr=zero_terminal_snr, log_snr_shift=shift)


def _clipped(x: Tensor) -> Tensor:
    return x.clamp(-1, 1)


def _of(values: Sequence[Any], index: int) -> Any:
    """The value of a Unet: a single value is that of all."""
    return values[index if len(values) > 1 else 0]
