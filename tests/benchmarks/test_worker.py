"""The benchmark's processes really measure the scripts and their references: a few updates of small models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.jobs import ONE_PROCESS, TORCHRUN, Launcher, measure
from benchmarks.training import WORKLOADS
from tests.scripts import VAE, words

FLAGS = [*words(VAE.tiny), "--image_folder", "demo:shapes:32", "--batch_size", "2"]


@pytest.mark.parametrize("script", ["train_mulan", pytest.param("train_tokenizer", marks=pytest.mark.long)])
def test_a_script_and_its_reference_take_turns(script: str) -> None:
    """tests/test_references.py steps all references."""
    check(ONE_PROCESS, script, WORKLOADS[script][0].split(), ["script", "reference"])


def check(launcher: Launcher, script: str, flags: Sequence[str], sides: list[str]) -> None:
    measured = measure(launcher, sides, flags, script=script, threads=1, rounds=2, turns=1, updates=1)
    assert list(measured) == sides
    for of_side in measured.values():
        assert len(of_side["samples_per_second"]) == 2
        assert of_side["memory_bytes"]["updates"] >= of_side["memory_bytes"]["before"]


def test_processes_in_distributed_data_parallel_take_turns_with_the_script() -> None:
    check(replace(TORCHRUN, processes=2), "train_vae", FLAGS, ["script", "ddp", "ddp-same-noise"])
