"""What encode.py, of images and of videos, and embed.py all do: fill a folder shard by shard, go on after any end,
refuse the rest. Tiny models, one process."""

# ruff: noqa: F811  (fixtures are imported)
from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from filling import (
    EMBED,
    LATENT_SHAPES,
    LATENTS,
    SIZE,
    TOKENIZE,
    TOKENIZE_VIDEOS,
    Script,
    broken_copy,
    change_index,
    index,
    stamps,
)
from filling_fixtures import model, on_one_cpu, on_write, source, whole  # noqa: F401
from safetensors import safe_open
from safetensors.numpy import load_file

from tandem.data.stores.output import sha256_of
from tandem.data.stores.shards import shard_bytes
from tests.scripts import files, lines
from tests.training.disk import failing, left_by_kills

CODERS = [TOKENIZE, LATENTS, TOKENIZE_VIDEOS, LATENT_SHAPES]
OF_VIDEOS, OF_LATENTS = (TOKENIZE_VIDEOS, LATENT_SHAPES), (LATENTS, LATENT_SHAPES)
ALL = [*CODERS, EMBED]


@pytest.fixture(scope="module", params=ALL, ids=str)
def script(request) -> Script:
    script: Script = request.param
    return script


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "copied")


def test_shards_and_index_say_the_same(script, whole, model):
    said = index(whole)
    assert [shard["rows"] for shard in said["shards"]] == script.shard_rows()
    for shard in said["shards"]:
        columns = sorted(load_file(whole / shard["file"]).items())
        content = b"".join(column.tobytes() for _, column in columns)
        assert shard["sha256"] == hashlib.sha256(content).hexdigest()
    firsts = [(i // 4, sum(script.lengths[i // 4 * 4 : i])) for i in range(9)]
    assert [(line["shard"], line["row"]) for line in lines(whole / "index.jsonl")] == firsts
    assert [line["path"] for line in lines(whole / "index.jsonl")] == list(script.names)
    assert not script.bad(whole) and said["weights_sha256"] == sha256_of([model / "model.safetensors"])
    assert (said[script.per_shard], said.get("batch_size"), said["cpu_threads"]) == (4, script.batch_size, 1)


def test_loader_workers_change_nothing(script, whole, model, source, tmp_path):
    assert files(script.fill(model, source, tmp_path, "--num_workers", 2)) == files(whole)


def test_files_that_are_not_read_are_counted_at_the_start(script, model, source, tmp_path, capsys):
    folder = shutil.copytree(source, tmp_path / "more")
    (folder / "notes.pdf").touch()
    script.fill(model, folder, tmp_path / "filled")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if f"skipped in {str(folder)!r}: " in line)
    assert "1 .pdf" in line


# Files that cannot be read.


def test_a_bad_file_is_left_out_and_named_and_changes_no_other_row(script, whole, model, source, tmp_path, capsys):
    name = script.names[1]
    folder = script.fill(model, broken_copy(source, tmp_path / "source", name), tmp_path / "output")
    assert capsys.readouterr().out.count(name) == 1
    found, exact = script.rows(folder), script.rows(whole)
    assert list(found) == [other for other in script.names if other != name]
    for other, row in found.items():
        np.testing.assert_array_equal(row, exact[other])
    (bad,) = script.bad(folder)
    assert bad["path"] == name and bad["reason"]
    assert [shard["rows"] for shard in index(folder)["shards"]] == script.shard_rows(1)


def test_on_bad_sample_error_stops_and_too_many_bad_files_do(script, model, source, tmp_path, capsys):
    broken = broken_copy(source, tmp_path / "source", script.names[6])
    said = script.refused(capsys, *script.flags(model, broken, tmp_path / "output", "--on_bad_sample", "error"))
    assert script.names[6] in said
    script.fill(model, broken, tmp_path / "output", "--on_bad_sample", "skip")  # goes on where that one stopped
    assert len(lines(tmp_path / "output" / "index.jsonl")) == 8
    broken = broken_copy(source, tmp_path / "worse", script.names[1], script.names[6])
    assert "2 of 9" in script.refused(capsys, *script.flags(model, broken, tmp_path / "more"))
    assert not (tmp_path / "more" / "index.json").exists()


def test_a_file_that_was_repaired_is_read_after_any_kill(script, whole, model, source, tmp_path, capsys):
    """The old shard stays until the new one takes its place, and no index describes another than is there."""
    files_of_script = broken_copy(source, tmp_path / "source", script.names[5])
    script.fill(model, files_of_script, tmp_path / "run")
    before = stamps(tmp_path / "run", f"{script.shards}-*")
    script.fill(model, files_of_script, tmp_path / "run")
    assert "nothing is left to do" in capsys.readouterr().out
    assert stamps(tmp_path / "run", f"{script.shards}-*") == before
    shutil.copy2(source / script.names[5], files_of_script / script.names[5])
    unfinished = 0
    for folder in left_by_kills(tmp_path / "run", lambda: script.fill(model, files_of_script, tmp_path / "run")):
        assert len(stamps(folder, f"{script.shards}-*.safetensors")) == 3
        if (folder / "index.json").exists():
            assert len(script.rows(folder)) + len(script.bad(folder)) == 9
            checksums = [shard["sha256"] for shard in index(folder)["shards"]]
            assert [checksum_in(folder / shard["file"]) for shard in index(folder)["shards"]] == checksums
        else:
            unfinished += 1
            script.fill(model, files_of_script, folder)
            assert files(folder) == files(whole)
    assert files(folder) == files(whole) and unfinished


def test_too_many_bad_files_that_were_repaired_end_no_further_start(script, whole, model, source, tmp_path, capsys):
    broken = broken_copy(source, tmp_path / "source", script.names[1], script.names[6])
    assert "2 of 9" in script.refused(capsys, *script.flags(model, broken, tmp_path / "output"))
    assert "2 of 9" in script.refused(capsys, *script.flags(model, broken, tmp_path / "output"))
    for name in script.names:
        shutil.copy2(source / name, broken / name)
    assert files(script.fill(model, broken, tmp_path / "output", "--on_bad_sample", "error")) == files(whole)


# Going on.


def test_killed_at_any_write_and_started_again_gives_the_same_files(script, whole, model, source, tmp_path):
    (tmp_path / "run").mkdir()
    seen = set()
    for folder in left_by_kills(tmp_path / "run", lambda: script.fill(model, source, tmp_path / "run")):
        before = stamps(folder, "*.safetensors")
        script.fill(model, source, folder)
        after = stamps(folder, "*.safetensors")
        assert before.items() <= after.items()  # what exists is done
        assert files(folder) == files(whole)
        seen.add(len(before))
    assert seen == {0, 1, 2, 3} and not list(tmp_path.rglob("*.tmp"))


def test_a_finished_folder_is_not_computed_again(script, whole, copied, model, source, tmp_path):
    """Its samples are not even read: they are zeros by now, of the same lengths and times."""
    shutil.copytree(source, tmp_path / "zeros")
    for path in (path for path in (tmp_path / "zeros").rglob("*") if path.is_file()):
        times = path.stat()
        path.write_bytes(bytes(times.st_size))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    before = stamps(copied, f"{script.shards}-*")
    script.fill(model, tmp_path / "zeros", copied)
    assert stamps(copied, f"{script.shards}-*") == before and files(copied) == files(whole)


@pytest.mark.parametrize("damage", ["numbers", "metadata", "endless shard"])
def test_a_damaged_shard_is_computed_again(damage, script, whole, copied, model, source):
    shard = copied / f"{script.shards}-00001.safetensors"
    if damage == "numbers":
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    elif damage == "metadata":
        shard.write_bytes(shard.read_bytes().replace(b"notes", b"motes"))
    else:
        os.truncate(shard, 1 << 40)  # its checksum would be that of terabytes
    assert damage == "endless shard" or files(copied) != files(whole)
    assert files(script.fill(model, source, copied)) == files(whole)


def test_a_signal_finishes_the_shard_under_way_and_exits_with_75(script, whole, model, source, tmp_path, on_write):
    first = f"{script.shards}-00000"

    def send_signal(path: Path) -> None:
        if path.name == f"{first}.safetensors":
            os.kill(os.getpid(), signal.SIGTERM)

    on_write(send_signal)
    later = {"embeddings": ["--query", "not yet"], "codes": ["--report"]}.get(script.shards, [])
    with pytest.raises(SystemExit) as raised:
        script.fill(model, source, tmp_path, *later)
    assert raised.value.code == 75
    assert sorted(files(tmp_path)) == [f"{first}.safetensors", "settings.json"]
    assert files(script.fill(model, source, tmp_path)) == files(whole)


def test_a_folder_that_is_moved_away_is_not_made_anew(script, model, source, tmp_path, on_write, capsys):
    """The new one would lack the settings, so that no command could continue it."""
    folder = tmp_path / "folder"

    def move_folder(path: Path) -> None:
        if path.name.endswith("-00001.safetensors"):
            folder.rename(tmp_path / "moved")

    on_write(move_folder)
    said = script.refused(capsys, *script.flags(model, source, folder))
    assert os.strerror(errno.ENOENT) in said and not folder.exists()


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(script, whole, model, source, tmp_path, capsys):
    with pytest.MonkeyPatch.context() as disk:
        failing(disk, 3, ("replace",))  # it has taken the settings and a shard
        said = script.refused(capsys, *script.flags(model, source, tmp_path))
    assert f"-00001.safetensors: {os.strerror(errno.ENOSPC)}" in said
    assert files(script.fill(model, source, tmp_path)) == files(whole)


def test_what_is_left_out_of_images_and_videos_is_said(script, model, source, tmp_path, capsys):
    if script in CODERS:
        script.fill(model, source, tmp_path / "cut")
        said = "".join(capsys.readouterr())
        kind = "videos" if script in OF_VIDEOS else "images"
        square = f"the square in the middle of each of the {kind} is encoded, at {SIZE} x {SIZE} pixels"
        shape = f"videos keep their shape: the shorter side becomes {SIZE} pixels, and both sides are cut"
        assert (shape if script is LATENT_SHAPES else square) in said
        assert ("(--keep_aspect keeps their shape)" in said) == (script is TOKENIZE_VIDEOS)
        assert ("; their sound is left out" in said) == (script in OF_VIDEOS)


OTHER_FLAGS = [
    (ALL, "per_shard", 5, "_per_shard was 4 and is now 5"),
    ([TOKENIZE, LATENTS, EMBED], "batch_size", 4, "batch_size was 3 and is now 4"),
    (ALL, "precision", "bf16", 'precision was "fp32" and is now "bf16"'),
    (ALL, "cpu_threads", 2, "cpu_threads was 1 and is now 2"),
    (CODERS, "image_size", 20, "image_size was 16 and is now 20"),
    (OF_VIDEOS, "fps", 5, "fps was null and is now 5.0"),
    ([TOKENIZE, LATENTS], "format", "npy", "format was"),
    (OF_LATENTS, "latent", "mean", 'latent was "sample" and is now "mean"'),
    (OF_LATENTS, "latent_dtype", "bf16", 'dtype was "float16" and is now "bfloat16"'),
    (OF_LATENTS, "seed", 1, "seed was 0 and is now 1"),
    ([EMBED], "max_clips", 2, "max_clips was 6 and is now 2"),
]


def test_other_flags_are_refused_by_name(script, whole, model, source, capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    before = files(whole)
    for scripts, flag, value, named in OTHER_FLAGS:
        if script in scripts:
            flag = script.per_shard if flag == "per_shard" else flag
            assert named in script.refused(capsys, *script.flags(model, source, whole, f"--{flag}", value))
    assert files(whole) == before


def test_another_model_or_listing_is_refused(script, copied, model, source, tmp_path, capsys):
    script.model(seed=1).save_pretrained(tmp_path / "model")
    said = script.refused(capsys, *script.flags(tmp_path / "model", source, copied))
    assert "weights_sha256 was" in said and "names_sha256" not in said
    moved = shutil.copytree(source, tmp_path / "source")
    script.fill(model, moved, copied)  # the same listing elsewhere
    (moved / script.names[3]).rename((moved / script.names[3]).with_stem("other"))
    assert "names_sha256 was" in script.refused(capsys, *script.flags(model, moved, copied))


def test_fresh_moves_the_old_content_aside(script, whole, copied, model, source, capsys):
    (link := copied.with_name("link")).symlink_to(copied)
    script.fill(model, source, link, "--fresh", f"--{script.per_shard}", 5)
    assert files(copied.with_name("copied.old-1")) == files(whole) and link.readlink() == copied
    assert len(index(copied)["shards"]) == 2
    shutil.rmtree(copied)  # as a kill in between leaves the link
    script.fill(model, source, link)
    assert files(copied) == files(whole)
    assert "copied.old-1" in capsys.readouterr().out


@pytest.mark.parametrize("fresh", [[], ["--fresh"]])
def test_a_folder_of_something_else_is_left_alone(fresh, script, model, source, tmp_path, capsys):
    mine = shutil.copytree(source, tmp_path / "mine")
    before = files(mine)
    assert script.names[0] in script.refused(capsys, *script.flags(model, source, mine, *fresh))
    assert files(mine) == before


# Damaged folders.


def no_index(folder: Path, name: str) -> None:
    (folder / "index.json").unlink()


def no_folder(folder: Path, name: str) -> None:
    shutil.rmtree(folder)


def empty_index(folder: Path, name: str) -> None:
    (folder / "index.json").write_text("[]")


def endless_index(folder: Path, name: str) -> None:
    make_endless(folder / "index.json")


def endless_shard(folder: Path, name: str) -> None:
    make_endless(folder / f"{name}-00000.safetensors")


def make_endless(path: Path) -> None:
    """A file that is far longer than any memory, and takes no room on the disk."""
    path.unlink()
    path.touch()
    os.truncate(path, 1 << 40)


def changed_shard(folder: Path, name: str) -> None:
    path = folder / f"{name}-00000.safetensors"
    *content, last = path.read_bytes()
    path.write_bytes(bytes([*content, last ^ 1]))


def cut_shard(folder: Path, name: str) -> None:
    os.truncate(folder / f"{name}-00000.safetensors", 9)


def narrowed(folder: Path, name: str) -> None:
    """Half of the channels of latents in the first shard, and no mirrored images."""
    columns = load_file(folder / f"{name}-00000.safetensors")
    kept = {name: torch.from_numpy(columns[name][:, :2].copy()), "labels": torch.from_numpy(columns["labels"])}
    first, *rest = index(folder)["shards"]
    (folder / first["file"]).write_bytes(shard_bytes(kept))
    sha256 = checksum_in(folder / first["file"])
    change_index(folder, shards=[{**first, "sha256": sha256}, *rest], grid=[2, 4, 4], with_flip=False)


def checksum_in(shard: Path) -> str:
    """The checksum in the metadata of a shard."""
    with safe_open(shard, "np") as file:
        sha256: str = json.loads(file.metadata()["about"])["sha256"]
    return sha256


def in_shapes(folder: Path, name: str) -> None:
    """The index of codes whose rows are single codes, each item in a shape of its own."""
    items = lines(folder / "index.jsonl")
    text = "".join(json.dumps({**line, "row": 16 * line["row"], "grid": [4, 4]}) + "\n" for line in items)
    (folder / "index.jsonl").write_text(text)
    shards = [{**shard, "rows": 16 * shard["rows"]} for shard in index(folder)["shards"]]
    change_index(folder, grid=[], shards=shards, lines_sha256=sha256_of([folder / "index.jsonl"]))


GROUPS = {
    "all": ALL, "coders": CODERS, "squares": CODERS[:3], "all videos": OF_VIDEOS, "images": [TOKENIZE],
    "latents": [LATENTS], "all latents": OF_LATENTS, "videos": [TOKENIZE_VIDEOS], "shapes": [LATENT_SHAPES],
    "sounds": [EMBED],
}  # fmt: skip
DAMAGES = yaml.safe_load(Path(__file__).with_name("damages.yaml").read_text())


def damage(folder: Path, name: str, **changes: Any) -> None:
    """Make the changes of an entry of damages.yaml, and those of checksums that hide them."""
    if call := changes.get("call"):
        globals()[call](folder, name)
    if line := changes.get("line"):
        first, *rest = lines(folder / "index.jsonl")
        (folder / "index.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [{**first, **line}, *rest]))
        change_index(folder, lines_sha256=sha256_of([folder / "index.jsonl"]))
    if shard := changes.get("shard"):
        number, shape, dtype = shard
        rows = np.full(shape, number, dtype)
        (folder / f"{name}-00000.safetensors").write_bytes(shard_bytes({name: torch.from_numpy(rows)}))
        first, *rest = index(folder)["shards"]
        change_index(folder, shards=[{**first, "sha256": hashlib.sha256(rows.tobytes()).hexdigest()}, *rest])
    if "index" in changes:
        change_index(folder, **changes["index"])


def test_a_damaged_folder_is_refused_in_one_line(script, whole, model, tmp_path, capsys):
    for number, changes in enumerate(DAMAGES):
        if script in GROUPS[changes["of"]]:
            copied = shutil.copytree(whole, tmp_path / f"copied{number}")
            damage(copied, script.shards, **changes)
            said = script.refused(capsys, *script.use(model, copied, tmp_path / f"out{number}"))
            assert changes["expected"] in said, changes
    assert not list(tmp_path.glob("*.png"))
