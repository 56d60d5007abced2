"""train_decoder.py, beyond what every script does (test_every_script.py)."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sample
from tandem.distributed.engines.arithmetic import SkipGuard
from tandem.models import Decoder
from tandem.models.diffusion.losses import DiffusionLoss, DiffusionLossOutput
from tests.models.test_clip import write_clip
from tests.scripts import (
    DECODER,
    assert_same_bits,
    checkpoint,
    edit_checkpoint,
    files,
    final_weights,
    metrics,
    refusal,
)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


ONE = ["--image_sizes", "8", "--max_steps", "2"]
PICTURE = "samples/step_00000002.png"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return DECODER.train(tmp_path_factory.mktemp("decoder"), "--max_steps", "3")


def test_the_log_has_the_error_of_each_unet_by_quarter_of_the_noise(trained: Path) -> None:
    line = metrics(trained)[-1]
    for number in (1, 2):
        assert line[f"valid/unet{number}/error"] > 0 and line[f"unet{number}/loss"] > 0
        quarters = [line[f"valid/unet{number}/q{quarter}"] for quarter in range(4)]
        # 13 stratified levels: the quarters hold 4, 3, 3 and 3 of them, in some order.
        assert min(quarters) < line[f"valid/unet{number}/error"] < max(quarters)
    assert line["valid/loss"] == pytest.approx(line["valid/unet1/error"] + line["valid/unet2/error"])


def test_only_the_unets_that_are_named_are_trained_and_the_others_keep_every_bit(trained: Path, tmp_path: Path) -> None:
    more = ["--init_from", str(trained / "model"), "--train_unets", "2", "--max_steps", "4"]
    DECODER.train_stopped(1, tmp_path, *more)
    DECODER.train(tmp_path, *more)
    before, after = final_weights(trained), final_weights(tmp_path)
    first = {name for name in before if name.startswith("unets.0.")}
    assert_same_bits({name: after[name] for name in first}, {name: before[name] for name in first})
    assert any(not torch.equal(after[name], before[name]) for name in set(before) - first)
    moments = [path.name for path in (tmp_path / "checkpoints" / "step_00000004").iterdir() if "unet1" in path.name]
    assert moments == [], "a Unet that is not trained has no optimizer"
    assert "unet1/loss" not in metrics(tmp_path)[-1]
    line = DECODER.refused(tmp_path, *more[:2], "--train_unets", "1", "--max_steps", "5")
    assert "--train_unets was 2 and is now 1" in line


def test_the_bits_of_a_drawn_level_count_as_those_of_all_levels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nichol and Dhariwal 2021, equation 16."""
    call, made = DiffusionLoss.__call__, list[DiffusionLossOutput]()

    def kept(*args: Any, **options: Any) -> DiffusionLossOutput:
        made.append(call(*args, **options))
        return made[-1]

    monkeypatch.setattr(DiffusionLoss, "__call__", kept)
    said = ["--learned_variance", "1", "--vb_loss_weight", "0.5", "--timesteps", "30", "--max_steps", "1"]
    run = DECODER.train(tmp_path, "--image_sizes", "8", *said)
    error, bits = (float(losses.detach().mean()) for losses in (made[0].weighted, made[0].bits))
    assert metrics(run)[0]["unet1/loss"] == pytest.approx(error + 0.5 * 30 * bits) and bits > 0


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a tiny CLIP."""
    return write_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def other_clip(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of one with other weights."""
    flags = write_clip(tmp_path_factory.mktemp("other"))
    save_file({name: tensor + 0.01 for name, tensor in load_file(flags[3]).items()}, flags[3])
    return flags


def test_clip_compares_pictures_with_captions_and_images_where_an_evaluation_is_due(
    clip: list[str], tmp_path: Path
) -> None:
    """Evaluations have their own steps, where no validation is due."""
    said = ["--condition_on", "image,text", "--n_evaluation_samples", "5", "--evaluate_every_n_steps", "2", *clip]
    text = DECODER.output_of(tmp_path, "--max_steps", "3", *said)
    assert text.count("--fid_weights") == text.count("--lpips_weights") == 1  # what needs them is not measured
    lines = metrics(tmp_path)
    assert ["valid/clip_score" in line for line in lines] == [False, True, True]
    assert ["valid/loss" in line for line in lines] == [False, False, True]
    assert -1 <= lines[-1]["valid/clip_score"] <= 1 and -1 <= lines[-1]["valid/clip_image_score"] <= 1


def test_the_model_says_which_clip_it_was_trained_with_and_no_other_one_goes_on(
    clip: list[str], other_clip: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = DECODER.train(tmp_path / "run", *ONE, *clip)
    origin = {"name": "tiny.json", "weights": "tiny.safetensors", "sha256": sha256(Path(clip[3]).read_bytes())}
    assert Decoder.from_pretrained(run / "model").config["clip"] == origin
    for said in (other_clip, []):
        assert "another --clip" in DECODER.refused(run, *ONE, *said, "--image_embed_scale", "0", "--max_steps", "3")
    moved = Path(shutil.copy(clip[3], tmp_path / "renamed.safetensors"))
    DECODER.train(run, *ONE, clip[0], clip[1], "--clip_weights", str(moved), "--max_steps", "3")
    edit_checkpoint(run / "checkpoints" / "step_00000003", lambda parts: parts["models"]["decoder"].pop("clip"))
    DECODER.train(run, *ONE, *clip, "--max_steps", "4")  # a checkpoint of an earlier version does not say it
    draws = ["--model", str(run), "--prompts", "a text", "--sample_timesteps", "2", "--num_workers", "0"]
    line = refusal(sample.main, *draws, "--output", str(tmp_path / "refused"))
    assert all(text in line for text in ("tiny.json as --clip", "tiny.safetensors", origin["sha256"]))
    capsys.readouterr()
    for said, is_told in ((clip, False), (other_clip, True)):
        sample.main([*draws, *said, "--output", str(tmp_path / f"pictures{is_told}")])
        assert (f"{other_clip[3]} is not the file with which {run} was trained" in capsys.readouterr().out) == is_told


def test_a_decoder_that_was_trained_with_another_clip_than_that_of_the_run_is_told(
    clip: list[str], other_clip: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = DECODER.train(tmp_path / "first", *ONE, *clip, "--max_steps", "1")
    theirs, ours = (sha256(Path(each[3]).read_bytes()) for each in (clip, other_clip))
    capsys.readouterr()
    for name, said, told in (
        ("another", other_clip, f"(SHA-256 {theirs}), this run has tiny.json and tiny.safetensors (SHA-256 {ours})"),
        ("the same", clip, None),
    ):
        DECODER.train(tmp_path / name, *ONE, *said, "--init_from", str(first), "--max_steps", "1")
        printed = "".join(capsys.readouterr())
        assert (f"{first} was trained with --clip tiny.json" in printed) == (told is not None)
        assert told is None or told in printed
    DECODER.train(tmp_path / "another", *ONE, *other_clip, "--init_from", str(first), "--max_steps", "2")
    assert "was trained with --clip" not in "".join(capsys.readouterr()), "it goes on"


def test_a_unet_is_trained_and_its_gradient_clipped_as_if_it_were_alone(tmp_path: Path) -> None:
    """Also if the Unets that are trained have one between them that is not."""
    said = ["--image_sizes", "8", "16", "32", "--max_steps", "2", "--max_grad_norm", "1e-3"]
    for numbers in (["1"], ["1", "3"]):
        DECODER.train(tmp_path / "".join(numbers), *said, "--train_unets", *numbers)
    alone, both = final_weights(tmp_path / "1"), final_weights(tmp_path / "13")
    same = {name for name in alone if torch.equal(alone[name], both[name])}
    assert {name for name in alone if name.startswith(("unets.0.", "unets.1."))} <= same < alone.keys()
    line = metrics(tmp_path / "13")[-1]
    assert line["unet3/grad_norm"] > 1e-3 < line["unet1/grad_norm"] and "unet2/loss" not in line


def test_an_update_that_one_unet_skipped_is_in_the_average_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = ["--max_steps", "2", "--save_every_n_steps", "1", "--ema_decay", "0.9"]
    expected = DECODER.train(tmp_path / "expected", *said)
    weighted_loss, guards = SkipGuard.weighted_loss, list[SkipGuard]()

    def poisoned(guard: SkipGuard, *args: Any) -> torch.Tensor:
        guards.append(guard)
        is_second_of_first_unet = guard is guards[0] and guards.count(guard) == 2
        return weighted_loss(guard, *args) * (torch.nan if is_second_of_first_unet else 1)

    monkeypatch.setattr(SkipGuard, "weighted_loss", poisoned)
    run = DECODER.train(tmp_path / "run", *said)
    assert metrics(run)[-1]["skipped_updates"] == 1
    whole, before, found = checkpoint(expected, 2), checkpoint(expected, 1), checkpoint(run, 2)
    for start, reference in (("ema: weights/unets.0.", before), ("ema: weights/unets.1.", whole)):
        names = [name for name in found if name.startswith(start)]
        assert_same_bits({name: found[name] for name in names}, {name: reference[name] for name in names})
    state = json.loads((run / "checkpoints" / "step_00000002" / "state.json").read_text())
    assert state["parts"]["ema"]["updates"] == {"unets.0.": 1, "unets.1.": 2}


def test_the_scale_of_guidance_reaches_the_pictures(tmp_path: Path) -> None:
    runs = [DECODER.train(tmp_path / scale, *ONE, "--cond_scale", scale) for scale in ("1", "3")]
    weights, pictures = ([files(run)[name] for run in runs] for name in ("model/model.safetensors", PICTURE))
    assert weights[0] == weights[1] and pictures[0] != pictures[1]


def test_a_run_has_a_value_for_each_unet_however_its_flags_are_written() -> None:
    parser, sizes = DECODER.module.build_parser(), ["--image_sizes", "8", "16"]
    one = ["--dim", "8", "--dim_mults", "1,2", "--random_crop_sizes", "4", "--cond_scale", "2"]
    each = [
        "--dim", "8", "8", "--cond_dim", "8", "8", "--dim_mults", "1,2", "1,2", "--random_crop_sizes", "0", "4",
        "--cond_scale", "2", "2",
    ]  # fmt: skip
    settings = parser.settings(parser.parse([*sizes, *one]))
    assert settings == parser.settings(parser.parse([*sizes, *each]))
    assert settings["dim_mults"] == ["1,2", "1,2"] and settings["random_crop_sizes"] == [0, 4]
    alone = parser.parse([*one[:4], "--image_sizes", "8"])
    assert (alone.dim, alone.cond_dim, alone.random_crop_sizes) == ([8], [8], [0])


def test_one_size_of_crops_is_that_of_the_upsampling_unets(tmp_path: Path) -> None:
    """And what is blurred by how much depends on no micro-batches."""
    crops = ["--random_crop_sizes", "4"]
    runs = {"one": crops, "list": ["--random_crop_sizes", "0", "4"], "parts": [*crops, "--grad_accum_steps", "2"],
            "whole": []}  # fmt: skip
    said = ["--max_steps", "1", "--blur_prob", "0.9", "--blur_sigma", "0.2", "1.5"]
    one, listed, parts, whole = (DECODER.train(tmp_path / name, *said, *more) for name, more in runs.items())
    assert_same_bits(final_weights(one), final_weights(listed))
    for key in ("unet2/loss", "unet2/grad_norm"):  # fp32 rounds sums over other parts otherwise
        expected, ours, other = (metrics(run)[0][key] for run in (one, parts, whole))
        assert ours == pytest.approx(expected, rel=1e-5) and other != pytest.approx(expected, rel=1e-3)
    first = [{n: t for n, t in final_weights(run).items() if n.startswith("unets.0.")} for run in (whole, one)]
    assert_same_bits(*first)
