"""Measures of generated images against closed forms and torch-fidelity, and pooling over batches and processes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_fidelity.metric_isc import isc_features_to_metric
from torch_fidelity.metric_kid import kid_features_to_metric

from tests.processes import on_processes
from training.measures.fid import ReconstructionFID
from training.measures.generation import GenerationQuality, InceptionScore, KernelDistance, squared_mmd


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distance(real: Tensor, generated: Tensor, **options: int) -> dict[str, float]:
    measure = KernelDistance(real.shape[1], **options)
    measure.add(real, generated, range(len(real)))
    return measure.result()


def test_mmd_of_a_few_vectors_is_its_double_sum() -> None:
    x, y = some(3, 4), some(2, 4, seed=1)

    def kernel(a: Tensor, b: Tensor) -> float:
        return ((a @ b).item() / 4 + 1) ** 3

    within_x = sum(kernel(x[i], x[j]) for i in range(3) for j in range(3) if i != j) / 6
    between = sum(kernel(a, b) for a in x for b in y) / 6
    expected = within_x + kernel(y[0], y[1]) - 2 * between
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert squared_mmd(x, y).item() == pytest.approx(expected, rel=1e-5)


def test_kid_is_that_of_torch_fidelity() -> None:
    real, generated = some(80, 16).relu(), some(80, 16, seed=1).relu() * 1.1
    whole = distance(real, generated)
    options = {"kid_subsets": 1, "kid_subset_size": 80, "verbose": False}
    expected = kid_features_to_metric(real, generated, **options)
    assert whole == {"kid": pytest.approx(expected["kernel_inception_distance_mean"], rel=1e-4)}
    found = distance(real, generated, subsets=300, subset_size=30)
    expected = kid_features_to_metric(real, generated, **{**options, "kid_subsets": 300, "kid_subset_size": 30})
    # Subsets of 30 out of 80: other draws of the same distribution.
    spread = expected["kernel_inception_distance_std"]
    assert found["kid"] == pytest.approx(expected["kernel_inception_distance_mean"], abs=5 * spread / math.sqrt(150))
    assert found["kid_std"] == pytest.approx(spread, rel=0.2)
    assert found["kid"] == pytest.approx(whole["kid"], abs=5 * spread / math.sqrt(300))


def score(*logits: Tensor) -> float:
    measure = InceptionScore(logits[0].shape[1])
    for part in logits:
        measure.add(part)
    return measure.result()


def test_the_inception_score_is_that_of_torch_fidelity() -> None:
    logits = some(50, 12) * 3
    expected = isc_features_to_metric(logits, splits=1, shuffle=False)["inception_score_mean"]
    assert score(logits[:20], logits[20:21], logits[21:]) == pytest.approx(expected, rel=1e-9)


def test_the_inception_score_counts_the_classes_that_are_told_apart() -> None:
    sure = 1000 * torch.eye(5)
    assert score(sure) == pytest.approx(5) and score(sure[:2], sure[:2]) == pytest.approx(2)
    assert score(torch.zeros(4, 5)) == pytest.approx(1) == score(sure[[0, 0]])
    # Sure of one of two classes for half of the images, undecided between them for the others.
    logits = torch.tensor([[1000.0, 0.0], [0.0, 1000.0], [0.0, 0.0], [0.0, 0.0]])
    assert score(logits) == pytest.approx(math.sqrt(2))
    assert math.isnan(InceptionScore(3).result())


class Network:
    """Features of each image: means of its channels in two halves; logits are multiples of them."""

    dim, classes = 6, 6

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
    options = {"inception": Network(), "lpips": far, "cosines": ["clip_score"], "kid_subset_size": 10, **options}
    return GenerationQuality(**options)


@pytest.fixture(scope="module")
def whole() -> dict[str, float]:
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
    assert whole["kid"] == distance(network(real), network(generated), subset_size=10)["kid"]
    assert whole["inception_score"] == pytest.approx(score(20 * network(generated)))
    assert whole["lpips"] == pytest.approx(far(generated, real).mean().item())
    one, other = given["clip_score"]
    cosines = (one * other).sum(1) / one.norm(dim=1) / other.norm(dim=1)
    assert whole["clip_score"] == pytest.approx(cosines.mean().item(), abs=1e-6)


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
    assert found[0]["kid"] == whole["kid"], "the same subsets, to the bit"
    # Sums in another order; a Fréchet distance is a difference of much larger numbers.
    assert found[0] == {name: pytest.approx(value, rel=1e-6) for name, value in whole.items()}
    assert sorted(map(str, gathered)) == ["torch.float32"] * 3 + ["torch.int64"] * 3, "features and positions, once"
