"""The scripts on a pretend accelerator: what a GPU would have waited for or refused (docs/devices.md)."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filling import autoencoder, mulan, saved, video_tokenizer, vqgan
from safetensors.torch import load_file

from tests.pretend import library
from tests.scripts import ROOT, SCRIPTS, VQGAN, words

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the pretend device is built by g++")
RUN = str(Path(__file__).with_name("run.py"))
PROGRAMS = Path(sys.executable).parent
TORCHRUN = [str(PROGRAMS / "torchrun"), "--standalone", "--nproc_per_node", "2"]
DEEPSPEED = [str(PROGRAMS / "deepspeed"), "--num_gpus", "2"]
LIMIT = 900  # seconds, of a hang
WAITS = "sync", "staged"  # kinds of reports in which the host waits until the device has done all that it was told
FAULTS = "race", "foreign", "scalar"


def zero(stage: int) -> dict[str, Any]:
    return {"deepspeed_config": ROOT / "configs" / "deepspeed" / f"zero{stage}.json"}


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    library.built()


def start(launcher: list[str], script: str, flags: list[str], reports: Path) -> subprocess.Popen[str]:
    reports.mkdir()
    world_size = 1 if launcher == [sys.executable] else 2
    path = f"{PROGRAMS}:{os.environ['PATH']}"
    of_device = {"PRETEND_REPORTS": str(reports), "PRETEND_DEVICES": str(world_size), "PATH": path}
    # The launcher of DeepSpeed asks for an accelerator, too, and has none.
    env = {**os.environ, **of_device, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [*launcher, RUN, f"{script}.py", *flags]
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def output_of(process: subprocess.Popen[str]) -> str:
    """What it wrote, when it has ended. One that hangs is killed."""
    try:
        return process.communicate(timeout=LIMIT)[0]
    finally:
        process.kill()
        process.wait()


def reports_of(
    launcher: list[str], script: str, flags: list[str], reports: Path, expected_code: int = 0
) -> list[dict[str, Any]]:
    """What the device of each process has reported."""
    process = start(launcher, script, flags, reports)
    output = output_of(process)
    assert process.returncode == expected_code, output
    return [json.loads((reports / f"{rank}.json").read_text()) for rank in range(len([*reports.iterdir()]))]


def waits_per_update(report: dict[str, Any]) -> float:
    return sum(each["times"] for each in waits(report)) / report["updates"]["update"]


def waits(report: dict[str, Any]) -> list[Any]:
    """Those in and after the updates that are neither first nor last."""
    return [each for each in report["reports"] if each["phase"] in ("update", "between") and each["kind"] in WAITS]


def faults(report: dict[str, Any]) -> list[Any]:
    return [each for each in report["reports"] if each["kind"] in FAULTS]


ONE = [sys.executable]
DETERMINISTIC = {"deterministic": None}
#: How often the host waits for its device in an update without a line; for each network where it is more than 0.
VARIANTS: list[tuple[str, list[str], dict[str, Any], int]] = [
    *((name, ONE, DETERMINISTIC, 0) for name in SCRIPTS),
    ("train_vqgan", ONE, {"gan_weight": 0.1, "lecam_weight": 0.1, "grad_accum_steps": 2, **DETERMINISTIC}, 0),
    ("train_mulan", ONE, {"loss": "sigmoid", "grad_accum_steps": 2, "use_lion": None, **DETERMINISTIC}, 0),
    ("train_vqgan", ONE, {"batch_parts": 2}, 2),
    ("train_mulan", TORCHRUN, {"batch_parts": 2, "use_lion": None}, 0),
    (
        "train_decoder",
        ONE,
        {"switches": ["coordinates", "sparse_attn"], "learned_variance": [0, 1], "random_crop_sizes": [0, 8]},
        0,
    ),
    ("train_vqgan", TORCHRUN, {"num_workers": 2}, 0),
    ("train_vqgan", TORCHRUN, {"distributed_backend": "fsdp"}, 0),
    ("train_vqgan", DEEPSPEED, zero(0), 2),
    ("train_vqgan", DEEPSPEED, zero(2), 6),
    ("train_vqgan", DEEPSPEED, zero(3), 8),
]


def named(value: Any) -> str | None:
    if isinstance(value, dict):
        return "-".join(f"{name}={Path(str(each)).name}" if each is not None else name for name, each in value.items())
    return Path(value[0]).name if isinstance(value, list) else None


@pytest.mark.parametrize(("name", "launcher", "more", "most_waits"), VARIANTS, ids=named)
def test_the_host_waits_seldom_and_no_number_is_read_too_early(
    name: str, launcher: list[str], more: dict[str, Any], most_waits: int, tmp_path: Path
) -> None:
    flags = SCRIPTS[name].flags(tmp_path / "run", *words({**more, "log_every_n_steps": 1000, "max_steps": 6}))
    reports = reports_of(launcher, name, flags, tmp_path / "reports")
    assert [faults(report) for report in reports] == [[]] * (1 if launcher == ONE else 2)
    assert all(report["updates"]["update"] == 3 for report in reports)  # besides two first ones and the last
    assert max(map(waits_per_update, reports)) <= most_waits, [*map(waits, reports)]
    assert all(report["collectives"] == reports[0]["collectives"] for report in reports)
    assert [bool(calls) for calls in reports[0]["collectives"]] == [launcher != ONE] * 2


BATCHES = 60  # or more, of each command below; fewer waits bring a model to the device
IMAGES, FILMS = ["--image_folder", "demo:shapes:120", "--batch_size", "2"], ["--video_folder", "demo:moving:20"]
CLIPS = ["--video_folder", "demo:moving:60", "--num_frames", "3", "--batch_size", "1"]
CODES = ["--decode", "codes", "--format", "png"]
#: Commands that train nothing, by what they make: script, model, flags, and the files that a CPU makes, too.
TOOLS: dict[str, tuple[str, Callable[[], Any], list[str], str]] = {
    "codes": ("encode", vqgan, IMAGES, "*.safetensors"),
    "latents": ("encode", autoencoder, [*IMAGES, "--with_flip", "--latent", "moments"], "*.safetensors"),
    "codes of films": ("encode", video_tokenizer, [*FILMS, "--keep_aspect"], "*.safetensors"),
    "images": ("encode", vqgan, [*CODES, "--batch_size", "2"], "*.png"),
    "films": ("encode", video_tokenizer, CODES, "*.png"),
    "embeddings": ("embed", mulan, ["--audio", "demo:tones:120", "--batch_size", "2"], "*.safetensors"),
    "measures": ("evaluate", vqgan, IMAGES, "*.png"),
    "measures of films": ("evaluate", video_tokenizer, CLIPS, "*.png"),
}


@pytest.mark.parametrize("makes", TOOLS)
def test_a_tool_waits_at_no_batch_and_makes_what_it_makes_on_a_cpu(
    makes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    script, model, more, pattern = TOOLS[makes]
    main, of_codes = importlib.import_module(script).main, {"images": IMAGES, "films": FILMS}.get(makes)
    flags = ["--model", str(saved(tmp_path / "model", model())), "--num_workers", "0"]
    if of_codes:
        main([*flags, *of_codes, "--output", str(tmp_path / "codes")])
    flags += [str(tmp_path / word) if word == "codes" else word for word in more]
    cpu, device = tmp_path / "cpu", tmp_path / "device"
    for folder in (cpu, device):
        folder.mkdir()
    main([*flags, "--output", str(cpu / "made")])
    (report,) = reports_of(ONE, script, [*flags, "--output", str(device / "made")], tmp_path / "reports")
    waited = [each for each in report["reports"] if each["kind"] in WAITS]
    assert not faults(report) and sum(each["times"] for each in waited) < BATCHES, waited
    of_cpu, of_device = (
        {path.relative_to(of): path.read_bytes() for path in of.rglob(pattern)} for of in (cpu, device)
    )
    assert of_cpu and of_cpu == of_device


def test_a_run_that_was_killed_goes_on_with_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    more = words({**VQGAN.all_parts, "max_steps": 40, "save_every_n_steps": 2, "deterministic": None})
    reports_of(ONE, "train_vqgan", VQGAN.flags(tmp_path / "whole", *more), tmp_path / "of_whole")
    flags = VQGAN.flags(tmp_path / "killed", *more)
    process = start(ONE, "train_vqgan", flags, tmp_path / "of_killed")
    while process.poll() is None and not [*(tmp_path / "killed").glob("checkpoints/step_*")]:
        time.sleep(0.01)  # until there is a checkpoint
    process.send_signal(signal.SIGKILL)
    output_of(process)
    reports_of(ONE, "train_vqgan", flags, tmp_path / "of_resumed")
    whole, killed = (load_file(tmp_path / run / "model" / "model.safetensors") for run in ("whole", "killed"))
    assert whole.keys() == killed.keys() and all(whole[name].equal(killed[name]) for name in whole)
