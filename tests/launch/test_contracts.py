"""Every backend and ZeRO stage against one process, on toy models: the contracts of Backend and Engine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import contracts
import pytest
from jobs import Jobs, Task

from benchmarks.launching import CHOSEN_ON_TWO, ONE_PROCESS, ZERO_STAGES, Launcher

LAUNCHERS = [
    Launcher("torchrun", 2),
    Launcher("horovodrun", 3),
    *ZERO_STAGES,
    Launcher("deepspeed", 3, zero_stage=3),
    *CHOSEN_ON_TWO,
]
# Sums of a few dozen fp32 numbers in another order differ by some 1e-7 of the largest; Adam's first updates divide a
# gradient by its own size, which lets a tiny one change more: 5e-6 of the largest entry of a tensor after 6 updates.
TOLERANCE = 5e-6


def accumulation_of(launcher: Launcher) -> int:
    return 1 if launcher.processes == 2 else 2


def tasks(launcher: Launcher, kind: str, jobs: Jobs) -> Iterator[Task]:
    if kind == "rounded" and launcher in [ONE_PROCESS, *LAUNCHERS]:
        for steps in [1, 2] if launcher == ONE_PROCESS else [accumulation_of(launcher)]:
            flags = [*contracts.FLAGS, "--max_grad_norm", "0.1", "--grad_accum_steps", str(steps)]
            yield Task(f"contracts-{steps}", "contracts.measure", flags)


def measured(jobs: Jobs, launcher: Launcher, accumulation: int) -> dict[str, Any]:
    folder = jobs.output(launcher, "rounded", f"contracts-{accumulation}")
    return dict(json.loads((folder / "result.json").read_text()))


@pytest.fixture(scope="session", params=LAUNCHERS, ids=str)
def launcher(request: pytest.FixtureRequest) -> Launcher:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def ours(launcher: Launcher, jobs: Jobs) -> dict[str, Any]:
    return measured(jobs, launcher, accumulation_of(launcher))


@pytest.fixture(scope="session")
def reference(launcher: Launcher, jobs: Jobs) -> dict[str, Any]:
    return measured(jobs, ONE_PROCESS, accumulation_of(launcher))


def assert_close(ours: Any, reference: Any, where: str = "") -> None:
    """Assert equal structure, and numbers that differ by at most TOLERANCE times the largest number of their list."""
    if isinstance(reference, dict):
        assert ours.keys() == reference.keys(), where
        for key in reference:
            assert_close(ours[key], reference[key], f"{where}/{key}")
    elif isinstance(reference, list) and reference and isinstance(reference[0], float):
        assert len(ours) == len(reference), where
        scale = max((abs(value) for value in reference if not math.isnan(value)), default=0.0)
        for a, b in zip(ours, reference, strict=True):
            same = math.isnan(a) and math.isnan(b)
            assert same or abs(a - b) <= TOLERANCE * scale, f"{where}: {a} instead of {b}, scale {scale}"
    else:
        assert ours == reference, where


SUMS = ["plain", "small_buckets", "by_items", "idle_parts", "reloaded", "skipped"]


@pytest.mark.parametrize("contract", SUMS)
def test_losses_norms_weights_and_moments_equal_those_of_one_process(
    contract: str, ours: dict[str, Any], reference: dict[str, Any]
) -> None:
    assert_close(ours[contract], reference[contract], contract)


def test_any_number_of_backward_calls_adds_up_or_raises(
    launcher: Launcher, ours: dict[str, Any], reference: dict[str, Any]
) -> None:
    assert_close(ours["several_backwards"]["numbers"], reference["several_backwards"]["numbers"])
    assert bool(ours["several_backwards"]["message"]) == (launcher.zero_stage == 3)


def test_the_watchdog_knows_that_a_pass_may_wait_for_others_where_it_gathers_weights(ours: dict[str, Any]) -> None:
    found = ours["marks_of_a_pass"]
    expected = [["forward", True], ["computing", False]] if found["is_sharded"] else [["forward", False]]
    assert found["marks"] == expected


def test_clipping_was_at_work(reference: dict[str, Any]) -> None:
    assert max(reference["plain"]["grad_norms"]) > 0.1  # the run's --max_grad_norm


@pytest.mark.parametrize("stage", ZERO_STAGES, ids=str)
def test_the_size_of_buckets_changes_no_bit_of_two_processes(stage: Launcher, jobs: Jobs) -> None:
    """A sum of two numbers has one order. Of three, what is added first depends on the place in the bucket."""
    ours = measured(jobs, stage, accumulation_of(stage))
    assert ours["small_buckets"] == ours["plain"]


def test_one_processes_nan_makes_all_skip_that_update_alone(ours: dict[str, Any]) -> None:
    assert ours["skipped"]["skipped"] == [False, False, False, True, False, False]
    assert ours["skipped"]["step"] == 5


def test_wrapping_and_reloading_change_no_bit_and_a_reloaded_run_equals_the_uninterrupted_one(
    ours: dict[str, Any],
) -> None:
    assert ours["reloaded"]["unchanged"]
    for what in ("weights", "moments", "grad_norms", "step"):
        assert ours["reloaded"][what] == ours["plain"][what], what


def test_an_update_sends_its_gradients_with_the_request_to_stop_and_nothing_else(
    ours: dict[str, Any], launcher: Launcher
) -> None:
    expected = {"counted.gradients.0": 1}
    if launcher.name == "deepspeed":  # it sends its own gradients
        expected = {"stop_request": 1}
    if ours["average"]["is_sharded"] and launcher.backend:
        expected = {"counted.norm": 1}  # the rest is sent by the library that shards the model
    assert ours["sums_per_update"] == expected


def test_gradients_that_are_sent_in_bf16_change_the_losses_by_its_rounding_alone(
    ours: dict[str, Any], reference: dict[str, Any], launcher: Launcher
) -> None:
    if launcher.name == "horovodrun":
        assert "rounded_sums" not in ours  # it is refused
        return
    assert ours["rounded_sums"]["losses"][0] == pytest.approx(reference["plain"]["losses"][0], rel=1e-6)
    norms, exact = ours["rounded_sums"]["grad_norms"], reference["plain"]["grad_norms"]
    # Of the first update: 2^-9 for each of the numbers that are added, and for each of their sums.
    assert norms[0] == pytest.approx(exact[0], rel=2 * launcher.processes * 2**-9) and norms[0] != exact[0]
    # Adam divides a gradient by its own size: those near zero may turn around.
    assert ours["rounded_sums"]["losses"] == pytest.approx(reference["plain"]["losses"], rel=0.02)


def test_a_save_copies_the_state_on_the_root_alone(ours: dict[str, Any]) -> None:
    saved = ours["saved_bytes"]
    assert set(saved["sent"]) == {0}, "what a function of the state returns stays on the device"
    assert saved["kept"] == [*saved["state"], *[0] * (len(saved["kept"]) - 1)]


def test_an_average_has_the_same_bits_wherever_it_is_made_and_where_weights_are_sharded_a_process_holds_its_part(
    ours: dict[str, Any], launcher: Launcher
) -> None:
    average = ours["average"]
    assert average["same"] == [True] * 3
    assert average["is_sharded"] == (launcher.zero_stage == 3 or launcher.backend == "fsdp")
    if not average["is_sharded"]:
        assert average["held"] == average["numbers"]
        return
    # ZeRO 3 pads each piece by less than a number per process; FSDP cuts between rows.
    uneven = average["rows"] if launcher.backend else average["pieces"]
    assert average["held"] <= average["numbers"] // launcher.processes + uneven


def test_collectives_agree_with_closed_forms_and_every_rank_reports_the_same_norm(ours: dict[str, Any]) -> None:
    assert all(ours["collectives"].values()), ours["collectives"]
    assert ours["same_norms_on_all_ranks"]


def test_no_collective_waits_while_a_process_works_in_an_agreement_and_who_waits_leaves_the_processor_to_others(
    ours: dict[str, Any],
) -> None:
    """Horovod in naps of a millisecond: 0.01 s of half a second. Its own wait takes all the time that there is."""
    assert ours["patience"] == 0 and ours["seconds_of_waiting"] < 0.1


def test_resolved_configuration_is_complete(launcher: Launcher, ours: dict[str, Any]) -> None:
    description = ours["description"]
    product = description["micro_batch_size"] * description["grad_accum_steps"] * launcher.processes
    assert description["batch_size"] == product and description["world_size"] == launcher.processes
    if launcher.name == "deepspeed":
        resolved = description["deepspeed"]["plain"]
        assert resolved["gradient_clipping"] == 0.1 and "auto" not in json.dumps(resolved)
        assert len(resolved["zero_optimization"]) > 10  # DeepSpeed's own defaults are written out
