"""report.py: a page of every kind of run folder, whatever is in it, and one line where there is none."""

from __future__ import annotations

import contextlib
import html
import io
import json
import os
import re
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

GOLDEN = ROOT / "tests" / "reporting" / "golden.json"
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


def told(*argv: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of report.py in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            report.main([str(each) for each in argv])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue(), err.getvalue()


def write_starts(run: Path, *starts: dict[str, Any]) -> None:
    (run / "starts.jsonl").write_text("".join(json.dumps({**START, **start}) + "\n" for start in starts))


def make_golden(folder: Path) -> list[Path]:
    """A run of everything that a page shows, the same with another count, and one of which hardly a file is whole."""
    lines = [
        {"step": n, "samples": 8 * n, "seconds": n / 2, "loss": 1 / n, "late": 0, "bad_samples": 0, "valid/psnr": n,
         "skipped_updates": 6 * (n > 60) + (n == 30), "samples_per_second": 8.0, "data_seconds": 0.25,
         "gflop_per_sample": 1.5, "tflops_per_second": n / 10, "mfu": n / 100, "peak_host_memory_gb": 0.5,
         "time": f"2026-01-31T12:00:{n:02}+00:00"}
        for n in (10, 30, 90)
    ]  # fmt: skip
    settings = {"learning_rate": 0.5, "image_folder": "demo:shapes", "num_images_save": 4, "no_such_flag": 1}
    whole, other, ruin = make(folder / "whole", lines, **settings), make(folder / "other", lines), make(folder / "ruin")
    write_starts(
        whole, {"ended": None, "script": "train_vae.py"}, {"step": 20, "ended": "asked to stop at update 41"},
        {"step": 41, "world_size": 2, "backend": "ddp", "ended": "finished at update 60"},
        {"step": 60, "world_size": 2, "backend": "ddp", "changed": {"max_steps": [60, 90]}},
        {"step": "7", "script": "train_vae.py"},
    )  # fmt: skip
    add_pictures(whole, [1, 2, 3, 4])
    Image.effect_noise((2000, 500), 90).save(whole / "samples" / "step_00000005.png")
    Image.new("RGB", (8, 8)).save(whole / "samples" / "step_00000005_unet2.png")
    write_starts(other, {"script": "train_no_such.py"})
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"step": 91, "loss": NaN, "far": 1e999, "large": 1.7e308, "late": null, "first": 0}\n')
    (ruin / "metrics.jsonl").write_bytes(b'\xff\xfe\x00{"step"\n{"step": 1, "loss": 1}\n{"step": 2, "lo')
    (ruin / "config.yaml").write_text("a: [")
    (ruin / "starts.jsonl").write_text("{\n")
    (ruin / "model").mkdir()
    (ruin / "model" / "training.json").write_text("[]")
    add_pictures(ruin, [1, 2, 3])
    (ruin / "samples" / "step_00000002.png").write_bytes(b"no picture")
    (ruin / "samples" / "step_00000003.png").write_bytes((ruin / "samples" / "step_00000001.png").read_bytes()[:40])
    (ruin / "samples" / "step_00000004.png").mkdir()
    return [whole, other, ruin]


def test_the_data_of_a_page_are_the_golden_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change that is meant, write golden.json from `data`, and read what has changed in it."""
    monkeypatch.chdir(tmp_path)
    code, out, err = told(*make_golden(Path()), "--output", "page.html", "--pictures", 3)
    assert (code, err, out.count("\n")) == (0, "", 8) and "whole: pictures of 3 of 5 updates" in out
    data = data_in(Path("page.html"))
    first = urllib.request.urlopen(data["runs"][0]["pictures"][0]["src"]).read()
    assert first == Path("whole/samples/step_00000001.png").read_bytes()
    for picture in (picture for run in data["runs"] for picture in run["pictures"]):
        for name in ("src", "key"):  # these depend on the compression
            picture.pop(name, None)
    del data["created"]
    assert data == json.loads(GOLDEN.read_text())


def test_settings_are_compared_with_the_defaults_of_the_script(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    (run / "config.yaml").write_text(
        yaml.safe_dump(VAE.module.build_parser().settings(VAE.parsed("--image_size", "64")))
    )
    write_starts(run, {"script": "train_vae.py"})
    told(run)
    assert data_in(run / "report.html")["runs"][0]["chosen"] == ["image_size"]


def test_the_page_in_the_run_folder_is_made_again_and_says_how_far_the_run_is(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text()
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()

    def page() -> tuple[str, list[str]]:
        code, out, err = told(run)
        assert (code, err) == (0, "") and str(run / "report.html") in out
        (found,) = data_in(run / "report.html")["runs"]
        return found["status"], found["notes"]

    (run / "metrics.jsonl").unlink()
    assert page() == ("not finished: no line of metrics yet", ["metrics.jsonl has no line yet"])
    (run / "metrics.jsonl").write_text(lines)
    assert page() == ("not finished: last line of metrics at update 3, at an unknown time", [])
    (run / ".lock").write_text(f"process {process.pid} on {os.uname().nodename} since 2026")
    assert page()[0].startswith("ended without finishing, at update 3")
    (run / "model").mkdir()
    (run / "model" / "training.json").write_text('{"step": 3}')
    assert page() == ("finished at update 3", [])
    (run / "metrics.jsonl").unlink()
    assert page()[1] == ["metrics.jsonl is missing: no curves"]


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
        (version,) = re.findall('data-version="(.+?)"', text)
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
