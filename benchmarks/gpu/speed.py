"""The part of `benchmarks.gpu` that measures time: each job runs alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from ..jobs import JobFailed
from ..references import REFERENCE, SCRIPT
from ..report import Row, failure_row
from ..training import WORKLOADS
from .plan import NEEDS_A_GPU, Plan

# Models of real size, the scripts' defaults, with batches that keep a GPU busy.
_MODELS = {
    "train_vae": "--batch_size 64",
    "train_vqgan": "--batch_size 16",
    "train_mulan": "--batch_size 64",
    "train_tokenizer": "--batch_size 2",
    "train_decoder": "--image_sizes 32 64 --batch_size 32",
}
_SECONDS = {"": 75.0, "--compile": 150.0}  # limit of a comparison, so that the others have time if one hangs
_UPDATES = 12  # of a round: a multiple of the updates between two penalties


def speed(plan: Plan) -> Iterator[Row]:
    """A row per script, precision and option. The most important ones come first, in case the time does not suffice."""
    for script in plan.scripts:
        for precision in plan.precisions:
            yield speed_row(plan, script, precision)
    for precision in plan.precisions:
        for script in plan.scripts:
            yield speed_row(plan, script, precision, "--compile")


def speed_row(plan: Plan, script: str, precision: str, option: str = "") -> Row:
    """The row of a script and its reference, which does not scale the loss and so has no fp16."""
    name = " ".join(filter(None, [f"{script}.py", precision, option]))
    if (option and plan.is_pretend) or (not plan.has_gpu and (option or precision not in ("bf16", "fp32"))):
        return Row(name, note=NEEDS_A_GPU)
    sides = [SCRIPT] if precision == "fp16" else [SCRIPT, REFERENCE]
    flags = [*model_flags_of(plan, script), "--precision", precision, *([option] if option else [])]
    updates = 1 if plan.is_toy else _UPDATES
    try:
        at_most = math.inf if plan.is_toy else _SECONDS[option]
        results = plan.measure(sides, flags, script, updates=updates, at_most=at_most)
    except JobFailed as error:
        return failure_row(name, error)
    values: dict[str, float | str] = {}
    speeds = {}
    for side, result in results.items():
        label = "" if side == SCRIPT else "reference's "
        speeds[side] = statistics.median(result["samples_per_second"])
        # Without the start, in which cuDNN tries kernels with much memory.
        memory = result["memory_bytes"]["updates"] / 2**20
        values |= {f"{label}samples/s": speeds[side], f"{label}peak MiB": memory}
    if REFERENCE in speeds:
        values["ratio"] = speeds[SCRIPT] / speeds[REFERENCE]
    return Row(name, values)


def model_flags_of(plan: Plan, script: str) -> list[str]:
    """Flags of the model that is measured."""
    return (WORKLOADS[script][0] if plan.is_toy else _MODELS[script]).split()
