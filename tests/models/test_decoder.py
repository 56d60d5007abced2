"""The cascade: its parts are those of `Unet` and `diffusion`, which have tests of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.functional import gaussian_blur

from tandem.config.models.decoder import DecoderConfig, Sampling
from tandem.models import Decoder
from tandem.models.diffusion.decoder import blur
from tandem.models.layers.resizing import crop_images
from tests.models.helpers import refused

SMALL: dict[str, Any] = {
    "dim": [8], "dim_mults": [(1, 2)], "num_resnet_blocks": [(1,)], "attn_heads": [2], "attn_dim_head": [8],
    "cross_attn_heads": [2], "cross_attn_dim_head": [8], "resnet_groups": [4], "image_sizes": [8, 16], "timesteps": 50,
    "image_embed_dim": 5, "image_embed_scale": 1.0,
}  # fmt: skip


def decoder(seed: int = 0, **more: Any) -> Decoder:
    """Two Unets, of which the first one takes an image embedding, with weights that are not the initial ones."""
    torch.manual_seed(seed)
    model = Decoder(DecoderConfig(**{**SMALL, **more})).eval()
    for unet in model.unets:
        torch.nn.init.normal_(unet.to_out.weight, std=0.1)
    return model


def noise_of(numbers: Sequence[int]) -> Callable[[int], Callable[..., Tensor]]:
    """Noise that depends on the numbers of the pictures alone."""

    def of_unet(index: int) -> Callable[..., Tensor]:
        def draw(name: str, step: int, shape: Sequence[int]) -> Tensor:
            seeds = [hash((index, name, step, number)) % 2**31 for number in numbers]
            return torch.stack([torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])

        return draw

    return of_unet


EMBEDDINGS = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))


def test_the_condition_and_its_scale_matter_and_only_to_the_unet_that_has_one() -> None:
    model, noise = decoder(), noise_of(range(4))

    def drawn(embeddings: Tensor, scale: float, **how: Any) -> Tensor:
        return model.sample(
            {"image_embed": embeddings}, noise, Sampling(sample_timesteps=[3], cond_scale=[scale]), batch=4, **how
        )

    assert not torch.equal(drawn(EMBEDDINGS, 1.0), drawn(EMBEDDINGS.flip(0), 1.0))
    assert not torch.equal(drawn(EMBEDDINGS, 1.0), drawn(EMBEDDINGS, 3.0))
    assert torch.equal(drawn(EMBEDDINGS, 0.0), drawn(EMBEDDINGS.flip(0), 0.0)), "guidance 0 sees no condition"
    images = torch.rand(4, 3, 8, 8)
    second = [drawn(EMBEDDINGS, scale, start_at=2, images=images) for scale in (1.0, 3.0)]
    assert torch.equal(*second)


def test_a_cascade_in_two_calls_is_the_cascade_in_one() -> None:
    model, noise, sampling = decoder(), noise_of(range(4)), Sampling(sample_timesteps=[3, 4])
    both: list[torch.Tensor] = []
    whole = model.sample({"image_embed": EMBEDDINGS}, noise, sampling, batch=4, on_pictures=both.append)
    small = model.sample({"image_embed": EMBEDDINGS}, noise, sampling, batch=4, stop_at=1)
    assert small.shape == (4, 3, 8, 8)
    assert [torch.equal(ours, other) for ours, other in zip(both, (small, whole), strict=True)] == [True, True]
    parts = model.sample({}, noise, sampling, batch=4, start_at=2, images=small)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)  # in [0, 1] and back to [-1, 1] rounds once


def test_a_guide_that_does_not_fit_is_refused_and_one_of_another_objective_or_without_a_condition_does() -> None:
    model = decoder()

    def drawn(guide: Decoder) -> Tensor:
        sampling = Sampling(sample_timesteps=[2], cond_scale=[2.0])
        return model.sample({"image_embed": EMBEDDINGS}, noise_of(range(4)), sampling, batch=4, guide=guide)

    for wrong, said in (
        ({"image_sizes": [8]}, "1 Unets and the decoder 2"), ({"image_sizes": [8, 32]}, "32 pixels"),
        ({"timesteps": 40}, "40 noise levels"),
        ({"noise_schedule": ["linear"]}, "Unet 1 of the guide has another"),
        ({"noise_schedule": ["cosine", "sigmoid"]}, "Unet 2 of the guide has another"),
        ({"image_embed_dim": 7}, "image_embed of width 7"),
        ({"lowres_condition": "noise"}, "the decoder adds no noise to it"),
    ):  # fmt: skip
        assert said in refused(drawn, decoder(**wrong))
    plain = drawn(model)
    alone = Sampling(sample_timesteps=[2])
    assert torch.equal(plain, model.sample({"image_embed": EMBEDDINGS}, noise_of(range(4)), alone, batch=4)), "itself"
    for other in ({"image_embed_dim": None, "condition_on": ()}, {"objective": ["x_start"]}, {"seed": 1}):
        assert (drawn(decoder(**other)) - plain).abs().max() > 1e-3


def test_the_noise_of_the_condition_goes_up_to_the_last_level() -> None:
    model = decoder(lowres_condition="noise", lowres_noise_level=1.0)
    levels = []
    model.unet(1).register_forward_pre_hook(
        lambda _, inputs, given: levels.append(given.get("lowres_time")), with_kwargs=True
    )
    images = torch.rand(2, 3, 8, 8)
    drawn = model.sample({}, noise_of(range(2)), Sampling(sample_timesteps=[2]), batch=2, start_at=2, images=images)
    assert {tuple(level.tolist()) for level in levels if level is not None} == {(999, 999)} and drawn.isfinite().all()


def test_the_condition_is_made_smaller_then_blurred_then_enlarged_then_cropped() -> None:
    """As the public package does it by default: one bright pixel of the small picture spreads over its neighbours."""
    images = torch.zeros(2, 3, 16, 16, dtype=torch.uint8)
    images[:, :, 6:8, 6:8] = 255  # one pixel of 8 x 8
    batch, model = {"images": images, "image_embed": EMBEDDINGS[:2]}, decoder()
    _, given = model.training_pictures(batch, 1, torch.tensor([0.0, 0.6]))
    small = F.interpolate(images.float() / 127.5 - 1, size=(8, 8), mode="bilinear", antialias=True)
    blurred = torch.stack([small[0], gaussian_blur(small[1], [3, 3], [0.6, 0.6])])
    expected = F.interpolate(blurred, size=(16, 16), mode="bilinear", antialias=True)
    torch.testing.assert_close(given["lowres_image"], expected)
    assert torch.equal(blur(torch.ones(1, 3, 1, 1), torch.tensor([0.6])), torch.ones(1, 3, 1, 1)), "has no neighbour"
    places = torch.tensor([[0.5, 0.2], [0.9, 0.9]])
    large, crops = model.training_pictures(batch, 1, torch.tensor([0.0, 0.6]), places=places, crop=6)
    assert torch.equal(crops["lowres_image"], crop_images(given["lowres_image"], places, 6))
    assert torch.equal(large, crop_images(images.float() / 127.5 - 1, places, 6))


def test_a_pixel_has_the_same_coordinates_in_a_crop_as_in_the_whole_picture() -> None:
    model = decoder(switches=[(), ("coordinates", "plain_init_conv")]).train()
    seen: list[Tensor] = []
    model.unet(1).init_conv.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][:, 3:5]))
    batch = {"images": torch.zeros(2, 3, 16, 16, dtype=torch.uint8), "image_embed": EMBEDDINGS[:2]}
    for crop, places in ((0, None), (4, torch.tensor([[0.0, 0.0], [0.999, 0.4]]))):
        pictures, given = model.training_pictures(batch, 1, places=places, crop=crop)
        model.unet(1)(pictures, torch.zeros(2), **given)
    whole, crops = seen
    expected = torch.stack([whole[0, :, :4, :4], whole[1, :, 12:, 5:9]])  # floor(0.999 x 13), floor(0.4 x 13)
    assert torch.equal(crops, expected) and whole.amin() == -1 and whole.amax() == 1


def drawn_by(start_at: int, images: Tensor | None = None, conditions: dict[str, Tensor] | None = None) -> Tensor:
    return decoder().sample(conditions or {}, noise_of([0]), batch=1, start_at=start_at, images=images)


@pytest.mark.parametrize(("build", "given", "said"), [
    (decoder, {"image_sizes": [16, 8]}, "16 and 8"), (decoder, {"image_sizes": [9, 16]}, "use 8 or 10"),
    (decoder, {"lowres_condition": "fog"}, "'fog'"), (decoder, {"dim": [8, 8, 8]}, "dim has 3 values"),
    (decoder, {"lowres_noise_level": 1.5}, "lowres_noise_level 1.5"), (DecoderConfig, {"image_sizes": []}, "Unet"),
    (drawn_by, {"start_at": 3}, "Unets 3 to 2"), (drawn_by, {"start_at": 2}, "images of Unet 1"),
    (drawn_by, {"start_at": 2, "images": torch.ones(1, 3, 8, 8) * 2}, "scale"),
    (drawn_by, {"start_at": 1, "conditions": {"image_embed": EMBEDDINGS}}, "4 conditions or images for 1"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(build: Callable[..., Any], given: dict[str, Any], said: str) -> None:
    assert said in refused(build, **given)
