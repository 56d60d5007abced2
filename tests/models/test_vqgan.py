"""The VQGAN: its range of images, and a frozen encoder. What is true of other autoencoders too is in
test_every_model.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tandem.models import VQGAN
from tests.models.helpers import VQGAN as SIZES
from tests.models.helpers import kept_bytes, some_images


def tiny(quantizer: str = "lfq", **changes: Any) -> VQGAN:
    torch.manual_seed(0)
    return VQGAN.from_dict({**SIZES, "quantizer": quantizer, **changes})


def test_a_model_of_other_input_starts_from_weights_that_normalize_it_but_for_the_padding() -> None:
    normalized, plain = tiny().encoder[0], tiny(normalize_input=False).encoder[0]
    images = some_images()
    seen, expected = plain(images), normalized(2 * images - 1)
    torch.testing.assert_close(seen[..., 2:-2, 2:-2], expected[..., 2:-2, 2:-2])  # the kernel is 5 x 5
    assert not torch.allclose(seen, expected)
    features = torch.rand(2, 8, 4, 4)
    torch.testing.assert_close(tiny(normalize_input=False).last_layer(features), (tiny().last_layer(features) + 1) / 2)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_frozen_encoder_keeps_nothing_for_a_backward_pass(recompute: bool) -> None:
    found = []
    for is_frozen in (False, True):
        model = tiny("vq", gradient_checkpointing=recompute).train()
        model(some_images())  # the codebook starts from it
        if is_frozen:
            model.freeze_encoder()
        z = model.encoder(some_images())
        out, kept = kept_bytes(lambda model=model: model(some_images()))
        assert z.requires_grad != is_frozen and out.losses["commitment"].requires_grad != is_frozen
        assert model.quantizer.training != is_frozen and model.encoder.training
        found.append(kept)
    assert found[1] < 0.8 * found[0]  # recomputed layers keep their inputs alone, so that less is saved: 0.72
