"""A replay confirms a run of every script, names a bit that was changed, and refuses what would mean nothing.

Replays by other launchers and backends: tests/launch/test_verify.py."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filling_fixtures import on_one_cpu  # noqa: F401
from safetensors.torch import load_file, save_file
from verify_worker import flip_a_bit, wrong_gradient

import verify
from tandem.training.run import Run
from tests.scripts import DECODER, SCRIPTS, VAE, VQGAN, Script, checkpoint, files, lines, names

RunOfEight = Callable[[Script], Path]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[object, str]]:
    """The exit code of a replay in this process, which leaves the run as it is, and its last line."""

    def replay(run: Path, *flags: str) -> tuple[object, str]:
        before = files(run)
        with pytest.raises(SystemExit) as raised:
            verify.main([str(run), *flags])
        assert files(run) == before
        output = capsys.readouterr()
        return raised.value.code, (output.out or output.err).splitlines()[-1]

    return replay


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=str)
def test_an_honest_run_is_confirmed_and_nothing_is_left(
    script: Script, run_of_eight: RunOfEight, said, tmp_path
) -> None:
    run, output = run_of_eight(script), tmp_path / "replay"
    code, line = said(run, "--updates", "6:8", "--output", str(output))
    assert code == 0 and line.startswith(f"confirmed: updates 7 to 8 of {run} on "), line
    assert "not compared" not in line and not output.exists()
    assert int(line.split(": ")[2].split()[0]) > len(checkpoint(run, 8))


CHANGED = {
    "weight": (VAE, "engine", "weights/codebook.weight"),
    "moment": (VAE, "engine", "optimizer/moments/exp_avg_sq/encoder.0.0.weight"),
    "average": (VAE, "ema", "weights/codebook.weight"),
    "discriminator": (VQGAN, "discriminator", "weights/layers.0.0.weight"),
    "second Unet": (DECODER, "unet2", "weights/to_out.weight"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_bit_that_was_changed_in_a_checkpoint_is_named(name: str, run_of_eight: RunOfEight, said, tmp_path) -> None:
    script, part, key = CHANGED[name]
    run = Path(shutil.copytree(run_of_eight(script), tmp_path / "run"))
    path = run / "checkpoints" / "step_00000008" / f"{part}.safetensors"
    tensors = load_file(path)
    assert key in tensors, sorted(tensors)
    number = tensors[key].numel() - 1
    save_file({**tensors, key: flip_a_bit(tensors[key], number)}, path)
    code, line = said(run)
    index = [side - 1 for side in tensors[key].shape]
    assert code == 1 and f"{part}/{key} differs in 1 of {number + 1} elements, first at {index}: " in line, line
    assert "; 1 of " in line and (tmp_path / "run.replay" / "checkpoints" / "step_00000008").is_dir()


def test_the_first_update_that_differs_is_named_though_later_ones_do_too(
    run_of_eight: RunOfEight, said, tmp_path
) -> None:
    run = Path(shutil.copytree(run_of_eight(VAE), tmp_path / "run"))
    logged = lines(run / "metrics.jsonl")
    for line in logged:
        if line["step"] > 6 and "loss" in line:
            line["loss"] += 1e-12
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in logged))
    code, line = said(run, "--updates", "0:8")
    assert code == 1 and f"on {verify.socket.gethostname()}: update 7: loss is " in line and "; 2 of " in line, line


def test_a_gradient_that_is_computed_wrongly_in_the_replay_is_found(run_of_eight: RunOfEight, said, tmp_path) -> None:
    with Run.watched(wrong_gradient(update=5)):
        code, line = said(run_of_eight(VAE), "--updates", "4:6", "--output", str(tmp_path / "replay"))
    assert code == 1 and "exp_avg" in line, line


def test_a_run_that_was_killed_and_ended_by_its_time_is_confirmed(said, tmp_path: Path) -> None:
    run, flags = tmp_path / "run", ["--max_steps", "9", "--log_every_n_steps", "3", "--save_every_n_steps", "2"]
    VAE.train_killed(3, run, *flags, "--max_minutes", "60")
    with Run.watched(lambda run, event, _: event == "updated" and setattr(run.clock, "max_run_seconds", 0)):
        VAE.train(run, *flags, "--max_minutes", "60")
    assert lines(run / "metrics.jsonl")[-1]["step"] == 4  # where only the end of the run brings a line
    code, line = said(run, "--updates", "0:4")
    assert code == 0, line


def test_what_has_to_be_equal_is_named_and_other_conditions_only_tried_anyway(
    run_of_eight: RunOfEight, said, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(run_of_eight(VAE), tmp_path / "run"))
    starts = lines(run / "starts.jsonl")
    starts[0] |= {"cpu_threads": 7, "git_commit": "cafe"}
    (run / "starts.jsonl").write_text(json.dumps(starts[0]) + "\n")
    code, line = said(run)
    assert code == 2 and "git_commit cafe and not " in line and "cpu_threads 7 and not 1" in line, line
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert said(run, "--anyway")[0] == 0


def test_a_stretch_has_the_flags_of_its_time_and_one_in_which_they_changed_is_refused(said, tmp_path: Path) -> None:
    run = tmp_path / "run"
    VAE.train(run, "--max_steps", "2", "--save_every_n_steps", "1")
    VAE.train(run, "--max_steps", "4", "--save_every_n_steps", "1", "--learning_rate", "0.01")
    assert said(run, "--updates", "0:2")[0] == said(run, "--updates", "2:4")[0] == 0
    code, line = said(run, "--updates", "0:4")
    assert code == 2 and "--learning_rate changed after update 2; begin or end there" in line, line


def test_a_replay_writes_nowhere_else_and_one_that_reaches_no_verdict_is_no_confirmation(
    run_of_eight: RunOfEight, said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, output = run_of_eight(VAE), tmp_path / "replay"
    out = ["--updates", "4:6", "--output", str(output)]
    for flags, words in (
        (["--output_dir", str(run)], "--output_dir: a replay has the flags of its run, and is made in --output"),
        (["--config", str(run / "config.yaml")], "--config: a replay"), (["--fresh"], "--fresh: a replay"),
        (["--dry_run"], "--dry_run: a replay"), (["--max_steps", "5"], "so there is no verdict"),
    ):  # fmt: skip
        code, line = said(run, *out, *flags)
        assert code == 2 and words in line and not output.exists(), line
    with monkeypatch.context() as disk:
        disk.setattr(shutil, "copytree", lambda *given: os.mkdir("/proc/full"))
        code, line = said(run, *out)
        assert code == 2 and f"cannot write --output {output}: " in line and not output.exists(), line
    shutil.copytree(run, output)  # another run
    code, line = said(run, *out)
    assert code == 2 and f"{output} exists and is no replay" in line and names(tmp_path) == ["replay"], line
    shutil.rmtree(output)
    output.mkdir()  # as an earlier start leaves it that was killed at once
    assert said(run, *out)[0] == 0


def test_data_that_moved_are_named_by_a_flag_and_others_are_refused(said, tmp_path: Path) -> None:
    run, old, new = tmp_path / "run", VAE.data.write(tmp_path / "old", 20), tmp_path / "new"
    VAE.main(*VAE.flags(run, "--max_steps", "2", "--image_folder", str(old), without=["image_folder"]))
    old.rename(new)
    code, line = said(run)
    assert code == 2 and str(old) in line, line
    assert said(run, "--image_folder", str(new))[0] == 0
    (new / "05.png").rename(new / "5.png")
    code, line = said(run, "--image_folder", str(new))
    assert code == 2 and f"files in the data of {run} were added, removed or renamed" in line, line
    assert [path.name for path in tmp_path.iterdir() if "replay" in path.name] == []
