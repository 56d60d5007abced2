"""The run folder: made, refused, moved away, compared."""

import os
import shutil
import signal
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.files import writing
from tests.processes import Process, on_processes
from training.run.folder import RunFolder, check_apart
from training.run.starts import last_start, starts

ROOT = Path(__file__).parents[3]


def opened(path: Path | str, *, fresh: bool = False, **of_processes: Any) -> RunFolder:
    """The run folder of a process; what is named is that of another kind of process."""
    here = Process()
    vars(here).update(of_processes)
    return RunFolder(path, here, fresh=fresh)


def test_folder_is_made_with_its_parents_and_left_clean(tmp_path):
    run = opened(tmp_path / "runs" / "vae")
    assert [path.name for path in run.path.iterdir()] == [".lock"] and run.moved_to is None and not run.finished
    run.write_sample(100, b"png")
    run.write_sample(100, b"gif", "unet", "gif")
    assert (run.path / "samples" / "step_00000100.png").read_bytes() == b"png"
    assert (run.path / "samples" / "step_00000100_unet.gif").read_bytes() == b"gif"
    assert (run.checkpoints_dir.name, run.model_dir.name) == ("checkpoints", "model")


def test_config_and_environment_are_saved_without_environment_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "not-to-be-written")
    run = opened(tmp_path)
    config = {"batch_size": 8, "learning_rate": 1e-4, "image_folder": None, "widths": [1, 2], "name": "größe"}
    run.write_config(config)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text(encoding="utf-8")) == config
    facts = {"backend": "single", "ranks": 1, "deepspeed_config": {"zero_optimization": {"stage": 2}}}
    run.add_start(facts)
    assert "not-to-be-written" not in (tmp_path / "starts.jsonl").read_text()
    (environment,) = starts(tmp_path)
    assert environment["packages"]["torch"] == metadata.version("torch")
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert environment["backend"] == "single" and environment["deepspeed_config"]["zero_optimization"]["stage"] == 2
    assert environment["host"] and "git_commit" in environment


def test_settings_that_changed_are_found_whatever_kind_they_are(tmp_path):
    run = begun(tmp_path)
    config = {"image_size": 128, "num_tokens": 8192, "batch_size": 16, "new": 1}
    assert run.changed(config) == {"batch_size": [8, 16]}
    run.write_config({"betas": (0.9, 0.99), "image_folder": None})
    assert run.changed({"betas": (0.9, 0.99), "image_folder": "a"}) == {"image_folder": [None, "a"]}
    for content in ("a: [", "- 1", "image_folder: 2024-01-01"):
        (tmp_path / "config.yaml").write_text(content)
        assert run.changed({"image_folder": "a"}).keys() <= {"image_folder"}
    (tmp_path / "config.yaml").unlink()
    assert run.changed(config) == {}


@pytest.mark.parametrize("path", ["{}/file", "{}/file/vae", "/proc/runs/vae", "{}/" + 300 * "x"])
def test_a_folder_that_cannot_be_made_is_an_error_of_one_line(tmp_path, path):
    (tmp_path / "file").write_text("")
    path = path.format(tmp_path)
    with pytest.raises(ValueError, match="cannot write the run folder") as error:
        opened(path)
    assert "\n" not in str(error.value) and path in str(error.value) and "--output_dir" in str(error.value)
    assert "make room" not in str(error.value), "room is not what is missing"


def test_a_folder_without_write_permission_is_refused(tmp_path, monkeypatch, in_a_child):
    tmp_path.chmod(0o755)
    (tmp_path / "locked").mkdir(mode=0o555)
    monkeypatch.chdir(tmp_path)  # the relative path spares the folders above
    said, answer = os.pipe()

    def attempt():
        if os.getuid() == 0:  # permissions do not bind the superuser
            os.setuid(65534)
        with pytest.raises(ValueError) as error:
            opened("locked")
        os.write(answer, str(error.value).encode())

    assert in_a_child(attempt) == 0
    os.close(answer)
    with os.fdopen(said) as file:
        assert file.read().startswith("cannot write the run folder locked: Permission denied (at locked/.lock); give")


def test_a_full_disk_is_refused_and_nothing_is_left_behind(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tandem.files.writing.os.fsync", full)
    with pytest.raises(ValueError, match="No space left on device; make room"):
        opened(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


OF_A_RUN = {"output_dir": "runs/vae", "keep_n_checkpoints": 3, "on_bad_sample": "replace"}


def begun(path: Path) -> RunFolder:
    run = opened(path)
    run.write_config({"image_size": 128, "num_tokens": 8192, "batch_size": 8, **OF_A_RUN})
    return run


def test_fresh_moves_the_old_run_away_whole(tmp_path, monkeypatch):
    for number, path in ((1, tmp_path / "vae"), (2, "../vae/")):
        old = begun(tmp_path / "vae")
        (old.path / "metrics.jsonl").write_text(f"run {number}")
        monkeypatch.chdir(old.path)
        new = opened(path, fresh=True)
        assert new.moved_to == str(tmp_path / f"vae.old-{number}")
        assert Path(new.moved_to, "metrics.jsonl").read_text() == f"run {number}"
        assert [path.name for path in (tmp_path / "vae").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("before", "now", "goes_on"),
    [(["a"], ["b", "a"], True), (["a"], ["b"], False), ([], [], False), ("ab", ["a"], False)],
)
def test_fresh_counts_once_for_each_torchrun(tmp_path, before, now, goes_on):
    old = begun(tmp_path / "vae")
    old.add_start({"torchruns": before})
    old.add_start({"torchruns": ["c"]})
    moved_to = opened(old.path, fresh=True, torchruns=lambda: now).moved_to
    assert moved_to == (None if goes_on else str(tmp_path / "vae.old-1"))


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_without_a_run_stays_where_it_is(tmp_path, fresh):
    (tmp_path / "notes.txt").write_text("mine")
    assert opened(tmp_path, fresh=fresh).moved_to is None and (tmp_path / "notes.txt").exists()


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "checkpoints"])
def test_a_folder_in_which_names_are_those_of_a_run_and_content_is_not_is_refused(tmp_path, name, fresh):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "photo.jpg").touch()
    path = tmp_path / "thesis" / name
    path.mkdir() if name == "checkpoints" else path.write_text("output_dir: mine")
    with pytest.raises(ValueError, match=f"holds {name} of something else than a run, which would be overwritten"):
        opened(tmp_path / "thesis", fresh=fresh)
    assert sorted(os.listdir(tmp_path / "thesis")) == sorted([name, "photo.jpg"]) and os.listdir(tmp_path) == ["thesis"]


@pytest.mark.parametrize("left", ["config.yaml", "starts.jsonl", "checkpoints"])
def test_fresh_knows_a_run_by_what_is_left_of_it(tmp_path, left):
    run = begun(tmp_path / "vae")
    run.add_start({})
    checkpoint = run.checkpoints_dir / "damaged-step_00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").touch()
    (run.path / "metrics.jsonl").touch()
    for name in {"config.yaml", "starts.jsonl"} - {left}:
        (run.path / name).unlink()
    if left != "checkpoints":
        shutil.rmtree(run.checkpoints_dir)
    assert opened(run.path, fresh=True).moved_to == str(tmp_path / "vae.old-1")


def test_a_folder_whose_name_is_no_text_is_refused_before_anything_is_written(tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff"))
    with pytest.raises(ValueError, match="is not UTF-8 text") as error:
        opened(path)
    assert not path.exists() and str(error.value).encode()


def test_a_folder_that_was_renamed_or_is_that_of_another_run_is_not_written_to(tmp_path):
    run = begun(tmp_path / "a")
    run.check_is_here()
    os.rename(tmp_path / "a", tmp_path / "b")
    with pytest.raises(OSError, match="is gone; if it was renamed, rename it back"):
        run.check_is_here()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".lock").write_text("process 1 on\x1b another")
    with pytest.raises(OSError, match=r"now belongs to process 1 on\? another"):
        run.write_sample(100, b"png")
    assert os.listdir(tmp_path / "a") == [".lock"]
    shutil.rmtree(tmp_path / "a")
    os.rename(tmp_path / "b", tmp_path / "a")
    run.check_is_here()
    (tmp_path / "a" / ".lock").unlink()
    run.check_is_here()  # a lock that somebody took for a leftover is no reason to lose a run


@pytest.mark.parametrize("name", [".lock", "..writable.tmp", ".config.yaml.tmp"])
def test_nothing_is_written_through_a_link_that_is_in_the_folder(tmp_path, name):
    (tmp_path / "treasure").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "treasure")
    if name == ".lock":
        with pytest.raises(ValueError, match=r"it is a link; remove it \(at .*\.lock\)"):
            opened(tmp_path / "run")
    else:
        begun(tmp_path / "run")
    assert (tmp_path / "treasure").read_text() == "mine"


MULTIPLYING = "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12))])


@pytest.mark.parametrize(
    "content",
    ["[" * 2_000, MULTIPLYING, "a: [", None, "a pipe"],
    ids=["deep", "multiplying", "damaged", "gone", "pipe"],
)
def test_a_config_that_is_gone_damaged_or_would_hold_a_start_up_is_one_line(tmp_path, content):
    run = begun(tmp_path)
    (tmp_path / "config.yaml").unlink()
    if content == "a pipe":
        os.mkfifo(tmp_path / "config.yaml")
    elif content is not None:
        (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(ValueError, match=r"cannot resume: .*config\.yaml: .*; restore it, or start over") as error:
        run.check_config({"image_size": 128}, ("image_size",))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"step": 1e400}', '{"step": "a"}', '{"step": [7]}', "a pipe"])
def test_facts_that_no_run_wrote_are_as_good_as_none(tmp_path, content):
    run = begun(tmp_path)
    run.model_dir.mkdir()
    for path in (run.model_dir / "training.json", tmp_path / "starts.jsonl", tmp_path / "environment.json"):
        os.mkfifo(path) if content == "a pipe" else path.write_text(content)
    assert opened(tmp_path).finished_step is None
    assert "command" not in last_start(tmp_path)


def test_a_run_inside_a_folder_of_samples_is_refused_unless_it_is_hidden_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.makedirs("photos/more")
    (tmp_path / "linked").symlink_to("photos/more")
    for output in ("photos", "photos/", "photos/runs/vae", "linked/vae", f"{tmp_path}/photos/vae"):
        with pytest.raises(
            ValueError, match=f"--output_dir {output} is in --image_folder photos, so that the pictures"
        ):
            check_apart(output, {"video_folder": None, "image_folder": "photos"})
    for output in ("runs/vae", "photos.vae", ".", "photos/.runs/vae", "photos/../vae"):
        check_apart(output, {"image_folder": "photos"})
    check_apart("photos", {"image_folder": "demo:shapes", "audio_data": "photos/{0..9}.tar"})


def test_a_run_with_its_model_is_finished(tmp_path):
    run = begun(tmp_path)
    run.model_dir.mkdir()
    assert not opened(tmp_path).finished
    (run.model_dir / "config.json").write_text("{}")
    assert opened(tmp_path).finished
    for content, step in (('{"step": 7}', 7), ('{"step": ', None), ("[7]", None)):
        (run.model_dir / "training.json").write_text(content)
        assert opened(tmp_path).finished_step == step


def test_arguments_that_mean_the_same_are_the_same_and_those_that_do_not_are_named_as_spelled(tmp_path):
    def width_or_dim(settings):
        return {**settings, "width": settings.get("width") or settings.get("dim")}

    run, names = begun(tmp_path), ("dim", "width")
    run.write_config({"dim": 8, "width": None})
    for same in ({"dim": 8, "width": 8}, {"dim": 8, "width": None}):
        run.check_config(same, names, width_or_dim)
    for dim, width, rule, expected in (
        (8, 4, width_or_dim, "--width was None and is now 4;"),
        (4, None, width_or_dim, "--dim was 8 and is now 4;"),
        (8, 8, dict, "--width was None and is now 8;"),
    ):
        with pytest.raises(ValueError, match=f"as another run: {expected}"):
            run.check_config({"dim": dim, "width": width}, names, rule)


def test_every_process_gets_the_roots_findings_and_errors(tmp_path):
    begun(tmp_path / "vae")

    def work(process):
        folder = RunFolder(tmp_path / ("elsewhere" if process.rank else "vae"), process, fresh=True)
        folder.write_config({})
        process.barrier()
        if process.is_root:
            shutil.rmtree(folder.path)
        with pytest.raises(ValueError, match="cannot write the run folder") as error:
            folder.write_config({})
        return folder.moved_to, str(error.value)

    root, other = on_processes(2, work)
    assert root == other and root[0] and not (tmp_path / "elsewhere").exists()


def test_a_folder_in_which_a_run_goes_on_is_refused_by_name_and_free_when_it_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_LOCK_SECONDS", 0.3)
    said, answer = os.pipe()
    if (other := os.fork()) == 0:
        try:
            run = opened(tmp_path)
            run.check_is_here()  # which opens the lock, and must not release it
            os.write(answer, str(run.path).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(answer)
    try:
        assert os.read(said, 4096) == str(tmp_path).encode()
        for fresh in (False, True):
            (tmp_path / "config.yaml").write_text(yaml.safe_dump(OF_A_RUN))
            with pytest.raises(ValueError, match=f"is in use by process {other} on .*; end it first"):
                opened(tmp_path, fresh=fresh)
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        os.close(said)
    opened(tmp_path)
