"""metrics.jsonl line by line; optional trackers that cannot stop a run."""

import json
import math
import os
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

from tests.scripts import ROOT
from tests.training.disk import left_by_kills
from training.pictures.images import code_histogram
from training.run.tracking import JsonlTracker, make_trackers

SCRIPT = os.path.basename(sys.argv[0])
PICTURE = Image.new("RGB", (4, 3), (255, 0, 0))


def steps(folder) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_log_is_one_line_that_can_be_read_at_once_has_twelve_digits_and_null_for_what_json_lacks(tmp_path):
    tracker = JsonlTracker(tmp_path)
    tracker.cut_back(0)
    tracker.log(1, {"loss": 0.1 + 0.2, "lr": 1e-3})
    tracker.log(2, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1})
    lines = [
        '{"step": 1, "loss": 0.3, "lr": 0.001}',  # the same for any order of the sum's parts
        '{"step": 2, "a": null, "b": null, "c": null, "d": 1}',
    ]
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines


@pytest.mark.parametrize("failing", ["login", "init", "define_metric", "log", "Image", "Artifact", "finish"])
def test_wandb_that_raises_anywhere_stops_no_run(tmp_path, monkeypatch, capsys, failing):
    """Whatever the kind of error, at the start, in between, or at the end."""
    run = Mock()
    wandb = Mock(__spec__=Mock(), init=Mock(return_value=run), errors=Mock(Error=type("Error", (Exception,), {})))
    for owner, names in ((wandb, ("login", "init", "Image", "Artifact")), (run, ("define_metric", "log", "finish"))):
        if failing in names:
            getattr(owner, failing).side_effect = RuntimeError("the server\nsays no")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    trackers = make_trackers(["wandb"], tmp_path, {}, is_root=True)
    trackers.cut_back(0)
    for step in (1, 2):
        trackers.log(step, {"loss": 1.0})
        trackers.log_image(step, "grid", PICTURE)
    trackers.close({"final": tmp_path})
    assert steps(tmp_path) == [1, 2]
    said = f"{SCRIPT}: wandb is switched off, the run goes on: RuntimeError: the server says no"
    assert [line for line in capsys.readouterr().err.splitlines() if "wandb ends its run" not in line] == [said]


@pytest.mark.parametrize("torn", ["", '{"step": 8, "lo', '{"step": 8, "loss": 1.0}', "\x00\x00\x00\n", "\n"])
@pytest.mark.parametrize("step", [4, 10])
def test_a_resumed_file_holds_each_step_once_and_no_torn_line(tmp_path, torn, step):
    first = JsonlTracker(tmp_path)
    for number in range(1, 8):
        first.log(number, {"loss": float(number)})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(torn)
    second = JsonlTracker(tmp_path)
    second.cut_back(step)
    second.log(step + 1, {"loss": -1.0})
    assert steps(tmp_path) == [*range(1, min(step, 7) + 1), step + 1]


@pytest.mark.parametrize("left", [None, 0, 5, 13])
def test_a_file_that_was_cut_while_the_run_goes_on_is_said_and_not_filled_with_zeros(tmp_path, capsys, left):
    tracker, path = JsonlTracker(tmp_path), tmp_path / "metrics.jsonl"
    tracker.log(1, {})
    tracker.log(2, {})
    path.unlink() if left is None else os.truncate(path, left)  # a line has 12 bytes
    tracker.log(3, {})
    tracker.log(4, {})
    (said,) = capsys.readouterr().err.splitlines()
    assert f"{left or 0} of 24 bytes" in said
    assert path.read_bytes().endswith(b'{"step": 3}\n{"step": 4}\n') and b"\0" not in path.read_bytes()
    resumed = JsonlTracker(tmp_path)
    resumed.cut_back(4)
    assert steps(tmp_path)[-2:] == [3, 4]


def test_lines_that_the_disk_did_not_take_are_written_later(tmp_path, capsys):
    tracker = JsonlTracker(tmp_path)
    tracker.log(1, {})
    os.rename(tmp_path / "metrics.jsonl", tmp_path / "kept")
    (tmp_path / "metrics.jsonl").mkdir()  # cannot be opened for writing
    tracker.log(2, {})
    tracker.log(3, {})
    assert capsys.readouterr().err.count("cannot write") == 1 and tracker.failure
    (tmp_path / "metrics.jsonl").rmdir()
    os.rename(tmp_path / "kept", tmp_path / "metrics.jsonl")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2')  # as a disk that fills in the middle of a line leaves it
    tracker.log(4, {})
    assert steps(tmp_path) == [1, 2, 3, 4] and tracker.failure is None


@pytest.mark.parametrize("line", ["[" * 100_000, '{"step": "a"}', '{"step": 1e400}', '{"step": true}', '{"step": null}',
                                  "[]", "7", '{"step": ' + "9" * 5000 + "}"])  # fmt: skip
def test_a_line_that_no_run_wrote_is_dropped_on_resuming(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    tracker = JsonlTracker(tmp_path)
    tracker.cut_back(9)
    tracker.log(10, {})
    assert steps(tmp_path) == [1, 2, 10]


def test_metrics_that_are_a_pipe_endless_or_a_link_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"metrics\.jsonl is not a regular file"):
        JsonlTracker(tmp_path).cut_back(0)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").touch()
    os.truncate(tmp_path / "metrics.jsonl", 1 << 40)
    with pytest.raises(ValueError, match=r"a line of metrics\.jsonl is longer than 1048576 bytes; remove it, or start"):
        JsonlTracker(tmp_path).cut_back(0)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "treasure").write_text("mine")
    (tmp_path / "metrics.jsonl").symlink_to("treasure")
    with pytest.raises(ValueError, match=r"metrics\.jsonl is a link; put the file itself there"):
        JsonlTracker(tmp_path).cut_back(0)
    assert (tmp_path / "treasure").read_text() == "mine"


def test_cutting_back_is_atomic(tmp_path):
    (tmp_path / "run").mkdir()
    tracker = JsonlTracker(tmp_path / "run")
    for step in (1, 2, 3):
        tracker.log(step, {})
    left = [steps(folder) for folder in left_by_kills(tmp_path / "run", lambda: tracker.cut_back(1))]
    assert left[0] == [1, 2, 3] and left[-1] == [1] and all(found in (left[0], left[-1]) for found in left)


@pytest.mark.parametrize("is_root", [True, False])
def test_a_tracker_that_is_not_installed_is_an_error_on_every_process(tmp_path, monkeypatch, is_root):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="wandb is not installed; run `pip install wandb`"):
        make_trackers(["wandb"], tmp_path, {}, is_root)


def test_tensorboard_holds_the_values_of_the_resumed_run(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, value in ((0, 1.0), (2, 2.0)):
        tracker = make_trackers(["tensorboard"], tmp_path, {}, is_root=True)
        tracker.cut_back(start)
        for step in range(start + 1, start + 4):
            tracker.log(step, {"loss": value})
        tracker.log_image(start + 3, "grid", PICTURE)
        tracker.log_image(start + 3, "codes", code_histogram(torch.tensor([3, 0, 5])))
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]
    assert (events.Images("grid")[-1].width, events.Images("grid")[-1].height) == (4, 3)
    event = events.Histograms("codes_histogram")[-1]
    found = event.histogram_value
    assert (event.step, found.num, found.bucket[0], found.bucket[-1]) == (5, 8, 3, 5)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def written(folder):
    """The records of the newest offline run in a folder: a log of LevelDB's format ("log_format.md") behind 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    path = max((folder / "wandb").glob("offline-run-*/run-*.wandb"), key=os.path.getmtime)
    content, records, part, at = path.read_bytes(), [], b"", 7
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:  # no header fits into the end of a block
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        part, at = part + content[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            records, part = [*records, record], b""
    return records


def test_wandb_has_one_id_over_resumes_names_tags_a_histogram_of_the_codes_and_the_models(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "vae-final.pt").write_text("weights")
    names = {"project": "mine", "name": "first", "entity": None, "tags": ("a", "b")}
    counts, ids = torch.zeros(2000, dtype=torch.int64), []
    counts[[0, 1999]] = torch.tensor([3, 5])
    for start, models in (0, {}), (2, {"final": "model", "best": "vae-final.pt", "none": "none"}):
        tracker = make_trackers(["wandb"], tmp_path, {"seed": 1}, is_root=True, wandb_names=names)
        tracker.cut_back(start)
        tracker.log(start + 1, {"loss": 1.0})
        tracker.log_image(start + 1, "grid", PICTURE)
        tracker.log_image(start + 1, "codes", code_histogram(counts))
        tracker.close({name: tmp_path / path for name, path in models.items()})
        ids.append((tmp_path / "wandb_id.txt").read_text())
        assert list((tmp_path / "wandb").glob(f"offline-run-*/run-{ids[0]}.wandb")) and ids[0] == ids[-1]
    assert steps(tmp_path) == [1, 3] and "switched off" not in capsys.readouterr().err
    records = []
    while not any(record.HasField("exit") for record in records):  # wandb's own process may still be writing
        time.sleep(0.05)
        records = written(tmp_path)
    (run, *_) = (record.run for record in records if record.HasField("run"))
    assert (run.project, run.display_name, list(run.tags)) == ("mine", "first", ["a", "b"])
    items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json)
             for record in records for item in record.history.item}  # fmt: skip
    values, bins = (items[f"codes_histogram/{name}"] for name in ("values", "bins"))
    assert items["codes_histogram/_type"] == "histogram" and len(values) == 512 and sum(values) == 8
    assert (values[0], values[-1], bins[-1]) == (3, 5, 2000)
    artifacts = [r.request.log_artifact.artifact if r.HasField("request") else r.artifact for r in records
                 if r.HasField("artifact") or r.request.HasField("log_artifact")]  # fmt: skip
    found = [(a.type, sorted(a.aliases), [entry.path for entry in a.manifest.contents]) for a in artifacts]
    assert found == [
        ("model", ["final", "latest"], ["config.json"]),
        ("model", ["best", "latest"], ["vae-final.pt"]),
    ]


WANDB = """
import json, pathlib
from unittest.mock import Mock
import torch.distributed

login = Settings = Mock
Artifact = Image = Histogram = lambda *_, **__: Mock()
class errors:
    Error = OSError

class init:
    def __init__(self, dir, id, **_):
        self.folder, self.id, self.logged = pathlib.Path(dir), id, []
    def define_metric(self, *_, **__): pass
    def log(self, _): pass
    def log_artifact(self, _, aliases):
        self.logged += aliases
    def finish(self):
        facts = {"finished": (self.folder / "model" / "training.json").exists(), "logged": self.logged,
                 "in_a_group": torch.distributed.is_initialized()}
        (self.folder / "facts.json").write_text(json.dumps(facts))
"""


def test_no_process_waits_for_the_end_of_an_upload_and_the_run_is_complete_before(tmp_path):
    """Uploads take as long as they take: others would take the root for dead, and a kill would leave it unfinished."""
    (tmp_path / "wandb.py").write_text(WANDB)
    tiny = ["--image_folder", "demo:shapes:32", "--image_size", "16", "--num_layers", "2", "--hidden_dim", "8",
            "--num_tokens", "16", "--emb_dim", "8", "--batch_size", "8", "--max_steps", "1", "--num_workers", "0",
            "--distributed_backend", "ddp", "--report_to", "wandb", "--output_dir", str(tmp_path / "run")]  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
               str(ROOT / "train_vae.py"), *tiny]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "facts.json").exists(), done.stderr
    facts = json.loads((tmp_path / "run" / "facts.json").read_text())
    assert facts == {"finished": True, "logged": ["final"], "in_a_group": False}
    assert done.stderr.count("wandb ends its run") == 1
