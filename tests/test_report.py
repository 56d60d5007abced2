"""report.py: a page of every kind of run folder, whatever is in it, and one line where there is none."""

from __future__ import annotations

import contextlib
import html
import io
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import report
from tests.scripts import ROOT
from training.report import page, watching
from training.report.pictures import encoded, evenly

HOSTILE = "</script><script>document.title='x'</script><img src=x onerror=alert(1)>"


def make(path: Path, lines: list[Any] | None = None, **config: Any) -> Path:
    """A run folder with lines of metrics, settings and one start."""
    path.mkdir(parents=True, exist_ok=True)
    if lines is None:
        lines = [{"step": n, "samples": 8 * n, "loss": 1 / n, "seconds": n / 2} for n in (1, 2, 3)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "config.yaml").write_text(json.dumps({"output_dir": str(path), "seed": 0, **config}))
    start: dict[str, Any] = {
        "time": "2026-01-31T12:00:00+00:00",
        "command": ["train_vae.py"],
        "packages": {},
        "step": 0,
    }
    start |= {"backend": "single", "world_size": 1, "device": "cpu"}
    (path / "starts.jsonl").write_text(json.dumps(start) + "\n")
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


def test_a_page_stands_in_the_run_folder_and_is_made_again(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    add_pictures(run, [1, 3])
    code, out, err = told(run)
    path = run / "report.html"
    assert (code, err) == (0, "") and str(path) in out
    (first,) = data_in(path)["runs"]
    assert first["curves"]["loss"]["y"] == [1, 0.5, 0.333333] and first["step"] == 3
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 0.25}\n')
    assert told(run)[0] == 0 and data_in(path)["runs"][0]["step"] == 4


def test_runs_are_told_apart_by_name(tmp_path: Path) -> None:
    runs = [make(tmp_path / "a" / "run"), make(tmp_path / "b" / "run"), make(tmp_path / "c")]
    assert told(*runs, "--output", tmp_path / "all.html")[0] == 0
    assert [run["name"] for run in data_in(tmp_path / "all.html")["runs"]] == ["a/run", "b/run", f"{tmp_path.name}/c"]


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
        (["--watch", "--port", "65536"], "65535"),
        (["--pictures", "0"], "above 0"),
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


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    (tmp_path / "file").write_text("")
    (run / ".report.html.tmp").mkdir()
    for more, path in (["--output", tmp_path / "file" / "x.html"], tmp_path / "file" / "x.html"), ([], run):
        code, _, err = told(run, *more)
        assert (code, err.count("\n")) == (2, 1) and str(path) in err and "--output" in err


def test_without_the_library_one_line_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page.importlib.util, "find_spec", lambda name: None)
    code, out, err = told(make(tmp_path / "run"))
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "needs the package uplot-python" in err and '".[report]"' in err


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


def test_no_name_turns_the_text_after_it_around(tmp_path: Path) -> None:
    run = make(tmp_path / "ru\u202en", [{"step": 1, "lo\u202ess": 1.0}], note="\u2067a\u202eb")
    report.main([str(run), "--output", str(tmp_path / "x.html")])
    data = data_in(tmp_path / "x.html")
    assert "lo\ufffdss" in data["runs"][0]["curves"] and data["groups"][0]["metrics"] == ["lo\ufffdss"]
    assert "<title>ru\ufffdn - training report</title>" in (tmp_path / "x.html").read_text()
    assert not re.search("[\u202e\u2067]|u202e|u2067", json.dumps(data))


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
    for note, named in zip(
        found["notes"],
        ("metrics.jsonl: 1 line", "metrics.jsonl: the last", "config.yaml", "starts.jsonl", "3 of 4 pictures"),
        strict=False,
    ):
        assert named in note
    assert found["curves"]["loss"]["y"] == [1]


@pytest.mark.parametrize("left", ["config.yaml", "metrics.jsonl", "starts.jsonl"])
def test_one_file_is_enough(left: str, tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    for name in {"config.yaml", "metrics.jsonl", "starts.jsonl"} - {left}:
        (run / name).unlink()
    assert told(run)[0] == 0 and len(data_in(run / "report.html")["runs"][0]["notes"]) == 2


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    run = make(tmp_path / "run", [])
    (run / "metrics.jsonl").write_text('{"step": 1, "a": NaN, "b": Infinity, "c": 1e999, "d": 1.7e308}\n')
    assert told(run)[0] == 0
    curves = data_in(run / "report.html")["runs"][0]["curves"]
    assert [curves[name]["y"][0] for name in "abcd"] == [None, None, None, 1.7e308]


@pytest.mark.parametrize(("there", "asked", "shown"), [
    (3, 12, [0, 1, 2]), (100, 5, [0, 25, 50, 74, 99]), (7, 2, [0, 6]), (7, 1, [6]), (0, 4, [])])  # fmt: skip
def test_pictures_are_chosen_evenly_with_the_first_and_the_last(there: int, asked: int, shown: list[int]) -> None:
    assert evenly(range(there), asked) == shown


def test_pictures_of_several_models_and_their_bytes_are_kept_and_huge_ones_scaled(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    add_pictures(run, [1, 2, 3, 4])
    add_pictures(run, [5], (4000, 1000))
    Image.new("RGB", (8, 8)).save(run / "samples" / "step_00000005_unet2.png")
    code, out, _ = told(run, "--pictures", 3)
    assert code == 0 and "run: pictures of 3 of 5 updates; --pictures shows more\n" in out
    shown = data_in(run / "report.html")["runs"][0]["pictures"]
    assert [(each["step"], each["model"], each["width"], each["height"]) for each in shown] == [
        (1, "", 20, 10), (3, "", 20, 10), (5, "", 1600, 400), (5, "unet2", 8, 8)]  # fmt: skip
    source = urllib.request.urlopen(shown[0]["src"]).read()
    assert source == (run / "samples" / "step_00000001.png").read_bytes()


def shown_of(path: Path, image: Image.Image) -> tuple[str, int, tuple[int, int]]:
    """Kind, bytes and size of what a page has of a picture, which is as large as the page says."""
    image.save(path)
    found = encoded(path)
    content = urllib.request.urlopen(found["src"]).read()
    size = Image.open(io.BytesIO(content)).size
    assert size == (found["width"], found["height"])
    return found["src"].split(";")[0], len(content), size


def noise(width: int, height: int, signs: int) -> Image.Image:
    """Of so many colours."""
    values = random.Random(0).choices(range(signs), k=width * height)
    image = Image.frombytes("P", (width, height), bytes(values))
    image.putpalette([value for n in range(256) for value in (n * 90 % 256, n * 37 % 256, n * 11 % 256)])
    return image.convert("RGB")


def test_no_picture_gets_larger_and_large_ones_become_webp(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    # Few colours in a wide picture: scaled down it has many, so its own bytes are kept, although it is wide.
    kind, number, size = shown_of(path, noise(2011, 100, 2))
    assert (kind, number, size) == ("data:image/png", path.stat().st_size, (2011, 100)) and number < 200_000
    # A picture as photos are: smooth, with noise in its last bits.
    photo = Image.effect_noise((700, 700), 8).convert("RGB")
    kind, number, size = shown_of(path, photo)
    assert (kind, size) == ("data:image/webp", (700, 700)) and path.stat().st_size > 3e5 and number < 2e5
    kind, number, size = shown_of(path, photo.resize((2100, 700)))
    assert (kind, size) == ("data:image/webp", (1600, 533)) and number < 4e5
    # Flat colours: a PNG is small, also of a huge picture.
    kind, number, size = shown_of(path, Image.new("RGB", (4000, 1000), (1, 2, 3)))
    assert (kind, size) == ("data:image/png", (1600, 400)) and number < path.stat().st_size


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_watching_serves_newer_data_and_ends_cleanly(number: int, tmp_path: Path) -> None:
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
        process.send_signal(number)
        out, err = process.communicate()
    assert (process.returncode, out, err) == (0, "stopped\n", "")
    assert not (run / "report.html").exists()


def test_pictures_are_sent_once_and_apart_from_the_lines_of_metrics(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    add_pictures(run, [1, 2])
    with watched(run) as (_, url):
        text = urllib.request.urlopen(url).read().decode()
        pictures = json.loads(urllib.request.urlopen(f"{url}data?").read())["data"]["runs"][0]["pictures"]
        assert "data:image" not in text.split('id="data"')[1] and [each.get("src") for each in pictures] == [None] * 2
        for number, picture in enumerate(pictures, start=1):
            source = urllib.request.urlopen(f"{url}picture?{picture['key']}").read().decode()
            content = (run / "samples" / f"step_{number:08d}.png").read_bytes()
            assert picture["key"] in text and urllib.request.urlopen(source).read() == content
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}picture?{'0' * 32}")


def test_a_browser_that_goes_away_prints_nothing(tmp_path: Path) -> None:
    with watched(make(tmp_path / "run")) as (process, url):
        for request in (b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", int(url.rstrip("/").rpartition(":")[2]))) as connection:
                connection.sendall(request)
                # So that the connection is reset when it is closed: socket(7), SO_LINGER.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert urllib.request.urlopen(url).status == 200
        process.terminate()
        assert process.communicate() == ("stopped\n", "")


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    with watching.Server(dict, 0) as server:
        port = server.server_address[1]
        code, out, err = told(run, "--watch", "--port", port)
    assert (code, out) == (2, "")
    assert f"--port {port}" in err and err.count("\n") == 1
