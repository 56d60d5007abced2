"""What every training script does, from the command line to the files it leaves; tiny models, one process."""

from __future__ import annotations

import importlib
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from tandem.distributed.engines.arithmetic import SkipGuard
from tandem.io.installed import command_of
from tandem.training import loop
from tandem.training.evaluation import Evaluation
from tandem.training.logging import clock, operations
from tandem.training.run import Run
from tandem.training.run_folder.starts import starts
from tests.data.helpers import write_tar
from tests.data.sources.tables import save_to_disk, table, write_parquet
from tests.scripts import (
    ROOT,
    SCRIPTS,
    KilledError,
    Script,
    assert_same_bits,
    assert_same_run,
    checkpoint,
    files,
    kill,
    killed,
    lines,
    metrics,
    names,
    shared_state,
    words,
)

EVERY_UPDATE = ("--validate_every_n_steps", "1", "--sample_every_n_steps", "1", "--save_every_n_steps", "1")


@pytest.fixture(scope="module", params=SCRIPTS.values(), ids=str)
def script(request: pytest.FixtureRequest) -> Script:
    found: Script = request.param
    return found


def of(*names: str) -> pytest.MarkDecorator:
    """Of these scripts alone: what the test shows is code that all scripts share."""
    return pytest.mark.parametrize("script", [SCRIPTS[f"train_{name}"] for name in names], ids=str, indirect=True)


def with_scripts(name: str, values: Sequence[Any], *scripts: str) -> pytest.MarkDecorator:
    """The first value with every script, and all values with these ones; `make test-all` has every pair."""
    kept = {f"train_{each}" for each in scripts}
    pairs = [
        pytest.param(script, value, id=f"{script}-{_named(value)}", marks=() if is_kept else pytest.mark.long)
        for script in SCRIPTS.values()
        for number, value in enumerate(values)
        for is_kept in [number == 0 or script.name in kept]
    ]
    return pytest.mark.parametrize(("script", name), pairs, indirect=["script"])


def _named(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else getattr(value, "__name__", str(value))


@pytest.fixture(scope="module")
def finished(script: Script, run_of_eight: Callable[[Script], Path]) -> Path:
    return run_of_eight(script)


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """The finished run, to be changed."""
    return Path(shutil.copytree(finished, tmp_path / "copied", symlinks=True))


def pictures(run: Path) -> list[str]:
    """The pictures of a run; films lie beside those of videos."""
    return [name for name in names(run / "samples") if name.endswith(".png")]


def test_all_scripts_are_tested() -> None:
    assert {path.stem for path in ROOT.glob("train_*.py")} == set(SCRIPTS)


# Arguments.


def test_without_data_the_demonstration_runs_and_is_announced(script: Script) -> None:
    flag, name, demonstration = script.data.flag, script.configs.name, os.path.relpath(script.configs / "demo.yaml")
    parse = partial(script.module.build_parser().parse, demonstration=script.module.DEMO_CONFIG)
    args = parse([])
    assert getattr(args, flag).startswith(script.data.demonstration) and args.output_dir == f"runs/{name}-demo"
    assert demonstration in args.config_note
    args = parse([f"--{flag}", "data"])
    assert (getattr(args, flag), args.output_dir, args.config_note) == ("data", f"runs/{name}", None)
    config = str(script.configs / "base.yaml")
    assert config in parse(["--config", config, f"--{flag}", "data"]).config_note


def test_who_has_a_run_in_mind_and_forgets_its_data_is_told_and_gets_no_demonstration(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every configuration but the demonstration's leaves the data to its user."""
    flag, demonstration = f"--{script.data.flag}", script.data.demonstration
    own, named = tmp_path / "own.yaml", tmp_path / "named.yaml"
    own.write_text("epochs: 1\ndataset: null\n")
    named.write_text(f"{script.data.flag}: {demonstration}\n")
    parse = partial(script.module.build_parser().parse, demonstration=script.module.DEMO_CONFIG)
    recipes = [path for path in sorted(script.configs.glob("*.yaml")) if path.name != "demo.yaml"]
    starts = [["--config", str(path)] for path in (own, *recipes)]
    starts += [[f"--{name}", "own/"] for name in ("init_from", "valid_folder")]
    starts += [["--image_folder", "photos/"]] if script.name == "train_tokenizer" else []  # of which clips are the data
    for start in starts:
        with pytest.raises(SystemExit) as raised:
            parse(start)
        line = capsys.readouterr().err
        assert raised.value.code == 2 and f"error: {' '.join(start)} alone does not say what to train on" in line
        assert f"give {flag} PATH as well, or {flag} {demonstration}" in line
    assert getattr(parse(["--config", str(own), flag, "data"]), script.data.flag) == "data"
    for path in (named, script.configs / "demo.yaml"):
        assert getattr(parse(["--config", str(path)]), script.data.flag).startswith(demonstration)


# Where a script has them, flags with numbers that no machine has room for, and with numbers that it has no room for
# when they meet.
TOO_LARGE = {
    "num_tokens": 10**12, "image_size": 2**40, "num_workers": 10**9, "batch_size": 10**12, "codebook_size": 10**12,
    "audio_dim": 10**9, "timesteps": 10**12, "epochs": 10**300,
}  # fmt: skip
TOO_LARGE_TOGETHER = {"train_vae": "hidden_dim", "train_vqgan": "discr_dim", "train_tokenizer": "init_dim",
                      "train_decoder": "dim", "train_mulan": "text_dim"}  # fmt: skip


def test_numbers_beyond_any_memory_are_refused_before_any_is_taken(script: Script, tmp_path: Path) -> None:
    known = vars(script.parsed())
    for flag, value in TOO_LARGE.items():
        if flag in known:
            assert f"--{flag}: expected a" in script.refused(tmp_path, f"--{flag}", str(value))
    assert " GB " in script.refused(tmp_path, f"--{TOO_LARGE_TOGETHER[script.name]}", "4000000")


# A run and what it leaves.


def test_config_yaml_alone_repeats_the_run(script: Script, finished: Path, tmp_path: Path) -> None:
    script.main("--config", str(finished / "config.yaml"), "--output_dir", str(tmp_path))
    assert_same_run(tmp_path, finished)


@of("vae")
def test_starts_jsonl_says_what_ran_where_how_and_what_changed(script: Script, copied: Path) -> None:
    (first,) = starts(copied)
    assert first["packages"]["torch"] == torch.__version__.split("+")[0]
    assert {"time", "python", "git_commit", "host", "command"} <= first.keys()
    resolved = {"backend": "single", "world_size": 1, "device": "cpu", "precision": "fp32", "batch_size": 8}
    assert resolved.items() <= first.items() and (first["script"], first["step"]) == (f"{script.name}.py", 0)
    said = script.output_of(copied, *script.eight, "--max_steps", "9", "--num_workers", "1")
    _, second = starts(copied)
    changed = {"max_steps": [8, 9], "num_workers": [0, 1], "output_dir": second["changed"]["output_dir"]}
    assert (second["step"], second["changed"]) == (8, changed)
    lines = [line for line in said.splitlines() if " was " in line and " is now " in line]
    assert len(lines) == 3 and "--max_steps was 8 and is now 9" in lines and "--num_workers was 0 and is now 1" in lines


@of("vae")
def test_seconds_add_up_over_all_starts(script: Script, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        hours = itertools.count()
        patch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: 3600.0 * next(hours)))
        script.train_stopped(1, tmp_path, *script.eight)
    script.train(tmp_path, *script.eight)
    seconds = [line["seconds"] for line in metrics(tmp_path)]
    assert seconds == sorted(seconds) and seconds[0] >= 3600 and seconds[-1] - seconds[1] < 3 * 3600


@of("vae")
@pytest.mark.parametrize(("seconds", "told"), [(1.0, 0), (1.25, 1)], ids=["a tenth", "more"])
def test_validations_that_take_more_than_a_tenth_of_the_time_are_told_once_in_each_start(
    seconds: float, told: int, script: Script, tmp_path: Path
) -> None:
    """An update takes 9 seconds, and a validation two batches for each model."""
    now, batches = [0.0], 2 * 2

    def watch(run: Run, event: str, _: Any) -> None:
        now[0] += {"updated": 9.0, "evaluation": seconds / batches}.get(event, 0.0)

    said = [*script.eight, "--validate_every_n_steps", "1", "--sample_every_n_steps", "0"]
    with pytest.MonkeyPatch.context() as patch, Run.watched(watch):
        for module in (clock, loop):
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
        script.train_stopped(3, tmp_path, *said)
        texts = [script.output_of(tmp_path, *said), script.output_of(tmp_path, *said, "--max_steps", "9")]
    lines_told = [[line for line in text.splitlines() if "of the time" in line] for text in texts]
    assert [len(each) for each in lines_told] == [told, 0], "the one update of the last start has no validation before"
    for line in lines_told[0]:
        assert (
            line == "validations take 12% of the time (--valid_samples 13, --validate_every_n_steps 1): lower the "
            "first or raise the second"
        )


def test_the_first_lines_say_model_and_data_and_the_last_ones_what_there_is_and_what_to_do_next(
    script: Script, tmp_path: Path
) -> None:
    said = script.output_of(tmp_path, "--max_steps", "1", "--valid_fraction", "0.02").splitlines()
    (of_model,) = (line for line in said if " parameters" in line)
    model = script.model.from_pretrained(tmp_path / "model")
    if script.name != "train_decoder":  # its Unets are counted one by one
        assert f"{sum(p.numel() for p in model.parameters()):,}" in of_model
    (of_data,) = (line for line in said if line.startswith(f"{script.data.demonstration}:64: "))
    # A batch is the least for a validation; 2 are asked for.
    assert [number for number in ("56", "8", "0.02", "1") if number not in re.findall(r"[\d.]+", of_data)] == []
    assert "training; the first row of metrics comes after update 1 (--log_every_n_steps 1)" in said
    last = dict(line.split(": ", 1) for line in said[-4:])
    for name, path in {"model": "model", "picture": "samples/step_00000001.png"}.items():
        assert last[name].split(", ")[0] == str(tmp_path / path) and (tmp_path / path).exists()
    assert shlex.split(last["report"]) == [*command_of("report.py"), str(tmp_path)]
    _, program, *flags = shlex.split(last["next"])
    parser = importlib.import_module(program.removesuffix(".py")).build_parser()
    assert parser.parse(flags).model == str(tmp_path / "model")


def test_the_terminal_shows_metrics_that_there_are(script: Script, tmp_path: Path) -> None:
    """A name that a script misspells would be shown nowhere, or as a column of dashes."""
    flags = script.eight if "discr_layers" in script.tiny else []
    said = script.output_of(tmp_path, *flags, "--max_steps", "6", "--validate_every_n_steps", "6").splitlines()
    heading = next(line.split() for line in said if "samples/s" in line)
    rows = [line.split() for line in said if line.startswith("update")]
    assert all(name in metrics(tmp_path)[-1] for name in heading[:-2]) and len(heading) >= 5
    assert [row[1] for row in rows] == [f"{n}/6" for n in range(1, 7)] and "-" not in rows[-1]
    (validation,) = (line.split() for line in said if line.startswith("valid "))
    assert f"valid/{validation[2]}" in metrics(tmp_path)[-1]


def test_a_validation_of_few_samples_ends_with_the_values_of_the_whole_split(script: Script, tmp_path: Path) -> None:
    said = ["--max_steps", "2", "--validate_every_n_steps", "1", "--valid_samples"]
    (_, whole), (first, last) = (metrics(script.train(tmp_path / n, *said, n)) for n in ("0", "8"))
    of_whole = {name: value for name, value in whole.items() if name.startswith("valid/")}
    assert of_whole == {f"valid/{k[12:]}": value for k, value in last.items() if k.startswith("valid_whole/")}
    some = [name for name in of_whole if name.endswith("loss")]
    assert some and all(last[name] != whole[name] for name in some)
    assert first.keys() >= {name for name in last if name.startswith("valid/")}
    assert not [name for name in first if name.startswith("valid_whole/")]


def test_lines_validations_pictures_and_checkpoints_are_where_they_are_asked_for(
    script: Script, finished: Path
) -> None:
    all_metrics = metrics(finished)
    assert [line["step"] for line in all_metrics] == list(range(1, 9))
    for line in all_metrics:
        assert line["samples"] == 8 * line["step"]
        assert line["epoch"] == pytest.approx(line["samples"] / script.samples_per_epoch, abs=1e-6)
        assert line.keys() >= {"loss", "lr", "grad_norm", "samples_per_second", "seconds"}
        assert line["skipped_updates"] == line["bad_samples"] == 0
        assert datetime.fromisoformat(line["time"]).tzinfo is not None
        measured = {key for key in line if key.startswith("valid/")}
        online = {key for key in measured if not key.startswith("valid/ema/")}
        assert bool(online) == (line["step"] % 2 == 0)
        assert measured - online == {key.replace("valid/", "valid/ema/") for key in online}
        assert not online or any(line[key] != line[key.replace("valid/", "valid/ema/")] for key in online)
    evaluations = [line for line in lines(finished / "metrics.jsonl") if "evaluation_seconds" in line]
    assert [line["step"] for line in evaluations] == [2, 4, 6, 8]
    assert all(line.keys().isdisjoint({"loss", "lr"}) for line in evaluations)
    assert pictures(finished) == ["step_00000004.png", "step_00000008.png"]
    assert names(finished / "checkpoints") == ["latest", *(f"step_{step:08d}" for step in (2, 4, 6, 8))]


def test_a_dry_run_says_what_the_run_takes_and_leaves_nothing(script: Script, copied: Path) -> None:
    before = files(copied.parent)
    said = script.output_of(copied, "--dry_run", "--max_steps", "1000000")
    computes = r"an update computes \S+ MFLOP, .*\d of the rate of a matrix product on this CPU \(\S+ .FLOP/s in fp32"
    for cost in (r"samples per second", computes, r"validation \S+ s", r"checkpoint \S+ s", r"\S+ GB", r"\S+ MB"):
        assert re.search(cost, said), said
    assert files(copied.parent) == before


def test_counting_operations_changes_no_bit(
    script: Script, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "FlopCounter", lambda: nullcontext(SimpleNamespace(flops=math.nan)))
    uncounted = script.train(tmp_path, *script.eight)
    assert all("gflop_per_sample" not in line for line in metrics(uncounted))
    for line in metrics(finished):
        rate = line["gflop_per_sample"] * line["samples_per_second"] / 1000
        assert line["tflops_per_second"] == pytest.approx(rate, rel=1e-3) and rate > 0
        assert "mfu" not in line  # of a CPU
    assert_same_run(uncounted, finished)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("train_vae", "--kl_loss_weight"), ("train_vqgan", "--gan_weight_scale"),
     ("train_tokenizer", "--gan_weight_scale")],
)  # fmt: skip
def test_a_collapsed_run_is_told_so_once_with_what_to_try_and_one_that_learns_is_not(
    name: str, remedy: str, tmp_path: Path
) -> None:
    """What the validations find is given here, because where a run ends that is trained into a collapse depends on the
    instructions of the CPU."""
    of_run: list[Evaluation] = []

    def watch(run: Run, event: str, evaluation: Any) -> None:
        of_run.append(evaluation)
        kill()

    for _ in range(2):
        with killed(Run.watched(watch)):
            SCRIPTS[name].train(tmp_path)
    learns = {"lr": 1.0, "valid/psnr": 9.0, "valid/variance_kept": 0.7, "valid/explained_variance": 0.5}
    if name != "train_vae":
        learns["discr_loss"] = 1.9
    collapsed = {**learns, "valid/variance_kept": 1e-4, "valid/explained_variance": -1.0}
    told = [[text for step in range(100, 1000, 100) for text in evaluation.watch(step, line)]
            for evaluation, line in zip(of_run, (learns, collapsed), strict=True)]  # fmt: skip
    assert told[0] == [] and len(told[1]) == 1 and remedy in told[1][0]


@of("vqgan", "mulan")
def test_a_run_imports_no_compiler(script: Script, tmp_path: Path) -> None:
    """PyTorch would import it for the first optimizer, and sympy, a part of it, for a backward pass from a gradient:
    over two seconds of each start."""
    code = (
        "import atexit, runpy, sys; sys.argv = sys.argv[1:]; "
        "atexit.register(lambda: print(sorted({'sympy', 'torch._dynamo'} & sys.modules.keys()))); "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    flags = script.flags(tmp_path / "run", "--max_steps", "2", "--ema_decay", "0.9", "--save_every_n_steps", "1")
    command = [sys.executable, "-c", code, f"{script.name}.py", *flags]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True)
    assert done.stdout == "[]\n"


@of("vae", "vqgan", "decoder")
def test_an_update_that_was_skipped_is_no_update_of_the_average(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first update of all models is skipped: after two, the average holds one."""
    weighted_loss, skipped = SkipGuard.weighted_loss, set[int]()

    def poisoned(guard: SkipGuard, *args: Any) -> torch.Tensor:
        loss = weighted_loss(guard, *args)
        if id(guard) in skipped:
            return loss
        skipped.add(id(guard))
        return loss * torch.nan

    monkeypatch.setattr(SkipGuard, "weighted_loss", poisoned)
    run = script.train(tmp_path, "--max_steps", "2", "--save_every_n_steps", "2", "--ema_decay", "0.99")
    assert metrics(run)[-1]["skipped_updates"] == len(skipped) > 0
    state = json.loads((run / "checkpoints" / "step_00000002" / "state.json").read_text())["parts"]
    assert state["ema"]["updates"] in (1, {"unets.0.": 1, "unets.1.": 1})


@pytest.mark.parametrize(
    ("name", "shape", "lowest"),
    [
        ("train_vqgan", ["--lr_cosine"], 0.1), ("train_vqgan", [], 1.0),
        ("train_tokenizer", ["--lr_schedule", "cosine"], 0.0), ("train_tokenizer", [], 1.0),
        ("train_decoder", ["--lr_cosine"], 0.0), ("train_decoder", [], 1.0),
        ("train_mulan", [], 0.0), ("train_mulan", ["--lr_schedule", "constant"], 1.0),
    ],
)  # fmt: skip
def test_a_run_shorter_than_its_warm_up_reaches_its_rate_and_is_on_its_way_to_the_lowest(
    name: str, shape: list[str], lowest: float, tmp_path: Path
) -> None:
    said = ["--max_steps", "4", "--learning_rate", "1e-4", "--lr_warmup_steps", "1000", *shape]
    rates = [line["lr"] for line in metrics(SCRIPTS[name].train(tmp_path, *said))]
    assert rates == pytest.approx([5e-5, 1e-4, 1e-4, 1e-4 * (1 + lowest) / 2])


@of("vqgan", "tokenizer")
def test_the_entropy_loss_starts_stronger_and_ends_at_its_weight(script: Script, tmp_path: Path) -> None:
    said = ["--entropy_loss_weight", "0.1", "--entropy_anneal_factor", "3", "--entropy_anneal_steps", "2"]
    run = script.train(tmp_path, "--quantizer", "lfq", *said, "--max_steps", "4")
    assert [line["entropy_loss_weight"] for line in metrics(run)] == pytest.approx([0.3, 0.2, 0.1, 0.1])


@of("vqgan", "tokenizer")
@pytest.mark.parametrize(("quantizer", "start", "absent"), [("lfq", 1, set()), ("vq", 2, {"discr_loss"})])
def test_a_metric_that_a_run_cannot_have_is_neither_logged_nor_a_column(
    quantizer: str, start: int, absent: set[str], script: Script, tmp_path: Path
) -> None:
    flags = ["--max_steps", "2", "--quantizer", quantizer, "--discr_start_step", str(start)]
    output = set(script.output_of(tmp_path, *flags).split())
    assert {"codes_used", "discr_loss"} - output == absent == {"discr_loss"} - set(metrics(tmp_path)[-1])
    assert ("entropy_loss_weight" in metrics(tmp_path)[-1]) == (quantizer == "lfq")


def test_the_model_that_is_left_loads_and_is_the_average(script: Script, finished: Path) -> None:
    last = checkpoint(finished, 8)
    left = dict(script.model.from_pretrained(finished / "model").state_dict())
    assert_same_bits(left, {name: last[f"ema: weights/{name}"] for name in left})
    trained = {script.weight(key): t for key, t in last.items() if not key.startswith("ema: ")}
    assert any(not torch.equal(left[name], trained[name]) for name in left)


@of("vqgan", "mulan")
def test_power_averages_are_evaluated_kept_at_every_save_and_the_same_after_an_interruption(
    script: Script, tmp_path: Path
) -> None:
    said = ["--ema_power", "0.1", "0.05", "--max_steps", "4", "--save_every_n_steps", "2"]
    whole, run = script.train(tmp_path / "whole", *said), tmp_path / "run"
    script.train_killed(3, run, *said)
    (run / "snapshots" / "step_00000009_ema_0.1.safetensors").write_bytes(b"of a checkpoint that was damaged since")
    script.train(run, *said)
    assert_same_run(run, whole)
    assert names(run / "snapshots") == [f"step_0000000{n}_ema_{length}.safetensors" for n in (2, 4)
                                        for length in ("0.05", "0.1")]  # fmt: skip
    last, left = checkpoint(run, 4), dict(script.model.from_pretrained(run / "model").state_dict())
    average = {name: last[f"ema: powers/0.1/weights/{name}"] for name in left}
    assert_same_bits(left, average)
    assert_same_bits(load_file(run / "snapshots" / "step_00000004_ema_0.1.safetensors"), average)
    measured = {name.split("/")[1] for name in metrics(run)[-1] if name.startswith("valid/ema")}
    assert measured == {"ema_0.05", "ema_0.1"}


def test_validation_and_pictures_compute_in_the_precision_of_training(script: Script, tmp_path: Path) -> None:
    """Layers, each known by its kind and the shape of its weights, that compute in fp32 without gradients do so in
    training too."""
    rounded: dict[bool, set[Any]] = {True: set(), False: set()}
    exact: dict[bool, set[Any]] = {True: set(), False: set()}

    def watch(layer: torch.nn.Module, inputs: Any) -> None:
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Conv3d | torch.nn.Linear):
            found = rounded if torch.is_autocast_enabled("cpu") else exact
            found[torch.is_grad_enabled()].add((type(layer), layer.weight.shape))

    with torch.nn.modules.module.register_module_forward_pre_hook(watch):
        script.train(tmp_path, "--precision", "bf16", "--max_steps", "1", "--ema_decay", "0.9")
    assert exact[False] <= exact[True] and rounded[False] and rounded[True]
    assert {name for name in metrics(tmp_path)[-1] if name.startswith("valid/")} and pictures(tmp_path)


def test_without_validation_all_samples_are_trained_on_and_nothing_is_validated(script: Script, tmp_path: Path) -> None:
    script.train(tmp_path, "--valid_fraction", "0", "--max_steps", "2", "--validate_every_n_steps", "1")
    for line in metrics(tmp_path):
        assert line["epoch"] == pytest.approx(line["samples"] / 64)
        assert not [key for key in line if key.startswith("valid")]
    assert pictures(tmp_path) == ["step_00000002.png"] and not (tmp_path / "best").exists()


def test_broken_files_are_named_counted_and_replaced_and_an_epoch_is_the_rest_of_them(
    script: Script, tmp_path: Path
) -> None:
    folder = script.data.write(tmp_path / "data", 24)
    (broken,) = (path for path in folder.glob("07.*") if path.suffix not in (".txt", ".npy"))
    broken.write_bytes(broken.read_bytes()[:30])
    said = script.output_of(tmp_path / "run", f"--{script.data.flag}", str(folder), "--epochs", "2",
                            "--valid_fraction", "0")  # fmt: skip
    assert metrics(tmp_path / "run")[-1]["bad_samples"] == 1 and said.count(broken.name) == 1
    assert len(metrics(tmp_path / "run")) == math.ceil(2 * 24 / 8)


def test_another_folder_is_the_validation_split_and_a_resumed_run_keeps_it(script: Script, tmp_path: Path) -> None:
    train, valid = script.data.write(tmp_path / "train", 16), script.data.write(tmp_path / "valid", 9)
    said = [f"--{script.data.flag}", str(train), "--valid_folder", str(valid), *EVERY_UPDATE]
    words = script.flags(tmp_path / "run", *said, without=["valid_fraction"])
    output = script.main(*words, "--max_steps", "2")
    assert re.search(rf"\b16 .*\b9 .* in {valid};", output)
    assert all(any(key.startswith("valid/") for key in line) for line in metrics(tmp_path / "run"))
    assert pictures(tmp_path / "run")
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (config["valid_folder"], config["valid_fraction"]) == (str(valid), 0)
    script.main(*words, "--max_steps", "3")
    assert len(metrics(tmp_path / "run")) == 3
    assert f"--valid_folder {valid}" in script.refused(valid / "run", *said, "--valid_fraction", "0")


@of("vae")
def test_a_run_is_not_resumed_with_another_split(script: Script, copied: Path) -> None:
    was = yaml.safe_load((copied / "config.yaml").read_text())["split_seed"]
    again = [*script.eight, "--max_steps", "9", "--split_seed"]
    assert "--split_seed was not given and is now 77" in script.refused(copied, *again, "77")
    if was is None:  # then it follows from --seed
        assert "split_seed" not in script.refused(copied, *again[:-1], "--seed", "77")
    script.train(copied, *again, str(3 if was is None else was))  # as it was, said in other words: that of --seed


@of("vqgan", "decoder", "tokenizer")
def test_a_distance_of_distributions_of_one_sample_is_refused_before_the_run(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("training.load_inception", "models.i3d_features"):
        monkeypatch.setattr(f"tandem.{name}", lambda *given: None)
    flag = "--fvd_weights" if script.name == "train_tokenizer" else "--fid_weights"
    more = ["--n_evaluation_samples", "1"] if script.name == "train_decoder" else []
    size = ["--batch_size", "1", "--valid_fraction", "0.01", "--valid_samples", "1"]
    line = script.refused(tmp_path, flag, "w.pth", *size, *more)
    remedy = more[0] if more else "--valid_fraction or --valid_samples"
    assert line.endswith(f"{flag} compares at least 2 validation samples, and there is 1: raise {remedy}")
    assert not names(tmp_path)


def test_a_run_does_not_write_its_pictures_into_its_own_data(script: Script, tmp_path: Path) -> None:
    folder = script.data.write(tmp_path / "data", 24)
    before = files(tmp_path)
    for run in (folder, folder / "runs" / "a"):
        assert f"--{script.data.flag} {folder}" in script.refused(run, f"--{script.data.flag}", str(folder))
        assert files(tmp_path) == before


# Resuming.


@with_scripts("ended", [("killed", 5, 2), ("stopped", 4, 0), ("stopped_in_validation", 3, 0)], "vqgan")
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(
    ended: tuple[str, int, int], script: Script, finished: Path, tmp_path: Path
) -> None:
    """Weights, moments, averages, clock, generators, the best model and every line of the log. Asked to stop at an
    update without a validation, and within one."""
    interrupt, step, workers = ended
    getattr(script, f"train_{interrupt}")(step, tmp_path, *script.eight)
    said = script.output_of(tmp_path, *script.eight, "--num_workers", str(workers))
    assert "resumed from" in said
    assert_same_run(tmp_path, finished)


@of("vae")  # the schedules of others know how long the run is
def test_an_extended_run_killed_before_its_model_was_written_does_not_keep_the_old_one(
    script: Script, tmp_path: Path
) -> None:
    save = script.model.save_pretrained

    def save_killed(model: Any, folder: Path) -> None:
        save(model, folder) if "best" in folder.name else kill()

    run, said = tmp_path / "run", ["--ema_decay", "0.9", "--validate_every_n_steps", "2", "--sample_every_n_steps", "2"]
    script.train(tmp_path / "whole", *said, "--max_steps", "4")
    script.train(run, *said, "--max_steps", "2")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(script.model, "save_pretrained", save_killed)
        script.train(run, *said, "--max_steps", "4")
    script.train(run, *said, "--max_steps", "4")
    assert_same_run(run, tmp_path / "whole")


def test_a_finished_run_says_so_and_how_to_extend_it_asks_nothing_and_changes_nothing(
    script: Script, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of how it was trained stays as well."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: pytest.fail("a folder was deleted"))
    before = files(copied)
    said = script.output_of(copied, *script.eight, "--learning_rate", "0.5")
    assert "finished:" not in said and str(copied / "model") in said and "--max_steps" in said
    assert files(copied) == before


# Files that are written after the last checkpoint, the last one first: another file of the model says that it is whole.
@of("vae", "mulan")
@pytest.mark.parametrize("lost", [["model/*", "*.pt"], ["model/config.json", "model/training.json"]], ids=str)
def test_a_run_killed_after_training_writes_its_model_at_the_next_start(
    lost: list[str], script: Script, copied: Path
) -> None:
    before = files(copied)
    for path in {path for pattern in lost for path in copied.glob(pattern)}:
        path.unlink()
    output = script.output_of(copied, *script.eight)
    assert "finished:" in output and "first row" not in output
    of_this_start = ("config.yaml", "starts.jsonl")
    assert {**files(copied), **{name: before[name] for name in of_this_start}} == before


def test_another_model_is_refused_on_resume_by_the_name_of_its_flag(script: Script, copied: Path) -> None:
    before = files(copied)
    for flag, (was, now) in script.other_models.items():
        line = script.refused(copied, *script.eight, "--max_steps", "9", f"--{flag}", str(now))
        # Nothing else stands there: a flag that takes its default from this one is not said as well.
        assert f"--{flag} was {was} and is now {now};" in line and line.count(" is now ") == 1
    assert files(copied) == before


# Starting from tandem.weights.load weights.


def test_training_starts_from_the_weights_of_another_run(script: Script, finished: Path, tmp_path: Path) -> None:
    source = finished / "checkpoints" / "step_00000008"
    script.train(tmp_path, *script.eight, "--init_from", str(source), "--learning_rate", "1e-30", "--max_steps", "1")
    ours, theirs = (
        dict(script.model.from_pretrained(run / "model").named_parameters()) for run in (tmp_path, finished)
    )
    torch.testing.assert_close(ours, theirs)


def test_runs_and_weights_of_another_script_are_refused_by_its_name(
    script: Script, finished: Path, copied: Path, tmp_path: Path
) -> None:
    other, before = next(other for other in SCRIPTS.values() if other is not script), files(copied)
    assert f"{script.name}.py" in other.refused(copied).removeprefix(other.name) and files(copied) == before
    line = other.refused(tmp_path / "run", "--init_from", str(finished))
    kind, expected = script.model.__name__, other.model.__name__
    assert str(finished) in line and f" {kind} of {script.name}.py" in line and expected in line


def test_weights_of_another_model_are_refused_by_what_differs(script: Script, finished: Path, tmp_path: Path) -> None:
    for flag, (was, now) in script.other_models.items():
        for source in (finished / "model", finished / "checkpoints" / "step_00000008"):
            line = script.refused(tmp_path, *script.eight, "--init_from", str(source), f"--{flag}", str(now))
            if flag.startswith("discr_"):
                assert f"the discriminator of {source} needs" in line and f" --{flag} {was}" in line
            else:
                assert line.endswith(f"the weights in {source} are of another model; they need --{flag} {was}")


@with_scripts("become", ["deleted", "another model"], "vae", "vqgan")
def test_a_resumed_run_keeps_its_shape_and_origin_whatever_the_model_that_it_began_from_has_become(
    become: str, script: Script, finished: Path, tmp_path: Path
) -> None:
    source, run = Path(shutil.copytree(finished / "model", tmp_path / "source")), tmp_path / "run"
    own = words({flag: value for flag, value in script.tiny.items() if flag.startswith("discr_")})
    whole = script.start_from(source, tmp_path / "whole", *own, "--max_steps", "2")
    script.start_from(source, run, *own)
    shutil.rmtree(source)
    if become == "another model":
        flag, (_, other) = next(iter(script.other_models.items()))
        script.train(tmp_path / "other", f"--{flag}", str(other), "--max_steps", "1")
        shutil.move(tmp_path / "other" / "model", source)
    script.start_from(source, run, *own, "--max_steps", "2")
    assert_same_bits(shared_state(run), shared_state(whole))
    assert yaml.safe_load((run / "config.yaml").read_text())["init_from"] == str(source)
    assert lines(run / "starts.jsonl")[-1]["changed"] == {"max_steps": [1, 2]}
    if become == "deleted":
        assert str(source) in script.refused(tmp_path / "new", "--init_from", str(source)), "a new run needs it"


def test_a_model_to_start_from_that_a_resumed_run_does_not_read_is_said(
    script: Script, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.train(copied, *script.eight, "--max_steps", "9", "--init_from", str(tmp_path / "nowhere"))
    said = capsys.readouterr().out
    assert f"--init_from {tmp_path / 'nowhere'} is not read: the run in {copied} began without --init_from" in said
    assert yaml.safe_load((copied / "config.yaml").read_text())["init_from"] is None


# What a checkpoint says of its models.


TOOLS = {
    **dict.fromkeys(("train_vae", "train_vqgan"), ("encode", "--image_folder", "demo:shapes:8")),
    "train_tokenizer": ("encode", "--video_folder", "demo:moving:4"),
    "train_mulan": ("embed", "--audio", "demo:tones:8"),
    "train_decoder": ("sample", "--prompts", "a red circle on the left", "--sample_timesteps", "2"),
}


@pytest.mark.parametrize("content", [None, "colour: red\n"], ids=["without a config.yaml", "with an unknown key in it"])
def test_a_tool_takes_a_run_whatever_has_become_of_its_configuration(
    script: Script, finished: Path, content: str | None, tmp_path: Path
) -> None:
    """It goes on in the folder that it filled with the model's own, so it knows that the two are one model."""
    shutil.copytree(finished / "checkpoints", tmp_path / "run" / "checkpoints")
    if content is not None:
        (tmp_path / "run" / "config.yaml").write_text((finished / "config.yaml").read_text() + content)
    tool, *said = TOOLS[script.name]
    found = []
    for model in (finished / "model", tmp_path / "run"):
        importlib.import_module(tool).main(
            ["--model", str(model), *said, "--num_workers", "0", "--output", str(tmp_path / "out")]
        )
        found.append(files(tmp_path / "out"))
    assert found[0] == found[1]


def test_a_checkpoint_says_the_class_and_the_arguments_of_each_model(script: Script, finished: Path) -> None:
    state = json.loads((finished / "checkpoints" / "step_00000008" / "state.json").read_text())
    first, *others = state["parts"]["models"].values()
    model = script.model.from_pretrained(finished / "model")
    assert first == model.description()
    assert all(of.keys() >= {"model", "dim", "layers"} and "Discriminator" in of["model"] for of in others)


# Mistakes.


def test_a_mistake_gives_one_line(script: Script, tmp_path: Path) -> None:
    data, demonstration = f"--{script.data.flag}", script.data.demonstration
    for said, text in (
        (f"{data} nowhere", "nowhere"), (f"{data} {demonstration}:10", "too few"),
        ("--init_from nowhere.pt", "nowhere.pt"), ("--batch_size 7 --grad_accum_steps 2", "7 /"),
        ("--lerning_rate 1", "did you mean --learning_rate?"),
    ):  # fmt: skip
        assert text in script.refused(tmp_path, *said.split()), said


# Kinds of data that every script takes.

OWN_DATASET = """
import numpy as np
import torch

class Items:
    def __init__(self, args):
        self.kind = args.script

    def __len__(self):
        return 64

    def __getitem__(self, index):
        noise = torch.rand(5, 3, 20, 20)  # equal whenever the item is asked for
        image = (noise[0] * 255).byte().numpy()
        if self.kind == "train_mulan.py":
            return 0.3 * np.sin(np.arange(6000) * 0.01 * (1 + index)), 8000, [f"sound {index}", "a sound"]
        if self.kind == "train_tokenizer.py":
            return noise
        return {"image": image, "caption": f"image {index}", "image_embed": np.ones(6) + index}

def texts(args):
    return ["a text"] * 64
"""


@pytest.fixture
def own_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of an own dataset, in the current folder, and of the demonstration that it replaces."""
    (tmp_path / "own_items_of_a_script.py").write_text(OWN_DATASET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return ["--dataset", "own_items_of_a_script:Items"]


def test_an_own_dataset_is_trained_on_and_an_interrupted_run_goes_on_with_the_same_bits(
    script: Script, own_dataset: list[str], tmp_path: Path
) -> None:
    def train(name: str, *more: str) -> Path:
        folder = tmp_path / name
        flags = [*own_dataset, "--max_steps", "3", "--save_every_n_steps", "1", "--seed", "3", *more]
        script.main(*script.flags(folder, *flags, without=[script.data.flag]))
        return folder

    whole = train("whole", "--num_workers", "1")
    with killed(script.in_update(2, kill)):
        train("cut")
    train("cut")
    assert_same_run(tmp_path / "cut", whole)
    assert script.arguments_of(whole).dataset == own_dataset[1]
    other = script.parsed("--config", str(whole / "config.yaml"), f"--{script.data.flag}", script.data.demonstration)
    assert other.dataset is None, "the command line chooses"


@of("vae")
@pytest.mark.usefixtures("own_dataset")
def test_an_item_that_is_no_sample_is_one_line(script: Script, tmp_path: Path) -> None:
    said = ["--dataset", "own_items_of_a_script:texts", "--num_workers", "1"]
    line = script.refused_alone(*script.flags(tmp_path, *said, without=[script.data.flag]))
    assert "own_items_of_a_script:texts[" in line and "'a text'" in line


def write_tars(folder: Path, samples: dict[str, dict[str, bytes]]) -> None:
    for number in range(2):
        chosen = {key: {**samples[key], "json": b'{"caption": "a text"}'} for key in sorted(samples)[number::2]}
        write_tar(folder / f"{number:05d}.tar", chosen)


def as_table(samples: dict[str, dict[str, bytes]]) -> Any:
    rows: dict[str, list[Any]] = {"text": ["a text"] * len(samples)}
    for ending, column in (("png", "image"), ("wav", "audio"), ("gif", "video")):
        cells = [{"bytes": members[ending], "path": key} for key, members in samples.items() if ending in members]
        rows.update({column: cells} if cells else {})
    embeddings = [np.load(io.BytesIO(each["npy"])).tolist() for each in samples.values() if "npy" in each]
    return table({**rows, **({"image_embed": embeddings} if embeddings else {})})


@with_scripts("write", [write_tars, save_to_disk, write_parquet], "vae")
def test_tars_and_tables_are_trained_on(script: Script, write: Callable[..., Any], tmp_path: Path) -> None:
    samples: dict[str, dict[str, bytes]] = {}
    for path in sorted(script.data.write(tmp_path / "files", 24).iterdir()):
        samples.setdefault(path.stem, {})[path.suffix[1:]] = path.read_bytes()
    write(tmp_path / "store", samples if write is write_tars else as_table(samples))
    said = script.output_of(tmp_path / "run", f"--{script.data.flag}", str(tmp_path / "store"), "--max_steps", "2")
    assert f"{tmp_path / 'store'}: " in said and metrics(tmp_path / "run")[-1]["bad_samples"] == 0
    # Only a sound has captions in a .json, and then a .txt for those that have none there.
    is_counted = write is write_tars and script.name != "train_mulan"
    assert ("24 members are skipped in 2 tars" in said) == ("skipped in" in said) == is_counted


@pytest.mark.usefixtures("own_dataset")
def test_the_example_of_the_documents_trains(tmp_path: Path) -> None:
    script = SCRIPTS["train_vae"]
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL)
    (tmp_path / "photos_of_the_documents.py").write_text(code)
    (tmp_path / "photos").mkdir()
    for path in script.data.write(tmp_path / "files", 24).iterdir():
        Image.open(path).save(tmp_path / "photos" / f"{path.stem}.jpg")
    said = ["--dataset", "photos_of_the_documents:Photos", "--max_steps", "2", "--num_workers", "1"]
    script.main(*script.flags(tmp_path / "run", *said, without=[script.data.flag]))
    assert metrics(tmp_path / "run")[-1]["bad_samples"] == 0
