"""The run folder: what it refuses, moves away and leaves alone."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from tandem.io import writing
from tandem.training.run_folder.folder import RunFolder, check_output_outside_samples
from tandem.training.run_folder.starts import starts
from tests.processes import Process
from tests.scripts import VAE, files, metrics, write_images
from tests.training.disk import failing

OF_A_RUN = {"output_dir": "runs/vae", "keep_n_checkpoints": 3, "on_bad_sample": "replace"}
ONE = ("--max_steps", "1")


@pytest.mark.parametrize("path", ["{}/file", "{}/file/vae", "/proc/runs/vae", "{}/" + 300 * "x"])
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("")
    line = VAE.refused(Path(path.format(tmp_path)), *ONE)
    assert path.format(tmp_path) in line and "--output_dir" in line
    assert "make room" not in line, "room is not what is missing"


def test_a_full_disk_is_refused_and_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, 1, ("fsync",))
    assert os.strerror(errno.ENOSPC) in VAE.refused(tmp_path / "run", *ONE)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_a_folder_whose_name_is_no_text_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff"))
    assert "UTF-8" in VAE.refused(path, *ONE) and not path.exists()


def test_fresh_moves_the_old_run_away_each_time_though_the_terminal_stands_in_its_folder(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(copied)
    for number in (1, 2):
        monkeypatch.chdir(copied)
        said = VAE.output_of(Path("../copied/"), *ONE, "--fresh")
        moved = tmp_path / f"copied.old-{number}"
        assert files(moved) == before and moved.name in said
        assert [line["step"] for line in metrics(copied)] == [1]
        before = files(copied)


def test_fresh_moves_the_folder_to_which_a_link_leads_and_the_link_stays(copied: Path, tmp_path: Path) -> None:
    before, link = files(copied), tmp_path / "links" / "run"
    link.parent.mkdir()
    link.symlink_to(copied)
    VAE.train(link, *ONE, "--fresh")
    assert files(tmp_path / "copied.old-1") == before and link.readlink() == copied
    assert [line["step"] for line in metrics(copied)] == [1] and os.listdir(link.parent) == ["run"]
    shutil.rmtree(copied)  # as a kill in between leaves the link
    VAE.train(link, *ONE)
    assert [line["step"] for line in metrics(copied)] == [1]


@pytest.mark.parametrize("path", [".", "..", "./"])
def test_fresh_does_not_write_into_the_old_run_where_a_path_means_the_folder_that_was_moved(
    path: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(copied)
    monkeypatch.chdir(copied / "samples" if path == ".." else copied)
    assert f"--output_dir {Path(path)} would still lead to it" in VAE.refused(Path(path), *ONE, "--fresh")
    assert files(copied) == before


@pytest.mark.parametrize("left", ["config.yaml", "starts.jsonl", "checkpoints"])
def test_fresh_knows_a_run_by_what_is_left_of_it(copied: Path, left: str) -> None:
    for name in {"config.yaml", "starts.jsonl"} - {left}:
        (copied / name).unlink()
    if left != "checkpoints":
        shutil.rmtree(copied / "checkpoints")
    VAE.train(copied, *ONE, "--fresh")
    assert copied.with_name("copied.old-1").is_dir()


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "checkpoints"])
def test_a_folder_in_which_names_are_those_of_a_run_and_content_is_not_is_refused_and_other_files_stay(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "photo.jpg").touch()
    VAE.train(tmp_path, *ONE, "--fresh")
    assert (tmp_path / "photo.jpg").exists()
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / name).mkdir() if name == "checkpoints" else (thesis / name).write_text("output_dir: mine")
    for flags in ([], ["--fresh"]):
        assert f"holds {name} " in VAE.refused(thesis, *ONE, *flags)
    assert os.listdir(thesis) == [name]


@pytest.mark.parametrize("name", [".lock", "..writable.tmp", ".config.yaml.tmp"])
def test_nothing_is_written_through_a_link_that_is_in_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "treasure").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "treasure")
    if name == ".lock":
        assert ".lock" in VAE.refused(tmp_path / "run", *ONE)
    else:
        VAE.train(tmp_path / "run", *ONE)
    assert (tmp_path / "treasure").read_text() == "mine"


@pytest.mark.parametrize("content", ["[" * 1_000, "a: [", None, "a pipe"], ids=["deep", "damaged", "gone", "pipe"])
def test_a_config_that_is_gone_damaged_or_would_hold_a_start_up_is_one_line(copied: Path, content: str | None) -> None:
    (copied / "config.yaml").unlink()
    if content == "a pipe":
        os.mkfifo(copied / "config.yaml")
    elif content is not None:
        (copied / "config.yaml").write_text(content)
    line = VAE.refused(copied, *VAE.eight, "--max_steps", "9")
    assert f"{copied / 'config.yaml'}: " in line and "--fresh" in line


@pytest.mark.parametrize("content", ["[" * 100_000, '{"step": 1e400}', '{"step": "a"}', "[7]", '{"step": ', "a pipe"])
def test_facts_that_no_run_wrote_are_as_good_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(OF_A_RUN))
    (tmp_path / "model").mkdir()
    for path in (tmp_path / "model" / "training.json", tmp_path / "starts.jsonl"):
        os.mkfifo(path) if content == "a pipe" else path.write_text(content)
    assert RunFolder(tmp_path, Process()).finished_step is None
    assert not any("command" in start for start in starts(tmp_path))


def test_a_run_inside_a_folder_of_samples_is_refused_unless_it_is_hidden_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.makedirs("photos/more")
    (tmp_path / "linked").symlink_to("photos/more")
    for output in ("photos", "photos/", "photos/runs/vae", "linked/vae", f"{tmp_path}/photos/vae"):
        with pytest.raises(ValueError, match=f"--output_dir {output} is in --image_folder photos"):
            check_output_outside_samples(output, {"video_folder": None, "image_folder": "photos"})
    for output in ("runs/vae", "photos.vae", ".", "photos/.runs/vae", "photos/../vae"):
        check_output_outside_samples(output, {"image_folder": "photos"})
    check_output_outside_samples("photos", {"image_folder": "demo:shapes", "audio_data": "photos/{0..9}.tar"})


def test_a_run_inside_a_folder_of_samples_is_refused_when_the_home_folder_is_spelt_as_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_images(tmp_path / "photos", 16)
    line = VAE.refused(tmp_path / "photos" / "run", *ONE, "--image_folder=~/photos")
    assert f"is in --image_folder {tmp_path}/photos" in line


def test_a_run_whose_config_yaml_has_a_tilde_is_resumed_without_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_images(tmp_path / "photos", 16)
    said = [*ONE, "--image_folder=~/photos", "--batch_size", "4"]
    config = VAE.train(tmp_path / "run", *said) / "config.yaml"
    as_given = config.read_text().replace(f"image_folder: {tmp_path}/photos", "image_folder: ~/photos")
    assert as_given.count("~/photos") == 1
    config.write_text(as_given)
    again = VAE.output_of(tmp_path / "run", *said, "--max_steps", "2")
    assert "--max_steps was 1 and is now 2" in again and "image_folder was" not in again


def test_a_folder_in_which_a_run_goes_on_is_refused_by_name_and_free_when_it_ended(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "LOCK_SECONDS", 0.3)  # for which a start waits for a process that is ending
    said, answer = os.pipe()
    if (other := os.fork()) == 0:
        try:
            run = RunFolder(copied, Process())
            run.check_is_here()  # which opens the lock, and must not release it
            os.write(answer, b"it holds the folder")
            signal.pause()
        finally:
            os._exit(1)
    os.close(answer)
    try:
        assert os.read(said, 4096)
        for flags in ([], ["--fresh"]):
            assert f"process {other} on " in VAE.refused(copied, *VAE.eight, *flags)
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        os.close(said)
    VAE.train(copied, *VAE.eight)


def test_a_job_that_slurm_starts_again_goes_on_although_it_began_with_fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = VAE.train(tmp_path / "run", "--max_steps", "1", "--fresh")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    VAE.train(run, "--max_steps", "2", "--fresh")
    assert [line["step"] for line in metrics(run)] == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
