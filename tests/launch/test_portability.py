"""A checkpoint of any backend or ZeRO stage continues on any other, as if one process had never stopped."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from jobs import Jobs, Task
from launching import CHOSEN_ON_TWO, ONE_PROCESS, WHOLE_MATRIX, ZERO_STAGES, Launcher
from portability import END, SAVED_AT
from safetensors.torch import load_file
from torch import Tensor

LAUNCHERS = [
    ONE_PROCESS,
    Launcher("torchrun", 2),
    Launcher("horovodrun", 2),
    *CHOSEN_ON_TWO,
    *ZERO_STAGES,
    Launcher("deepspeed", 3, zero_stage=3),
]
INSTALLED = [launcher for launcher in LAUNCHERS if launcher.name != "horovodrun" or sys.version_info < (3, 12)]


def writers_for(reader: Launcher) -> list[Launcher]:
    """A checkpoint does not say more than the state that all backends share, so one process reads what each has
    written, and each reads what one process and itself have written."""
    return LAUNCHERS if WHOLE_MATRIX or reader == ONE_PROCESS else [ONE_PROCESS, reader]


PAIRS = pytest.mark.parametrize(
    ("writer", "reader"),
    [
        pytest.param(writer, reader, id=f"{writer}-to-{reader}")
        for reader in LAUNCHERS
        for writer in writers_for(reader)
    ],
)
# The sizes of hardly any tensors are multiples of 2 or 3, so that ZeRO has to pad; the batch of 12 divides evenly among
# 1, 2, 3 and 4 processes.
FLAGS = ["--image_size", "8", "--num_layers", "1", "--num_resnet_blocks", "0", "--num_tokens", "35", "--emb_dim", "7",
         "--hidden_dim", "11", "--batch_size", "12", "--learning_rate", "3e-3", "--max_grad_norm", "0.15",
         "--ema_decay", "0.9"]  # fmt: skip

# Sums in another order move a loss by 2e-7 and a gradient norm by 4e-7 in 20 updates (measured); moments that were
# lost move the loss by 3e-3.
CURVE_TOLERANCE = 1e-5
# Relative to a tensor's largest entry, weights differ by 3e-7 and moments by 6e-7 (measured), because gradients are
# small sums of larger terms. Moments that were lost differ by 0.3.
STATE_TOLERANCE = 1e-5


def tasks(launcher: Launcher, kind: str, jobs: Jobs) -> Iterator[Task]:
    """The second job of every launcher reads the checkpoints that the first jobs of all launchers have written. The
    last launcher has nothing else for a second job: its first job reads what it and all others have written."""
    if launcher in LAUNCHERS and kind == "rounded":
        yield Task("portability", "portability.write", FLAGS)
    if launcher in LAUNCHERS and kind == reading(launcher):
        writers = {
            str(writer): str((jobs.path if (writer, kind) == (launcher, "rounded") else jobs.output)(*task))
            for writer in INSTALLED
            if writer in writers_for(launcher) and (task := (writer, "rounded", "portability"))
        }
        yield Task("portability-from", "portability.read", FLAGS, {"writers": writers})


def reading(launcher: Launcher) -> str:
    """The kind of the job that reads the checkpoints."""
    return "rounded" if launcher == LAUNCHERS[-1] else "bits"


def written(jobs: Jobs, launcher: Launcher) -> dict[str, Tensor]:
    """What the launcher's uninterrupted run recorded."""
    return load_file(jobs.output(launcher, "rounded", "portability") / "uninterrupted.safetensors")


def continued(jobs: Jobs, launcher: Launcher, writer: Launcher) -> dict[str, Tensor]:
    """What the launcher's run from the writer's checkpoint recorded."""
    return load_file(jobs.output(launcher, reading(launcher), "portability-from") / f"{writer}.safetensors")


def states(record: dict[str, Tensor], when: str) -> dict[str, Tensor]:
    """Weights, moments, averages and counts."""
    return {name: tensor for name, tensor in record.items() if name.startswith(f"{when}/")}


def assert_same(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    """Assert that the curves of the updates after the save and the state at the end are equal but for rounding."""
    after = slice(SAVED_AT - END, None)
    for curve in ("losses", "grad_norms"):
        torch.testing.assert_close(ours[curve][after], reference[curve][after], rtol=CURVE_TOLERANCE, atol=0.0)
    reached, expected = states(ours, "end"), states(reference, "end")
    assert reached.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (reached[name].double() - tensor.double()).abs().max().item()
        assert error <= STATE_TOLERANCE * tensor.abs().max().item(), f"{name}: {error}"


def test_the_run_clips_and_a_checkpoint_has_weights_moments_and_averages(jobs: Jobs) -> None:
    run = written(jobs, ONE_PROCESS)
    after = run["grad_norms"][SAVED_AT:]
    assert after.min() < 0.15 < after.max()  # the run's --max_grad_norm
    assert run["saved/engine/optimizer/step"] == run["saved/ema/updates"] == SAVED_AT
    moments = "engine/optimizer/moments"
    parts = ["engine/weights", "ema/weights", f"{moments}/exp_avg", f"{moments}/exp_avg_sq"]
    names = [{name.removeprefix(f"saved/{part}/") for name in run if f"saved/{part}/" in name} for part in parts]
    assert names[0] and all(of_part == names[0] for of_part in names)


@pytest.mark.parametrize("writer", LAUNCHERS, ids=str)
def test_training_on_beside_a_save_is_that_of_one_process(writer: Launcher, jobs: Jobs) -> None:
    assert_same(written(jobs, writer), written(jobs, ONE_PROCESS))


@PAIRS
def test_loading_restores_every_bit(writer: Launcher, reader: Launcher, jobs: Jobs) -> None:
    saved, loaded = (states(record, "saved") for record in (written(jobs, writer), continued(jobs, reader, writer)))
    assert loaded.keys() == saved.keys()
    assert [name for name in saved if not torch.equal(loaded[name], saved[name])] == []


@PAIRS
def test_the_continuation_is_that_of_one_process(writer: Launcher, reader: Launcher, jobs: Jobs) -> None:
    assert_same(continued(jobs, reader, writer), written(jobs, ONE_PROCESS))
