"""Noise depends on (seed, stream, step, position), and is numpy's of them."""

import math

import numpy as np
import pytest
import torch

from tandem.hashing import mix64
from tandem.training.noise import Noise, splitmix64

SHAPE = (16, 4)


def test_splitmix64_of_noise_and_of_orders_gives_the_published_sequence():
    # First outputs of the reference implementation (Vigna, prng.di.unimi.it/splitmix64.c) for seed 1234567.
    state, outputs = 1234567, []
    for _ in range(5):
        outputs.append(splitmix64(state))
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        assert mix64(state) == outputs[-1]  # the step of the state stands in its caller
    assert outputs == [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip


def test_seeds_are_pinned_so_that_a_checkpoint_meets_the_same_noise_later():
    noise = Noise(0, "gumbel")
    seeds = [3064839549573996803, 997025466602458953, 8760051382816528245]
    assert [noise.seed_of(0, 0), noise.seed_of(1, 0), noise.seed_of(0, 1)] == seeds


@pytest.mark.parametrize("law", ["gumbel", "normal", "uniform"])
def test_a_samples_noise_does_not_depend_on_its_batch_or_on_earlier_calls(law):
    draw = getattr(Noise(3, "a"), law)
    whole = draw(7, range(8), SHAPE)
    assert whole.shape == (8, *SHAPE) and whole.dtype == torch.float32
    later = getattr(Noise(3, "a"), law)
    later(6, [1, 2], (5,))
    assert torch.equal(later(7, [5, 2], SHAPE), whole[[5, 2]])
    ranks = [later(7, range(rank * 2, rank * 2 + 2), SHAPE) for rank in (3, 0, 2, 1)]
    assert torch.equal(torch.cat([ranks[1], ranks[3], ranks[2], ranks[0]]), whole)


def test_noise_on_the_cpu_is_that_of_a_new_generator_of_numpy_for_each_sample():
    """An odd number of them: half of the last random word is left over, and the next sample must not get it."""
    noise, positions = Noise(5, "of a test"), (0, 7, 2**40)
    new = [np.random.Generator(np.random.Philox(key=noise.seed_of(3, position))) for position in positions]
    expected = np.stack([generator.random(5, dtype=np.float32) for generator in new])
    assert np.array_equal(noise.uniform(3, positions, (5,)).numpy(), expected)
    new = [np.random.Generator(np.random.Philox(key=noise.seed_of(3, position))) for position in positions]
    expected = np.stack([generator.standard_normal(5, dtype=np.float32) for generator in new])
    assert np.array_equal(noise.normal(3, positions, (5,)).numpy(), expected)


def test_seed_stream_step_and_position_each_change_the_noise():
    reference = Noise(0, "a").normal(0, [0], (1000,))[0]
    different = [(1, "a", 0, 0), (2**32, "a", 0, 0), (0, "b", 0, 0), (0, "a", 1, 0), (0, "a", 0, 1)]
    others = [Noise(seed, stream).normal(step, [place], (1000,))[0] for seed, stream, step, place in different]
    correlations = torch.corrcoef(torch.stack([reference, *others])) - torch.eye(6)
    # The standard deviation of a correlation of 1000 independent pairs is 0.032; 15 pairs stay within 5 of them.
    assert correlations.abs().max() < 0.16


def test_gumbel_is_that_of_the_uniform_numbers_and_finite_at_both_ends(monkeypatch):
    """-log(-log(1 - u)), with 2^-25 in place of what rounds to nothing."""
    noise = Noise(0, "ends")
    uniform = torch.tensor([[0.0, 0.25, 0.5, 1 - 2**-24]])
    monkeypatch.setattr(noise, "uniform", lambda *_: uniform.clone())
    expected = [-math.log(-math.log1p(-u)) for u in (2**-25, 0.25, 0.5, 1 - 2**-24)]
    assert noise.gumbel(0, [0], (4,)).tolist()[0] == pytest.approx(expected)
