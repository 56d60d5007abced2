"""The conditional Unet: the public package's numbers, conditions that are dropped, what exists, what it refuses."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tandem.models import Unet
from tandem.weights.formats.detection import FORMATS
from tests.models.helpers import UNET, some, some_unet_inputs
from tests.models.reference.unets import CASES, STRIDE, inputs_of, public_config, stored, weights_of


def unet(**changes: Any) -> Unet:
    """In eval mode, with an output that is not 0."""
    torch.manual_seed(0)
    model = Unet.from_dict({**UNET, **changes}).eval()
    nn.init.normal_(model.to_out.weight, std=0.3)
    return model


@pytest.mark.parametrize("case", CASES)
def test_public_weights_give_the_public_numbers(case: str, tmp_path: Path) -> None:
    """Through a file in the public layout. Sums in another order, as other instructions of a CPU add them, move the
    outputs, which reach 4 to 13, by up to 1.1e-5 as measured; 5e-5 leaves room for further CPUs."""
    reference, config = stored(case), public_config(case)
    public = {f"unets.0.{name}": weight for name, weight in weights_of(case, reference.shapes).items()}
    if CASES[case].is_second:
        public = {name.replace("unets.0.", "unets.1."): weight for name, weight in public.items()}
        first = weights_of("first", stored("one level").shapes)
        public |= {f"unets.0.{name}": weight for name, weight in first.items()}
    torch.save({"version": "1.15.6", "config": {"decoder": config}, "model": public}, tmp_path / "latest.pth")
    *_, model = FORMATS["dalle2"].load(tmp_path / "latest.pth").unets
    inputs, none = inputs_of(case), torch.zeros(2, dtype=torch.bool)
    with torch.no_grad():
        kept = model(**inputs)
        nulls = [
            model(**inputs, keep_image=none, keep_text=none),
            model(**{name: each for name, each in inputs.items() if name not in ("image_embed", "text_encodings")}),
        ]
    assert (kept - reference.kept).abs().max() < 5e-5
    for null in nulls:
        assert (null[:, :, ::STRIDE, ::STRIDE] - reference.null).abs().max() < 5e-5


def test_noise_levels_are_told_apart_in_bf16() -> None:
    """In bf16, 768, 769 and 770 are one number."""
    model = unet().bfloat16()
    inputs = {name: tensor[:1] for name, tensor in some_unet_inputs().items()}
    for kind in (torch.int64, torch.float32):
        outputs = [model(**{**inputs, "time": torch.tensor([level], dtype=kind)}) for level in (768, 769, 770)]
        assert all(not torch.equal(*pair) for pair in pairwise(outputs))


def test_a_small_low_resolution_image_is_enlarged_by_repeating_its_pixels() -> None:
    model, inputs = unet(lowres_cond=True, lowres_noise_cond=True), some_unet_inputs(2)
    small, level = some(2, 3, 4, 4, seed=5), torch.tensor([7, 200])
    with torch.no_grad():
        expected = model(
            **inputs, lowres_image=small.repeat_interleave(2, -1).repeat_interleave(2, -2), lowres_time=level
        )
        assert torch.equal(model(**inputs, lowres_image=small, lowres_time=level), expected)
        assert not torch.equal(model(**inputs, lowres_image=small, lowres_time=level + 1), expected)


def test_pixel_shuffle_starts_as_the_nearest_pixel() -> None:
    """Equal but for rounding: some CPUs add the four equal sums, in other lanes of a register, in other orders."""
    model = unet(dim_mults=[1, 2, 2], num_resnet_blocks=[1], memory_efficient=True)
    for up in model.ups:
        out = up.after(some(1, up.after.net[0].in_channels, 4, 4))
        nearest = out[:, :, ::2, ::2].repeat_interleave(2, -1).repeat_interleave(2, -2)
        torch.testing.assert_close(nearest, out, rtol=1e-5, atol=1e-6)


def test_the_embedding_is_scaled_and_the_output_starts_as_0() -> None:
    inputs = some_unet_inputs(2)
    model, plain = unet(image_embed_scale=4.0), unet()
    with torch.no_grad():
        out = plain(**{**inputs, "image_embed": 4 * inputs["image_embed"]})
        assert torch.equal(model(**inputs), out) and not torch.equal(plain(**inputs), out)
    assert not Unet.from_dict(UNET)(**inputs).any()
