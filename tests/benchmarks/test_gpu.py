"""`python -m benchmarks.gpu`: its rows, its time, and two parts at toy size with real processes."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import data.feed
import train_vae
from benchmarks import jobs
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import checks, worker
from benchmarks.gpu import speed as speed_part
from benchmarks.gpu.rows import NEEDS_A_GPU, NoTime, Plan, Row, tables
from benchmarks.jobs import JobFailed, reason
from benchmarks.report import write_json
from tests.scripts import SCRIPTS

DONE = {"samples_per_second": [8.0, 2.0, 4.0], "memory_bytes": {"before": 0, "start": 2**20, "updates": 2**21}}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(True, False, ["train_vae"], ["fp32"], tmp_path).until("speed", time.monotonic() + 3600)


def compared(plan: Plan, monkeypatch: pytest.MonkeyPatch, has_gpu: bool, result: Any) -> dict[str, Row]:
    """Rows of the part speed by name, where jobs give this result, or raise it."""

    def measure(plan: Plan, sides: Sequence[str], flags: Sequence[str], script: str, **numbers: Any) -> Any:
        if isinstance(result, Exception):
            raise result
        return {side: result[side] for side in sides}

    monkeypatch.setattr(Plan, "measure", measure)
    found = speed_part.speed(Plan(**{**vars(plan), "has_gpu": has_gpu, "precisions": ["bf16", "tf32"]}))
    return {row.name: row for row in found}


def test_a_table_has_the_columns_of_all_rows_of_its_part() -> None:
    rows = [Row("resume", "a", {"x": 1.0, "y": "yes"}), Row("resume", "b", {"z": 1234.5}, "a | b"), Row("waits", "c")]
    assert tables(rows).splitlines() == [
        "", "## The same bits after a kill", "", "|  | x | y | z | note |", "|---|---|---|---|---|",
        "| a | 1 | yes |  |  |", "| b |  |  | 1234 | a \\| b |",
        "", "## Waits of the host per update", "", "|  |", "|---|", "| c |",
    ]  # fmt: skip


def test_numbers_that_json_lacks_are_written_as_text(tmp_path: Path) -> None:
    row = Row("zero", "a", {"x": float("nan"), "y": float("inf"), "z": 0.5})
    write_json(tmp_path / "gpu.json", {}, [row])
    (written,) = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert written["values"] == {"x": "nan", "y": "inf", "z": 0.5} and "| a | nan | inf | 0.5 |" in tables([row])


def test_without_a_gpu_it_ends_with_one_line_and_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--json", str(tmp_path / "gpu.json")])
    assert ended.value.code == 2 and not list(tmp_path.iterdir())
    assert capsys.readouterr().err.splitlines() == [
        "python -m benchmarks.gpu: error: PyTorch sees no GPU here; --scale toy tries everything that a CPU can"
    ]


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--only", "waits,sped"])
    assert ended.value.code == 2 and "there is no 'sped'; there are tests, resume" in capsys.readouterr().err


def test_parts_share_the_time_and_inherit_what_was_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deadlines = {}

    def part(plan: Plan) -> Iterator[Row]:
        deadlines[plan.part] = plan.deadline
        yield plan.row("row")

    monkeypatch.setattr(
        command, "PARTS", {name: (part, s) for name, s in {"tests": 10, "waits": 20, "zero": 30}.items()}
    )
    monkeypatch.setattr(command.time, "monotonic", lambda: 1000.0)
    command.main(["--scale", "toy", "--minutes", "1", "--json", str(tmp_path / "gpu.json")])
    assert deadlines == {"tests": 1010, "waits": 1030, "zero": 1060}


def test_a_part_that_fails_is_a_row_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(error: Exception) -> Callable[[Plan], Iterator[Row]]:
        def part(plan: Plan) -> Iterator[Row]:
            yield plan.row("before", {"x": 1.0})
            raise error

        return part

    errors = {"tests": KeyError("x"), "resume": JobFailed("exit code 3: why"), "waits": NoTime("too late")}
    monkeypatch.setattr(command, "PARTS", {name: (broken(error), 1) for name, error in errors.items()})
    with pytest.raises(SystemExit) as ended:
        command.main(["--scale", "toy", "--json", str(tmp_path / "gpu.json")])
    assert ended.value.code == 1 and "2 of 6 rows are not as they should be" in capsys.readouterr().err
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert [(row["part"], row["note"], row["is_bad"]) for row in rows if not row["values"]] == [
        ("tests", "failed: KeyError: 'x'", True), ("resume", "exit code 3: why", True), ("waits", "too late", False)
    ]  # fmt: skip


def test_a_job_ends_with_its_part_and_is_not_started_after_it(plan: Plan) -> None:
    sleep = ["-c", "import time; time.sleep(3600)"]
    with pytest.raises(NoTime, match=r"ended at its limit of 1 s"):
        plan.job(sleep, at_most=1.0)
    with pytest.raises(NoTime, match="not started"):
        plan.until("speed", time.monotonic()).job(sleep)
    with pytest.raises(JobFailed, match=r"exit code 1: ValueError: no") as failed:
        plan.job(["-c", "raise ValueError('no')"])
    assert not isinstance(failed.value, NoTime)


XML = """<testsuites><testsuite>
<testcase name="test_one_is_two[3]"><failure message="assert 1 == 2&#10;+ where">long</failure></testcase>
<testcase name="test_b"/><testcase name="test_c"><skipped message="needs a GPU"/></testcase>
<testcase name="test_d"><error message="failed on setup"/></testcase></testsuite></testsuites>"""


def test_each_test_is_a_row_though_some_fail(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def job(plan: Plan, command: Sequence[str]) -> str:
        Path(command[-1].removeprefix("--junitxml=")).write_text(XML)
        raise JobFailed("exit code 1: 2 failed")

    monkeypatch.setattr(Plan, "job", job)
    assert [(row.name, row.note, row.is_bad) for row in checks.tests(plan)] == [
        ("one is two[3]", "assert 1 == 2", True), ("b", "", False), ("c", "needs a GPU", False),
        ("d", "failed on setup", True),
    ]  # fmt: skip


def test_a_script_that_fails_is_a_row_beside_the_others(plan: Plan) -> None:
    def work(name: str) -> Row:
        if name == "b":
            raise ValueError("not enough\nvalues")
        return plan.row(name)

    found = list(plan.rows(work, ["a", "b", "c"]))
    assert [row.name for row in found] == ["a", "b", "c"]
    assert (found[1].note, found[1].is_bad) == ("failed: ValueError: not enough values", True)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("a\ntrain_vae.py: error: --x is bad\nsome.ChildFailedError:\n=====\n", "train_vae.py: error: --x is bad"),
        ("Traceback\n  x\nOSError: gone\nat exit\n", "OSError: gone"),
        ("distributed.errors.UserMistake: no\n", "distributed.errors.UserMistake: no"),
        ("one\ntwo\n\n", "two"),
        ("", "it said nothing"),
    ],
)
def test_the_reason_of_a_failed_job_is_its_last_error(output: str, expected: str) -> None:
    assert reason(output) == expected


def test_speed_is_the_median_over_that_of_the_reference(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    slower = {**DONE, "samples_per_second": [2.0]}
    rows = compared(plan, monkeypatch, True, {"script": DONE, "reference": slower})
    names = ["train_vae.py bf16", "train_vae.py tf32", "train_vae.py bf16 --compile", "train_vae.py tf32 --compile"]
    assert list(rows) == names
    assert rows[names[2]].values == {
        "samples/s": 4, "peak MiB": 2, "reference's samples/s": 2, "reference's peak MiB": 2,
        "ratio": 2,
    }  # fmt: skip


@pytest.mark.parametrize(("error", "is_bad"), [(JobFailed("exit code 1: no kernel"), True), (NoTime("late"), False)])
def test_a_comparison_that_fails_is_a_row(
    error: JobFailed, is_bad: bool, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    for row in compared(plan, monkeypatch, True, error).values():
        assert not row.values and (row.note, row.is_bad) == (str(error), is_bad)


def test_on_a_cpu_rows_say_what_needs_a_gpu(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = compared(plan, monkeypatch, False, {"script": DONE, "reference": DONE})
    assert rows["train_vae.py bf16"].values["ratio"] == 1
    assert {rows[name].note for name in ("train_vae.py tf32", "train_vae.py bf16 --compile")} == {NEEDS_A_GPU}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=str)
@pytest.mark.parametrize("flags_of", ["demonstration", "tiny", "large"])
def test_every_script_takes_the_flags_of_its_models(script: Any, flags_of: str, plan: Plan) -> None:
    full = Plan(False, True, plan.scripts, plan.precisions, plan.folder)
    flags = {
        "demonstration": lambda: [*checks.model_flags(script.name, False), "--deterministic"],
        "tiny": lambda: speed_part.model_flags_of(plan, script.name),
        "large": lambda: [*jobs._DATA.get(script.name, jobs._IMAGES), *speed_part.model_flags_of(full, script.name)],
    }[flags_of]()
    args = script.parsed(*flags)
    assert ":" in str(getattr(args, script.data.flag)) and args.batch_size % 2 == 0


def test_a_script_is_measured_beside_its_reference(plan: Plan) -> None:
    values: Any = speed_part._compared(plan, "train_mulan", "bf16").values
    assert list(values) == ["samples/s", "peak MiB", "reference's samples/s", "reference's peak MiB", "ratio"]
    assert min(values.values()) > 0


def test_waits_are_counted_per_update_where_this_repository_causes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plan: Plan
) -> None:
    modes, rate = ["default"], train_vae.learning_rate

    def waits_twice(step: int, args: Any) -> float:
        for _ in range(2 if modes[-1] == "warn" else 0):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        return rate(step, args)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(train_vae, "learning_rate", waits_twice)
    result, stream = tmp_path / "result.jsonl", data.feed.TrainingStream
    flags = [*speed_part.model_flags_of(plan, "train_vae"), *checks._QUIET]
    worker.main(["waits", "--script", "train_vae", "--result", str(result), "--output_dir", str(tmp_path), *flags])
    found = json.loads(result.read_text())
    assert modes[1:] == ["warn", "default"] and data.feed.TrainingStream is stream
    assert found["waits_per_update"] == 2 and list(found["places"].values()) == [2]
    assert re.fullmatch(r"test_gpu\.py:\d+ < train_vae\.py:\d+", *found["places"])


def test_why_a_run_that_was_to_be_killed_failed_is_said(tmp_path: Path) -> None:
    result = tmp_path / "result.jsonl"
    worker.main(["kill", "--script", "train_vae", "--result", str(result), "--output_dir", str(tmp_path),
                 "--image_folder", "demo:shapes", "--image_size", "48"])  # fmt: skip
    found = json.loads(result.read_text())["error"]
    assert found.startswith("the whole run ended with 2 instead of 0: train_vae.py: error: --image_size 48 is not a")


def test_a_resumed_run_with_other_bits_is_found(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    rate = train_vae.learning_rate
    monkeypatch.setattr(train_vae, "learning_rate", lambda *args: rate(*args) * (1 + os.getpid() % 1000 * 1e-3))
    result = tmp_path / "result.jsonl"
    flags = [*checks.model_flags("train_vae", True), *checks._QUIET, "--max_steps", "12", "--save_every_n_steps", "8"]
    worker.main(["kill", "--script", "train_vae", "--result", str(result), "--output_dir", str(tmp_path), *flags])
    found = json.loads(result.read_text())
    assert found["starts"] == [0, 8] and not found["same_bits"]
    assert found["differing"] == ["checkpoints/step_00000012/engine.safetensors", "model/model.safetensors"]


def test_jobs_see_one_gpu(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    say = ["-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
    found = []
    for visible in ("3,1", "", None):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found.append(plan.job(say).strip())
    assert found == ["3", "", "0"]


def test_files_that_differ_are_named_but_not_the_states_of_python_generators(tmp_path: Path) -> None:
    for run, (step, name, content) in itertools.product("ab", [
        ("model", "model", "same"), ("checkpoints/step_00000008", "vae", "{}"),
        ("checkpoints/step_00000020", "vae", "{}"), ("checkpoints/step_00000020", "random", "{}"),
    ]):  # fmt: skip
        path = tmp_path / run / step / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content.format() if content == "same" else run)
    assert worker.different_tensors(tmp_path / "a", tmp_path / "b") == ["checkpoints/step_00000020/vae.safetensors"]
    (tmp_path / "a" / "model" / "model.safetensors").unlink()
    assert len(worker.different_tensors(tmp_path / "a", tmp_path / "b")) == 2


def test_the_toy_size_shows_on_a_cpu_what_it_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "gpu.json"
    command.main(["--scale", "toy", "--minutes", "60", "--only", "tests,resume,waits", "--scripts", "train_vae",
                  "--json", str(results)])  # fmt: skip
    content = json.loads(results.read_text())
    rows = {part: [row for row in content["rows"] if row["part"] == part] for part in ("tests", "resume", "waits")}
    assert (
        content["machine"]["scale"] == "toy"
        and content["machine"]["packages"]["torch"]
        and "cuda" in content["machine"]
    )
    assert len(rows["tests"]) >= 10 and all(
        row["note"] == f"Skipped: {NEEDS_A_GPU}" or row["note"] == NEEDS_A_GPU for row in rows["tests"]
    )
    assert rows["resume"] == [
        {"part": "resume", "name": "train_vae.py", "values": {"the same bits": "yes"}, "note": "", "is_bad": False}
    ]
    assert [row["note"] for row in rows["waits"]] == [NEEDS_A_GPU]
    assert "## The same bits after a kill" in capsys.readouterr().out
