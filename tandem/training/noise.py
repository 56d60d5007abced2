"""Noise that is a function of (seed, stream, step, position in the global batch)."""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.devices import to_device
from tandem.hashing import GOLDEN_GAMMA, MASK64, mix64

Device = torch.device | str

# In the place of an exact 0, whose logarithm is infinite: half the distance between two uniform numbers.
_SMALLEST_UNIFORM = 2.0**-25


def splitmix64(word: int) -> int:
    """The output of SplitMix64 that follows the state `word`, in [0, 2^64): a bijection."""
    return int(mix64((word + GOLDEN_GAMMA) & MASK64))


class Noise:
    """Random tensors that do not depend on rank, batch composition or the order of calls.

    Every sample has its own Philox generator (Salmon et al. 2011) with a 64-bit key: on the CPU NumPy's, because
    torch's CPU generator uses only 32 bits of its seed; on other devices torch's. So values differ between the CPU and
    a GPU, and may differ between kinds of GPU.

    Args:
        seed: Seed of the run.
        stream: Name of the noise, such as "gumbel"; streams of different names are independent.
    """

    def __init__(self, seed: int, stream: str) -> None:
        name = int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=8).digest(), "little")
        self._key = splitmix64(splitmix64(seed & MASK64) ^ name)

    def seed_of(self, step: int, position: int) -> int:
        """64-bit seed of one sample's noise: SplitMix64 over seed, stream, step and position in turn."""
        return splitmix64(splitmix64(self._key ^ step) ^ position)

    def gumbel(self, step: int, positions: Sequence[int], shape: Sequence[int], device: Device = "cpu") -> Tensor:
        """Standard Gumbel noise (b, *shape), float32; finite, within [-2.9, 17.4].

        -log E, with E = -log(1 - u) standard exponential for u uniform in [0, 1).

        Args:
            step: Completed updates.
            positions: Positions of the b samples in the global batch.
            shape: Shape of one sample's noise.
        """
        noise = self.uniform(step, positions, shape, device)
        return noise.clamp_min_(_SMALLEST_UNIFORM).neg_().log1p_().neg_().log_().neg_()

    def normal(self, step: int, positions: Sequence[int], shape: Sequence[int], device: Device = "cpu") -> Tensor:
        """Standard normal noise (b, *shape), float32. Arguments as for `gumbel`."""
        return self._draw("normal", step, positions, shape, device)

    def uniform(self, step: int, positions: Sequence[int], shape: Sequence[int], device: Device = "cpu") -> Tensor:
        """float32 noise (b, *shape), uniform in [0, 1). Arguments as for `gumbel`."""
        return self._draw("uniform", step, positions, shape, device)

    def keys(self, step: int, positions: Sequence[int], device: Device = "cpu") -> Tensor:
        """Keys of the samples for noise that a model computes itself: int64 (b, 2), uniform in [0, 2^32), equal on
        every device. Arguments as for `gumbel`."""
        seeds = [self.seed_of(step, position) for position in positions]
        words = torch.tensor([(seed >> 32, seed & 0xFFFFFFFF) for seed in seeds], dtype=torch.int64)
        return to_device(words.view(len(seeds), 2), device)

    def _draw(
        self, distribution: str, step: int, positions: Sequence[int], shape: Sequence[int], device: Device
    ) -> Tensor:
        rows = torch.empty(len(positions), math.prod(shape), device=device)
        seeds = [self.seed_of(step, position) for position in positions]
        if rows.device.type == "cpu":
            # One generator with a new key for each row: a new generator would take ten times as long, because NumPy
            # first reads a random seed from the system.
            philox = np.random.Philox(key=0)
            state = philox.state
            generator = np.random.Generator(philox)
            fill = generator.random if distribution == "uniform" else generator.standard_normal
            for row, seed in zip(rows.numpy(), seeds, strict=True):
                state["state"]["key"][0] = seed
                philox.state = state
                fill(out=row, dtype=np.float32)
        else:
            torch_generator = torch.Generator(rows.device)
            for row, seed in zip(rows, seeds, strict=True):
                fill = row.uniform_ if distribution == "uniform" else row.normal_
                fill(generator=torch_generator.manual_seed(seed))
        return rows.view(len(positions), *shape)
