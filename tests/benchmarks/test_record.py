"""The record: a row is trained, measured and written once, also after a stop; and the page is what the results give."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

import evaluate
import tandem.training.metrics.fid
from benchmarks import machine, record, record_images, record_page
from tandem.training.run_folder.starts import starts
from tests.scripts import ROOT, write_images
from tests.test_evaluate import SIZE, TinyInception

TINY = f"--image_size {SIZE} --batch_size 4 --epochs 100000 --ema_decay 0.9 --num_workers 0 --log_every_n_steps 1"
SHAPE = "--dim 4 --num_layers 1 --quantizer kl --latent_dim 2 --discr_start_step 1000000 --discr_layers 1"


def evaluate_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let evaluate.py run in this process with 8 features in the place of Inception's 2048, whose covariances take
    longer than all else."""
    start = record.run

    def run(command: Sequence[str], kind: str) -> None:
        if command[0] != "evaluate.py":
            start(command, kind)
        else:
            threads = torch.get_num_threads()
            evaluate.main([*command[1:], "--num_workers", "0"])
            torch.set_num_threads(threads)

    monkeypatch.setattr(record, "run", run)
    monkeypatch.setattr(tandem.training.metrics.fid, "Inception", TinyInception)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a page, no results, and a row of two stages in record.yaml."""
    rows = {
        "small": {
            "machine": "cpu", "text": "a small one",
            "stages": [{"minutes": 0.04, "flags": SHAPE}, {"minutes": 1, "flags": "--train decoder --max_steps 2"}],
        }
    }  # fmt: skip
    for path, text in {
        record.CONFIG: yaml.safe_dump({"flags": TINY, "rows": rows}),
        record.PAGE: f"before\n{record_page.BEGIN}\n{record_page.END}\nafter\n",
    }.items():
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    write_images(tmp_path / "photos", 12)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    cores = os.sched_getaffinity(0)
    yield tmp_path
    os.sched_setaffinity(0, cores)


def start_until_it_trains(*flags: str) -> subprocess.Popen[bytes]:
    """`make record IMAGES=photos/` in this folder, once its first stage has made an update."""
    command = [sys.executable, "-m", "benchmarks.record", "--images", "photos", *flags]
    program = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
    while program.poll() is None and not list(record.RUNS.glob("*/stage_1/metrics.jsonl")):
        time.sleep(0.02)
    return program


@pytest.mark.skipif(machine.cores() < record.CORES, reason="a row of the record takes two cores")
@pytest.mark.parametrize("inception", ["tiny", pytest.param("whole", marks=pytest.mark.long)])
def test_a_row_of_two_stages_goes_on_after_a_stop_and_is_measured_once(
    inception: str, checkout: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if inception == "tiny":
        evaluate_here(monkeypatch)
    first = start_until_it_trains()
    first.send_signal(signal.SIGTERM)
    assert first.wait() == 75
    (stage,) = record.RUNS.glob("*/stage_1")
    assert starts(stage)[0]["ended"].startswith("asked to stop at update")  # and saved it
    assert not record.RESULTS.exists()

    record.main(["--images", "photos"])
    (line,) = record.lines_of(record.RESULTS)
    (folder,) = record.RUNS.iterdir()
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
    text = record.PAGE.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "| a small one | `make record ROWS=small IMAGES=photos/` |" in text

    written = record.RESULTS.read_bytes(), record.PAGE.read_bytes(), sorted(checkout.rglob("*"))
    capfd.readouterr()
    record.main(["--images", "photos"])
    assert "small was measured on" in capfd.readouterr().out
    assert (record.RESULTS.read_bytes(), record.PAGE.read_bytes(), sorted(checkout.rglob("*"))) == written


@pytest.mark.skipif(machine.cores() < record.CORES, reason="a row of the record takes two cores")
@pytest.mark.usefixtures("checkout")
def test_a_training_that_goes_on_alone_after_a_kill_is_not_started_beside_itself(
    capfd: pytest.CaptureFixture[str],
) -> None:
    rehearsal = ["--minutes", "100"]
    first = start_until_it_trains(*rehearsal)
    first.kill()
    assert first.wait() == -signal.SIGKILL
    (stage,) = record.RUNS.glob("*/stage_1")
    holder = (stage / ".lock").read_text().partition(" on ")[0]  # process N
    training = psutil.Process(int(holder.split()[1]))
    try:
        with pytest.raises(SystemExit) as end:
            record.main(["--images", "photos", *rehearsal])
        assert end.value.code == 1
        output = capfd.readouterr().err
        assert f"stage_1 is in use by {holder} on" in output
        assert output.endswith("make record: train_vqgan.py ended with exit code 2; the same command goes on\n")
        assert training.is_running() and len(starts(stage)) == 1
    finally:
        training.terminate()
        training.wait()


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_page_of_the_repository_is_what_its_results_give() -> None:
    page, lines = (ROOT / record.PAGE).read_text(), record.lines_of(ROOT / record.RESULTS)
    assert page.count(record_page.BEGIN) == page.count(record_page.END) == 1
    assert record_page.page_with(page, lines) == page, "run make record"
    assert {line["row"] for line in lines} <= set(yaml.safe_load((ROOT / record.CONFIG).read_text())["rows"])


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
    tables = record_page.tables(lines).split("## ")[1:]
    assert sorted(table.count("| a text |") for table in tables) == [1, 2]
    both = next(table for table in tables if table.count("| a text |") == 2)
    assert both.index("21.00 dB") < both.index("20.00 dB")  # the best first


def test_the_newest_line_of_a_row_on_a_machine_counts() -> None:
    text = record_page.tables(
        [a_line(psnr=25.0), a_line(psnr=24.0, commit="abc-dirty"), a_line(machine={"cpu": "B", "cores": 2})]
    )
    assert "25.00" not in text and "24.00" in text and "20.00" in text
    assert "abc with changes" in text


def test_the_time_of_other_programs_is_without_that_of_ended_children() -> None:
    program = "import time\nwhile time.process_time() < 1: pass\nprint(flush=True)\ninput()"
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores := sorted(all_cores)[:1])
    try:
        before = record.seconds_of_others(cores)
        child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        start, running = time.monotonic(), record.seconds_of_others(cores)
        assert running - before > 0.8  # the system counts in hundredths of a second
        child.communicate(b"\n")
        elapsed = time.monotonic() - start
        assert record.seconds_of_others(cores) - running < elapsed + 0.2 - 0.8  # whatever others did meanwhile
    finally:
        os.sched_setaffinity(0, all_cores)


def test_public_images_are_the_same_each_time_and_their_held_out_photos_are_in_no_training(tmp_path: Path) -> None:
    first, second = (record_images.public_images(tmp_path / name) for name in ("a", "b"))
    assert first.digest == second.digest
    assert len(first.paths) == 168
    names = {
        split: {path.name.split("_")[0] for path in (tmp_path / "a" / split).iterdir()}
        for split in record_images.PHOTOS
    }
    assert names == {
        "train": {"astronaut", "motorcycle", "rocket", "china", "flower"},
        "held_out": {"chelsea", "coffee"},
    }
    (tmp_path / "b" / "train" / "rocket_000_000.bmp").write_bytes(b"another one")
    assert record_images.public_images(tmp_path / "b").digest != first.digest


@pytest.fixture
def rows(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> list[record.Row]:
    """The rows that were measured, all with one result and without a training."""
    rows: list[record.Row] = []

    def measure(row: record.Row, cores: Sequence[int]) -> dict[str, Any]:
        rows.append(row)
        row.folder.mkdir(parents=True, exist_ok=True)
        return a_line(command=row.command)

    monkeypatch.setattr(record, "measure", measure)
    monkeypatch.setattr(machine, "cores", lambda: record.CORES)
    return rows


def test_a_rehearsal_shares_its_minutes_among_the_stages_and_is_not_shown_on_the_page(
    rows: list[record.Row], capsys: pytest.CaptureFixture[str]
) -> None:
    page = record.PAGE.read_text()
    record.main(["--images", "photos", "--minutes", "0.52"])
    assert [minutes for minutes, _ in rows[0].stages] == pytest.approx([0.02, 0.5])
    assert "`make record ROWS=small IMAGES=photos/ MINUTES=0.52`" in capsys.readouterr().out
    assert record.PAGE.read_text() == page and not record.RESULTS.exists()
    record.main(["--images", "photos"])
    assert "`make record ROWS=small IMAGES=photos/`" in record.PAGE.read_text() and record.RESULTS.exists()


def test_what_was_measured_is_moved_aside_for_a_fresh_start(rows: list[record.Row]) -> None:
    record.main(["--images", "photos"])
    record.main(["--images", "photos", "--fresh"])
    folder = rows[0].folder
    assert sorted(record.RUNS.iterdir()) == [folder, folder.with_name(f"{folder.name}.old-1")]


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
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        record.main(flags)
    assert end.value.code == 2
    assert capsys.readouterr().err == f"make record: error: {message}\n"


def test_rows_for_a_gpu_are_left_out_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(machine, "gpus", lambda: 0)
    monkeypatch.setattr(machine, "cores", lambda: 2)
    args = argparse.Namespace(images=write_images(tmp_path / "photos", 2), rows=None, minutes=None, inception="")
    assert [row.name for row in record.rows_of(args)] == ["two_stages", "one_stage"]
    assert capsys.readouterr().err == "two_stages_gpu is not run: PyTorch sees no GPU here\n"
