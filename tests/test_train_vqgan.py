"""train_vqgan.py from the command line to the files it leaves; tiny models, generated images, one process."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import convert
import data
import train_vqgan
from models import VQGAN
from training.measures.reconstruction import psnr

ROOT = Path(__file__).resolve().parents[1]
TINY = {
    "image_folder": "demo:shapes:64", "image_size": 16, "num_layers": 2, "dim": 8, "discr_layers": 2, "batch_size": 8,
    "codebook_size": 64, "num_workers": 0, "log_every_n_steps": 1, "validate_every_n_steps": 0,
    "sample_every_n_steps": 0, "save_every_n_steps": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device whose numbers the tests know."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def flags(output_dir: Path, *more: str) -> list[str]:
    tiny = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    return [*tiny, "--output_dir", str(output_dir), *more]


def train(output_dir: Path, *more: str) -> Path:
    train_vqgan.main(flags(output_dir, *more))
    return output_dir


def refused(capsys: pytest.CaptureFixture[str], output_dir: Path, *more: str) -> str:
    """The one line of an error, which ends the process with code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as raised:
        train(output_dir, *more)
    assert raised.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("train_vqgan.py: error: ")
    return line


def metrics(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def without_clocks(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in ("seconds", "samples_per_second")} for line in lines]


def checkpoint(output_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by file and name."""
    folder = output_dir / "checkpoints" / f"step_{step:08d}"
    return {f"{path.name}: {k}": v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


# Schedules.


def test_the_learning_rate_warms_up_and_falls_along_a_cosine_to_a_tenth() -> None:
    args = train_vqgan.build_parser().parse(["--lr_warmup_steps", "10", "--lr_cosine", "--image_folder", "x"])
    rates = [train_vqgan.learning_rate(step, 110, 2.0, args) for step in range(111)]
    assert rates[:10] == pytest.approx([0.2 * (n + 1) for n in range(10)])
    assert rates[10] == pytest.approx(2.0) and rates[60] == pytest.approx(1.1) and rates[110] == pytest.approx(0.2)
    assert rates[35] == pytest.approx(2.0 * (0.55 + 0.45 * math.cos(math.pi / 4)))


def test_the_learning_rate_is_constant_by_default() -> None:
    args = train_vqgan.build_parser().parse(["--image_folder", "x"])
    assert {train_vqgan.learning_rate(step, 100, 3e-4, args) for step in (0, 50, 99)} == {3e-4}


def test_the_entropy_loss_starts_stronger_and_ends_at_its_weight() -> None:
    said = ["--entropy_loss_weight", "0.1", "--entropy_anneal_factor", "3", "--entropy_anneal_steps", "200"]
    args = train_vqgan.build_parser().parse([*said, "--image_folder", "x"])
    weights = [train_vqgan.entropy_loss_weight(step, args) for step in (0, 100, 200, 5000)]
    assert weights == pytest.approx([0.3, 0.2, 0.1, 0.1])


# A run and what it leaves.


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight updates, the discriminator from the fourth on, a checkpoint at each second. Tests only look at it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        return train(tmp_path_factory.mktemp("run") / "run", *EIGHT)


EIGHT = [
    "--max_steps", "8", "--discr_start_step", "3", "--lecam_weight", "0.1", "--save_every_n_steps", "2",
    "--sample_every_n_steps", "4", "--validate_every_n_steps", "4", "--quantizer", "vq", "--keep_n_checkpoints", "9",
]  # fmt: skip


def test_the_log_tells_every_loss_and_both_gradient_norms(finished: Path) -> None:
    lines = metrics(finished)
    assert [line["step"] for line in lines] == list(range(1, 9))
    always = {"loss", "recon_loss", "commitment", "codes_used", "perplexity", "lr", "grad_norm", "samples_per_second"}
    with_discriminator = {"gan_loss", "gan_weight", "discr_loss", "discr_real", "discr_fake", "discr_grad_norm"}
    for line in lines:
        assert always <= set(line)
        assert (with_discriminator <= set(line)) == (line["step"] >= 4) == ("lecam_loss" in line)
    assert {"valid/psnr", "valid/ssim", "valid/codes_used", "valid/ema/psnr"} <= set(lines[-1])


def test_the_discriminator_takes_part_from_its_start_step_on_and_not_before(finished: Path) -> None:
    """taming-transformers computes it from the first update."""
    assert [line["step"] for line in metrics(finished) if "discr_loss" in line] == [4, 5, 6, 7, 8]


def test_the_penalty_comes_every_fourth_update(finished: Path, tmp_path: Path) -> None:
    """The public trainer's flag was ignored: it came with each."""
    assert [line["step"] for line in metrics(finished) if "gradient_penalty" in line] == [4, 8]
    run = train(tmp_path / "run", "--max_steps", "4", "--apply_grad_penalty_every", "2")
    assert [line["step"] for line in metrics(run) if "gradient_penalty" in line] == [2, 4]


def test_the_model_that_is_left_loads_in_one_line_and_is_the_average(finished: Path) -> None:
    """The public trainer's EMA file could not be loaded."""
    model = VQGAN.from_pretrained(finished / "model")
    images = valid_images()
    with torch.no_grad():
        quality = psnr(images, model.decode(model.encode(images))).mean().item()
    assert quality == pytest.approx(metrics(finished)[-1]["valid/ema/psnr"], rel=1e-4)
    assert quality != pytest.approx(metrics(finished)[-1]["valid/psnr"], rel=1e-4)


def valid_images() -> torch.Tensor:
    images = data.open_images("demo:shapes:64", image_size=16, seed=0)
    _, valid = data.split(64, 0.05, 0, at_least=8)
    return torch.stack([data.to_unit_range(images.load(valid[i])) for i in range(len(valid))])


def test_the_decay_of_the_average_is_that_of_the_flag(tmp_path: Path) -> None:
    """The public trainer's flag was unused. With a decay of almost 0 the average is the model itself."""
    run = train(tmp_path / "run", "--max_steps", "3", "--ema_decay", "1e-9")
    last = metrics(run)[-1]
    assert last["valid/ema/psnr"] == pytest.approx(last["valid/psnr"], rel=1e-6)
    run = train(tmp_path / "none", "--max_steps", "1", "--ema_decay", "0")
    assert not any(key.startswith("valid/ema") for key in metrics(run)[-1])


def test_pictures_show_originals_and_reconstructions_of_both_models(finished: Path) -> None:
    names = sorted(path.name for path in (finished / "samples").iterdir())
    assert names == ["step_00000004.png", "step_00000008.png"]
    with Image.open(finished / "samples" / names[0]) as picture:
        assert picture.height >= 3 * 16


def test_a_checkpoint_holds_both_models_their_moments_the_average_and_lecam(finished: Path) -> None:
    """Elsewhere step, average, generators and LeCam's averages are missing."""
    names = set(checkpoint(finished, 8))
    text = " ".join(sorted(names))
    for part in ("generator", "discriminator", "ema", "lecam", "random"):
        assert part in text, (part, sorted(names)[:50])
    for wanted in ("codebook", "code_sums", "exp_avg_sq", "lecam.safetensors: real"):
        assert wanted in text, wanted


# Resuming.


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(finished: Path, tmp_path: Path) -> None:
    """Weights, moments by name, codebook, average, LeCam, generators; optimizers used to be built from Python sets, so
    that a resume gave moments to other weights."""
    for stop in ("2", "6"):  # before and after the discriminator starts
        train(tmp_path / "run", *EIGHT, "--max_steps", stop)
    run = train(tmp_path / "run", *EIGHT)
    ours, expected = checkpoint(run, 8), checkpoint(finished, 8)
    assert set(ours) == set(expected)
    assert [name for name in ours if not torch.equal(ours[name], expected[name])] == []
    at_last = {key for line in metrics(run) for key in line if key.startswith("valid")}  # each stop validates as well
    lines = [[{k: v for k, v in line.items() if k not in at_last} for line in without_clocks(metrics(path))]
             for path in (run, finished)]  # fmt: skip
    assert lines[0] == lines[1]


def test_a_start_without_a_terminal_asks_nothing(tmp_path: Path) -> None:
    """The public trainer asked on every rank, at a prompt, whether to delete what is there."""
    command = [sys.executable, "train_vqgan.py", *flags(tmp_path / "run", "--max_steps", "1")]
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    assert "this run is finished" in done.stderr + done.stdout


def test_the_optimizers_walk_their_models_weights_in_order(tmp_path: Path) -> None:
    """A set's order changes from process to process."""
    args = train_vqgan.build_parser().parse(flags(tmp_path))
    for build in (train_vqgan.build_model, train_vqgan.build_discriminator):
        model, again = build(args), build(args)
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in again.named_parameters()]
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_another_model_is_refused_on_resume(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    train(tmp_path / "run", "--max_steps", "1")
    assert "--codebook_size was 64 and is now 128" in refused(capsys, tmp_path / "run", "--codebook_size", "128")


def test_the_same_model_in_another_spelling_is_resumed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = train(tmp_path / "run", "--max_steps", "1")
    for step, said in enumerate(
        (["--num_resnet_blocks", "0,1"], ["--discr_dim", "8"], ["--num_resnet_blocks", "1"]), 2
    ):
        train(run, "--max_steps", str(step), *said)
    whole = train(tmp_path / "whole", "--max_steps", "4")
    ours, expected = checkpoint(run, 4), checkpoint(whole, 4)
    assert set(ours) == set(expected) and all(torch.equal(ours[name], expected[name]) for name in ours)
    assert "--num_resnet_blocks was 1 and is now 1,1;" in refused(capsys, run, "--num_resnet_blocks", "1,1")
    assert "--discr_dim was None and is now 4;" in refused(capsys, run, "--discr_dim", "4")
    # Not "--discr_dim was None and is now None" beside it.
    assert "another run: --dim was 8 and is now 4; use" in refused(capsys, run, "--dim", "4")


def test_training_starts_from_the_weights_of_another_run(finished: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "run", "--max_steps", "1", "--quantizer", "vq", "--init_from", str(finished / "model"),
                "--learning_rate", "1e-12", "--ema_decay", "0")  # fmt: skip
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (run, finished))
    name = "encoder.0.weight"
    torch.testing.assert_close(ours[name], theirs[name])


def test_convert_carries_the_weights_to_a_folder_and_into_a_new_run(finished: Path, tmp_path: Path) -> None:
    convert.main(["export", str(finished), str(tmp_path / "model"), "--to", "model"])
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == (
        finished / "model" / "model.safetensors"
    ).read_bytes()
    convert.main(["import", str(tmp_path / "model"), str(tmp_path / "more")])
    start = ["--config", str(tmp_path / "more" / "start.yaml"), "--discr_layers", "2", "--image_folder",
             "demo:shapes:64", "--batch_size", "8", "--num_workers", "0", "--max_steps", "1",
             "--learning_rate", "1e-12", "--vq_decay", "0.8", "--ema_decay", "0"]  # fmt: skip
    train_vqgan.main(start)
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path / "more", finished))
    torch.testing.assert_close(ours["decoder.0.weight"], theirs["decoder.0.weight"])


# Data and mistakes.


def test_truncated_images_are_named_counted_and_replaced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """They ended the public trainer."""
    folder = tmp_path / "images"
    folder.mkdir()
    noise = torch.randint(0, 256, (24, 20, 20, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for number, pixels in enumerate(noise):
        Image.fromarray(pixels.numpy()).save(folder / f"{number:02d}.png")
    broken = folder / "07.png"
    broken.write_bytes(broken.read_bytes()[:200])
    run = train(tmp_path / "run", "--image_folder", str(folder), "--max_steps", "6", "--valid_fraction", "0")
    assert metrics(run)[-1]["bad_samples"] == 1
    assert capsys.readouterr().err.count("07.png") == 1


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (["--image_size", "18"], "multiple of 2^num_layers = 4; use 16 or 20"),
        (["--image_size", "8"], "too small for a discriminator of 2 layers, which needs 16"),
        (["--codebook_size", "100"], "100"),
        (["--quantizer", "fsq", "--codebook_size", "100"], "levels"),
        (["--num_resnet_blocks", "1,2,3"], "2 of them"),
        (["--num_resnet_blocks", "a"], "a whole number"),
        (["--gan_weight", "strong"], "adaptive, or a number"),
        (["--perceptual", "lpips", "--perceptual_weights", "nowhere.pth"], "nowhere.pth"),
        (["--init_from", "nowhere"], "nowhere"),
        (["--image_folder", "nowhere"], "nowhere"),
        (
            ["--image_size", "8", "--discr_layers", "1", "--perceptual", "vgg"],
            "at least 16 x 16 pixels, not 3 of 8 x 8",
        ),
        (["--image_size", "8", "--discr_layers", "1", "--lpips_weights", "x.pth"], "at least 16 x 16 pixels"),
        (["--vq_decay", "0.8"], "--vq_decay has no effect with --quantizer lfq; leave it out, or give --quantizer vq"),
        (["--vq_cosine", "--quantizer", "FSQ"], "--vq_cosine has no effect with --quantizer fsq"),
        (["--fsq_levels", "5,5"], "--fsq_levels has no effect with --quantizer lfq"),
        (
            ["--lpips_weights", "x.pth", "--valid_fraction", "0"],
            "--lpips_weights has no effect with --valid_fraction 0",
        ),
        (["--fid_weights", "x.pth", "--valid_fraction", "0"], "or give --valid_fraction above 0"),
    ],
)
def test_a_mistake_gives_one_line(
    said: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert text in refused(capsys, tmp_path / "run", *said)


@pytest.mark.parametrize("in_file", ["vq_decay: 0.5\nvq_cosine: true", "quantizer: fsq\nfsq_levels: '4,4,4'"])
def test_a_config_is_of_use_with_another_quantizer_on_the_command_line(in_file: str, tmp_path: Path) -> None:
    (tmp_path / "vq.yaml").write_text(in_file)
    run = train(tmp_path / "run", "--config", str(tmp_path / "vq.yaml"), "--quantizer", "bsq", "--max_steps", "1")
    # What a run leaves names every flag, and is a config as well.
    again = train(tmp_path / "again", "--config", str(run / "config.yaml"), "--max_steps", "1")
    assert without_clocks(metrics(again)) == without_clocks(metrics(run))


def test_flags_of_a_quantizer_are_taken_beside_a_config_that_chooses_it(tmp_path: Path) -> None:
    (tmp_path / "vq.yaml").write_text("quantizer: vq")
    train(tmp_path / "run", "--config", str(tmp_path / "vq.yaml"), "--vq_decay", "0.5", "--max_steps", "1")


def test_without_images_the_demonstration_runs(tmp_path: Path) -> None:
    args = train_vqgan.build_parser().parse([], demonstration=train_vqgan.DEMO_CONFIG)
    assert args.image_folder.startswith("demo:shapes") and args.output_dir == "runs/vqgan-demo"
    args = train_vqgan.build_parser().parse(["--image_folder", "photos"], demonstration=train_vqgan.DEMO_CONFIG)
    assert args.output_dir == "runs/vqgan" and args.image_size == 256


@pytest.mark.parametrize("name", ["demo", "base", "imagenet256"])
def test_every_config_is_understood(name: str) -> None:
    args = train_vqgan.build_parser().parse(["--config", str(ROOT / "configs" / "vqgan" / f"{name}.yaml")])
    assert train_vqgan.build_model(args).num_codes == args.codebook_size
