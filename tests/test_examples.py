"""The files of examples/ are read by what they are for, and their commands train."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.launching import ENVIRONMENT, free_port
from tests.scripts import ROOT, RUN, VQGAN, lines
from tests.test_docs import commands, parser_of

EXAMPLES = ROOT / "examples"
BIN = Path(sys.executable).parent
UNTIL = 600  # seconds that end a hang


def read(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / name).read_text())


def pods() -> list[dict[str, Any]]:
    roles = read("kubernetes.yaml")["spec"]["pytorchReplicaSpecs"].values()
    return [role["template"]["spec"] for role in roles for _ in range(role["replicas"])]


def of_kubernetes() -> list[str]:
    """The command of each pod."""
    return [" ".join(pod["containers"][0]["command"]) for pod in pods()]


def of_sky() -> list[str]:
    """The command of each node."""
    task = read("sky.yaml")
    return [task["run"]] * task["num_nodes"]


def environment(name: str, rank: int, port: int) -> dict[str, str]:
    """What the operator, or SkyPilot, sets on one of two machines with one process each."""
    if name == "sky.yaml":
        return {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
                "SKYPILOT_NUM_GPUS_PER_NODE": "1"}  # fmt: skip
    both = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    own = {"RANK": str(rank), "WORLD_SIZE": "2", "PYTHONUNBUFFERED": "1"}
    torchrun = {"PET_NNODES": "2", "PET_NODE_RANK": str(rank), "PET_NPROC_PER_NODE": "1"}
    return both | own | torchrun | {f"PET_{key}": value for key, value in both.items()}


def tiny(folder: Path, **more: object) -> Path:
    """A config file of a tiny model on the demonstration's data."""
    values = {**RUN, **VQGAN.tiny, "image_folder": "demo:shapes:64", "max_steps": 2, **more}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_the_commands_are_ones_that_the_scripts_take(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = read("wandb_sweep.yaml")
    shell = sweep["command"][sweep["command"].index("-c") + 1].removeprefix("exec ")
    values = [
        ("learning_rate", 0.001),
        *((name, value) for name, value in sweep["parameters"].items() if name == "dim"),
    ]
    flags = " ".join(f"--{name}={value['values'][0] if isinstance(value, dict) else value}" for name, value in values)
    texts = [*of_kubernetes(), *of_sky(), shell.replace('"$@"', f"{flags} --deterministic")]
    for text in texts:
        ((program, arguments),) = commands(text)
        parser_of(program).parse_args(arguments)
    assert sweep["parameters"].keys() == {"learning_rate", "dim", "deterministic"}
    assert len(texts) == 5


def test_a_pod_has_time_to_save_and_memory_for_its_loaders() -> None:
    for pod in pods():
        (container,) = pod["containers"]
        seconds = {variable["name"]: int(variable["value"]) for variable in container["env"]}
        # Kubernetes and torchrun both kill after 30 seconds unless they are told otherwise.
        assert 30 < seconds["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] < pod["terminationGracePeriodSeconds"]
        assert container["name"] == "pytorch", "the operator looks for its port there"
        assert f"WORKDIR {container['workingDir']}" in (ROOT / "Dockerfile").read_text().splitlines()
        kinds = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: kinds[mount["name"]] for mount in container["volumeMounts"]}
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        for flag in ("image_folder", "output_dir"):
            (path,) = (word.partition("=")[2] for word in container["command"] if word.startswith(f"--{flag}="))
            assert any(path.startswith(f"{mount}/") for mount in mounts)


# The second one repeats the first one with other variables.
@pytest.mark.parametrize("name", ["sky.yaml", pytest.param("kubernetes.yaml", marks=pytest.mark.long)])
def test_two_machines_train_with_the_variables_that_their_launcher_sets(name: str, tmp_path: Path) -> None:
    port, config = free_port(), tiny(tmp_path)
    machines = []
    for rank, command in enumerate({"kubernetes.yaml": of_kubernetes, "sky.yaml": of_sky}[name]()):
        changes = {"configs/vqgan/base.yaml": str(config), "/data/photos": "demo:shapes:64",
                   "/runs/vqgan": str(tmp_path / "run"), "29500": str(port)}  # fmt: skip
        for old, new in changes.items():
            command = command.replace(old, new)
        env = {**os.environ, **ENVIRONMENT, **environment(name, rank, port), "PATH": f"{BIN}:{os.environ['PATH']}"}
        machines.append(subprocess.Popen(["bash", "-c", command], cwd=ROOT, env=env))
    assert [machine.wait(UNTIL) for machine in machines] == [0, 0]
    (start,) = lines(tmp_path / "run" / "starts.jsonl")
    assert start["world_size"] == 2
    assert lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 2


@pytest.mark.long  # every night: what a search shows is an example, and no promise of the scripts
def test_a_search_that_is_killed_goes_on_with_the_trial_that_it_had_begun(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    # Updates enough that the first start is not over before it is killed.
    config = tiny(tmp_path, max_steps=30, validate_every_n_steps=10, save_every_n_steps=5)
    folder = tmp_path / "search"
    command = [sys.executable, "examples/optuna_search.py", "--trials", "2", "--folder", str(folder),
               sys.executable, "train_vqgan.py", "--config", str(config)]  # fmt: skip
    environ = {**os.environ, **ENVIRONMENT}
    search, log = subprocess.Popen(command, cwd=ROOT, env=environ), folder / "trial_0" / "metrics.jsonl"
    until = time.monotonic() + UNTIL
    while not log.exists() or len(log.read_text().splitlines()) < 7:
        assert search.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    search.send_signal(signal.SIGKILL)
    search.wait()
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=UNTIL)
    assert done.returncode == 0 and "best: trial_" in done.stdout, done.stderr
    first, second = lines(folder / "trial_0" / "starts.jsonl")
    assert not first.get("step") and second["step"] > 0, "it resumed"
    study = optuna.load_study(study_name="search", storage=f"sqlite:///{folder}/study.db")
    for trial in study.trials:
        rows = lines(folder / f"trial_{trial.number}" / "metrics.jsonl")
        values = {row["step"]: row["valid/psnr"] for row in rows if "valid/psnr" in row}
        assert trial.intermediate_values == values and trial.value == values[30]
        start = json.loads((folder / f"trial_{trial.number}" / "starts.jsonl").read_text().splitlines()[0])
        assert str(trial.params["learning_rate"]) in " ".join(map(str, start["command"]))
    assert len(study.trials) == 2


# Sends SIGTERM when the search has decided to start a trial and its process does not exist yet.
STOP_BEFORE_TRIAL = """
import os, signal, sys
sys.path.insert(0, "examples")
import optuna_search
choose_flags = optuna_search.choose_flags
def stop_and_choose(trial):
    os.kill(os.getpid(), signal.SIGTERM)
    return choose_flags(trial)
optuna_search.choose_flags = stop_and_choose
optuna_search.main()
"""


def test_a_stop_just_before_a_training_starts_reaches_it(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    folder = tmp_path / "search"
    # A training that makes its folder when it is over.
    training = [sys.executable, "-c", "import os, sys, time; time.sleep(5); os.mkdir(sys.argv[-1])"]
    command = [sys.executable, "-c", STOP_BEFORE_TRIAL, "--trials", "1", "--folder", str(folder), *training]
    assert subprocess.run(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, timeout=UNTIL).returncode == 75
    assert not (folder / "trial_0").exists(), "the training was not stopped"
    (trial,) = optuna.load_study(study_name="search", storage=f"sqlite:///{folder}/study.db").trials
    assert trial.state == optuna.trial.TrialState.RUNNING, "the same command goes on with it"


def test_the_search_of_a_mistake_ends_with_its_line(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    command = [sys.executable, "examples/optuna_search.py", "--folder", str(tmp_path / "search"),
               sys.executable, "train_vqgan.py", "--no_such_flag"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
    assert done.returncode == 2 and "--no_such_flag" in done.stderr


def test_ray_starts_a_script_and_shows_a_mistake(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    command = [sys.executable, "examples/ray_train.py", "--workers", "2", "--storage", str(tmp_path / "ray"),
               "train_vqgan.py", "--config", str(tiny(tmp_path)), "--output_dir", str(tmp_path / "run")]  # fmt: skip
    environ = {**os.environ, **ENVIRONMENT, "RAY_USAGE_STATS_ENABLED": "0"}
    for more, code in (["--no_such_flag"], 2), ([], 0):
        assert subprocess.run([*command, *more], cwd=ROOT, env=environ, timeout=UNTIL).returncode == code
    assert lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 2
