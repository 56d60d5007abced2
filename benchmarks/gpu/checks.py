"""The parts of `benchmarks.gpu` that measure no time: bits, losses and waits."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path

import distributed
from scripts.parity import SMALL_MODELS, difference

from ..jobs import TOKENIZER, JobFailed
from ..launching import free_port
from .rows import NEEDS_A_GPU, Plan, Row
from .worker import SAVED_AFTER, UPDATES, different_tensors

# Small sets, so that every process opens them at once.
_DATA = {
    "train_vae": "--image_folder demo:shapes:512",
    "train_vqgan": "--image_folder demo:shapes:512 --discr_start_step 3",
    "train_mulan": "--audio_data demo:tones:512",
    "train_tokenizer": "--video_folder demo:moving:256 --discr_start_step 3",
    "train_decoder": "--image_folder demo:shapes:512 --sample_timesteps 2",
}
# Nothing but updates, each of them logged; a picture and a validation at the end.
QUIET = ("--num_workers", "0", "--log_every_n_steps", "1", "--validate_every_n_steps", "0",
          "--sample_every_n_steps", "0", "--epochs", "1000", "--seed", "1")  # fmt: skip


def model_flags(script: str, is_toy: bool) -> list[str]:
    """Flags of a small model and its data: the demonstration's, or a tiny one."""
    tokenizer = TOKENIZER if script == "train_mulan" else ()
    if is_toy:
        return [*SMALL_MODELS[f"{script}.py"].split(), *tokenizer, "--batch_size", "8"]
    config = f"configs/{script.removeprefix('train_')}/demo.yaml"
    return ["--config", config, *_DATA[script].split(), *tokenizer]


def tests(plan: Plan) -> Iterator[Row]:
    """A row per test of tests/gpu."""
    file = plan.folder / "tests.xml"
    # Without the fixtures of the other tests, which need packages that a machine may lack.
    command = ["-m", "pytest", "tests/gpu", "--noconftest", "-q", "-p", "no:cacheprovider", f"--junitxml={file}"]
    try:
        plan.job(command)
    except JobFailed:
        if not file.exists():  # pytest writes it at its end, also where a test failed
            raise
    for case in ET.parse(file).iter("testcase"):
        yield _row_of_test(plan, case)


def _row_of_test(plan: Plan, case: ET.Element) -> Row:
    name = case.get("name", "").removeprefix("test_").replace("_", " ")
    for kind in ("failure", "error", "skipped"):
        if (found := case.find(kind)) is not None:
            lines = (found.get("message") or "").strip().splitlines() or [kind]
            return plan.row(name, note=lines[0][:300], is_bad=kind != "skipped")
    return plan.row(name, {"passed": "yes"})


def _files(plan: Plan) -> list[str]:
    """The scripts, as tables name them."""
    return [f"{script}.py" for script in plan.scripts]


def resume(plan: Plan) -> Iterator[Row]:
    """A row per script."""

    def attempt(name: str) -> Row:
        script = name.removesuffix(".py")
        flags = [*model_flags(script, plan.is_toy), *QUIET, "--deterministic", "--max_steps", str(UPDATES),
                 "--save_every_n_steps", str(SAVED_AFTER)]  # fmt: skip
        found = plan.worker("kill", script, *flags)
        if "error" in found:
            return plan.row(name, note=found["error"], is_bad=True)
        note = "" if found["starts"] == [0, SAVED_AFTER] else f"the starts were at {found['starts']}"
        return _bits(plan, name, found["differing"], {}, note)

    yield from plan.rows(attempt, _files(plan))


def processes(plan: Plan) -> Iterator[Row]:
    """A row per script."""

    def attempt(name: str) -> Row:
        script = name.removesuffix(".py")
        flags = [*model_flags(script, plan.is_toy), *QUIET, "--batch_parts", "2", "--deterministic",
                 "--max_steps", "12", "--save_every_n_steps", "0"]  # fmt: skip
        one, two = (plan.folder / f"{script}-{n}" for n in ("one", "two"))
        plan.job([f"{script}.py", *flags, "--output_dir", str(one)])
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
        plan.job([*launcher, f"{script}.py", *flags, "--output_dir", str(two)], TANDEM_SHARE_GPU="1")
        losses = max(difference(_lines(two), _lines(one), "loss"))
        return _bits(plan, name, different_tensors(one, two), {"largest difference of a loss": losses})

    yield from plan.rows(attempt, _files(plan))


def _bits(plan: Plan, name: str, differing: Sequence[str], values: dict[str, float | str], note: str = "") -> Row:
    """`differing`: names of the files that differ."""
    names = f"different: {', '.join(differing)}" if differing else ""
    same: dict[str, float | str] = {"the same bits": "NO" if differing else "yes"}
    is_bad = bool(differing or note)
    return plan.row(name, same | values, "; ".join(filter(None, [names, note])), is_bad=is_bad)


def _lines(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def waits(plan: Plan) -> Iterator[Row]:
    """A row per script; its note names the places in the code."""
    if not plan.has_gpu:
        yield from (plan.row(name, note=NEEDS_A_GPU) for name in _files(plan))
        return

    def attempt(name: str) -> Row:
        script = name.removesuffix(".py")
        quiet = [*QUIET, "--log_every_n_steps", "1000", "--save_every_n_steps", "0", "--valid_fraction", "0"]
        found = plan.worker("waits", script, *model_flags(script, plan.is_toy), *quiet)
        places = [f"{count:.3g} x {place}" for place, count in list(found["places"].items())[:5]]
        return plan.row(name, {"waits per update": found["waits_per_update"]}, "; ".join(places))

    yield from plan.rows(attempt, _files(plan))


def zero(plan: Plan) -> Iterator[Row]:
    """A row per ZeRO stage and precision, and with FSDP, for the model of train_vae.py."""
    precisions = [each for each in plan.precisions if plan.has_gpu or each in ("fp32", "bf16")]
    kinds = [("FSDP", "fsdp", []), ("FSDP, offload", "fsdp", ["--fsdp_offload"])]
    of_deepspeed = [(f"ZeRO {stage}", "deepspeed", ["--zero_stage", str(stage)]) for stage in range(4)]
    of_deepspeed += [("offload", "deepspeed", ["--deepspeed_config", "configs/deepspeed/zero2_offload.json"])]
    if distributed.available()["deepspeed"]:
        kinds += of_deepspeed
    else:
        yield from (plan.row(kind, note="DeepSpeed is not installed") for kind, _, _ in of_deepspeed)
    flags_of = {f"{kind}, {each}": (each, [backend, *said]) for kind, backend, said in kinds for each in precisions}
    small = [*model_flags("train_vae", is_toy=True), *QUIET, "--max_steps", "12", "--save_every_n_steps", "0"]

    def lines(name: str, flags: Sequence[str]) -> list[dict[str, float]]:
        run = plan.folder / f"zero-{name.replace(' ', '-').replace(',', '')}"
        plan.job(["train_vae.py", *small, *flags, "--output_dir", str(run)])
        return _lines(run)

    without = dict(
        zip(precisions, plan.at_once(lambda each: lines(each, ["--precision", each]), precisions), strict=True)
    )

    def attempt(name: str) -> Row:
        precision, flags = flags_of[name]
        ours = lines(name, ["--precision", precision, "--distributed_backend", *flags])
        losses = difference(ours, without[precision], "loss")
        return plan.row(name, {"first update": losses[0], "largest of 12": max(losses)})

    yield from plan.rows(attempt, list(flags_of))
