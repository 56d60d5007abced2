"""Autoencoders of diffusers and ours with the same random weights: folders that either writes, and their outputs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.weights.formats.detection import FORMATS
from tandem.weights.load import load_model
from tests.models.helpers import assert_same_bits
from tests.models.reference.autoencoders import CASES, DIFFUSERS, images
from tests.models.reference.unets import weights_of

DIFFUSERS_CASES = [name for name, case in CASES.items() if case.package in DIFFUSERS]


def random_model(case: str) -> Any:
    """A model of diffusers with random weights, norms among them."""
    model = getattr(importlib.import_module("diffusers"), CASES[case].package)(**CASES[case].arguments).eval()
    shapes = {name: list(weight.shape) for name, weight in model.state_dict().items()}
    model.load_state_dict(weights_of(f"{case} again", shapes))
    return model


def assert_compute_the_same(ours: Any, theirs: Any, case: str) -> None:
    """The latents or the codes of images, and the reconstructions from them. fp32 rounds sums of some hundred terms."""
    pixels = images(case)
    with torch.no_grad():
        if ours.num_codes:
            latents = theirs.encode(2 * pixels - 1).latents
            codes = theirs.quantize(latents)[2][2].view(len(pixels), *latents.shape[2:])
            assert len(codes.unique()) > 3
            torch.testing.assert_close(ours.encode(pixels), codes, rtol=0, atol=0)
            expected, encoded = theirs.decode(latents).sample, codes
        else:
            encoded = theirs.encode(2 * pixels - 1).latent_dist.mean
            torch.testing.assert_close(ours.encode(pixels), encoded, rtol=1e-5, atol=1e-5)
            expected = theirs.decode(encoded).sample
        for reconstruction in (ours.decode(encoded), ours(pixels).reconstruction):
            torch.testing.assert_close(reconstruction, expected / 2 + 0.5, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", DIFFUSERS_CASES)
def test_a_model_of_diffusers_is_read_and_written_back_and_computes_the_same(case: str, tmp_path: Path) -> None:
    theirs = random_model(case)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    assert ours.config.items() >= {"body": "taming", **CASES[case].ours}.items() and not ours.training
    assert_compute_the_same(ours, theirs, case)
    note = FORMATS["diffusers"].save(ours, tmp_path / "back")
    back = type(theirs).from_pretrained(tmp_path / "back")
    assert note == f"load it by {CASES[case].package}.from_pretrained"
    ours_written, expected = ({k: v for k, v in each.config.items() if k[0] != "_"} for each in (back, theirs))
    assert ours_written == expected
    assert_same_bits(back, theirs)
    assert_compute_the_same(ours, back.eval(), case)
