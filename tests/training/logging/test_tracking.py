"""metrics.jsonl line by line; optional trackers that cannot stop a run."""

from __future__ import annotations

import importlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tandem.io.installed import how_to_install
from tandem.training.logging.trackers import Trackers
from tests.scripts import DECODER, VAE, metrics
from tests.training.disk import left_by_kills


def steps(folder: Path) -> list[int]:
    return [line["step"] for line in metrics(folder)]


def test_each_log_is_one_line_that_can_be_read_at_once_has_twelve_digits_and_null_for_what_json_lacks(tmp_path):
    tracker = Trackers(tmp_path)
    tracker.cut_back(0)
    tracker.log(1, {"loss": 0.1 + 0.2, "lr": 1e-3})
    tracker.log(2, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1})
    lines = [
        '{"step": 1, "loss": 0.3, "lr": 0.001}',  # the same for any order of the sum's parts
        '{"step": 2, "a": null, "b": null, "c": null, "d": 1}',
    ]
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines


NO_LINES = ["[" * 100_000, '{"step": "a"}', '{"step": 1e400}', '{"step": true}', '{"step": null}', "[]", "7",
            '{"step": ' + "9" * 5000 + "}", "\0\0\0", ""]  # fmt: skip


@pytest.mark.parametrize("torn", ["", '{"step": 8, "lo', '{"step": 8, "loss": 1.0}', *(f"{no}\n" for no in NO_LINES)])
@pytest.mark.parametrize("step", [4, 10])
def test_a_resumed_file_holds_each_step_once_and_no_line_that_is_torn_or_of_no_run(tmp_path, torn, step):
    first = Trackers(tmp_path)
    for number in range(1, 8):
        first.log(number, {"loss": float(number)})
    content = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text((torn if torn.endswith("\n") else "") + content + torn)
    second = Trackers(tmp_path)
    second.cut_back(step)
    second.log(step + 1, {"loss": -1.0})
    assert steps(tmp_path) == [*range(1, min(step, 7) + 1), step + 1]


@pytest.mark.parametrize("left", [None, 5, 13])
def test_a_file_that_was_cut_while_the_run_goes_on_is_said_and_not_filled_with_zeros(tmp_path, capsys, left):
    tracker, path = Trackers(tmp_path), tmp_path / "metrics.jsonl"
    tracker.log(1, {})
    tracker.log(2, {})
    path.unlink() if left is None else os.truncate(path, left)  # a line has 12 bytes
    tracker.log(3, {})
    tracker.log(4, {})
    (said,) = capsys.readouterr().err.splitlines()
    assert f"{left or 0} of 24 bytes" in said
    assert path.read_bytes().endswith(b'{"step": 3}\n{"step": 4}\n') and b"\0" not in path.read_bytes()


def test_lines_that_the_disk_did_not_take_are_written_later(tmp_path, capsys):
    tracker = Trackers(tmp_path)
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


def test_cutting_back_is_atomic(tmp_path):
    (tmp_path / "run").mkdir()
    tracker = Trackers(tmp_path / "run")
    for step in (1, 2, 3):
        tracker.log(step, {})
    left = [steps(folder) for folder in left_by_kills(tmp_path / "run", lambda: tracker.cut_back(1))]
    assert left[0] == [1, 2, 3] and left[-1] == [1] and all(found in (left[0], left[-1]) for found in left)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (os.mkfifo, "is not a regular file"),
        (lambda path: (path.touch(), os.truncate(path, 1 << 40)), "is longer than 1048576 bytes"),
        (lambda path: path.symlink_to("model/config.json"), "is a link"),
    ],
    ids=["pipe", "endless", "link"],
)
def test_metrics_that_are_a_pipe_endless_or_a_link_are_refused_at_once(
    make: Callable[[Path], object], expected: str, copied: Path
) -> None:
    (copied / "metrics.jsonl").unlink()
    make(copied / "metrics.jsonl")
    line = VAE.refused(copied, *VAE.eight, "--max_steps", "9")
    assert "metrics.jsonl" in line and expected in line


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    assert how_to_install(name) in VAE.refused(tmp_path, "--report_to", name)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package, of which a run does nothing."""
    for name, value in {"MODE": "disabled", "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    package = importlib.import_module("wandb")
    yield package
    package.teardown()  # it would remember that it is disabled


@pytest.mark.parametrize("failing", ["login", "init", "define_metric", "log", "Image", "Artifact", "finish"])
def test_wandb_that_raises_anywhere_stops_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb: Any, failing: str
) -> None:
    """Whatever the kind of error, at the start, in between, or at the end."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("the server\nsays no")

    owner = type(wandb.init()) if failing in ("define_metric", "log", "finish") else wandb
    if failing in ("Image", "Artifact"):  # are classes
        owner, failing = getattr(wandb, failing), "__init__"
    monkeypatch.setattr(owner, failing, fail)
    if failing == "login":
        monkeypatch.delenv("WANDB_MODE")
    said = VAE.output_of(tmp_path, "--max_steps", "2", "--report_to", "wandb")
    assert steps(tmp_path) == [1, 2] and (tmp_path / "model" / "training.json").exists()
    assert said.count("wandb is switched off") == said.count("RuntimeError: the server says no") == 1


def test_wandb_gets_the_best_model_before_the_final_one_nobody_waits_for_it_and_the_run_is_complete_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb: Any
) -> None:
    """Uploads take as long as they take: other processes would take the root for dead, a kill would leave the run
    unfinished, and signals have their usual effect. The newest artifact is what people get who ask for no other."""
    facts, handler, run, uploads = list[Any](), signal.getsignal(signal.SIGTERM), type(wandb.init()), Mock()

    def finish(_: Any) -> None:
        facts.extend([(tmp_path / "model" / "training.json").exists(), signal.getsignal(signal.SIGTERM) is handler])

    monkeypatch.setattr(run, "finish", finish)
    monkeypatch.setattr(run, "log_artifact", uploads)
    said = DECODER.output_of(tmp_path, "--max_steps", "1", "--report_to", "wandb")
    assert facts == [True, True] and said.count("wandb ends its run") == 1
    aliases = [call.kwargs["aliases"] for call in uploads.call_args_list]
    assert aliases == [["best"], ["final"]] and (tmp_path / "best").is_dir()


def test_tensorboard_holds_the_values_of_the_resumed_run_and_the_codes_without_a_validation_split(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    said = ["--max_steps", "4", "--save_every_n_steps", "2", "--report_to", "tensorboard", "--valid_fraction", "0"]
    VAE.train_killed(3, tmp_path, *said)
    VAE.train(tmp_path, *said)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(line["step"], pytest.approx(line["loss"], rel=1e-6)) for line in metrics(tmp_path)]
    assert [step for step, _ in found] == [1, 2, 3, 4]
    assert events.Images("reconstructions")[-1].width > 16
    codes = events.Histograms("codes_histogram")[-1]
    assert (codes.step, codes.histogram_value.num) == (4, 8 * 4 * 4), "16 pixels in two halvings, 8 images"


def test_the_real_wandb_has_one_id_over_resumes_and_takes_names_tags_histograms_and_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2000 codes: more than it has bins."""
    for name, value in {"MODE": "offline", "SILENT": "true", "CACHE_DIR": "cache", "DATA_DIR": "data"}.items():
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / value) if name.endswith("DIR") else value)
    import wandb

    init = Mock(wraps=wandb.init)
    monkeypatch.setattr(wandb, "init", init)
    said = ["--num_tokens", "2000", "--report_to", "wandb", "--wandb_project", "mine", "--wandb_name", "first"]
    for last in ("1", "2"):
        assert "switched off" not in VAE.output_of(tmp_path, *said, "--wandb_tags", "one,two", "--max_steps", last)
    id_ = (tmp_path / "wandb_id.txt").read_text()
    expected = {"id": id_, "resume": "allow", "project": "mine", "name": "first", "tags": ("one", "two")}
    assert [{key: call.kwargs[key] for key in expected} for call in init.call_args_list] == [expected] * 2
    paths = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{id_}.wandb"), key=os.path.getmtime)
    words = (b"_histogram", b"config.json", b"final")
    until = time.monotonic() + 600  # of a hang
    while (missing := [word for word in words if word not in paths[-1].read_bytes()]) and time.monotonic() < until:
        time.sleep(0.05)  # wandb's own process may still be writing
    assert len(paths) == 2 and not missing


def test_a_run_of_a_sweep_has_the_id_that_its_agent_chose_and_keeps_it_without_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb ignores any other id in a sweep, and makes a run with that of the agent."""
    import wandb

    for name, value in {"MODE": "offline", "SILENT": "true", "SWEEP_ID": "sweep", "RUN_ID": "chosen"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()  # it would remember another environment
    try:
        VAE.train(tmp_path, "--report_to", "wandb", "--max_steps", "1")
        for name in ("SWEEP_ID", "RUN_ID"):
            monkeypatch.delenv(f"WANDB_{name}")
        wandb.teardown()
        VAE.train(tmp_path, "--report_to", "wandb", "--max_steps", "2")
    finally:
        wandb.teardown()
    files = [path.name for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb")]
    assert files == ["run-chosen.wandb"] * 2 and (tmp_path / "wandb_id.txt").read_text() == "chosen"
