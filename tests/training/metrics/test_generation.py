"""Measures of generated images against closed forms and torch-fidelity, and pooling over batches and processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.training.metrics import generation
from tandem.training.metrics.fid import ReconstructionFID
from tandem.training.metrics.generation import GenerationQuality
from tests.processes import on_processes


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def squared_mmd(x: Tensor, y: Tensor) -> float:
    """Binkowski et al. 2018: the unbiased estimate of Gretton et al. 2012, equation 3."""

    def mean(a: Tensor, b: Tensor, *, is_within: bool) -> Tensor:
        kernel = (a @ b.T / a.shape[1] + 1) ** 3
        return kernel[~torch.eye(len(a), dtype=torch.bool)].mean() if is_within else kernel.mean()

    return (mean(x, x, is_within=True) + mean(y, y, is_within=True) - 2 * mean(x, y, is_within=False)).item()


def score(logits: Tensor) -> float:
    """Salimans et al. 2016: exp of the mean divergence of p(y | x) from p(y)."""
    p = logits.softmax(1)
    return (p * (p / p.mean(0)).log()).sum(1).mean().exp().item()


class Network:
    """Features of each image: means of its channels in two halves; logits are multiples of them."""

    dim = 6

    def __call__(self, images: Tensor) -> Tensor:
        assert images.min() >= 0 and images.max() <= 1
        return torch.cat([half.mean((2, 3)) for half in images.chunk(2, dim=2)], dim=1)

    def logits(self, features: Tensor) -> Tensor:
        return 20 * features


def far(generated: Tensor, real: Tensor) -> Tensor:
    return (generated - real).abs().amax((1, 2, 3)) + generated.amax((1, 2, 3))


def batch(rows: slice | list[int]) -> dict[str, Any]:
    real, generated = (torch.rand(40, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    return {
        "real": real[rows], "generated": (generated * 1.4 - 0.1)[rows], "positions": list(range(40))[rows],
        "clip_score": (some(40, 5, seed=2)[rows], 7 * some(40, 5, seed=3)[rows]),
    }  # fmt: skip


def quality(**options: Any) -> GenerationQuality:
    return GenerationQuality(**{"inception": Network(), "lpips": far, "cosines": ["clip_score"], **options})


@pytest.fixture(autouse=True, scope="module")
def subsets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "_SUBSET_SIZE", 10)
        yield


@pytest.fixture(scope="module")
def whole(subsets: None) -> dict[str, float]:
    measure = quality()
    measure.add(**batch(slice(None)))
    return measure.result()


def test_every_measure_is_that_of_its_definition(whole: dict[str, float]) -> None:
    given = batch(slice(None))
    real, generated = given["real"], given["generated"].clamp(0, 1)
    assert list(whole) == ["fid", "kid", "kid_std", "inception_score", "lpips", "clip_score"]
    fid = ReconstructionFID(Network(), dim=6)
    fid.add(real, generated)
    assert whole["fid"] == pytest.approx(fid.result(), rel=1e-6)
    network = Network()
    features = network(real).double(), network(generated).double()
    assert whole["kid"] == pytest.approx(squared_mmd(*features), abs=5 * whole["kid_std"] / 10)  # of 100 subsets
    assert whole["inception_score"] == pytest.approx(score(20 * features[1]), rel=1e-6)
    assert whole["lpips"] == pytest.approx(far(generated, real).mean().item())
    one, other = given["clip_score"]
    cosines = (one * other).sum(1) / one.norm(dim=1) / other.norm(dim=1)
    assert whole["clip_score"] == pytest.approx(cosines.mean().item(), abs=1e-6)


def test_few_images_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_SUBSET_SIZE", 40)
    measure, given, network = quality(), batch(slice(None)), Network()
    measure.add(**given)
    found = measure.result()
    features = network(given["real"]).double(), network(given["generated"].clamp(0, 1)).double()
    assert found["kid"] == pytest.approx(squared_mmd(*features), abs=1e-6) and "kid_std" not in found
    with pytest.raises(ValueError, match="a Fréchet distance of 0 images"):
        quality().result()


def test_batches_of_three_processes_of_which_one_has_none_give_the_values_of_one(whole: dict[str, float]) -> None:
    shares = [[slice(30, 40), slice(0, 1)], [], [slice(12, 30), slice(1, 12)]]
    gathered = []

    def work(here: Any) -> dict[str, float]:
        measure = quality()
        for rows in shares[here.rank]:
            measure.add(**batch(rows))

        def gather(tensor: Tensor) -> Tensor:
            gathered.append(tensor.dtype)
            return here.gather(tensor)

        return measure.result(here.sum, gather)

    found = on_processes(3, work)
    assert found[0] == found[1] == found[2]
    means = {name: pytest.approx(whole[name]) for name in ("lpips", "clip_score")}  # sums in another order
    assert found[0] == {**whole, **means}, "the same distributions, to the bit"
    assert sorted(map(str, gathered)) == ["torch.float32"] * 3 + ["torch.int64"] * 3, "features and positions, once"
