"""With --batch_parts, every backend, ZeRO stage and number of processes gives the bits of one process."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import contracts
import pytest
import torch
from jobs import Jobs, Task
from launching import CHOSEN, CHOSEN_ON_TWO, ONE_PROCESS, ZERO_STAGES, Launcher
from portability import END, SAVED_AT
from safetensors.torch import load_file

LAUNCHERS = [Launcher("torchrun", 4), Launcher("horovodrun", 2), *CHOSEN, *ZERO_STAGES]
# (writer of the checkpoint, reader that continues from it): they differ in backend and number of processes.
RESUMED = [(LAUNCHERS[0], ONE_PROCESS), (LAUNCHERS[-1], ONE_PROCESS)]
RESUMED += [(LAUNCHERS[0], launcher) for launcher in [*ZERO_STAGES[1::2], *CHOSEN_ON_TWO]]
RESUMED += [(launcher, ONE_PROCESS) for launcher in CHOSEN]
# The model keeps its ReLUs. The size of hardly any tensor is a multiple of 2 or 4, and hardly any tensor begins at an
# even offset in ZeRO's flat weights.
FLAGS = ["--image_size", "8", "--num_layers", "1", "--num_resnet_blocks", "0", "--num_tokens", "35", "--emb_dim", "7",
         "--hidden_dim", "11", *contracts.FLAGS, "--learning_rate", "3e-3", "--max_grad_norm", "0.05",
         "--ema_decay", "0.9", "--batch_parts", "4"]  # fmt: skip


def tasks(launcher: Launcher, kind: str, jobs: Jobs) -> Iterator[Task]:
    if kind != "bits" or launcher not in [ONE_PROCESS, *LAUNCHERS]:
        return
    flags = FLAGS
    if launcher.name == "deepspeed":  # without this, ZeRO 3 would not shard so small a model
        config = jobs.folder / f"parts-{launcher}.json"
        config.write_text(json.dumps({"zero_optimization": {"stage3_param_persistence_threshold": 0}}))
        flags = [*flags, "--deepspeed_config", str(config)]
    yield Task("parts", "portability.write", flags)
    yield Task("parts-contracts", "contracts.measure", flags)
    writers = {str(writer): str(jobs.output(writer, kind, "parts")) for writer, who in RESUMED if who == launcher}
    yield Task("parts-resumed", "portability.read", flags, {"writers": writers})


def measured(jobs: Jobs, launcher: Launcher) -> dict[str, Any]:
    return dict(json.loads((jobs.output(launcher, "bits", "parts-contracts") / "result.json").read_text()))


def uninterrupted(jobs: Jobs, launcher: Launcher) -> dict[str, torch.Tensor]:
    return load_file(jobs.output(launcher, "bits", "parts") / "uninterrupted.safetensors")


def differing(ours: Any, reference: Any, where: str = "") -> list[str]:
    """Places where two results differ in a bit. Logged means are fp64 sums, whose last bits may differ."""
    if isinstance(reference, dict):
        if ours.keys() != reference.keys():
            return [f"{where}: {sorted(ours)} instead of {sorted(reference)}"]
        return [d for key in reference for d in differing(ours[key], reference[key], f"{where}/{key}")]
    if isinstance(reference, list):
        if len(ours) != len(reference):
            return [f"{where}: {len(ours)} values instead of {len(reference)}"]
        return [d for a, b in zip(ours, reference, strict=True) for d in differing(a, b, where)]
    if isinstance(reference, float):
        if math.isnan(ours) and math.isnan(reference):
            return []
        free = 1e-14 if where.endswith("/losses") else 0.0
        return [] if abs(ours - reference) <= free * abs(reference) else [f"{where}: {ours} instead of {reference}"]
    return [] if ours == reference else [f"{where}: {ours} instead of {reference}"]


@pytest.mark.parametrize("contract", ["plain", "small_buckets", "skipped", "by_items", "gan", "several_backwards"])
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=str)
def test_losses_norms_weights_and_moments_have_the_bits_of_one_process(
    contract: str, launcher: Launcher, jobs: Jobs
) -> None:
    ours, reference = (measured(jobs, who)[contract] for who in (launcher, ONE_PROCESS))
    if contract == "several_backwards" and launcher.zero_stage == 3:
        # ZeRO 3 keeps no graph for a second backward pass. It must add the two losses instead, and so rounds
        # differently from one process.
        assert "ZeRO 3" in ours["message"]
        return
    if contract == "gan":
        for result in (ours, reference):
            del result["generator"]["losses"]  # one per part of each process
    assert differing(ours, reference) == []


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=str)
def test_a_loss_over_everybodys_samples_is_that_of_one_process_but_for_rounding(launcher: Launcher, jobs: Jobs) -> None:
    """Such a loss is not a sum over parts of the batch, so its bits may differ."""
    ours, reference = (measured(jobs, who)["contrastive"] for who in (launcher, ONE_PROCESS))
    for name, weight in reference["weights"].items():
        torch.testing.assert_close(torch.tensor(ours["weights"][name]), torch.tensor(weight), rtol=0, atol=5e-6)


def test_updates_were_clipped_and_skipped(jobs: Jobs) -> None:
    reference = measured(jobs, ONE_PROCESS)
    assert max(reference["plain"]["grad_norms"]) > 0.05
    assert reference["skipped"]["skipped"] == [False, False, False, True, False, False]


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=str)
def test_all_updates_of_the_vae_have_the_bits_of_one_process(launcher: Launcher, jobs: Jobs) -> None:
    ours, reference = (uninterrupted(jobs, who) for who in (launcher, ONE_PROCESS))
    assert len(reference["losses"]) == END
    assert {name.split("/")[0] for name in reference} == {"losses", "grad_norms", "saved", "end"}
    assert [name for name in reference if not torch.equal(ours[name], reference[name])] == []


@pytest.mark.parametrize(("writer", "reader"), RESUMED, ids=str)
def test_a_run_resumed_elsewhere_has_the_bits_of_one_that_never_stopped(
    writer: Launcher, reader: Launcher, jobs: Jobs
) -> None:
    ours = load_file(jobs.output(reader, "bits", "parts-resumed") / f"{writer}.safetensors")
    reference = uninterrupted(jobs, ONE_PROCESS)
    assert torch.equal(ours["losses"], reference["losses"][SAVED_AT:])
    assert [name for name in reference if "/" in name and not torch.equal(ours[name], reference[name])] == []
