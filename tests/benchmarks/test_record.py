"""The record: a row is trained, measured and written once, also after a stop; and the page is what the results give."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import evaluate
import tandem.training.metrics.fid
from benchmarks import machine, record
from tandem.training.run_folder.starts import starts
from tests.scripts import write_images
from tests.test_evaluate import SIZE, TinyInception

TINY = f"--image_size {SIZE} --batch_size 4 --epochs 100000 --ema_decay 0.9 --num_workers 0 --log_every_n_steps 1"
SHAPE = "--dim 4 --num_layers 1 --quantizer kl --latent_dim 2 --discr_start_step 1000000 --discr_layers 1"


def evaluate_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let evaluate.py run in this process with 8 features in the place of Inception's 2048, whose covariances take
    longer than all else."""
    start = record.run

    def run(command: Sequence[str], environment: Mapping[str, str]) -> None:
        if not command[0].endswith("evaluate.py"):
            start(command, environment)
        else:
            threads = torch.get_num_threads()
            evaluate.main([*command[1:], "--num_workers", "0"])
            torch.set_num_threads(threads)

    monkeypatch.setattr(record, "run", run)
    monkeypatch.setattr(tandem.training.metrics.fid, "Inception", TinyInception)


@pytest.mark.skipif(machine.cores() < record.CORES, reason="a row of the record takes two cores")
@pytest.mark.parametrize("inception", ["tiny", pytest.param("whole", marks=pytest.mark.long)])
def test_a_row_of_two_stages_goes_on_after_a_stop_and_is_measured_once(
    inception: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    if inception == "tiny":
        evaluate_here(monkeypatch)
    rows = {
        "small": {
            "machine": "cpu", "text": "a small one",
            "stages": [{"minutes": 1, "flags": SHAPE}, {"minutes": 1, "flags": "--train decoder --max_steps 2"}],
        }
    }  # fmt: skip
    (tmp_path / "rows.yaml").write_text(yaml.safe_dump({"flags": TINY, "rows": rows}))
    page, results = tmp_path / "page.md", tmp_path / "results.jsonl"
    page.write_text(f"before\n{record.BEGIN}\n{record.END}\nafter\n")
    command = ["--images", str(write_images(tmp_path / "photos", 12)), "--minutes", "0.08"]
    for name, path in {"config": "rows.yaml", "runs": "runs", "results": results.name, "page": page.name}.items():
        command += [f"--{name}", str(tmp_path / path)]

    first = subprocess.Popen([sys.executable, "-m", "benchmarks.record", *command], cwd=record.ROOT)
    while first.poll() is None and not list(tmp_path.glob("runs/*/stage_1/metrics.jsonl")):
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    assert first.wait() == 75
    assert not results.exists()

    record.main(command)
    (line,) = record.lines_of(results)
    (folder,) = (tmp_path / "runs").iterdir()
    first_stage, second_stage = line["stages"]
    assert 2.4 <= first_stage["seconds"] < 60  # 0.04 minutes, and one update more
    assert first_stage["updates"] == metrics_of(folder / "stage_1")[-1]["step"] > 2 == second_stage["updates"]
    assert [len(starts(folder / name)) for name in ("stage_1", "stage_2")] == [2, 1]
    assert "stopped and started again" in line["notes"]
    assert line["psnr"] == metrics_of(folder / "stage_2")[-1]["valid/ema/psnr"]
    measured = json.loads((folder / "evaluation.json").read_text())["models"][str(folder / "stage_2")]
    assert (line["rfid"], line["ifid"]) == (measured["rfid"], measured["ifid"])
    assert (line["held_out"], line["measured"], line["images"]["count"]) == (4, 12, 12)  # a batch is the least
    assert line["machine"]["cores"] == record.CORES
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "| a small one | `make record ROWS=small IMAGES=photos/ MINUTES=0.08` |" in text

    written = results.read_bytes(), page.read_bytes(), sorted(tmp_path.rglob("*"))
    capfd.readouterr()
    record.main(command)
    assert "small was measured on" in capfd.readouterr().out
    assert (results.read_bytes(), page.read_bytes(), sorted(tmp_path.rglob("*"))) == written


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_page_of_the_repository_is_what_its_results_give() -> None:
    page = record.PAGE.read_text()
    assert record.page_with(page, record.lines_of(record.RESULTS)) == page, "run make record"
    rows = yaml.safe_load(record.CONFIG.read_text())["rows"]
    assert {line["row"] for line in record.lines_of(record.RESULTS)} <= set(rows)


def a_line(**values: Any) -> dict[str, Any]:
    return {
        "row": "one", "kind": "cpu", "text": "a text", "minutes": 20, "command": "make record ROWS=one",
        "date": "2026-01-01", "commit": "0123456789", "psnr": 20.0, "rfid": 1.0, "ifid": 2.0, "held_out": 1,
        "measured": 10, "stages": [{"updates": 5}, {"updates": 6}], "images": {"name": "", "count": 10, "sha256": "a"},
        "inception": {"name": "", "sha256": "b"}, "notes": [], "machine": {"cpu": "CPU", "cores": 2, "gpus": []},
        **values,
    }  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        {"images": {"name": "photos/", "count": 10, "sha256": "c"}},
        {"inception": {"name": "published", "sha256": "c"}}, {"minutes": 10},
        {"kind": "gpu", "machine": {"cpu": "CPU", "cores": 2, "gpus": ["GPU"]}},
    ],
)  # fmt: skip
def test_rows_that_cannot_be_compared_are_in_tables_of_their_own(other: dict[str, Any]) -> None:
    lines = [a_line(), a_line(row="two", psnr=21.0), a_line(row="two", **other)]
    tables = record.tables(lines).split("## ")[1:]
    assert sorted(table.count("| a text |") for table in tables) == [1, 2]
    both = next(table for table in tables if table.count("| a text |") == 2)
    assert both.index("21.00 dB") < both.index("20.00 dB")  # the best first


def test_the_newest_line_of_a_row_on_a_machine_counts() -> None:
    text = record.tables(
        [a_line(psnr=25.0), a_line(psnr=24.0, commit="abc-dirty"), a_line(machine={"cpu": "B", "cores": 2})]
    )
    assert "25.00" not in text and "24.00" in text and "20.00" in text
    assert "abc with changes" in text


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system cannot bind processes to cores")
def test_the_time_of_other_programs_is_without_that_of_ended_children() -> None:
    program = "import time\nwhile time.process_time() < 1: pass\nprint(flush=True)\ninput()"
    with record.on_cores(1) as cores:
        before = record.seconds_of_others(cores)
        child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        start, running = time.monotonic(), record.seconds_of_others(cores)
        assert running - before > 0.8  # the system counts in hundredths of a second
        child.communicate(b"\n")
        elapsed = time.monotonic() - start
        assert record.seconds_of_others(cores) - running < elapsed + 0.2 - 0.8  # whatever others did meanwhile


def test_public_images_are_the_same_each_time_and_their_held_out_photos_are_in_no_training(tmp_path: Path) -> None:
    first, second = (record.public_images(tmp_path / name) for name in ("a", "b"))
    assert first.digest == second.digest
    assert len(first.paths) == 168
    names = {split: {path.name.split("_")[0] for path in (tmp_path / "a" / split).iterdir()} for split in record.PHOTOS}
    assert names == {
        "train": {"astronaut", "motorcycle", "rocket", "china", "flower"},
        "held_out": {"chelsea", "coffee"},
    }
    (tmp_path / "b" / "train" / "rocket_000_000.bmp").write_bytes(b"another one")
    assert record.images_of(tmp_path / "b", "").digest != first.digest


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rows", "one,none"], "ROWS: there is no 'one'; there are two_stages, one_stage, two_stages_gpu"),
        (["--minutes", "0"], "MINUTES=0: expected a number above 0"),
        (["--inception", "weights.pth"], "INCEPTION=weights.pth: expected a file of weights, or published"),
        (["--images", "nowhere", "--rows", "one_stage"], "IMAGES=nowhere: expected a folder of images; without IMAGES, "
         "public images are taken"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "cannot_run", lambda kind: "")
    with pytest.raises(SystemExit) as end:
        record.main(flags)
    assert end.value.code == 2
    assert capsys.readouterr().err == f"make record: error: {message}\n"


def test_rows_for_a_gpu_are_left_out_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(record.torch.accelerator, "current_accelerator", lambda check_available: None)
    monkeypatch.setattr(machine, "cores", lambda: 2)
    args = record.build_parser().parse_args(["--images", str(write_images(tmp_path / "photos", 2))])
    assert [row.name for row in record.rows_of(args)] == ["two_stages", "one_stage"]
    assert capsys.readouterr().err == "two_stages_gpu is not run: PyTorch sees no GPU here\n"
