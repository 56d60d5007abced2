"""train_vae.py from the command line to the files it leaves; tiny models, generated images, one process."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

import data
import distributed
import train_vae
from models import DiscreteVAE
from training.noise import Noise

ROOT = Path(__file__).resolve().parents[1]
TINY = {
    "image_folder": "demo:shapes:64", "image_size": 16, "num_layers": 2, "num_resnet_blocks": 1, "num_tokens": 16,
    "emb_dim": 6, "hidden_dim": 8, "batch_size": 8, "num_workers": 0, "log_every_n_steps": 1,
    "validate_every_n_steps": 0, "sample_every_n_steps": 0, "save_every_n_steps": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device whose numbers the tests know."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def flags(output_dir: Path, *more: str) -> list[str]:
    tiny = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    return [*tiny, "--output_dir", str(output_dir), *more]


def parsed(output_dir: Path, *more: str) -> argparse.Namespace:
    return train_vae.build_parser().parse(flags(output_dir, *more))


def train(output_dir: Path, *more: str) -> Path:
    train_vae.main(flags(output_dir, *more))
    return output_dir


def refused(capsys: pytest.CaptureFixture[str], output_dir: Path, *more: str) -> str:
    """The one line of an error, which ends the process with code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as raised:
        train(output_dir, *more)
    assert raised.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("train_vae.py: error: ")
    return line


def metrics(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def final_weights(output_dir: Path) -> dict[str, Tensor]:
    return dict(torch.load(output_dir / "vae-final.pt", weights_only=True)["weights"])


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_same_bits(ours: Any, expected: Any) -> None:
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def images_of(args: argparse.Namespace, which: str) -> Tensor:
    """All images of one split, float32 in [0, 1], in order."""
    channels = 4 if args.transparent else 3
    dataset = data.open_images(args.image_folder, image_size=args.image_size, channels=channels, seed=args.seed)
    train_set, valid_set = data.split(len(dataset), args.valid_fraction, args.seed, at_least=args.batch_size)
    subset = {"train": train_set, "valid": valid_set}[which]
    return torch.stack([data.to_unit_range(dataset.load(subset[i])) for i in range(len(subset))])


# The schedules, against the recurrences of the specification.


def recurrence(args: argparse.Namespace, n_steps: int) -> Iterator[tuple[float, float]]:
    """Temperature and learning rate of every update; both change after the updates 0, 100, 200, ..."""
    temperature, rate = args.starting_temp, args.learning_rate
    for step in range(n_steps):
        yield temperature, rate
        if step % 100 == 0:
            temperature = max(temperature * exp(-args.anneal_rate * step), args.temp_min)
            rate *= args.lr_decay_rate


@pytest.mark.parametrize(
    "said",
    [
        [],
        ["--anneal_rate", "1e-4", "--temp_min", "0.3", "--lr_decay_rate", "0.85"],
        ["--starting_temp", "2", "--temp_min", "1.9", "--learning_rate", "0.3"],
        ["--anneal_rate", "0", "--lr_decay_rate", "1"],
    ],
    ids=["defaults", "demo", "hot", "constant"],
)
def test_temperature_and_learning_rate_follow_the_recurrence(said: list[str], tmp_path: Path) -> None:
    args = train_vae.build_parser().parse(said)
    for step, (temperature, rate) in enumerate(recurrence(args, 13_000)):
        assert train_vae.gumbel_temperature(step, args) == pytest.approx(temperature, rel=1e-12), step
        assert train_vae.learning_rate(step, args) == pytest.approx(rate, rel=1e-12), step


def test_with_the_defaults_the_temperature_reaches_its_floor_near_step_11_800() -> None:
    args = train_vae.build_parser().parse([])
    first = next(step for step in range(20_000) if train_vae.gumbel_temperature(step, args) == 0.5)
    assert first == pytest.approx(11_800, abs=100)
    assert all(train_vae.gumbel_temperature(step, args) == 0.5 for step in range(first, 20_000, 7))


# A run and what it leaves.


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six updates with a picture at half-time. Tests only look at it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        every = ["--validate_every_n_steps", "3", "--sample_every_n_steps", "3", "--save_every_n_steps", "2"]
        return train(tmp_path_factory.mktemp("runs") / "finished", "--max_steps", "6", *every, "--seed", "3")


def finished_args(finished: Path) -> argparse.Namespace:
    return train_vae.build_parser().parse(["--config", str(finished / "config.yaml")])


def test_config_yaml_holds_every_argument_and_is_read_back(finished: Path) -> None:
    parser = train_vae.build_parser()
    written = yaml.safe_load((finished / "config.yaml").read_text())
    assert parser.settings(finished_args(finished)) == written
    said = {"max_steps": 6, "seed": 3, "validate_every_n_steps": 3, "sample_every_n_steps": 3, "save_every_n_steps": 2}
    assert {**written, **TINY, **said} == written
    assert (written["learning_rate"], written["distributed_backend"]) == (1e-3, "auto")


def test_config_yaml_alone_repeats_the_run(finished: Path, tmp_path: Path) -> None:
    train_vae.main(["--config", str(finished / "config.yaml"), "--output_dir", str(tmp_path)])
    assert without_timings(metrics(tmp_path)) == without_timings(metrics(finished))
    assert files(tmp_path / "model") == files(finished / "model")
    assert json.loads((tmp_path / "environment.json").read_text())["backend"] == "single"


def test_environment_json_says_what_ran_where_and_how(finished: Path) -> None:
    environment = json.loads((finished / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__.split("+")[0]
    assert {"python", "git_commit", "host", "command"} <= environment.keys()
    resolved = {"backend": "single", "world_size": 1, "device": "cpu", "precision": "fp32", "batch_size": 8}
    assert resolved.items() <= environment.items()


def test_metrics_have_the_keys_of_every_script_and_the_scripts_own(finished: Path) -> None:
    lines = metrics(finished)
    shared = {"step", "samples", "epoch", "loss", "lr", "grad_norm", "samples_per_second", "seconds"}
    own = {"recon_loss", "kl", "temperature", "skipped_updates", "bad_samples"}
    validation = {f"valid/{key}" for key in ("loss", "psnr", "ssim", "codes_used", "codes_used_fraction", "perplexity")}
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        assert line.keys() == shared | own | (validation if line["step"] in (3, 6) else set())
        assert line["samples"] == 8 * line["step"]
        assert line["epoch"] == pytest.approx(line["samples"] / 56, abs=1e-6)  # 8 of 64 images are for validation


def test_metrics_tell_the_rate_and_temperature_of_the_update_itself(finished: Path) -> None:
    args = finished_args(finished)
    for line in metrics(finished):
        update = line["step"] - 1
        assert line["lr"] == train_vae.learning_rate(update, args)
        assert line["temperature"] == train_vae.gumbel_temperature(update, args)


def test_the_rate_in_the_log_counts_training_and_not_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, seconds = train_vae.evaluate, 1.5

    def slow(*args: Any) -> Any:
        time.sleep(seconds)
        return evaluate(*args)

    monkeypatch.setattr(train_vae, "evaluate", slow)
    train(tmp_path, "--max_steps", "3", "--validate_every_n_steps", "2")
    for line in metrics(tmp_path):
        assert 8 / seconds < line["samples_per_second"] < 1e6


def test_checkpoints_are_the_last_ones(finished: Path) -> None:
    names = sorted(path.name for path in (finished / "checkpoints").iterdir())
    assert names == ["latest", "step_00000002", "step_00000004", "step_00000006"]


def test_the_picture_shows_originals_soft_and_hard_reconstructions_at_true_brightness(finished: Path) -> None:
    assert sorted(path.name for path in (finished / "samples").iterdir()) == ["step_00000003.png", "step_00000006.png"]
    picture = np.asarray(Image.open(finished / "samples" / "step_00000006.png"))
    n, side, gap = 4, 16, 2
    assert picture.shape[0] == gap + 3 * (side + gap)
    originals = images_of(finished_args(finished), "valid")[:n]
    model = from_model_folder(finished)
    with torch.no_grad():
        soft = model(originals, temperature=metrics(finished)[-1]["temperature"]).reconstruction
        hard = model.decode(model.get_codebook_indices(originals))
    for row, images in enumerate([originals, soft, hard]):
        for column, image in enumerate(images):
            top, left = gap + row * (side + gap), picture.shape[1] - (n - column) * (side + gap)
            shown = picture[top : top + side, left : left + side].astype(int)
            expected = (image.clamp(0, 1) * 255).round().permute(1, 2, 0).numpy().astype(int)
            assert np.abs(shown - expected).max() <= (row > 0)  # one grey level where a rounding may go either way


def test_the_picture_shows_as_many_images_as_were_asked_for_and_not_a_batch(tmp_path: Path) -> None:
    run = train(tmp_path, "--valid_fraction", "0.25", "--num_images_save", "11", "--max_steps", "1")
    picture = np.asarray(Image.open(run / "samples" / "step_00000001.png"))
    side, gap = 16, 2
    for column, image in enumerate(images_of(finished_args(run), "valid")[:11]):
        left = picture.shape[1] - (11 - column) * (side + gap)
        shown = picture[gap : gap + side, left : left + side]
        assert np.array_equal(shown, (image * 255).round().permute(1, 2, 0).numpy().astype(np.uint8)), column


WEIGHTS = {
    "codebook.weight": (16, 6),
    "encoder.0.0.weight": (8, 3, 4, 4), "encoder.0.0.bias": (8,),
    "encoder.1.0.weight": (8, 8, 4, 4), "encoder.1.0.bias": (8,),
    "encoder.2.net.0.weight": (8, 8, 3, 3), "encoder.2.net.0.bias": (8,),
    "encoder.2.net.2.weight": (8, 8, 3, 3), "encoder.2.net.2.bias": (8,),
    "encoder.2.net.4.weight": (8, 8, 1, 1), "encoder.2.net.4.bias": (8,),
    "encoder.3.weight": (16, 8, 1, 1), "encoder.3.bias": (16,),
    "decoder.0.weight": (8, 6, 1, 1), "decoder.0.bias": (8,),
    "decoder.1.net.0.weight": (8, 8, 3, 3), "decoder.1.net.0.bias": (8,),
    "decoder.1.net.2.weight": (8, 8, 3, 3), "decoder.1.net.2.bias": (8,),
    "decoder.1.net.4.weight": (8, 8, 1, 1), "decoder.1.net.4.bias": (8,),
    "decoder.2.0.weight": (8, 8, 4, 4), "decoder.2.0.bias": (8,),
    "decoder.3.0.weight": (8, 8, 4, 4), "decoder.3.0.bias": (8,),
    "decoder.4.weight": (3, 8, 1, 1), "decoder.4.bias": (3,),
}  # fmt: skip


def test_vae_final_is_dalle_pytorchs_file_to_the_key(finished: Path) -> None:
    content = torch.load(finished / "vae-final.pt", weights_only=True)
    assert set(content) == {"hparams", "weights"}
    assert content["hparams"] == {
        "image_size": 16, "num_layers": 2, "num_tokens": 16, "channels": 3, "codebook_dim": 6, "hidden_dim": 8,
        "num_resnet_blocks": 1,
    }  # fmt: skip
    assert {name: tuple(tensor.shape) for name, tensor in content["weights"].items()} == WEIGHTS
    assert all(tensor.dtype == torch.float32 for tensor in content["weights"].values())


def validation_loss(model: DiscreteVAE, output_dir: Path) -> float:
    """As the last line of metrics.jsonl has it."""
    args = finished_args(output_dir)
    with torch.no_grad():
        return float(model(images_of(args, "valid"), temperature=metrics(output_dir)[-1]["temperature"]).loss)


def from_vae_final(run: Path) -> DiscreteVAE:
    return DiscreteVAE.from_dalle(run / "vae-final.pt")


def from_model_folder(run: Path) -> DiscreteVAE:
    return DiscreteVAE.from_pretrained(run / "model")


@pytest.mark.parametrize("load", [from_vae_final, from_model_folder])
def test_the_reloaded_model_reproduces_the_validation_loss(load: Callable[[Path], DiscreteVAE], finished: Path) -> None:
    assert validation_loss(load(finished), finished) == pytest.approx(metrics(finished)[-1]["valid/loss"], rel=1e-6)


# Resuming.

LONG = ("--ema_decay", "0.9", "--validate_every_n_steps", "5", "--save_every_n_steps", "3", "--random_flip")


class KilledError(BaseException):
    """Takes the place of SIGKILL: nobody catches it, and nothing is written after it."""


def kill_at(step: int, patch: pytest.MonkeyPatch, how: Callable[[], None]) -> None:
    """Do something in the middle of update number ``step``."""
    schedule = train_vae.learning_rate

    def learning_rate(now: int, args: argparse.Namespace) -> float:
        if now == step:
            how()
        return schedule(now, args)

    patch.setattr(train_vae, "learning_rate", learning_rate)


def raise_killed() -> None:
    raise KilledError


def stop_at_5(output_dir: Path) -> None:
    train(output_dir, *LONG, "--max_steps", "5")


def killed_at_7(output_dir: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        kill_at(7, patch, raise_killed)
        train(output_dir, *LONG, "--max_steps", "9")


def asked_to_stop_at_4(output_dir: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as raised:
        kill_at(4, patch, lambda: os.kill(os.getpid(), signal.SIGTERM))
        train(output_dir, *LONG, "--max_steps", "9")
    assert raised.value.code == 75
    assert (output_dir / "checkpoints" / "step_00000005").is_dir()


def killed_before_the_first_checkpoint(output_dir: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        kill_at(2, patch, raise_killed)
        train(output_dir, *LONG, "--max_steps", "9")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        return train(tmp_path_factory.mktemp("runs") / "uninterrupted", *LONG, "--max_steps", "9")


def without_timings(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in ("seconds", "samples_per_second")} for line in lines]


def assert_same_run(ours: Path, expected: Path) -> None:
    assert without_timings(metrics(ours)) == without_timings(metrics(expected))
    assert_same_bits(final_weights(ours), final_weights(expected))
    assert files(ours / "model") == files(expected / "model")
    for part in ("engine", "ema"):
        name = Path("checkpoints", "step_00000009", f"{part}.safetensors")
        assert_same_bits(load_file(ours / name), load_file(expected / name))


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("interrupt", [stop_at_5, killed_at_7, asked_to_stop_at_4, killed_before_the_first_checkpoint])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    interrupt: Callable[[Path], None], workers: str, uninterrupted: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    interrupt(tmp_path)
    capsys.readouterr()
    train(tmp_path, *LONG, "--max_steps", "9", "--num_workers", workers)
    assert ("resumed from" in capsys.readouterr().err) == (interrupt is not killed_before_the_first_checkpoint)
    assert_same_run(tmp_path, uninterrupted)


def test_a_finished_run_says_so_and_how_to_extend_it_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, "--max_steps", "2")
    before = files(tmp_path)
    capsys.readouterr()
    train(tmp_path, "--max_steps", "2")
    said = capsys.readouterr().err
    assert "images to train on" not in said and "finished:" not in said
    assert "this run is finished" in said and str(tmp_path / "model") in said and "--max_steps" in said
    assert files(tmp_path) == before


def test_a_finished_run_keeps_the_record_of_how_it_was_trained(tmp_path: Path) -> None:
    train(tmp_path, "--max_steps", "2")
    before = files(tmp_path)
    train(tmp_path, "--max_steps", "2", "--learning_rate", "0.5")
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    "lost",
    [("vae-final.pt", "model"), ("model",), ("model/config.json", "model/training.json"), ("model/training.json",)],
    ids=str,
)
def test_a_run_killed_after_training_writes_its_model_at_the_next_start(
    lost: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vae-final.pt comes first, model/training.json last."""
    train(tmp_path, "--max_steps", "2")
    before = files(tmp_path)
    for name in lost:
        for path in [*(tmp_path / name).glob("*"), tmp_path / name]:
            path.rmdir() if path.is_dir() else path.unlink()
    capsys.readouterr()
    train(tmp_path, "--max_steps", "2")
    assert "finished:" in capsys.readouterr().err
    after = files(tmp_path)
    assert after.keys() == before.keys()
    kept = [name for name in before if name.startswith(("metrics", "model", "checkpoints", "samples"))]
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert_same_bits(final_weights(tmp_path), dict(from_model_folder(tmp_path).state_dict()))


def test_an_extended_run_killed_before_its_model_was_written_does_not_keep_the_old_one(
    uninterrupted: Path, tmp_path: Path
) -> None:
    train(tmp_path, *LONG, "--max_steps", "5")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(DiscreteVAE, "save_dalle", lambda *_: raise_killed())
        train(tmp_path, *LONG, "--max_steps", "9")
    train(tmp_path, *LONG, "--max_steps", "9")
    assert_same_run(tmp_path, uninterrupted)


def test_fresh_moves_the_old_run_away_and_starts_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path / "run", "--max_steps", "2")
    before, losses = files(run), [line["loss"] for line in metrics(run)]
    train(run, "--max_steps", "3", "--fresh")
    assert files(tmp_path / "run.old-1") == before
    assert [line["loss"] for line in metrics(run)][:2] == losses and metrics(run)[0]["step"] == 1
    assert "run.old-1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "now"), [("num_tokens", "32"), ("hidden_dim", "4"), ("emb_dim", "4"), ("num_resnet_blocks", "0")]
)
def test_another_model_on_resume_is_an_error_that_names_the_argument(
    name: str, now: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, "--max_steps", "1")
    before = files(tmp_path)
    line = refused(capsys, tmp_path, "--max_steps", "2", f"--{name}", now)
    assert f"--{name} was {TINY[name]} and is now {now}" in line
    assert files(tmp_path) == before


# Flags that do not go together.


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (["--image_size", "100"], "--image_size 100 is not a power of two; use 64 or 128"),
        (["--image_size", "8", "--num_layers", "4"], "--image_size 8 is less than 2^num_layers for --num_layers 4"),
        (["--num_layers", "1000000000000"], "--image_size 16 is less than 2^num_layers for --num_layers 1000000000000"),
        (["--reinmax"], "--reinmax refines the gradient of --straight_through; give both"),
        (["--num_resnet_blocks", "-1"], "--num_resnet_blocks: "),
        (["--starting_temp", "0.3"], "--starting_temp 0.3 is below --temp_min 0.5, "),
        (["--temp_min", "2"], "--starting_temp 1.0 is below --temp_min 2.0, "),
        (["--starting_temp", "0.3", "--temp_min", "0.31"], "raise the one or lower the other"),
    ],
    ids=str,
)
def test_flags_that_contradict_each_other_are_refused_by_name_before_anything_starts(
    said: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "from_args", lambda *_: pytest.fail("a backend was started"))
    assert text in refused(capsys, tmp_path / "run", *said)
    assert not (tmp_path / "run").exists()


def test_temperatures_in_a_config_file_are_compared_with_those_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("temp_min: 0.8")
    line = refused(capsys, tmp_path / "run", "--config", str(tmp_path / "config.yaml"), "--starting_temp", "0.7")
    assert "--starting_temp 0.7 is below --temp_min 0.8, " in line


@pytest.mark.parametrize("said", [[], ["--starting_temp", "0.5"], ["--starting_temp", "0.3", "--temp_min", "0.3"],
                                  ["--image_size", "8", "--num_layers", "3"], ["--straight_through", "--reinmax"]],
                         ids=str)  # fmt: skip
def test_flags_that_go_together_are_let_pass(said: list[str]) -> None:
    parser = train_vae.build_parser()
    train_vae.refuse_contradictions(parser, parser.parse(said))


# --init_from


@pytest.mark.parametrize("source", ["vae-final.pt", "model"])
def test_init_from_takes_the_weights_of_either_format(source: str, finished: Path, tmp_path: Path) -> None:
    nothing_learned = ("--max_steps", "1", "--learning_rate", "1e-30")
    train(tmp_path, *nothing_learned, "--init_from", str(finished / source))
    assert_same_bits(final_weights(tmp_path), final_weights(finished))


@pytest.mark.parametrize("source", ["vae-final.pt", "model"])
@pytest.mark.parametrize(
    ("said", "named"),
    [
        (["--num_tokens", "32"], "--num_tokens 16"),
        (["--hidden_dim", "4", "--num_layers", "1"], "--num_layers 2, --hidden_dim 8"),
        (["--emb_dim", "8", "--num_resnet_blocks", "0"], "--emb_dim 6, --num_resnet_blocks 1"),
        (["--transparent"], "no --transparent"),
    ],
    ids=str,
)
def test_init_from_another_model_names_the_flags_that_differ(
    source: str, said: list[str], named: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, tmp_path, "--init_from", str(finished / source), *said)
    before, _, differing = line.partition("; they need ")
    assert str(finished / source) in before
    # The normalization has a value per channel, and no flag.
    assert differing.partition(", normalization")[0] == named


def test_init_from_does_not_translate_a_path(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "codebook_dim 6"
    shutil.copytree(finished / "model", folder)
    line = refused(capsys, tmp_path / "run", "--init_from", str(folder), "--emb_dim", "8")
    assert str(folder) in line and line.endswith("; they need --emb_dim 6")


def test_init_from_a_model_with_alpha_says_that_it_is_transparent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_vae.build_model(parsed(tmp_path, "--transparent")).save_pretrained(tmp_path / "rgba")
    line = refused(capsys, tmp_path / "run", "--init_from", str(tmp_path / "rgba"))
    assert "; they need --transparent, " in line


def test_init_from_a_file_that_is_not_there_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.pt" in refused(capsys, tmp_path, "--init_from", str(tmp_path / "nowhere.pt"))


# The flags of the loss, each against the formula written out on the first batch.


class FirstUpdate:
    """The model, images and noise that the first update of a run sees."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model = train_vae.build_model(args)
        channels = self.model.channels
        dataset = data.open_images(args.image_folder, image_size=args.image_size, channels=channels, seed=args.seed)
        train_set, _ = data.split(len(dataset), args.valid_fraction, args.seed, at_least=args.batch_size)
        stream = data.TrainingStream(
            dataset, train_set, batch_size=args.batch_size, rank=0, world_size=1, seed=args.seed
        )
        batch = next(iter(stream))
        self.images = data.to_unit_range(batch["images"])
        noise = Noise(args.seed, "gumbel").gumbel(0, batch["positions"], self.model.noise_shape)
        self.x = torch.cat([2 * self.images[:, :3] - 1, self.images[:, 3:]], dim=1)
        self.logits = self.model.encoder(self.x).detach()
        self.noisy = self.logits + noise

    def decoded(self, weights: Tensor) -> Tensor:
        """Weights (b, K, s, s) over the codes -> images in normalised space."""
        mixed = torch.einsum("bkhw,kd->bdhw", weights, self.model.codebook.weight)
        return self.model.decoder(mixed).detach()

    def soft(self) -> Tensor:
        return self.decoded(self.noisy.softmax(dim=1))  # the temperature starts at 1

    def hard(self) -> Tensor:
        return self.decoded(F.one_hot(self.noisy.argmax(dim=1), 16).movedim(-1, 1).float())

    def kl(self) -> float:
        q = self.logits.softmax(dim=1)
        return float((q * (q * 16).log()).sum(dim=1).mean())


EXPECTED_LOSS: dict[str, tuple[list[str], Callable[[FirstUpdate], Tensor]]] = {
    "mse": ([], lambda first: F.mse_loss(first.soft(), first.x)),
    "smooth l1": (["--smooth_l1_loss"], lambda first: F.smooth_l1_loss(first.soft(), first.x)),
    "straight-through": (["--straight_through"], lambda first: F.mse_loss(first.hard(), first.x)),
    "reinmax": (["--straight_through", "--reinmax"], lambda first: F.mse_loss(first.hard(), first.x)),
    "kl": (["--kl_loss_weight", "0.5"], lambda first: F.mse_loss(first.soft(), first.x) + 0.5 * first.kl()),
    "transparent": (["--transparent"], lambda first: F.mse_loss(first.soft(), first.x)),
}


@pytest.mark.parametrize("name", EXPECTED_LOSS)
def test_the_first_loss_is_the_formulas(name: str, tmp_path: Path) -> None:
    said, expected = EXPECTED_LOSS[name]
    train(tmp_path, *said, "--max_steps", "2")
    first, line = FirstUpdate(parsed(tmp_path, *said)), metrics(tmp_path)[0]
    assert line["loss"] == pytest.approx(float(expected(first)), rel=1e-5)
    assert line["kl"] == pytest.approx(first.kl(), rel=1e-4)
    assert len(metrics(tmp_path)) == 2


def test_a_kl_weight_counts_a_mean_over_batch_and_positions(tmp_path: Path) -> None:
    for line in metrics(train(tmp_path, "--kl_loss_weight", "0.5", "--max_steps", "2")):
        assert line["loss"] == pytest.approx(line["recon_loss"] + 0.5 * line["kl"], rel=1e-6)


def test_reinmax_changes_the_gradient_and_not_the_loss(tmp_path: Path) -> None:
    plain = metrics(train(tmp_path / "plain", "--straight_through", "--max_steps", "2"))
    reinmax = metrics(train(tmp_path / "reinmax", "--straight_through", "--reinmax", "--max_steps", "2"))
    assert plain[0]["loss"] == reinmax[0]["loss"]
    assert plain[0]["grad_norm"] != reinmax[0]["grad_norm"]


def test_transparent_means_four_channels_to_the_end(tmp_path: Path) -> None:
    train(tmp_path, "--transparent", "--max_steps", "2")
    content = torch.load(tmp_path / "vae-final.pt", weights_only=True)
    assert content["hparams"]["channels"] == 4
    assert content["weights"]["encoder.0.0.weight"].shape == (8, 4, 4, 4)
    assert content["weights"]["decoder.4.weight"].shape == (4, 8, 1, 1)
    assert validation_loss(from_model_folder(tmp_path), tmp_path) == pytest.approx(
        metrics(tmp_path)[-1]["valid/loss"], rel=1e-6
    )


def test_without_validation_all_images_are_trained_on_and_nothing_is_validated(tmp_path: Path) -> None:
    train(tmp_path, "--valid_fraction", "0", "--max_steps", "2", "--validate_every_n_steps", "1")
    for line in metrics(tmp_path):
        assert line["epoch"] == pytest.approx(line["samples"] / 64)
        assert not [key for key in line if key.startswith("valid")]
    assert (tmp_path / "samples" / "step_00000002.png").exists()


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two updates with --ema_decay, a checkpoint after each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        folder = tmp_path_factory.mktemp("runs") / "averaged"
        return train(folder, "--ema_decay", "0.2", "--max_steps", "2", "--save_every_n_steps", "1")


def test_with_ema_the_average_is_what_is_kept(averaged: Path) -> None:
    """a <- d a + (1 - d) w, d = min(decay, (1 + n) / (10 + n)) at update n."""
    average = train_vae.build_model(finished_args(averaged)).state_dict()
    for n, decay in ((1, 2 / 11), (2, 0.2)):
        saved = load_file(averaged / "checkpoints" / f"step_{n:08d}" / "engine.safetensors")
        for name in average:
            average[name] = decay * average[name] + (1 - decay) * saved[f"weights/{name}"]
    torch.testing.assert_close(final_weights(averaged), dict(average), rtol=1e-5, atol=1e-7)
    assert_same_bits(final_weights(averaged), dict(from_model_folder(averaged).state_dict()))


def test_with_ema_both_are_validated_and_the_kept_one_reproduces_its_loss(averaged: Path) -> None:
    last = metrics(averaged)[-1]
    assert last["valid/loss"] != last["valid/ema/loss"]
    for load in (from_vae_final, from_model_folder):
        assert validation_loss(load(averaged), averaged) == pytest.approx(last["valid/ema/loss"], rel=1e-6)


# Starting.


def test_a_deepspeed_scheduler_wins_and_the_log_tells_the_rate_that_was_used(tmp_path: Path) -> None:
    warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.008, "warmup_num_steps": 4, "warmup_type": "linear"}
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.008, "weight_decay": 0.0}},
        "scheduler": {"type": "WarmupLR", "params": warmup},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    run = tmp_path / "run"
    command = [sys.executable, "train_vae.py", *flags(run, "--deepspeed_config", str(tmp_path / "ds.json"))]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    finished = subprocess.run([*command, "--max_steps", "6"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "AdamW of the JSON" in finished.stderr and "scheduler of the JSON" in finished.stderr
    assert [line["lr"] for line in metrics(run)] == pytest.approx([0.0, 0.0, 0.002, 0.004, 0.006, 0.008])
    assert metrics(run)[0]["loss"] == pytest.approx(float(EXPECTED_LOSS["mse"][1](FirstUpdate(parsed(run)))), rel=1e-5)
