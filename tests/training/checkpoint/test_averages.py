"""The averages that every save keeps: whole files or none, those of the run's own past, and what is made of them."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file, save
from torch import nn

from tandem.training.checkpoint.ema_files import EMAFiles
from tandem.training.checkpoint.store import Checkpoints
from tandem.training.ema import WeightAverages, make_ema
from tests.processes import Process
from tests.scripts import names
from tests.training.disk import busy, failing, left_by_kills
from tests.training.whole import Whole


def trained(averages: WeightAverages, first: int, last: int) -> None:
    """Updates first ... last, after which the weights are their number, and a buffer is, too."""
    for update in range(first, last + 1):
        for tensor in WEIGHTS.module.state_dict().values():
            tensor.fill_(float(update))
        averages.update()


def made() -> nn.Module:
    model = nn.Linear(2, 1)
    model.register_buffer("count", torch.zeros(1))
    return model


WEIGHTS = Whole(made())


def saved(checkpoints: Checkpoints, files: EMAFiles, steps: range) -> WeightAverages:
    """Training with a save every so many updates; the averages have the name that a script gives them."""
    averages = make_ema(WEIGHTS, 0.0, [0.05, 0.10])
    at = 0
    for step in steps:
        trained(averages, at + 1, step)
        at = step
        other = make_ema(WEIGHTS, 0.9)
        checkpoints.save(step, {"ema_of.two": averages.state_dict(), "ema": other.state_dict()}, {}, files.write)
        checkpoints.wait()
    return averages


def test_an_average_of_another_length_is_the_one_that_training_would_have_made(checkpoints, tmp_path):
    files = EMAFiles(tmp_path / "snapshots")
    saved(checkpoints, files, range(20, 401, 20))
    expected = make_ema(WEIGHTS, 0.0, [0.07])
    trained(expected, 1, 400)
    bias = expected.state_dict()["powers"]["0.07"]["weights"]["bias"].item()
    found, _, distance = files.reconstruct("ema_of.two", 0.07, dict(made().named_parameters()))
    # The weights grow by 400; what is missed of the profile (by 0.25% of its norm) counts in both directions.
    assert found["bias"].item() == pytest.approx(bias, abs=0.02) and distance < 0.003
    assert abs(load_file(sorted(files.folder.iterdir())[-1])["bias"].item() - bias) > 5


def test_what_a_lost_future_wrote_is_deleted_and_nothing_else(checkpoints, tmp_path):
    files = EMAFiles(tmp_path / "snapshots")
    files.cut_back(7)
    assert not files.folder.exists()
    saved(checkpoints, files, range(10, 41, 10))
    (files.folder / "notes.txt").touch()
    (files.folder / ".step_00000010_ema_0.1.safetensors.tmp").touch()
    assert files.cut_back(20) == []
    steps = [name[:13] for name in names(files.folder) if name.endswith("safetensors")]
    assert steps == ["step_00000010", "step_00000010", "step_00000020", "step_00000020"]
    assert len(names(files.folder)) == 5 and (files.folder / "notes.txt").exists()


def test_an_average_that_cannot_be_deleted_is_told_and_ends_no_start(checkpoints, tmp_path, monkeypatch):
    files = EMAFiles(tmp_path / "snapshots")
    saved(checkpoints, files, range(10, 41, 10))
    held = "step_00000030_ema_of.two_0.05.safetensors"
    busy(monkeypatch, held)
    (told,) = files.cut_back(20)
    assert held in told and [name for name in names(files.folder) if int(name[5:13]) > 20] == [held]


def test_a_checkpoint_is_never_there_without_its_averages_whenever_the_run_is_killed(tmp_path):
    run, averages = tmp_path / "run", make_ema(WEIGHTS, 0.0, [0.1])
    run.mkdir()
    trained(averages, 1, 3)
    bias = averages.state_dict()["powers"]["0.1"]["weights"]["bias"].item()

    def save() -> None:
        checkpoints = Checkpoints(run / "checkpoints", 2, Process())
        checkpoints.save(3, {"ema": averages.state_dict()}, {}, EMAFiles(run / "snapshots").write)
        checkpoints.wait()

    is_there = []
    for folder in left_by_kills(run, save):
        is_there.append(Checkpoints(folder / "checkpoints", 2, Process()).latest() is not None)
        if is_there[-1]:
            assert EMAFiles(folder / "snapshots").newest("ema")["bias"].item() == bias
        for path in folder.glob("snapshots/step_*"):
            assert load_file(path).keys() == {"weight", "bias", "count"}, "a file is whole or not there"
    assert is_there == sorted(is_there) and is_there.index(True) > 5


def test_a_full_disk_fails_the_save_and_leaves_no_part_of_a_file(tmp_path, checkpoints, monkeypatch):
    files, averages = EMAFiles(tmp_path / "snapshots"), make_ema(WEIGHTS, 0.0, [0.1])
    trained(averages, 1, 3)
    with monkeypatch.context() as disk:
        failing(disk, 2, ("fsync",), any_thread=True)  # the first one is of the folder of checkpoints
        checkpoints.save(3, {"ema": averages.state_dict()}, {}, files.write)
        checkpoints.wait()
    assert "No space left on device" in checkpoints.failure and checkpoints.latest() is None
    assert names(files.folder) == []


def test_files_that_do_not_fit_are_one_line(checkpoints, tmp_path):
    files = EMAFiles(tmp_path / "snapshots")
    with pytest.raises(ValueError, match="only a run with --ema_power writes them"):
        files.newest("ema")
    saved(checkpoints, files, range(10, 21, 10))
    with pytest.raises(ValueError, match="holds no averages"):
        files.newest("ema")
    like = {"weight": torch.zeros(1, 3)}
    with pytest.raises(ValueError, match="average of another model: see its weight"):
        files.reconstruct("ema_of.two", 0.07, like)
    path = files.folder / "step_00000020_ema_of.two_0.05.safetensors"
    whole = path.read_bytes()
    other = whole.replace(b'pdates\\": 20', b'pdates\\": -1')
    path.write_bytes(whole[:-4] + b"\xff" * 4)
    with pytest.raises(ValueError, match=r"_0\.05\.safetensors is damaged: \w+ is not finite"):
        files.reconstruct("ema_of.two", 0.07, dict(made().named_parameters()))
    deep = save({"weight": torch.zeros(1)}, metadata={"average": "[" * 100_000})
    for content in (b"", whole[:40], whole[:-1], other, deep):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot read .*_0\.05\.safetensors: .") as error:
            files.reconstruct("ema_of.two", 0.07, dict(made().named_parameters()))
        assert "\n" not in str(error.value)
    path.unlink()
    os.mkfifo(path)  # would hold up whoever opens it
    files.reconstruct("ema_of.two", 0.1, dict(made().named_parameters()))


def test_an_average_of_another_length_counts_the_updates_of_each_part(checkpoints, tmp_path):
    """Of two parts, the first is skipped in every second update of the first half: it is as if it had been trained for
    fewer updates. What belongs to no part is as the last save has it."""
    files, parts = EMAFiles(tmp_path / "snapshots"), ("weight", "bias")
    both, of_first = make_ema(WEIGHTS, 0.0, [0.05, 0.10], parts), make_ema(WEIGHTS, 0.0, [0.07])
    for update in range(1, 201):
        for tensor in WEIGHTS.module.state_dict().values():
            tensor.fill_(float(update))
        is_skipped = update < 100 and update % 2 == 0
        both.update(torch.tensor(is_skipped), torch.tensor(False))
        of_first.update(torch.tensor(is_skipped))
        if update % 10 == 0:
            checkpoints.save(update, {"ema": both.state_dict()}, {}, files.write)
            checkpoints.wait()
    wanted = of_first.state_dict()["powers"]["0.07"]["weights"]["weight"][0, 0].item()
    like = {**dict(made().named_parameters()), "count": torch.zeros(1)}
    found, updates, distance = files.reconstruct("ema", 0.07, like)
    assert found["weight"].flatten().tolist() == pytest.approx([wanted] * 2, abs=0.03) and updates == 200
    assert distance < 0.01 and torch.equal(found["count"], files.newest("ema")["count"])


def test_averages_of_an_earlier_version_which_counts_all_parts_as_one_go_on(checkpoints, tmp_path):
    files, of_all = EMAFiles(tmp_path / "snapshots"), make_ema(WEIGHTS, 0.0, [0.05, 0.10])
    expected, by_part = make_ema(WEIGHTS, 0.0, [0.07]), make_ema(WEIGHTS, 0.0, [0.05, 0.10], ("weight", "bias"))
    for update in range(1, 201):
        if update == 101:
            by_part.load_state_dict(of_all.state_dict())
        averages = of_all if update <= 100 else by_part
        for tensor in WEIGHTS.module.state_dict().values():
            tensor.fill_(float(update))
        averages.update()
        expected.update()
        if update % 10 == 0:
            checkpoints.save(update, {"ema": averages.state_dict()}, {}, files.write)
            checkpoints.wait()
    wanted = expected.state_dict()["powers"]["0.07"]["weights"]
    found, updates, distance = files.reconstruct("ema", 0.07, dict(made().named_parameters()))
    assert updates == 200 and distance < 0.01
    assert found["bias"].item() == pytest.approx(wanted["bias"].item(), abs=0.05)
    assert found["weight"][0, 1].item() == pytest.approx(wanted["weight"][0, 1].item(), abs=0.05)
