"""What the numbers are compared with is what it claims to be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import CenterCrop, Compose, PILToTensor, Resize

from benchmarks.loading import plain_decode
from benchmarks.references import DDP, HOROVOD, REFERENCE, REFERENCES
from tests.scripts import VAE

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (301, 333), (128, 143), (143, 128), (128, 128), (100, 90)])
def test_plain_decoding_is_torchvisions(size: tuple[int, int], tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    path = tmp_path / "image.jpg"
    Image.fromarray(pixels).save(path)
    transform = Compose([Resize(128), CenterCrop(128), PILToTensor()])
    expected = transform(Image.open(path).convert("RGB"))
    assert torch.equal(plain_decode(str(path), 128), expected)


@contextlib.contextmanager
def connected(side: str) -> Iterator[None]:
    """This process alone, as the library that sums gradients asks for it."""
    if side == DDP:
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
        yield
        torch.distributed.destroy_process_group()
    elif side == HOROVOD:
        import horovod.torch as hvd

        hvd.init()
        yield
        hvd.shutdown()
    else:
        yield


@pytest.mark.parametrize("side", [DDP, HOROVOD])
def test_what_sums_gradients_leaves_the_updates_of_a_reference_as_they_are(side: str, tmp_path: Path) -> None:
    args = VAE.parsed(*VAE.flags(tmp_path))
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def after_two_updates(side: str) -> Tensor:
        made: list[nn.Module] = []

        def models(*of: Any) -> list[nn.Module]:
            made.extend(REFERENCES["train_vae"].models(*of))
            return made

        torch.manual_seed(0)
        with connected(side):
            updates = replace(REFERENCES["train_vae"], models=models).updates(args, [{"images": images}], CPU, side)
            next(updates), next(updates)
        return torch.cat([parameter.detach().flatten() for parameter in made[0].parameters()])

    torch.testing.assert_close(after_two_updates(side), after_two_updates(REFERENCE), rtol=0, atol=1e-6)
