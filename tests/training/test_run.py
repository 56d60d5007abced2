"""A run on one process: what it leaves behind, and how it goes on."""

import json
from contextlib import nullcontext

import pytest
import torch
import yaml

from training.arguments import ArgumentParser, add_run_arguments, positive_int
from training.run import Run


class OneProcess:
    is_root = True

    def agreement(self):
        return nullcontext()

    def barrier(self):
        pass

    def broadcast_object(self, value):
        return json.loads(json.dumps(value))

    def describe(self):
        return {"backend": "single", "ranks": 1}

    def summary(self):
        return "single: 1 process"


class Weights:
    """Adds one to its weight at each update."""

    def __init__(self):
        self.weight = torch.zeros(2)

    def state_dict(self):
        return {"weight": self.weight}

    def load_state_dict(self, state):
        self.weight = state["weight"].clone()


def train(folder, *flags: str, stop_at: int | None = None) -> Weights:
    """Train for --max_steps updates of 4 samples, or be killed after `stop_at` of them."""
    parser = ArgumentParser("toy.py")
    parser.add_argument("--width", type=positive_int, default=2)
    add_run_arguments(parser, output_dir=str(folder), batch_size=4, save_every_n_steps=2)
    args = parser.parse(["--log_every_n_steps", "1", "--max_steps", "6", *flags])
    run = Run(args, parser.settings(args), OneProcess(), model_arguments=("width",), samples_per_epoch=16)
    model = Weights()
    run.resume(model=model)
    while not run.progress.finished and run.progress.step != stop_at:
        model.weight += 1
        run.advance()
        run.log({"loss": 1.0 / run.progress.step, "weight": model.weight[0].item()})
        if run.due(args.save_every_n_steps):
            run.save()
    if run.progress.finished and not run.is_complete:
        run.folder.model_dir.mkdir(exist_ok=True)
        (run.folder.model_dir / "config.json").write_text("{}")
        run.finish()
    run.close()
    return model


def logged(folder, name: str) -> list:
    return [json.loads(line)[name] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_its_settings_environment_metrics_and_checkpoints(tmp_path):
    train(tmp_path)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["max_steps"] == 6
    assert json.loads((tmp_path / "environment.json").read_text())["backend"] == "single"
    assert logged(tmp_path, "step") == [1, 2, 3, 4, 5, 6]
    assert logged(tmp_path, "samples") == [4, 8, 12, 16, 20, 24]
    assert logged(tmp_path, "epoch") == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
    assert {"loss", "samples_per_second", "seconds"} <= json.loads(
        (tmp_path / "metrics.jsonl").read_text().splitlines()[0]
    ).keys()
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "step_00000002",
        "step_00000004",
        "step_00000006",
    ]


def test_a_killed_run_goes_on_from_its_checkpoint_and_logs_no_step_twice(tmp_path, capsys):
    train(tmp_path, stop_at=5)
    assert logged(tmp_path, "step") == [1, 2, 3, 4, 5]
    model = train(tmp_path)
    assert "resumed from" in capsys.readouterr().err
    assert logged(tmp_path, "step") == [1, 2, 3, 4, 5, 6]
    assert logged(tmp_path, "weight") == [1, 2, 3, 4, 5, 6] and model.weight.tolist() == [6, 6]


def test_a_run_killed_before_its_first_checkpoint_starts_at_the_beginning(tmp_path):
    train(tmp_path, stop_at=1)
    train(tmp_path)
    assert logged(tmp_path, "weight") == [1, 2, 3, 4, 5, 6]


def test_a_finished_run_says_so_and_can_be_extended(tmp_path, capsys):
    train(tmp_path)
    train(tmp_path)
    assert "this run is finished" in capsys.readouterr().err
    train(tmp_path, "--max_steps", "8")
    assert logged(tmp_path, "weight") == [1, 2, 3, 4, 5, 6, 7, 8]


def test_fresh_starts_over_and_keeps_the_old_run(tmp_path, capsys):
    train(tmp_path / "run")
    assert train(tmp_path / "run", "--fresh", stop_at=1).weight.tolist() == [1, 1]
    assert logged(tmp_path / "run", "step") == [1] and logged(tmp_path / "run.old-1", "step") == [1, 2, 3, 4, 5, 6]
    assert "starting over" in capsys.readouterr().err


def test_another_model_is_refused_and_the_run_left_as_it_was(tmp_path):
    train(tmp_path, stop_at=3)
    with pytest.raises(ValueError, match="--width was 2 and is now 3"):
        train(tmp_path, "--width", "3")
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["width"] == 2
    assert logged(tmp_path, "step") == [1, 2, 3]


def test_settings_that_leave_the_model_alone_may_change(tmp_path):
    train(tmp_path, stop_at=3)
    train(tmp_path, "--save_every_n_steps", "3")
    assert logged(tmp_path, "step") == [1, 2, 3, 4, 5, 6]
