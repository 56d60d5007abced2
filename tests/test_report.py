"""report.py: a page of every kind of run folder, whatever is in it, and one line where there is none."""

from __future__ import annotations

import contextlib
import html
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

import report
from tests.scripts import ROOT, VAE

HOSTILE = "</script><script>document.title='x'</script><img src=x onerror=alert(1)>"

START = {"time": "2026-01-31T12:00:00+00:00", "command": ["train_vae.py", "--image_folder", "my photos/*.tar"],
         "packages": {}, "step": 0, "backend": "single", "world_size": 1, "device": "cpu"}  # fmt: skip


def make(path: Path, lines: list[Any] | None = None, **config: Any) -> Path:
    """A run folder with lines of metrics, settings and one start."""
    path.mkdir(parents=True, exist_ok=True)
    if lines is None:
        lines = [{"step": n, "samples": 8 * n, "loss": 1 / n, "seconds": n / 2} for n in (1, 2, 3)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "config.yaml").write_text(json.dumps({"output_dir": str(path), "seed": 0, **config}))
    (path / "starts.jsonl").write_text(json.dumps(START) + "\n")
    return path


def add_pictures(run: Path, steps: list[int], size: tuple[int, int] = (20, 10)) -> None:
    (run / "samples").mkdir(exist_ok=True)
    for step in steps:
        Image.new("RGB", size, (step % 256, 0, 0)).save(run / "samples" / f"step_{step:08d}.png")


def data_in(path: Path) -> dict[str, Any]:
    """The data in a page, read as a browser does: everything up to the next end of a script."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script', path.read_text(), re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def read(run: Path) -> dict[str, Any]:
    """What the page says of a run."""
    found: dict[str, Any] = report.RunReader(run, "run", 1, report.defaults_of).read()
    return found


def told(*argv: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of report.py in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            report.main([str(each) for each in argv])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue(), err.getvalue()


def test_a_page_stands_in_the_run_folder_and_is_made_again(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    add_pictures(run, [1, 3])
    code, out, err = told(run)
    path = run / "report.html"
    assert (code, err) == (0, "") and str(path) in out
    (first,) = data_in(path)["runs"]
    assert first["curves"]["loss"]["y"] == [1, 0.5, 0.333333] and first["step"] == 3
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": NaN, "other": 1e999, "large": 1.7e308}\n')
    assert told(run)[0] == 0
    (again,) = data_in(path)["runs"]
    assert again["step"] == 4 and [again["curves"][name]["y"][-1] for name in ("loss", "other", "large")] == [
        None, None, 1.7e308]  # fmt: skip


def test_operations_are_costs_with_a_mean_and_a_curve(tmp_path: Path) -> None:
    lines = [{"step": step, "gflop_per_sample": 1.5, "tflops_per_second": step, "mfu": step / 10} for step in (1, 3)]
    run = make(tmp_path / "run", lines)
    found = read(run)
    assert found["costs"]["10^12 operations per second, mean of the lines"] == "2"
    assert found["costs"]["share of the devices' peak (MFU), mean of the lines"] == "0.2"
    assert found["curves"]["mfu"]["y"] == [0.1, 0.3]


def test_the_command_of_a_start_is_one_that_a_shell_takes(tmp_path: Path) -> None:
    (start,) = read(make(tmp_path / "run"))["starts"]
    assert shlex.split(start["command"]) == START["command"]


def test_a_run_without_a_line_yet_misses_nothing_and_a_finished_one_without_its_lines_does(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    assert read(run)["notes"] == ["metrics.jsonl has no line yet"]
    (run / "model").mkdir()
    (run / "model" / "training.json").write_text('{"step": 3}')
    assert read(run)["notes"] == ["metrics.jsonl is missing: no curves"]


def test_settings_that_are_not_the_default_of_the_script_are_known(tmp_path: Path) -> None:
    run = make(tmp_path / "run", learning_rate=0.5, image_folder="demo:shapes", num_images_save=4, no_such_flag=1)
    assert read(run)["chosen"] == [], "its script is not known"
    for script, chosen in {"train_vae.py": ["output_dir", "learning_rate"], "train_no_such.py": []}.items():
        (run / "starts.jsonl").write_text(json.dumps({**START, "script": script}) + "\n")
        assert read(run)["chosen"] == chosen
    args = VAE.parsed("--image_size", "64")
    (run / "config.yaml").write_text(yaml.safe_dump(VAE.module.build_parser().settings(args)))
    (run / "starts.jsonl").write_text(json.dumps({**START, "script": "train_vae.py"}) + "\n")
    assert read(run)["chosen"] == ["image_size"]


def test_metrics_that_are_0_in_all_lines_of_all_runs_stand_apart(tmp_path: Path) -> None:
    lines = [{"step": n, "loss": 1 / n, "bad_samples": 0, "skipped_updates": 0, "late": 0} for n in (1, 2)]
    runs = [make(tmp_path / "a", lines), make(tmp_path / "b", [{**line, "skipped_updates": 1} for line in lines])]
    (runs[1] / "metrics.jsonl").write_text(
        (runs[1] / "metrics.jsonl").read_text() + '{"step": 3, "late": null, "first": 0}\n'
    )
    found = report.read_all([report.RunReader(run, run.name, 1, report.defaults_of) for run in runs])["groups"]
    assert [group["metrics"] for group in found if group["is_folded"]] == [["bad_samples"]]
    assert {metric for group in found for metric in group["metrics"]} == {*lines[0], "first"} - {"step"}


def test_how_each_start_ended_and_what_was_skipped_are_marks_in_the_order_of_updates(tmp_path: Path) -> None:
    counts = {30: 1, 90: 6}
    lines = [
        {"step": n, "skipped_updates": max([0, *(c for at, c in counts.items() if at <= n)])} for n in (10, 30, 90)
    ]
    run = make(tmp_path / "run", [{"loss": 1.0, **line} for line in lines], save_every_n_steps=20)
    starts = [
        {"ended": None}, {"step": 20, "ended": "asked to stop at update 41"},
        {"step": 41, "world_size": 2, "backend": "ddp", "ended": "finished at update 60"},
        {"step": 60, "world_size": 2, "backend": "ddp", "changed": {"max_steps": [60, 90]}}, {"step": "7"},
    ]  # fmt: skip
    (run / "starts.jsonl").write_text("".join(json.dumps({**START, **start}) + "\n" for start in starts))
    assert told(run)[0] == 0
    marks = data_in(run / "report.html")["runs"][0]["marks"]
    assert [(mark["step"], mark["kind"]) for mark in marks] == [
        (20, "killed"), (30, "skipped"), (41, "resumed"), (60, "extended"), (90, "skipped")]  # fmt: skip
    assert "from one process on cpu to ddp on 2 x cpu" in marks[2]["text"] and "5 updates" in marks[4]["text"]


@pytest.mark.parametrize(
    "made", [lambda path: None, Path.mkdir, lambda path: path.write_text("x")], ids=["missing", "empty", "file"]
)
def test_what_is_no_run_is_one_line_and_code_2(made: Any, tmp_path: Path) -> None:
    path, good = tmp_path / "x", make(tmp_path / "good")
    made(path)
    for runs in ([path], [good, path]):
        code, out, err = told(*runs)
        assert (code, out, err.count("\n")) == (2, "", 1) and str(path) in err
    assert not (good / "report.html").exists()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--watch", "--output", "x.html"], "--output"),
        (["--port", "80"], "--port"),
        (["--output", "/dev/null/x.html"], "--output"),
    ],
)
def test_flags_without_effect_are_refused(flags: list[str], named: str, tmp_path: Path) -> None:
    code, out, err = told(make(tmp_path / "run"), *flags)
    assert (code, out, err.count("\n")) == (2, "", 1) and named in err


def test_only_a_report_is_replaced(tmp_path: Path) -> None:
    """Neither a file of the user's, nor what a link leads to, be it a report."""
    run, mine, folder = make(tmp_path / "run"), tmp_path / "mine", tmp_path / "folder"
    mine.write_text("<!doctype html><title>mine</title>")
    folder.mkdir()
    told(run)
    kept = run / "report.html"
    for number, target in enumerate((mine, kept)):
        (tmp_path / f"link{number}").symlink_to(target)
    before = mine.read_text(), kept.read_text()
    for path in (mine, folder, tmp_path / "link0", tmp_path / "link1"):
        code, out, err = told(run, "--output", path)
        assert (code, out, err.count("\n")) == (2, "", 1) and str(path) in err and "--output" in err
    assert (mine.read_text(), kept.read_text()) == before


def test_nothing_of_a_run_becomes_html(tmp_path: Path) -> None:
    run = tmp_path / HOSTILE.replace("/", "") / "r"
    make(run, [{"step": 1, HOSTILE: 1.0, "loss": 2.0}], **{HOSTILE: HOSTILE})
    (run / "samples").mkdir()
    (run / "samples" / f"step_00000001_{HOSTILE.replace('/', '')}.png").write_bytes(b"<script>")
    other = make(tmp_path / "q" / "r")
    assert told(run, other, "--output", tmp_path / "x.html")[0] == 0
    text = (tmp_path / "x.html").read_text()
    assert "<img src=x" not in text and text.count("<script") == 6 and text.count("</script") == 6
    data = data_in(tmp_path / "x.html")
    assert data["runs"][0]["config"][HOSTILE] == HOSTILE and HOSTILE in data["runs"][0]["curves"]
    title = re.search("<title>(.*)</title>", text)
    assert title and html.unescape(title[1]).startswith(data["runs"][0]["name"])


def test_the_page_loads_nothing_and_runs_no_other_script(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    told(run)
    text = (run / "report.html").read_text()
    policy = re.search('Content-Security-Policy" content="([^"]*)"', text)
    assert policy and policy[1].startswith("default-src 'none'; img-src data:;") and "connect-src" not in policy[1]
    assert policy[1].count("sha256-") == 5 and "unsafe-eval" not in policy[1]
    assert not re.findall(r'(?:src|href)="(?!#|data:)', text.split('id="data"')[0])


def test_a_run_of_nothing_but_ruins_still_has_a_page_that_says_what_cannot_be_read(tmp_path: Path) -> None:
    run = make(tmp_path / "run", [])
    (run / "metrics.jsonl").write_bytes(b'\xff\xfe\x00{"step"\n{"step": 1, "loss": 1}\n{"step": 2, "lo')
    (run / "config.yaml").write_text("a: [")
    (run / "starts.jsonl").write_text("{\n")
    (run / "model").mkdir()
    (run / "model" / "training.json").write_text("[]")
    add_pictures(run, [1, 2, 3])
    (run / "samples" / "step_00000002.png").write_bytes(b"no picture")
    (run / "samples" / "step_00000003.png").write_bytes((run / "samples" / "step_00000001.png").read_bytes()[:40])
    (run / "samples" / "step_00000004.png").mkdir()
    code, out, err = told(run)
    assert (code, err) == (0, "") and out.count("\n") == 6
    (found,) = data_in(run / "report.html")["runs"]
    named = ("metrics.jsonl", "metrics.jsonl", "config.yaml", "starts.jsonl", "3 of 4")
    assert all(name in note for name, note in zip(named, found["notes"], strict=False))
    assert found["curves"]["loss"]["y"] == [1]


def test_pictures_of_several_models_and_their_bytes_are_kept_and_huge_ones_scaled(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    add_pictures(run, [1, 2, 3, 4])
    Image.effect_noise((2000, 500), 90).save(run / "samples" / "step_00000005.png")
    Image.new("RGB", (8, 8)).save(run / "samples" / "step_00000005_unet2.png")
    code, out, _ = told(run, "--pictures", 3)
    assert code == 0 and "run: pictures of 3 of 5 updates; --pictures shows more\n" in out
    shown = data_in(run / "report.html")["runs"][0]["pictures"]
    assert [(each["step"], each["model"], each["width"], each["height"]) for each in shown] == [
        (1, "", 20, 10), (3, "", 20, 10), (5, "", 1600, 400), (5, "unet2", 8, 8)]  # fmt: skip
    source = urllib.request.urlopen(shown[0]["src"]).read()
    assert source == (run / "samples" / "step_00000001.png").read_bytes()


def test_the_status_says_whether_a_run_is_finished(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    told(run)
    assert data_in(run / "report.html")["runs"][0]["status"].startswith("not finished: last line at update 3")
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    (run / ".lock").write_text(f"process {process.pid} on {os.uname().nodename} since 2026")
    told(run)
    assert data_in(run / "report.html")["runs"][0]["status"].startswith("ended without finishing, at update 3")
    (run / "model").mkdir()
    (run / "model" / "training.json").write_text('{"step": 3}')
    told(run)
    assert data_in(run / "report.html")["runs"][0]["status"] == "finished at update 3"


@contextlib.contextmanager
def watched(*argv: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process of report.py --watch, and its address."""
    command = [sys.executable, "report.py", *map(str, argv), "--watch"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore Ctrl-C
    )  # fmt: skip
    try:
        assert process.stdout
        number = f"{len(argv)} run{'s' if len(argv) > 1 else ''}"
        assert process.stdout.readline() == f"reading {number}\n"
        line = process.stdout.readline()
        assert line.startswith("http://127.0.0.1:") and line.endswith(" shows the runs until Ctrl-C\n"), line
        yield process, line.split()[0]
    finally:
        process.kill()
        process.communicate()


def test_watching_serves_newer_data_and_ends_cleanly(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    with watched(run) as (process, url):
        text = urllib.request.urlopen(url).read().decode()
        (version,) = re.findall('data-watched="(.+?)"', text)
        assert "connect-src 'self'" in text
        assert urllib.request.urlopen(f"{url}data?{version}").status == 204
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 9, "loss": 0.25}\n')
        while (answer := urllib.request.urlopen(f"{url}data?{version}")).status == 204:
            time.sleep(0.1)
        newer = json.loads(answer.read())
        assert newer["data"]["runs"][0]["step"] == 9 and newer["version"] != version
        for path, host, code in (("nothing", None, 404), ("", "evil.example:80", 403), ("data", "evil.example", 403)):
            request = urllib.request.Request(url + path, headers={"Host": host} if host else {})
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request)
            assert refused.value.code == code
        forwarded = urllib.request.Request(url, headers={"Host": "localhost:9"})  # by ssh -L, for example
        assert urllib.request.urlopen(forwarded).status == 200
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out, err) == (0, "stopped\n", "")
    assert not (run / "report.html").exists()
