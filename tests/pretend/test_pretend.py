"""The scripts on a pretend accelerator: what a GPU would have waited for or refused (docs/devices.md)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filling import autoencoder, film_autoencoder, mulan, saved, video_tokenizer, vqgan
from forks import Forked
from safetensors.torch import load_file

from tests.models.helpers import write_resnet50, write_vgg16
from tests.models.towers import vision_folder
from tests.pretend import library
from tests.scripts import ROOT, SCRIPTS, VQGAN, words

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the pretend device is built by g++")
RUN = str(Path(__file__).with_name("run.py"))
PROGRAMS = Path(sys.executable).parent
TORCHRUN = [str(PROGRAMS / "torchrun"), "--standalone", "--nproc_per_node", "2"]
DEEPSPEED = [str(PROGRAMS / "deepspeed"), "--num_gpus", "2"]
ONE, WITHOUT_FP64 = ["python"], ["python", "PRETEND_NO_FP64=1"]
LIMIT = 900  # seconds, of a hang
WAITS = "sync", "staged"  # kinds of reports in which the host waits until the device has done all that it was told
FAULTS = "race", "foreign", "scalar"


def zero(stage: int) -> dict[str, Any]:
    return {"deepspeed_config": ROOT / "configs" / "deepspeed" / f"zero{stage}.json"}


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    library.built()


def processes(launcher: list[str]) -> int:
    return 2 if launcher in (TORCHRUN, DEEPSPEED) else 1


def start(launcher: list[str], flags: list[str], reports: Path) -> Forked | subprocess.Popen[str]:
    """Start run.py; without a launcher as a fork of a process that has imported PyTorch, which is most of a start."""
    reports.mkdir()
    of_device = {"PRETEND_REPORTS": str(reports), "PRETEND_DEVICES": str(processes(launcher)), "OMP_NUM_THREADS": "1"}
    if launcher in (ONE, WITHOUT_FP64):
        more = dict(word.split("=") for word in launcher[1:])
        return Forked("tests.pretend.run", flags, reports.with_suffix(".log"), **of_device, **more)
    # The launcher of DeepSpeed asks for an accelerator, too, and has none.
    path = f"{PROGRAMS}:{os.environ['PATH']}"
    env = {**os.environ, **of_device, "PATH": path, "DS_ACCELERATOR": "cpu"}
    command = [*launcher, RUN, *flags]
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def end_of(process: Forked | subprocess.Popen[str]) -> tuple[int | None, str]:
    """Its exit code and what it wrote, when it has ended. One that hangs is killed."""
    if isinstance(process, Forked):
        [finished] = process.finish()
        return finished.returncode, finished.output
    try:
        output = process.communicate(timeout=LIMIT)[0]
    finally:
        process.kill()
        process.wait()
    return process.returncode, output


def reports_of(launcher: list[str], script: str, flags: list[str], reports: Path) -> list[dict[str, Any]]:
    """What the device of each process has reported."""
    code, output = end_of(start(launcher, [f"{script}.py", *flags], reports))
    assert code == 0, output
    return [json.loads((reports / f"{rank}.json").read_text()) for rank in range(len([*reports.iterdir()]))]


def waits_per_update(report: dict[str, Any]) -> float:
    return sum(each["times"] for each in waits(report)) / report["updates"]["update"]


def waits(report: dict[str, Any]) -> list[Any]:
    """Those in and after the updates that are neither first nor last."""
    return [each for each in report["reports"] if each["phase"] in ("update", "between") and each["kind"] in WAITS]


def faults(report: dict[str, Any]) -> list[Any]:
    return [each for each in report["reports"] if each["kind"] in FAULTS]


def test_what_only_a_gpu_shows_is_shown_here_as_far_as_it_needs_no_kernels_of_one() -> None:
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--noconftest", "-q", "-rs", "-p", "no:cacheprovider"]
    site = str(Path(__file__).with_name("site"))
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": site}, text=True, capture_output=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("SKIPPED") == done.stdout.count("this GPU has no TF32") == 1, done.stdout


def pinned_by_saves(report: dict[str, Any]) -> list[str]:
    """The phases in which memory was pinned for the copies that checkpoints are written from."""
    of_saves = [
        each for each in report["reports"] if each["kind"] == "pin" and "snapshot.py" in " ".join(each["lines"])
    ]
    return [each["phase"] for each in of_saves]


ON_THE_HOST = {"ema_decay": 0}  # where averages are made on a device without fp64
DETERMINISTIC = {"deterministic": None}
ALIGNED: dict[str, Any] = {
    "align_with": vision_folder, "equivariance_weight": 0.5, "latent_noise": 2
}  # fmt: skip
SPARSE = {"log_every_n_steps": 1000, "max_steps": 6, "ema_decay": 0.9}  # no line of metrics before the last update
#: How often the host waits for its device in an update without a line; for each network where it is more than 0.
VARIANTS: list[Any] = [
    *((name, ONE, DETERMINISTIC, 0) for name in SCRIPTS),
    (
        "train_vqgan",
        WITHOUT_FP64,
        {**ON_THE_HOST, **ALIGNED, "gan_weight": 0.1, "lecam_weight": 0.1, "grad_accum_steps": 2},
        0,
    ),
    ("train_mulan", WITHOUT_FP64, {**ON_THE_HOST, "loss": "sigmoid", "grad_accum_steps": 2, "use_lion": None}, 0),
    (
        "train_decoder",
        WITHOUT_FP64,
        {
            **ON_THE_HOST,
            "switches": ["coordinates", "sparse_attn"],
            "learned_variance": [0, 1],
            "random_crop_sizes": [0, 8],
        },
        0,
    ),
    ("train_vqgan", ONE, {"batch_parts": 2}, 2),
    ("train_mulan", ONE, {"batch_parts": 2, "use_lion": None}, 0),
    ("train_vqgan", TORCHRUN, {"num_workers": 2}, 0),
    ("train_vqgan", TORCHRUN, {"distributed_backend": "fsdp"}, 0),
    pytest.param("train_vqgan", DEEPSPEED, zero(0), 2, marks=pytest.mark.long),
    pytest.param("train_mulan", TORCHRUN, {"batch_parts": 2, "use_lion": None}, 0, marks=pytest.mark.long),
    pytest.param("train_vqgan", DEEPSPEED, zero(2), 6, marks=pytest.mark.long),
    pytest.param("train_vqgan", DEEPSPEED, zero(3), 8, marks=pytest.mark.long),
]


def named(value: Any) -> str | None:
    if isinstance(value, dict):
        each_named = {name: getattr(each, "__name__", Path(str(each)).name) for name, each in value.items()}
        return "-".join(name if value[name] is None else f"{name}={text}" for name, text in each_named.items())
    return Path(value[0]).name if isinstance(value, list) else None


def with_folders(flags: dict[str, Any], where: Path) -> dict[str, Any]:
    """The flags with a new folder for each value that is a function, which has filled it."""
    written = {flag: where / value.__name__ for flag, value in flags.items() if callable(value)}
    for flag, folder in written.items():
        folder.mkdir()
        flags[flag](folder)
    return {**flags, **written}


@pytest.mark.parametrize(("name", "launcher", "more", "most_waits"), VARIANTS, ids=named)
def test_the_host_waits_seldom_and_no_number_is_read_too_early(
    name: str, launcher: list[str], more: dict[str, Any], most_waits: int, tmp_path: Path
) -> None:
    flags = SCRIPTS[name].flags(tmp_path / "run", *words(with_folders({**SPARSE, **more}, tmp_path)))
    reports = reports_of(launcher, name, flags, tmp_path / "reports")
    assert [faults(report) for report in reports] == [[]] * processes(launcher)
    assert all(report["updates"]["update"] == 3 for report in reports)  # besides two first ones and the last
    assert max(map(waits_per_update, reports)) <= most_waits, [*map(waits, reports)]
    assert [set(pinned_by_saves(report)) for report in reports] == [{"first"}, set()][: len(reports)]  # not by the save
    assert all(report["collectives"] == reports[0]["collectives"] for report in reports)
    assert [bool(calls) for calls in reports[0]["collectives"]] == [processes(launcher) > 1] * 2


TAMING = {
    "body": "taming", "ch_mult": "1,2,2", "attention_levels": "1", "norm_groups": 4, "without": ["num_layers", "dim"]
}  # fmt: skip
#: Flags that choose a model, an objective or a sampler, with what they need; `without` those that do not go with them.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "train_vae": [{"smooth_l1_loss": None}, {"straight_through": None, "reinmax": None}, {"channels": 4}],
    "train_vqgan": [
        *({"quantizer": name} for name in ("lfq", "bsq", "ibq")),
        {"quantizer": "fsq", "fsq_levels": "4,4,4"},
        {"quantizer": "vq", "vq_gradient": "rotation", "vq_cosine": None, "vq_decay": 0.9},
        {**TAMING, "quantizer": "vq", "codebook_size": 64},
        {**TAMING, "quantizer": "kl", "latent": "mode", "without": [*TAMING["without"], "codebook_size"]},
        {"gan_loss": "bce", "penalty": "zero_centred", "l2_recon_loss": None, "gradient_checkpointing": None},
        {"gan_loss": "hinge_softplus", "precision": "bf16"},
        {"precision": "fp16", "random_flip": None},
        {"discriminator": "maskbit", "discr_dim": 8},
        {**TAMING, **ALIGNED, "quantizer": "kl", "without": [*TAMING["without"], "codebook_size"]},
        {"perceptual": "vgg", "perceptual_weights": write_vgg16, "gram_loss_weight": 1},
        {"perceptual": "resnet50", "perceptual_weights": write_resnet50, "equivariance_weight": 0.5},
    ],
    "train_tokenizer": [
        *({"pad_mode": mode} for mode in ("constant", "replicate", "reflect")),
        *({"quantizer": name} for name in ("lfq", "bsq", "ibq")),
        {"quantizer": "fsq", "fsq_levels": "4,4,4"},
        {"norm": "rms", "patch_size": 2, "patch": "haar", "separate_first_frame": None, "gradient_checkpointing": None},
        {"quantizer": "vq", "vq_gradient": "rotation", "gan_loss": "bce", "l1_recon_loss": None, "use_lion": None},
        {"gan_loss": "hinge_softplus", "penalty": "zero_centred"},
        {"precision": "bf16", "discriminator": "maskbit", "discr_dim": 8, **ALIGNED},
    ],
    "train_mulan": [
        *({"loss": loss, "hierarchical_layers": 1} for loss in ("decoupled", "softmax", "sigmoid")),
        {"layout": "musiclm", "win_length": 96, "hierarchical_layers": 1, "without": ["n_mels"]},
        {"spectrogram": "power", "without": ["n_mels"]},
        {"attn_dropout": 0.2, "ff_dropout": 0.1, "gradient_checkpointing": None},
        {
            "spectrogram_padding": "reflect",
            "duplicates": "negatives",
            "hierarchical_layers": 1,
            "hierarchical_spacing": "even",
        },
        {"precision": "bf16"},
    ],
    "train_decoder": [
        *({"noise_schedule": name} for name in ("cosine", "linear", "sigmoid")),
        {"noise_schedule": "flow", "objective": "flow", "time_sampling": "logit_normal"},
        *({"objective": name, "loss_weight": weight} for name, weight in {"x_start": "p2", "v": "min_snr"}.items()),
        *({"sampler": name, "lowres_condition": how} for name, how in {"ddim": "noise", "ddpm": "blur"}.items()),
        {"switches": ["coordinates", "sparse_attn"], "learned_variance": [0, 1], "gradient_checkpointing": None},
        {"condition_on": "image,text", "precision": "bf16"},
    ],
}


@pytest.mark.long  # minutes
@pytest.mark.parametrize(("name", "more"), [(name, more) for name in OPTIONS for more in OPTIONS[name]], ids=named)
def test_every_option_trains_with_deterministic_kernels(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    """The device refuses what CUDA's kernels refuse."""
    gan = {"discr_start_step": 2, "apply_grad_penalty_every": 2} if "discr_layers" in SCRIPTS[name].tiny else {}
    chosen = {**gan, **more, "max_steps": 4, "sample_every_n_steps": 4, "deterministic": None}
    without = chosen.pop("without", ())
    flags = SCRIPTS[name].flags(tmp_path / "run", *words(with_folders(chosen, tmp_path)), without=without)
    (report,) = reports_of(ONE, name, flags, tmp_path / "reports")
    assert faults(report) == []


BATCHES = 60  # or more, of each command below; fewer waits bring a model to the device
IMAGES, FILMS = ["--image_folder", "demo:shapes:120", "--batch_size", "2"], ["--video_folder", "demo:moving:20"]
CLIPS = ["--video_folder", "demo:moving:60", "--num_frames", "3", "--batch_size", "1"]
CODES = ["--decode", "codes", "--format", "png"]
DECODED = {"images": "codes", "films": "codes of films"}
#: Commands that train nothing, by what they make: script, model, flags, and the files that a CPU makes, too.
TOOLS: dict[str, tuple[str, Callable[[], Any], list[str], str]] = {
    "codes": ("encode", vqgan, IMAGES, "*.safetensors"),
    "latents": ("encode", autoencoder, [*IMAGES, "--with_flip", "--latent", "moments"], "*.safetensors"),
    "codes of films": ("encode", video_tokenizer, [*FILMS, "--keep_aspect"], "*.safetensors"),
    "latents of films": ("encode", film_autoencoder, [*FILMS, "--latent", "sample"], "*.safetensors"),
    "images": ("encode", vqgan, [*CODES, "--batch_size", "2"], "*.png"),
    "films": ("encode", video_tokenizer, CODES, "*.png"),
    "embeddings": ("embed", mulan, ["--audio", "demo:tones:120", "--batch_size", "2"], "*.safetensors"),
    "measures": ("evaluate", vqgan, IMAGES, "*.png"),
    "measures of films": ("evaluate", video_tokenizer, CLIPS, "*.png"),
}


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The folder in which all commands have written into cpu/NAME/made and device/NAME/made, and what the device has
    reported."""
    folder = tmp_path_factory.mktemp("tools")
    commands: dict[str, dict[str, list[str]]] = {"cpu": {}, "device": {}}
    for name, (script, model, more, _) in TOOLS.items():
        flags = ["--model", str(saved(folder / "models" / name, model())), "--num_workers", "0", *more]
        if "--decode" in more:
            flags[flags.index("codes")] = str(folder / "cpu" / DECODED[name] / "made")
        for where in commands:
            (folder / where / name).mkdir(parents=True)
            commands[where][name] = [f"{script}.py", *flags, "--output", str(folder / where / name / "made")]
    for where, devices in {"cpu": 0, "device": 1}.items():
        (folder / f"{where}.json").write_text(json.dumps(commands[where]))
        (reports := folder / f"reports of {where}").mkdir()
        of_device = {"PRETEND_DEVICES": str(devices), "PRETEND_REPORTS": str(reports)}
        flags = ["--commands", str(folder / f"{where}.json")]
        code, output = end_of(Forked("tests.pretend.run", flags, folder / f"{where}.log", **of_device))
        assert code == 0, output
    return folder, json.loads((folder / "reports of device" / "0.json").read_text())["reports"]


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_waits_at_no_batch_and_makes_what_it_makes_on_a_cpu(name: str, tools: tuple[Path, list[Any]]) -> None:
    folder, reports = tools
    own = [each for each in reports if each["phase"] == name]
    waited = [each for each in own if each["kind"] in WAITS]
    assert own and not faults({"reports": own}) and sum(each["times"] for each in waited) < BATCHES, waited
    of_cpu, of_device = (
        {path.relative_to(folder / where): path.read_bytes() for path in (folder / where / name).rglob(TOOLS[name][-1])}
        for where in ("cpu", "device")
    )
    assert of_cpu and of_cpu == of_device


def test_a_run_that_was_killed_goes_on_with_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    more = words({**VQGAN.all_parts, "max_steps": 16, "save_every_n_steps": 2, "deterministic": None})
    reports_of(ONE, "train_vqgan", VQGAN.flags(tmp_path / "whole", *more), tmp_path / "of_whole")
    flags = VQGAN.flags(tmp_path / "killed", *more)
    process = start(ONE, ["train_vqgan.py", *flags], tmp_path / "of_killed")
    assert isinstance(process, Forked)
    process.wait_until(lambda: any((tmp_path / "killed").glob("checkpoints/step_*")))
    process.kill()
    reports_of(ONE, "train_vqgan", flags, tmp_path / "of_resumed")
    whole, killed = (load_file(tmp_path / run / "model" / "model.safetensors") for run in ("whole", "killed"))
    assert whole.keys() == killed.keys() and all(whole[name].equal(killed[name]) for name in whole)
