"""A user's mistake gives one line and exit code 2, under every launcher, without a hang."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from forks import fork
from launching import WHOLE_MATRIX, Launcher, run

import train_vae

TINY = ["--image_size", "16", "--num_layers", "2", "--num_tokens", "16", "--hidden_dim", "8", "--emb_dim", "8"]
TINY += ["--num_resnet_blocks", "0", "--max_steps", "1", "--num_workers", "0"]


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def folder_of(path: Path, make: Callable[[Path], None], ending: str = ".jpg", count: int = 40) -> str:
    path.mkdir()
    for index in range(count):
        make(path / f"{index}{ending}")
    return str(path)


def broken(path: Path) -> None:
    path.write_bytes(b"\xff\xd8\xff\xe0 not a picture")


def unwritable(tmp: Path) -> str:
    (tmp / "a_file").write_text("")
    return str(tmp / "a_file" / "run")


# For each mistake: the flags, and the text that the error line must contain.
MISTAKES: dict[str, Callable[[Path], tuple[list[str], str]]] = {
    "no such folder": lambda tmp: (["--image_folder", str(tmp / "nowhere")], "nowhere"),
    "folder without images": lambda tmp: (["--image_folder", str(tmp)], str(tmp)),
    "folder of broken images": lambda tmp: (["--image_folder", folder_of(tmp / "b", broken)], "could be read"),
    "batch 7 on 2 processes": lambda tmp: (["--batch_size", "7", "--grad_accum_steps", "2"], "7 /"),
    "image_size 100": lambda tmp: (["--image_size", "100"], "power of two"),
    "reinmax alone": lambda tmp: (["--reinmax"], "straight_through"),
    "unknown config key": lambda tmp: (["--config", write(tmp / "c.yaml", "learning_rat: 1.0")], "learning_rate"),
    "wrong type in config": lambda tmp: (["--config", write(tmp / "c.yaml", "batch_size: many")], "batch_size"),
    "missing DeepSpeed JSON": lambda tmp: (["--deepspeed_config", str(tmp / "none.json")], "none.json"),
    "broken DeepSpeed JSON": lambda tmp: (["--deepspeed_config", write(tmp / "d.json", "{]")], "not JSON"),
    "contradicting JSON": lambda tmp: (
        ["--deepspeed_config", write(tmp / "d.json", json.dumps({"train_batch_size": 16})), "--batch_size", "8"],
        "contradicts train_batch_size: 16",
    ),
    "misspelt setting in the JSON": lambda tmp: (
        ["--deepspeed_config", write(tmp / "d.json", json.dumps({"zero_optimization": {"stagee": 1}}))],
        "d.json: stagee",
    ),
    "fp16 of DeepSpeed on a CPU": lambda tmp: (["--deepspeed", "--precision", "fp16"], "needs a GPU"),
    "output_dir cannot be written": lambda tmp: (["--output_dir", unwritable(tmp)], "a_file"),
    "unknown flag": lambda tmp: (["--lerning_rate", "1"], "--learning_rate"),
}


def lines_of_error(output: str) -> list[str]:
    return [line for line in output.splitlines() if re.search(r"train_\w+\.py: error: ", line)]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_line_and_exit_code_2(mistake: str, tmp_path: Path) -> None:
    flags, expected = MISTAKES[mistake](tmp_path)
    [finished] = fork("train_vae", [*TINY, "--output_dir", str(tmp_path / "run"), *flags], tmp_path / "log")
    assert finished.returncode == 2, finished.output
    *before, last = finished.output.splitlines()
    assert lines_of_error(last) and expected in last, finished.output
    assert "Traceback" not in finished.output and len(before) <= 3  # if it got that far: the run, its model, its data


# Examples of mistakes that are found by all processes, by their loaders, and by the root alone. Those that are found
# before the processes connect may be of one process alone: each says them, unless a launcher ends it first (see below).
TOGETHER = ["no such folder", "folder of broken images", "output_dir cannot be written"]


@pytest.mark.parametrize("mistake", TOGETHER)
def test_the_root_of_two_processes_speaks_alone(mistake: str, tmp_path: Path) -> None:
    flags, expected = MISTAKES[mistake](tmp_path)
    ranks = fork("train_vae", [*TINY, "--output_dir", str(tmp_path / "run"), *flags], tmp_path / "log", 2)
    assert [rank.returncode for rank in ranks] == [2, 2], ranks[0].output
    errors = lines_of_error(ranks[0].output)
    assert len(errors) == 1 and expected in errors[0] and "Traceback" not in ranks[0].output, ranks[0].output


TINY_TOKENIZER = ["--image_size", "16", "--layers", "compress_time,compress_time", "--init_dim", "4",
                  "--discr_layers", "1", "--max_steps", "1", "--num_workers", "0"]  # fmt: skip
# Those of videos: found by all processes, and by their loaders.
VIDEOS = {
    "num_frames 16": lambda tmp: (
        ["--num_frames", "16"],
        "16 frames must be 1 + 4 n, as 4 frames share a code; use 13",
    ),
    "folder of broken videos": lambda tmp: (["--video_folder", folder_of(tmp / "b", broken, ".mp4")], "could be read"),
}


# Those of decoders: found before the processes connect, and by all processes.
PUBLIC = "decoder: {image_size: 8, unets: [{dim: 8, dim_mults: [1], resnet_groups: 4, colour: 1}]}"
UNKNOWN_KEY = "unknown key of DALLE2-pytorch"
DECODERS = {
    UNKNOWN_KEY: lambda tmp: (
        ["--decoder_config", write(tmp / "d.yaml", PUBLIC)],
        "d.yaml: decoder.unets[0].colour: unknown key",
    ),
    "noise without a picture": lambda tmp: (["--objective", "noise"], "says nothing about the picture"),
}
TINY_DECODER = ["--image_folder", "demo:shapes:64", "--batch_size", "8", "--image_size", "8", "--dim", "8",
                "--dim_mults", "1", "--resnet_groups", "4", "--max_steps", "1", "--num_workers", "0"]  # fmt: skip


@pytest.mark.parametrize("mistake", [*VIDEOS, *(name for name in DECODERS if name != UNKNOWN_KEY)])
def test_the_root_alone_speaks_in_other_scripts(mistake: str, tmp_path: Path) -> None:
    script, tiny = ("train_tokenizer", TINY_TOKENIZER) if mistake in VIDEOS else ("train_decoder", TINY_DECODER)
    flags, expected = {**VIDEOS, **DECODERS}[mistake](tmp_path)
    ranks = fork(script, [*tiny, "--output_dir", str(tmp_path / "run"), *flags], tmp_path / "log", 2)
    assert [rank.returncode for rank in ranks] == [2, 2], ranks[0].output
    errors = lines_of_error(ranks[0].output)
    assert len(errors) == 1 and expected in errors[0] and "Traceback" not in ranks[0].output, ranks[0].output


UNDER = [
    ("folder of broken images", Launcher("torchrun", 2)),
    ("contradicting JSON", Launcher("deepspeed", 2)),  # before the processes connect
    ("output_dir cannot be written", Launcher("horovodrun", 2)),
]
if WHOLE_MATRIX:
    UNDER += [("batch 7 on 2 processes", Launcher("horovodrun", 2)), (UNKNOWN_KEY, Launcher("torchrun", 2))]
    UNDER += [("output_dir cannot be written", Launcher("deepspeed", 2))]
    UNDER += [("folder of broken images", Launcher(name, 2)) for name in ("deepspeed", "horovodrun")]


@pytest.mark.parametrize(("mistake", "launcher"), UNDER, ids=str)
def test_the_root_alone_speaks_under_every_launcher(mistake: str, launcher: Launcher, tmp_path: Path) -> None:
    script, tiny = ("train_decoder", TINY_DECODER) if mistake in DECODERS else ("train_vae", TINY)
    flags, expected = {**MISTAKES, **DECODERS}[mistake](tmp_path)
    flags = [*tiny, "--output_dir", str(tmp_path / "run"), *flags]
    finished = run(launcher, f"{script}.py", flags)
    assert finished.returncode != 0, finished.output
    errors = lines_of_error(finished.output)
    assert len(errors) == 1 and expected in errors[0], finished.output
    assert f'{script}.py", line' not in finished.output  # the launchers may print tracebacks of their own
    if launcher.name == "torchrun":
        assert re.search(r"exitcode\s*: 2 ", finished.output), finished.output
    elif launcher.name == "deepspeed":
        assert finished.returncode == 2


def test_a_machine_whose_folder_lacks_a_file_is_named_and_all_end_with_2(tmp_path: Path) -> None:
    for rank, count in enumerate((40, 39)):
        folder_of(tmp_path / f"photos{rank}", broken, count=count)
    flags = [*TINY, "--output_dir", str(tmp_path / "run"), "--image_folder", str(tmp_path / "photos{rank}")]
    finished = run(Launcher("torchrun", 2), "tests/launch/own_folder_worker.py", flags)
    [error] = [line for line in finished.output.splitlines() if ": error: " in line]
    assert re.search(r"rank 1 \(on .+\) sees 39 images in .+, rank 0 \(on .+\) sees 40: .* copy", error), error
    assert "Traceback" not in finished.output.partition(error)[0], finished.output
    assert set(re.findall(r"exitcode\s*: (\d+) ", finished.output)) == {"2"}, finished.output


def test_a_backend_that_is_not_installed_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "horovod" else find(name, *rest)
    )
    with pytest.raises(SystemExit) as end:
        train_vae.main([*TINY, "--output_dir", str(tmp_path / "run"), "--distributed_backend", "horovod"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "install_horovod.sh" in said, said
