"""The parts of `benchmarks.gpu` that measure no time: bits, losses and waits."""

from __future__ import annotations

import hashlib
import json
import signal
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from scripts.parity import SMALL_MODELS, difference, update_metrics
from tandem import distributed

from ..jobs import TOKENIZER, JobFailed
from ..launching import free_port
from ..report import Row
from .plan import NEEDS_A_GPU, Plan

_KILLED_AFTER, _SAVED_AFTER, _UPDATES = 11, 8, 20  # updates of `resume`

# Small sets, so that every process opens them at once.
_DATA = {
    "train_vae": "--image_folder demo:shapes:512",
    "train_vqgan": "--image_folder demo:shapes:512 --discr_start_step 3",
    "train_mulan": "--audio_data demo:tones:512",
    "train_tokenizer": "--video_folder demo:moving:256 --discr_start_step 3",
    "train_decoder": "--image_folder demo:shapes:512 --sample_timesteps 2",
}
# Updates only, each of them logged; a picture and a validation at the end.
QUIET = ("--num_workers", "0", "--log_every_n_steps", "1", "--validate_every_n_steps", "0",
          "--sample_every_n_steps", "0", "--epochs", "1000", "--seed", "1")  # fmt: skip


def model_flags(script: str, is_toy: bool) -> list[str]:
    """Flags of the demonstration's model, or of a tiny one, and of its data."""
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
        name = case.get("name", "").removeprefix("test_").replace("_", " ")
        problems = {element.tag: element for element in case if element.tag in ("failure", "error", "skipped")}
        for kind, problem in problems.items():
            lines = (problem.get("message") or "").strip().splitlines() or [kind]
            yield Row(name, note=lines[0][:300], is_bad=kind != "skipped")
        if not problems:
            yield Row(name, {"passed": "yes"})


def resume(plan: Plan) -> Iterator[Row]:
    """A row per script."""

    def attempt(script: str) -> Row:
        flags = [*model_flags(script, plan.is_toy), *QUIET, "--deterministic", "--max_steps", str(_UPDATES),
                 "--save_every_n_steps", str(_SAVED_AFTER), "--output_dir"]  # fmt: skip
        whole, killed = plan.folder / f"{script}-whole", plan.folder / f"{script}-killed"
        plan.job([f"{script}.py", *flags, str(whole)])
        kill = ["-m", "tests.launch.interrupted_worker", "--interrupt", f"SIGKILL@{_KILLED_AFTER}", "--script", script]
        plan.job([*kill, *flags, str(killed)], expected=-signal.SIGKILL)
        plan.job([f"{script}.py", *flags, str(killed)])
        starts = [json.loads(line)["step"] for line in (killed / "starts.jsonl").read_text().splitlines()]
        note = "" if starts == [0, _SAVED_AFTER] else f"the starts were at {starts}"
        return bits(script, different_tensors(whole, killed), {}, note)

    yield from plan.rows(attempt, plan.scripts)


def processes(plan: Plan) -> Iterator[Row]:
    """A row per script."""

    def attempt(script: str) -> Row:
        flags = [*model_flags(script, plan.is_toy), *QUIET, "--batch_parts", "2", "--deterministic",
                 "--max_steps", "12", "--save_every_n_steps", "0"]  # fmt: skip
        one, two = (plan.folder / f"{script}-{n}" for n in ("one", "two"))
        plan.job([f"{script}.py", *flags, "--output_dir", str(one)])
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
        devices = {"PRETEND_DEVICES": "2"} if plan.is_pretend else {"TANDEM_SHARE_GPU": "1"}
        plan.job([*launcher, f"{script}.py", *flags, "--output_dir", str(two)], **devices)
        losses = max(difference(update_metrics(two), update_metrics(one), "loss"))
        return bits(script, different_tensors(one, two), {"largest difference of a loss": losses})

    yield from plan.rows(attempt, plan.scripts)


def bits(script: str, differing: Sequence[str], values: Mapping[str, float | str], note: str = "") -> Row:
    """The row of two runs. `differing`: names of the files that differ."""
    names = f"different: {', '.join(differing)}" if differing else ""
    same = {"the same bits": "NO" if differing else "yes"}
    note = "; ".join(filter(None, [names, note]))
    return Row(script, {**same, **values}, note, is_bad=bool(note))


def different_tensors(one: Path, other: Path) -> list[str]:
    """Names of the files of weights and moments in which two runs differ, in their models and last checkpoints. The
    states of random generators are left out: each process seeds those of Python and NumPy anew, and draws nothing."""
    digests, others = _digests(one), _digests(other)
    assert digests, f"{one} holds no weights"
    return sorted(name for name in digests.keys() | others.keys() if digests.get(name) != others.get(name))


def _digests(run: Path) -> dict[str, str]:
    folders = [*run.glob("model*"), *sorted(run.glob("checkpoints/*"))[-1:]]
    files = [path for folder in folders for path in folder.rglob("*.safetensors")]
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def waits(plan: Plan) -> Iterator[Row]:
    """A row per script and backend; its note names the places in the code."""
    engines = {"": "single", ", FSDP": "fsdp"}
    if distributed.available()["deepspeed"]:
        engines |= {f", ZeRO {stage}": f"deepspeed --zero_stage {stage}" for stage in range(4)}
    names = {f"{script}{engine}": (script, flags) for engine, flags in engines.items() for script in plan.scripts}
    if not plan.has_gpu:
        yield from (Row(name, note=NEEDS_A_GPU) for name in names)
        return

    def attempt(name: str) -> Row:
        script, engine_flags = names[name]
        result = plan.folder / f"waits-{name.replace(', ', '-').replace(' ', '-')}.json"
        watcher_flags = ["--script", script, "--result", str(result), "--output_dir", str(result.with_suffix(""))]
        quiet = [*QUIET, "--log_every_n_steps", "1000", "--save_every_n_steps", "0", "--valid_fraction", "0"]
        engine = ["--distributed_backend", *engine_flags.split()]
        plan.job(["-m", "benchmarks.gpu.waits", *watcher_flags, *model_flags(script, plan.is_toy), *quiet, *engine])
        waits = json.loads(result.read_text())
        places = [f"{count:.3g} x {place}" for place, count in list(waits["places"].items())[:5]]
        return Row(name, {"waits per update": waits["waits_per_update"]}, "; ".join(places))

    yield from plan.rows(attempt, list(names))


def zero(plan: Plan) -> Iterator[Row]:
    """A row per ZeRO stage and precision, and with FSDP, for the model of train_vae.py."""
    kinds = {"FSDP": "fsdp", "FSDP, offload": "fsdp --fsdp_offload"}
    kinds |= {f"ZeRO {stage}": f"deepspeed --zero_stage {stage}" for stage in range(4)}
    kinds["offload"] = "deepspeed --deepspeed_config configs/deepspeed/zero2_offload.json"
    small = [*model_flags("train_vae", is_toy=True), *QUIET, "--max_steps", "12", "--save_every_n_steps", "0"]

    def losses(precision: str, kind: str) -> list[dict[str, float]]:
        run = plan.folder / f"zero-{precision}-{kind.replace(' ', '-')}"
        backend_flags = ["--distributed_backend", *kinds[kind].split()] if kind in kinds else []
        plan.job(["train_vae.py", *small, "--precision", precision, *backend_flags, "--output_dir", str(run)])
        return update_metrics(run)

    def attempt(precision: str, losses_without: Sequence[dict[str, float]], kind: str) -> Row:
        name = f"{kind}, {precision}"
        if "deepspeed" in kinds[kind] and not distributed.available()["deepspeed"]:
            return Row(name, note="DeepSpeed is not installed")
        differences = difference(losses(precision, kind), losses_without, "loss")
        return Row(name, {"first update": differences[0], "largest of 12": max(differences)})

    for precision in [name for name in plan.precisions if plan.has_gpu or name in ("fp32", "bf16")]:
        yield from plan.rows(partial(attempt, precision, losses(precision, "without")), list(kinds))
