"""The part of `benchmarks.gpu` that measures time: each job runs alone."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from typing import Any

from ..gan import GAMES
from ..jobs import JobFailed
from ..training import peak_mib
from ..worker import BARE_LOOPS, SCRIPT
from .checks import TOKENIZER, model_flags
from .rows import NEEDS_A_GPU, Plan, Row

# Models of real size, with batches that keep a GPU busy. Weights of perceptual losses may not be on the machine.
_MODELS = {
    "train_vae": "--batch_size 64",
    "train_vqgan": "--config configs/vqgan/base.yaml --image_size 128 --dim 64 --perceptual none --batch_size 16",
    "train_mulan": "--config configs/mulan/base.yaml --batch_size 64",
    "train_tokenizer": "--config configs/tokenizer/base.yaml --perceptual none --batch_size 2",
    "train_decoder": "--batch_size 32",
}
# The bare loop knows what these flags choose, and not the others of the tiny model.
_TOY_DECODER = (
    "--switches none --loss_weight none --learned_variance 0 --lowres_condition blur --condition_on image "
    "--max_grad_norm 0.5"
)
_SECONDS = {"": 45.0, "--compile": 75.0}  # of a comparison, so that one that hangs leaves time for the others
_UPDATES = 12  # of a round: a multiple of the updates between two penalties
_ON_A_CPU = ("bf16", "fp32")
_BARE, _CHANNELS_LAST = "fused_adam", "channels_last"  # names in bare.VARIANTS


def speed(plan: Plan) -> Iterator[Row]:
    """A row per script, precision and option. Those that say most come first, in case the time does not suffice."""
    for script in plan.scripts:
        for precision in plan.precisions:
            yield _compared(plan, script, precision)
    yield from _adversarial(plan)
    for precision in plan.precisions:
        for script in plan.scripts:
            yield _compared(plan, script, precision, "--compile")


def _compared(plan: Plan, script: str, precision: str, option: str = "") -> Row:
    """The script, and bare loops if there are any for it: without a flag of the script, also in channels last."""
    name = " ".join(filter(None, [f"{script}.py", precision, option]))
    if not plan.has_gpu and (option or precision not in _ON_A_CPU):
        return plan.row(name, note=NEEDS_A_GPU)
    sides = [SCRIPT, _BARE, *([_CHANNELS_LAST] if plan.has_gpu else [])] if script in BARE_LOOPS else [SCRIPT]
    flags = [*model_flags_of(plan, script), "--precision", precision, *([option] if option else [])]
    updates = 1 if plan.is_toy else _UPDATES
    try:
        found = plan.measure(sides, flags, script, updates=updates, at_most=_SECONDS[option])
    except JobFailed as error:
        return plan.failed(name, error)
    speeds = {side: statistics.median(result["samples_per_second"]) for side, result in found.items()}
    values: dict[str, float | str] = {}
    for side, label in {SCRIPT: "", _BARE: "bare loop's ", _CHANNELS_LAST: "channels last, bare loop's "}.items():
        if side in found:
            memory = peak_mib(found[side]["memory_bytes"])
            values |= {f"{label}samples/s": speeds[side], f"{label}peak MiB": memory}
    if _BARE in found:
        values["ratio"] = speeds[SCRIPT] / speeds[_BARE]
    return plan.row(name, values)


def model_flags_of(plan: Plan, script: str) -> list[str]:
    """Flags of the model that is measured."""
    tokenizer = TOKENIZER if script == "train_mulan" else ()
    if not plan.is_toy:
        return [*_MODELS[script].split(), *tokenizer]
    decoder = _TOY_DECODER.split() if script == "train_decoder" else []
    return [*model_flags(script, is_toy=True), *decoder, "--valid_fraction", "0"]


def _adversarial(plan: Plan) -> Iterator[Row]:
    """The two models of an adversarial script, as `benchmarks.gan` trains them, each side in a process of its own."""
    precisions = [each for each in plan.precisions if each != "fp16"]  # the bare loop scales no loss
    for script in [f"{each}.py" for each in plan.scripts if f"{each}.py" in GAMES and precisions]:
        if not plan.has_gpu:
            yield plan.row(f"updates of {script}", note="make bench measures it on a CPU")
            continue
        try:
            ours, bare = (
                plan.job(["-m", "benchmarks.gan", side, script, ",".join(precisions), "5"]) for side in ("ours", "bare")
            )
        except JobFailed as error:
            yield plan.failed(f"updates of {script}", error)
            continue
        for precision, mine, theirs in zip(precisions, _json_lines(ours), _json_lines(bare), strict=True):
            speeds = [statistics.median(side["updates_per_second"]) for side in (mine, theirs)]
            values: dict[str, float | str] = {
                "updates/s": speeds[0], "peak MiB": mine["peak_mib"], "bare loop's updates/s": speeds[1],
                "bare loop's peak MiB": theirs["peak_mib"], "ratio": speeds[0] / speeds[1],
            }  # fmt: skip
            yield plan.row(f"updates of {script}, {precision}", values)


def _json_lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]
