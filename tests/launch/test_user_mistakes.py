"""A user's mistake gives one line and exit code 2, under every launcher, without a hang."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forks import fork

from benchmarks.launching import WHOLE_MATRIX, Launcher, run
from tests.scripts import SCRIPTS


def folder_of_broken_images(path: Path, count: int = 40) -> str:
    path.mkdir()
    for index in range(count):
        (path / f"{index}.jpg").write_bytes(b"\xff\xd8\xff\xe0 not a picture")
    return str(path)


def unwritable(tmp: Path) -> str:
    (tmp / "a_file").write_text("")
    return str(tmp / "a_file" / "run")


def json_of(tmp: Path, **settings: Any) -> list[str]:
    (tmp / "d.json").write_text(json.dumps(settings))
    return ["--deepspeed_config", str(tmp / "d.json")]


# For each mistake: the script, the flags, and the text that the error line must contain.
Mistake = tuple[str, Callable[[Path], list[str]], str]
# Found by all processes, by their loaders, and by the root alone.
OF_ALL: dict[str, Mistake] = {
    "no such folder": ("train_vae", lambda tmp: ["--image_folder", str(tmp / "nowhere")], "nowhere"),
    "broken images": (
        "train_vae", lambda tmp: ["--image_folder", folder_of_broken_images(tmp / "b")], "could be read"
    ),
    "output_dir cannot be written": ("train_vae", lambda tmp: ["--output_dir", unwritable(tmp)], "a_file"),
    "frames": ("train_tokenizer", lambda tmp: ["--num_frames", "16"], "num_frames: 16 frames must be 1 + 2 n"),
    "noise without a picture": ("train_decoder", lambda tmp: ["--objective", "noise"], "nothing about the picture"),
}  # fmt: skip
# Found before the processes connect: each says them, unless a launcher ends it first.
BEFORE: dict[str, Mistake] = {
    "contradiction": (
        "train_vae", lambda tmp: [*json_of(tmp, train_batch_size=16), "--batch_size", "8"], "train_batch_size: 16"
    ),
    "batch 7": ("train_vae", lambda tmp: ["--batch_size", "7", "--grad_accum_steps", "2"], "7 /"),
}  # fmt: skip
# Of DeepSpeed itself.
OF_DEEPSPEED: dict[str, Mistake] = {
    "misspelt": ("train_vae", lambda tmp: json_of(tmp, zero_optimization={"stagee": 1}), "d.json: stagee"),
    "fp16 on a CPU": ("train_vae", lambda tmp: ["--deepspeed", "--precision", "fp16"], "needs a GPU"),
}


def command(mistake: Mistake, tmp: Path) -> list[str]:
    script, flags, _ = mistake
    return SCRIPTS[script].flags(tmp / "run", "--max_steps", "1", *flags(tmp))


def assert_one_line(output: str, expected: str) -> None:
    errors = [line for line in output.splitlines() if re.search(r"train_\w+\.py: error: ", line)]
    assert len(errors) == 1 and expected in errors[0], output


@pytest.mark.parametrize(
    ("mistake", "processes"),
    [*((name, 2) for name in OF_ALL), *((name, 1) for name in OF_DEEPSPEED)],
)
def test_the_root_alone_speaks_in_one_line_and_all_end_with_2(mistake: str, processes: int, tmp_path: Path) -> None:
    made = {**OF_ALL, **OF_DEEPSPEED}[mistake]
    ranks = fork(made[0], command(made, tmp_path), tmp_path / "log", processes)
    assert [rank.returncode for rank in ranks] == [2] * processes, ranks[0].output
    assert_one_line(ranks[0].output, made[2])
    assert "Traceback" not in ranks[0].output, ranks[0].output


UNDER = [
    ("broken images", Launcher("torchrun", 2)),
    ("contradiction", Launcher("deepspeed", 2)),
    ("output_dir cannot be written", Launcher("horovodrun", 2)),
]
if WHOLE_MATRIX:
    UNDER += [("batch 7", Launcher("horovodrun", 2)), ("output_dir cannot be written", Launcher("deepspeed", 2))]
    UNDER += [("broken images", Launcher(name, 2)) for name in ("deepspeed", "horovodrun")]


@pytest.mark.parametrize(("mistake", "launcher"), UNDER, ids=str)
def test_the_root_alone_speaks_under_every_launcher(mistake: str, launcher: Launcher, tmp_path: Path) -> None:
    made = {**OF_ALL, **BEFORE}[mistake]
    finished = run(launcher, f"{made[0]}.py", command(made, tmp_path))
    assert finished.returncode != 0, finished.output
    assert_one_line(finished.output, made[2])
    assert f'{made[0]}.py", line' not in finished.output  # the launchers may print tracebacks of their own
    if launcher.name == "torchrun":
        assert re.search(r"exitcode\s*: 2 ", finished.output), finished.output
    elif launcher.name == "deepspeed":
        assert finished.returncode == 2


def test_a_machine_whose_folder_lacks_a_file_is_named_and_all_end_with_2(tmp_path: Path) -> None:
    for rank, count in enumerate((40, 39)):
        folder_of_broken_images(tmp_path / f"photos{rank}", count)
    flags = SCRIPTS["train_vae"].flags(tmp_path / "run", "--image_folder", str(tmp_path / "photos{rank}"))
    finished = run(Launcher("torchrun", 2), "tests/launch/own_folder_worker.py", flags)
    [error] = [line for line in finished.output.splitlines() if ": error: " in line]
    assert re.search(r"rank 1 \(on .+\) sees 39 images in .+, rank 0 \(on .+\) sees 40: .* copy", error), error
    assert "Traceback" not in finished.output.partition(error)[0], finished.output
    assert set(re.findall(r"exitcode\s*: (\d+) ", finished.output)) == {"2"}, finished.output


def test_another_flag_on_one_machine_is_named_and_all_end_with_2(tmp_path: Path) -> None:
    """Loader processes may differ, and paths, as above."""
    flags = ["--num_workers", "{rank}", "--max_steps", "1{rank}"]
    flags = SCRIPTS["train_vae"].flags(tmp_path / "run", *flags)
    finished = run(Launcher("torchrun", 2), "tests/launch/own_folder_worker.py", flags)
    assert_one_line(finished.output, "--max_steps is 11 on rank 1 and 10 on rank 0: start all processes with the same")
    assert set(re.findall(r"exitcode\s*: (\d+) ", finished.output)) == {"2"}, finished.output
    assert not (tmp_path / "run").exists()
